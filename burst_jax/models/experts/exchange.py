"""Expert parallelism: tokens are sent to the devices of their experts, and results back.

With n devices along the expert axes, device p has experts ``p E/n`` to ``(p + 1) E/n - 1``. A
device's assignments of tokens to experts, T k of them sorted by expert, are n consecutive parts,
one per device. Their sizes are known only at run time, and XLA needs static ones, so a round has C
assignments of each part. A token is sent once to a device, however many of its experts that device
has: C assignments are of at most S = min(C, T) tokens. The receiver copies each token for its
experts, and returns the sum of their outputs::

    tokens [T, D] -> slots [n, S, D] -> all-to-all -> rows by expert [n C, D] -> experts
                  -> slots [n, S, D] -> all-to-all -> tokens [T, D]

C is ``capacity_factor`` times a part's mean size. If a part is larger, further rounds of C / 4
assignments follow, until every device of the group has sent all: no token is dropped, and memory
does not depend on the imbalance. The number of these rounds is known on the device only, so their
loop waits for the host once, also if there are none. Without further rounds (C is at least the
number of a device's assignments, like in small batches) there is no such loop.

What rows, places, slots and copies are: the table in ``burst_jax.models.experts``.

Sums over the experts of one device are float32, and rounded to the dtype of the tokens to be sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.models.experts.rows import Routes, copied, moved, summed
from burst_jax.parallel.collectives import exchange
from pallas_kernels.arrays import vary, varying_axes

# (parameters, rows [R, D], their weights [R], expert of each row [R], sizes [E]) -> rows [R, D].
Run = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
# The parameters of a Run, tokens [T, D], and their experts' weights, float32 [T, k].
Arrays = tuple[Any, jax.Array, jax.Array]
# The assignments of a round are a multiple of this number; up to _FEW in all, one round has all.
_ALIGNMENT, _FEW = 8, 4096


def round_sizes(rows: int, devices: int, factor: float | None) -> tuple[int, int]:
    """``(first, further)``: a round's assignments per device; further is 0 without any.

    ``rows`` is the number of a device's assignments, T k.
    """
    if factor is None or rows * devices <= _FEW:
        return rows, 0
    first = _aligned(factor * rows / devices)
    return (rows, 0) if first >= rows else (first, min(_aligned(first / 4), rows - first))


def slots(tokens: int, assignments: int) -> int:
    """The most of ``tokens`` that a round of ``assignments`` per device sends to each device."""
    return min(tokens, assignments)


def _aligned(size: float) -> int:
    return _ALIGNMENT * math.ceil(size / _ALIGNMENT)


def owner_tables(
    count: int, axes: tuple[str, ...], same: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """``(ids, group)`` of each expert, inside a ``shard_map`` over ``axes``.

    ``group`` is the device's index along ``same``, the axes along which tokens are the same;
    ``ids`` are the experts' indices within a group, first by device along the other axes.
    """
    sizes = [lax.axis_size(name) for name in axes]
    each = count // math.prod(sizes)
    owner, within = np.divmod(np.arange(count, dtype=np.int32), np.int32(each))
    at = dict(zip(axes, np.unravel_index(owner, sizes), strict=True))

    def index(names: list[str]) -> np.ndarray:
        found = np.zeros(count, np.int32)
        for name in names:
            found = found * lax.axis_size(name) + at[name]
        return found.astype(np.int32)

    sent = index([name for name in axes if name not in same])
    return sent * np.int32(each) + within, index([name for name in axes if name in same])


class _Parts(NamedTuple):
    """The assignments to experts of each device, and those received from each.

    Attributes:
      routes: of this device's assignments to the experts of all devices.
      counts: int32 ``[n, E / n]``, assignments from each device to each expert of this one.
    """

    routes: Routes
    counts: jax.Array


def run_exchanged(
    run: Run,
    arrays: Arrays,
    routes: Routes,
    *,
    axes: tuple[str, ...],
    factor: float | None,
    meanwhile: Callable[[], Any],
) -> tuple[jax.Array, Any, jax.Array]:
    """The weighted sum of each token's experts, on the devices that have them.

    Args:
      run: computes rows of this device's experts.
      arrays: this device's.
      routes: of the assignments.
      axes: the mesh axes over which tokens are exchanged.
      factor: :attr:`burst_jax.models.Experts.capacity_factor`.
      meanwhile: computes something else while tokens are sent.

    Returns:
      ``(out, other, rounds)``: float32 ``[T, D]``, what ``meanwhile`` returned, and the number of
      further rounds, int32.
    """
    n = lax.axis_size(axes)
    sizes, of_tokens = routes.sizes.reshape(n, -1), varying_axes(routes)
    counts = exchange(vary(sizes, frozenset(axes)), axes)
    first, further = round_sizes(routes.ids.size, n, factor)
    varying = varying_axes(arrays, routes) | frozenset(axes)
    arrays, parts = vary((arrays, _Parts(routes, counts)), varying)
    arrays = _gradients_together(arrays)
    out, other = _round(run, axes, first, arrays, parts, np.int32(0), meanwhile)
    rounds = jnp.zeros((), jnp.int32)
    if further:
        most = lax.pmax(jnp.max(sizes.sum(1)), axes)
        rounds = -(-jnp.maximum(most - first, 0) // further)
        out = out + _further_rounds(run, axes, (first, further), arrays, parts, rounds)
    return out, other, vary(rounds, of_tokens)


@jax.custom_vjp
def _gradients_together(arrays: Arrays) -> Arrays:
    """The arrays. All their gradients are computed before one is used.

    So the gradients of matrices overlap with the last transfer. XLA would delay them.
    """
    return arrays


_gradients_together.defvjp(
    lambda arrays: (arrays, None), lambda _, gradients: (lax.optimization_barrier(gradients),)
)


def _round(
    run: Run,
    axes: tuple[str, ...],
    capacity: int,
    arrays: Arrays,
    parts: _Parts,
    start: Any,
    meanwhile: Callable[[], Any] = lambda: None,
) -> tuple[jax.Array, Any]:
    """The experts' sums for assignments ``start`` to ``start + capacity`` of each part, and other.

    The receiver makes at most m copies of a token, one for each of its experts on this device.
    """
    (parameters, tokens, weights), (n, each) = arrays, parts.counts.shape
    (count, k), size = weights.shape, slots(tokens.shape[0], capacity)
    most = min(k, each)
    assignment, place = _sent_places(parts, capacity, start)
    place_of_row, row_of_place, expert, sizes = _received_rows(parts, capacity, start)
    device = jnp.minimum(place // capacity, n).reshape(count, k)
    pair, slot, copy = _sent_tokens(device, n, size, most)

    def send(x: jax.Array) -> jax.Array:
        return exchange(x.reshape(n, -1, *x.shape[1:]), axes).reshape(x.shape)

    sent = (
        copied(tokens, pair, slot),
        moved(weights.reshape(-1), assignment, place),
        copy.reshape(-1).at[assignment].get(mode="fill", fill_value=0),
    )
    # Ready at the same time, so that XLA sends them in one transfer (JAX 0.12 does so anyway).
    received, received_weights, copies = map(send, lax.optimization_barrier(sent))
    # XLA would compute the other as late as it can, when nothing is being sent.
    received, other = lax.optimization_barrier((received, meanwhile()))
    copy_of_row, row_of_copy = _copies(place_of_row, copies, n, size * most)
    rows = copied(received, copy_of_row, row_of_copy)
    row_weights = moved(received_weights, place_of_row, row_of_place)
    out = run(parameters, rows, row_weights, expert, sizes)
    sums = summed(moved(out, row_of_copy, copy_of_row), n * size)
    returned = send(sums.astype(out.dtype))
    return summed(moved(returned, slot, pair), count), other


def _sent_places(parts: _Parts, capacity: int, start: Any) -> tuple[jax.Array, jax.Array]:
    """The assignment at each place ``[n C]``, and the place of each assignment ``[T k]``.

    Places without an assignment, and assignments of other rounds, have an index past the end.
    """
    routes, (n, each) = parts.routes, parts.counts.shape
    total = routes.ids.size
    sizes = routes.sizes.reshape(n, each).sum(1)
    firsts = jnp.cumsum(sizes) - sizes
    at = start + jnp.arange(capacity, dtype=jnp.int32)
    rows = jnp.where(at < sizes[:, None], firsts[:, None] + at, total).reshape(-1)
    assignment = routes.order.at[rows].get(mode="fill", fill_value=total)
    device = routes.ids // each  # n for padding
    at = routes.inverse - firsts.at[device].get(mode="clip") - start
    here = (device < n) & (at >= 0) & (at < capacity)
    return assignment, jnp.where(here, device * capacity + at, n * capacity)


def _sent_tokens(
    device: jax.Array, n: int, size: int, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each token once per device that it is sent to.

    A pair is a token and a device: by the device's index, or, if a token has fewer experts than
    there are devices, by the first of its experts there.

    Args:
      device: int32 ``[T, k]``, the device of each assignment, n for those of other rounds.
      n: number of devices.
      size: S, slots per device, enough for all.
      most: m, the most experts of a token on one device.

    Returns:
      ``(pair of each slot [n S], slot of each pair [T min(k, n)], copy of each assignment [T,
      k])``. Slots without a token, and pairs of which nothing is sent, have an index past the end.
      Copies are those of its device alone: ``m slot + ordinal``.
    """
    k = device.shape[1]
    sent = (device[..., None] == jnp.arange(n, dtype=jnp.int32)).any(1)
    rank = jnp.cumsum(sent, 0, dtype=jnp.int32) - 1
    same = (device[:, :, None] == device[:, None, :]) & np.tri(k, k, -1, dtype=bool)
    ordinal = jnp.sum(same, -1, dtype=jnp.int32)
    rank_of = jnp.take_along_axis(rank, jnp.minimum(device, n - 1), 1)
    first = jnp.arange(n, dtype=jnp.int32) * size
    if n <= k:
        slot = jnp.where(sent, first + rank, n * size)
    else:
        slot = jnp.where((ordinal == 0) & (device < n), device * size + rank_of, n * size)
    slot = slot.reshape(-1)
    return _inverse(slot, n * size), slot, most * rank_of + ordinal


