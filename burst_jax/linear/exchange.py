"""States between devices: what arrives at each run of tokens from all runs before it.

A run maps the state before it to that after it: ``S' = M S + U``. Maps compose: ``(M1, U1)`` after
``(M0, U0)`` is ``(M1 M0, M1 U0 + U1)``, so that no device waits for another one's scan. Gradients
of states go through the same maps from the last run to the first, with M transposed.

States are transposed here, ``[Hv, H]``, as kernels have them. A map is then ``S -> S M + U``, and
its rows are those of U and below them those of M, ``[Hv + H, H]``: one array to send.

Devices exchange maps in one of three ways (:meth:`burst_jax.linear.runs.DeviceRuns.exchange`):

- "gather": every device gathers all maps, in one collective, and composes those before its runs.
- "heads": each device receives the maps of all runs for a part of the heads, composes them, and
  sends the states back: two all-to-alls. M remains there for the gradients.
- "steps": a parallel prefix over the devices, by permutes.

A device may scan each run in parts, all at once. It composes their maps itself, before and after
the exchange. What is gathered, or received by heads, a kernel may compose in one launch.

Letters: B sequences, N heads, n devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.linear.runs import DeviceRuns

# See :attr:`pallas_kernels.linear.backend.Implementation.compose`.
Compose = Callable[..., jax.Array]


class Maps(NamedTuple):
    """``S -> S M + U`` of transposed states.

    Attributes:
      m: float32 ``[..., H, H]``.
      u: float32 ``[..., Hv, H]``.
    """

    m: jax.Array
    u: jax.Array

    @classmethod
    def of_rows(cls, rows: jax.Array) -> Maps:
        """From the rows of both, ``[..., Hv + H, H]``."""
        values = rows.shape[-2] - rows.shape[-1]
        return cls(rows[..., values:, :], rows[..., :values, :])

    def after(self, before: Maps) -> Maps:
        """This map applied to the results of another one."""
        return Maps(_product(before.m, self.m), self(before.u))

    def __call__(self, state: jax.Array) -> jax.Array:
        """The state after."""
        return _product(state, self.m) + self.u


def _product(state: jax.Array, m: jax.Array) -> jax.Array:
    # In full precision: on GPUs the default rounds float32 to 10 bits.
    return jnp.matmul(state, m, precision=lax.Precision.HIGHEST)


class Kept(NamedTuple):
    """What :func:`arriving_gradients` needs of M.

    Attributes:
      runs: M of this device's runs, or of all runs for its part of the heads: as many numbers.
        None of two runs, whose states go through no M.
      parts: M of the parts of each run, ``[B * count, parts, N, H, H]``; None where a run is one
        part.
    """

    runs: jax.Array | None
    parts: jax.Array | None = None


def arriving(
    runs: DeviceRuns,
    rows: jax.Array,
    meanwhile: jax.Array | None = None,
    parts: int = 1,
    compose: Compose | None = None,
) -> tuple[jax.Array, Kept, jax.Array | None]:
    """What arrives at each part of this device's runs: all maps before it, applied to zeros.

    Args:
      runs: of all devices.
      rows: of the maps of the parts, float32 ``[B * count * parts, N, Hv + H, H]``.
      meanwhile: an array that is computed while maps are sent.
      parts: of each run.
      compose: the kernel; None composes in plain JAX.

    Returns:
      The states, transposed, ``[B * count * parts, N, Hv, H]``; what the gradients need; and
      ``meanwhile``.
    """
    if parts == 1:
        states, m, meanwhile = _arriving_at_runs(runs, Maps.of_rows(rows), meanwhile, compose)
        return states, Kept(m), meanwhile
    rows = rows.reshape(-1, parts, *rows.shape[1:])
    maps = [Maps.of_rows(rows[:, i]) for i in range(parts)]
    *before, whole = _composed(maps)
    if compose is not None:
        whole = whole._replace(u=_whole(compose, rows))
    states, m, meanwhile = _arriving_at_runs(runs, whole, meanwhile, compose)
    if compose is not None:
        found = _at_parts(compose, rows, states)
    else:
        found = _merged(jnp.stack([states, *(each(states) for each in before)], 1))
    return found, Kept(m, Maps.of_rows(rows).m), meanwhile


def arriving_gradients(runs: DeviceRuns, kept: Kept, own: jax.Array) -> jax.Array:
    """The same of gradients of states, from the last part to the first.

    Args:
      runs: of all devices.
      kept: from :func:`arriving`.
      own: the gradient of each part's first state from its own tokens, transposed, float32
        ``[B * count * parts, N, Hv, H]``.

    Returns:
      The gradients of the parts' last states from later ones, transposed, the same shape.
    """
    if kept.parts is None:
        return _gradients_at_runs(runs, kept.runs, own)
    parts = kept.parts.shape[1]
    own = own.reshape(-1, parts, *own.shape[1:])
    maps = [Maps(kept.parts[:, i].mT, own[:, i]) for i in range(parts)]
    *after, whole = _composed(maps[::-1])
    gradients = _gradients_at_runs(runs, kept.runs, whole.u)
    found = [gradients, *(each(gradients) for each in after)]
    return _merged(jnp.stack(found[::-1], 1))


def _whole(compose: Compose, rows: jax.Array) -> jax.Array:
    """The state after all parts of each run, from zeros."""
    order = np.zeros((rows.shape[1] + 1, 4), np.int32)  # The last one is the state after them.
    order[:-1] = _parts(rows.shape[1]) * [1, 1, 0, 0] - [0, 0, 1, 1]
    return compose(rows[None], order, (1, 1))[0, :, 0]


def _at_parts(compose: Compose, rows: jax.Array, states: jax.Array) -> jax.Array:
    """The states that arrive at all parts, from those that arrive at the runs."""
    (found,) = compose(rows[None], _parts(rows.shape[1]), (1, rows.shape[1]), states)
    return _merged(found)


def _parts(count: int) -> np.ndarray:
    """A kernel's ``order`` of the parts of a run."""
    index = np.arange(count, dtype=np.int32)
    return np.stack([0 * index, index] * 2, 1)


