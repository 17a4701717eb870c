"""Split documents of a balanced batch: their runs as sequences, and what is exchanged between them.

A document that is whole on a device needs nothing from other devices. A run, adjacent tokens of a
split document on one device, is scanned as a sequence of its own. Its first state follows from the
maps of the document's earlier runs, on whatever devices they are: every device gathers the maps of
all runs and composes those of each document in the document's order. The tables of the batch have
that order (:mod:`burst_jax.layouts.run_tables`).

Letters: B sequences, n devices, R runs of a device, z tokens of its gathered zone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.checksums import checksums
from burst_jax.linear.exchange import Maps
from burst_jax.linear.runs import DocumentRuns
from pallas_kernels.arrays import vary, varying_axes


class SplitRuns(NamedTuple):
    """The tables of split documents on one device.

    Attributes:
      start: int32 ``[B, R]``, ascending: the index of each run's first token in the zone; z for
        those without tokens.
      size: ``[B, R]``, its number of tokens.
      place: ``[B, R]``, its place among all runs in the order of documents.
      index: ``[B, n R]``: the index in ``[n, R]`` of each run, in that order, like the next three.
      begin: ``[B, n R]``: the number of tokens in all runs before this one.
      end: ``[B, n R]``: the number up to its end.
      document: ``[B, n R]``: the number before its document.
    """

    start: jax.Array
    size: jax.Array
    place: jax.Array
    index: jax.Array
    begin: jax.Array
    end: jax.Array
    document: jax.Array

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Self:
        """From the arrays of a call, one device's."""
        runs, order = (arrays[name].astype(jnp.int32) for name in ("runs", "run_order"))
        index, end, document = (order[:, i] for i in range(3))
        begin = jnp.concatenate([jnp.zeros_like(end[:, :1]), end[:, :-1]], 1)
        start, size, place = (runs[:, i] for i in range(3))
        return cls(start, size, place, index, begin, end, document)

    @property
    def shape(self) -> tuple[int, int]:
        """``(B, R)``."""
        batch, count = self.start.shape
        return batch, count


