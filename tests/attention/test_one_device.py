"""``local_attention`` on one device's arrays, and ``merge`` of its results for parts of keys."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import compare
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of
from mistakes import B, H, K, N, T, zeros
from ring_cases import a_case, assert_exact, case_id, make_inputs, oracle

import burst_jax
from burst_jax import local_attention, merge


def as_burst(*arrays, mesh, layout, seq_axis, backward, **options):
    """``local_attention``, called as burst_attention is on one device."""
    del mesh, layout, seq_axis, backward
    return local_attention(*arrays, **options)


ONLY_CAUSAL: Any = {"is_causal": True}


def random_arrays() -> Any:
    """Query, key and value, float32."""
    return make_inputs(a_local_case("full", "xla"))[0]


def a_local_case(mask, implementation, shard="63", **changes):
    return a_case("1", "contiguous", mask, implementation=implementation, shard=shard) | changes


CASES = [
    a_local_case("packed_window_cap", "triton", numbers="both"),
    a_local_case("causal", "xla", shard="longer_keys", dropout=0.2, numbers="both"),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['implementation']}-{case_id(case)}"
)
def test_as_exact_as_dense(case):
    """Gradients too, and those of per-head parameters, by random cotangents."""
    assert_exact(case, attention=as_burst, implementation=IMPLEMENTATIONS[case["implementation"]])


def test_eager_and_compiled_and_inside_a_shard_map():
    arrays, options = random_arrays(), ONLY_CAUSAL
    run = functools.partial(local_attention, return_residual=True, **options)
    want = run(*arrays)
    assert want[1].shape == arrays[0].shape[:3]
    assert_close(jax.jit(run)(*arrays), want)
    np.testing.assert_array_equal(local_attention(*arrays, **options), want[0])
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind, data=2)
        by_rows = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        split = jax.device_put(arrays, jax.NamedSharding(mesh, P("data")))
        assert_close(by_rows(*split), want)
    in_ring = functools.partial(burst_jax.ring_attention, axis_name=None, **options)
    by_rows = jax.shard_map(in_ring, mesh=mesh_of(data=2), in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(by_rows)(*arrays), want[0])


def test_one_program_for_eager_calls():
    """An eager call traces once, as burst_attention does."""
    arrays = random_arrays()
    local_attention(*arrays, scale=0.3)
    with jax.no_tracing():
        local_attention(*arrays, scale=0.3)


# --- parts of the keys ---------------------------------------------------------------------------


def attention_in_parts(count, query, key, value, segments, **options):
    """Attention over ``count`` parts of the keys, of different lengths, merged."""
    q_ids, kv_ids = segments
    length = key.shape[1]
    ends = [0, *(length * (i + 1) // (count + 1) for i in range(count - 1)), length]
    results = []
    for start, end in itertools.pairwise(ends):
        part = slice(start, end)
        ids: Any = {}
        if q_ids is not None:
            ids = {"query_segment_ids": q_ids, "key_value_segment_ids": kv_ids[:, part]}
        results.append(
            local_attention(
                query, key[:, part], value[:, part], return_residual=True, **ids, **options
            )
        )
    return merge(*results)


@pytest.mark.parametrize(("count", "dtype"), [(2, "float32"), (3, "bfloat16")])
def test_parts_of_the_keys_are_merged_exactly(count, dtype):
    """Gradients too. Some queries attend to no key of a part, padding to none at all."""
    case = a_local_case("packed", "xla", dtype=dtype)
    arrays, cotangents, segments = make_inputs(case)

    @quick_jit
    def run(arrays, cotangents):
        attend = functools.partial(attention_in_parts, count, segments=segments)
        results, vjp = jax.vjp(attend, *arrays)
        return *results, *vjp(cotangents)

    got = run(arrays, cotangents)
    truth, one_device, keep = oracle(case, arrays, cotangents, segments)
    blind = ~keep.any(2)
    assert blind.any()
    assert not blind.all()
    # Each part's out is rounded to 16 bits before the parts are merged.
    factor = 1.5 if dtype == "float32" or count == 1 else 2.5
    compare.assert_as_good_as(got, one_device, truth, dtype, factor)
    np.testing.assert_array_equal(np.asarray(got[0], np.float32)[blind], 0)
    assert np.isneginf(np.asarray(got[1])[blind]).all()
    np.testing.assert_array_equal(np.asarray(got[2], np.float32)[blind], 0)


def merged_in_float64(parts, do, dlse):
    """``(out, lse)`` and the gradients of the parts, by the formula, for rows that see a key."""
    with jax.enable_x64(True):
        outs, lses = (jnp.asarray([np.float64(p[i]) for p in parts]) for i in (0, 1))

        def formula(outs, lses):
            lse = jax.nn.logsumexp(lses, axis=0)
            return (jnp.exp(lses - lse)[..., None] * outs).sum(0), lse

        results, vjp = jax.vjp(formula, outs, lses)
        return [np.asarray(x) for x in (*results, *vjp((jnp.float64(do), jnp.float64(dlse))))]


@pytest.mark.parametrize("count", [2, 4])
def test_merge_and_its_gradients_are_the_formula(count):
    """Of out and of lse; exactly zero where there is nothing, whatever the cotangents."""
    rng = np.random.default_rng(count)
    shape = (2, 9, 3)
    parts = []
    for i in range(count):
        out = rng.normal(size=(*shape, 5)).astype(np.float32)
        lse = rng.normal(scale=6, size=shape).astype(np.float32)
        lse[:, i] = -np.inf  # No key in this part.
        lse[:, -1] = -np.inf  # No key in any.
        parts.append((np.where(np.isneginf(lse)[..., None], np.float32(0), out), lse))
    do, dlse = (rng.normal(size=s).astype(np.float32) for s in ((*shape, 5), shape))
    results, vjp = jax.vjp(merge, *parts)
    gradients = vjp((do, dlse))
    got = [*results, *(np.stack([g[i] for g in gradients]) for i in (0, 1))]
    seen = [(x[:, :-1], y[:, :-1]) for x, y in parts]
    wanted = merged_in_float64(seen, do[:, :-1], dlse[:, :-1])
    for i, (g, want) in enumerate(zip(got, wanted, strict=True)):
        tokens = 1 if i < 2 else 2  # Gradients are stacked by parts.
        g = np.asarray(g)
        compare_to = np.moveaxis(g, tokens, 0)
        np.testing.assert_allclose(np.moveaxis(compare_to[:-1], 0, tokens), want, 2e-5, 2e-6)
        np.testing.assert_array_equal(compare_to[-1], -np.inf if i == 1 else 0)


def test_merge_of_one_part_is_that_part():
    out, lse = zeros(2, 3, dtype=jnp.bfloat16), zeros(2)
    got = merge((out, lse))
    assert got[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[1], lse)


# --- mistakes ------------------------------------------------------------------------------------

OUT, LSE = zeros(B, T, N, H), zeros(B, T, N)
BAD_PARTS: list[tuple[tuple[Any, ...], str]] = [
    ((), r"merge got no parts: pass one pair \(out, lse\) or more"),
    (((OUT, LSE), OUT), r"part 1 of merge is a .*Array.*: it must be a pair \(out, lse"),
    (((OUT, LSE, LSE),), r"part 0 of merge is a tuple: it must be a pair"),
    (((OUT, [0.0]),), "lse of part 0 of merge is a list: it must be a float32 array"),
    (((OUT.astype(int), LSE),), "out of part 0 of merge has dtype int32: cast it to"),
    (
        ((OUT, LSE), (OUT, LSE.astype(jnp.bfloat16))),
        "lse of part 1 of merge has dtype bfloat16: it must be float32, the natural log",
    ),
    (
        ((OUT, LSE.swapaxes(1, 2)),),
        r"out of part 0 of merge has shape \(2, 16, 4, 8\), lse \(2, 4, 16\): they must be \[B, T,",
    ),
    (
        ((OUT, LSE), (OUT[:, :5], LSE[:, :5])),
        r"out of part 1 of merge is float32\[2, 5, 4, 8\], that of part 0 float32\[2, 16, 4, 8\]: ",
    ),
    (
        ((OUT, LSE), (OUT.astype(jnp.bfloat16), LSE)),
        r"out of part 1 of merge is bfloat16.*: all parts must be .*; cast them to one dtype",
    ),
]


def test_mistakes_of_merge():
    for parts, message in BAD_PARTS:
        with pytest.raises(ValueError, match=message):
            merge(*parts)


def test_other_arguments_raise_by_name():
    arrays = zeros(B, T, N, H), zeros(B, T, K, H), zeros(B, T, K, H)
    attend: Any = local_attention
    with pytest.raises(
        TypeError, match="local_attention has no argument 'mask': dense bias and mas"
    ):
        attend(*arrays, mask=None)
    with pytest.raises(TypeError, match="local_attention takes query, key and value by position"):
        attend(*arrays, None)
    with pytest.raises(TypeError, match=r"'local_window'\. Did you mean 'local_window_size'\?"):
        attend(*arrays, local_window=3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_arrays_of_several_devices_raise(kind):
    mesh = mesh_of(kind, data=2)
    query, key = zeros(B, T, N, H), zeros(B, T, K, H)
    split = jax.device_put(query, jax.NamedSharding(mesh, P("data")))
    message = r"query is split over several devices, .*: call burst_attention, with seq_axis=None"
    with pytest.raises(ValueError, match=message):
        local_attention(split, key, key)
    if kind == AxisType.Explicit:
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
            jax.jit(lambda query: local_attention(query, query, query))(split)
    whole = jax.device_put(query, jax.NamedSharding(mesh, P()))
    assert local_attention(whole, whole, whole).shape == query.shape


def test_what_an_implementation_cannot():
    query = zeros(B, T, N, H)
    with pytest.raises(NotImplementedError, match="'triton' cannot run: it needs an NVIDIA GPU"):
        local_attention(query, query, query, implementation="triton")
    with pytest.raises(NotImplementedError, match="or local_attention is not implemented: use rev"):
        jax.jvp(local_attention, (query,) * 3, (query,) * 3)