def _composed(maps: Sequence[Maps]) -> list[Maps]:
    """Of maps that are applied one after the other, the first one, the first two, and so on."""
    composed = [maps[0]]
    for each in maps[1:]:
        composed.append(each.after(composed[-1]))
    return composed


def _arriving_at_runs(
    runs: DeviceRuns, maps: Maps, meanwhile: jax.Array | None, compose: Compose | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The states that arrive at this device's runs, M for the gradients, and ``meanwhile``."""
    if runs.total == 1:
        return jnp.zeros_like(maps.u), None, meanwhile
    if runs.total == 2:  # Nothing goes through M.
        every, meanwhile = _with(lax.all_gather(_by_run(runs, maps.u), runs.axes), meanwhile)
        found = _here(runs, _states_before(runs, Maps(every, every)))
        return _merged(found), None, meanwhile
    exchange = runs.exchange(maps.u.shape[1])
    if exchange == "steps":
        found = _by_steps(runs, Maps(*(_by_run(runs, x) for x in maps)), False)
        return _merged(found), maps.m, meanwhile
    own = _by_run(runs, jnp.concatenate([maps.u, maps.m], 2))
    if exchange == "heads":
        every, meanwhile = _with(_own_heads(runs, own), meanwhile)
        in_order = Maps.of_rows(_in_order(runs, every))
        if compose is None:
            found = _all_heads(runs, _states_in_blocks(in_order))
        else:
            states = compose(every, _all_places(runs), (runs.size, runs.count))
            found = _to_devices(runs, states)
        return _merged(found), in_order.m, meanwhile
    every, meanwhile = _with(lax.all_gather(own, runs.axes), meanwhile)
    if compose is None:
        found = _here(runs, _states_before(runs, Maps.of_rows(every)))
    else:
        (found,) = compose(every, _own_places(runs), (1, runs.count))
    return _merged(found), maps.m, meanwhile


def _gradients_at_runs(runs: DeviceRuns, kept: jax.Array | None, own: jax.Array) -> jax.Array:
    """The gradients of the last states of this device's runs from later runs."""
    gradients, exchange = _by_run(runs, own), runs.exchange(own.shape[1])
    if runs.total == 1:
        return jnp.zeros_like(own)
    if runs.total == 2:  # As forward.
        every = lax.all_gather(gradients, runs.axes)
        found = _states_before(runs, Maps(every, every), reverse=True)
        return _merged(_here(runs, found))
    assert kept is not None
    if exchange == "heads":
        every = Maps(kept.mT, _in_order(runs, _own_heads(runs, gradients)))
        return _merged(_all_heads(runs, _states_in_blocks(every, reverse=True)))
    m = _by_run(runs, kept)
    if exchange == "steps":
        return _merged(_by_steps(runs, Maps(m.mT, gradients), True))
    m, gradients = lax.all_gather((m, gradients), runs.axes)
    found = _states_before(runs, Maps(m.mT, gradients), reverse=True)
    return _merged(_here(runs, found))


def _with(received: jax.Array, meanwhile: jax.Array | None) -> tuple[Any, Any]:
    """Both, before anything reads the first: XLA would receive it, and then compute the second."""
    if meanwhile is None:
        return received, None
    return lax.optimization_barrier((received, meanwhile))


def _by_run(runs: DeviceRuns, x: jax.Array) -> jax.Array:
    """``[B, count, ...]`` of ``[B * count, ...]``."""
    return x.reshape(-1, runs.count, *x.shape[1:])


def _merged(x: jax.Array) -> jax.Array:
    """Undoes :func:`_by_run`."""
    return x.reshape(-1, *x.shape[2:])


def _own_heads(runs: DeviceRuns, x: jax.Array) -> jax.Array:
    """``[n, B, count, N / n, ...]`` of all devices, from this one's ``[B, count, N, ...]``.

    Each device has other heads.
    """
    parts = x.reshape(*x.shape[:2], runs.size, -1, *x.shape[3:])
    return lax.all_to_all(jnp.moveaxis(parts, 2, 0), runs.axes, 0, 0)


def _in_order(runs: DeviceRuns, x: jax.Array) -> jax.Array:
    """``[total, B, ...]`` of ``[n, B, count, ...]``."""
    return jnp.stack([x[d, :, c] for d, c in _places(runs)])


def _all_heads(runs: DeviceRuns, states: jax.Array) -> jax.Array:
    """``[B, count, N, ...]`` of this device's runs, from ``[total, B, N / n, ...]``."""
    by_device = [jnp.stack([states[i] for i in row], 1) for row in runs.order]
    return _to_devices(runs, jnp.stack(by_device))


def _to_devices(runs: DeviceRuns, states: jax.Array) -> jax.Array:
    """``[B, count, N, ...]`` of this device's runs, from ``[n, B, count, N / n, ...]`` of all."""
    found = jnp.moveaxis(lax.all_to_all(states, runs.axes, 0, 0), 0, 2)
    return found.reshape(*found.shape[:2], -1, *found.shape[4:])


def _states_in_blocks(every: Maps, *, reverse: bool = False) -> jax.Array:
    """What arrives at each run, ``[total, ...]``, from all maps in order.

    First within all blocks of runs at once, then from block to block: of 16 runs 3 + 3 products
    follow each other, and not 14.
    """
    total = len(every.u)
    size = min((i for i in range(1, total + 1) if total % i == 0), key=lambda i: i + total // i)
    blocks = Maps(*(x.reshape(-1, size, *x.shape[1:]) for x in every))
    turn = slice(None, None, -1 if reverse else 1)
    *before, whole = _composed([Maps(*(x[:, i] for x in blocks)) for i in range(size)[turn]])
    of_blocks = [Maps(*(x[i] for x in whole)) for i in range(total // size)[turn]]
    start = jnp.stack(_before_each(of_blocks)[turn])
    found = [start, *(each(start) for each in before)]
    return jnp.stack(found[turn], 1).reshape(every.u.shape)


def _here(runs: DeviceRuns, states: Sequence[jax.Array]) -> jax.Array:
    """``[B, count, ...]`` of this device's runs, from those of all runs."""
    return jnp.stack(states, 1)[:, runs.here()]


def _places(runs: DeviceRuns) -> list[tuple[int, int]]:
    """Device and index on it of each run of a sequence, in order."""
    places = {i: (d, c) for d, row in enumerate(runs.order) for c, i in enumerate(row)}
    return [places[i] for i in range(runs.total)]


def _all_places(runs: DeviceRuns) -> np.ndarray:
    """Of a kernel that composes maps, its ``order`` for the states of all devices' runs."""
    return np.tile(np.array(_places(runs), np.int32), 2)


def _own_places(runs: DeviceRuns) -> jax.Array:
    """The same for this device's runs alone."""
    every = _all_places(runs)
    of_devices = [
        np.where(every[:, 2:3] == device, every * [1, 1, 0, 1], every * [1, 1, 0, 0] - [0, 0, 1, 1])
        for device in range(runs.size)
    ]
    return jnp.asarray(np.stack(of_devices).astype(np.int32))[runs.device()]


def _states_before(runs: DeviceRuns, every: Maps, *, reverse: bool = False) -> list[jax.Array]:
    """What arrives at each run of a sequence, from the maps ``[n, B, count, ...]`` of all."""
    maps = [Maps(*(x[d, :, c] for x in every)) for d, c in _places(runs)]
    states = _before_each(maps[::-1] if reverse else maps)
    return states[::-1] if reverse else states


def _before_each(maps: Sequence[Maps]) -> list[jax.Array]:
    """The state before each of two or more maps that are applied to zeros, one after the other."""
    states = [jnp.zeros_like(maps[0].u), maps[0].u]
    for each in maps[1:-1]:
        states.append(each(states[-1]))
    return states


def _by_steps(runs: DeviceRuns, own: Maps, reverse: bool) -> jax.Array:
    """A parallel prefix over the devices (Hillis and Steele 1986) for each run of a device.

    Zigzag's first runs lead up the devices and its second ones down, from the last device back, so
    that the second scan starts from the total of the first.
    """
    columns = range(runs.count)
    found: dict[int, jax.Array] = {}
    state = None  # Before the column's first run.
    for column in reversed(columns) if reverse else columns:
        first, *_, last = (row[column] for row in runs.order)
        up = (first < last) != reverse
        place = runs.device() if up else runs.size - 1 - runs.device()
        whole = _prefix(runs, Maps(own.m[:, column], own.u[:, column]), place, up)
        before = _received(runs, whole, 1, up)  # Zeros where there is none.
        found[column] = before.u
        if state is not None:
            found[column] = jnp.where(place == 0, state, before(state))
        if len(found) < runs.count:
            after = whole.u if state is None else whole(state)
            state = lax.psum(jnp.where(place == runs.size - 1, after, 0), runs.axes)
    return jnp.stack([found[column] for column in columns], 1)


def _prefix(runs: DeviceRuns, maps: Maps, place: jax.Array, up: bool) -> Maps:
    """The maps of all devices up to this one, composed."""
    distance = 1
    while distance < runs.size:
        longer = maps.after(_received(runs, maps, distance, up))
        enough = place >= distance
        maps = Maps(*(jnp.where(enough, x, y) for x, y in zip(longer, maps, strict=True)))
        distance *= 2
    return maps


def _received(runs: DeviceRuns, maps: Maps, distance: int, up: bool) -> Maps:
    return Maps(*permuted(runs, tuple(maps), distance if up else -distance))


def permuted[Tree](runs: DeviceRuns, tree: Tree, distance: int) -> Tree:
    """What the device at this distance before this one has; zeros where there is none."""
    # ppermute numbers devices in the mesh's axis order.
    mesh = jax.sharding.get_abstract_mesh()
    axes = [name for name in mesh.axis_names if name in runs.axes]
    order = np.arange(runs.size).reshape([mesh.shape[name] for name in axes])
    order = order.transpose([axes.index(name) for name in runs.axes]).ravel().tolist()
    pairs = list(zip(order, order[distance:], strict=False))
    if distance < 0:
        pairs = list(zip(order[-distance:], order, strict=False))
    return lax.ppermute(tree, tuple(axes), pairs)
