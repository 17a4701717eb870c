"""``attention_fn`` for Flax's own attention layers, and the check of options that layers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import jax
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import PromoteDtypeFn
from jax import lax

from burst_jax.attention.api import burst_attention
from burst_jax.attention.arguments import AttentionArguments, AttentionOptions
from burst_jax.attention.padding import check_pad
from burst_jax.errors import did_you_mean
from burst_jax.layouts.parse import layout_option
from burst_jax.parallel.mesh import (
    axes_size,
    resolve_mesh,
    sequence_axes,
    with_devices,
    without_devices,
)

_REJECTED = {
    "return_residual": "Flax's layers expect one array; call burst_attention for (out, lse)",
    "dropout_rate": "set it on Flax's layer, which passes it on",
    "dropout_key": "Flax's layer makes one per call",
}


def check_options(
    owner: str,
    options: Mapping[str, object],
    rejected: Mapping[str, str],
    own: Iterable[str] = (),
) -> None:
    """Raises unless ``owner`` can pass every option on to :func:`burst_attention`.

    ``rejected`` has the remedy for each argument that ``owner`` does not accept, ``own`` the names
    of its own arguments, for the spelling suggestion.
    """
    allowed = [name for name in AttentionArguments.names() if name not in rejected]
    for name in options:
        if name in rejected:
            raise ValueError(f"{owner} does not accept {name}: {rejected[name]}")
        if name not in allowed:
            hint = did_you_mean(name, [*allowed, *own])
            known = ", ".join(allowed)
            raise TypeError(f"{owner} got an unknown option {name!r}: use {known}{hint}")


def nnx_attention_fn(
    **options: Unpack[AttentionOptions],
) -> Callable[..., jax.Array]:
    """``attention_fn`` for ``flax.nnx.MultiHeadAttention`` that runs :func:`burst_attention`.

    ::

        layer = nnx.MultiHeadAttention(
            num_heads=8, in_features=512, decode=False, rngs=nnx.Rngs(0),
            attention_fn=nnx_attention_fn(mesh=mesh, seq_axis="seq", is_causal=True),
        )

    The layer's input is ``[*batch, T, features]`` in the token order of ``layout``. Several batch
    dimensions are flattened into one of size B; segment ids are ``[B, T]``.

    Flax's layer does not pass lengths or segment ids to its ``attention_fn``. Create the function
    where they are known (segment id 0 is padding, documents count from 1), and set the layer's own
    back before a traced function returns: under ``nnx.jit`` the layer would keep it, with tracers.
    ::

        @nnx.jit
        def attend(layer, x, segment_ids):
            own, layer.attention_fn = layer.attention_fn, nnx_attention_fn(
                mesh=mesh, is_causal=True, segment_ids=segment_ids
            )
            out = layer(x)
            layer.attention_fn = own
            return out

    For all layers of a model, see docs/flax.md, "Masks of a batch".

    Each argument that Flax passes is either applied or raises:

    ==================== ==============================================================
    ``is_causal``        causal if the call or the option sets it (Flax always passes it,
                         False by default, so False does not override the option)
    ``dtype``            query, key and value are promoted to it, as in Flax's function
    ``dropout_rate``     applied unless ``deterministic``; each batch element and head drops
                         different weights, also with ``broadcast_dropout``, which would save no
                         memory here
    ``precision``        None or an equivalent (``Precision.DEFAULT``, "default"), otherwise
                         NotImplementedError
    ``mask``, ``bias``   raise: a dense [T, S] array does not fit on a device
    ``module``           raises (``sow_weights=True``): weights are never materialized
    ``input_positions``  raises: no RoPE is applied here, ``BurstAttention`` applies it
    ==================== ==============================================================

    Args:
      **options: keyword arguments of :func:`burst_attention` except ``return_residual``,
        ``dropout_rate`` and ``dropout_key``. With ``pad=True`` lengths need not be divisible by the
        mesh.

    Returns:
      ``attention_fn(query [*batch, T, N, H], key [*batch, S, K, H], value [*batch, S, K, H], ...)
      -> [*batch, T, N, H]``, in the query's dtype after promotion.

    Raises:
      TypeError: immediately, for an unknown option.
      ValueError: immediately, for an option that is not accepted, or for ``pad`` with a layout
        other than contiguous; in the call, for arguments as in the table, without ``pad`` for
        lengths that the mesh does not divide, and outside of ``jit`` for an option from a traced
        function that has ended (under ``jit`` JAX raises ``UnexpectedTracerError``).
      NotImplementedError: in the call, for a precision other than the default.
    """
    return _AttentionFn("nnx_attention_fn", options)


def linen_attention_fn(
    **options: Unpack[AttentionOptions],
) -> Callable[..., jax.Array]:
    """``attention_fn`` for ``flax.linen.MultiHeadDotProductAttention``.

    ::

        layer = nn.MultiHeadDotProductAttention(
            num_heads=8, attention_fn=linen_attention_fn(mesh=mesh, is_causal=True)
        )

    It works as :func:`nnx_attention_fn` does. Linen's layer passes no ``is_causal``: set it as an
    option. The softmax is float32 with and without ``force_fp32_for_softmax``. Custom einsums
    (``qk_attn_weights_einsum``, ``attn_weights_value_einsum``) raise: the kernels fuse both.

    A linen model is called with the batch's segment ids (0 is padding, documents count from 1), so
    it can create the function inside::

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, segment_ids):
                attention_fn = linen_attention_fn(
                    mesh=mesh, is_causal=True, segment_ids=segment_ids
                )
                return nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)(x)

    Args:
      **options: as for :func:`nnx_attention_fn`.

    Returns:
      An ``attention_fn`` as :func:`nnx_attention_fn` returns it.

    Raises:
      TypeError: as :func:`nnx_attention_fn`.
      ValueError: as :func:`nnx_attention_fn`.
      NotImplementedError: in the call, for a custom einsum or a precision other than the default.
    """
    return _AttentionFn("linen_attention_fn", options)


class _AttentionFn:
    """What both public functions return; ``owner`` is the name in error messages.

    A class, so that it can be pickled. ``promote_dtype``, ``is_causal`` and ``input_positions``
    come from nnx's layer, ``force_fp32_for_softmax`` and the einsums from linen's. All parameters
    are named: linen's layer drops arguments that the signature lacks, so ``**kwargs`` would
    silently ignore a mask.
    """

    def __init__(self, owner: str, options: Mapping[str, Any]) -> None:
        check_options(owner, options, _REJECTED)
        check_pad(options.get("pad", False), layout_option(options))
        self._owner, self._options = owner, options

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._owner, without_devices(self._options))

    def __deepcopy__(self, memo: object) -> _AttentionFn:
        return self  # As of a function: it cannot change.

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        precision: lax.PrecisionLike = None,
        module: object = None,
        *,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        """Attention, with the arguments that Flax's layers pass."""
        options: Any = self._options
        del broadcast_dropout, force_fp32_for_softmax
        for name, array in (("mask", mask), ("bias", bias)):
            if array is not None:
                raise ValueError(
                    f"{name} of shape {array.shape}: a dense {name} is not supported (decode=True "
                    "also makes one); for padding use query_seq_lengths and key_value_seq_lengths "
                    "or segment ids, else is_causal or local_window_size, options of the "
                    "attention_fn, and decode with Flax's own attention_fn"
                )
        if module is not None:
            raise ValueError(
                "sow_weights=True: the attention weights [T, S] are never materialized; call the "
                "layer with sow_weights=False"
            )
        if not _is_default(precision):
            raise NotImplementedError(
                f"precision is {precision!r}: the kernels choose it by dtype; pass None"
            )
        if input_positions is not None:
            raise ValueError(
                f"input_positions of shape {input_positions.shape}: this attention_fn applies no "
                "RoPE; use burst_jax's BurstAttention layer, which has positions as an argument"
            )
        for name, einsum in (
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if einsum is not None:
                raise NotImplementedError(f"{name} is {einsum!r}: fused attention has no einsum")
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        causal = bool(options.get("is_causal", False)) or is_causal
        call_options: AttentionOptions = {**options, "is_causal": causal}
        if dropout_rate > 0.0 and not deterministic:
            call_options |= {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
        try:
            return _attend_batched(query, key, value, call_options)
        except jax.errors.UnexpectedTracerError as error:
            kept = [name for name, x in options.items() if isinstance(x, jax.core.Tracer)]
            if not kept:
                raise
            raise ValueError(
                f"{self._owner} was given {' and '.join(kept)} in a traced function that has "
                "ended, and the layer has kept it: set attention_fn for the call, and back before "
                "the traced function returns (Flax's layers, masks of a batch)"
            ) from error


def _unpickled(owner: str, options: Mapping[str, Any]) -> _AttentionFn:
    return _AttentionFn(owner, with_devices(options))


def _is_default(precision: Any) -> bool:
    """Whether a ``precision`` of Flax or JAX leaves the choice to the implementation."""
    if isinstance(precision, tuple):  # One per operand.
        return all(map(_is_default, precision))
    if isinstance(precision, str):
        try:
            precision = lax.Precision(precision)
        except ValueError:
            return precision == "DEFAULT"  # A name of DotAlgorithmPreset, or unknown.
    return precision in (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def _attend_batched(
    query: jax.Array, key: jax.Array, value: jax.Array, options: AttentionOptions
) -> jax.Array:
    """:func:`burst_attention` of ``[*batch, length, heads, dim]`` with any number of batch axes."""
    batch = query.shape[:-3]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} has shape {x.shape}: it needs [*batch, length, heads, dim]")
        if x.shape[:-3] != batch:
            raise ValueError(
                f"{name} has batch dimensions {x.shape[:-3]}, query {batch}: they must be equal"
            )
    flat = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    query, key, value = (query, key, value) if len(batch) == 1 else flat
    shards = _num_shards(options)
    undivided = [
        f"{name} is {length}"
        for name, length in (("T", query.shape[1]), ("S", key.shape[1]))
        if length % shards
    ]
    layout = layout_option(options)
    if undivided and layout.in_natural_order and not options.get("pad", False):
        raise ValueError(
            f"{' and '.join(undivided)}: a length must be a multiple of {shards}, the number of "
            "devices on the sequence axes; create the attention_fn with pad=True, or pad before "
            "the layer with pad_to_layout"
        )
    out = burst_attention(query, key, value, **options)
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def _num_shards(options: AttentionOptions) -> int:
    """The number of sequence shards; 1 for a wrong mesh, which ``burst_attention`` reports."""
    try:
        return axes_size(resolve_mesh(options.get("mesh")), *sequence_axes(options))
    except (ValueError, TypeError, KeyError):
        return 1
