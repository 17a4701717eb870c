"""``bench ring``: every way does the same work, is checked before it is timed, and is kept."""

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
    """In a clock's place: two seconds for an array, half a second for a dict of results."""
    del rounds
    return 0.5 if isinstance(call(), dict) else 2.0


@pytest.fixture
def quick(monkeypatch):
    """XLA's own attention in cuDNN's place, programs not optimized, and no time lost on timing."""

    def dense(case):
        return functools.partial(jax.nn.dot_product_attention, **case.options)

    monkeypatch.setattr(ring, "cudnn", dense)
    monkeypatch.setattr(burst_jax, "compiler_options", lambda **_: QUICK)
    monkeypatch.setattr(ring, "median_time", seconds)
    monkeypatch.setattr(ring, "need_gpus", lambda *_: None)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention needs it.
        yield


@pytest.mark.parametrize(
    ("case", "names"),
    [
        pytest.param(CAUSAL, OURS + DENSE, id="causal", marks=pytest.mark.slow),  # fifteen programs
        pytest.param(FULL, ("one GPU", *DENSE), id="full", marks=pytest.mark.slow),
        pytest.param(WINDOW, ("one GPU", "contiguous"), id="window", marks=pytest.mark.slow),
    ],
)
def test_all_ways_agree(case, names, quick):
    problem, noted = ring.Problem(case, N), {}
    makers = ring.ways(case, N)
    assert set(OURS + DENSE) == set(makers)
    for name in names:
        make = makers[name]
        row = ring.measure(problem, name, make)
        if row.note:
            noted[name] = row.note
            continue
        alone = name in (ring.ALONE, ring.ALL_ALONE)
        assert (row.error == 0) == alone or name == "ulysses"
        assert row.error < ring._AGREE
        assert row.memory > 0
        # Every GPU's share of the work; one alone has all of it, or each has a case of its own.
        share = 1e-12 * case.flops() / (1 if alone or name == "one GPU, cuDNN" else N)
        assert row.forward == pytest.approx(share / 2.0)
        assert row.both == pytest.approx(3.5 * share / 0.5)
    if case is CAUSAL:
        assert noted.pop("all-gather, cuDNN").startswith("NotImplementedError: cuDNN through JAX")
    assert not noted


def test_every_case_names_ways_that_exist():
    for case, names in ring.CASES:
        assert set(names) <= set(ring.ways(case, N))
        assert case.name.startswith(("16K", "64K", "128K", "window", "1M"))


@pytest.mark.parametrize(
    "wrong",
    [pytest.param("out", marks=pytest.mark.slow), "out, forward alone", "dk"],
)
def test_what_disagrees_is_not_timed(wrong, quick):
    problem = ring.Problem(CAUSAL, N)
    assert not ring.measure(problem, ring.ALONE, lambda: ring.alone(CAUSAL)).note
    way = ring.ring(CAUSAL, N)

    def attend(q, k, v):
        stop = jax.lax.stop_gradient
        if wrong == "out":
            out = way.attend(q, k, v)
            return out + 0.1 * stop(out)
        return way.attend(q, 1.1 * k - 0.1 * stop(k), v)

    if wrong == "out, forward alone":
        attend = jax.custom_vjp(lambda q, k, v: 1.1 * way.attend(q, k, v))
        attend.defvjp(lambda *arrays: jax.vjp(way.attend, *arrays), lambda vjp, do: vjp(do))
    row = ring.measure(problem, "off", lambda: dataclasses.replace(way, attend=attend))
    assert row.note == f"wrong: {wrong.split(',')[0]}; not timed"
    assert math.isnan(row.forward)


def test_ways_that_cannot_say_so():
    for make, message in (
        (lambda: ring.ulysses(CAUSAL, 3), "4 key heads for 3 devices"),
        (lambda: ring.all_gather(CAUSAL, N), "masks no queries that start inside the keys"),
        (ring.ways(CAUSAL, 3)["two-level ring"], "3 devices are no two levels"),
        (
            ring.ways(CAUSAL, 3)["hybrid, ulysses of 2"],
            "3 devices are no ring of two or more pairs",
        ),
        (
            ring.ways(CAUSAL, 2)["hybrid, ulysses of 2"],
            "2 devices are no ring of two or more pairs",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            make()


def test_the_command_prints_and_keeps(tmp_path, monkeypatch, capsys, quick):
    monkeypatch.setattr(ring, "CASES", ((CAUSAL, OURS),))
    monkeypatch.setattr(ring, "matmul_ceiling", lambda dtype: 5.0)
    devices = jax.devices()[:N]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    names = [ring.ALONE, "zigzag"]
    ring.run(argparse.Namespace(cases=[0], ways=names, json=tmp_path / "a.json", png=None))
    loaded = Results.load(tmp_path / "a.json")
    assert loaded.devices == N
    assert [row.peer for row in loaded.rows] == names
    printed = capsys.readouterr().out
    assert "4 x cpu" in printed
    assert printed.count("(100 %)") == 2


def test_ways_that_no_case_has_are_named():
    with pytest.raises(SystemExit, match=r"--ways \['zigag'\]: these cases have .*zigzag"):
        ring.run(argparse.Namespace(cases=[0], ways=["zigzag", "zigag"], json=None, png=None))


def test_shares_are_of_one_gpu():
    own = Row("case", ring.ALONE, 600.0, 500.0, 0.0, memory=1.0)
    line = ring._line(Row("case", "zigzag", 582.0, 475.0, 1e-3, memory=0.5), own)
    assert "582 ( 97 %)" in line
    assert "475 ( 95 %)" in line
    assert "%" not in ring._line(own, None)
    assert "cannot" in ring._line(Row("case", "x", note="cannot"), own)


@pytest.mark.parametrize(
    ("platform", "devices", "message"),
    [
        ("cpu", 8, "bench ring needs 2 or more NVIDIA GPUs; JAX runs on 'cpu' here"),
        ("gpu", 1, "bench ring needs 2 or more NVIDIA GPUs; JAX sees 1"),
    ],
)
def test_a_ring_needs_gpus(platform, devices, message, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "devices", lambda: [None] * devices)
    with pytest.raises(SystemExit, match=message):
        ring.run(argparse.Namespace(cases=[0], ways=None, json=None, png=None))


def test_files_that_cannot_be_written_are_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(ring, "need_gpus", lambda *_: None)
    monkeypatch.setattr(ring, "matmul_ceiling", lambda dtype: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for json, message in (
        (tmp_path, "is a folder: name a file in it"),
        (tmp_path / "file" / "a.json", "File exists|Not a directory"),
    ):
        with pytest.raises(SystemExit, match=message):
            ring.run(argparse.Namespace(cases=[0], ways=None, json=json, png=None))
