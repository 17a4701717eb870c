"""``benchmarks kernels``: FLOPs, float64 reference, and wrong results that are not timed."""

from __future__ import annotations

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


def unmasked(case):
    ids = case.segment_ids()
    window = case.options["local_window_size"]
    mask = dense.Mask(case.is_causal, window, segments=ids is not None)
    return mask.dense(ids, ids, case.length, case.length)[0]


def test_scores_are_the_unmasked_ones():
    """Causal masks count as half, without half of the diagonal, as is usual."""
    for case in (SMALL, PACKED, WINDOW, FULL):
        diagonal = case.length / 2 if case.is_causal and case.window is None else 0
        assert case.scores() == unmasked(case).sum() - diagonal, case.name


def test_per_head_parameters():
    """ALiBi slopes are 2^-8/N, 2^-16/N, ... 2^-8."""
    np.testing.assert_allclose(SLOPES.per_head()["alibi_slopes"], [2**-2, 2**-4, 2**-6, 2**-8])
    assert SINKS.per_head()["sink_logits"].shape == (4,)
    assert FULL.per_head() == {}


EVERY = [SMALL, PACKED, WINDOW, FULL, SINKS, SLOPES]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_the_reference_is_dense_attention(case, monkeypatch):
    monkeypatch.setattr(truth, "_ROWS", 32)
    rng, groups = np.random.default_rng(0), 2
    q, do = rng.normal(size=(2, case.length, groups, case.head_dim)).astype(np.float32)
    k, v = rng.normal(size=(2, case.length, case.head_dim)).astype(np.float32)
    left, right = case.options["local_window_size"] or (None, None)
    spec = AttentionSpec.of(case.head_dim**-0.5, left, 0 if case.is_causal else right)
    ids = case.segment_ids()
    tokens = jnp.arange(case.length, dtype=jnp.int32), None if ids is None else ids[:1]
    parameters = {name: x[:groups] for name, x in case.per_head().items()}
    got = truth.attention_and_gradients(spec, *tokens, q, k, v, do, parameters)
    dlse = np.zeros((1, case.length, groups), np.float32)
    args = q[None], k[None, :, None], v[None, :, None], unmasked(case)[None], do[None], dlse, None
    distance = dense.distances(case.length, case.length)
    out, _, dq, dk, dv, *_ = dense.truth(*args, parameters, distance)
    for name, want in (("out", out[0]), ("dq", dq[0]), ("dk", dk[0, :, 0]), ("dv", dv[0, :, 0])):
        assert got[name].dtype == np.float64
        np.testing.assert_allclose(got[name], want, rtol=1e-10, atol=1e-12)


def test_the_reference_needs_whole_blocks():
    x = jnp.zeros((1500, 1, 16))
    at = jnp.arange(1500, dtype=jnp.int32)
    with pytest.raises(ValueError, match="the length is 1500: it must be a multiple of 1024"):
        truth.attention_and_gradients(AttentionSpec.of(1.0), at, None, x, x[:, 0], x[:, 0], x)


@pytest.mark.parametrize("case", [SMALL, pytest.param(PACKED, marks=pytest.mark.slow)])
def test_correct_results_are_timed(case, monkeypatch):
    times = iter((0.25, 0.5))

    def median_time(call):
        assert len(jax.tree.leaves(call())) in (1, 4)
        return next(times)

    monkeypatch.setattr(kernels, "median_time", median_time)
    inputs = kernels.KernelInputs(case, jnp.dtype("bfloat16"))
    row = kernels.measure(inputs, "xla", lambda _: kernels.ours(case, "xla"), 1.2e-2)
    assert not row.note
    assert 0 < row.error < 1e-2
    # Two matmuls forward, five backward, of 2 H FLOPs per score.
    product = 2 * case.batch * case.heads * case.head_dim * case.scores()
    assert row.forward == pytest.approx(2 * product / 0.25 * 1e-12)
    assert row.both == pytest.approx(7 * product / 0.5 * 1e-12)


@pytest.mark.parametrize("wrong", ["out", "dq", "dk", "dv"])
def test_wrong_results_are_not_timed(wrong):
    inputs = kernels.KernelInputs(SMALL, jnp.dtype("bfloat16"))
    right = kernels.ours(SMALL, "xla")

    def attend(q, k, v):
        # Only one result is off by a tenth.
        def scaled(x, name):
            stop = jax.lax.stop_gradient(x)
            return x * 1.1 - stop * 0.1 if name == wrong else x

        out = right(scaled(q, "dq"), scaled(k, "dk"), scaled(v, "dv"))
        return out + jax.lax.stop_gradient(out) * 0.1 if wrong == "out" else out

    row = kernels.measure(inputs, "off", lambda _: attend, 1.2e-2)
    assert row.note == f"wrong: {wrong}; not timed"
    assert np.isnan(row.forward)


def test_the_forward_pass_is_checked_separately():
    """Its program differs from that with the gradients."""
    inputs = kernels.KernelInputs(SMALL, jnp.dtype("bfloat16"))
    right = kernels.ours(SMALL, "xla")

    def make(differentiated):
        return right if differentiated else lambda q, k, v: 1.1 * right(q, k, v)

    row = kernels.measure(inputs, "off", make, 1.2e-2)
    assert row.note == "wrong: out; not timed"


def test_unsupported_cases_are_notes():
    inputs = kernels.KernelInputs(PACKED, jnp.dtype("bfloat16"))
    row = kernels.measure(inputs, "cuDNN", lambda _: kernels.cudnn(PACKED), 1.2e-2)
    assert row.note == "NotImplementedError: no segment ids"
    assert "NotImplementedError" in kernels._line(row, 1.0)
    with pytest.raises(NotImplementedError, match="no windows, no grouped heads"):
        kernels.pallas_example(WINDOW, False)


def test_unmasked_bounds_have_the_same_tiles():
    table = jnp.asarray([[[0, 2, 5, 6], [3, 3, 3, 9], [0, 0, 0, 0]]], jnp.int32)
    np.testing.assert_array_equal(
        kernels._unmasked(table), [[[0, 0, 6, 6], [3, 3, 9, 9], [0, 0, 0, 0]]]
    )
