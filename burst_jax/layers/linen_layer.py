"""The linen twin of :class:`burst_jax.BurstAttention`: the same layer on weights of linen's."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import meta
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from burst_jax.attention.arguments import MaskArrays, WindowSize
from burst_jax.attention.score_mod import MaskMod, ScoreMod
from burst_jax.layers.nnx_layer import KERNEL_INIT, REFUSED, BurstAttention
from burst_jax.layers.options import check_options
from burst_jax.layers.rope_variants import Rope
from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.mesh import AxisNames
from burst_jax.ring.rotation import RotationChoice
from pallas_kernels import Implementation

# What linen adds to the fields of a module by itself.
_OF_LINEN = ("parent", "name")


class LinenBurstAttention(linen.Module):
    """Self-attention over a mesh: projections, RoPE from positions, grouped heads, q/k norm.

    ::

        q, k, v = x Wq, x Wk, x Wv                 # [B,T,N,H] [B,T,K,H] [B,T,K,H]
        q, k = rope(norm(q)), rope(norm(k))        # by the positions of the call
        out = burst_attention(q, k, v, sink_logits=sinks, **options) Wo

    This is :class:`burst_jax.BurstAttention` for models in linen: it runs that layer on weights
    that linen holds. It finds the number of features in its input, as linen's layers do, and takes
    its random numbers from the stream "params". Its parameters have the names and shapes of the nnx
    layer's, so weights go from one to the other as they are::

        params = nnx.to_pure_dict(nnx.state(nnx_layer, nnx.Param))
        out = LinenBurstAttention(num_heads=8, mesh=mesh).apply({"params": params}, x, positions)

    B batch, T length, D features, N query heads, K key/value heads, H head dim of queries and keys,
    Hv head dim of values.

    Attributes:
      num_heads: number of query heads, N.
      num_kv_heads: number of key/value heads, K, a divisor of N; None is N.
      head_dim: number of features of a query's and a key's head, H, even with RoPE; None is D
        divided by N.
      value_head_dim: number of features of a value's head, Hv; None is H.
      out_features: number of features of the output; None is D.
      use_bias: whether the projections to query, key and value have biases.
      out_bias: whether the output projection has one; None is ``use_bias``.
      rope_theta: RoPE's base, or a variant of RoPE; None applies no RoPE.
      sinks: whether there is one more logit in each query head's softmax, a parameter ``sinks``,
        float32 ``[N]``.
      qk_norm: whether every query and key head is RMS-normalised over H, before RoPE.
      norm_epsilon: epsilon of these norms.
      norm_offset: what these norms add to their scales.
      dtype: floating dtype of the computation; None promotes the dtypes of input and weights.
      param_dtype: floating dtype of the weights.
      kernel_init: initializer of the query, key and value kernels, ``[D, N, H]``, ``[D, K, H]``
        and ``[D, K, Hv]``.
        It gets them as matrices, as linen's ``DenseGeneral`` does, and may be one of
        ``linen.with_partitioning``, which names the three axes.
      out_kernel_init: initializer of the output kernel, ``[N, H, out_features]``; None is
        ``kernel_init``.

    All other attributes are arguments of :func:`burst_attention`, with its defaults.

    Raises:
      TypeError: at once, for an unknown argument.
      ValueError: at once, for an argument of :func:`burst_attention` that the layer does not take;
        when it is initialized or applied, for sizes that do not fit together.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    out_features: int | None = None
    use_bias: bool = False
    out_bias: bool | None = None
    rope_theta: float | Rope | None = 10000.0
    sinks: bool = False
    qk_norm: bool = False
    norm_epsilon: float = 1e-6
    norm_offset: float = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: nnx.Initializer = KERNEL_INIT
    out_kernel_init: nnx.Initializer | None = None
    mesh: Mesh | AbstractMesh | None = None
    seq_axis: AxisNames = "seq"
    ulysses_axis: str | None = None
    batch_axis: AxisNames = None
    tensor_axis: AxisNames = None
    layout: Layout = "contiguous"
    is_causal: bool = False
    scale: float | None = None
    local_window_size: WindowSize = None
    logits_soft_cap: float | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    dropout_rate: float = 0.0
    implementation: str | Implementation | None = None
    deterministic: bool = False
    backward: RotationChoice = "auto"

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses arguments that there are not, before linen's own constructor does."""
        own = [field.name for field in dataclasses.fields(cls)]
        others = {name: value for name, value in kwargs.items() if name not in own}
        check_options("LinenBurstAttention", others, REFUSED, own)
        return super().__new__(cls)

    @linen.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | np.ndarray | None = None,
        segment_ids: jax.Array | None = None,
        *,
        deterministic: bool = False,
        **masks: Unpack[MaskArrays],
    ) -> jax.Array:
        """Attends over the whole sequence.

        Args:
          x: ``[B, T, D]``, its tokens in the order of ``layout``.
          positions: as in the call of :class:`burst_jax.BurstAttention`.
          segment_ids: as in the call of :class:`burst_jax.BurstAttention`.
          deterministic: whether nothing is dropped although there is a ``dropout_rate``. Otherwise
            the stream "dropout" gives the random numbers.
          **masks: as in the call of :class:`burst_jax.BurstAttention`.

        Returns:
          ``[B, T, out_features]`` in the dtype of the computation.

        Raises:
          ValueError: what :class:`burst_jax.BurstAttention` refuses.
        """
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}: it needs [B, T, features]")
        features, weights = x.shape[-1], None
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self._layer(features, nnx.Rngs(0))))
        shapes = nnx.to_pure_dict(state)
        if self.is_initializing():
            # The nnx layer makes all weights by one key; linen then takes them by name.
            rngs = nnx.Rngs(params=self.make_rng("params"))
            weights = nnx.to_pure_dict(nnx.state(self._layer(features, rngs), nnx.Param))

        def made(_key: jax.Array, name: str) -> Any:
            """Weights of a projection or a norm, or sinks; shapes alone where linen has them."""
            if weights is None:
                return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[name])
            return self._with_metadata(name, weights[name])

        nnx.replace_by_pure_dict(state, {name: self.param(name, made, name) for name in shapes})
        rngs = None
        if self.dropout_rate and not deterministic:
            rngs = nnx.Rngs(dropout=self.make_rng("dropout"))
        layer = nnx.merge(graphdef, state)
        return layer(x, positions, segment_ids, deterministic=deterministic, rngs=rngs, **masks)

    def _layer(self, in_features: int, rngs: nnx.Rngs) -> BurstAttention:
        """The nnx layer with this module's arguments, which it checks."""
        arguments = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _OF_LINEN
        }
        arguments["kernel_init"] = _unboxed(self.kernel_init)
        if self.out_kernel_init is not None:
            arguments["out_kernel_init"] = _unboxed(self.out_kernel_init)
        return BurstAttention(in_features, **arguments, rngs=rngs)

    def _with_metadata(self, name: str, weights: Any) -> Any:
        """A projection's weights, the kernel in the box that its initializer puts it into."""
        if not isinstance(weights, dict) or "kernel" not in weights:
            return weights
        own = self.out_kernel_init if name == "out" else None
        init, kernel = own or self.kernel_init, weights["kernel"]
        matrix = (kernel.size // kernel.shape[-1], kernel.shape[-1])
        box = jax.eval_shape(lambda: init(jax.random.key(0), matrix, kernel.dtype))
        if not isinstance(box, meta.AxisMetadata):
            return weights
        return weights | {"kernel": box.replace_boxed(kernel)}


def _unboxed(init: nnx.Initializer) -> nnx.Initializer:
    """``init`` without the axis names that ``linen.with_partitioning`` puts around an array."""

    def array(*args: Any, **kwargs: Any) -> jax.Array:
        made = init(*args, **kwargs)
        # Its own value, not linen's unbox, which would split the matrix by the kernel's axis names.
        return made.value if isinstance(made, linen.Partitioned) else meta.unbox(made)

    return array
