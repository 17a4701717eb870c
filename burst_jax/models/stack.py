"""A scan over layers with sharded weights that gathers each layer's weights one layer ahead.

In a plain ``lax.scan`` each layer starts by gathering its weights, and nothing can run until they
have arrived. Here the scan carries the weights of the current layer and gathers those of the next
one concurrently::

    forward     gather 0   | layer 0      | layer 1      | layer 2
                           | gather 1     | gather 2     |
    backward    gather 2   | layer 2      | layer 1      | layer 0
                           | gather 1     | gather 0     |

In the backward pass the gradients that are known early, those of the feed-forward, are sent with
them while the attention of the same layer runs; only attention's own are sent after it.

Layers whose weights have the same shapes share a stack; a hybrid has one for each of its mixers. A
kind is a :data:`Layer` function, so layers with different remat are of different kinds. Consecutive
layers of one kind are a segment, run by one scan. If the sequence of kinds repeats, a scan over the
repetitions runs the scans of one period. So the program contains a layer's code once per segment of
a period, not once per layer::

    kinds       L L L L L G  L L L L L G  L L
    blocks      2 x (segment of 5 L, segment of 1 G), then 1 x (segment of 2 L)

The scan carries the weights of one layer of each stack, the next one to run. A layer gathers those
of the next layer of its own stack: in a hybrid L L L G, G's arrive while the G before it runs.

JAX would store a scan's carry for the backward pass: the gathered weights of all layers. So the
stack has its own gradient. It stores what ``jax.vjp`` of a layer stores, except for the weights,
and the backward pass gathers these again. What it stores on the device is written into
uninitialized memory, as JAX's scan fills its stacks with zeros first.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from pallas_kernels.arrays import vary

# (x, one layer's weights, its frozen weights, inputs that all layers share) -> (x, sums). Sums are
# any pytree of arrays; those of all layers are stacked.
Layer = Callable[[jax.Array, Any, Any, Any], tuple[jax.Array, Any]]
# (name of a stack, one layer's part of its weights) -> gathered weights.
Gather = Callable[[str, Any], Any]


class Stacked(NamedTuple):
    """A layer. Hashable.

    Attributes:
      stack: the name of the stack that has its weights; layers use it one after the other.
      run: its function, the same for all layers of a kind.
    """

    stack: str
    run: Layer


class Place(NamedTuple):
    """Where a layer is, integers.

    Attributes:
      layer: its index among all layers.
      own: its index in its stack.
    """

    layer: Any
    own: Any


class Segment(NamedTuple):
    """Consecutive layers of one kind.

    Attributes:
      layer: index of the first layer, in the block's first repetition.
      count: number of layers.
    """

    layer: int
    count: int

    @property
    def stop(self) -> int:
        """Index after the last layer."""
        return self.layer + self.count


class Block(NamedTuple):
    """A repeated sequence of segments.

    Attributes:
      repeats: number of repetitions.
      segments: the segments of one repetition.
    """

    repeats: int
    segments: tuple[Segment, ...]

    @property
    def period(self) -> int:
        """Number of layers of one repetition."""
        return sum(segment.count for segment in self.segments)


def blocks_of(kinds: Sequence[Hashable]) -> tuple[Block, ...]:
    """The division into blocks with the fewest segments, for layers of these kinds."""
    count = len(kinds)
    starts = [i == 0 or kinds[i] != kinds[i - 1] for i in range(count)]
    started = np.cumsum(starts)  # Number of segments that start at or before a layer.

    def segments(first: int, stop: int) -> tuple[Segment, ...]:
        begins = [i for i in range(first, stop) if i == first or starts[i]]
        ends = [*begins[1:], stop]
        return tuple(Segment(i, end - i) for i, end in zip(begins, ends, strict=True))

    def block(first: int, period: int) -> tuple[int, int, int]:
        """``(segments from first on, period, next layer)`` of a block with this period."""
        stop = first + period
        while kinds[stop : stop + period] == kinds[first : first + period]:
            stop += period
        return 1 + int(started[first + period - 1] - started[first]) + fewest[stop], period, stop

    # Dynamic programming from the last layer. The longest period is tried first, so that a tie is
    # decided for the block without a scan over repetitions.
    fewest, best = [0] * (count + 1), [(0, 0, 0)] * count
    for first in reversed(range(count)):
        candidates = [block(first, period) for period in range(count - first, 0, -1)]
        best[first] = min(candidates, key=lambda candidate: candidate[0])
        fewest[first] = best[first][0]
    blocks, first = [], 0
    while first < count:
        _, period, stop = best[first]
        blocks.append(Block((stop - first) // period, segments(first, first + period)))
        first = stop
    return tuple(blocks)


def run_layers(
    layers: Sequence[Stacked],
    gather: Gather,
    x: jax.Array,
    stacked: dict[str, Any],
    frozen: dict[str, Any],
    shared: Any,
    ready_first: Callable[[Any], bool] = lambda path: False,
) -> tuple[jax.Array, Any]:
    """:func:`run_ahead`, or for layers of one kind a plain ``lax.scan`` without gathering ahead.

    Layers of several kinds use :func:`run_ahead` in any case: JAX's own gradient of a scan over
    part of a stack adds up arrays of the size of the stack.
    """
    if any(layer != layers[0] for layer in layers):
        return run_ahead(layers, gather, x, stacked, frozen, shared, ready_first)

    name, run = layers[0]

    def body(x: jax.Array, weights: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        trained, constant = (gather(name, each) for each in weights)
        return run(x, trained, constant, shared)

    return lax.scan(body, x, (stacked[name], lax.stop_gradient(frozen[name])))


def run_ahead(
    layers: Sequence[Stacked],
    gather: Gather,
    x: jax.Array,
    stacked: dict[str, Any],
    frozen: dict[str, Any],
    shared: Any,
    ready_first: Callable[[Any], bool] = lambda path: False,
) -> tuple[jax.Array, Any]:
    """``x`` through all layers, with weights gathered one layer ahead.

    Args:
      layers: the function of each layer, for gathered weights, and the name of its stack. The
        ``jax.vjp`` of the function determines what is stored.
      gather: this device's part of one layer's weights, trained or frozen, to whole weights;
        differentiable.
      x: the first layer's input.
      stacked: of each stack a pytree of this device's trained weights, with a leading dimension for
        its layers.
      frozen: the same for frozen weights, which have no gradient; they may be empty.
      shared: pytree that all layers read, like positions; it has no gradient.
      ready_first: whether the gradient of a weight, by its path from its stack's name on, is known
        early in its layer's backward pass. These are sent while the rest of the layer runs.

    Returns:
      ``(x, sums)``: the last layer's output, with the shape and dtype of ``x``, and the sums of all
      layers, stacked.
    """
    counts = collections.Counter(layer.stack for layer in layers)
    blocks = blocks_of(layers)
    # XLA unrolls a scan over a single layer. Between two layers without loops it would merge the
    # backward pass's recomputation with the forward pass, and so store what is recomputed.
    unrolled = {
        segment
        for block in blocks
        for segment in block.segments
        if block.repeats == segment.count == 1
    }
    # Rebuilds each segment's vjp from what is stored; set while the forward pass is traced.
    rebuild: dict[Segment, Callable[[list[jax.Array], Any], Any]] = {}

    def one_layer(stacked: Any, index: Any) -> Any:
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, 0, False), stacked)

    def gathered(local: tuple[Any, Any], stack: str, index: Any) -> tuple[Any, Any]:
        """The weights and frozen weights of a layer of a stack, by its index there."""
        index = jnp.clip(index, 0, counts[stack] - 1)
        trained, constant = (one_layer(weights[stack], index) for weights in local)
        return gather(stack, trained), gather(stack, constant)

    @jax.custom_vjp
    def run(x: jax.Array, stacked: Any, frozen: Any, shared: Any) -> tuple[jax.Array, Any]:
        local = stacked, frozen

        def body(segment: Segment, carry: Any, place: Place, _: None) -> Any:
            (x, following), (stack, layer) = carry, layers[segment.layer]
            ahead = gathered(local, stack, place.own + 1)
            weights, constant = following[stack]
            x, sums = layer(x, weights, constant, shared)
            return (x, following | {stack: ahead}), sums

        first = {stack: gathered(local, stack, np.int32(0)) for stack in counts}
        (x, _), sums = _scan(layers, blocks, body, (x, first))
        return x, _in_order(blocks, sums)

    def forward(x: jax.Array, stacked: Any, frozen: Any, shared: Any) -> tuple[Any, Any]:
        local = stacked, frozen

        def body(segment: Segment, carry: Any, place: Place, _: None) -> Any:
            (x, following), (stack, layer) = carry, layers[segment.layer]
            weights, constant = following[stack]
            ahead = gathered(local, stack, place.own + 1)
            out, vjp = jax.vjp(lambda x, weights: layer(x, weights, constant, shared), x, weights)
            stored, rebuild[segment] = _without(vjp, (weights, constant, shared))
            return (out[0], following | {stack: ahead}), (out[1], stored)

        first = {stack: gathered(local, stack, np.int32(0)) for stack in counts}
        (out, _), found = _scan(layers, blocks, body, (x, first))
        sums, stored = ([tuple(each[i] for each in block) for block in found] for i in range(2))
        return (out, _in_order(blocks, sums)), (stored, local, shared)

    def backward(residuals: Any, gradients: Any) -> tuple[jax.Array, Any, None, None]:
        stored, local, shared = residuals
        (gradient, dsums), (stacked, _) = gradients, local

        def body(segment: Segment, carry: Any, place: Place, stored: list[jax.Array]) -> Any:
            (gradient, following, gradients), stack = carry, layers[segment.layer].stack
            if segment in unrolled:
                stored = lax.optimization_barrier(stored)
            own = one_layer(stacked[stack], place.own)
            dout = gradient, one_layer(dsums, place.layer)
            gradient, dweights = rebuild[segment](stored, (*following[stack], shared))(dout)

            def scattered(own: Any, dweights: Any) -> Any:
                return jax.vjp(partial(gather, stack), own)[1](dweights)[0]

            ahead = gathered(local, stack, place.own - 1)
            early = jax.tree_util.tree_map_with_path(
                lambda path, _: ready_first(path), {stack: own}
            )[stack]
            (own_first, own_last), (dfirst, dlast) = (
                _parts(early, each) for each in (own, dweights)
            )
            dfirst = scattered(own_first, dfirst)
            if _shapes(ahead[0]) != _shapes(own):
                # Else XLA would combine all that is sent here, and wait for the last gradient.
                ahead, dfirst, dlast = lax.optimization_barrier((ahead, dfirst, dlast))
            dlocal = _merged(dfirst, scattered(own_last, dlast))
            own_gradients = jax.tree.map(
                lambda all, one: lax.dynamic_update_index_in_dim(all, one, place.own, 0),
                gradients[stack],
                dlocal,
            )
            following = following | {stack: ahead}
            return (gradient, following, gradients | {stack: own_gradients}), None

        last = {stack: gathered(local, stack, np.int32(counts[stack] - 1)) for stack in counts}
        carry = gradient, last, jax.tree.map(lambda x: _empty(x.shape, jax.typeof(x)), stacked)
        gradient, _, gradients = _scan(layers, blocks, body, carry, stored, reverse=True)[0]
        return gradient, gradients, None, None

    run.defvjp(forward, backward)
    return run(x, stacked, frozen, shared)


def _shapes(weights: Any) -> list[tuple[int, ...]]:
    return [x.shape for x in jax.tree.leaves(weights)]


def _parts(taken: Any, weights: Any) -> tuple[Any, Any]:
    """The weights where ``taken`` is true, and the others; None in the others' places."""
    first = jax.tree.map(lambda is_taken, x: x if is_taken else None, taken, weights)
    last = jax.tree.map(lambda is_taken, x: None if is_taken else x, taken, weights)
    return first, last


