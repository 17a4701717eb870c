"""The short convolution over devices against its sum, tap by tap, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution_by_taps import continued, truth
from implementations import quick_jit
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import burst_jax
from burst_jax import linear

SLOW = pytest.mark.slow


def drawn(n, layout, taps, run, documents=True):
    rng = np.random.default_rng(n)
    length = n * run * (2 if layout == "zigzag" else 1)
    x, dy = rng.standard_normal((2, 2, length, 6)).astype(np.float32)
    ids: Any = None
    if documents:
        # Ids come again, and padding is in and between documents.
        ids = np.cumsum(rng.random((2, length)) < 0.15, 1) % 3 + 1
        ids = np.where(rng.random((2, length)) < 0.15, 0, ids).astype(np.int32)
    return x, rng.standard_normal((taps, 6)).astype(np.float32), ids, dy


def results(call, x, weight, ids, dy, n, layout):
    @quick_jit
    def run(x, weight, dy):
        x, dy = burst_jax.to_layout((x, dy), layout, n)
        given = None if ids is None else burst_jax.to_layout(jnp.asarray(ids), layout, n)
        y, vjp = jax.vjp(lambda x, weight: call(x, weight, given), x, weight)
        dx, dweight = vjp(dy)
        return *burst_jax.from_layout((y, dx), layout, n), dweight

    return run(x, weight, dy)


def on_mesh(n, layout):
    mesh = mesh_of(seq=n)
    return lambda x, weight, ids: linear.short_convolution(
        x, weight, mesh=mesh, layout=layout, segment_ids=ids
    )


# [devices, layout, taps, tokens of a run]: runs shorter than what is read before them, too.
CASES = [
    (1, "contiguous", 4, 20),
    (3, "zigzag", 4, 5),
    (4, "contiguous", 4, 2),
    *((2, "contiguous", 4, 7), (8, "zigzag", 4, 3), (5, "zigzag", 4, 1), (7, "contiguous", 2, 9)),
    *((3, "contiguous", 1, 4), (2, "zigzag", 6, 1), (5, "contiguous", 3, 30)),
]


@pytest.mark.parametrize(
    ("n", "layout", "taps", "run", "documents"),
    [pytest.param(*each, True, marks=() if i < 3 else SLOW) for i, each in enumerate(CASES)]
    # Without documents: on one device, and in both layouts.
    + [(*each, False) for each in CASES[:3]],
)
def test_as_exact_as_float64(n, layout, taps, run, documents):
    x, weight, ids, dy = drawn(n, layout, taps, run, documents)
    want = truth(x, weight, ids, dy)
    got = results(on_mesh(n, layout), x, weight, ids, dy, n, layout)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5)
    if ids is not None:  # Padding may hold anything.
        padding = (ids == 0)[..., None]
        bad, bad_dy = (np.where(padding, np.nan, a).astype(np.float32) for a in (x, dy))
        again = results(on_mesh(n, layout), bad, weight, ids, bad_dy, n, layout)
        for g, w in zip(again, got, strict=True):
            np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(
    ("n", "layout", "taps", "run"),
    [
        pytest.param(*each, marks=() if i < 3 else SLOW)
        for i, each in enumerate(((2, "zigzag", 1, 4), (3, "zigzag", 4, 5), (4, "zigzag", 4, 2),
                                  (1, "contiguous", 4, 9), (1, "contiguous", 1, 9),
                                  (5, "contiguous", 3, 4), (8, "contiguous", 6, 3)))
    ],
)  # fmt: skip
def test_tails_before_and_after(n, layout, taps, run):
    """Sequences with padding in front and at the end, inside documents, and nothing but padding."""
    x, weight, ids, dy = drawn(n, layout, taps, run)
    x, dy, ids = (np.concatenate([a, a[:, ::-1]]) for a in (x, dy, ids))
    length = x.shape[1]
    ids[0, : length // 2], ids[1, -2:], ids[2] = 0, 0, 0
    tail, dtail = np.random.default_rng(0).standard_normal((2, 4, taps - 1, 6)).astype(np.float32)
    mesh = mesh_of(seq=n)

    @quick_jit
    def results(x, weight, tail, dy):
        placed = [burst_jax.to_layout(jnp.asarray(a), layout, n) for a in (x, dy, ids)]
        (y, after), vjp = jax.vjp(
            lambda x, weight, tail: linear.short_convolution(
                x, weight, mesh=mesh, layout=layout, segment_ids=placed[2], initial_tail=tail,
                return_final_tail=True,
            ),
            placed[0], weight, tail,
        )  # fmt: skip
        dx, dweight, dbefore = vjp((placed[1], jnp.asarray(dtail)))
        y, dx = burst_jax.from_layout((y, dx), layout, n)
        return y, after, dx, dweight, dbefore

    got = results(x, weight, tail, dy)
    for g, w in zip(got, continued(x, weight, ids, tail, dy, dtail), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5)
    assert taps == 1 or not np.allclose(got[1][3], got[1][0])
    np.testing.assert_array_equal(got[1][2], tail[2])


def test_wrong_tails():
    x, weight = jnp.zeros((2, 8, 6)), jnp.zeros((4, 6))
    wrong: Any = (
        ({"initial_tail": x[:, :4]}, ValueError, "initial_tail has 4 tokens, and weight 4 taps: p"),
        ({"initial_tail": x[:, :0]}, ValueError, "initial_tail has 0 tokens, and weight 4 taps: p"),
        ({"initial_tail": x[:, :3, :0]}, ValueError, "initial_tail has shape .*no empty dimension"),
        ({"initial_tail": x[:1, :3]}, ValueError, "initial_tail has shape .*, x has B = 2"),
        ({"initial_tail": x[:, :3].astype(int)}, ValueError, "initial_tail has dtype int32: cast"),
        ({"return_final_tail": 1}, ValueError, "return_final_tail is 1: it must be True or False"),
        ({"return_final_tail": True, "layout": "balanced:4"}, NotImplementedError,
         "return_final_tail is given with layout 'balanced:4', in which the first"),
    )  # fmt: skip
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            linear.short_convolution(x, weight, **change)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map(check_vma):
    """The weight's gradient is that of all tokens."""
    n, layout = 2, "zigzag"
    x, weight, ids, dy = drawn(n, layout, 4, 5)
    call = jax.shard_map(
        lambda *a: linear.short_convolution(
            *a[:2], segment_ids=a[2], axis_name="seq", layout=layout
        ),
        mesh=mesh_of(seq=n), in_specs=(P(None, "seq"), P(), P(None, "seq")),
        out_specs=P(None, "seq"), check_vma=check_vma,
    )  # fmt: skip
    got = results(call, x, weight, ids, dy, n, layout)
    for g, w in zip(got, truth(x, weight, ids, dy), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5)


def test_sums_are_float32_ones():
    """bfloat16 tokens: one rounding of the result; a weight's gradient sums many terms."""
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.standard_normal((1, 4000, 2)), jnp.bfloat16), np.float32)
    weight = np.asarray(jnp.asarray(rng.standard_normal((4, 2)), jnp.bfloat16), np.float32)
    dy = np.ones_like(x)
    y, vjp = jax.vjp(linear.short_convolution, *(jnp.asarray(a, jnp.bfloat16) for a in (x, weight)))
    _, dweight = vjp(jnp.asarray(dy, jnp.bfloat16))
    want = truth(x, weight, None, dy)
    np.testing.assert_allclose(np.asarray(y, np.float64), want[0], rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(np.asarray(dweight, np.float64), want[2], rtol=2**-8, atol=1e-4)
