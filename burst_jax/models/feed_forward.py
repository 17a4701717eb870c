"""The feed-forward of a layer: SwiGLU, in chunks of tokens, with a gradient that keeps little.

The hidden features are some four times as wide as the residual stream, so over a long shard the
arrays ``[T, M]`` are the largest of a layer. In chunks of tokens only one chunk's are there at a
time, forward and backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.models.config import DecoderConfig
from burst_jax.models.remat import MLP_PRODUCTS, keeps_mlp_products
from burst_jax.sharding import AxisNames
from burst_jax.weights import sum_over
from pallas_kernels.arrays import vary, varying_axes


class SwiGLU(nnx.Module):
    """``(silu(x Wgate) * x Wup) Wdown`` (Shazeer 2020).

    Args:
      config: sizes and dtypes.
      down_init: initializer of ``Wdown``.
      hidden_axis: mesh axis, or axes, that split the hidden features, or None. Inside a
        ``shard_map`` each device has its features of the three matrices; the results are summed.
      rngs: random numbers for the initializers (stream "params").
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        down_init: nnx.Initializer,
        hidden_axis: AxisNames = None,
        rngs: nnx.Rngs,
    ) -> None:
        def linear(features: int, out: int, init: nnx.Initializer) -> nnx.Linear:
            return nnx.Linear(
                features,
                out,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

        self.gate = linear(config.embed_dim, config.mlp_dim, nnx.initializers.lecun_normal())
        self.up = linear(config.embed_dim, config.mlp_dim, nnx.initializers.lecun_normal())
        self.down = linear(config.mlp_dim, config.embed_dim, down_init)
        self.hidden_axis = hidden_axis
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, D]``."""
        config = self.config
        kernels = tuple(
            linear.kernel[...].astype(config.dtype) for linear in (self.gate, self.up, self.down)
        )
        x = x.astype(config.dtype)
        axes = varying_axes(x, kernels)
        kept = keeps_mlp_products(config.remat)
        out = _feed_forward(_chunks(config.mlp_chunks, x), kept, *vary((x, kernels), axes))
        return sum_over(out, self.hidden_axis)


def _chunks(wanted: int, x: jax.Array) -> int:
    """The number of chunks: ``wanted``, but a row that it does not divide raises ValueError."""
    if x.shape[1] % wanted:
        raise ValueError(
            f"mlp_chunks is {wanted}: it must divide the {x.shape[1]} tokens of a row that each "
            "device has"
        )
    return wanted


def _activate(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _cut(x: jax.Array, chunks: int) -> jax.Array:
    """``[B, T, ...]`` to ``[chunks, B, T / chunks, ...]``."""
    batch, tokens, *rest = x.shape
    return x.reshape(batch, chunks, tokens // chunks, *rest).swapaxes(0, 1)


def _joined(x: jax.Array) -> jax.Array:
    """The inverse of :func:`_cut`."""
    chunks, batch, tokens, *rest = x.shape
    return x.swapaxes(0, 1).reshape(batch, chunks * tokens, *rest)


# The kernels of gate, up and down.
Kernels = tuple[jax.Array, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _feed_forward(chunks: int, keep_products: bool, x: jax.Array, kernels: Kernels) -> jax.Array:
    """``x`` and ``kernels`` in one dtype, varying over the same mesh axes.

    ``keep_products`` says that the gradient reads ``x Wgate`` and ``x Wup`` from the forward pass.
    Else it makes them again, a chunk at a time.
    """
    return _forward(chunks, keep_products, x, kernels)[0]


def _forward(chunks: int, keep_products: bool, x: jax.Array, kernels: Kernels) -> Any:
    gate, up, down = kernels

    def chunk(x: jax.Array) -> Any:
        products = x @ gate, x @ up
        return _activate(*products) @ down, products if keep_products else None

    if chunks == 1:
        out, products = chunk(x)
    else:
        out, products = lax.map(chunk, _cut(x, chunks))
        out, products = jax.tree.map(_joined, (out, products))
    products = jax.tree.map(lambda product: checkpoint_name(product, MLP_PRODUCTS), products)
    return out, (x, kernels, products)


def _backward(chunks: int, keep_products: bool, residuals: Any, dout: jax.Array) -> Any:
    del keep_products
    x, (gate, up, down), products = residuals
    dtype = x.dtype

    def chunk(x: jax.Array, dout: jax.Array, products: Any) -> tuple[jax.Array, Any]:
        """dx, and the float32 gradients of the kernels."""
        if products is None:
            products = x @ gate, x @ up
        hidden, vjp = jax.vjp(_activate, *products)
        dgate, dup = vjp(dout @ down.T)
        dx = dgate @ gate.T + dup @ up.T
        return dx, (_outer(x, dgate), _outer(x, dup), _outer(hidden, dout))

    if chunks == 1:
        dx, dkernels = chunk(x, dout, products)
    else:

        def step(sums: Any, inputs: Any) -> tuple[Any, jax.Array]:
            dx, parts = chunk(*inputs)
            return jax.tree.map(jnp.add, sums, parts), dx

        zeros = jax.tree.map(lambda k: jnp.zeros(k.shape, jnp.float32), (gate, up, down))
        cut = jax.tree.map(partial(_cut, chunks=chunks), (x, dout, products))
        dkernels, dx = lax.scan(step, vary(zeros, varying_axes(x)), cut)
        dx = _joined(dx)
    return dx, tuple(kernel.astype(dtype) for kernel in dkernels)


def _outer(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x^T y`` over all tokens, summed in float32."""
    return jnp.einsum("bti,btj->ij", x, y, preferred_element_type=jnp.float32)


_feed_forward.defvjp(_forward, _backward)
