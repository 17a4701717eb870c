"""The linen version of :class:`burst_jax.BurstAttention`."""

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
from burst_jax.layers.attention_fn import check_options
from burst_jax.layers.nnx_layer import KERNEL_INIT, REJECTED, BurstAttention
from burst_jax.layers.rope import Rope
from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.mesh import AxisNames
from burst_jax.ring.rotation import RotationChoice
from pallas_kernels import Implementation

# Fields that linen adds to every module.
LINEN_FIELDS = ("parent", "name")


class LinenBurstAttention(linen.Module):
    """Self-attention over a mesh: projections, RoPE from positions, grouped heads, q/k norm.

    ::

        q, k, v = x Wq, x Wk, x Wv                 # [B,T,N,H] [B,T,K,H] [B,T,K,H]
        q, k = rope(norm(q)), rope(norm(k))        # by the positions of the call
        out = burst_attention(q, k, v, sink_logits=sinks, **options) Wo

    :class:`burst_jax.BurstAttention` for models in linen: it runs that layer on weights that linen
    holds. As in linen's layers the number of features comes from the input, and the random numbers
    from the stream "params". Parameters have the names and shapes of the nnx layer's, so weights
    can be exchanged::

        params = nnx.to_pure_dict(nnx.state(nnx_layer, nnx.Param))
        out = LinenBurstAttention(num_heads=8, mesh=mesh).apply({"params": params}, x, positions)

    The attributes are the arguments of :class:`burst_jax.BurstAttention`, and its options of
    :func:`burst_attention`, with the same defaults. The initializers may be of
    ``linen.with_partitioning``, naming the three axes of a kernel: ``[D, N, H]``, ``[D, K, H]`` and
    ``[D, K, Hv]``, or ``[N, Hv, out_features]`` for the output kernel. As for linen's
    ``DenseGeneral`` they get kernels as matrices.

    Raises:
      TypeError: immediately, for an unknown argument.
      ValueError: immediately, for an argument of :func:`burst_attention` that the layer does not
        accept; when initialized or applied, for sizes that do not fit together.
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
        """Rejects unknown arguments with a suggestion, before linen's own constructor does."""
        own = [field.name for field in dataclasses.fields(cls)]
        others = {name: value for name, value in kwargs.items() if name not in own}
        check_options("LinenBurstAttention", others, REJECTED, own)
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
          x: ``[B, T, D]``, tokens in the order of ``layout``.
          positions: as in the call of :class:`burst_jax.BurstAttention`, like all that follow.
          segment_ids: integers ``[B, T]``.
          deterministic: whether dropout is disabled. Otherwise it draws from the stream "dropout".
          **masks: masks given as arrays.

        Returns:
          ``[B, T, out_features]`` in the dtype of the computation.

        Raises:
          ValueError: as :class:`burst_jax.BurstAttention`.
        """
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}: it needs [B, T, features]")
        features, weights = x.shape[-1], None
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self._layer(features, nnx.Rngs(0))))
        shapes = nnx.to_pure_dict(state)
        if self.is_initializing():
            # The nnx layer initializes all weights from one key; linen then gets them by name.
            rngs = nnx.Rngs(params=self.make_rng("params"))
            weights = nnx.to_pure_dict(nnx.state(self._layer(features, rngs), nnx.Param))

        def initial(_key: jax.Array, name: str) -> Any:
            """A submodule's weights; when applied, zeros of their shapes, which linen compares."""
            if weights is None:
                return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[name])
            return self._with_metadata(name, weights[name])

        nnx.replace_by_pure_dict(state, {name: self.param(name, initial, name) for name in shapes})
        rngs = None
        if self.dropout_rate and not deterministic:
            rngs = nnx.Rngs(dropout=self.make_rng("dropout"))
        layer = nnx.merge(graphdef, state)
        return layer(x, positions, segment_ids, deterministic=deterministic, rngs=rngs, **masks)

    def _layer(self, in_features: int, rngs: nnx.Rngs) -> BurstAttention:
        """The nnx layer with this module's arguments."""
        arguments = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in LINEN_FIELDS
        }
        arguments["kernel_init"] = _unboxed(self.kernel_init)
        if self.out_kernel_init is not None:
            arguments["out_kernel_init"] = _unboxed(self.out_kernel_init)
        return BurstAttention(in_features, **arguments, rngs=rngs)

    def _with_metadata(self, name: str, weights: Any) -> Any:
        """A submodule's weights, with its kernel boxed as its initializer boxes it."""
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
    """``init`` without the box of ``linen.with_partitioning``."""

    def array(*args: Any, **kwargs: Any) -> jax.Array:
        made = init(*args, **kwargs)
        # Not linen's unbox, which would constrain the matrix to the kernel's three axis names.
        return made.value if isinstance(made, linen.Partitioned) else meta.unbox(made)

    return array
