"""``local_attention`` on one device's arrays, and ``merge`` of its results for parts of keys."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import lowered_programs as lowered
import numpy as np
import pytest
import valid_calls as valid
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import count
from meshes import assert_close, mesh_of
from mistakes import B, H, K, N, T, zeros

import burst_jax
from burst_jax import local_attention, merge

PACKED = valid.program_of({"seq": 1}, ("segments",), t=63, s=63, dims=(16, 16))
CAUSAL: Any = {"is_causal": True, "implementation": "reference"}
ARRAYS: Any = [valid.draw(PACKED, 0)[0][name] for name in valid.QKV]


def test_as_exact_as_dense():
    """With dropout, per-head parameters, KV bounds, and more keys than queries."""
    features = ("is_causal", "dropout", "sink_logits", "alibi_slopes", "key_starts")

    def attention(**call):
        names = ("mesh", "layout", "seq_axis")
        return local_attention(**{name: x for name, x in call.items() if name not in names})

    program = valid.program_of({"seq": 1}, features, t=21, s=33)
    valid.assert_exact(program, attention)


def test_eager_and_compiled_and_inside_a_shard_map():
    arrays, options = ARRAYS, CAUSAL
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


@pytest.mark.parametrize("split", [P(), P("data"), P(None, "seq")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_arrays_on_a_mesh_of_one_device(kind, split):
    """Whatever axes of size 1 they are split over: results are split like the queries."""

    def both(*arrays):
        out, vjp = jax.vjp(
            functools.partial(local_attention, return_residual=True, **CAUSAL), *arrays
        )
        return out, vjp(out)

    mesh = mesh_of(kind, data=1, seq=1)
    placed = jax.device_put(ARRAYS, jax.NamedSharding(mesh, split))
    want = jax.jit(both)(*ARRAYS)
    for each in (both, jax.jit(both)):
        with jax.set_mesh(mesh):
            results = each(*placed)
            assert_close(results, want)
            if kind is AxisType.Explicit:
                assert all(
                    jax.typeof(x).sharding.spec[:2] == P(*split, None, None)[:2] for x in results[0]
                )
    assert_close(jax.jit(both)(*placed), want)


def test_kernels_run_under_explicit_axes():
    """JAX lowers them inside a shard_map only, of which the caller has none."""
    mesh = lowered.abstract_mesh("h100", {"seq": 1}, AxisType.Explicit)
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16, sharding=jax.NamedSharding(mesh, P()))
    with jax.sharding.use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(functools.partial(local_attention, is_causal=True))(x, x, x)
    assert count(jaxpr.jaxpr, "mpmd_map") == 1


def test_one_program_for_eager_calls():
    """An eager call traces once, as burst_attention does."""
    local_attention(*ARRAYS, scale=0.3)
    with jax.no_tracing():
        local_attention(*ARRAYS, scale=0.3)


# --- parts of the keys ---------------------------------------------------------------------------


def test_parts_of_the_keys_are_merged_exactly():
    """Gradients too. Some queries attend to no key of a part, padding to none at all."""
    program = dataclasses.replace(PACKED, dtype="bfloat16")

    def attention(query, key, value, query_segment_ids, key_value_segment_ids, **_):
        parts = (slice(0, 15), slice(15, 31), slice(31, None))
        return merge(
            *(
                local_attention(
                    query, key[:, part], value[:, part], query_segment_ids=query_segment_ids,
                    key_value_segment_ids=key_value_segment_ids[:, part], return_residual=True,
                )
                for part in parts
            )
        )  # fmt: skip

    keep = valid.reference(program, *valid.draw(program, 0)).keep
    assert 0 < keep.any(3).mean() < 1
    # Each part's out is rounded to 16 bits before the parts are merged.
    valid.assert_exact(program, attention, factor=2.5)


def formula(outs, lses):
    lse = jax.nn.logsumexp(lses, axis=0)
    return (jnp.exp(lses - lse)[..., None] * outs).sum(0), lse


def test_merge_and_its_gradients_are_the_formula():
    """Of out and of lse; exactly zero where there is nothing, whatever the cotangents."""
    rng = np.random.default_rng(0)
    count, shape = 3, (2, 9, 3)
    outs = rng.normal(size=(count, *shape, 5)).astype(np.float32)
    lses = rng.normal(scale=6, size=(count, *shape)).astype(np.float32)
    for i in range(count):
        lses[i, :, i] = -np.inf  # No key in this part.
    lses[:, :, -1] = -np.inf  # No key in any.
    outs[np.isneginf(lses)] = 0
    do, dlse = (rng.normal(size=s).astype(np.float32) for s in ((*shape, 5), shape))

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, outs, lses, *cotangents):
        results, vjp = jax.vjp(function, outs, lses)
        return *results, *vjp(cotangents)

    got = run(lambda *parts: merge(*zip(*parts, strict=True)), outs, lses, do, dlse)
    with jax.enable_x64(True):
        seen = (x[:, :, :-1] for x in (outs, lses)), (x[:, :-1] for x in (do, dlse))
        wanted = run(formula, *map(np.float64, itertools.chain(*seen)))
    for i, (g, want) in enumerate(zip(got, wanted, strict=True)):
        # Gradients are stacked by parts.
        by_token = np.moveaxis(np.asarray(g), 1 if i < 2 else 2, 0)
        want = np.moveaxis(np.asarray(want), 1 if i < 2 else 2, 0)
        np.testing.assert_allclose(by_token[:-1], want, 2e-5, 2e-6)
        np.testing.assert_array_equal(by_token[-1], -np.inf if i == 1 else 0)


@pytest.mark.parametrize("base", [1e4, -1e4, 3e38, -3e38], ids=lambda base: f"{base:g}")
def test_merge_of_huge_lse(base):
    """Equal ones weigh alike, and a larger one takes all."""
    a, b = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    lse_a, lse_b = jnp.asarray([[base, base, 0.0], [base, 0.0, base]], jnp.float32)
    out, lse = merge((jnp.asarray(a), lse_a), (jnp.asarray(b), lse_b))
    np.testing.assert_allclose(out[0], (a[0] + b[0]) / 2, rtol=1e-6)
    np.testing.assert_array_equal(out[1:], (a[1], b[2]) if base > 0 else (b[1], a[2]))
    np.testing.assert_allclose(lse[0], base + np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(lse[1:], np.float32(max(base, 0)))


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