class Slots(NamedTuple):
    """R slots of equal length for the first tokens of each run, and their places in the zone.

    Attributes:
      token: int32 ``[B, R length]``: the index in the zone of each place of the slots.
      used: bool, the same: whether a token is there.
      place: int32 ``[B, z]``: the index in the slots of each token of the zone.
      has: bool, the same: whether it is there.
      begins: bool, the same: whether the token is the first one of a run.
    """

    token: jax.Array
    used: jax.Array
    place: jax.Array
    has: jax.Array
    begins: jax.Array

    @classmethod
    def of(cls, runs: SplitRuns, zone: int, length: int) -> Self:
        """Of slots with ``length`` tokens."""
        within = jnp.arange(length, dtype=jnp.int32)
        token = runs.start[..., None] + within
        used = within < runs.size[..., None]
        tokens = np.arange(zone, dtype=np.int32)
        started = runs.start[:, None] <= tokens[:, None]
        run = started.sum(-1, dtype=jnp.int32) - 1
        at = jnp.maximum(run, 0)
        offset = tokens - jnp.take_along_axis(runs.start, at, 1)
        has = (run >= 0) & (offset < jnp.take_along_axis(jnp.minimum(runs.size, length), at, 1))
        flat = len(token), -1
        begins = has & (offset == 0)
        return cls(token.reshape(flat), used.reshape(flat), at * length + offset, has, begins)

    def cut(self, x: jax.Array) -> jax.Array:
        """``[B, R length, ...]`` of the zone's tokens ``[B, z, ...]``, with zeros elsewhere."""
        return _moved(x, (self.token, self.used), (self.place, self.has))

    def pasted(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`cut`: zeros for tokens that are in no slot."""
        return _moved(x, (self.place, self.has), (self.token, self.used))


def with_zone(x: jax.Array, zone: jax.Array) -> jax.Array:
    """``x [B, tokens, ...]`` with other last tokens, ``[B, z, ...]``.

    Not by ``x.at[...].set``, at which JAX 0.11's compiler for CPUs crashes here.
    """
    return jnp.concatenate([x[:, : x.shape[1] - zone.shape[1]], zone], 1)


Move = tuple[jax.Array, jax.Array]


@jax.custom_vjp
def _moved(x: jax.Array, to: Move, back: Move) -> jax.Array:
    """``x`` at the indices ``to``, zero where they are unused; its gradient moves ``back``.

    The gradient of an indexing operation would add row by row.
    """
    del back
    return _taken(x, *to)


def _taken(x: jax.Array, index: jax.Array, used: jax.Array) -> jax.Array:
    taken = jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(x, index)
    return jnp.where(lax.expand_dims(used, range(2, x.ndim)), taken, jnp.zeros((), x.dtype))


def _forward(x: jax.Array, to: Move, back: Move) -> tuple[jax.Array, Move]:
    return _taken(x, *to), back


def _backward(back: Move, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return _taken(gradient, *back), None, None


_moved.defvjp(_forward, _backward)


def are_of_others(run_checksums: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Bool ``[B]``, whether the tables are those of other documents. In the ids 0 is padding."""
    return run_checksums[:, 0] != checksums(segment_ids, np.zeros((), np.int32), jnp)


def arriving(runs: DocumentRuns, of: SplitRuns, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state that arrives at each of this device's runs, from its document's earlier runs.

    It is that of their maps, composed in the document's order. States are transposed, as in
    :mod:`burst_jax.linear.exchange`.

    Args:
      runs: of all devices.
      of: their tables.
      rows: of the maps of this device's runs, float32 ``[B * R, N, Hv + H, H]``.

    Returns:
      The states, ``[B * R, N, Hv, H]``, and M of these maps.
    """
    every = lax.all_gather(_by_run(of, rows), runs.axes)
    return _composed(of, Maps.of_rows(every)), Maps.of_rows(rows).m


def arriving_gradients(
    runs: DocumentRuns, of: SplitRuns, m: jax.Array, own: jax.Array
) -> jax.Array:
    """The gradient of each run's last state, from its document's later runs.

    Args:
      runs: of all devices.
      of: their tables.
      m: from :func:`arriving`.
      own: the gradient of each run's first state from its own tokens, ``[B * R, N, Hv, H]``.
    """
    m, own = lax.all_gather((_by_run(of, m), _by_run(of, own)), runs.axes)
    return _composed(of, Maps(m.mT, own), reverse=True)


def _by_run(of: SplitRuns, x: jax.Array) -> jax.Array:
    """``[B, R, ...]`` of ``[B * R, ...]``."""
    return x.reshape(*of.shape, *x.shape[1:])


def _composed(of: SplitRuns, every: Maps, *, reverse: bool = False) -> jax.Array:
    """What arrives at this device's runs, from the maps ``[n, B, R, ...]`` of all runs."""
    count = of.shape[1]
    is_first = of.begin == of.document
    if reverse:
        is_first = jnp.concatenate([is_first[:, 1:], jnp.ones_like(is_first[:, :1])], 1)

    def step(state: jax.Array, run: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, is_first = run
        state = jnp.where(lax.expand_dims(is_first, range(1, state.ndim)), 0, state)
        pick = jax.vmap(lambda x, i: x[i // count, i % count], (1, 0))
        return Maps(*(pick(x, index) for x in every))(state), state

    nothing = vary(jnp.zeros_like(every.u[0, :, 0]), varying_axes(every, of))
    in_order = of.index.T, is_first.T
    _, states = lax.scan(step, nothing, in_order, reverse=reverse)
    found = jax.vmap(lambda x, i: x[i], (1, 0))(states, of.place)
    return found.reshape(-1, *found.shape[2:])


def tokens_before(
    runs: DocumentRuns, of: SplitRuns, zone: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """For each run the last ``count`` tokens before it in its document; several runs may hold them.

    Args:
      runs: of all devices.
      of: their tables.
      zone: ``[B, z, F]``, this device's tokens.
      count: number of tokens.

    Returns:
      ``([B, R, count, F], bool [B, R, count])``: the tokens, and whether the document has them.
    """
    batch, slots = of.shape
    back = jnp.arange(count, 0, -1, dtype=jnp.int32)
    last = (of.start + of.size)[..., None] - back
    has = back <= of.size[..., None]
    own = _taken(zone, last.reshape(batch, -1), has.reshape(batch, -1))
    every = lax.all_gather(own.reshape(batch, slots, count, -1), runs.axes)
    of_own = [jnp.take_along_axis(x, of.place, 1)[..., None] for x in (of.begin, of.document)]
    wanted = of_own[0] - back
    exists = wanted >= of_own[1]
    place = (of.end[:, None, None] <= wanted[..., None]).sum(-1, dtype=jnp.int32)

    def pick(every: jax.Array, index: jax.Array, end: jax.Array, *wanted: jax.Array) -> jax.Array:
        place, token = wanted
        run = index[place]
        return every[run // slots, run % slots, count - (end[place] - token)]

    found = jax.vmap(pick, (1, 0, 0, 0, 0))(every, of.index, of.end, place, wanted)
    return jnp.where(exists[..., None], found, jnp.zeros((), found.dtype)), exists
