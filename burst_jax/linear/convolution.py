"""Short causal convolution on one device's tokens, with the tokens before each run of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.attention.segment_ids import with_padding_zero
from burst_jax.linear.documents import tokens_of
from burst_jax.linear.exchange import permuted
from burst_jax.linear.runs import ALONE, DeviceRuns, DocumentRuns
from burst_jax.linear.split_documents import (
    Slots,
    SplitRuns,
    are_of_others,
    tokens_before,
    with_zone,
)
from pallas_kernels.arrays import vary, varying_axes
from pallas_kernels.device import Target
from pallas_kernels.linear.chunks import Tokens


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything static of a call. Hashable.

    Attributes:
      runs: how devices share sequences, or documents.
      padding_id: the segment id of padding.
      returns_tail: whether the tokens that the next ones would read are a result, too.
    """

    runs: DeviceRuns | DocumentRuns
    padding_id: int
    returns_tail: bool = False


def in_shard(
    request: Request, arrays: Mapping[str, jax.Array], target: Target | None = None
) -> tuple[jax.Array, ...]:
    """``[B, T, F]`` of one device's tokens; arguments as of the rule's ``in_shard``.

    With a tail before or after also ``[B, W - 1, F]``, the last tokens of all devices.
    """
    del target
    runs = request.runs
    over = [lax.axis_index(name) for name in runs.axes]
    arrays = vary(dict(arrays), varying_axes(arrays, over))
    if isinstance(runs, DocumentRuns):
        return (_of_documents(runs, arrays, request.padding_id),)
    x, weight, tokens = runs.split(arrays["x"]), arrays["weight"], None
    if "segment_ids" in arrays:
        tokens = tokens_of(runs, arrays["segment_ids"], request.padding_id)
        x = jnp.where(tokens.valid[..., None], x, jnp.zeros((), x.dtype))
    halo = weight.shape[0] - 1
    x, tokens = _with_halo(runs, (x, tokens), halo) if halo else (x, tokens)
    if not (request.returns_tail or "initial_tail" in arrays):
        return (runs.join(convolved(x, tokens, weight)),)
    first, last = _ends(runs, tokens, (arrays["x"].shape[0], x.shape[1] - halo), halo)
    if "initial_tail" in arrays:
        x = _continued(runs, x, arrays["initial_tail"], first)
    y = runs.join(convolved(x, tokens, weight))
    return y, _tail(runs, x, tokens, last, halo)


def _of_documents(
    runs: DocumentRuns, arrays: Mapping[str, jax.Array], padding_id: int
) -> jax.Array:
    """In a balanced batch: a device's tokens, then again the first ones of each run.

    These read what the run's document has before it, wherever that is.
    """
    # In the tables padding is 0.
    ids = with_padding_zero("segment_ids", arrays["segment_ids"], padding_id)
    wrong = are_of_others(arrays["run_checksums"], ids)
    weight, valid = arrays["weight"], ids != 0
    x = jnp.where(valid[..., None], arrays["x"], jnp.zeros((), arrays["x"].dtype))
    halo, zone = weight.shape[0] - 1, runs.zone
    begins = jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    if not (halo and zone):
        tree = (x, Tokens(begins, valid))
        y = convolved(*(_with_halo(ALONE, tree, halo) if halo else tree), weight)
        return jnp.where(wrong[:, None, None], jnp.asarray(jnp.nan, y.dtype), y)
    of_split = SplitRuns.of(arrays)
    slots = Slots.of(of_split, zone, min(halo, zone))
    begins = with_zone(begins, begins[:, -zone:] | slots.begins)
    y = convolved(*_with_halo(ALONE, (x, Tokens(begins, valid)), halo), weight)
    before, exists = tokens_before(runs, of_split, x[:, -zone:], halo)
    batch, count = of_split.shape
    flat = batch * count, -1
    firsts = slots.cut(x[:, -zone:]).reshape(*flat, x.shape[2])
    valid = jnp.concatenate([exists.reshape(flat), slots.used.reshape(flat)], 1)
    tokens = Tokens(jnp.zeros_like(valid), valid)
    before = before.reshape(batch * count, halo, x.shape[2])
    of_firsts = convolved(jnp.concatenate([before, firsts], 1), tokens, weight)
    of_firsts = slots.pasted(of_firsts.reshape(batch, -1, x.shape[2]))
    of_zone = jnp.where(slots.has[..., None], of_firsts, y[:, -zone:])
    y = with_zone(y, of_zone)
    return jnp.where(wrong[:, None, None], jnp.asarray(jnp.nan, y.dtype), y)


