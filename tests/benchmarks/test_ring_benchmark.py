"""``benchmarks ring``: all strategies agree, and wrong results are not timed."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math

import jax
import pytest
from implementations import QUICK

import burst_jax
from benchmarks import ring
from benchmarks.kernels import Case
from benchmarks.results import Results, Row

N = 4
CAUSAL = Case("causal", 1, 128, 8, 4, 16, is_causal=True)
FULL = Case("full", 1, 128, 8, 4, 16)
WINDOW = Case("window", 2, 128, 8, 4, 16, is_causal=True, window=20)
OURS = (
    "one GPU", "every GPU alone", "zigzag", "zigzag, rotate_kv", "zigzag, rotate_query",
    "zigzag, NCCL", "striped", "contiguous", "two-level ring", "hybrid, ulysses of 2",
    "ulysses",
)  # fmt: skip


DENSE = ("one GPU, cuDNN", "all-gather, cuDNN", "Ulysses, cuDNN")


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
    monkeypatch.setattr(ring, "require_gpus", lambda *_: None)
    with jax.numpy_dtype_promotion("standard"):  # For JAX's own attention.
        yield


@pytest.mark.parametrize(
    ("case", "names"),
    [
        pytest.param(CAUSAL, OURS + DENSE, id="causal", marks=pytest.mark.slow),  # fifteen programs
        pytest.param(FULL, ("one GPU", *DENSE), id="full", marks=pytest.mark.slow),
        pytest.param(WINDOW, ("one GPU", "contiguous"), id="window", marks=pytest.mark.slow),
    ],
)
def test_all_strategies_agree(case, names, quick):
    inputs, noted, memory = ring.RingInputs(case, N), {}, {}
    makers = ring.strategies(case, N)
    assert set(OURS + DENSE) == set(makers)
    for name in names:
        make = makers[name]
        row = ring.measure(inputs, name, make)
        if row.note:
            noted[name] = row.note
            continue
        alone = name in (ring.ALONE, ring.ALL_ALONE)
        assert (row.error == 0) == alone or name == "ulysses"
        assert row.error < ring._TOLERANCE
        assert row.memory > 0
        memory[name] = row.memory
        # The work per GPU.
        share = 1e-12 * case.flops() / (1 if alone or name == "one GPU, cuDNN" else N)
        assert row.forward == pytest.approx(share / 2.0)
        assert row.both == pytest.approx(3.5 * share / 0.5)
    if case is CAUSAL:
        assert noted.pop("all-gather, cuDNN").startswith("NotImplementedError: cuDNN through JAX")
    assert not noted


def test_every_case_names_existing_strategies():
    for case, names in ring.CASES:
        assert set(names) <= set(ring.strategies(case, N))
        assert case.name.startswith(("16K", "64K", "128K", "window", "1M"))


@pytest.mark.parametrize(
    "wrong",
    [pytest.param("out", marks=pytest.mark.slow), "out, forward alone", "dk"],
)
def test_wrong_results_are_not_timed(wrong, quick, monkeypatch):
    inputs = ring.RingInputs(CAUSAL, N)
    programs, gib = [], ring.gib
    monkeypatch.setattr(ring, "gib", lambda program: programs.append(program) or gib(program))
    first = ring.measure(inputs, ring.ALONE, lambda: ring.alone(CAUSAL))
    assert not first.note
    # The memory is that of forward and backward, whose program has four results.
    assert len(jax.tree.leaves(programs[0].out_tree.unflatten([0] * 4))) == 4
    strategy = ring.ring(CAUSAL, N)

    def attend(q, k, v):
        stop = jax.lax.stop_gradient
        if wrong == "out":
            out = strategy.attend(q, k, v)
            return out + 0.1 * stop(out)
        return strategy.attend(q, 1.1 * k - 0.1 * stop(k), v)

    if wrong == "out, forward alone":
        attend = jax.custom_vjp(lambda q, k, v: 1.1 * strategy.attend(q, k, v))
        attend.defvjp(lambda *arrays: jax.vjp(strategy.attend, *arrays), lambda vjp, do: vjp(do))
    row = ring.measure(inputs, "off", lambda: dataclasses.replace(strategy, attend=attend))
    assert row.note == f"wrong: {wrong.split(',')[0]}; not timed"
    assert math.isnan(row.forward)


def test_unsupported_strategies():
    for make, message in (
        (lambda: ring.ulysses(CAUSAL, 3), "4 key heads for 3 devices"),
        (lambda: ring.all_gather(CAUSAL, N), "cuDNN through JAX has no offset of the first query"),
        (ring.strategies(CAUSAL, 3)["two-level ring"], "3 devices cannot form a ring of two level"),
        (ring.strategies(CAUSAL, 3)["hybrid, ulysses of 2"], "3 devices cannot form a ring of pai"),
        (ring.strategies(CAUSAL, 2)["hybrid, ulysses of 2"], "2 devices cannot form a ring of pai"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            make()


def test_results_are_printed_and_saved(tmp_path, monkeypatch, capsys, quick):
    monkeypatch.setattr(ring, "CASES", ((CAUSAL, OURS),))
    monkeypatch.setattr(ring, "matmul_ceiling", lambda dtype: 5.0)
    devices = jax.devices()[:N]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    names = [ring.ALONE, "zigzag"]
    ring.run(argparse.Namespace(cases=[0], strategies=names, json=tmp_path / "a.json", png=None))
    loaded = Results.load(tmp_path / "a.json")
    assert loaded.devices == N
    assert [row.peer for row in loaded.rows] == names
    printed = capsys.readouterr().out
    assert "4 x cpu" in printed
    assert printed.count("(100 %)") == 2


def test_unknown_strategies():
    with pytest.raises(SystemExit, match=r"--strategies \['zigag'\]: these cases have .*zigzag"):
        ring.run(argparse.Namespace(cases=[0], strategies=["zigzag", "zigag"]))


def test_rates_are_fractions_of_one_gpu():
    own = Row("case", ring.ALONE, 600.0, 500.0, 0.0, memory=1.0)
    line = ring._line(Row("case", "zigzag", 582.0, 475.0, 1e-3, memory=0.5), own)
    assert "582 ( 97 %)" in line
    assert "475 ( 95 %)" in line
    assert "%" not in ring._line(own, None)
    assert "no" in ring._line(Row("case", "x", note="no"), own)