def _copies(
    place_of_row: jax.Array, copies: jax.Array, n: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """``(copy of each row [n C], row of each copy [n S m])``, past the end without any.

    ``copies`` are those of the assignments at each place, below ``size`` from each device.
    """
    capacity = copies.shape[0] // n
    first = jnp.arange(n, dtype=jnp.int32)[:, None] * size
    copies = (copies.reshape(n, capacity) + first).reshape(-1)
    of_row = copies.at[place_of_row].get(mode="fill", fill_value=n * size)
    return of_row, _inverse(of_row, n * size)


def _inverse(index: jax.Array, size: int) -> jax.Array:
    """Where each of ``0 ... size - 1`` is in ``index``; those that are not have its length."""
    count = index.shape[0]
    at = vary(jnp.arange(count, dtype=jnp.int32), varying_axes(index))
    empty = vary(jnp.full((size,), count, jnp.int32), varying_axes(index))
    return empty.at[index].set(at, mode="drop")


def _received_rows(
    parts: _Parts, capacity: int, start: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``(place of each row, row of each place, expert of each row, rows of each expert)``.

    Rows ``[n C]`` are ordered by expert, then by the device they are from. Rows after the last
    expert's, and places without a row, have an index past the end.
    """
    n, each = parts.counts.shape
    ends = jnp.cumsum(parts.counts, 1)
    # What is in this round, per device and expert, relative to its start.
    low, high = (jnp.clip(x - start, 0, capacity) for x in (ends - parts.counts, ends))
    base = capacity * jnp.arange(n, dtype=jnp.int32)[:, None]
    firsts, lasts, sizes = base + low, base + high, high - low
    by_expert = jnp.cumsum(sizes.T.reshape(-1))
    row_firsts = (by_expert - sizes.T.reshape(-1)).reshape(each, n).T
    own = vary(jnp.arange(n * capacity, dtype=jnp.int32), varying_axes(parts))

    def segment(last: jax.Array) -> jax.Array:
        """The segment of each row or place: the number of ends up to it."""
        ended = vary(jnp.zeros((n * capacity,), jnp.int32), varying_axes(parts))
        ended = ended.at[last].add(1, mode="drop")
        return jnp.minimum(jnp.cumsum(ended, dtype=jnp.int32), n * each - 1)

    of_row = segment(by_expert)
    places, starts = (x.T.reshape(-1)[of_row] for x in (firsts, row_firsts))
    place_of_row = jnp.where(own < by_expert[-1], places + own - starts, n * capacity)
    of_place = segment(lasts.reshape(-1))
    places, starts = (x.reshape(-1)[of_place] for x in (firsts, row_firsts))
    ended = lasts.reshape(-1)[of_place]
    here = (own >= places) & (own < ended)
    row_of_place = jnp.where(here, starts + own - places, n * capacity)
    return place_of_row, row_of_place, of_row // n, sizes.sum(0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _further_rounds(
    run: Run,
    axes: tuple[str, ...],
    sizes: tuple[int, int],
    arrays: Arrays,
    parts: _Parts,
    rounds: jax.Array,
) -> jax.Array:
    """The experts' sums for the assignments after the first round's."""
    first, further = sizes

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        return out + _round(run, axes, further, arrays, parts, first + index * further)[0]

    out = jnp.zeros(arrays[1].shape, jnp.float32)
    return lax.fori_loop(0, rounds, step, vary(out, varying_axes(arrays, parts)))


def _further_forward(run: Run, axes: Any, sizes: Any, *inputs: Any) -> tuple[jax.Array, Any]:
    return _further_rounds(run, axes, sizes, *inputs), inputs


def _further_backward(
    run: Run, axes: tuple[str, ...], sizes: tuple[int, int], residuals: Any, gradient: jax.Array
) -> tuple[Any, ...]:
    """Each round is computed again, and its gradients are added up in float32."""
    (first, further), (arrays, parts, rounds) = sizes, residuals

    def step(index: jax.Array, sums: Any) -> Any:
        def rows(arrays: Arrays) -> jax.Array:
            return _round(run, axes, further, arrays, parts, first + index * further)[0]

        (found,) = jax.vjp(rows, arrays)[1](gradient)
        return jax.tree.map(lambda total, x: total + x.astype(jnp.float32), sums, found)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
    zeros = vary(zeros, varying_axes(arrays, parts))
    sums = lax.fori_loop(0, rounds, step, zeros)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, arrays), None, None


_further_rounds.defvjp(_further_forward, _further_backward)
