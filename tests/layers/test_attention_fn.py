"""The attention functions for Flax's own layers, against Flax's own attention."""

from __future__ import annotations

import copy
import functools
import pickle
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

from burst_jax.layers.attention_fn import linen_attention_fn, nnx_attention_fn
from burst_jax.layers.nnx_layer import BurstAttention
from burst_jax.layouts.permutation import to_layout
from burst_jax.parallel.mesh import SavedMesh

FEATURES, T = 32, 24
ARRAY = np.zeros((1, 8, 2, 4), np.float32)
BOTH = pytest.mark.parametrize("make", [nnx_attention_fn, linen_attention_fn])


def features(*batch, length=T, seed=1):
    return random_like(jax.ShapeDtypeStruct((*batch, length, FEATURES), jnp.float32), seed)


def make_layer(**options):
    return nnx.MultiHeadAttention(
        4, FEATURES, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), **options
    )


def run(layer, inputs, cotangent, **call):
    """Output, and the gradients of the kernels and the inputs."""
    graphdef, params = nnx.split(layer)

    @quick_jit
    def out_and_grads(params, inputs):
        out, vjp = jax.vjp(lambda p, xs: nnx.merge(graphdef, p)(*xs, **call), params, inputs)
        return out, vjp(cotangent)

    out, (of_params, of_inputs) = out_and_grads(params, inputs)
    names = ("query", "key", "value", "out")
    return out, {name: of_params[name]["kernel"].get_value() for name in names}, of_inputs


def test_cross_attention_equals_flax():
    x = features(length=16)
    inputs = x, features(length=40, seed=3)
    ring = make_layer(attention_fn=nnx_attention_fn(mesh=make_mesh(seq=2)))
    got, want = (run(layer, inputs, random_like(x, 2)) for layer in (ring, make_layer()))
    assert_close(got, want, 1e-5)


def test_causal_attention_equals_flax():
    """Causal by the call, in another layout, of two batch dimensions."""
    zigzag = functools.partial(to_layout, layout="zigzag", num_shards=3, axis=2)
    x = features(2, 3)
    cotangent = random_like(x, 2)
    fn = nnx_attention_fn(mesh=make_mesh(seq=3), layout="zigzag")
    got = run(make_layer(attention_fn=fn), (zigzag(x),), zigzag(cotangent), is_causal=True)
    out, kernels, (d_x,) = run(make_layer(), (x,), cotangent, is_causal=True)
    assert_close(got, (zigzag(out), kernels, (zigzag(d_x),)), 1e-5)


@pytest.mark.slow
def test_linen_equals_flax():
    """Causal by the option."""
    x = features(2)
    fn = linen_attention_fn(mesh=make_mesh(seq=3), is_causal=True)
    ring = linen.MultiHeadDotProductAttention(4, attention_fn=fn, force_fp32_for_softmax=True)
    own = linen.MultiHeadDotProductAttention(4)
    params = own.init(jax.random.key(0), x)

    def run(layer, **call):
        out, vjp = jax.vjp(lambda p, x: layer.apply(p, x, **call), params, x)
        grads, dx = vjp(random_like(x, 2))
        return out, {name: grads["params"][name]["kernel"] for name in ("query", "out")}, dx

    mask = linen.make_causal_mask(x[..., 0], dtype=bool)
    got, want = quick_jit(lambda: (run(ring), run(own, mask=mask)))()
    assert_close(got, want, 1e-5)
    with pytest.raises(ValueError, match="mask of shape"):
        ring.apply(params, x, mask=mask)
    einsums = {"qk_attn_weights_einsum_cls": lambda: jnp.einsum}
    custom = linen.MultiHeadDotProductAttention(4, attention_fn=fn, **einsums)
    with pytest.raises(NotImplementedError, match=r"qk_attn_weights_einsum is .*has no einsum"):
        custom.apply(params, x)


@pytest.mark.slow
def test_dtypes_are_promoted_and_default_precisions_accepted():
    attend = nnx_attention_fn(mesh=make_mesh(seq=2))
    q = random_like(jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32), 1)
    half = attend(q, q, q, dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    assert 1e-4 < relative_rms(half, attend(q, q, q)) < 1e-2

    def promote(arrays, dtype):
        return [x.astype(jnp.float16) for x in arrays]

    promoted = jax.eval_shape(functools.partial(attend, promote_dtype=promote), q, q, q)
    assert promoted.dtype == jnp.float16
    preset, pair = lax.DotAlgorithmPreset.DEFAULT, (lax.Precision.DEFAULT, "default")
    for precision in ("default", "DEFAULT", lax.Precision.DEFAULT, preset, pair, (None, None)):
        attend(q, q, q, precision=precision)
    for precision in ("HIGHEST", "nonsense", (None, lax.Precision.HIGH)):
        with pytest.raises(NotImplementedError, match="precision is "):
            attend(q, q, q, precision=precision)


def test_lengths_that_the_mesh_does_not_divide_are_padded():
    mesh = make_mesh(data=2, seq=3, kind=AxisType.Explicit)
    segments = np.repeat(np.array([[1, 2, 0], [3, 3, 3]], np.int32), [4, 5, 2], axis=1)
    keep = segments[:, None, :, None] == segments[:, None, None, :]
    keep &= segments[:, None, None, :] > 0
    q, k, v = (
        random_like(jax.ShapeDtypeStruct((2, 11, heads, 8), jnp.float32), seed)
        for seed, heads in enumerate((4, 2, 2))
    )
    ids: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), jnp.asarray(segments))
    fn = nnx_attention_fn(pad=True, mesh=mesh, batch_axis="data", is_causal=True, **ids)
    dense = functools.partial(jax.nn.dot_product_attention, implementation="xla", is_causal=True)
    want = quick_jit(functools.partial(dense, mask=keep))(q, k, v)
    with jax.set_mesh(mesh):
        got = jax.device_get(quick_jit(fn)(q, k, v))
    # Dense attention's results for padding are arbitrary.
    assert relative_rms(got[segments > 0], np.asarray(want)[segments > 0]) < 1e-5


