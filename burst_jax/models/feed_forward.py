"""The feed-forward of a decoder layer: the interface, and the gated MLP (SwiGLU, GeGLU).

``DecoderConfig.feed_forward`` is the class that the decoder's layers construct. Another one, like
the mixture of experts, is a subclass of :class:`FeedForward` in a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.layers.lora import scaled_adapter
from burst_jax.layers.projection import add_bias
from burst_jax.models.activations import ACTIVATIONS
from burst_jax.models.remat import MLP_PRODUCTS
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.mesh import AxisNames
from burst_jax.parallel.rules import LogicalAxes
from burst_jax.ring.max_logits import MaxLogits
from pallas_kernels.arrays import vary, varying_axes

# burst_jax.models.DecoderConfig, whose module imports this one.
DecoderConfig = Any


class Auxiliary(NamedTuple):
    """What a model computes for training in addition to its output.

    Attributes:
      loss: float32 scalar that is added to the mean loss of the targets, or None.
      metrics: float32 scalars by name.
      max_logits: bounds of the largest logit, float32 ``[L, N]``, of the L layers with softmax
        attention, in their order; None if nobody asks for them.
    """

    loss: jax.Array | None
    metrics: dict[str, jax.Array]
    max_logits: MaxLogits | None = None


class FeedForward(nnx.Module):
    """A layer's feed-forward, ``[B, T, D]`` to ``[B, T, D]``.

    It runs inside a ``shard_map``, on one device's tokens. Its weights are gathered over the axes
    of "embed"; dimensions named "mlp" stay sharded over ``hidden_axis``, over which ``__call__``
    must sum its result (``lax.psum``), and over no axis by name: :meth:`decoding` has other axes.
    docs/flax.md has an example.

    A class with auxiliary losses, like one that balances the load of experts, overrides
    ``with_sums`` and ``auxiliary``.

    Args:
      config: sizes and dtypes.
      out_init: initializer of the output matrix, whose result is added to the residual stream.
      hidden_axis: mesh axis, or axes, that shard the dimensions named "mlp" in ``weight_axes``, or
        None.
      rngs: random numbers for the initializers (stream "params").

    Attributes:
      weight_axes: logical names (:class:`burst_jax.ShardingRules`) of each weight's dimensions, by
        the weight's path in the module, without the leading dimension of the stacked layers. A
        dimension named None is not sharded.
      chunks_tokens: whether the class implements ``config.mlp_chunks``. Without it
        :class:`DecoderConfig` rejects more than one chunk.
      hidden_axis: as in the arguments.
      expert_axis: mesh axis, or axes, that shard the dimensions named "expert" in ``weight_axes``
        (``ShardingRules.expert``). These are not gathered: the devices must exchange their tokens.
        The decoder sets it.
    """

    weight_axes: ClassVar[Mapping[tuple[str, ...], LogicalAxes]]
    chunks_tokens: ClassVar[bool] = False
    hidden_axis: AxisNames
    expert_axis: AxisNames = None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        out_init: nnx.Initializer,
        hidden_axis: AxisNames = None,
        rngs: nnx.Rngs,
    ) -> None:
        raise NotImplementedError

    def __call__(self, x: jax.Array, *, keeps_products: bool) -> jax.Array:
        """Runs it.

        Args:
          x: ``[B, T, D]``, the normalized residual stream.
          keeps_products: whether the backward pass reads large intermediates from the forward pass
            or recomputes them (:func:`burst_jax.models.remat.keeps_mlp_products`). If True, name
            them :data:`burst_jax.models.remat.MLP_PRODUCTS` with ``checkpoint_name``.
        """
        raise NotImplementedError

    def decoding(self, *, hidden_axis: AxisNames, same_tokens_axis: AxisNames) -> Self:
        """A copy that runs decoding steps: few tokens, and no gradient.

        Args:
          hidden_axis: mesh axes that shard "mlp" in such steps, which may be padded with zeros.
            Weights with an "expert" dimension are sharded over those that are not in
            ``expert_axis``.
          same_tokens_axis: those of ``expert_axis`` along which devices have the same tokens.
        """
        del same_tokens_axis
        block = nnx.merge(*nnx.split(self))
        block.hidden_axis = hidden_axis
        return block

    def with_sums(
        self, x: jax.Array, present: jax.Array | None, *, keeps_products: bool
    ) -> tuple[jax.Array, Any]:
        """Runs it, and sums what :meth:`auxiliary` needs over this device's tokens.

        Args:
          x: ``[B, T, D]``, the normalized residual stream.
          present: int32 ``[B, T]``, 0 for padding, or None.
          keeps_products: as in ``__call__``.

        Returns:
          ``(out, sums)``; ``sums`` is a pytree of float32 arrays, or None without any.
        """
        del present
        return self(x, keeps_products=keeps_products), None

    @classmethod
    def auxiliary(cls, config: DecoderConfig, sums: Any) -> Auxiliary:
        """The auxiliary loss and metrics, from the sums of :meth:`with_sums`.

        Args:
          config: sizes and dtypes.
          sums: summed over the global batch, with a leading dimension for the layers.
        """
        del config, sums
        return Auxiliary(None, {})

    @classmethod
    def projections(cls, config: DecoderConfig) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of the ``nnx.Linear`` attributes that LoRA adapters may extend."""
        del config
        return {}

    @classmethod
    def num_matmul_params(cls, config: DecoderConfig) -> int:
        """Number of weights that multiply each token, for counts of floating point operations.

        Raises:
          NotImplementedError: the class defines neither this nor ``projections``.
        """
        if not cls.projections(config):
            raise NotImplementedError(
                f"{cls.__name__} defines no num_matmul_params: define this class method, which "
                "counts floating point operations, or projections"
            )
        return sum(inputs * outputs for inputs, outputs in cls.projections(config).values())


