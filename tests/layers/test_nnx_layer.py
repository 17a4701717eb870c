"""BurstAttention, RoPE and RMSNorm, against plain NumPy in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, make_mesh, mesh_of, random_like, relative_rms

from burst_jax.layers.nnx_layer import BurstAttention
from burst_jax.layers.norm import JointRMSNorm, RMSNorm
from burst_jax.layers.rope import DynamicRope, Rope, YarnRope, apply_rope, rope_table
from burst_jax.layouts.permutation import from_layout, positions, to_layout

B, T, D, N, K, H = 2, 32, 24, 4, 2, 6
X = random_like(jax.ShapeDtypeStruct((B, T, D), jnp.float32), 1)
POSITIONS = jnp.arange(T, dtype=jnp.int32)


def make_layer(mesh=None, **options: Any):
    """With weights that are drawn: norms' scales of 1 would hide a swap or a missing product."""
    options = {"num_kv_heads": K, "head_dim": H, "mesh": mesh or make_mesh(), **options}
    layer = nnx.eval_shape(lambda: BurstAttention(D, N, rngs=nnx.Rngs(0), **options))
    graphdef, shapes = nnx.split(layer)
    return nnx.merge(graphdef, decoders.drawn(shapes))


@pytest.mark.parametrize(
    ("layout", "theta", "value_head_dim"),
    [
        ("striped", 100.0, 10),
        # Without RoPE, as simple.
        pytest.param("zigzag", None, None, marks=pytest.mark.slow),
    ],
)
def test_equals_the_formula(layout, theta, value_head_dim):
    padding_id = -1 if layout == "zigzag" else 0
    layer = make_layer(
        make_mesh(data=2, seq=2), batch_axis="data", layout=layout, is_causal=True,
        rope_theta=theta and Rope(theta, fraction=0.7), qk_norm="joint" if theta else True,
        output_gate=theta is not None, value_head_dim=value_head_dim, padding_id=padding_id,
    )  # fmt: skip
    assert layer.value.kernel.shape == (D, K, value_head_dim or H)
    graphdef, params = nnx.split(layer)
    x, cotangent = (np.random.default_rng(s).standard_normal((B, T, D)) for s in (1, 2))
    # Two documents, and padding inside and at the end; positions restart with the second.
    segments = np.ones((B, T), np.int32)
    segments[0, 12:], segments[0, 20:23], segments[1, 29:] = 2, 0, 0
    pos = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    pos[0, 12:] -= 12

    @quick_jit
    def ring(params, x):
        def f(params, x):
            ids = jnp.asarray(to_layout(segments + padding_id, layout, 2))
            p = None if theta is None else jnp.asarray(to_layout(pos, layout, 2))
            y = nnx.merge(graphdef, params)(to_layout(x, layout, 2), p, ids)
            return from_layout(y, layout, 2)

        out, vjp = jax.vjp(f, params, x)
        return out, *vjp(jnp.asarray(cotangent, jnp.float32))

    out, d_params, d_x = ring(params, jnp.asarray(x, jnp.float32))
    keep = plain_model.causal(segments)
    want, gradients = plain_model.gradients(
        lambda params, x: plain_model.attention_layer(params, x, pos, keep, theta, None, 0.7),
        cotangent, nnx.to_pure_dict(params), x,
    )  # fmt: skip
    assert_close((out, nnx.to_pure_dict(d_params), d_x), (want, *gradients), 1e-5)
    assert not np.asarray(out)[segments == 0].any()


def test_positions_are_required_checked_and_shared():
    with pytest.raises(ValueError, match=r"positions are missing: .*burst_jax.positions\(layout"):
        make_layer()(X)
    with pytest.raises(ValueError, match="rope_theta is None: the layer would ignore them"):
        make_layer(rope_theta=None)(X, POSITIONS)
    layer = make_layer(make_mesh(seq=2), layout="zigzag", is_causal=True)
    one = jnp.asarray(positions("zigzag", T, 2))
    outs = quick_jit(lambda x: (layer(x, one), layer(x, jnp.tile(one, (B, 1)))))(X)
    np.testing.assert_array_equal(*outs)
    with pytest.raises(ValueError, match=r"pass burst_jax.positions\('zigzag', 32, 2\)"):
        layer(X, POSITIONS)


