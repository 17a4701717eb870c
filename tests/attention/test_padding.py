"""Padding: what is in it changes no bit of other tokens' results, and ``pad=True`` makes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import compare
import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import valid_calls as valid
from implementations import IMPLEMENTATIONS, dtype_of, each_of, quick_jit
from jax.sharding import AxisType
from meshes import assert_close, mesh_of, random_like
from ring_cases import a_case, program_of

import burst_jax
from burst_jax.layouts import Balanced
from pallas_kernels import REFERENCE, AttentionInputs
from pallas_kernels.backend import runs_anywhere

RESULTS = ("out", "lse", "dq", "dk", "dv")
# One device, rings of both rotations, two levels and Ulysses, each implementation.
CASES = {
    "xla-3-query": a_case("3", "striped", "packed_window_cap", "rotate_query", "xla", "63"),
    "reference-2-kv": a_case("2", "zigzag", "packed_causal", "rotate_kv", "reference", "63"),
    "xla-2x2+h2": a_case("2x2+h2", "zigzag", "packed_causal", "rotate_kv", "xla", "63"),
}
QUICK = ("reference-2-kv",)


def poisoned(x, segment_ids, rng):
    """``x`` ``[B, T, ...]`` with NaN, infinity and the largest number in its padding."""
    bad = np.array([np.nan, np.inf, -np.inf, jnp.finfo(x.dtype).max], x.dtype)
    noise = bad[rng.integers(0, len(bad), x.shape)]
    padding = (segment_ids == 0).reshape(*segment_ids.shape, *[1] * (x.ndim - 2))
    assert padding.any()
    return np.where(padding, noise, x)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_values_in_padding_change_no_bit(name, request):
    """Packed sequences with padding before, between and after documents; GQA.

    In one call, whose second half of the batch is the first with other padding. There is a document
    of queries without keys, too: their lse is -inf, so a loss of it often has a NaN cotangent.
    """
    program, rng = program_of(CASES[name]), np.random.default_rng(1)
    arrays, (do, dlse) = valid.draw(program, 0)
    ids, kv_ids = arrays["query_segment_ids"], arrays["key_value_segment_ids"]
    lonely = (np.arange(ids.shape[1]) % 5 == 3) & (ids != 0)
    arrays["query_segment_ids"] = ids = np.where(lonely, 999, ids).astype(np.int32)
    dirty = arrays | {name: poisoned(arrays[name], kv_ids, rng) for name in ("key", "value")}
    dirty["query"], *bad = (poisoned(x, ids, rng) for x in (arrays["query"], do, dlse))
    bad[1] = np.where(lonely[..., None], np.float32(np.nan), bad[1])
    cotangents: Any = tuple(np.concatenate(x) for x in zip((do, dlse), bad, strict=True))
    arrays = {name: np.concatenate([x, dirty[name]]) for name, x in arrays.items()}
    jit = request.getfixturevalue("program")
    got = valid.compiled(program, arrays, jit=jit)(arrays, cotangents)
    for result, x in zip(RESULTS, got, strict=True):
        np.testing.assert_array_equal(x[2:], x[:2], err_msg=result)
        nothing = kv_ids == 0 if result in ("dk", "dv") else (ids == 0) | lonely
        assert (x[2:][nothing] == (-np.inf if result == "lse" else 0)).all(), result


@each_of(IMPLEMENTATIONS)
def test_huge_values_in_padding_do_not_overflow(name):
    """Of the lengths in one sequence, of segment ids in the other. Infinity times 0 were NaN."""
    rng, dtype, length = np.random.default_rng(0), dtype_of(name), 16
    ids = np.array([[1] * length, [0] * 2 + [1] * 5 + [2] * 6 + [0] * 3], np.int32)
    lengths = np.array([11, length], np.int32)
    masks: dict[str, Any] = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), lengths)
    masks |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    shapes = ((2, length, heads, 16) for heads in (4, 2, 2, 4))
    q, k, v, do = (jnp.asarray(rng.normal(size=x), dtype) for x in shapes)
    padding = (ids == 0) | (np.arange(length) >= lengths[:, None])
    huge = jnp.where(padding[..., None, None], jnp.finfo(dtype).max, v)
    # In dP the largest number times the cotangent.
    assert jnp.isinf(jnp.einsum("btnh,bsh->bnts", do, huge[:, :, 0])).any((1, 2, 3)).all()
    implementation = dataclasses.replace(IMPLEMENTATIONS[name], unavailable=runs_anywhere)

    @quick_jit
    def run(v):
        def attend(*qkv):
            return burst_jax.local_attention(
                *qkv, is_causal=True, implementation=implementation, **masks
            )

        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(do)

    for got, want in zip(run(huge), run(v), strict=True):
        assert jnp.isfinite(want).all()
        np.testing.assert_array_equal(got, want)


def zeroing_itself(passes):
    """An implementation that zeroes padding by the segment ids it gets, if any.

    ``passes``: False if the forward pass does, True if the backward pass.
    """

    def zeroing(run, backward):
        def zero(x, ids):
            return None if x is None else jnp.where((ids == 0)[:, :, None, None], 0, x)

        def zeroed(inputs, *args, **options):
            if inputs.has_segments:
                query, kv, shared = inputs
                q, do = (zero(x, query.segment_ids) for x in (query.q, query.do))
                k, v = (zero(x, kv.segment_ids) for x in (kv.k, kv.v))
                query, kv = query._replace(q=q, do=do), kv._replace(k=k, v=v)
                inputs = AttentionInputs(query, kv, shared)
            return run(inputs, *args, **options)

        return zeroed if backward in passes else run

    return dataclasses.replace(
        REFERENCE,
        forward=zeroing(REFERENCE.forward, False),
        backward=zeroing(REFERENCE.backward, True),
        zeroes_padding=lambda spec, inputs, *, backward: backward in passes,
    )


PASSES = pytest.mark.parametrize("passes", [(True,), (False,), (False, True)], ids=str)


@PASSES
@pytest.mark.parametrize("sizes", [{"seq": 1}, {"seq": 2, "heads": 2}], ids=str)
def test_kernels_that_zero_padding_themselves(passes, sizes):
    """Others get zeros."""
    implementation: Any = zeroing_itself(passes)
    ids: Any = np.tile(np.repeat(np.array([1, 0, 2, 0], np.int32), [5, 2, 6, 3]), (2, 1))
    rng, sinks = np.random.default_rng(0), jnp.arange(4, dtype=jnp.float32)
    shapes = ((2, 16, heads, 8) for heads in (4, 2, 2, 4))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    @jax.jit
    def run(q, k, v, do):
        def attend(q, k, v, sinks):
            return burst_jax.burst_attention(
                q, k, v, mesh=mesh_of(**sizes), ulysses_axis="heads" if "heads" in sizes else None,
                is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids,
                sink_logits=sinks, implementation=implementation,
            )  # fmt: skip

        out, vjp = jax.vjp(attend, q, k, v, sinks)
        return out, *vjp(do)

    got = run(*(poisoned(x, ids, rng) for x in arrays))
    for x, y in zip(got, run(*arrays), strict=True):
        np.testing.assert_array_equal(x, y)


# Devices, passes, window. Kernels of windows get no segment ids.
ZEROED = [
    (2, (False, True), None),
    (3, (False,), None),
    (5, (True,), None),
    (3, (False, True), 7),
]


@pytest.mark.parametrize(
    ("n", "passes", "window"),
    [pytest.param(*case, marks=() if case[0] == 2 else pytest.mark.slow) for case in ZEROED],
    ids=str,
)
def test_kernels_that_zero_padding_in_a_balanced_layout(n, passes, window):
    """Drawn documents, whole and split, with padding inside of them and between; GQA."""
    rng, length = np.random.default_rng(n), 24 * n
    ids = np.zeros((2, length), np.int32)
    for row in ids:
        # Of this length, so that it is split.
        ends = np.r_[14 * n, 14 * n + np.cumsum(rng.integers(2, 9, length))]
        row[:] = 1 + np.searchsorted(ends, np.arange(length), "right")
        row[rng.random(length) < 0.15] = 0
    layout, order, placed = Balanced(20).order_of(ids, n)
    assert layout.known_zone == 20
    q, k, v, do = (
        rng.normal(size=(2, length, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4)
    )
    is_token = order >= 0
    order = np.maximum(order, 0)
    shards = [np.take_along_axis(x, order[..., None, None], 1) for x in (q, k, v, do)]
    own: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), placed)
    own |= dict.fromkeys(("query_positions", "key_value_positions"), order)
    options: Any = {"is_causal": True, "local_window_size": window and (window, 0)}

    @jax.jit
    def run(q, k, v, do):
        def attend(*arrays):
            return burst_jax.burst_attention(
                *arrays, mesh=mesh_of(seq=n), layout=layout.name, return_residual=True,
                implementation=zeroing_itself(passes), **own, **options,
            )  # fmt: skip

        results, vjp = jax.vjp(attend, q, k, v)
        return *results, *vjp((do, jnp.zeros(do.shape[:3], jnp.float32)))

    results = run(*(poisoned(x, placed, rng) for x in shards))
    got: list[np.ndarray] = []
    is_live = is_token & (placed != 0)
    for x in map(np.asarray, results):
        nothing = -np.inf if x.ndim == 3 else 0
        assert (x[placed == 0] == nothing).all()
        natural = np.full_like(x, nothing)
        for to, row, tokens, places in zip(natural, x, is_live, order, strict=True):
            to[places[tokens]] = row[tokens]
        got.append(natural)
    segments: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    dlse = np.zeros(do.shape[:3], np.float32)
    want = dense.reference(do, dlse, query=q, key=k, value=v, **segments, **options)
    compare.assert_exact(got, want, "float32")


# --- the argument pad ----------------------------------------------------------------------------

BY_TOKEN = ("key_starts", "key_ends", "key_value_positions", "offset_by_row")
LENGTHS = ("is_causal", "prefix_lengths", "query_seq_lengths", "key_value_seq_lengths")
PADDED = {
    "heads": valid.program_of(
        {"data": 2, "seq": 2, "tensor": 2},
        ("pad", "segments", "sink_logits", "alibi_slopes", "dropout", *LENGTHS),
        kind=AxisType.Explicit, t=13, s=19,
    ),
    "fits": valid.program_of({"seq": 2}, ("pad", "is_causal"), kind=AxisType.Explicit),
    "two-levels": valid.program_of(
        {"outer": 2, "inner": 2, "ulysses": 2},
        ("pad", "is_causal", "prefix_lengths", *BY_TOKEN), t=19, s=13,
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", PADDED.values(), ids=PADDED)
def test_padded_calls_are_exact_and_sharded_like_their_arrays(program):
    def attention(query, **call):
        results = burst_jax.burst_attention(query, **call)
        if program.mesh.explicit_axes:
            assert jax.typeof(results[0]).sharding.spec == jax.typeof(query).sharding.spec
        return results

    valid.assert_exact(program, attention)


def test_lengths_that_fit_are_left_alone():
    """No segment ids, no slices; an eager call pads, too."""
    x = random_like(jax.ShapeDtypeStruct((1, 12, 2, 8), jnp.float32), 0)
    jaxprs = []
    for pad in (False, True):
        options: Any = {"mesh": mesh_of(seq=4), "pad": pad}
        jaxprs.append(
            str(jax.make_jaxpr(lambda x, o=options: burst_jax.burst_attention(x, x, x, **o))(x))
        )
    assert jaxprs[0] == jaxprs[1]
    options = {"is_causal": True, "implementation": "reference"}
    got = burst_jax.burst_attention(x[:, :9], x, x, mesh=mesh_of(seq=2), pad=True, **options)
    assert_close(got, burst_jax.local_attention(x[:, :9], x, x, **options))


def test_what_cannot_be_padded_raises():
    x = jnp.ones((1, 12, 2, 8))
    options: Any = {"mesh": mesh_of(seq=4), "pad": True}
    for layout in ("zigzag", "striped", "striped:4"):
        with pytest.raises(ValueError, match=rf"pad is True with layout '{layout}': .*pad_to_layo"):
            burst_jax.burst_attention(x, x, x, layout=layout, **options)
    x = x[:, :9]
    with pytest.raises(ValueError, match=r"block_mask is given, and lengths 9 and 9 are padded to"):
        burst_jax.burst_attention(x, x, x, block_mask=np.ones((3, 3), bool), **options)
    with pytest.raises(ValueError, match="BurstAttention does not accept pad: pad tokens once"):
        burst_jax.BurstAttention(8, 2, rngs=None, pad=True)  # pyrefly: ignore