# What the sum is computed from is an input: saved would be float32 copies of it.
@functools.partial(jax.checkpoint, prevent_cse=False)
def convolved(x: jax.Array, tokens: Tokens | None, weight: jax.Array) -> jax.Array:
    """The sum over taps, for all tokens but the first W - 1, which precede a run."""
    taps, wide = weight.shape[0], jnp.float32
    length = x.shape[1] - (taps - 1)
    total = jnp.zeros((), wide)
    reaches: jax.Array | None = None
    for distance in range(taps):
        # Whether no document begins after that tap.
        if tokens is not None:
            here = lax.slice_in_dim(tokens.valid, taps - 1, None, axis=1)
            first = taps - distance
            begins = tokens.begins[:, first : first + length] if distance else ~here
            reaches = ~begins if reaches is None else reaches & ~begins
        at = taps - 1 - distance
        term = x[:, at : at + length].astype(wide) * weight[at].astype(wide)
        if reaches is not None:
            term = jnp.where(reaches[..., None], term, 0)
        total = total + term
    return total.astype(x.dtype)


def convolved_step(
    tails: Sequence[jax.Array],
    tokens: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    activation: Callable[[jax.Array], jax.Array],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """One token of several convolutions, for decoding.

    XLA launches a kernel for each array, so those of all convolutions are one. Tails that it
    computed from the old ones in the same memory would be copied first: a token takes the place of
    the one before it.

    Args:
      tails: ``[B, W - 1, ...]`` of each convolution, its last inputs.
      tokens: ``[B, ...]``, the next one.
      weights: ``[W, ...]``.
      activation: of their outputs.

    Returns:
      The activated outputs, ``[B, ...]`` each in the dtype of its token, and the new tails.
    """
    shapes = [token.shape[1:] for token in tokens]
    ends = np.cumsum([math.prod(shape) for shape in shapes[:-1]])

    def as_one(arrays: list[jax.Array]) -> list[jax.Array]:
        """The arrays, ``[B, n, features]``, as parts of one that is computed first."""
        return jnp.split(lax.optimization_barrier(jnp.concatenate(arrays, -1)), ends, axis=-1)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1)

    windows = as_one(
        [
            flat(jnp.concatenate([tail, token[:, None].astype(tail.dtype)], 1))
            for tail, token in zip(tails, tokens, strict=True)
        ]
    )
    outputs = as_one(
        [
            activation(convolved(window, None, weight.reshape(len(weight), -1)).astype(token.dtype))
            for window, weight, token in zip(windows, weights, tokens, strict=True)
        ]
    )
    return (
        [x.reshape(len(x), *shape) for x, shape in zip(outputs, shapes, strict=True)],
        [x[:, 1:].reshape(tail.shape) for x, tail in zip(windows, tails, strict=True)],
    )


def _ends(
    runs: DeviceRuns, tokens: Tokens | None, shape: tuple[int, int], halo: int
) -> tuple[jax.Array, jax.Array]:
    """The positions of each sequence's first and last token, int32 ``[B]``, for all devices.

    In a sequence that is all padding the first one is the token after it, the last one its last.

    Args:
      runs: of all devices.
      tokens: of this device's runs with their halos; None without padding.
      shape: number of sequences, and of tokens of a run.
      halo: number of tokens before each run.
    """
    total = runs.total * shape[1]
    if tokens is None:
        return jnp.zeros(shape[0], jnp.int32), jnp.full(shape[0], total - 1, jnp.int32)
    valid, at = tokens.valid[:, halo:], _positions(runs, *shape)
    first = runs.per_run(jnp.where(valid, at, total).min(1)).min(0)
    last = runs.per_run(jnp.where(valid, at, -1).max(1)).max(0)
    if runs.axes:
        first, last = lax.pmin(first, runs.axes), lax.pmax(last, runs.axes)
    return first, jnp.where(last < 0, total - 1, last)


def _positions(runs: DeviceRuns, batch: int, length: int, halo: int = 0) -> jax.Array:
    """Each token's position in its sequence, int32 ``[B * count, halo + length]``."""
    starts = jnp.tile(runs.here() * length, batch)
    return starts[:, None] + jnp.arange(-halo, length, dtype=jnp.int32)