class GatedMLP(FeedForward):
    """``(activation(x Wgate) * x Wup) Wdown``: SwiGLU or GeGLU (Shazeer 2020), optional biases.

    The arguments are those of :class:`FeedForward`. With LoRA adapters the three matrices are
    constants.

    The hidden features are about four times as wide as the residual stream, so with long sequences
    the arrays ``[T, M]`` are a layer's largest. With ``config.mlp_chunks`` the MLP runs in chunks
    of tokens, forward and backward, and holds one chunk's hidden features at a time.
    """

    weight_axes: ClassVar[Mapping[tuple[str, ...], LogicalAxes]] = {
        ("gate", "kernel"): ("embed", "mlp"),
        ("up", "kernel"): ("embed", "mlp"),
        ("down", "kernel"): ("mlp", "embed"),
        ("gate", "bias"): ("mlp",),
        ("up", "bias"): ("mlp",),
        ("down", "bias"): (None,),
    }
    chunks_tokens: ClassVar[bool] = True

    def __init__(
        self,
        config: DecoderConfig,
        *,
        out_init: nnx.Initializer,
        hidden_axis: AxisNames = None,
        rngs: nnx.Rngs,
    ) -> None:
        def linear(name: str, init: nnx.Initializer) -> nnx.Linear:
            return nnx.Linear(
                *self.projections(config)[name],
                use_bias=config.mlp_bias,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

        self.gate = linear("gate", nnx.initializers.lecun_normal())
        self.up = linear("up", nnx.initializers.lecun_normal())
        self.down = linear("down", out_init)
        self.hidden_axis = hidden_axis
        self.config = config

    @classmethod
    def projections(cls, config: DecoderConfig) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of gate, up and down."""
        d, m = config.embed_dim, config.mlp_dim
        return {"gate": (d, m), "up": (d, m), "down": (m, d)}

    def __call__(self, x: jax.Array, *, keeps_products: bool) -> jax.Array:
        """See :class:`FeedForward`.

        Raises:
          ValueError: ``config.mlp_chunks`` does not divide T.
        """
        config = self.config
        check_chunks(config, x.shape[1])
        static = _MlpStatic(
            config.activation, config.mlp_chunks, keeps_products, frozen=config.lora is not None
        )
        weights = {
            "gate": self._projection(self.gate),
            "up": self._projection(self.up),
            # The output's bias is added once, after the sum over devices.
            "down": self._projection(self.down)._replace(bias=None),
        }
        x = x.astype(config.dtype)
        out = _mlp(static, *vary((x, weights), varying_axes(x, weights)))
        out = psum_manual(out, self.hidden_axis)
        bias = self.down.bias
        return out if bias is None else add_bias(out, bias[...])

    def _projection(self, linear: nnx.Linear) -> Projection:
        dtype = self.config.dtype
        bias = None if linear.bias is None else linear.bias[...].astype(dtype)
        return Projection(linear.kernel[...].astype(dtype), bias, scaled_adapter(linear, dtype))


def check_chunks(config: DecoderConfig, tokens: int) -> None:
    """Raises ValueError unless ``config.mlp_chunks`` divides a device's tokens per sequence."""
    if tokens % config.mlp_chunks:
        raise ValueError(
            f"mlp_chunks is {config.mlp_chunks}: it must divide the {tokens} tokens per "
            "sequence on each device"
        )


class Projection(NamedTuple):
    """``x W + bias + (x A) B``, bias and adapter being optional.

    Attributes:
      kernel: W, ``[inputs, outputs]``.
      bias: ``[outputs]``, or None.
      adapter: A ``[inputs, r]`` and B ``[r, outputs]``, or None.
    """

    kernel: Any
    bias: Any
    adapter: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """The output for ``[B, T, inputs]``."""
        out = x @ self.kernel
        if self.bias is not None:
            out += self.bias
        if self.adapter is not None:
            a, b = self.adapter
            out += (x @ a) @ b
        return out

    def input_gradient(self, dout: jax.Array) -> jax.Array:
        """The gradient of x, from that of the output."""
        dx = dout @ self.kernel.T
        if self.adapter is not None:
            a, b = self.adapter
            dx += (dout @ b.T) @ a.T
        return dx

    def gradients(self, x: jax.Array, dout: jax.Array, frozen: bool) -> Projection:
        """The float32 gradients of the trained weights; None for all others."""
        kernel = bias = adapter = None
        if not frozen:
            kernel = _outer(x, dout)
            bias = None if self.bias is None else dout.sum((0, 1), dtype=jnp.float32)
        if self.adapter is not None:
            a, b = self.adapter
            adapter = _outer(x, dout @ b.T), _outer(x @ a, dout)
        return Projection(kernel, bias, adapter)


class _MlpStatic(NamedTuple):
    """The static arguments of an MLP.

    Attributes:
      activation: name of the activation.
      chunks: number of chunks of tokens.
      keeps_products: whether the gradient reads ``x Wgate`` and ``x Wup`` from the forward pass;
        otherwise it recomputes them, one chunk at a time.
      frozen: whether kernels and biases are constants, so that only adapters have gradients.
    """

    activation: str
    chunks: int
    keeps_products: bool
    frozen: bool

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.activation](gate) * up


