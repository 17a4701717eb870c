"""``benchmarks ring``: all strategies agree, and wrong results are not timed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from implementations import QUICK

import burst_jax
from benchmarks import ring, ring_strategies
from benchmarks.__main__ import main
from benchmarks.kernel_cases import Case
from benchmarks.results import Results
from benchmarks.turns import Turn

CAUSAL = Case("causal", 1, 64, 8, 4, 16, is_causal=True)
FULL = Case("full", 2, 64, 8, 4, 16)
PACKED = Case("packed", 1, 64, 2, 2, 16, is_causal=True, documents=3)
OTHERS = dataclasses.replace(PACKED, name="others", documents=4)


def by_results(calls, *, turns, seconds, clock):
    """Instead of a clock: 0.5 s for one array, 2 s for several results."""
    del seconds, clock
    return {
        name: [Turn(0.5 if isinstance(call(), jax.Array) else 2.0, 1500.0, 600.0)] * turns
        for name, (call, _) in calls.items()
    }


@pytest.fixture
def quick(monkeypatch):
    """Two devices, XLA's attention instead of cuDNN, unoptimized programs, and no timing."""

    def dense(case):
        return functools.partial(jax.nn.dot_product_attention, **case.options)

    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(ring_strategies, "cudnn", dense)
    monkeypatch.setattr(burst_jax, "compiler_options", lambda **_: QUICK)
    # Options of a GPU's compiler.
    steps = ring_strategies.steps
    monkeypatch.setattr(
        ring_strategies, "steps", lambda *a: dataclasses.replace(steps(*a), options=dict(QUICK))
    )
    monkeypatch.setattr(ring, "in_turns", by_results)
    monkeypatch.setattr(ring, "Clock", contextlib.nullcontext)
    monkeypatch.setattr(ring, "matmul_ceiling", lambda dtype: 5.0)
    monkeypatch.setattr(ring, "require_gpus", lambda *_: None)
    with jax.numpy_dtype_promotion("standard"):  # For JAX's own attention.
        yield


def test_every_strategy_traces(monkeypatch):
    def in_place_of_cudnn(case, *arrays):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(*arrays, **case.options)

    # cuDNN needs CUDA; XLA's attention has the same shapes.
    monkeypatch.setattr(
        ring_strategies, "cudnn", lambda case: functools.partial(in_place_of_cudnn, case)
    )
    makers = ring_strategies.strategies(FULL, 4)
    for name, make in makers.items():
        if name in ("balanced", "striped:128"):  # For packed documents.
            continue
        strategy = make()
        arrays = [
            jax.ShapeDtypeStruct((strategy.copies * 2, 64, heads, 16), jnp.bfloat16)
            for heads in (8, 4, 4)
        ]
        assert jax.tree.leaves(jax.eval_shape(strategy.attend, *arrays))[0] == arrays[0], name
        assert strategy.mesh.size == (1 if name.startswith("one GPU") else 4), name
    for case, names in ring.CASES:
        assert set(names) <= set(makers)
        assert case.name.startswith(("8K", "16", "64K", "128K", "window", "1M", "32 doc"))


@pytest.mark.slow
def test_results_are_checked_printed_and_saved(tmp_path, monkeypatch, capsys, quick):
    programs, gib = [], ring.gib
    monkeypatch.setattr(ring, "gib", lambda program: programs.append(program) or gib(program))
    alone = ring_strategies.alone(CAUSAL)
    # The program of the forward pass alone differs from that with the gradients.
    forward = jax.custom_vjp(lambda *arrays: 1.1 * alone.attend(*arrays))
    forward.defvjp(lambda *arrays: jax.vjp(alone.attend, *arrays), lambda vjp, do: vjp(do))

    def gradient(q, k, v):
        return alone.attend(q, 1.1 * k - 0.1 * jax.lax.stop_gradient(k), v)

    of_case = {
        name: ring_strategies.strategies(CAUSAL, 2)[name]
        for name in (ring.ALONE, ring.ALL_ALONE, ring.BLOCKS, ring.STEPS, "zigzag")
    }
    of_case["wrong forward"] = lambda: dataclasses.replace(alone, attend=forward)
    of_case["wrong gradient"] = lambda: dataclasses.replace(alone, attend=gradient)
    of_packed = {
        name: ring_strategies.strategies(PACKED, 2)[name]
        for name in (ring.ALONE, "balanced", "zigzag")
    }
    of_others = ring_strategies.strategies(OTHERS, 2)
    makers = {CAUSAL: of_case, PACKED: of_packed, OTHERS: of_others}
    monkeypatch.setattr(ring, "strategies", lambda case, n: makers[case])
    names = (*of_case, "striped"), (*of_packed,), (ring.ALONE, "zigzag")
    monkeypatch.setattr(ring, "CASES", tuple(zip(makers, names, strict=True)))
    options = ["--cases", "0", "1", "2", "--strategies", *of_case, *of_packed]
    main(["ring", "--turns", "1", *options, "--json", str(tmp_path / "a.json")])
    loaded = Results.load(tmp_path / "a.json")
    assert loaded.devices == 2
    assert [row.peer for row in loaded.rows] == [*of_case, *of_packed, ring.ALONE, "zigzag"]
    notes = [""] * 5 + ["wrong: out; not timed", "wrong: dk; not timed"] + [""] * 5
    assert [row.note for row in loaded.rows] == notes
    for row in loaded.rows:
        assert math.isnan(row.forward) == bool(row.note)
        assert row.memory > 0
        is_part = row.peer in (ring.BLOCKS, ring.STEPS)
        assert math.isnan(row.error) == is_part
        if not is_part and not row.note:
            assert row.error <= ring.TOLERANCE["bfloat16"]
    # Documents are arguments of the program.
    assert programs[-1] is programs[-3]
    assert len(set(map(id, programs))) == len(programs) - 2
    own, everywhere, _, _, zigzag = loaded.rows[:5]
    assert (own.error, own.forward) == (0, 2 * zigzag.forward)
    assert everywhere.forward == own.forward
    assert zigzag.error > 0
    assert (own.mhz, own.watts) == (1500, 600)
    # The memory is that of forward and backward, whose program has four results.
    assert len(jax.tree.leaves(programs[0].out_tree.unflatten([0] * 4))) == 4
    printed = capsys.readouterr().out
    assert "2 x cpu" in printed
    assert printed.count("(100.0%)") == 8
    assert printed.count("( 50.0%)") == 11
    assert "%" not in ring._lines([zigzag])[0]


def test_unsupported_strategies():
    for make, message in (
        (lambda: ring_strategies.ulysses(CAUSAL, 3), "4 key heads for 3 devices"),
        (
            lambda: ring_strategies.all_gather(CAUSAL, 4),
            "cuDNN through JAX has no offset of the first query",
        ),
        (
            ring_strategies.strategies(CAUSAL, 3)["two-level ring"],
            "3 devices cannot form a ring of two level",
        ),
        (
            ring_strategies.strategies(CAUSAL, 3)["ring + Ulysses of 2"],
            "3 devices cannot form a ring of pai",
        ),
        (
            ring_strategies.strategies(CAUSAL, 2)["ring + Ulysses of 2"],
            "2 devices cannot form a ring of pai",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            make()
