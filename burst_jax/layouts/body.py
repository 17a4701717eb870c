"""A model's layers in a layout, between parts that know of none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.layouts.body_order import ordered
from burst_jax.layouts.layout import check_shards
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.layouts.permutation import from_layout, positions, to_layout


def in_layout(body: Callable[..., Any], layout: LayoutLike, num_shards: int) -> Callable[..., Any]:
    """``body`` for tokens in natural order: it works in ``layout``, and its callers do not.

    A framework's loader, embeddings and loss then stay as they are. Two permutations are added, of
    hidden states before and after the layers. On devices each moves at most T / n tokens in
    permutes between neighbors; :func:`burst_jax.to_layout` of the tokens, where batches are made,
    costs nothing::

        hidden = burst_jax.in_layout(layers, "zigzag", n)(embeddings, positions, segment_ids)

    Args:
      body: ``body(hidden, positions, segment_ids, *args, **kwargs)``, all layers that mix tokens,
        with attention in ``layout``. Hidden states are an array ``[B, T, ...]`` or a pytree of
        them. Positions are integers ``[T]`` or ``[B, T]``, for RoPE; segment ids ``[B, T]`` or
        None. It returns a pytree of arrays ``[B, T, ...]`` in ``layout``, and of arrays without
        tokens, which have less than two dimensions (an auxiliary loss).
      layout: "contiguous", "zigzag", "striped" or "striped:k"
        (:mod:`burst_jax.layouts.fixed`).
      num_shards: number of shards on the ring, as in :func:`burst_jax.positions`: the product of
        the sizes of ``seq_axis``, without ``ulysses_axis``. Read it from the mesh.

    Returns:
      ``f(hidden, positions=None, segment_ids=None, *args, **kwargs)``, everything in natural order.
      ``positions`` of None are those of one document per sequence, 0 to T - 1. Further arguments
      reach ``body`` as they are. Positions come second: write ``f(hidden, segment_ids=ids)`` where
      there are none, as ids in their place cannot be told from positions.

    Raises:
      ValueError: when called: hidden states, positions or ids of other shapes or dtypes, a length
        that the layout cannot split, or a result of another ``[B, T]``. In ``body``: a call of
        attention or linear attention on sequences of T tokens in another order, because of its
        ``layout`` or the size of its ring. Explicit positions in the call, and attention whose
        masks and scores read no positions, are not checked. A part of ``body`` that works on T
        tokens in natural order has a layout of its own: ``in_layout(part, "contiguous", n)``.
        Here: an unknown layout, or one whose order differs between sequences.
    """
    layout = parse_layout(layout)
    layout.check_is_fixed()
    num_shards = check_shards(num_shards)

    def call(
        hidden: Any, positions: Any = None, segment_ids: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        batch, length = _batch_and_length(hidden)
        positions = _permuted_positions(positions, batch, length)
        if segment_ids is not None:
            _check_integers("segment_ids", segment_ids)
            if np.shape(segment_ids) != (batch, length):
                raise ValueError(
                    f"segment_ids has shape {np.shape(segment_ids)}: it must be "
                    f"{(batch, length)}, [B, T] of the hidden states"
                )
            segment_ids = to_layout(segment_ids, layout, num_shards)
        hidden = to_layout(hidden, layout, num_shards)
        with ordered(layout, num_shards, length):
            out = body(hidden, positions, segment_ids, *args, **kwargs)

        def natural(leaf: Any) -> Any:
            if np.ndim(leaf) < 2:
                return leaf
            if np.shape(leaf)[:2] != (batch, length):
                raise ValueError(
                    f"body returned an array of shape {np.shape(leaf)}: it must start with "
                    f"{(batch, length)}, [B, T] of the hidden states; compute what has no tokens "
                    "outside of body"
                )
            return from_layout(leaf, layout, num_shards)

        return jax.tree.map(natural, out)

    def _permuted_positions(given: Any, batch: int, length: int) -> Any:
        if given is None:
            return jnp.asarray(positions(layout, length, num_shards))
        _check_integers("positions", given)
        if np.shape(given) not in ((length,), (batch, length)):
            raise ValueError(
                f"positions has shape {np.shape(given)}: it must be {(length,)} or "
                f"{(batch, length)}, [T] or [B, T] of the hidden states"
            )
        return to_layout(given, layout, num_shards, axis=-1)

    return call


def _check_integers(name: str, array: Any) -> None:
    dtype = jax.dtypes.result_type(array)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {dtype}: it must be an array of integers")


def _batch_and_length(hidden: Any) -> tuple[int, int]:
    """B and T of hidden states."""
    shapes = {np.shape(leaf)[:2] for leaf in jax.tree.leaves(hidden)}
    if len(shapes) != 1 or len(next(iter(shapes))) < 2:
        raise ValueError(
            f"hidden holds arrays whose [B, T] are {sorted(shapes)}: pass one array [B, T, ...], "
            "or a pytree of arrays that have the same"
        )
    ((batch, length),) = shapes
    return batch, length
