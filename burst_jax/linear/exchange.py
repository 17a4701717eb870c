"""States between devices: what arrives at each run of tokens from all runs before it.

A run maps the state before it to that after it: ``S' = M S + U``. Maps compose: ``(M1, U1)`` after
``(M0, U0)`` is ``(M1 M0, M1 U0 + U1)``, so that no device waits for another one's scan. Gradients
of states go through the same maps from the last run to the first, with M transposed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.linear.runs import DeviceRuns


class Maps(NamedTuple):
    """``S -> M S + U``.

    Attributes:
      m: float32 ``[..., H, H]``.
      u: float32 ``[..., H, Hv]``.
    """

    m: jax.Array
    u: jax.Array

    def after(self, before: Maps) -> Maps:
        """This map applied to the results of another one."""
        return Maps(_product(self.m, before.m), self(before.u))

    def __call__(self, state: jax.Array) -> jax.Array:
        """The state after."""
        return _product(self.m, state) + self.u


def _product(m: jax.Array, state: jax.Array) -> jax.Array:
    # In full precision: on GPUs the default rounds float32 to 10 bits.
    return jnp.matmul(m, state, precision=lax.Precision.HIGHEST)


def arriving(runs: DeviceRuns, maps: Maps, *, reverse: bool = False) -> jax.Array:
    """What arrives at each of this device's runs: all maps before it, applied to zeros in order.

    Args:
      runs: of all devices.
      maps: of this device's runs, ``[B * count, N, ...]``.
      reverse: whether maps lead from later runs to earlier ones.

    Returns:
      float32 ``[B * count, N, H, Hv]``.
    """
    own = Maps(*map(runs.per_run, maps))
    found = (_gathered if runs.gathers else _by_steps)(runs, own, reverse)
    return runs.in_batch(found)


def _gathered(runs: DeviceRuns, own: Maps, reverse: bool) -> jax.Array:
    """Every device gathers all maps and applies them one after the other."""
    every = own
    if runs.size > 1:
        every = Maps(*lax.all_gather(tuple(own), runs.axes))
    else:
        every = Maps(*(x[None] for x in own))
    place = np.argsort(np.array(runs.order).ravel())  # Of each run among [devices, count].
    in_order = [divmod(int(i), runs.count) for i in (place[::-1] if reverse else place)]
    ordered = [Maps(every.m[at], every.u[at]) for at in in_order]
    states = [jnp.zeros_like(ordered[0].u), ordered[0].u]
    for each in ordered[1:-1]:
        states.append(each(states[-1]))
    here = runs.here()
    return jnp.stack(states)[runs.total - 1 - here if reverse else here]


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
        whole = _prefix(runs, Maps(own.m[column], own.u[column]), place, up)
        before = _received(runs, whole, 1, up)  # Zeros where there is none.
        found[column] = before.u
        if state is not None:
            found[column] = jnp.where(place == 0, state, before(state))
        if len(found) < runs.count:
            after = whole.u if state is None else whole(state)
            state = lax.psum(jnp.where(place == runs.size - 1, after, 0), runs.axes)
    return jnp.stack([found[column] for column in columns])


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