def _merged(first: Any, last: Any) -> Any:
    """The inverse of :func:`_parts`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, first, last, is_leaf=lambda x: x is None
    )


def _scan(
    layers: Sequence[Stacked],
    blocks: Sequence[Block],
    body: Callable[[Segment, Any, Place, Any], tuple[Any, Any]],
    carry: Any,
    inputs: Any = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """``lax.scan`` over all layers, one scan per segment.

    ``body`` is ``(segment, carry, place, input) -> (carry, out)``. Inputs and outs are stacked: for
    each block and segment arrays ``[repeats, count, ...]``, or ``[count, ...]`` for a block that
    does not repeat. ``reverse`` starts with the last layer.
    """
    order, scan = (-1, partial(lax.scan, reverse=True)) if reverse else (1, _stacking)
    outs: list[Any] = [None] * len(blocks)
    stacks = np.array([layer.stack for layer in layers])

    def in_stack(stack: str, start: int, stop: int) -> int:
        """Number of layers of a stack among these layers."""
        return int((stacks[start:stop] == stack).sum())

    for number, block in list(enumerate(blocks))[::order]:
        block_inputs = inputs[number] if inputs is not None else (None,) * len(block.segments)

        def repetition(carry: Any, each: Any, block: Block = block) -> tuple[Any, Any]:
            repeat, block_inputs = each
            outs: list[Any] = [None] * len(block.segments)
            for i, segment in list(enumerate(block.segments))[::order]:

                def layer(carry: Any, each: Any, segment: Segment = segment) -> tuple[Any, Any]:
                    return body(segment, carry, *each)

                start, stack = block.segments[0].layer, layers[segment.layer].stack
                of_stack = in_stack(stack, start, start + block.period)
                first = Place(segment.layer, in_stack(stack, 0, segment.layer))
                steps = np.arange(segment.count, dtype=np.int32)
                places = [
                    repeat * np.int32(period) + (np.int32(index) + steps)
                    for index, period in zip(first, (block.period, of_stack), strict=True)
                ]
                xs = Place(*places), block_inputs[i]
                carry, outs[i] = scan(layer, carry, xs)
            return carry, tuple(outs)

        if block.repeats == 1:
            carry, outs[number] = repetition(carry, (np.int32(0), block_inputs))
        else:
            repeats = np.arange(block.repeats, dtype=np.int32)
            carry, outs[number] = scan(repetition, carry, (repeats, block_inputs))
    return carry, tuple(outs)


def _stacking(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """``lax.scan`` with uninitialized stacks, which it overwrites.

    JAX cannot transpose the loop: gradients of a stack's gradients need forward over reverse mode.

    The index is the loop's only counter: XLA copies into stacks next to other kernels only if all
    offsets follow from that.
    """
    count = len(jax.tree.leaves(xs)[0])
    # Traced once, for the types of what is stacked, too.
    traced, shapes = jax.make_jaxpr(body, return_shape=True)(
        carry, jax.tree.map(lambda x: x[0], xs)
    )
    structure = jax.tree.structure(shapes)
    _, made = jax.tree.unflatten(structure, traced.out_avals)

    def run(carry: Any, each: Any) -> tuple[Any, Any]:
        return jax.tree.unflatten(structure, jaxpr_as_fun(traced)(*jax.tree.leaves((carry, each))))

    if any(aval.memory_space == jax.memory.Space.Host for aval in jax.tree.leaves(made)):
        return lax.scan(run, carry, xs)  # lax.empty is of the device's memory.

    def step(state: Any) -> Any:
        index, carry, stacks = state
        each = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, False), xs)
        carry, out = run(carry, each)
        stacks = jax.tree.map(
            lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, index, 0), stacks, out
        )
        return index + 1, carry, stacks

    stacks = jax.tree.map(lambda aval: _empty((count, *aval.shape), aval), made)
    start = np.int32(0), carry, stacks
    return lax.while_loop(lambda state: state[0] < count, step, start)[1:]


def _empty(shape: tuple[int, ...], like: Any) -> jax.Array:
    """An uninitialized array with the dtype of ``like``, inside a ``shard_map`` over all axes.

    Whoever makes it writes each element before it is read.
    """
    return vary(lax.empty(shape, like.dtype), like.manual_axis_type.varying)


def _in_order(blocks: Sequence[Block], outs: Sequence[tuple[Any, ...]]) -> Any:
    """The outs of :func:`_scan` of all layers, ``[L, ...]``."""

    def concatenated(block: Block, *parts: jax.Array) -> jax.Array:
        if block.repeats == 1:
            return jnp.concatenate(parts)
        each = jnp.concatenate(parts, axis=1)
        return each.reshape(-1, *each.shape[2:])

    of_blocks = [
        jax.tree.map(partial(concatenated, block), *parts)
        for block, parts in zip(blocks, outs, strict=True)
    ]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_blocks)


def _without(vjp: Any, available: Any) -> tuple[list[jax.Array], Callable[..., Any]]:
    """``(arrays, rebuild)``: the arrays that a vjp holds, except for those of ``available``.

    ``rebuild(arrays, available)`` returns the vjp.
    """
    index_of = {id(array): index for index, array in enumerate(jax.tree.leaves(available))}
    leaves, structure = jax.tree.flatten(vjp)
    sources = [index_of.get(id(leaf)) for leaf in leaves]

    def rebuild(arrays: list[jax.Array], available: Any) -> Any:
        others, stored = jax.tree.leaves(available), iter(arrays)
        return jax.tree.unflatten(
            structure, [next(stored) if index is None else others[index] for index in sources]
        )

    return [leaf for leaf, index in zip(leaves, sources, strict=True) if index is None], rebuild
