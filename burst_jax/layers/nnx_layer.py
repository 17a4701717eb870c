"""An nnx attention layer for models with sharded, permuted sequences (context parallelism)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from burst_jax.attention.api import burst_attention, ring_attention
from burst_jax.attention.arguments import MASK_ARRAYS, AttentionOptions, MaskArrays, WindowSize
from burst_jax.attention.order import reject_wrong_order
from burst_jax.attention.score_mod import reject_batch_and_head_indices
from burst_jax.attention.segment_ids import SIDES, with_padding_zero
from burst_jax.errors import check_bool
from burst_jax.layers.attention_fn import check_options
from burst_jax.layers.norm import JointRMSNorm, RMSNorm, check_qk_norm
from burst_jax.layers.projection import (
    check_explicit_heads,
    check_local_heads,
    local_heads,
    project,
)
from burst_jax.layers.rope import DynamicRope, Rope, RopeTable, apply_rope, rope_table
from burst_jax.layouts.parse import layout_option
from burst_jax.layouts.tables import DocumentTables
from burst_jax.parallel.mesh import (
    flat_names,
    gather_explicit,
    inside_shard_map,
    resolve_mesh,
    sequence_axes,
    with_devices,
    without_devices,
)

# (query, key, value, **options of burst_attention) -> (out, aux), or in a shard_map
# (query, key, value, axis, **options of ring_attention) -> (out, aux); see BurstAttention.attend.
AttentionFn = Callable[..., tuple[jax.Array, Any]]

REJECTED = {
    **dict.fromkeys(("segment_ids", *SIDES), "pass segment_ids to the call"),
    **dict.fromkeys((*MASK_ARRAYS, "document_tables"), "pass it to the call, next to segment_ids"),
    **dict.fromkeys(
        ("query_offset", "query_positions", "key_value_positions"),
        "queries and keys are the same tokens; call burst_attention on projections of your own",
    ),
    "sink_logits": "sinks=True makes it a parameter of the layer",
    "alibi_slopes": "options hold no arrays: pass it to burst_attention or nnx_attention_fn",
    "pad": "pad tokens once, where batches are made, with pad_to_layout",
    "dropout_key": "pass rngs to the call, which draws the key from them",
    "return_residual": "the layer returns one array; call burst_attention for (out, lse)",
}

KERNEL_INIT = nnx.initializers.lecun_normal()
SINK_INIT = nnx.initializers.normal(0.02)  # As for gpt-oss in transformers.


class BurstAttention(nnx.Module):
    """Self-attention over a mesh: projections, RoPE from positions, grouped heads, q/k norm.

    ::

        q, k, v = x Wq, x Wk, x Wv                 # [B,T,N,H] [B,T,K,H] [B,T,K,Hv]
        q, k = rope(norm(q)), rope(norm(k))        # by the positions of the call
        out = burst_attention(q, k, v, sink_logits=sinks, **options) Wo
        out = (burst_attention(...) * sigmoid(x Wg)) Wo        # with output_gate

    B batch, T length, D features, N query heads, K key/value heads, H head dim of queries and keys,
    Hv head dim of values.

    Inside a ``shard_map`` over the sequence axes (over any axis, if the sequence is not sharded)
    the layer's input and weights are one device's, and it calls :func:`ring_attention`. Along
    ``tensor_axis`` a device has the weights of its own heads; key and value weights may have all
    heads. The output projections of all devices' heads are summed.

    Args:
      in_features: number of features of the input, D.
      num_heads: number of query heads, N.
      num_kv_heads: number of key/value heads, K, a divisor of N; None is N.
      head_dim: number of features of a query and key head, H, even with RoPE; None is D / N.
      value_head_dim: number of features of a value head, Hv; None is H.
      out_features: number of features of the output; None is D.
      use_bias: whether the query, key and value projections have biases.
      out_bias: whether the output projection has one; None is ``use_bias``.
      rope_theta: RoPE's base, or a :class:`burst_jax.models.Rope`; None applies no RoPE.
      sinks: whether each query head's softmax has one more logit, a parameter ``sinks``, float32
        ``[N]``, as in gpt-oss. See ``sink_logits`` of :func:`burst_attention`.
      qk_norm: whether every query and key head is RMS-normalized over H, before RoPE. "joint"
        normalizes the features of all heads of a token together, as in OLMo 2
        (:class:`burst_jax.layers.norm.JointRMSNorm`).
      output_gate: whether attention's output is multiplied by ``sigmoid(x Wg)``, ``[B, T, N, Hv]``,
        before the output projection, as in Qwen3-Next; Wg is the projection ``output_gate``.
      norm_epsilon: epsilon of these norms.
      norm_offset: added to the scales of these norms, see :class:`burst_jax.layers.norm.RMSNorm`.
      dtype: floating dtype of the computation; None promotes the dtypes of input and weights.
      param_dtype: floating dtype of the weights.
      kernel_init: initializer of the query, key and value kernels.
      out_kernel_init: initializer of the output kernel; None is ``kernel_init``.
      rngs: random numbers for the initializers (stream "params").
      **options: keyword arguments of :func:`burst_attention`, like mesh, seq_axis, layout,
        is_causal and dropout_rate. Masks given as arrays are arguments of the call; ``sink_logits``
        is the parameter ``sinks``, and ``dropout_key`` is drawn from the call's ``rngs``.

    Raises:
      TypeError: an unknown option.
      ValueError: sizes that do not fit together, or an option that the layer does not accept.
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
        qk_norm: bool | Literal["joint"] = False,
        output_gate: bool = False,
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
        check_options("BurstAttention", options, REJECTED, own)
        if options.get("deterministic") and options.get("dropout_rate"):
            raise ValueError(
                f"deterministic is True and dropout_rate {options['dropout_rate']}: the option "
                "deterministic requests bitwise reproducible gradients; to disable dropout pass "
                "deterministic to the call, and for reproducible gradients use implementation='xla'"
            )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None:
            if num_heads < 1 or in_features % num_heads:
                raise ValueError(
                    f"in_features is {in_features}, num_heads {num_heads}: pass head_dim, or "
                    "features that the heads divide"
                )
            head_dim = in_features // num_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        _check_sizes(num_heads, num_kv_heads, head_dim, value_head_dim, rope_theta)
        check_qk_norm(qk_norm)
        flags = {"use_bias": use_bias, "sinks": sinks, "output_gate": output_gate}
        for name, value in (flags | ({} if out_bias is None else {"out_bias": out_bias})).items():
            check_bool(name, value)
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        # A tuple, because nnx hashes the static attributes of a module.
        self.options: tuple[tuple[str, Any], ...] = tuple(sorted(options.items()))
        # Set by nnx's train() and eval().
        self.deterministic = False

        linear = functools.partial(
            nnx.LinearGeneral, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        inner = functools.partial(linear, use_bias=use_bias, kernel_init=kernel_init)
        to_heads = functools.partial(inner, in_features)
        self.query = to_heads((num_heads, head_dim))
        self._add_key_and_value(inner, in_features, num_kv_heads, head_dim, value_head_dim)
        self.out = linear(
            (num_heads, value_head_dim),
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            use_bias=use_bias if out_bias is None else out_bias,
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
        )

        def norm(heads: int) -> RMSNorm | JointRMSNorm | None:
            make, more = functools.partial(RMSNorm, head_dim), {}
            if qk_norm == "joint":
                make = functools.partial(JointRMSNorm, heads, head_dim)
                more = {"heads_axis": options.get("tensor_axis")}
            numbers = {"epsilon": norm_epsilon, "offset": norm_offset, "param_dtype": param_dtype}
            return make(**numbers, **more) if qk_norm else None

        self.query_norm, self.key_norm = norm(num_heads), norm(num_kv_heads)
        self.output_gate = to_heads((num_heads, value_head_dim)) if output_gate else None
        # Last, so that the other weights do not depend on it.
        self.sinks = (
            nnx.Param(SINK_INIT(rngs.params(), (num_heads,), jnp.float32)) if sinks else None
        )

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | np.ndarray | None = None,
        segment_ids: jax.Array | None = None,
        *,
        document_tables: DocumentTables | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
        **masks: Unpack[MaskArrays],
    ) -> jax.Array:
        """Attends over the whole sequence.

        Args:
          x: ``[B, T, D]``, tokens in the order of the option ``layout``.
          positions: integers ``[B, T]`` or ``[T]``: each token's position in its sequence, in the
            order of the tokens (:func:`burst_jax.positions`). Required with RoPE and in a balanced
            layout, else rejected.
          segment_ids: integers ``[B, T]`` in the order of the tokens; tokens attend within their
            segment. 0, or the option ``padding_id``, is padding; None is one segment.
          document_tables: those of :func:`burst_attention`, in a balanced layout.
          deterministic: whether dropout is disabled; None is the attribute of this name, which
            ``model.eval()`` and ``model.train()`` set.
          rngs: random numbers for dropout (stream "dropout"); required with dropout.
          **masks: ``query_seq_lengths``, ``key_value_seq_lengths``, ``prefix_lengths``,
            ``key_starts``, ``key_ends`` and ``block_mask`` of :func:`burst_attention`.

        Returns:
          ``[B, T, out_features]`` in the dtype of the computation.

        Raises:
          ValueError: positions missing or unused, wrong shapes or dtypes, or positions in another
            order than the tokens, like an ``arange`` for permuted tokens. Under ``jit`` the values
            of positions are unknown: a sequence with such positions becomes NaN instead.
        """
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}: it needs [B, T, features]")
        arrays: Any = {
            "positions": positions,
            "document_tables": document_tables,
            "dropout_key": self._dropout_key(deterministic, rngs),
        }
        if self.rope_theta is None:
            if positions is not None and self._given_positions(positions) is None:
                raise ValueError(
                    "positions are given and rope_theta is None: the layer would ignore them"
                )
            return self.attend(x, None, segment_ids, **arrays, **masks)[0]
        if positions is None:
            raise ValueError(
                "positions are missing: RoPE needs every token's position, in the order of the "
                "tokens; use burst_jax.positions(layout, length, num_shards)"
            )
        rope = rope_table(positions, self.head_dim, self.rope_theta)
        out, _ = self.attend(x, rope, segment_ids, **arrays, **masks)
        options: dict[str, Any] = dict(self.options) | masks
        if segment_ids is not None:
            padding_id = options.get("padding_id", 0)
            segment_ids = with_padding_zero("segment_ids", segment_ids, padding_id)
        return reject_wrong_order(out, positions, segment_ids, options)

    def attend(
        self,
        x: jax.Array,
        rope: RopeTable | None,
        segment_ids: jax.Array | None = None,
        *,
        positions: jax.Array | np.ndarray | None = None,
        local_window_size: WindowSize = None,
        attention_fn: AttentionFn | None = None,
        document_tables: DocumentTables | None = None,
        dropout_key: jax.Array | None = None,
        **masks: Unpack[MaskArrays],
    ) -> tuple[jax.Array, Any]:
        """The call, given a RoPE table that layers can share. It does not check positions.

        Args:
          x: ``[B, T, D]``, tokens in the order of the option ``layout``.
          rope: table of :func:`burst_jax.layers.rope.rope_table`; None applies no RoPE.
          segment_ids: integers ``[B, T]`` as in the call, or None.
          positions: integers ``[B, T]`` as in the call; read in a balanced layout only.
          local_window_size: this call's window, for layers that run in one scan with different
            windows; None is the option.
          attention_fn: called instead of :func:`burst_attention`, or inside a ``shard_map`` instead
            of :func:`ring_attention`, with the same arguments. It returns ``(out, aux)``, where
            ``aux`` is anything else that it computes, like an updated cache. None calls those.
          document_tables: as in the call.
          dropout_key: a ``jax.random.key`` for the option ``dropout_rate``; None disables dropout.
          **masks: as in the call.

        Returns:
          ``(out, aux)``: ``[B, T, out_features]`` in the dtype of the computation, and the ``aux``
          of ``attention_fn``, None without one.
        """
        if others := masks.keys() - set(MASK_ARRAYS):
            raise TypeError(
                f"BurstAttention's call got {', '.join(sorted(others))}: next to segment_ids it "
                f"accepts {', '.join(MASK_ARRAYS)}; other arguments of burst_attention are options "
                "of the layer"
            )
        options: Any = dict(self.options)
        inside = inside_shard_map(sequence_axes(options))
        tensor_axis = options.get("tensor_axis")
        if tensor_axis is not None and not inside:
            check_explicit_heads(tensor_axis, resolve_mesh(options.get("mesh")), "BurstAttention")
        layer = gather_explicit(self)
        if inside:
            query = project(layer.query, x)
            check_local_heads(
                tensor_axis, "query", query.shape[2], self.query.out_features[0],
                "the query and out weights",
            )  # fmt: skip
            first, count = self._first_kv_head(query.shape[2])
            key, value = layer._key_and_value(x, (first, count))
        else:
            query = layer.query(x)
            key, value = layer._key_and_value(x, None)
            first = jnp.int32(0)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = layer.query_norm(query)
            of_key = (first,) if isinstance(layer.key_norm, JointRMSNorm) else ()
            key = layer.key_norm(key, *of_key)
        if rope is not None:
            query, key = apply_rope(query, rope), apply_rope(key, rope)
        options |= {"query_segment_ids": segment_ids, "key_value_segment_ids": segment_ids, **masks}
        positions = self._given_positions(positions)
        if positions is not None:
            options |= {"query_positions": positions, "key_value_positions": positions}
        if document_tables is not None:
            options["document_tables"] = document_tables
        if local_window_size is not None:
            options["local_window_size"] = local_window_size
        if layer.sinks is not None:
            options["sink_logits"] = layer.sinks[...].astype(jnp.float32)
        options["dropout_key"] = dropout_key
        if dropout_key is None:
            options["dropout_rate"] = 0.0
        if not inside:
            fn = attention_fn or _without_aux(burst_attention)
            out, aux = fn(query, key, value, **options)
            return layer.out(layer.gated(out, x)), aux
        options.pop("tensor_axis", None)
        batch_and_heads = flat_names(options.pop("batch_axis", None), tensor_axis)
        options.pop("mesh", None)
        reject_batch_and_head_indices(batch_and_heads, options)
        if dropout_key is not None and batch_and_heads:
            # Devices along these axes have other sequences or heads: their weights are dropped
            # independently.
            index = lax.axis_index(batch_and_heads)
            options["dropout_key"] = jax.random.fold_in(dropout_key, index)
        axis = options.pop("seq_axis", "seq")
        fn = attention_fn or _without_aux(ring_attention)
        out, aux = fn(query, key, value, axis, **options)
        return project(self.out, self.gated(out, x), summed_over=tensor_axis), aux

    def gated(self, out: jax.Array, x: jax.Array) -> jax.Array:
        """``out * sigmoid(x Wg)``, or ``out`` without an output gate; in the dtype of ``out``."""
        if self.output_gate is None:
            return out
        gate = project(self.output_gate, x).astype(jnp.float32)
        return out * jax.nn.sigmoid(gate).astype(out.dtype)

    def with_projections(
        self,
        *,
        query: nnx.Module | None = None,
        key: nnx.Module | None = None,
        value: nnx.Module | None = None,
        out: nnx.Module | None = None,
        output_gate: nnx.Module | None = None,
        normalized: bool = False,
    ) -> BurstAttention:
        """A copy with other projections, for use inside a ``shard_map``.

        Args:
          query: a module that is called with ``[B, T, D]`` and returns ``[B, T, heads, H]`` without
            the bias; its attributes ``kernel``, ``bias`` and ``out_features`` are those of
            ``nnx.LinearGeneral``. None keeps the layer's.
          key: the same for keys.
          value: the same for values.
          out: the same for the output, called with ``[B, T, heads, Hv]``.
          output_gate: the same for the output gate, which it returns with Hv features.
          normalized: whether ``query`` and ``key`` include the layer's norms.
        """
        layer = nnx.merge(*nnx.split(self))
        given = {"query": query, "key": key, "value": value, "out": out, "output_gate": output_gate}
        for name, projection in given.items():
            if projection is not None:
                setattr(layer, name, projection)
        if normalized:
            layer.query_norm = layer.key_norm = nnx.data(None)
        return layer

    def __getstate__(self) -> dict[str, Any]:
        saved = tuple(without_devices(dict(self.options)).items())
        return super().__getstate__() | {"options": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = tuple(with_devices(dict(state["options"])).items())
        super().__setstate__(state | {"options": options})

    def _add_key_and_value(
        self, linear: Any, in_features: int, num_kv_heads: int, head_dim: int, value_head_dim: int
    ) -> None:
        """Adds the projections to keys and values, made by ``linear(inputs, outputs)``."""
        self.key = linear(in_features, (num_kv_heads, head_dim))
        self.value = linear(in_features, (num_kv_heads, value_head_dim))

    def _key_and_value(
        self, x: jax.Array, heads: tuple[jax.Array, int] | None
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values ``[B, T, K, ...]`` of ``x``.

        ``heads`` are ``(first, count)`` of them, inside a ``shard_map``; None is all of them,
        outside.
        """
        if heads is None:
            return self.key(x), self.value(x)
        key, value = (project(local_heads(linear, *heads), x) for linear in (self.key, self.value))
        return key, value

    def _given_positions[Positions](self, positions: Positions) -> Positions | None:
        """What attention needs of the positions of a call; None if the layout has them."""
        layout = layout_option(self.options)
        return layout.given_positions(positions)

    def _dropout_key(self, deterministic: bool | None, rngs: nnx.Rngs | None) -> jax.Array | None:
        """The dropout key of a call; None without dropout."""
        rate = dict(self.options).get("dropout_rate", 0.0)
        if not rate or (self.deterministic if deterministic is None else deterministic):
            return None
        if rngs is None:
            raise ValueError(
                f"dropout_rate is {rate} and rngs is None: call the layer with "
                "rngs=nnx.Rngs(dropout=seed), or with deterministic=True to disable dropout"
            )
        return rngs.dropout()

    def _first_kv_head(self, num_heads: int) -> tuple[jax.Array, int]:
        """``(first, count)`` of the key/value heads of this device's ``num_heads`` query heads.

        If there are fewer key/value heads than devices along ``tensor_axis``, their weights are
        replicated, and each device projects only to the heads that its query heads use.
        """
        n, k = self.query.out_features[0], self.key.out_features[0]
        count = max(1, k * num_heads // n)
        if self.key.kernel.shape[-2] == count:
            return jnp.int32(0), count
        device = lax.axis_index(flat_names(dict(self.options)["tensor_axis"]))
        return device * num_heads // (n // k), count


def _check_sizes(
    num_heads: int, num_kv_heads: int, head_dim: int, value_head_dim: int, rope: float | Rope | None
) -> None:
    """Raises for sizes that do not fit together, and for a RoPE that depends on the batch."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads is {num_heads}, num_kv_heads {num_kv_heads}: num_heads must be a multiple "
            "of num_kv_heads"
        )
    if rope is not None:
        (rope if isinstance(rope, Rope) else Rope()).rotated(head_dim)
    if isinstance(rope, DynamicRope):
        raise NotImplementedError(
            f"rope_theta is {rope}: its frequencies depend on the longest sequence of the whole "
            "batch; compute the table with burst_jax.layers.rope.rope_table(positions, head_dim, "
            "rope, length=...) and pass it to attend"
        )
    if value_head_dim < 1:
        raise ValueError(f"value_head_dim is {value_head_dim}: it must be 1 or more, or None")


def _without_aux(attention: Callable[..., jax.Array]) -> AttentionFn:
    return lambda *arrays, **options: (attention(*arrays, **options), None)