def test_positions_are_checked_where_documents_count_from_zero():
    options: Any = {"layout": "zigzag", "is_causal": True, "padding_id": -1}
    layer = make_layer(make_mesh(seq=2), **options)
    # Documents 0 and 1; padding has anything.
    segments = np.repeat([[0, 1, -1]], [20, 8, 4], axis=1)
    pos = np.concatenate([np.arange(20), np.arange(8), [9, 3, 3, 0]])[None]
    segments, right = (
        jnp.asarray(np.tile(to_layout(x, "zigzag", 2), (B, 1))) for x in (segments, pos)
    )
    assert np.isfinite(layer(X, right, segments)).all()
    with pytest.raises(ValueError, match="in another order than its tokens"):
        layer(X, jnp.where((segments == 0) & (right < 4), 3 - right, right), segments)


@pytest.mark.parametrize("run", [lambda layer, x: layer(x), nnx.jit(lambda layer, x: layer(x))])
def test_arrays_that_are_not_on_the_mesh_yet(run):
    """Under jax.set_mesh, any operation puts them on the mesh, replicated."""
    mesh = make_mesh(data=2, seq=2, kind=AxisType.Explicit)
    options: Any = {"rope_theta": None, "layout": "zigzag", "is_causal": True}
    want = quick_jit(make_layer(make_mesh(seq=2), **options))(to_layout(X, "zigzag", 2))
    with jax.set_mesh(mesh):
        layer = make_layer(mesh, **options, batch_axis="data")
        out = run(layer, to_layout(X + 0, "zigzag", 2))
    assert out.sharding.spec == P("data", "seq", None)
    assert_close(jax.device_get(out), want)


