"""The feed-forward of a layer, SwiGLU or GeGLU, in chunks of tokens.

The hidden features are some four times as wide as the residual stream, so over a long shard the
arrays ``[T, M]`` are the largest of a layer. In chunks of tokens only one chunk's are there at a
time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.layers.low_rank import adapter_of
from burst_jax.layers.nnx_layer import add_bias
from burst_jax.models.config import DecoderConfig
from burst_jax.models.remat import MLP_PRODUCTS
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.mesh import AxisNames
from pallas_kernels.arrays import vary, varying_axes

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    """``(activation(x Wgate) * x Wup) Wdown``: SwiGLU or GeGLU (Shazeer 2020), with biases or none.

    With adapters (:mod:`burst_jax.layers.low_rank`) the three matrices are constants.

    Args:
      config: sizes and dtypes, the activation, whether there are biases, the number of chunks.
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
                use_bias=config.mlp_bias,
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

    def __call__(self, x: jax.Array, *, keeps_products: bool) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, D]``.

        Args:
          x: the normed residual stream.
          keeps_products: whether the gradient reads ``x Wgate`` and ``x Wup`` from the forward
            pass, see :func:`burst_jax.models.remat.keeps_mlp_products`.

        Raises:
          ValueError: ``config.mlp_chunks`` does not divide T.
        """
        config = self.config
        if x.shape[1] % config.mlp_chunks:
            raise ValueError(
                f"mlp_chunks is {config.mlp_chunks}: it must divide the {x.shape[1]} tokens of a "
                "row that each device has"
            )
        how = _How(
            config.activation,
            config.mlp_chunks,
            keeps_products,
            frozen=config.lora is not None,
        )
        weights = {
            "gate": self._projection(self.gate),
            "up": self._projection(self.up),
            # The bias of the results counts once, whoever sums them.
            "down": self._projection(self.down)._replace(bias=None),
        }
        x = x.astype(config.dtype)
        out = _feed_forward(how, *vary((x, weights), varying_axes(x, weights)))
        out = psum_manual(out, self.hidden_axis)
        bias = self.down.bias
        return out if bias is None else add_bias(out, bias[...])

    def _projection(self, linear: nnx.Linear) -> Projection:
        dtype = self.config.dtype
        bias = None if linear.bias is None else linear.bias[...].astype(dtype)
        return Projection(linear.kernel[...].astype(dtype), bias, adapter_of(linear, dtype))


class Projection(NamedTuple):
    """``x W + bias + (x A) B``, of which bias and adapter may be missing.

    Attributes:
      kernel: W, ``[inputs, outputs]``.
      bias: ``[outputs]``, or None.
      adapter: A ``[inputs, r]`` and B ``[r, outputs]``, or None.
    """

    kernel: Any
    bias: Any
    adapter: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """The product of ``[B, T, inputs]``."""
        out = x @ self.kernel
        if self.bias is not None:
            out += self.bias
        if self.adapter is not None:
            a, b = self.adapter
            out += (x @ a) @ b
        return out

    def input_gradient(self, dout: jax.Array) -> jax.Array:
        """The gradient of x, from that of the product."""
        dx = dout @ self.kernel.T
        if self.adapter is not None:
            a, b = self.adapter
            dx += (dout @ b.T) @ a.T
        return dx

    def gradients(self, x: jax.Array, dout: jax.Array, frozen: bool) -> Projection:
        """The float32 gradients of the weights; of what is frozen and of what is missing None."""
        kernel = bias = adapter = None
        if not frozen:
            kernel = _outer(x, dout)
            bias = None if self.bias is None else _total(dout)
        if self.adapter is not None:
            a, b = self.adapter
            adapter = _outer(x, dout @ b.T), _outer(x @ a, dout)
        return Projection(kernel, bias, adapter)

    def trained(self, frozen: bool) -> Projection:
        """The weights that :meth:`gradients` has gradients of, and None for the others."""
        return Projection(None, None, self.adapter) if frozen else self


class _How(NamedTuple):
    """What is static about a call.

    Attributes:
      activation: name of the activation.
      chunks: number of chunks of tokens.
      keeps_products: whether the gradient reads ``x Wgate`` and ``x Wup`` from the forward pass.
        Else it makes them again, a chunk at a time.
      frozen: whether kernels and biases are constants, so that adapters alone have gradients.
    """

    activation: str
    chunks: int
    keeps_products: bool
    frozen: bool

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.activation](gate) * up


# "gate", "up" and "down"; the last one without its bias.
Weights = dict[str, Projection]


def _cut(x: jax.Array, chunks: int) -> jax.Array:
    """``[B, T, ...]`` to ``[chunks, B, T / chunks, ...]``."""
    batch, tokens, *rest = x.shape
    return x.reshape(batch, chunks, tokens // chunks, *rest).swapaxes(0, 1)


def _joined(x: jax.Array) -> jax.Array:
    """The inverse of :func:`_cut`."""
    chunks, batch, tokens, *rest = x.shape
    return x.swapaxes(0, 1).reshape(batch, chunks * tokens, *rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(how: _How, x: jax.Array, weights: Weights) -> jax.Array:
    """All arrays have one dtype and vary over the same mesh axes."""
    return _forward(how, x, weights)[0]


def _forward(how: _How, x: jax.Array, weights: Weights) -> Any:
    def chunk(x: jax.Array) -> Any:
        products = weights["gate"](x), weights["up"](x)
        out = weights["down"](how.hidden(*products))
        return out, products if how.keeps_products else None

    if how.chunks == 1:
        out, products = chunk(x)
    else:
        out, products = jax.tree.map(_joined, lax.map(chunk, _cut(x, how.chunks)))
    products = jax.tree.map(lambda product: checkpoint_name(product, MLP_PRODUCTS), products)
    return out, (x, weights, products)


def _backward(how: _How, residuals: Any, dout: jax.Array) -> Any:
    x, weights, products = residuals
    gate, up, down = (weights[name] for name in ("gate", "up", "down"))

    def chunk(x: jax.Array, dout: jax.Array, products: Any) -> tuple[jax.Array, Weights]:
        """dx, and the float32 gradients of the weights."""
        made = (gate(x), up(x)) if products is None else products
        hidden, vjp = jax.vjp(how.hidden, *made)
        dgate, dup = vjp(down.input_gradient(dout))
        dx = gate.input_gradient(dgate) + up.input_gradient(dup)
        pairs = {"gate": (x, dgate), "up": (x, dup), "down": (hidden, dout)}
        return dx, {
            name: weights[name].gradients(*pair, how.frozen) for name, pair in pairs.items()
        }

    if how.chunks == 1:
        # XLA would leave the weights' gradients for later, and what they are made of in memory.
        dx, dweights = lax.optimization_barrier(chunk(x, dout, products))
    else:

        def step(sums: Any, inputs: Any) -> tuple[Any, jax.Array]:
            dx, parts = chunk(*inputs)
            return jax.tree.map(jnp.add, sums, parts), dx

        trained = {name: weights[name].trained(how.frozen) for name in weights}
        zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), trained)
        cut = jax.tree.map(partial(_cut, chunks=how.chunks), (x, dout, products))
        dweights, dx = lax.scan(step, vary(zeros, varying_axes(x)), cut)
        dx = _joined(dx)
    return dx, jax.tree.map(lambda gradient: gradient.astype(x.dtype), dweights)


def _outer(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x^T y`` over all tokens, summed in float32."""
    return jnp.einsum("bti,btj->ij", x, y, preferred_element_type=jnp.float32)


def _total(y: jax.Array) -> jax.Array:
    """The sum of all tokens in float32."""
    return y.sum((0, 1), dtype=jnp.float32)


_feed_forward.defvjp(_forward, _backward)
