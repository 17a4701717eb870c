"""The benchmarks measure what they say, and refuse to time what is wrong."""

from __future__ import annotations

import argparse

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernels, truth
from pallas_kernels import AttentionSpec

SMALL = kernels.Case("small", 2, 128, 4, 2, 16, is_causal=True)
PACKED = kernels.Case("packed", 1, 128, 4, 2, 16, is_causal=True, documents=3)
WINDOW = kernels.Case("window", 1, 128, 4, 2, 16, is_causal=True, window=20)
FULL = kernels.Case("full", 1, 128, 4, 4, 16)
SINKS = kernels.Case("sinks", 1, 128, 4, 2, 16, is_causal=True, sinks=True)
SLOPES = kernels.Case("slopes", 1, 128, 4, 2, 16, is_causal=True, slopes=True)


def kept(case):
    ids = case.segment_ids()
    window = case.options["local_window_size"]
    mask = dense.Mask(case.is_causal, window, segments=ids is not None)
    return mask.dense(ids, ids, case.length, case.length)[0]


@pytest.mark.parametrize("case", [SMALL, PACKED, WINDOW, FULL], ids=lambda case: case.name)
def test_scores_are_those_that_count(case):
    """Causal masks are counted as half, without the half of the diagonal, as everywhere."""
    diagonal = case.length / 2 if case.is_causal and case.window is None else 0
    assert case.scores() == kept(case).sum() - diagonal


EVERY = [SMALL, PACKED, WINDOW, FULL, SINKS, SLOPES]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_truth_is_dense_attention(case, monkeypatch):
    monkeypatch.setattr(truth, "_ROWS", 32)
    rng, groups = np.random.default_rng(0), 2
    q, do = rng.normal(size=(2, case.length, groups, case.head_dim)).astype(np.float32)
    k, v = rng.normal(size=(2, case.length, case.head_dim)).astype(np.float32)
    left, right = case.options["local_window_size"] or (None, None)
    spec = AttentionSpec.of(case.head_dim**-0.5, left, 0 if case.is_causal else right)
    ids = case.segment_ids()
    tokens = jnp.arange(case.length, dtype=jnp.int32), None if ids is None else ids[:1]
    numbers = {name: x[:groups] for name, x in case.per_head().items()}
    got = truth.attention_and_gradients(spec, *tokens, q, k, v, do, numbers)
    dlse = np.zeros((1, case.length, groups), np.float32)
    args = q[None], k[None, :, None], v[None, :, None], kept(case)[None], do[None], dlse, None
    distance = dense.distances(case.length, case.length)
    out, _, dq, dk, dv, *_ = dense.truth(*args, numbers, distance)
    for name, want in (("out", out[0]), ("dq", dq[0]), ("dk", dk[0, :, 0]), ("dv", dv[0, :, 0])):
        assert got[name].dtype == np.float64
        np.testing.assert_allclose(got[name], want, rtol=1e-10, atol=1e-12)


def test_truth_needs_whole_blocks_of_rows():
    x = jnp.zeros((1500, 1, 16))
    at = jnp.arange(1500, dtype=jnp.int32)
    with pytest.raises(ValueError, match="the length is 1500: it must be a multiple of 1024"):
        truth.attention_and_gradients(AttentionSpec.of(1.0), at, None, x, x[:, 0], x[:, 0], x)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SMALL, id=SMALL.name),
        pytest.param(PACKED, id=PACKED.name, marks=pytest.mark.slow),
    ],
)
def test_what_is_right_is_timed(case, monkeypatch):
    times = iter((0.25, 0.5))

    def median_time(call):
        assert len(jax.tree.leaves(call())) in (1, 4)
        return next(times)

    monkeypatch.setattr(kernels, "median_time", median_time)
    problem = kernels.Problem(case, jnp.dtype("bfloat16"))
    row = kernels.measure(problem, "xla", lambda _: kernels.ours(case, "xla"), 1.2e-2)
    assert not row.note
    assert 0 < row.error < 1e-2
    # Two products of scores forward, five backward; each score is H multiplications and additions.
    product = 2 * case.batch * case.heads * case.head_dim * case.scores()
    assert row.forward == pytest.approx(2 * product / 0.25 * 1e-12)
    assert row.both == pytest.approx(7 * product / 0.5 * 1e-12)


@pytest.mark.parametrize("wrong", ["out", "dq", "dk", "dv"])
def test_what_is_wrong_is_not_timed(wrong):
    problem = kernels.Problem(SMALL, jnp.dtype("bfloat16"))
    right = kernels.ours(SMALL, "xla")

    def attend(q, k, v):
        # Off by a tenth in one result alone.
        def scaled(x, name):
            stop = jax.lax.stop_gradient(x)
            return x * 1.1 - stop * 0.1 if name == wrong else x

        out = right(scaled(q, "dq"), scaled(k, "dk"), scaled(v, "dv"))
        return out + jax.lax.stop_gradient(out) * 0.1 if wrong == "out" else out

    row = kernels.measure(problem, "off", lambda _: attend, 1.2e-2)
    assert row.note == f"wrong: {wrong}; not timed"
    assert np.isnan(row.forward)


def test_the_forward_is_checked_alone_too():
    """It is another program than the one that makes the gradients."""
    problem = kernels.Problem(SMALL, jnp.dtype("bfloat16"))
    right = kernels.ours(SMALL, "xla")

    def make(differentiated):
        return right if differentiated else lambda q, k, v: 1.1 * right(q, k, v)

    row = kernels.measure(problem, "off", make, 1.2e-2)
    assert row.note == "wrong: out; not timed"


def test_what_a_peer_cannot_do_is_a_line_of_the_table():
    problem = kernels.Problem(PACKED, jnp.dtype("bfloat16"))
    row = kernels.measure(problem, "cuDNN", lambda _: kernels.cudnn(PACKED), 1.2e-2)
    assert row.note == "NotImplementedError: it takes no segment ids"
    assert "NotImplementedError" in kernels._line(row, 1.0)
    with pytest.raises(NotImplementedError, match="neither windows nor grouped heads"):
        kernels.pallas_example(WINDOW, False)


def test_it_needs_a_gpu():
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU; JAX runs on 'cpu' here"):
        kernels.run(argparse.Namespace(dtype="bfloat16", cases=[0], implementations=["xla"]))


def test_unmasked_tables_visit_the_same_tiles():
    table = jnp.asarray([[[0, 2, 5, 6], [3, 3, 3, 9], [0, 0, 0, 0]]], jnp.int32)
    np.testing.assert_array_equal(
        kernels._unmasked(table), [[[0, 0, 6, 6], [3, 3, 9, 9], [0, 0, 0, 0]]]
    )


def test_the_command_line_knows_its_benchmarks(monkeypatch, capsys):
    from benchmarks import __main__ as command

    monkeypatch.setattr("sys.argv", ["bench", "kernels", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    assert "window 4096 of 64K" in " ".join(capsys.readouterr().out.split())