def _continued(
    runs: DeviceRuns, x: jax.Array, initial_tail: jax.Array, first: jax.Array
) -> jax.Array:
    """Runs with their halos, in which the tail is in front of each sequence's first token.

    There is padding, or the halo of the first run. It is read, and has no output.
    """
    batch, halo, _ = initial_tail.shape
    at = _positions(runs, batch, x.shape[1] - halo, halo)
    before = jnp.repeat(first, runs.count)[:, None] - at
    tail = jnp.repeat(initial_tail.astype(x.dtype), runs.count, axis=0)
    for distance in range(1, halo + 1):
        own = tail[:, halo - distance, None]
        x = jnp.where((before == distance)[..., None], own, x)
    return x


def _tail(
    runs: DeviceRuns, x: jax.Array, tokens: Tokens | None, last: jax.Array, halo: int
) -> jax.Array:
    """``[B, W - 1, F]`` up to each sequence's last token, zeros where it reads none.

    One run has them all: that of the last token, with its halo.
    """
    batch, length = last.shape[0], x.shape[1] - halo
    own = jnp.repeat(last, runs.count) - _positions(runs, batch, length)[:, 0]
    at = jnp.clip(own, 0, length - 1)[:, None] + jnp.arange(1, halo + 1, dtype=jnp.int32)
    reads = jnp.broadcast_to(((own >= 0) & (own < length))[:, None], at.shape)
    if tokens is not None:
        # How many documents begin after each token, up to the last one.
        begins = jnp.take_along_axis(tokens.begins, at, 1).astype(jnp.int32)
        reads &= jnp.flip(jnp.cumsum(jnp.flip(begins, 1), 1), 1) == begins
    found = jnp.where(reads[..., None], jnp.take_along_axis(x, at[..., None], 1), 0)
    found = runs.per_run(found).sum(0)
    return lax.psum(found, runs.axes) if runs.axes else found


def _with_halo[Tree](runs: DeviceRuns, tree: Tree, halo: int) -> Tree:
    """Arrays of runs, ``[B * count, T / count, ...]``, after the ``halo`` tokens before each."""
    length = jax.tree.leaves(tree)[0].shape[1]
    if length < halo:
        before = _from_all(runs, tree, halo)
    else:
        tails = jax.tree.map(lambda x: runs.per_run(x[:, length - halo :]), tree)
        before = jax.tree.map(runs.in_batch, _before(runs, tails))
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), before, tree)


def _before[Tree](runs: DeviceRuns, tails: Tree) -> Tree:
    """What ends before each of this device's runs: ``[count, B, halo, ...]``, zeros at the start.

    Zigzag's second runs lead down the devices, and the first of them follows its own device's run.
    """
    if runs.size == 1:
        return jax.tree.map(jnp.zeros_like, tails)
    found = []
    for column in range(runs.count):
        first, *_, last = (row[column] for row in runs.order)
        own = jax.tree.map(lambda x, column=column: x[column], tails)
        before = permuted(runs, own, 1 if first < last else -1)
        if column:
            is_first = runs.device() == (0 if first < last else runs.size - 1)
            previous = jax.tree.map(lambda x, column=column: x[column - 1], tails)
            before = jax.tree.map(
                lambda x, y, is_first=is_first: jnp.where(is_first, x, y), previous, before
            )
        found.append(before)
    return jax.tree.map(lambda *x: jnp.stack(x), *found)


def _from_all[Tree](runs: DeviceRuns, tree: Tree, halo: int) -> Tree:
    """The tokens before each run where runs are shorter than the halo: all are gathered."""
    place = np.argsort(np.array(runs.order).ravel())

    def gathered(x: jax.Array) -> jax.Array:
        own = runs.per_run(x)
        every = lax.all_gather(own, runs.axes) if runs.size > 1 else own[None]
        ordered = every.reshape(runs.total, *own.shape[1:])[place]
        whole = jnp.moveaxis(ordered, 0, 1).reshape(own.shape[1], -1, *x.shape[2:])
        padded = jnp.concatenate([jnp.zeros_like(whole[:, :1])] * halo + [whole], axis=1)
        starts = runs.here() * x.shape[1]
        cut = [lax.dynamic_slice_in_dim(padded, starts[i], halo, 1) for i in range(runs.count)]
        return runs.in_batch(jnp.stack(cut))

    return jax.tree.map(gathered, tree)
