"""The drop-ins for Flax's attention layers, against Flax's own attention."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from implementations import quick_jit
from jax import lax
from jax.sharding import AxisType
from meshes import assert_close, make_mesh, random_like, relative_rms

from burst_jax.layers.adapters import linen_attention_fn, nnx_attention_fn
from burst_jax.layouts.permutation import from_layout, to_layout

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


DEFAULTS = (
    None, "default", "DEFAULT", lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT,
    (lax.Precision.DEFAULT, "default"), (None, None),
)  # fmt: skip


@pytest.mark.parametrize("adapter", [nnx_attention_fn, linen_attention_fn])
def test_what_means_nothing_is_taken(adapter):
    """Precisions that are None by another name, and None for bias and mask, by place."""
    attend, q = adapter(mesh=make_mesh(seq=2)), jnp.asarray(ARRAY + 1)
    want = attend(q, q, q)
    for precision in DEFAULTS:
        np.testing.assert_array_equal(attend(q, q, q, None, None, precision=precision), want)
    for precision in ("HIGHEST", "nonsense", (None, lax.Precision.HIGH)):
        with pytest.raises(NotImplementedError, match="precision is "):
            attend(q, q, q, precision=precision)


def test_layers_with_the_default_precision_run():
    x = jnp.ones((1, 8, FEATURES), jnp.float32)
    fn = nnx_attention_fn(mesh=make_mesh(seq=2))
    layer = make_layer(attention_fn=fn, precision=lax.Precision.DEFAULT)
    assert layer(x).shape == x.shape


PADDED = {
    "causal": ((2, 13, 13), {"is_causal": True}, {"seq": 4}),
    "full-other-lengths": ((2, 13, 18), {}, {"seq": 4}),
    "keys-alone": ((2, 16, 9), {"local_window_size": 8}, {"seq": 4}),
    "segments": ((2, 11, 11), {"is_causal": True, "ids": True}, {"data": 2, "seq": 3}),
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, AxisType.Auto) for case in PADDED),
        ("full-other-lengths", AxisType.Explicit),
        ("segments", AxisType.Explicit),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_lengths_that_the_mesh_does_not_divide_are_padded(case, kind):
    (batch, t, s), options, axes = PADDED[case]
    mesh = make_mesh(axes.get("data", 1), axes["seq"], kind=kind)
    options: dict[str, Any] = dict(options)
    ids: dict[str, Any] = {}
    keep, row = None, np.ones((batch, t), np.int32)
    if options.pop("ids", False):
        row = np.repeat(np.array([[1, 2, 0], [3, 3, 3]], np.int32), [4, 5, 2], axis=1)
        ids = {"query_segment_ids": jnp.asarray(row), "key_value_segment_ids": jnp.asarray(row)}
        keep = (row[:, None, :, None] == row[:, None, None, :]) & (row[:, None, None, :] > 0)
    shapes = ((batch, t, 4, 8), (batch, s, 2, 8), (batch, s, 2, 8), (batch, t, 4, 8))
    *qkv, cotangent = (
        random_like(jax.ShapeDtypeStruct(shape, jnp.float32), seed)
        for seed, shape in enumerate(shapes)
    )
    # Rows of padding mean nothing in dense attention.
    cotangent = cotangent * jnp.asarray(row[:, :, None, None] > 0, jnp.float32)

    def results(attend):
        @quick_jit
        def run(*qkv):
            out, vjp = jax.vjp(attend, *qkv)
            return out, vjp(cotangent)

        return run(*qkv)

    want = results(
        lambda *qkv: jax.nn.dot_product_attention(*qkv, mask=keep, implementation="xla", **options)
    )
    fn = nnx_attention_fn(pad=True, mesh=mesh, batch_axis="data", **options, **ids)
    with jax.set_mesh(mesh):
        got = jax.device_get(results(fn))
    real = row > 0
    assert relative_rms(got[0][real], np.asarray(want[0])[real]) < 1e-5
    assert_close(got[1], want[1], 1e-5)


def test_lengths_that_do_not_fit_name_the_way_out():
    x = jnp.ones((1, 13, FEATURES), jnp.float32)
    options = {"mesh": make_mesh(seq=4)}
    with pytest.raises(ValueError, match=r"T is 13 and S is 13: .* multiple of 4, .* pad=True"):
        make_layer(attention_fn=nnx_attention_fn(**options))(x)
    padded = make_layer(attention_fn=nnx_attention_fn(pad=True, **options))
    assert relative_rms(padded(x), make_layer()(x)) < 1e-5
    with pytest.raises(ValueError, match=r"pad is True with layout 'zigzag': .* before to_layout"):
        linen_attention_fn(pad=True, layout="zigzag", **options)


@pytest.mark.parametrize("adapter", [nnx_attention_fn, linen_attention_fn])
def test_the_docstrings_segment_ids_run(adapter):
    (block,) = re.findall(r"::\n\n((?: {8}.*\n|\n)+)(?=    (?:What|Args))", adapter.__doc__)
    mesh = make_mesh(seq=2)
    x = random_like(jax.ShapeDtypeStruct((1, 8, FEATURES), jnp.float32), 1)
    ids = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 2]], jnp.int32)
    names: dict[str, Any] = {
        "jax": jax,
        "nnx": nnx,
        "nn": linen,
        "mesh": mesh,
        adapter.__name__: adapter,
    }
    layer = names["layer"] = make_layer()
    exec(textwrap.dedent(block), names)
    if adapter is nnx_attention_fn:
        first = names["attend"](names["params"], x, ids)
        want = layer(
            x, mask=jnp.asarray(ids[:, None, :, None] == ids[:, None, None]), is_causal=True
        )
        assert relative_rms(first, want) < 1e-5
    else:
        out, params = names["Block"]().init_with_output(jax.random.key(0), x, ids)
        changed = x.at[0, 0].add(1.0)
        second = names["Block"]().apply(params, changed, ids)
        np.testing.assert_array_equal(second[0, 4:], out[0, 4:])
        assert (second[0, :4] != out[0, :4]).any()


def test_the_layer_of_flax_drops_weights_unless_it_is_deterministic():
    x = random_like(jax.ShapeDtypeStruct((1, 8, FEATURES), jnp.float32), 1)
    fn = nnx_attention_fn(mesh=make_mesh(seq=2))
    ring = make_layer(attention_fn=fn, dropout_rate=0.5)
    assert relative_rms(ring(x, deterministic=True), make_layer()(x)) < 1e-5
    rngs = [nnx.Rngs(dropout=seed) for seed in (3, 3, 4)]
    outs = [ring(x, deterministic=False, rngs=each) for each in rngs]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert relative_rms(outs[2], outs[0]) > 0.1
    on_four = make_layer(attention_fn=nnx_attention_fn(mesh=make_mesh(seq=4)), dropout_rate=0.5)
    four = on_four(x, deterministic=False, rngs=nnx.Rngs(dropout=3))
    assert relative_rms(four, outs[0]) < 1e-5


ARRAY = np.zeros((1, 8, 2, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"mask": np.ones((1, 1, 8, 8), bool)}, ValueError, r"mask of shape \(1, 1, 8, 8\).*segm"),
        ({"bias": np.ones((1, 2, 8, 8))}, ValueError, r"bias of shape \(1, 2, 8, 8\).*is_causal"),
        ({"module": object()}, ValueError, r"sow_weights=True: .*sow_weights=False"),
        ({"dropout_rate": 0.1}, ValueError, r"dropout_rate is 0.1 and dropout_key is None"),
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
    with pytest.raises(TypeError, match=r"_fn got an unknown .*\. Did you mean 'is_causal'\?"):
        adapter(is_casual=True)
    with pytest.raises(TypeError, match=r"unknown option 'pads': .* Did you mean 'pad'\?"):
        adapter(pads=True)
    with pytest.raises(ValueError, match=f"{adapter.__name__} does not take return_residual"):
        adapter(return_residual=True)
