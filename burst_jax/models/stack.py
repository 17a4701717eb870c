"""Runs a stack of layers whose weights are split: each layer's are gathered one layer ahead.

In a plain ``lax.scan`` over the layers a layer begins by gathering its weights, and nothing can
start before they are there. Here the scan carries the weights of the layer that it runs, and
gathers those of the next layer meanwhile::

    forward     gather 0   | layer 0      | layer 1      | layer 2
                           | gather 1     | gather 2     |
    backward    gather 2   | layer 2      | layer 1      | layer 0
                           | gather 1     | gather 0     |

Layers of different kinds have weights of the same shapes, so all weights lie in one stack, and
kinds differ in code only. Layers of one kind that follow each other are a run, and one scan runs
them. If the kinds repeat, a scan over the repetitions runs the scans of one period. So the program
has the code of a layer once for each run of a period, not once for each layer::

    kinds       L L L L L G  L L L L L G  L L
    blocks      2 x (run of 5 L, run of 1 G), then 1 x (run of 2 L)

What a layer keeps for its backward pass is a part of its kind, too.

JAX would keep a scan's carry for the backward pass: the whole weights of all layers. So the stack
has a gradient of its own. It keeps what ``jax.vjp`` of a layer keeps, without the weights, and the
backward pass gathers these again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# (x, one layer's weights, its frozen weights, what all layers share) -> x.
Layer = Callable[[jax.Array, Any, Any, Any], jax.Array]
# Of a block its period, and the layer after its last one.
Cut = tuple[int, int]


class Run(NamedTuple):
    """Layers of one kind that follow each other.

    Attributes:
      layer: index of the first of them, in the block's first repetition.
      count: number of layers.
    """

    layer: int
    count: int


class Block(NamedTuple):
    """Runs that follow each other, all of them some times over.

    Attributes:
      repeats: number of repetitions.
      runs: the runs of one repetition.
    """

    repeats: int
    runs: tuple[Run, ...]

    @property
    def period(self) -> int:
        """Number of layers of one repetition."""
        return sum(run.count for run in self.runs)


def blocks_of(kinds: Sequence[Hashable]) -> tuple[Block, ...]:
    """Layers of these kinds as blocks, with as few runs as repeating periods give.

    Args:
      kinds: the kind of each layer.
    """
    count = len(kinds)
    starts = [i == 0 or kinds[i] != kinds[i - 1] for i in range(count)]
    begun = np.cumsum(starts)  # How many runs begin with this layer or before it.

    def runs(first: int, stop: int) -> tuple[Run, ...]:
        of_block = [i for i in range(first, stop) if i == first or starts[i]]
        ends = [*of_block[1:], stop]
        return tuple(Run(i, end - i) for i, end in zip(of_block, ends, strict=True))

    def cut(first: int, period: int) -> tuple[int, Cut]:
        """The runs from ``first`` on, if a block of this period begins there."""
        stop = first + period
        while kinds[stop : stop + period] == kinds[first : first + period]:
            stop += period
        return 1 + int(begun[first + period - 1] - begun[first]) + fewest[stop], (period, stop)

    # From the last layer to the first: the fewest runs from a layer on, and the block that begins
    # there. The longest period comes first, so that of equally good blocks the one without a scan
    # over periods is taken.
    fewest, cuts = [0] * (count + 1), [(0, 0)] * count
    for first in reversed(range(count)):
        found = [cut(first, period) for period in range(count - first, 0, -1)]
        fewest[first], cuts[first] = min(found, key=lambda each: each[0])
    blocks, first = [], 0
    while first < count:
        period, stop = cuts[first]
        blocks.append(Block((stop - first) // period, runs(first, first + period)))
        first = stop
    return tuple(blocks)


def run_layers(
    layers: Sequence[Layer],
    gather: Callable[[Any], Any],
    x: jax.Array,
    stacked: Any,
    frozen: Any,
    sides: Any,
) -> jax.Array:
    """:func:`run_ahead` without its schedule, for weights that are whole already.

    Layers of different kinds take :func:`run_ahead` all the same: JAX's own gradient of a scan that
    reads a part of a stack adds up arrays of the size of the stack.
    """
    if any(layer is not layers[0] for layer in layers):
        return run_ahead(layers, gather, x, stacked, frozen, sides)

    def body(x: jax.Array, parts: tuple[Any, Any]) -> tuple[jax.Array, None]:
        weights, constant = parts
        return layers[0](x, gather(weights), gather(constant), sides), None

    return lax.scan(body, x, (stacked, lax.stop_gradient(frozen)))[0]


def run_ahead(
    layers: Sequence[Layer],
    gather: Callable[[Any], Any],
    x: jax.Array,
    stacked: Any,
    frozen: Any,
    sides: Any,
) -> jax.Array:
    """``x`` through all layers, whose weights are gathered one layer ahead.

    Args:
      layers: for each layer ``(x, weights, frozen, sides) -> x``, the layer with its whole weights;
        layers of one kind have the same function. What ``jax.checkpoint`` makes of it decides what
        the backward pass recomputes.
      gather: one layer's weights from this device's parts, of ``stacked`` or of ``frozen``;
        differentiable.
      x: the first layer's input.
      stacked: pytree of this device's parts, each with a first dimension that counts the layers.
      frozen: pytree of parts like these, of weights that are constants and get no gradient; it may
        be empty.
      sides: pytree that all layers read, like positions; constants, which get no gradient.

    Returns:
      The last layer's output, as ``x``.
    """
    count = len(layers)
    blocks = blocks_of(layers)
    # XLA makes no loop of a scan over a single layer. Without loops between them it would merge
    # what the backward pass recomputes with the forward pass, and so keep it.
    bare = {run for block in blocks for run in block.runs if block.repeats == run.count == 1}
    # How the pieces that a layer keeps make its vjp again. It is the same for all layers of a run,
    # and known once the forward pass has been traced.
    kept_as: dict[Run, _Kept] = {}

    def of_layer(stacked: Any, index: Any) -> Any:
        index = jnp.clip(index, 0, count - 1)
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, 0, False), stacked)

    def whole(parts: tuple[Any, Any], index: Any) -> tuple[Any, Any]:
        """The weights of a layer, and its frozen weights."""
        stacked, frozen = of_layer(parts, index)
        return gather(stacked), gather(frozen)

    @jax.custom_vjp
    def run(x: jax.Array, stacked: Any, frozen: Any, sides: Any) -> jax.Array:
        parts = stacked, frozen

        def body(run: Run, carry: tuple[jax.Array, Any], index: jax.Array, _: None) -> Any:
            x, (weights, constant) = carry
            ahead = whole(parts, index + 1)
            return (layers[run.layer](x, weights, constant, sides), ahead), None

        return _walk(blocks, body, (x, whole(parts, np.int32(0))))[0][0]

    def forward(x: jax.Array, stacked: Any, frozen: Any, sides: Any) -> tuple[jax.Array, Any]:
        parts = stacked, frozen

        def body(run: Run, carry: tuple[jax.Array, Any], index: jax.Array, _: None) -> Any:
            x, (weights, constant) = carry
            ahead = whole(parts, index + 1)
            layer = layers[run.layer]
            out, vjp = jax.vjp(lambda x, weights: layer(x, weights, constant, sides), x, weights)
            kept_as[run], pieces = _without(vjp, (weights, constant, sides))
            return (out, ahead), pieces

        (out, _), pieces = _walk(blocks, body, (x, whole(parts, np.int32(0))))
        return out, (pieces, parts, sides)

    def backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array, Any, None, None]:
        pieces, parts, sides = residuals
        stacked, _ = parts

        def body(run: Run, carry: Any, index: jax.Array, pieces: list[jax.Array]) -> Any:
            gradient, weights, of_stacked = carry
            ahead = whole(parts, index - 1)
            if run in bare:
                pieces = lax.optimization_barrier(pieces)
            gradient, of_weights = kept_as[run].vjp(pieces, (*weights, sides))(gradient)
            (of_parts,) = jax.vjp(gather, of_layer(stacked, index))[1](of_weights)
            of_stacked = jax.tree.map(
                lambda all, one: lax.dynamic_update_index_in_dim(all, one, index, 0),
                of_stacked,
                of_parts,
            )
            return (gradient, ahead, of_stacked), None

        last = whole(parts, np.int32(count - 1))
        carry = gradient, last, jax.tree.map(jnp.zeros_like, stacked)
        gradient, _, of_stacked = _walk(blocks, body, carry, pieces, reverse=True)[0]
        return gradient, of_stacked, None, None

    run.defvjp(forward, backward)
    return run(x, stacked, frozen, sides)


def _walk(
    blocks: Sequence[Block],
    body: Callable[[Run, Any, jax.Array, Any], tuple[Any, Any]],
    carry: Any,
    given: Any = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Takes ``body`` through all layers, a scan for each run.

    Args:
      blocks: the layers.
      body: ``(run, carry, index of the layer, given) -> (carry, out)``.
      carry: what the first layer that is visited is given.
      given: for each block and each of its runs what ``body`` is given, stacked; None: nothing.
      reverse: whether to begin with the last layer.

    Returns:
      ``(carry, outs)``, the outs stacked as ``given`` is: for each block and run arrays
      ``[repeats, count, ...]``, of a block that is not repeated ``[count, ...]``.
    """
    order = -1 if reverse else 1
    outs: list[Any] = [None] * len(blocks)
    for place, block in list(enumerate(blocks))[::order]:
        into = given[place] if given is not None else (None,) * len(block.runs)

        def repetition(carry: Any, each: Any, block: Block = block) -> tuple[Any, Any]:
            shift, into = each
            outs: list[Any] = [None] * len(block.runs)
            for i, run in list(enumerate(block.runs))[::order]:

                def layer(carry: Any, each: Any, run: Run = run) -> tuple[Any, Any]:
                    return body(run, carry, *each)

                indices = shift + np.arange(run.layer, run.layer + run.count, dtype=np.int32)
                carry, outs[i] = lax.scan(layer, carry, (indices, into[i]), reverse=reverse)
            return carry, tuple(outs)

        if block.repeats == 1:
            carry, outs[place] = repetition(carry, (np.int32(0), into))
        else:
            shifts = np.arange(block.repeats, dtype=np.int32) * np.int32(block.period)
            carry, outs[place] = lax.scan(repetition, carry, (shifts, into), reverse=reverse)
    return carry, tuple(outs)


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