def test_attend_returns_what_the_function_computes():
    layer = make_layer(is_causal=True)
    rope = rope_table(POSITIONS, H)

    def attention_fn(query, key, value, **options):
        assert options["is_causal"]
        assert options["local_window_size"] == 3
        return jnp.repeat(value, N // K, 2), {"keys": key}

    out, aux = layer.attend(X, rope, local_window_size=3, attention_fn=attention_fn)
    want = layer.out(jnp.repeat(layer.value(X), N // K, 2))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(aux["keys"], apply_rope(layer.key(X), rope))
    np.testing.assert_array_equal(layer.attend(X, rope)[0], layer(X, POSITIONS))
    with pytest.raises(TypeError, match="BurstAttention's call got sinks: next to segment_ids"):
        layer.attend(X, rope, sinks=None)  # pyrefly: ignore


def test_bfloat16_computes_in_bfloat16_over_float32_weights():
    half, full = make_layer(dtype=jnp.bfloat16, qk_norm=True), make_layer(qk_norm=True)
    assert half.query.kernel.dtype == jnp.float32
    x = X.astype(jnp.bfloat16)
    out, want = quick_jit(lambda: (half(x, POSITIONS), full(x.astype(jnp.float32), POSITIONS)))()
    assert out.dtype == jnp.bfloat16
    assert 1e-4 < relative_rms(out, want) < 2e-2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": True}, TypeError, r"BurstAttention got .*'causal': use .* mean 'is_causal'\?"),
        ({"return_residual": True}, ValueError, "not accept return_residual: .*burst_attention"),
        ({"query_segment_ids": None}, ValueError, "query_segment_ids: pass segment_ids to the cal"),
        ({"alibi_slopes": None}, ValueError, "not accept alibi_slopes: options hold no arrays"),
        ({"value_head_dim": 0}, ValueError, "value_head_dim is 0: it must be 1 or more"),
        ({"num_kv_heads": 3}, ValueError, "num_heads is 4, num_kv_heads 3: .*multiple"),
        ({"num_kv_heads": 0}, ValueError, "num_heads is 4, num_kv_heads 0"),
        ({"head_dim": 5}, ValueError, "head_dim is 5: RoPE rotates pairs"),
        (
            {"deterministic": True, "dropout_rate": 0.1},
            ValueError,
            "deterministic is True and dropout_rate 0.1: the option deterministic requests bitwise",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_raise(options, error, message):
    with pytest.raises(error, match=message):
        make_layer(**options)


def test_wrong_shapes_raise():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"in_features is 10, num_heads 4: pass head_dim"):
        BurstAttention(10, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x has shape \(32, 24\): it needs \[B, T, features\]"):
        layer(X[0], POSITIONS)
    with pytest.raises(ValueError, match=r"positions cover 1 sequences of 31 tokens"):
        layer(X, POSITIONS[1:])
    with pytest.raises(ValueError, match=r"positions has dtype float32: convert it to int32"):
        layer(X, POSITIONS.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"positions has shape \(\)"):
        layer(X, jnp.int32(0))
    with pytest.raises(ValueError, match="theta is 0"):
        rope_table(POSITIONS, 4, theta=0)
    with pytest.raises(ValueError, match="head_dim is 3: RoPE rotates pairs"):
        rope_table(POSITIONS, 3)
    with pytest.raises(ValueError, match="head_dim is 0: it must be 1 or more"):
        rope_table(POSITIONS, 0)
    with pytest.raises(ValueError, match="qk_norm is 'all': use True, False or 'joint'"):
        make_layer(qk_norm="all")
    with pytest.raises(ValueError, match="output_gate is 'yes': it must be True or False"):
        make_layer(output_gate="yes")


def test_rope_of_part_of_a_head():
    """The first features are rotated as those of a smaller head; without any, there is no RoPE."""
    x = X.reshape(B, T, 2, 12)
    table = rope_table(POSITIONS, 12, Rope(100.0, fraction=0.5))
    assert table.cos.shape == (1, T, 3)
    found, want = (
        apply_rope(x, table),
        plain_model.rotate(x, np.tile(POSITIONS, (B, 1)), 100.0, 0.5),
    )
    assert_close(found, want, 1e-6)
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])
    yarn = YarnRope(100.0, fraction=0.5)
    np.testing.assert_array_equal(
        rope_table(POSITIONS, 12, yarn).sin, rope_table(POSITIONS, 6, YarnRope(100.0)).sin
    )
    none = rope_table(POSITIONS, 13, Rope(fraction=0.0))
    np.testing.assert_array_equal(apply_rope(x, none), x)
    wrong: list[Any] = [-0.1, 1.5, True, "1"]
    for fraction in wrong:
        with pytest.raises(ValueError, match=r"Rope's fraction is .*: it must be from 0, no"):
            Rope(fraction=fraction)
    with pytest.raises(ValueError, match=r"head_dim is 6, and RoPE's fraction 0.5, 3 features:"):
        rope_table(POSITIONS, 6, Rope(fraction=0.5))
    with pytest.raises(ValueError, match=r"x has shape .*with 14 features of a head: pass one"):
        apply_rope(x, rope_table(POSITIONS, 14))


@pytest.mark.parametrize(("largest", "limit"), [(4096, 4e-4), (2**20, 6e-4), (2**24, 2e-3)])
def test_rope_angles_are_exact_at_millions_of_tokens(largest, limit):
    pos = np.concatenate([np.arange(8), np.linspace(0, largest - 1, 999).astype(np.int32)])
    table = rope_table(jnp.asarray(pos, jnp.int32), 64, 5e5)
    angle = pos[:, None] * 5e5 ** (-np.arange(0, 64, 2) / 64)
    worst = np.abs(np.asarray(table.cos)[0] - np.cos(angle)).max()
    assert max(worst, np.abs(np.asarray(table.sin)[0] - np.sin(angle)).max()) < limit


@pytest.mark.parametrize(
    ("old", "fast", "slow", "truncate"),
    [
        (4096, 32.0, 1.0, True),  # pairs before and after the ramp
        (4096, 32.0, 1.0, False),
        (16, 32.0, 1.0, True),  # the ramp would start before the first pair
        (10**9, 32.0, 1.0, True),  # and end after the last feature
        (4096, 4.0, 4.0, False),  # a ramp of length 0
    ],
)
def test_yarn_frequencies(old, fast, slow, truncate):
    """One feature pair after the other, by the paper's formulas."""
    dim, theta, factor = 8, 10000.0, 4.0

    def pair(rotations):
        return dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = (0 if low < 0 else low), (dim - 1 if high > dim - 1 else high)
    want = []
    for i in range(dim // 2):
        slowed = 0.0 if i <= low else 1.0 if i >= high else (i - low) / (high - low)
        plain = theta ** (-2 * i / dim)
        want.append(slowed * plain / factor + (1 - slowed) * plain)
    rope = YarnRope(theta, factor, old, fast, slow, truncate=truncate)
    np.testing.assert_allclose(rope.frequencies(dim), want, rtol=1e-12)
    by_default, other = 0.1 * math.log(factor) + 1, 0.05 * math.log(factor) + 1
    assert rope.magnitude == pytest.approx(by_default)
    assert dataclasses.replace(rope, mscale=0.5).magnitude == pytest.approx(by_default)
    both = dataclasses.replace(rope, mscale=0.5, mscale_all_dim=1.0)
    assert both.magnitude == pytest.approx(other / by_default)


@pytest.mark.parametrize("length", [200, 256, 257, 1000])
def test_the_base_of_a_dynamic_rope_grows_with_the_length(length):
    """``theta' = theta s^(H / (H - 2))``, the published base, above the trained length."""
    dim, theta, factor, trained = 16, 10000.0, 4.0, 256
    stretch = max(1.0, factor * length / trained - (factor - 1))
    base = theta * stretch ** (dim / (dim - 2))
    rope, pos = DynamicRope(theta, factor, trained), np.arange(length)
    table = rope_table(jnp.asarray(pos, jnp.int32), dim, rope)
    angle = pos[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    for found, want in ((table.cos[0], np.cos(angle)), (table.sin[0], np.sin(angle))):
        np.testing.assert_allclose(found, want, atol=2e-4)


def test_rms_norm():
    norm = RMSNorm(8)
    norm.scale[...] = jnp.arange(1, 9, dtype=jnp.float32)
    x = np.random.default_rng(0).standard_normal((3, 8))
    want = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * np.arange(1, 9)
    assert relative_rms(norm(jnp.asarray(x, jnp.float32)), want) < 1e-6
    # So small that epsilon is half of the mean square.
    tiny = jnp.asarray(1e-3 * x / np.sqrt(np.mean(x**2, -1, keepdims=True)), jnp.float32)
    assert relative_rms(norm(tiny), np.asarray(tiny) / np.sqrt(2e-6) * np.arange(1, 9)) < 1e-6
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
    assert relative_rms(RMSNorm(8, offset=1.0)(tiny), norm(tiny) / norm.scale[...]) < 1e-6
    # Of all heads together, and of one of three heads, with its own scale.
    joint = JointRMSNorm(3, 8, offset=1.0)
    joint.scales[...] = jnp.arange(24, dtype=jnp.float32).reshape(3, 8)
    heads = np.random.default_rng(1).standard_normal((2, 5, 3, 8))
    scales = 1 + np.asarray(joint.scales[...])
    want = plain_model.joint_rms_norm(heads, scales)
    assert relative_rms(joint(jnp.asarray(heads, jnp.float32)), want) < 1e-6
    last = heads[:, :, 2:]
    want = plain_model.joint_rms_norm(last, scales[2:])
    assert relative_rms(joint(jnp.asarray(last, jnp.float32), jnp.int32(2)), want) < 1e-6


def test_state_of_a_submodule_is_updated():
    """Over Auto axes, where no weight has to be gathered."""

    class Counted(nnx.Module):
        def __init__(self, inner):
            self.inner, self.calls = inner, nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return self.inner(x)

    layer = BurstAttention(8, 2, rngs=nnx.Rngs(0), mesh=mesh_of(seq=2))
    counted: Any = Counted(layer.out)
    layer.out = counted
    layer(jnp.ones((1, 4, 8)), POSITIONS[:4])
    assert counted.calls[...] == 1


@pytest.mark.slow
def test_inside_a_shard_map():
    """With a device's query heads, and all key heads, of which there are fewer than devices."""
    mesh = mesh_of(seq=2, model=4)
    options: Any = {"layout": "zigzag", "is_causal": True, "use_bias": True, "qk_norm": True}
    layer = make_layer(mesh, tensor_axis="model", **options)
    graphdef, params = nnx.split(layer)
    params = jax.tree.map(lambda w: w + 0.1 * random_like(w, 7), params)
    pos, tokens = jnp.asarray(positions("zigzag", T, 2)), P(None, "seq")
    heads = {("query", "kernel"): P(None, "model"), ("query", "bias"): P("model")}
    heads |= {("out", "kernel"): P("model")}
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: heads.get(tuple(key.key for key in path[:2]), P()), params
    )

    def local(params, x, pos):
        return nnx.merge(graphdef, params)(x, pos)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(specs, tokens, P("seq")), out_specs=tokens)
    whole_layer = nnx.graphdef(make_layer(mesh_of(seq=2), **options))

    def whole(params, x, pos):
        return nnx.merge(whole_layer, params)(x, pos)

    def gradients(function):
        @quick_jit
        def run(params, x):
            out, vjp = jax.vjp(lambda params, x: function(params, x, pos), params, x)
            return out, vjp(random_like(out, 2))

        return jax.device_get(run(params, X))

    assert_close(gradients(sharded), gradients(whole), 1e-5)


def test_dropout_inside_a_shard_map_differs_between_sequences_and_heads():
    """Two equal sequences on two devices, and two pairs of equal heads whose outputs cancel."""
    mesh = mesh_of(data=2, seq=2, model=2)
    options: Any = {"is_causal": True, "rope_theta": None, "num_kv_heads": N}
    layer = make_layer(mesh, batch_axis="data", tensor_axis="model", dropout_rate=0.5, **options)
    graphdef, params = nnx.split(layer)
    kernels = nnx.to_pure_dict(params)
    for name in ("query", "key", "value"):
        kernels[name]["kernel"] = jnp.tile(kernels[name]["kernel"][:, :2], (1, 2, 1))
    first = kernels["out"]["kernel"][:2]
    kernels["out"]["kernel"] = jnp.concatenate([first, -first])
    nnx.replace_by_pure_dict(params, kernels)
    x = jnp.tile(X[:1], (2, 1, 1))
    spec = P("data", "seq")
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: P("model") if path[0].key == "out" else P(None, "model"), params
    )

    @quick_jit
    def attend(params, x, key):
        def local(params, x, key):
            return nnx.merge(graphdef, params).attend(x, None, dropout_key=key)[0]

        return jax.shard_map(local, mesh=mesh, in_specs=(specs, spec, P()), out_specs=spec)(
            params, x, key
        )

    out = np.asarray(attend(params, x, jax.random.key(0)))
    # The first token of the sequence attends to itself only: its output is dropped or doubled.
    assert np.abs(out[:, 8:]).mean() > 0.01
    assert relative_rms(out[0], out[1]) > 0.1


def test_wrong_placements_of_heads_raise():
    layer = make_layer(mesh_of(AxisType.Explicit, seq=2, model=2), tensor_axis="model")
    with pytest.raises(NotImplementedError, match=r"tensor_axis is 'model', an Explicit .* axis A"):
        layer(X, POSITIONS)
    mesh = mesh_of(seq=2, model=2)
    layer = make_layer(mesh, tensor_axis="model", is_causal=True)
    run = jax.shard_map(
        layer, mesh=mesh, in_specs=(P(None, "seq"), P("seq")), out_specs=P(None, "seq")
    )
    with pytest.raises(ValueError, match=r"tensor_axis is \('model',\), 2 devices, and each has"):
        jax.eval_shape(run, X, POSITIONS)
