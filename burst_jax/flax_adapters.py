"""Attention functions to put into Flax's own layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from burst_jax._options import check_options
from burst_jax.attention import burst_attention
from burst_jax.checks import check_arrays, check_segment_ids
from burst_jax.sharding import flat_names, place_explicit, resolve_mesh, sequence_axes


def nnx_attention_fn(*, pad: bool = False, **options: Any) -> Callable[..., jax.Array]:
    """``attention_fn`` for ``flax.nnx.MultiHeadAttention`` that runs :func:`burst_attention`.

    ::

        layer = nnx.MultiHeadAttention(
            num_heads=8, in_features=512, decode=False, rngs=nnx.Rngs(0),
            attention_fn=nnx_attention_fn(mesh=mesh, seq_axis="seq", is_causal=True),
        )

    The layer then takes ``[*batch, T, features]`` in the order that ``layout`` names, and attends
    over the mesh. Several batch dimensions become one; segment ids are ``[B, T]`` with B their
    product.

    Segment ids (0 is padding, documents count from 1) belong to a batch, and Flax's layer passes
    none on. So make the function where the batch is::

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
    ``dropout_rate``     only with ``deterministic=True``, otherwise NotImplementedError
    ``precision``        None or what means the same (``Precision.DEFAULT``, "default"), otherwise
                         NotImplementedError
    ``mask``, ``bias``   refused: a dense [T, S] array would not fit any device
    ``module``           refused (``sow_weights=True``): the weights never exist as an array
    ``input_positions``  refused: Flax's layer applies no RoPE, ``BurstAttention`` does
    ==================== ==============================================================

    Args:
      pad: for lengths T or S that the mesh does not divide: pads each with zeros to the next one
        that it does, masks the padding by segment 0, and cuts the result to T. Exact, gradients
        too. Only in the contiguous layout: in another order the tokens were padded before they were
        permuted. It moves tokens between devices at every call; where the model allows, pad once,
        outside, with :func:`burst_jax.pad_to_layout`.
      **options: keyword arguments of :func:`burst_attention`, all but ``return_residual``.

    Returns:
      ``attention_fn(query [*batch, T, N, H], key [*batch, S, K, H], value [*batch, S, K, H], ...)
      -> [*batch, T, N, H]``, with the query's dtype after promotion.

    Raises:
      TypeError: an unknown option, at once.
      ValueError: ``return_residual``, or ``pad`` with another layout, at once; when called: what
        the table above refuses, and without ``pad`` lengths that the mesh does not divide.
      NotImplementedError: when called, with dropout or a precision.
    """
    causal_option = _check("nnx_attention_fn", pad, options)

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
        return _attend(pad, query, key, value, is_causal=causal_option or is_causal, **options)

    return attention_fn


def linen_attention_fn(*, pad: bool = False, **options: Any) -> Callable[..., jax.Array]:
    """``attention_fn`` for ``flax.linen.MultiHeadDotProductAttention``.

    ::

        layer = nn.MultiHeadDotProductAttention(
            num_heads=8, attention_fn=linen_attention_fn(mesh=mesh, is_causal=True)
        )

    As :func:`nnx_attention_fn`; linen's layer has no ``is_causal``, so causality is an option here.
    The softmax is float32 whatever ``force_fp32_for_softmax`` says. The einsums that a layer may
    replace (``qk_attn_weights_einsum``, ``attn_weights_value_einsum``) are refused: a ring runs
    neither.

    Inside a linen model the batch's segment ids (0 is padding, documents count from 1) are at
    hand::

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, segment_ids):
                attention_fn = linen_attention_fn(
                    mesh=mesh, is_causal=True,
                    query_segment_ids=segment_ids, key_value_segment_ids=segment_ids,
                )
                return nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)(x)

    Args:
      pad: as in :func:`nnx_attention_fn`.
      **options: keyword arguments of :func:`burst_attention`, all but ``return_residual``.

    Returns:
      ``attention_fn(query [*batch, T, N, H], key [*batch, S, K, H], value [*batch, S, K, H], ...)
      -> [*batch, T, N, H]``, with the query's dtype after promotion.

    Raises:
      TypeError: an unknown option, at once.
      ValueError: ``return_residual``, or ``pad`` with another layout, at once; when called: a dense
        mask or bias, sown weights, without ``pad`` lengths that the mesh does not divide.
      NotImplementedError: when called, with dropout, a precision or an einsum of the caller's.
    """
    causal = _check("linen_attention_fn", pad, options)

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
        return _attend(pad, query, key, value, is_causal=causal, **options)

    return attention_fn


def _check(owner: str, pad: bool, options: dict[str, Any]) -> bool:
    """Checks the options and takes is_causal out of them."""
    refused = {
        "return_residual": "Flax's layers expect one array; call burst_attention for (out, lse)"
    }
    check_options(owner, options, refused)
    layout = options.get("layout", "contiguous")
    if pad and layout != "contiguous":
        raise ValueError(
            f"pad is True with layout {layout!r}: padding goes to the end of the natural order, so "
            "pad before to_layout, with pad_to_layout, outside of the layer; or use the contiguous "
            "layout"
        )
    return bool(options.pop("is_causal", False))


def _attend(
    pad: bool, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any
) -> jax.Array:
    """``burst_attention`` with any number of batch dimensions, and of any lengths with ``pad``."""
    batch = _check_batch(query, key, value)
    query, key, value = (_one_batch_dim(x) for x in (query, key, value))
    shards = _shards(options)
    off = [
        f"{name} is {length}"
        for name, length in (("T", query.shape[1]), ("S", key.shape[1]))
        if length % shards
    ]
    if off and not pad and options.get("layout", "contiguous") == "contiguous":
        raise ValueError(
            f"{' and '.join(off)}: a length must be a multiple of {shards}, the mesh's devices on "
            "the sequence; make the attention_fn with pad=True, or pad outside of the layer, with "
            "pad_to_layout"
        )
    out = (_attend_padded if off and pad else burst_attention)(query, key, value, **options)
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])


def _shards(options: dict[str, Any]) -> int:
    """Devices that the sequence is split over; 1 if burst_attention will say what is wrong."""
    try:
        mesh = resolve_mesh(options.get("mesh"))
        return math.prod(mesh.shape[axis] for axis in sequence_axes(options))
    except (ValueError, TypeError, AttributeError, KeyError):
        return 1


def _attend_padded(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """``burst_attention`` of lengths that the mesh does not divide."""
    check_arrays(query, key, value)
    length, sharding = query.shape[1], jax.typeof(query).sharding
    sides = {"query_segment_ids": query, "key_value_segment_ids": key}
    ids = {name: options.pop(name, None) for name in sides}
    check_segment_ids(query, key, *ids.values())
    mesh, shards = resolve_mesh(options.get("mesh")), _shards(options)
    batch, tokens = options.get("batch_axis"), sequence_axes(options)

    def padded(x: jax.Array, *rest: Any) -> jax.Array:
        """To the next length, which can be split over Explicit axes, too."""
        widths = [(0, 0), (0, -x.shape[1] % shards), *[(0, 0)] * (x.ndim - 2)]
        return place_explicit(jnp.pad(x, widths), mesh, PartitionSpec(batch, tokens, *rest))

    for name, x in sides.items():
        real = jnp.ones(x.shape[:2], jnp.int32) if ids[name] is None else ids[name]
        options[name] = padded(jnp.asarray(real))
    arrays = (padded(x, options.get("head_axis"), None) for x in (query, key, value))
    out = burst_attention(*arrays, **options)
    if out.shape[1] == length:
        return out
    # The result is split as the query was: over those Explicit axes that divide its length.
    if flat_names(*jax.typeof(out).sharding.spec):
        out = jax.reshard(out, NamedSharding(mesh, sharding.spec))
    return out[:, :length]


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


def _refuse_dense(bias: Any, mask: Any) -> None:
    for name, array in (("mask", mask), ("bias", bias)):
        if array is not None:
            raise ValueError(
                f"{name} of shape {array.shape}: a dense {name} is not supported (decode=True also "
                "makes one); say it by segment ids, is_causal or local_window_size, options of "
                "the attention_fn, and decode with Flax's own attention_fn"
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
