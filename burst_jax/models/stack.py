"""Runs a stack of layers whose weights are split: each layer's are gathered one layer ahead.

In a plain ``lax.scan`` over the layers a layer begins by gathering its weights, and nothing can
start before they are there. Here the scan carries the weights of the layer that it runs, and
gathers those of the next layer meanwhile::

    forward     gather 0   | layer 0      | layer 1      | layer 2
                           | gather 1     | gather 2     |
    backward    gather 2   | layer 2      | layer 1      | layer 0
                           | gather 1     | gather 0     |

JAX would keep a scan's carry for the backward pass: the whole weights of all layers. So the stack
has a gradient of its own. It keeps what ``jax.vjp`` of a layer keeps, without the weights, and the
backward pass gathers these again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# (x, one layer's weights, what all layers share) -> x.
Layer = Callable[[jax.Array, Any, Any], jax.Array]


def run_layers(
    layer: Layer, gather: Callable[[Any], Any], x: jax.Array, stacked: Any, sides: Any
) -> jax.Array:
    """:func:`run_ahead` without its schedule, for weights that are whole already."""

    def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return layer(x, gather(weights), sides), None

    return lax.scan(body, x, stacked)[0]


def run_ahead(
    layer: Layer, gather: Callable[[Any], Any], x: jax.Array, stacked: Any, sides: Any
) -> jax.Array:
    """``x`` through all layers, whose weights are gathered one layer ahead.

    Args:
      layer: ``(x, weights, sides) -> x``, one layer with its whole weights. What ``jax.checkpoint``
        makes of it decides what the backward pass recomputes.
      gather: one layer's weights from this device's parts; differentiable.
      x: the first layer's input.
      stacked: pytree of this device's parts, each with a first dimension that counts the layers.
      sides: pytree that all layers read, like positions; constants, which get no gradient.

    Returns:
      The last layer's output, as ``x``.
    """
    count = jax.tree.leaves(stacked)[0].shape[0]
    layers: Any = np.arange(count, dtype=np.int32)
    # How the pieces that a layer keeps make its vjp again. It is the same for all layers, and known
    # once the forward pass has been traced.
    kept_as: list[_Kept] = []

    def of_layer(stacked: Any, index: jax.Array) -> Any:
        index = jnp.clip(index, 0, count - 1)
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, 0, False), stacked)

    @jax.custom_vjp
    def run(x: jax.Array, stacked: Any, sides: Any) -> jax.Array:
        def body(carry: tuple[jax.Array, Any], index: jax.Array) -> tuple[Any, None]:
            x, weights = carry
            ahead = gather(of_layer(stacked, index + 1))
            return (layer(x, weights, sides), ahead), None

        return lax.scan(body, (x, gather(of_layer(stacked, layers[0]))), layers)[0][0]

    def forward(x: jax.Array, stacked: Any, sides: Any) -> tuple[jax.Array, Any]:
        def body(carry: tuple[jax.Array, Any], index: jax.Array) -> tuple[Any, list[jax.Array]]:
            x, weights = carry
            ahead = gather(of_layer(stacked, index + 1))
            out, vjp = jax.vjp(lambda x, weights: layer(x, weights, sides), x, weights)
            kept, pieces = _without(vjp, (weights, sides))
            kept_as[:] = [kept]
            return (out, ahead), pieces

        first = gather(of_layer(stacked, layers[0]))
        (out, _), pieces = lax.scan(body, (x, first), layers)
        return out, (pieces, stacked, sides)

    def backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array, Any, None]:
        pieces, stacked, sides = residuals

        def body(carry: tuple[jax.Array, Any], each: Any) -> tuple[Any, Any]:
            gradient, weights = carry
            index, pieces = each
            ahead = gather(of_layer(stacked, index - 1))
            gradient, of_weights = kept_as[0].vjp(pieces, (weights, sides))(gradient)
            (of_parts,) = jax.vjp(gather, of_layer(stacked, index))[1](of_weights)
            return (gradient, ahead), of_parts

        last = gather(of_layer(stacked, layers[-1]))
        (gradient, _), of_stacked = lax.scan(body, (gradient, last), (layers, pieces), reverse=True)
        return gradient, of_stacked, None

    run.defvjp(forward, backward)
    return run(x, stacked, sides)


class _Kept:
    """Which of a vjp's arrays are kept, and which are at hand again in the backward pass.

    Attributes:
      structure: the tree of the vjp.
      at_hand: for each of its leaves the index among the arrays at hand, or None if it is kept.
    """

    def __init__(self, structure: Any, at_hand: list[int | None]) -> None:
        self.structure = structure
        self.at_hand = at_hand

    def vjp(self, pieces: list[jax.Array], arrays: Any) -> Any:
        """The vjp of one layer, from what it kept and from the arrays that are at hand."""
        again, kept = jax.tree.leaves(arrays), iter(pieces)
        leaves = [next(kept) if index is None else again[index] for index in self.at_hand]
        return jax.tree.unflatten(self.structure, leaves)


def _without(vjp: Any, arrays: Any) -> tuple[_Kept, list[jax.Array]]:
    """The arrays that a vjp holds, without those among ``arrays``, and how they make it again."""
    index_of = {id(array): index for index, array in enumerate(jax.tree.leaves(arrays))}
    leaves, structure = jax.tree.flatten(vjp)
    at_hand = [index_of.get(id(leaf)) for leaf in leaves]
    pieces = [leaf for leaf, index in zip(leaves, at_hand, strict=True) if index is None]
    return _Kept(structure, at_hand), pieces