@BOTH
def test_the_docstrings_segment_ids_run(make):
    (block,) = re.findall(r"::\n\n((?: {8}.*\n|\n)+)(?=    (?:For|Args))", make.__doc__)
    x = features(1, length=8)
    ids = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 2]], jnp.int32)
    names: dict[str, Any] = {"jax": jax, "nnx": nnx, "nn": linen, "mesh": make_mesh(seq=2)}
    names[make.__name__] = make
    layer = names["layer"] = make_layer()
    exec(textwrap.dedent(block), names)
    if make is nnx_attention_fn:
        mask = jnp.asarray(ids[:, None, :, None] == ids[:, None, None])
        own = layer.attention_fn
        want = layer(x, mask=mask, is_causal=True)
        assert relative_rms(names["attend"](layer, x, ids), want) < 1e-5
        assert layer.attention_fn is own  # Set back.
    else:
        out, params = names["Block"]().init_with_output(jax.random.key(0), x, ids)
        second = names["Block"]().apply(params, x.at[0, 0].add(1.0), ids)
        np.testing.assert_array_equal(second[0, 4:], out[0, 4:])
        assert (second[0, :4] != out[0, :4]).any()


def test_a_layer_that_keeps_another_calls_lengths_raises():
    layer, x = make_layer(), features(1, length=8)

    @nnx.jit
    def attend(layer, x, lengths):
        masks: Any = dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), lengths)
        layer.attention_fn = nnx_attention_fn(mesh=make_mesh(seq=2), **masks)
        return layer(x)

    attend(layer, x, jnp.asarray([5]))
    message = r"nnx_attention_fn was given query_seq_lengths and key_value_seq_lengths in a traced"
    with pytest.raises(ValueError, match=message + " function that has ended, .* back before"):
        layer(x)


def test_flax_drops_weights_unless_deterministic():
    x = features(1, length=8)
    ring = make_layer(attention_fn=nnx_attention_fn(mesh=make_mesh(seq=2)), dropout_rate=0.5)
    assert relative_rms(ring(x, deterministic=True), make_layer()(x)) < 1e-5
    rngs = [nnx.Rngs(dropout=seed) for seed in (3, 3, 4)]
    outs = [ring(x, deterministic=False, rngs=each) for each in rngs]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert relative_rms(outs[2], outs[0]) > 0.1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            {"mask": np.ones((1, 1, 8, 8), bool)},
            ValueError,
            r"mask of shape \(1, 1, 8, 8\).*seq_lengths.*segm",
        ),
        ({"bias": np.ones((1, 2, 8, 8))}, ValueError, r"bias of shape \(1, 2, 8, 8\).*is_causal"),
        ({"module": object()}, ValueError, r"sow_weights=True: .*sow_weights=False"),
        ({"dropout_rate": 0.1}, ValueError, r"dropout_rate is 0.1 and dropout_key is None"),
        ({"precision": "highest"}, NotImplementedError, r"precision is 'highest': .*pass None"),
        ({"key": ARRAY[0]}, ValueError, r"key has batch dimensions \(\), query \(1,\)"),
        ({"query": ARRAY[0, 0]}, ValueError, r"query has shape \(2, 4\): it needs \[\*batch"),
        ({"input_positions": np.arange(8)}, ValueError, r"input_positions of shape \(8,\): .*RoPE"),
        ({"attn_weights_value_einsum": 1}, NotImplementedError, "attn_weights_value_einsum is 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_calls_raise(call, error, message):
    arrays = dict.fromkeys(("query", "key", "value"), ARRAY)
    with pytest.raises(error, match=message):
        nnx_attention_fn(mesh=make_mesh(seq=2))(**arrays | call)


@BOTH
def test_functions_and_layers_can_be_pickled(make):
    """With their mesh, by its devices' ids."""
    mesh = make_mesh(seq=2)
    x, fn = features(2), make(mesh=mesh, is_causal=True)
    heads = x.reshape(2, T, 4, 8)
    want = fn(heads, heads, heads)
    kept = pickle.dumps(fn)
    np.testing.assert_array_equal(pickle.loads(kept)(heads, heads, heads), want)
    assert copy.deepcopy(fn) is fn
    layer = BurstAttention(FEATURES, 4, rope_theta=None, rngs=nnx.Rngs(0), mesh=mesh)
    again = pickle.loads(pickle.dumps(layer))
    assert nnx.graphdef(again) == nnx.graphdef(layer)
    np.testing.assert_array_equal(again(x), layer(x))
    saved = SavedMesh.of(mesh)._replace(ids=(0, 99))
    with pytest.raises(ValueError, match=r"mesh was pickled with cpu devices \[99\], which do not"):
        saved.restored()


@BOTH
def test_options_are_checked_immediately(make):
    with pytest.raises(TypeError, match=r"_fn got an unknown option 'pads': .* Did you mean 'pad'"):
        make(pads=True)
    with pytest.raises(ValueError, match=f"{make.__name__} does not accept return_residual"):
        make(return_residual=True)
    with pytest.raises(ValueError, match=r"pad is True with layout 'zigzag': .* before to_layout"):
        make(pad=True, layout="zigzag", mesh=make_mesh(seq=4))
    x = jnp.ones((1, 13, 4, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"T is 13 and S is 13: .* multiple of 4, .* pad=True"):
        make(mesh=make_mesh(seq=4))(x, x, x)
