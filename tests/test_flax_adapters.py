"""The drop-ins for Flax's attention layers, against Flax's own attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from implementations import quick_jit
from meshes import assert_close, make_mesh, random_like, relative_rms

from burst_jax.flax_adapters import linen_attention_fn, nnx_attention_fn
from burst_jax.layout import from_layout, to_layout

FEATURES = 32


def make_layer(**options):
    return nnx.MultiHeadAttention(
        4, FEATURES, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), **options
    )


def run(layer, inputs, cotangent, **call):
    """Output and the gradients of all weights and inputs."""
    graphdef, params = nnx.split(layer)

    @quick_jit
    def out_and_grads(params, inputs):
        out, vjp = jax.vjp(lambda p, xs: nnx.merge(graphdef, p)(*xs, **call), params, inputs)
        return out, vjp(cotangent)

    return out_and_grads(params, inputs)


@pytest.mark.parametrize(
    ("batch", "is_causal"),
    [((), True), ((2,), False), ((2, 3), True)],
    ids=["batch0-causal", "batch1-full", "batch2-causal"],
)
def test_equals_flax(batch, is_causal):
    x = random_like(jax.ShapeDtypeStruct((*batch, 24, FEATURES), jnp.float32), 1)
    cotangent = random_like(x, 2)
    ring = make_layer(attention_fn=nnx_attention_fn(mesh=make_mesh(seq=3)))
    want = run(make_layer(), (x,), cotangent, is_causal=is_causal)
    got = run(ring, (x,), cotangent, is_causal=is_causal)
    assert relative_rms(got[0], want[0]) < 1e-5
    kernels = {name: want[1][0][name]["kernel"] for name in ("query", "key", "value", "out")}
    assert_close({name: got[1][0][name]["kernel"] for name in kernels}, kernels, 1e-5)
    assert_close(got[1][1], want[1][1], 1e-5)


def test_cross_attention_equals_flax():
    x = random_like(jax.ShapeDtypeStruct((2, 16, FEATURES), jnp.float32), 1)
    memory = random_like(jax.ShapeDtypeStruct((2, 40, FEATURES), jnp.float32), 2)
    ring = make_layer(attention_fn=nnx_attention_fn(mesh=make_mesh(seq=4)))
    want, got = make_layer()(x, memory), ring(x, memory)
    assert relative_rms(got, want) < 1e-5


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_linen_equals_flax(is_causal):
    x = random_like(jax.ShapeDtypeStruct((2, 24, FEATURES), jnp.float32), 1)
    cotangent = random_like(x, 2)
    fn = linen_attention_fn(mesh=make_mesh(seq=3), is_causal=is_causal)
    ring = linen.MultiHeadDotProductAttention(4, attention_fn=fn, force_fp32_for_softmax=True)
    own = linen.MultiHeadDotProductAttention(4)
    params = own.init(jax.random.key(0), x)
    mask = linen.make_causal_mask(x[..., 0], dtype=bool) if is_causal else None

    def run(layer, **call):
        out, vjp = jax.vjp(lambda p, x: layer.apply(p, x, **call), params, x)
        grads, dx = vjp(cotangent)
        kernels = {name: grads["params"][name]["kernel"] for name in ("query", "value", "out")}
        return out, kernels, dx

    got, want = quick_jit(lambda: run(ring))(), run(own, mask=mask)
    assert_close(got, want, 1e-5)


def test_linen_passes_what_we_refuse():
    fn = linen_attention_fn(mesh=make_mesh(seq=2))
    x = jnp.zeros((1, 8, FEATURES), jnp.float32)
    layer = linen.MultiHeadDotProductAttention(4, attention_fn=fn)
    params = layer.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="mask of shape"):
        layer.apply(params, x, mask=jnp.ones((1, 4, 8, 8), bool))
    with pytest.raises(ValueError, match="sow_weights"):
        layer.apply(params, x, sow_weights=True)
    einsums = {"qk_attn_weights_einsum_cls": lambda: jnp.einsum}
    custom = linen.MultiHeadDotProductAttention(4, attention_fn=fn, **einsums)
    with pytest.raises(NotImplementedError, match=r"qk_attn_weights_einsum is .*no such einsum"):
        custom.apply(params, x)


@pytest.mark.parametrize("where", ["option", "call", "both"])
def test_causal_by_option_or_call(where):
    x = random_like(jax.ShapeDtypeStruct((1, 16, FEATURES), jnp.float32), 1)
    option, call = where in ("option", "both"), where in ("call", "both")
    ring = make_layer(attention_fn=nnx_attention_fn(mesh=make_mesh(seq=4), is_causal=option))
    want = make_layer()(x, is_causal=True)
    assert relative_rms(ring(x, is_causal=call), want) < 1e-5
    assert relative_rms(make_layer()(x), want) > 0.01


def test_segment_ids_replace_the_mask_and_layouts_permute():
    x = random_like(jax.ShapeDtypeStruct((2, 16, FEATURES), jnp.float32), 1)
    segments = np.repeat(np.array([[1, 2], [3, 3]], np.int32), 8, axis=1)
    mask = jnp.asarray(segments[:, None, :, None] == segments[:, None, None, :])
    want = make_layer()(x, mask=mask, is_causal=True)
    ids = jnp.asarray(to_layout(segments, "zigzag", 4))
    ring = make_layer(
        attention_fn=nnx_attention_fn(
            mesh=make_mesh(data=2, seq=4),
            batch_axis="data",
            layout="zigzag",
            is_causal=True,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
        )
    )
    got = from_layout(ring(to_layout(x, "zigzag", 4)), "zigzag", 4)
    assert relative_rms(got, want) < 1e-5


def test_dtype_is_honoured():
    attend = nnx_attention_fn(mesh=make_mesh(seq=2))
    q = random_like(jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32), 1)
    assert attend(q, q, q).dtype == jnp.float32
    half = attend(q, q, q, dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    assert 1e-4 < relative_rms(half, attend(q, q, q)) < 1e-2
    promoted = attend(q, q, q, promote_dtype=lambda xs, dtype: [x.astype(jnp.float16) for x in xs])
    assert promoted.dtype == jnp.float16


def test_deterministic_dropout_is_none():
    x = random_like(jax.ShapeDtypeStruct((1, 8, FEATURES), jnp.float32), 1)
    fn = nnx_attention_fn(mesh=make_mesh(seq=2))
    ring = make_layer(attention_fn=fn, dropout_rate=0.5)
    assert relative_rms(ring(x, deterministic=True), make_layer()(x)) < 1e-5
    with pytest.raises(NotImplementedError, match=r"dropout_rate is 0.5: .*deterministic=True"):
        ring(x, deterministic=False)


ARRAY = np.zeros((1, 8, 2, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"mask": np.ones((1, 1, 8, 8), bool)}, ValueError, r"mask of shape \(1, 1, 8, 8\).*segm"),
        ({"bias": np.ones((1, 2, 8, 8))}, ValueError, r"bias of shape \(1, 2, 8, 8\).*is_causal"),
        ({"module": object()}, ValueError, r"sow_weights=True: .*sow_weights=False"),
        ({"dropout_rate": 0.1}, NotImplementedError, r"dropout_rate is 0.1: .*set it to 0.0"),
        ({"precision": "highest"}, NotImplementedError, r"precision is 'highest': .*pass None"),
        ({"key": ARRAY[0]}, ValueError, r"key has batch dimensions \(\), query \(1,\)"),
        ({"query": ARRAY[0, 0]}, ValueError, r"query has shape \(2, 4\): it needs \[\*batch"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("adapter", [nnx_attention_fn, linen_attention_fn])
def test_what_cannot_be_honoured_raises(adapter, call, error, message):
    call = dict(call)
    arrays = {name: jnp.asarray(call.pop(name, ARRAY)) for name in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        adapter(mesh=make_mesh(seq=2))(**arrays, **call)


def test_flax_passes_what_we_refuse():
    layer = make_layer(attention_fn=nnx_attention_fn(mesh=make_mesh(seq=2)))
    x = jnp.zeros((1, 8, FEATURES), jnp.float32)
    with pytest.raises(ValueError, match="mask of shape"):
        layer(x, mask=jnp.ones((1, 4, 8, 8), bool))
    with pytest.raises(ValueError, match="sow_weights"):
        layer(x, sow_weights=True)
    with pytest.raises(ValueError, match="input_positions"):
        layer(x, input_positions=jnp.arange(8, dtype=jnp.int32))


@pytest.mark.parametrize("adapter", [nnx_attention_fn, linen_attention_fn])
def test_options_are_checked_at_once(adapter):
    with pytest.raises(TypeError, match=r"unknown option 'causal': use mesh, seq_axis.*is_causal"):
        adapter(causal=True)
    with pytest.raises(ValueError, match=f"{adapter.__name__} does not take return_residual"):
        adapter(return_residual=True)
