"""Traced programs in wider precision: everything is wider, or it raises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from lowered_programs import abstract_mesh, compiling_for

import burst_jax
from burst_jax.attention.watch import watched
from burst_jax.verify.program import equations, float_dtypes, widened
from pallas_kernels.grouped import grouped_matmul

BF16 = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16)


def of_a_mixture(x, experts, sizes):
    """Attention and the experts' products, as in a layer of a mixture, with gradients."""

    def loss(x, experts):
        query = x.reshape(1, 256, 2, 64)
        out = burst_jax.local_attention(query, query, query, is_causal=True)
        return grouped_matmul(out.reshape(256, 128), experts, sizes).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1))(x, experts)


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_the_reference_of_a_mixture_on_a_gpu_has_no_kernels(gpu):
    shapes = BF16, jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)
    shapes = *shapes, jax.ShapeDtypeStruct((4,), jnp.int32)
    mesh = abstract_mesh(gpu, {"seq": 1})

    def trace():
        return jax.make_jaxpr(of_a_mixture)(*shapes)

    def names(closed):
        return {equation.primitive.name for equation in equations(closed.jaxpr)}

    with jax.sharding.use_abstract_mesh(mesh), compiling_for(gpu):
        kernels = trace()
        with watched("xla"):
            plain = trace()
        with pytest.raises(NotImplementedError, match=r"^burst_\w+ is written for its dtype"):
            jax.make_jaxpr(widened(kernels, "float32"))(*shapes)
        wide = jax.make_jaxpr(widened(plain, "float32"))(*shapes)
    assert names(kernels) - names(plain) >= {"mpmd_map"}
    # But for the inputs themselves.
    narrow = [
        equation
        for equation in equations(wide.jaxpr)
        if any(str(getattr(x.aval, "dtype", "")) == "bfloat16" for x in equation.outvars)
    ]
    assert not narrow


def doubled(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def by_kernel(x):
    return pl.pallas_call(doubled, out_shape=x, interpret=True, name="doubled")(x)


def by_callback(x):
    return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def by_foreign_function(x):
    return jax.ffi.ffi_call("doubled_bf16", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def by_bits(x):
    return jax.lax.bitcast_convert_type(x, jnp.int16).astype(jnp.float32)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (by_kernel, "doubled is written for its dtype"),
        (by_callback, "pure_callback is written for its dtype"),
        (by_foreign_function, "doubled_bf16 is written for its dtype"),
        (by_bits, r"it reads the bits of numbers \(bitcast_convert_type\)"),
    ],
)
def test_what_is_written_for_one_dtype_raises(function, message):
    closed = jax.make_jaxpr(lambda x: function(x).sum())(BF16)
    with pytest.raises(NotImplementedError, match=f"^{message}"):
        jax.make_jaxpr(widened(closed, "float32"))(BF16)


def test_random_numbers_keep_their_values():
    """They are made from bits, in the narrow dtype."""
    draw = jax.make_jaxpr(lambda key: jax.random.uniform(key, (64,), jnp.float32) * 3)
    key = jax.random.key(0)
    with jax.enable_x64(True):
        (wide,) = jax.jit(widened(draw(key), "float64"))(key)
    assert wide.dtype == jnp.float64
    expected = np.asarray(jax.random.uniform(key, (64,), jnp.float32), np.float64)
    np.testing.assert_allclose(wide, 3 * expected, rtol=1e-15, atol=0)


def test_functions_with_a_rule_for_vmap_are_widened():
    @jax.custom_batching.custom_vmap
    def third(x):
        return x / 3

    @third.def_vmap
    def _(axis_size, in_batched, x):
        return third(x), in_batched[0]

    closed = jax.make_jaxpr(third)(jnp.bfloat16(1))
    assert float_dtypes(closed.jaxpr) == {"bfloat16"}
    (wide,) = jax.jit(widened(closed, "float32"))(jnp.bfloat16(1))
    np.testing.assert_allclose(wide, np.float32(1) / 3, rtol=1e-7)
