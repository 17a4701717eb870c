"""Attention functions to put into Flax's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import jax
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import PromoteDtypeFn
from jax import lax

from burst_jax.attention.arguments import AttentionOptions
from burst_jax.attention.padding import check_pad
from burst_jax.layers.options import check_options
from burst_jax.layers.shapes import attend_any_shape

REFUSED = {
    "return_residual": "Flax's layers expect one array; call burst_attention for (out, lse)",
    "dropout_rate": "give it to Flax's layer, which passes it on",
    "dropout_key": "Flax's layer makes one at every call",
}


def nnx_attention_fn(
    **options: Unpack[AttentionOptions],
) -> Callable[..., jax.Array]:
    """``attention_fn`` for ``flax.nnx.MultiHeadAttention`` that runs :func:`burst_attention`.

    ::

        layer = nnx.MultiHeadAttention(
            num_heads=8, in_features=512, decode=False, rngs=nnx.Rngs(0),
            attention_fn=nnx_attention_fn(mesh=mesh, seq_axis="seq", is_causal=True),
        )

    The layer then takes ``[*batch, T, features]`` in the order that ``layout`` names, and attends
    over the mesh. Several batch dimensions are flattened into one, of size B; segment ids are
    ``[B, T]``.

    Segment ids (0 is padding, documents count from 1) belong to a batch, and Flax's layer passes no
    segment ids to its ``attention_fn``. So make the function where the batch is known::

        graphdef, params = nnx.split(layer)

        @jax.jit
        def attend(params, x, segment_ids):
            layer = nnx.merge(graphdef, params)  # A copy, in which nothing of this call stays.
            layer.attention_fn = nnx_attention_fn(
                mesh=mesh, is_causal=True,
                query_segment_ids=segment_ids, key_value_segment_ids=segment_ids,
            )
            return layer(x)

    What Flax passes on every call is honoured or refused:

    ==================== ==============================================================
    ``is_causal``        causal if the layer's call or the option says so (Flax always
                         passes it, False by default, so False cannot overrule the option)
    ``dtype``            query, key and value are promoted to it, as Flax's function does
    ``dropout_rate``     honoured unless ``deterministic``; every row and head drops weights of its
                         own, also with ``broadcast_dropout``, which saves memory in Flax's function
                         and none here
    ``precision``        None or what means the same (``Precision.DEFAULT``, "default"), otherwise
                         NotImplementedError
    ``mask``, ``bias``   refused: a dense [T, S] array would not fit any device
    ``module``           refused (``sow_weights=True``): the weights never exist as an array
    ``input_positions``  refused: Flax's layer applies no RoPE, ``BurstAttention`` does
    ==================== ==============================================================

    Args:
      **options: keyword arguments of :func:`burst_attention`, all but ``return_residual``. With
        ``pad=True`` the layer takes lengths that the mesh does not divide.

    Returns:
      ``attention_fn(query [*batch, T, N, H], key [*batch, S, K, H], value [*batch, S, K, H], ...)
      -> [*batch, T, N, H]``, with the query's dtype after promotion.

    Raises:
      TypeError: at once, for an unknown option.
      ValueError: at once, for ``return_residual``, or for ``pad`` with another layout than
        contiguous; when called, for what the table above refuses, and without ``pad`` for lengths
        that the mesh does not divide.
      NotImplementedError: when called, for a precision.
    """
    return _attention_fn("nnx_attention_fn", options)


def linen_attention_fn(
    **options: Unpack[AttentionOptions],
) -> Callable[..., jax.Array]:
    """``attention_fn`` for ``flax.linen.MultiHeadDotProductAttention``.

    ::

        layer = nn.MultiHeadDotProductAttention(
            num_heads=8, attention_fn=linen_attention_fn(mesh=mesh, is_causal=True)
        )

    It is used as :func:`nnx_attention_fn` is. Linen's layer passes no ``is_causal``, so give it as
    an option. The softmax is float32 whatever ``force_fp32_for_softmax`` says. The einsums that a
    layer may replace (``qk_attn_weights_einsum``, ``attn_weights_value_einsum``) are refused,
    because a ring runs neither.

    A linen model is called with the batch's segment ids (0 is padding, documents count from 1), so
    it can make the function inside::

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, segment_ids):
                attention_fn = linen_attention_fn(
                    mesh=mesh, is_causal=True,
                    query_segment_ids=segment_ids, key_value_segment_ids=segment_ids,
                )
                return nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)(x)

    Args:
      **options: keyword arguments of :func:`burst_attention`, all but ``return_residual``.

    Returns:
      ``attention_fn(query [*batch, T, N, H], key [*batch, S, K, H], value [*batch, S, K, H], ...)
      -> [*batch, T, N, H]``, with the query's dtype after promotion.

    Raises:
      TypeError: at once, for an unknown option.
      ValueError: at once, for ``return_residual``, or for ``pad`` with another layout than
        contiguous; when called, for a dense mask or bias, for sown weights, and without ``pad`` for
        lengths that the mesh does not divide.
      NotImplementedError: when called, for a precision or an einsum of the caller's.
    """
    return _attention_fn("linen_attention_fn", options)


def _attention_fn(owner: str, options: AttentionOptions) -> Callable[..., jax.Array]:
    """The one function behind both public names; ``owner`` is the name that errors give.

    It takes what either layer of Flax passes: ``promote_dtype``, ``is_causal`` and
    ``input_positions`` come from nnx, ``force_fp32_for_softmax`` and the einsums from linen. Each
    is a named parameter, because linen's layer drops every argument whose name it does not find in
    the signature: with ``**kwargs`` in their place a mask would be ignored instead of refused.
    """
    check_options(owner, options, REFUSED)
    check_pad(options.get("pad", False), options.get("layout", "contiguous"))

    def attention_fn(
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
        # Masks of dropout take no memory that could be shared; the softmax is always float32.
        del broadcast_dropout, force_fp32_for_softmax
        _refuse_arrays(mask=mask, bias=bias)
        _refuse_sown_weights(module)
        _refuse_precision(precision)
        _refuse_positions(input_positions)
        _refuse_einsums(
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        causal = bool(options.get("is_causal", False)) or is_causal
        of_call: AttentionOptions = {**options, "is_causal": causal}
        if dropout_rate > 0.0 and not deterministic:
            of_call |= {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
        return attend_any_shape(query, key, value, of_call)

    return attention_fn


def _refuse_arrays(**arrays: jax.Array | None) -> None:
    """Raises if a dense mask or bias is given."""
    for name, array in arrays.items():
        if array is not None:
            raise ValueError(
                f"{name} of shape {array.shape}: a dense {name} is not supported (decode=True also "
                "makes one); say it by segment ids, is_causal or local_window_size, options of "
                "the attention_fn, and decode with Flax's own attention_fn"
            )


def _refuse_sown_weights(module: object) -> None:
    """Raises if the layer passes itself, as it does to have the attention weights stored."""
    if module is not None:
        raise ValueError(
            "sow_weights=True: attention weights [T, S] never exist as an array in a ring; "
            "call the layer with sow_weights=False"
        )


def _refuse_precision(precision: lax.PrecisionLike) -> None:
    """Raises unless ``precision`` leaves the choice to the kernels."""
    if not _is_default(precision):
        raise NotImplementedError(
            f"precision is {precision!r}: the kernels choose their own by dtype; pass None"
        )


def _is_default(precision: Any) -> bool:
    """Whether a ``precision`` of Flax or JAX leaves the choice to the implementation."""
    if isinstance(precision, tuple):  # One for each operand.
        return all(map(_is_default, precision))
    if isinstance(precision, str):
        try:
            precision = lax.Precision(precision)
        except ValueError:
            return precision == "DEFAULT"  # A name of DotAlgorithmPreset, or unknown.
    return precision in (None, lax.Precision.DEFAULT, lax.DotAlgorithmPreset.DEFAULT)


def _refuse_positions(positions: jax.Array | None) -> None:
    """Raises if the layer was called with positions for RoPE."""
    if positions is not None:
        raise ValueError(
            f"input_positions of shape {positions.shape}: this attention_fn applies no "
            "RoPE; use burst_jax's BurstAttention layer, which takes positions"
        )


def _refuse_einsums(**einsums: Callable[..., jax.Array] | None) -> None:
    """Raises if a layer replaces an einsum of dense attention, as for quantized products."""
    for name, einsum in einsums.items():
        if einsum is not None:
            raise NotImplementedError(f"{name} is {einsum!r}: a ring has no such einsum")
