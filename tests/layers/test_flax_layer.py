"""BurstAttention, RoPE and RMSNorm, against plain NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_close, make_mesh, mesh_of, random_like, relative_rms

from burst_jax.layers.nnx_layer import BurstAttention
from burst_jax.layers.norm import RMSNorm
from burst_jax.layers.rope import apply_rope, rope_table
from burst_jax.layouts.permutation import from_layout, positions, to_layout

B, T, D, N, K, H = 2, 32, 24, 4, 2, 6


def make_layer(mesh=None, **options: Any):
    options = {"num_kv_heads": K, "head_dim": H, "rngs": nnx.Rngs(0), **options}
    layer = BurstAttention(D, N, mesh=mesh or make_mesh(), **options)
    if layer.query_norm is not None:  # Scales of 1 would hide a swap or a missing product.
        assert layer.key_norm is not None
        layer.query_norm.scale[...] = jnp.linspace(0.5, 2.0, H, dtype=jnp.float32)
        layer.key_norm.scale[...] = jnp.linspace(2.0, 0.25, H, dtype=jnp.float32)
    return layer


@pytest.mark.parametrize(
    ("layout", "theta", "qk_norm", "value_head_dim"),
    [
        pytest.param("contiguous", 100.0, False, None, marks=pytest.mark.slow),
        pytest.param("zigzag", 10000.0, True, 3, marks=pytest.mark.slow),
        ("striped", 10000.0, True, None),
        ("zigzag", None, True, 10),
    ],
    ids=["contiguous-theta100", "zigzag-norm-v3", "striped-norm", "zigzag-norm-norope-v10"],
)
def test_equals_the_formula(layout, theta, qk_norm, value_head_dim):
    mesh = make_mesh(data=2, seq=4)
    layer = make_layer(
        mesh, batch_axis="data", layout=layout, is_causal=True, rope_theta=theta, qk_norm=qk_norm,
        value_head_dim=value_head_dim,
    )  # fmt: skip
    assert layer.value.kernel.shape == (D, K, value_head_dim or H)
    graphdef, params = nnx.split(layer)
    x, cotangent = (np.random.default_rng(s).standard_normal((B, T, D)) for s in (1, 2))
    # Two documents and padding inside and at the end; positions restart with the second.
    segments = np.ones((B, T), np.int32)
    segments[0, 12:], segments[0, 20:23], segments[1, 29:] = 2, 0, 0
    pos = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    pos[0, 12:] -= 12

    @quick_jit
    def ring(params, x):
        def f(params, x):
            ids = jnp.asarray(to_layout(segments, layout, 4))
            p = None if theta is None else jnp.asarray(to_layout(pos, layout, 4))
            y = nnx.merge(graphdef, params)(to_layout(x, layout, 4), p, ids)
            return from_layout(y, layout, 4)

        out, vjp = jax.vjp(f, params, x)
        return out, vjp(jnp.asarray(cotangent, jnp.float32))

    out, (d_params, d_x) = ring(params, jnp.asarray(x, jnp.float32))
    keep = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
    keep &= np.tril(np.ones((T, T), bool))
    plain = plain_model.float64(nnx.to_pure_dict(params))
    with jax.enable_x64(True):
        want, vjp = jax.vjp(
            lambda p, x: plain_model.attention_layer(p, x, pos, keep, theta),
            jax.tree.map(jnp.asarray, plain),
            jnp.asarray(x),
        )
        want_params, want_x = vjp(jnp.asarray(cotangent))
        want, want_params, want_x = jax.device_get((want, want_params, want_x))
    assert relative_rms(out, want) < 1e-5
    assert relative_rms(d_x, want_x) < 1e-5
    assert_close(nnx.to_pure_dict(d_params), want_params, 1e-5)
    assert not np.asarray(out)[segments == 0].any()


def test_layouts_without_rope_need_no_positions_but_rope_does():
    x = random_like(jax.ShapeDtypeStruct((B, T, D), jnp.float32), 1)
    with pytest.raises(ValueError, match=r"positions are missing: .*burst_jax.positions\(layout"):
        make_layer()(x)
    with pytest.raises(ValueError, match="rope_theta is None: the layer would ignore them"):
        make_layer(rope_theta=None)(x, jnp.arange(T, dtype=jnp.int32))


def test_positions_of_one_row_serve_all():
    x = random_like(jax.ShapeDtypeStruct((B, T, D), jnp.float32), 1)
    layer = make_layer(make_mesh(seq=4), layout="zigzag", is_causal=True)
    row = jnp.asarray(positions("zigzag", T, 4))
    np.testing.assert_array_equal(layer(x, row), layer(x, jnp.tile(row, (B, 1))))
    with pytest.raises(ValueError, match=r"pass burst_jax.positions\('zigzag', 32, 4\)"):
        layer(x, jnp.arange(T, dtype=jnp.int32))


def test_bfloat16_computes_in_bfloat16_over_float32_weights():
    x = random_like(jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16), 1)
    pos = jnp.arange(T, dtype=jnp.int32)
    half, full = make_layer(dtype=jnp.bfloat16, qk_norm=True), make_layer(qk_norm=True)
    assert half.query.kernel.dtype == jnp.float32
    out = half(x, pos)
    assert out.dtype == jnp.bfloat16
    assert 1e-4 < relative_rms(out, full(x.astype(jnp.float32), pos)) < 2e-2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": True}, TypeError, r"BurstAttention got an unknown option 'causal': use mesh"),
        ({"causal": True}, TypeError, r"BurstAttention got .* Did you mean 'is_causal'\?"),
        ({"qk_norms": True}, TypeError, r"unknown option 'qk_norms': .* Did you mean 'qk_norm'\?"),
        ({"return_residual": True}, ValueError, "does not take return_residual: .*burst_attention"),
        ({"query_segment_ids": None}, ValueError, "query_segment_ids: pass segment_ids to the cal"),
        (
            {"alibi_slopes": None},
            ValueError,
            "not take alibi_slopes: options hold no arrays",
        ),
        ({"value_head_dim": 0}, ValueError, "value_head_dim is 0: it must be 1 or more"),
        ({"num_kv_heads": 3}, ValueError, "num_heads is 4, num_kv_heads 3: .*multiple"),
        ({"num_kv_heads": 0}, ValueError, "num_heads is 4, num_kv_heads 0"),
        ({"head_dim": 5}, ValueError, "head_dim is 5: RoPE rotates pairs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        make_layer(**options)


def test_wrong_shapes_raise():
    layer, x = make_layer(), jnp.zeros((B, T, D), jnp.float32)
    with pytest.raises(ValueError, match=r"in_features is 10, num_heads 4: pass head_dim"):
        BurstAttention(10, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x has shape \(32, 24\): it needs \[B, T, features\]"):
        layer(x[0], jnp.arange(T, dtype=jnp.int32))
    with pytest.raises(ValueError, match=r"positions cover 1 rows of 31 tokens"):
        layer(x, jnp.arange(T - 1, dtype=jnp.int32))
    with pytest.raises(ValueError, match=r"positions has dtype float32: convert it to int32"):
        layer(x, jnp.arange(T, dtype=jnp.float32))
    with pytest.raises(ValueError, match=r"positions has shape \(\)"):
        layer(x, jnp.int32(0))
    with pytest.raises(ValueError, match="theta is 0"):
        rope_table(jnp.arange(T, dtype=jnp.int32), 4, theta=0)
    with pytest.raises(ValueError, match="head_dim is 3"):
        rope_table(jnp.arange(T, dtype=jnp.int32), 3)


@pytest.mark.parametrize(("largest", "limit"), [(4096, 4e-4), (2**20, 6e-4), (2**24, 2e-3)])
def test_rope_angles_stay_exact_at_millions_of_tokens(largest, limit):
    pos = np.concatenate([np.arange(8), np.linspace(0, largest - 1, 999).astype(np.int32)])
    table = rope_table(jnp.asarray(pos, jnp.int32), 64, 5e5)
    angle = pos[:, None] * 5e5 ** (-np.arange(0, 64, 2) / 64)
    worst = np.abs(np.asarray(table.cos)[0] - np.cos(angle)).max()
    worst = max(worst, np.abs(np.asarray(table.sin)[0] - np.sin(angle)).max())
    assert worst < limit


def test_rope_sees_differences_of_positions_only():
    q, k = (random_like(jax.ShapeDtypeStruct((1, 1, 1, 16), jnp.float32), s) for s in (1, 2))

    def logit(query_position, key_position):
        tables = [
            rope_table(jnp.full((1,), p, jnp.int32), 16) for p in (query_position, key_position)
        ]
        return float(jnp.vdot(apply_rope(q, tables[0]), apply_rope(k, tables[1])))

    assert logit(107, 100) == pytest.approx(logit(7, 0), abs=1e-4)
    assert abs(logit(7, 0) - logit(0, 7)) > 1e-2


def test_rms_norm():
    norm = RMSNorm(8)
    norm.scale[...] = jnp.arange(1, 9, dtype=jnp.float32)
    x = np.random.default_rng(0).standard_normal((3, 8))
    want = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * np.arange(1, 9)
    assert relative_rms(norm(jnp.asarray(x, jnp.float32)), want) < 1e-6
    # Rows so small that epsilon is half of the mean square.
    tiny = 1e-3 * x / np.sqrt(np.mean(x**2, -1, keepdims=True))
    want_tiny = tiny / np.sqrt(2e-6) * np.arange(1, 9)
    assert relative_rms(norm(jnp.asarray(tiny, jnp.float32)), want_tiny) < 1e-6
    half = norm(jnp.asarray(x, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert relative_rms(half, want) < 1e-2


def test_heads_over_an_explicit_axis_are_refused():
    mesh = mesh_of(AxisType.Explicit, seq=2, model=2)
    layer = BurstAttention(8, 2, rngs=nnx.Rngs(0), mesh=mesh, tensor_axis="model")
    with pytest.raises(
        NotImplementedError, match=r"tensor_axis is 'model', an Explicit .* axis Auto"
    ):
        layer(jnp.ones((1, 4, 8)), jnp.arange(4, dtype=jnp.int32))


def test_what_a_submodule_writes_is_kept():
    """On Auto meshes, where no weight has to be gathered."""

    class Counted(nnx.Module):
        def __init__(self, inner):
            self.inner, self.calls = inner, nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return self.inner(x)

    layer = BurstAttention(8, 2, rngs=nnx.Rngs(0), mesh=mesh_of(seq=2))
    counted: Any = Counted(layer.out)
    layer.out = counted
    for _ in range(2):
        layer(jnp.ones((1, 4, 8)), jnp.arange(4, dtype=jnp.int32))
    assert counted.calls[...] == 2


@pytest.mark.parametrize(("kv_heads", "devices"), [(2, 2), (2, 4), (1, 2)], ids=str)
def test_in_the_callers_shard_map(kv_heads, devices):
    """With a device's heads of the weights, or all key heads where there are fewer than devices."""
    mesh = mesh_of(seq=2, model=devices)
    options: Any = {"num_kv_heads": kv_heads, "layout": "zigzag", "is_causal": True}
    options |= {"use_bias": True, "qk_norm": True}
    layer = make_layer(mesh_of(seq=2), **options)
    graphdef, params = nnx.split(make_layer(mesh, tensor_axis="model", **options))
    params = jax.tree.map(lambda w: w + 0.1 * random_like(w, 7), params)
    x, cotangent = (random_like(jax.ShapeDtypeStruct((B, T, D), jnp.float32), s) for s in (1, 2))
    pos = jnp.asarray(positions("zigzag", T, 2))
    heads = {"query": N, "key": kv_heads, "value": kv_heads, "out": N}

    def spec(path, weight):
        name, kind = (key.key for key in path[:2])
        if heads.get(name, 0) % devices or name not in heads or (name, kind) == ("out", "bias"):
            return P()
        return P("model") if name == "out" else P(*[None] * (weight.ndim - 2), "model")

    specs = jax.tree_util.tree_map_with_path(spec, params)
    tokens = P(None, "seq")

    @quick_jit
    def split(params, x):
        def local(params, x, pos):
            return nnx.merge(graphdef, params)(x, pos)

        run = jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens, P("seq")), out_specs=tokens)
        out, vjp = jax.vjp(lambda params, x: run(params, x, pos), params, x)
        return out, vjp(jnp.asarray(cotangent))

    @quick_jit
    def whole(params, x):
        def run(params, x):
            return nnx.merge(nnx.graphdef(layer), params)(x, pos)

        out, vjp = jax.vjp(run, params, x)
        return out, vjp(jnp.asarray(cotangent))

    def place(tree, specs):
        return jax.tree.map(lambda w, s: jax.device_put(w, NamedSharding(mesh, s)), tree, specs)

    with jax.set_mesh(mesh):
        cotangent = place(cotangent, tokens)
        got = split(place(params, specs), place(x, tokens))
    cotangent = np.asarray(cotangent)
    assert_close(jax.device_get(got), jax.device_get(whole(params, x)), 1e-5)


def test_heads_that_devices_share_are_refused_inside_a_shard_map():
    mesh = mesh_of(seq=2, model=2)
    layer = make_layer(mesh, tensor_axis="model", is_causal=True)
    run = jax.shard_map(
        lambda x, pos: layer(x, pos), mesh=mesh, in_specs=(P(None, "seq"), P("seq")),
        out_specs=P(None, "seq"),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"tensor_axis is \('model',\), 2 devices, and each has the"
    ):
        run(jnp.ones((2, 8, D)), jnp.arange(8, dtype=jnp.int32))
