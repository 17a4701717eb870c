"""An nnx attention layer for models whose sequences are sharded and permuted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from burst_jax._options import check_options
from burst_jax.attention import burst_attention
from burst_jax.norm import RMSNorm
from burst_jax.order import refuse_wrong_order
from burst_jax.rope import RopeTable, apply_rope, rope_table
from burst_jax.sharding import flat_names, gathered, resolve_mesh

REFUSED = {
    "query_segment_ids": "pass segment_ids to the call",
    "key_value_segment_ids": "pass segment_ids to the call",
    "return_residual": "the layer returns one array; call burst_attention for (out, lse)",
}

KERNEL_INIT = nnx.initializers.lecun_normal()


class BurstAttention(nnx.Module):
    """Self-attention over a mesh: projections, optional q/k norm, RoPE from positions, GQA.

    ::

        q, k, v = x Wq, x Wk, x Wv                 # [B,T,N,H] [B,T,K,H] [B,T,K,H]
        q, k = rope(norm(q)), rope(norm(k))        # by the positions of the call
        out = burst_attention(q, k, v, **options) Wo

    B batch, T length, D features, N query heads, K key/value heads, H head dim.

    Args:
      in_features: D of the input.
      num_heads: N.
      num_kv_heads: K, a divisor of N; None is N.
      head_dim: H; None is ``in_features // num_heads``.
      out_features: features of the output; None is ``in_features``.
      use_bias: biases in the four projections.
      rope_theta: RoPE's base; None applies no RoPE.
      qk_norm: RMS norm over H of every query and key head, before RoPE.
      dtype: dtype of the computation (None: that of input and weights).
      param_dtype: dtype of the weights.
      kernel_init: initializer of the query, key and value kernels.
      out_kernel_init: that of the output kernel; None is ``kernel_init``.
      rngs: for the initializers (stream "params").
      **options: keyword arguments of :func:`burst_attention`, like mesh, seq_axis, layout and
        is_causal. All but the segment ids, which are an argument of the call, and
        ``return_residual``.

    Raises:
      TypeError: an unknown option.
      ValueError: sizes that do not fit together, or an option the layer does not take.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = False,
        rope_theta: float | None = 10000.0,
        qk_norm: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = KERNEL_INIT,
        out_kernel_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        check_options("BurstAttention", options, REFUSED)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads is {num_heads}, num_kv_heads {num_kv_heads}: num_heads must be a "
                "multiple of num_kv_heads"
            )
        if head_dim is None:
            if in_features % num_heads:
                raise ValueError(
                    f"in_features is {in_features}, num_heads {num_heads}: pass head_dim, or "
                    "features that the heads divide"
                )
            head_dim = in_features // num_heads
        if rope_theta is not None and head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}: RoPE rotates pairs, so it must be even")
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        # A tuple, because nnx hashes the static attributes of a module.
        self.options = tuple(sorted(options.items()))

        def linear(features: Any, out: Any, init: nnx.Initializer, axis: Any = -1) -> Any:
            return nnx.LinearGeneral(
                features,
                out,
                axis=axis,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

        self.query = linear(in_features, (num_heads, head_dim), kernel_init)
        self.key = linear(in_features, (num_kv_heads, head_dim), kernel_init)
        self.value = linear(in_features, (num_kv_heads, head_dim), kernel_init)
        self.out = linear(
            (num_heads, head_dim),
            in_features if out_features is None else out_features,
            kernel_init if out_kernel_init is None else out_kernel_init,
            axis=(-2, -1),
        )
        self.query_norm = RMSNorm(head_dim, param_dtype=param_dtype) if qk_norm else None
        self.key_norm = RMSNorm(head_dim, param_dtype=param_dtype) if qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | np.ndarray | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attends over the whole sequence.

        Args:
          x: ``[B, T, D]``, its tokens in the order of the option ``layout``.
          positions: integers ``[B, T]`` or ``[T]``, the token's place in its sequence, in that same
            order (:func:`burst_jax.positions` makes it). Required with RoPE, refused without.
          segment_ids: integers ``[B, T]``; tokens attend inside their segment. 0 is padding, which
            attends to nothing and is attended by nothing, so documents count from 1. None is one
            segment.

        Returns:
          ``[B, T, out_features]``.

        Raises:
          ValueError: positions missing or not used, a shape or dtype that is not the above, or
            positions in another order than the tokens (:mod:`burst_jax.order`), like an
            ``arange`` of permuted tokens. Under ``jit`` their values are not known; then the rows
            with such positions are NaN.
        """
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}: it needs [B, T, features]")
        if self.rope_theta is None:
            if positions is not None:
                raise ValueError(
                    "positions are given but rope_theta is None: the layer would ignore them"
                )
            return self.attend(x, None, segment_ids)
        if positions is None:
            raise ValueError(
                "positions are missing: RoPE needs the position of every token, in the order that "
                "the tokens are in; burst_jax.positions(layout, length, num_shards) makes them"
            )
        rope = rope_table(positions, self.head_dim, self.rope_theta)
        out = self.attend(x, rope, segment_ids)
        return refuse_wrong_order(out, positions, segment_ids, dict(self.options))

    def attend(
        self, x: jax.Array, rope: RopeTable | None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """As the call, with RoPE's table ready-made, to share it between layers.

        The positions that the table was made of are not checked.
        """
        self._refuse_explicit_heads()
        layer = gathered(self)
        query, key, value = layer.query(x), layer.key(x), layer.value(x)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        if rope is not None:
            query, key = apply_rope(query, rope), apply_rope(key, rope)
        out = burst_attention(
            query,
            key,
            value,
            query_segment_ids=segment_ids,
            key_value_segment_ids=segment_ids,
            **dict(self.options),
        )
        return layer.out(out)

    def _refuse_explicit_heads(self) -> None:
        """Raises if heads are split over an Explicit axis, as the projections would have to be."""
        options = dict(self.options)
        names = flat_names(options.get("head_axis"))
        if not names:
            return
        explicit = set(resolve_mesh(options.get("mesh")).explicit_axes).intersection(names)
        if explicit:
            raise NotImplementedError(
                f"head_axis is {options['head_axis']!r}, an Explicit mesh axis: BurstAttention "
                "makes its weights whole over Explicit axes; make the axis Auto "
                "(axis_types=jax.sharding.AxisType.Auto), or leave head_axis out"
            )