# "gate", "up" and "down", the last one without its bias.
Weights = dict[str, Projection]


def _split(x: jax.Array, chunks: int) -> jax.Array:
    """``[B, T, ...]`` to ``[chunks, B, T / chunks, ...]``."""
    batch, tokens, *rest = x.shape
    return x.reshape(batch, chunks, tokens // chunks, *rest).swapaxes(0, 1)


def _merge(x: jax.Array) -> jax.Array:
    """The inverse of :func:`_split`."""
    chunks, batch, tokens, *rest = x.shape
    return x.swapaxes(0, 1).reshape(batch, chunks * tokens, *rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(static: _MlpStatic, x: jax.Array, weights: Weights) -> jax.Array:
    """All arrays have one dtype and vary over the same mesh axes."""
    return _forward(static, x, weights)[0]


def _forward(static: _MlpStatic, x: jax.Array, weights: Weights) -> Any:
    def chunk(x: jax.Array) -> Any:
        products = weights["gate"](x), weights["up"](x)
        out = weights["down"](static.hidden(*products))
        return out, products if static.keeps_products else None

    if static.chunks == 1:
        out, products = chunk(x)
    else:
        out, products = jax.tree.map(_merge, lax.map(chunk, _split(x, static.chunks)))
    products = jax.tree.map(lambda product: checkpoint_name(product, MLP_PRODUCTS), products)
    return out, (x, weights, products)


def _backward(static: _MlpStatic, residuals: Any, dout: jax.Array) -> Any:
    x, weights, products = residuals
    gate, up, down = (weights[name] for name in ("gate", "up", "down"))

    def chunk(x: jax.Array, dout: jax.Array, products: Any) -> tuple[jax.Array, Weights]:
        """dx, and the float32 gradients of the weights."""
        inputs = (gate(x), up(x)) if products is None else products
        hidden, vjp = jax.vjp(static.hidden, *inputs)
        dgate, dup = vjp(down.input_gradient(dout))
        dx = gate.input_gradient(dgate) + up.input_gradient(dup)
        pairs = {"gate": (x, dgate), "up": (x, dup), "down": (hidden, dout)}
        return dx, {
            name: weights[name].gradients(*pair, static.frozen) for name, pair in pairs.items()
        }

    if static.chunks == 1:
        # Without the barrier XLA delays the weights' gradients and keeps their inputs in memory.
        dx, dweights = lax.optimization_barrier(chunk(x, dout, products))
    else:

        def step(sums: Any, inputs: Any) -> tuple[Any, jax.Array]:
            dx, terms = chunk(*inputs)
            return jax.tree.map(jnp.add, sums, terms), dx

        chunks = jax.tree.map(partial(_split, chunks=static.chunks), (x, dout, products))
        _, terms = jax.eval_shape(lambda: chunk(*jax.tree.map(lambda x: x[0], chunks)))
        zeros = jax.tree.map(lambda term: jnp.zeros(term.shape, term.dtype), terms)
        dweights, dx = lax.scan(step, vary(zeros, varying_axes(x)), chunks)
        dx = _merge(dx)
    return dx, jax.tree.map(lambda gradient: gradient.astype(x.dtype), dweights)


def _outer(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x^T y`` over all tokens, summed in float32."""
    return jnp.einsum("bti,btj->ij", x, y, preferred_element_type=jnp.float32)


_mlp.defvjp(_forward, _backward)
