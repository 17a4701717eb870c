"""An nnx attention layer for models whose sequences are sharded and permuted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from burst_jax.attention.api import burst_attention, ring_attention
from burst_jax.attention.arguments import MASK_ARRAYS, AttentionOptions, MaskArrays, WindowSize
from burst_jax.attention.order import refuse_wrong_order
from burst_jax.attention.score_mod import refuse_rows_and_heads
from burst_jax.layers.low_rank import add_adapter, cut_outputs
from burst_jax.layers.norm import RMSNorm
from burst_jax.layers.options import check_options
from burst_jax.layers.rope import RopeTable, apply_rope, rope_table
from burst_jax.layers.rope_variants import DynamicRope, Rope
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.mesh import (
    AxisNames,
    flat_names,
    gather_explicit,
    inside_shard_map,
    resolve_mesh,
    sequence_axes,
)

REFUSED = {
    "query_segment_ids": "pass segment_ids to the call",
    "key_value_segment_ids": "pass segment_ids to the call",
    **dict.fromkeys(MASK_ARRAYS, "pass it to the call, beside segment_ids"),
    **dict.fromkeys(
        ("query_offset", "query_positions", "key_value_positions"),
        "queries and keys are the same tokens; call burst_attention on projections of your own",
    ),
    "sink_logits": "sinks=True makes it a parameter of the layer",
    "alibi_slopes": "options hold no arrays: pass it to burst_attention or nnx_attention_fn",
    "pad": "pad tokens once, where batches are made, with pad_to_layout",
    "dropout_key": "pass rngs to the call, which takes the key from them",
    "return_residual": "the layer returns one array; call burst_attention for (out, lse)",
}

KERNEL_INIT = nnx.initializers.lecun_normal()
# That of gpt-oss in transformers.
SINK_INIT = nnx.initializers.normal(0.02)


class BurstAttention(nnx.Module):
    """Self-attention over a mesh: projections, RoPE from positions, grouped heads, q/k norm.

    ::

        q, k, v = x Wq, x Wk, x Wv                 # [B,T,N,H] [B,T,K,H] [B,T,K,Hv]
        q, k = rope(norm(q)), rope(norm(k))        # by the positions of the call
        out = burst_attention(q, k, v, sink_logits=sinks, **options) Wo

    B batch, T length, D features, N query heads, K key/value heads, H head dim of queries and keys,
    Hv head dim of values.

    Inside the caller's own ``shard_map`` over the sequence axes (over any axis, if no axis splits
    the sequence) the layer takes one device's tokens and weights, and calls
    :func:`ring_attention`. Along ``tensor_axis`` the weights are this device's
    heads; key and value weights may have all heads there. The outputs of all heads are summed.

    Args:
      in_features: number of features of the input, D.
      num_heads: number of query heads, N.
      num_kv_heads: number of key/value heads, K, a divisor of N; None is N.
      head_dim: number of features of a query's and a key's head, H, even with RoPE; None is
        ``in_features // num_heads``.
      value_head_dim: number of features of a value's head, Hv; None is H.
      out_features: number of features of the output; None is ``in_features``.
      use_bias: whether the projections to query, key and value have biases.
      out_bias: whether the output projection has one; None is ``use_bias``.
      rope_theta: RoPE's base, or a variant of RoPE (:class:`burst_jax.models.YarnRope`, ...); None
        applies no RoPE.
      sinks: whether there is one more logit in each query head's softmax, a parameter ``sinks``,
        float32 ``[N]``, as in gpt-oss: it takes weight that no token gets. See ``sink_logits`` of
        :func:`burst_attention`.
      qk_norm: whether every query and key head is RMS-normalised over H, before RoPE.
      norm_epsilon: epsilon of these norms.
      norm_offset: what these norms add to their scales, see :class:`burst_jax.layers.norm.RMSNorm`.
      dtype: floating dtype of the computation; None promotes the dtypes of input and weights.
      param_dtype: floating dtype of the weights.
      kernel_init: initializer of the query, key and value kernels.
      out_kernel_init: initializer of the output kernel; None is ``kernel_init``.
      rngs: random numbers for the initializers (stream "params").
      **options: keyword arguments of :func:`burst_attention`, like mesh, seq_axis, layout,
        is_causal and dropout_rate, but not ``return_residual``, not ``sink_logits``, which is the
        parameter ``sinks``, not ``alibi_slopes``, not ``dropout_key``, which the call takes from
        its ``rngs``, and not segment ids, lengths, prefixes, ranges of keys and masks by blocks,
        which are arguments of the call.

    Raises:
      TypeError: an unknown option.
      ValueError: sizes that do not fit together, or an option that the layer does not take.
      NotImplementedError: a :class:`burst_jax.models.DynamicRope`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = False,
        out_bias: bool | None = None,
        rope_theta: float | Rope | None = 10000.0,
        sinks: bool = False,
        qk_norm: bool = False,
        norm_epsilon: float = 1e-6,
        norm_offset: float = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = KERNEL_INIT,
        out_kernel_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[AttentionOptions],
    ) -> None:
        own = inspect.signature(BurstAttention.__init__).parameters
        check_options("BurstAttention", options, REFUSED, own)
        if options.get("deterministic") and options.get("dropout_rate"):
            raise ValueError(
                f"deterministic is True and dropout_rate {options['dropout_rate']}: as an option "
                "it asks for gradients of the same bits at every run, and weights are dropped; "
                "to drop none pass deterministic to the call, for the same bits implementation="
                "'triton' or 'xla'"
            )
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
        if isinstance(rope_theta, DynamicRope):
            raise NotImplementedError(
                f"rope_theta is {rope_theta}, whose frequencies depend on the longest row of the "
                "whole batch, which one device's layer does not know: make the table with "
                "burst_jax.layers.rope.rope_table(positions, head_dim, rope, length=...) and pass "
                "it to attend"
            )
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        if value_head_dim < 1:
            raise ValueError(f"value_head_dim is {value_head_dim}: it must be 1 or more, or None")
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        # A tuple, because nnx hashes the static attributes of a module.
        self.options: tuple[tuple[str, Any], ...] = tuple(sorted(options.items()))
        # What nnx's train() and eval() set in a whole model.
        self.deterministic = False

        def linear(
            features: int | tuple[int, ...],
            out: int | tuple[int, ...],
            init: nnx.Initializer,
            axis: int | tuple[int, ...] = -1,
            bias: bool = use_bias,
        ) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(
                features,
                out,
                axis=axis,
                use_bias=bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

        self.query = linear(in_features, (num_heads, head_dim), kernel_init)
        self.key = linear(in_features, (num_kv_heads, head_dim), kernel_init)
        self.value = linear(in_features, (num_kv_heads, value_head_dim), kernel_init)
        self.out = linear(
            (num_heads, value_head_dim),
            in_features if out_features is None else out_features,
            kernel_init if out_kernel_init is None else out_kernel_init,
            axis=(-2, -1),
            bias=use_bias if out_bias is None else out_bias,
        )

        def norm() -> RMSNorm | None:
            if not qk_norm:
                return None
            return RMSNorm(
                head_dim, epsilon=norm_epsilon, offset=norm_offset, param_dtype=param_dtype
            )

        self.query_norm, self.key_norm = norm(), norm()
        # Drawn last, so that the layer's other weights are the same with sinks and without.
        self.sinks = (
            nnx.Param(SINK_INIT(rngs.params(), (num_heads,), jnp.float32)) if sinks else None
        )

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | np.ndarray | None = None,
        segment_ids: jax.Array | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
        **masks: Unpack[MaskArrays],
    ) -> jax.Array:
        """Attends over the whole sequence.

        Args:
          x: ``[B, T, D]``, its tokens in the order of the option ``layout``.
          positions: integers ``[B, T]`` or ``[T]``, the place in its sequence of each token, in the
            order of the tokens (:func:`burst_jax.positions` makes them). Required with RoPE,
            refused without.
          segment_ids: integers ``[B, T]`` in the order of the tokens; tokens attend inside their
            segment. 0 is padding, which attends to nothing and is attended by nothing, so documents
            count from 1. None is one segment.
          deterministic: whether nothing is dropped although there is a ``dropout_rate``; None is
            the layer's attribute of this name, which ``model.eval()`` and ``model.train()`` set.
          rngs: random numbers of dropout (stream "dropout"); needed where weights are dropped.
          **masks: :func:`burst_attention`'s ``query_seq_lengths``, ``key_value_seq_lengths``,
            ``prefix_lengths``, ``key_starts``, ``key_ends`` and ``block_mask``.

        Returns:
          ``[B, T, out_features]`` in the dtype of the computation.

        Raises:
          ValueError: positions missing or not used, other shapes or dtypes than these, or positions
            in another order than the tokens (:mod:`burst_jax.attention.order`), like an ``arange``
            of
            permuted tokens. Under ``jit`` the values of positions are not known, so nothing raises;
            a row with such positions becomes NaN instead.
        """
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}: it needs [B, T, features]")
        dropout_key = self._dropout_key(deterministic, rngs)
        if self.rope_theta is None:
            if positions is not None:
                raise ValueError(
                    "positions are given but rope_theta is None: the layer would ignore them"
                )
            return self.attend(x, None, segment_ids, dropout_key=dropout_key, **masks)
        if positions is None:
            raise ValueError(
                "positions are missing: RoPE needs the position of every token, in the order that "
                "the tokens are in; burst_jax.positions(layout, length, num_shards) makes them"
            )
        rope = rope_table(positions, self.head_dim, self.rope_theta)
        out = self.attend(x, rope, segment_ids, dropout_key=dropout_key, **masks)
        return refuse_wrong_order(out, positions, segment_ids, dict(self.options) | masks)

    def attend(
        self,
        x: jax.Array,
        rope: RopeTable | None,
        segment_ids: jax.Array | None = None,
        *,
        local_window_size: WindowSize = None,
        attention_fn: Callable[..., jax.Array] | None = None,
        dropout_key: jax.Array | None = None,
        **masks: Unpack[MaskArrays],
    ) -> jax.Array:
        """Attends as the call does, with a RoPE table that layers can share.

        Nothing checks that the positions behind the table are in the tokens' order.

        Args:
          x: ``[B, T, D]``, its tokens in the order of the option ``layout``.
          rope: the table of the tokens' positions, made once for all layers by
            ``burst_jax.layers.rope.rope_table``; None applies no RoPE.
          segment_ids: integers ``[B, T]`` as in the call, or None.
          local_window_size: the window of this call, for layers that share their weights' stack but
            not their windows; None is the layer's option.
          attention_fn: what is called instead of :func:`burst_attention`, or inside a ``shard_map``
            instead of :func:`ring_attention`, with the same arguments; None is that function.
          dropout_key: a ``jax.random.key`` for the option ``dropout_rate``; None drops nothing.
          **masks: as in the call.

        Returns:
          ``[B, T, out_features]`` in the dtype of the computation.
        """
        if others := masks.keys() - set(MASK_ARRAYS):
            raise TypeError(
                f"BurstAttention's call got {', '.join(sorted(others))}: beside segment_ids it "
                f"takes {', '.join(MASK_ARRAYS)}; other arguments of burst_attention are options "
                "of the layer"
            )
        inside = inside_shard_map(sequence_axes(dict(self.options)))
        if not inside:
            self._refuse_explicit_heads()
        layer = gather_explicit(self)
        if inside:
            query = project(layer.query, x)
            self._refuse_heads_twice(query.shape[2])
            mine = (self._of_my_heads(linear, query.shape[2]) for linear in (self.key, self.value))
            key, value = (project(linear, x) for linear in mine)
        else:
            query, key, value = layer.query(x), layer.key(x), layer.value(x)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        if rope is not None:
            query, key = apply_rope(query, rope), apply_rope(key, rope)
        segments: AttentionOptions = {
            "query_segment_ids": segment_ids,
            "key_value_segment_ids": segment_ids,
        }
        options: Any = dict(self.options) | segments | masks
        if local_window_size is not None:
            options["local_window_size"] = local_window_size
        if layer.sinks is not None:
            options["sink_logits"] = layer.sinks[...].astype(jnp.float32)
        options["dropout_key"] = dropout_key
        if dropout_key is None:
            options["dropout_rate"] = 0.0
        if not inside:
            return layer.out((attention_fn or burst_attention)(query, key, value, **options))
        others = flat_names(*(options.pop(name, None) for name in ("batch_axis", "tensor_axis")))
        options.pop("mesh", None)
        refuse_rows_and_heads(others, options)
        if dropout_key is not None and others:
            # Devices along these axes have other rows or heads, which drop weights of their own.
            options["dropout_key"] = jax.random.fold_in(dropout_key, lax.axis_index(others))
        axis = options.pop("seq_axis", "seq")
        out = (attention_fn or ring_attention)(query, key, value, axis, **options)
        return project(self.out, out, summed_over=dict(self.options).get("tensor_axis"))

    def _dropout_key(self, deterministic: bool | None, rngs: nnx.Rngs | None) -> jax.Array | None:
        """The key of a call's dropout; None if it drops nothing."""
        rate = dict(self.options).get("dropout_rate", 0.0)
        if not rate or (self.deterministic if deterministic is None else deterministic):
            return None
        if rngs is None:
            raise ValueError(
                f"dropout_rate is {rate} and rngs is None: call the layer with "
                "rngs=nnx.Rngs(dropout=seed), or with deterministic=True where nothing is dropped"
            )
        return rngs.dropout()

    def _refuse_heads_twice(self, num_heads: int) -> None:
        """Raises if devices along ``tensor_axis`` have the same heads: all would be summed."""
        axes = flat_names(dict(self.options).get("tensor_axis"))
        all_heads = self.query.out_features[0]
        devices = math.prod(lax.axis_size(axis) for axis in axes)
        if num_heads * devices != all_heads:
            raise ValueError(
                f"tensor_axis is {axes}, {devices} devices, and each has the weights of "
                f"{num_heads} of {all_heads} query heads: inside a shard_map split the heads of "
                "the query and out weights over it, or leave tensor_axis out"
            )

    def _of_my_heads(self, linear: nnx.LinearGeneral, num_heads: int) -> nnx.LinearGeneral:
        """The projection to the key/value heads that ``num_heads`` query heads need.

        Inside a ``shard_map`` over ``tensor_axis`` a device has a part of the query heads, N'. If
        its
        key/value weights are whole, as they are where there are fewer key heads than devices, only
        the heads that its query heads need are projected.
        """
        (n, _), (k, lanes) = self.query.out_features, linear.out_features
        needed = max(1, k * num_heads // n)
        if linear.kernel.shape[-2] == needed:
            return linear
        first = (
            lax.axis_index(flat_names(dict(self.options)["tensor_axis"])) * num_heads // (n // k)
        )
        graphdef, adapter, state = nnx.split(linear, nnx.LoRAParam, ...)
        mine = jax.tree.map(
            lambda w: lax.dynamic_slice_in_dim(w, first, needed, axis=w.ndim - 2), state
        )
        adapter = cut_outputs(adapter, first * lanes, needed * lanes)
        return nnx.merge(graphdef, adapter, mine)

    def _refuse_explicit_heads(self) -> None:
        """Raises if heads are split over an Explicit axis.

        The projections would have to be split over it too, but their weights are made whole.
        """
        options = dict(self.options)
        names = flat_names(options.get("tensor_axis"))
        if not names:
            return
        explicit = set(resolve_mesh(options.get("mesh")).explicit_axes).intersection(names)
        if explicit:
            raise NotImplementedError(
                f"tensor_axis is {options['tensor_axis']!r}, an Explicit mesh axis: BurstAttention "
                "makes its weights whole over Explicit axes; make the axis Auto "
                "(axis_types=jax.sharding.AxisType.Auto), or leave tensor_axis out"
            )


def project(
    linear: nnx.LinearGeneral | nnx.Linear, x: jax.Array, summed_over: AxisNames = None
) -> jax.Array:
    """``linear(x)`` with whichever features ``linear`` has here, inside a ``shard_map``.

    Its adapter, if it has one, is added. The bias is added apart: nnx adds one of all devices'
    features only, and where devices' products are summed over mesh axes it counts once.
    """
    kernel = linear
    if linear.bias is not None:
        kernel = nnx.merge(*nnx.split(linear))
        kernel.bias, kernel.use_bias = None, False
    out = psum_manual(add_adapter(linear, x, kernel(x)), summed_over)
    return out if linear.bias is None else add_bias(out, linear.bias[...])


def add_bias(out: jax.Array, bias: jax.Array) -> jax.Array:
    """``out + bias`` in the dtype of ``out``, added in float32.

    The gradient of a bias is a sum over all tokens. It has the dtype of this addition, and in
    bfloat16 a sum of some hundred terms stops growing.
    """
    return (out.astype(jnp.float32) + bias.astype(jnp.float32)).astype(out.dtype)
