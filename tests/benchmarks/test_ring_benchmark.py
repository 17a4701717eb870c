"""``benchmarks ring``: all strategies agree, and wrong results are not timed."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from implementations import QUICK

import burst_jax
from benchmarks import ring
from benchmarks.__main__ import main
from benchmarks.kernels import Case
from benchmarks.results import Results

CAUSAL = Case("causal", 1, 64, 8, 4, 16, is_causal=True)
FULL = Case("full", 2, 64, 8, 4, 16)


def seconds(call, rounds):
    """Instead of a clock: 2 s for an array, 0.5 s for a dict of results."""
    del rounds
    return 0.5 if isinstance(call(), dict) else 2.0


@pytest.fixture
def quick(monkeypatch):
    """XLA's attention instead of cuDNN, unoptimized programs, and no timing."""

    def dense(case):
        return functools.partial(jax.nn.dot_product_attention, **case.options)

    monkeypatch.setattr(ring, "cudnn", dense)
    monkeypatch.setattr(burst_jax, "compiler_options", lambda **_: QUICK)
    monkeypatch.setattr(ring, "median_time", seconds)
    monkeypatch.setattr(ring, "matmul_ceiling", lambda dtype: 5.0)
    monkeypatch.setattr(ring, "require_gpus", lambda *_: None)
    with jax.numpy_dtype_promotion("standard"):  # For JAX's own attention.
        yield


def test_every_strategy_traces(monkeypatch):
    def in_place_of_cudnn(case, *arrays):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(*arrays, **case.options)

    # cuDNN needs CUDA; XLA's attention has the same shapes.
    monkeypatch.setattr(ring, "cudnn", lambda case: functools.partial(in_place_of_cudnn, case))
    makers = ring.strategies(FULL, 4)
    for name, make in makers.items():
        strategy = make()
        arrays = [
            jax.ShapeDtypeStruct((strategy.copies * 2, 64, heads, 16), jnp.bfloat16)
            for heads in (8, 4, 4)
        ]
        assert jax.eval_shape(strategy.attend, *arrays) == arrays[0], name
        assert strategy.mesh.size == (1 if name.startswith("one GPU") else 4), name
    for case, names in ring.CASES:
        assert set(names) <= set(makers)
        assert case.name.startswith(("16K", "64K", "128K", "window", "1M"))


@pytest.mark.slow
def test_results_are_checked_printed_and_saved(tmp_path, monkeypatch, capsys, quick):
    devices, programs, gib = jax.devices()[:2], [], ring.gib
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(ring, "gib", lambda program: programs.append(program) or gib(program))
    alone = ring.alone(CAUSAL)
    # The program of the forward pass alone differs from that with the gradients.
    forward = jax.custom_vjp(lambda *arrays: 1.1 * alone.attend(*arrays))
    forward.defvjp(lambda *arrays: jax.vjp(alone.attend, *arrays), lambda vjp, do: vjp(do))

    def gradient(q, k, v):
        return alone.attend(q, 1.1 * k - 0.1 * jax.lax.stop_gradient(k), v)

    makers = {
        ring.ALONE: lambda: alone,
        "zigzag": lambda: ring.ring(CAUSAL, 2),
        "wrong forward": lambda: dataclasses.replace(alone, attend=forward),
        "wrong gradient": lambda: dataclasses.replace(alone, attend=gradient),
    }
    monkeypatch.setattr(ring, "strategies", lambda *_: makers)
    monkeypatch.setattr(ring, "CASES", ((CAUSAL, (*makers, "striped")),))
    options = ["--cases", "0", "--strategies", *makers, "--json", str(tmp_path / "a.json")]
    main(["ring", *options])
    loaded = Results.load(tmp_path / "a.json")
    assert loaded.devices == 2
    assert [row.peer for row in loaded.rows] == [*makers]
    notes = ["", "", "wrong: out; not timed", "wrong: dk; not timed"]
    assert [row.note for row in loaded.rows] == notes
    for row in loaded.rows:
        assert math.isnan(row.forward) == bool(row.note)
        assert row.memory > 0
    own, zigzag = loaded.rows[:2]
    assert (own.error, own.forward) == (0, 2 * zigzag.forward)
    assert 0 < zigzag.error < ring.TOLERANCE["bfloat16"]
    # The memory is that of forward and backward, whose program has four results.
    assert len(jax.tree.leaves(programs[0].out_tree.unflatten([0] * 4))) == 4
    printed = capsys.readouterr().out
    assert "2 x cpu" in printed
    assert printed.count("(100 %)") == 2
    assert printed.count("( 50 %)") == 2
    assert "%" not in ring._line(own, None)


def test_unsupported_strategies():
    for make, message in (
        (lambda: ring.ulysses(CAUSAL, 3), "4 key heads for 3 devices"),
        (lambda: ring.all_gather(CAUSAL, 4), "cuDNN through JAX has no offset of the first query"),
        (ring.strategies(CAUSAL, 3)["two-level ring"], "3 devices cannot form a ring of two level"),
        (ring.strategies(CAUSAL, 3)["ring + Ulysses of 2"], "3 devices cannot form a ring of pai"),
        (ring.strategies(CAUSAL, 2)["ring + Ulysses of 2"], "2 devices cannot form a ring of pai"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            make()
