"""Attention functions to put into Flax's own layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype

from burst_jax._options import check_options
from burst_jax.attention import burst_attention


def nnx_attention_fn(**options: Any) -> Callable[..., jax.Array]:
    """``attention_fn`` for ``flax.nnx.MultiHeadAttention`` that runs :func:`burst_attention`.

    ::

        layer = nnx.MultiHeadAttention(
            num_heads=8, in_features=512, decode=False, rngs=nnx.Rngs(0),
            attention_fn=nnx_attention_fn(mesh=mesh, seq_axis="seq", is_causal=True),
        )

    The layer then takes ``[*batch, T, features]`` in the order that ``layout`` names, and attends
    over the mesh. Several batch dimensions become one; segment ids are ``[B, T]`` with B their
    product.

    What Flax passes on every call is honoured or refused:

    ==================== ==============================================================
    ``is_causal``        causal if the layer's call or the option says so (Flax always
                         passes it, False by default, so False cannot overrule the option)
    ``dtype``            query, key and value are promoted to it, as Flax's function does
    ``dropout_rate``     only with ``deterministic=True``, otherwise NotImplementedError
    ``precision``        None only, otherwise NotImplementedError
    ``mask``, ``bias``   refused: a dense [T, S] array would not fit any device
    ``module``           refused (``sow_weights=True``): the weights never exist as an array
    ``input_positions``  refused: Flax's layer applies no RoPE, ``BurstAttention`` does
    ==================== ==============================================================

    Args:
      **options: keyword arguments of :func:`burst_attention`, all but ``return_residual``.

    Returns:
      ``attention_fn(query [*batch, T, N, H], key [*batch, S, K, H], value [*batch, S, K, H], ...)
      -> [*batch, T, N, H]``, with the query's dtype after promotion.

    Raises:
      TypeError: an unknown option, at once.
      ValueError: ``return_residual``, or when called: what the table above refuses.
      NotImplementedError: when called, with dropout or a precision.
    """
    causal_option = _check("nnx_attention_fn", options)

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
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] = flax_promote_dtype,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        del broadcast_dropout, dropout_rng  # They say how to drop; nothing is ever dropped here.
        _refuse(bias, mask, module, dropout_rate, deterministic, precision)
        if input_positions is not None:
            raise ValueError(
                f"input_positions of shape {input_positions.shape}: this attention_fn applies no "
                "RoPE; use burst_jax's BurstAttention layer, which takes positions"
            )
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        return _attend(query, key, value, is_causal=causal_option or is_causal, **options)

    return attention_fn


def linen_attention_fn(**options: Any) -> Callable[..., jax.Array]:
    """``attention_fn`` for ``flax.linen.MultiHeadDotProductAttention``.

    ::

        layer = nn.MultiHeadDotProductAttention(
            num_heads=8, attention_fn=linen_attention_fn(mesh=mesh, is_causal=True)
        )

    As :func:`nnx_attention_fn`; linen's layer has no ``is_causal``, so causality is an option here.
    The softmax is float32 whatever ``force_fp32_for_softmax`` says. The einsums that a layer may
    replace (``qk_attn_weights_einsum``, ``attn_weights_value_einsum``) are refused: a ring runs
    neither.

    Args:
      **options: keyword arguments of :func:`burst_attention`, all but ``return_residual``.

    Returns:
      ``attention_fn(query [*batch, T, N, H], key [*batch, S, K, H], value [*batch, S, K, H], ...)
      -> [*batch, T, N, H]``, with the query's dtype after promotion.

    Raises:
      TypeError: an unknown option, at once.
      ValueError: ``return_residual``, or when called: dense mask or bias, sown weights.
      NotImplementedError: when called, with dropout, a precision or an einsum of the caller's.
    """
    causal = _check("linen_attention_fn", options)

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
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> jax.Array:
        del broadcast_dropout, dropout_rng, force_fp32_for_softmax
        _refuse(bias, mask, module, dropout_rate, deterministic, precision)
        for name, einsum in (
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if einsum is not None:
                raise NotImplementedError(f"{name} is {einsum!r}: a ring has no such einsum")
        query, key, value = flax_promote_dtype((query, key, value), dtype=dtype)
        return _attend(query, key, value, is_causal=causal, **options)

    return attention_fn


def _check(owner: str, options: dict[str, Any]) -> bool:
    """Checks the options and takes is_causal out of them."""
    refused = {
        "return_residual": "Flax's layers expect one array; call burst_attention for the lse"
    }
    check_options(owner, options, refused)
    return bool(options.pop("is_causal", False))


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """``burst_attention`` with any number of batch dimensions."""
    batch = _check_batch(query, key, value)
    query, key, value = (_one_batch_dim(x) for x in (query, key, value))
    out = burst_attention(query, key, value, **options)
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def _refuse(
    bias: Any, mask: Any, module: Any, dropout_rate: float, deterministic: bool, precision: Any
) -> None:
    """Raises on what a ring cannot honour."""
    _refuse_dense(bias, mask)
    if module is not None:
        raise ValueError(
            "sow_weights=True: attention weights [T, S] never exist as an array in a ring; "
            "call the layer with sow_weights=False"
        )
    if dropout_rate > 0.0 and not deterministic:
        raise NotImplementedError(
            f"dropout_rate is {dropout_rate}: attention dropout is not implemented; set it to "
            "0.0 or call the layer with deterministic=True"
        )
    if precision is not None:
        raise NotImplementedError(
            f"precision is {precision!r}: the kernels choose their own by dtype; pass None"
        )


def _refuse_dense(bias: Any, mask: Any) -> None:
    for name, array in (("mask", mask), ("bias", bias)):
        if array is not None:
            raise ValueError(
                f"{name} of shape {array.shape}: a dense {name} is not supported (decode=True also "
                "makes one); say it by segment ids, is_causal or local_window_size, options of "
                "the attention_fn"
            )


def _check_batch(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} has shape {x.shape}: it needs [*batch, length, heads, dim]")
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} has batch dimensions {x.shape[:-3]}, query {query.shape[:-3]}: they must "
                "be equal"
            )
    return query.shape[:-3]


def _one_batch_dim(x: jax.Array) -> jax.Array:
    return x if x.ndim == 4 else x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
