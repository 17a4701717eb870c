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
    check_options(
        "nnx_attention_fn",
        options,
        {"return_residual": "Flax's layers expect one array; call burst_attention for the lse"},
    )
    causal_option = bool(options.pop("is_causal", False))

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
        _refuse_dense(bias, mask)
        if module is not None:
            raise ValueError(
                "sow_weights=True: attention weights [T, S] never exist as an array in a ring; "
                "call the layer with sow_weights=False"
            )
        if input_positions is not None:
            raise ValueError(
                f"input_positions of shape {input_positions.shape}: this attention_fn applies no "
                "RoPE; use burst_jax's BurstAttention layer, which takes positions"
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
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        batch = _check_batch(query, key, value)
        query, key, value = (_one_batch_dim(x) for x in (query, key, value))
        out = burst_attention(query, key, value, is_causal=causal_option or is_causal, **options)
        return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])

    return attention_fn


def _refuse_dense(bias: Any, mask: Any) -> None:
    for name, array in (("mask", mask), ("bias", bias)):
        if array is not None:
            raise ValueError(
                f"{name} of shape {array.shape}: a dense {name} is not supported (decode=True also "
                "makes one); say it by segment ids, is_causal or local_window_size, options of "
                "nnx_attention_fn"
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
