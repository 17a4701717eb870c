"""The contiguous runs of tokens that devices hold of a sequence, and in which order."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.layout import Layout

# From this number of devices on maps are exchanged by heads, if the devices divide these. Up to the
# second number all maps are gathered, beyond it they are composed in log2(n) + 1 steps.
BY_HEADS, GATHERED = 4, 8

# How devices exchange the maps of runs (:mod:`burst_jax.linear.exchange`).
Exchange = Literal["heads", "gather", "steps"]


@dataclasses.dataclass(frozen=True)
class DeviceRuns:
    """How the devices along mesh axes share sequences. Hashable.

    A device's runs become sequences of the batch: ``[B, T, ...]`` to ``[B * count, T / count,
    ...]``, which moves no data. Zigzag on 4 devices::

        device   0      1      2      3
        order    0, 7   1, 6   2, 5   3, 4

    By heads a device receives (n - 1) / n of its own maps' bytes and of its states', which does not
    grow with n, in two collectives; by a gather n - 1 times its own maps, in one; in steps
    log2(n) + 1 times, one after the other.

    Attributes:
      axes: the mesh axes, outermost first; none for one device without a ``shard_map``.
      order: for each device the indices of its runs among all runs of a sequence, ascending. The
        devices' first runs lead up the devices or down, their second ones the other way, and so on.
      by_heads: whether maps are exchanged by heads, if the devices divide these.
      gathers: whether all maps are gathered otherwise.
    """

    axes: tuple[str, ...]
    order: tuple[tuple[int, ...], ...]
    by_heads: bool = False
    gathers: bool = True

    def exchange(self, heads: int) -> Exchange:
        """How the devices exchange the maps of so many heads."""
        if self.by_heads and heads % self.size == 0:
            return "heads"
        return "gather" if self.gathers else "steps"

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.order)

    @property
    def count(self) -> int:
        """Number of runs of a device."""
        return len(self.order[0])

    @property
    def total(self) -> int:
        """Number of runs of a sequence."""
        return self.size * self.count

    def here(self) -> jax.Array:
        """This device's part of ``order``, int32 ``[count]``."""
        order = np.array(self.order, np.int32)
        return jnp.asarray(order[0]) if self.size == 1 else jnp.asarray(order)[self.device()]

    def device(self) -> jax.Array:
        """This device's index along the axes."""
        return lax.axis_index(self.axes)

    def split(self, x: jax.Array) -> jax.Array:
        """``[B * count, T / count, ...]`` of ``[B, T, ...]``."""
        return x.reshape(x.shape[0] * self.count, x.shape[1] // self.count, *x.shape[2:])

    def join(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`split`."""
        return x.reshape(x.shape[0] // self.count, x.shape[1] * self.count, *x.shape[2:])

    def per_run(self, x: jax.Array) -> jax.Array:
        """``[count, B, ...]`` of ``[B * count, ...]``."""
        batch = x.shape[0] // self.count
        return jnp.moveaxis(x.reshape(batch, self.count, *x.shape[1:]), 1, 0)

    def in_batch(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`per_run`."""
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


@dataclasses.dataclass(frozen=True)
class DocumentRuns:
    """How the devices along mesh axes share the documents of a balanced batch. Hashable.

    The runs of split documents are in tables of the batch, and each is a sequence of the batch:
    ``[B * R, zone, ...]`` (:mod:`burst_jax.linear.split_documents`).

    Attributes:
      axes: the mesh axes, outermost first.
      size: number of devices.
      zone: number of tokens at the end of every shard that has all runs; 0 if no document is split.
    """

    axes: tuple[str, ...]
    size: int
    zone: int


# The runs of a device that needs no other one: of all its tokens.
ALONE = DeviceRuns((), ((0,),))


def device_runs(
    layout: Layout, axes: tuple[str, ...], size: int, function: str
) -> DeviceRuns | DocumentRuns:
    """The runs of a layout.

    Args:
      layout: of the tokens on the devices.
      axes: the mesh axes of the sequence.
      size: number of devices along them.
      function: the caller's function, for messages.

    Raises:
      NotImplementedError: the devices of this layout have no long runs.
      ValueError: a balanced layout without the size of its gathered zone.
    """
    if size == 1:
        return DeviceRuns(axes, ((0,),))
    shards = [layout.unit * blocks for blocks in (4, 8)]
    found = [layout.runs(shard, size) for shard in shards]
    if found[0] is None or found[1] is None:
        return DocumentRuns(axes, size, layout.known_zone)
    starts, count = found[0], found[0].shape[1]
    if count != found[1].shape[1]:  # Longer sequences have more runs, not longer ones.
        raise NotImplementedError(
            f"layout is {layout!r}, in which neighboring tokens are on different devices: "
            f"{function} needs 'zigzag' or 'contiguous', in all layers of the model and in its "
            "batches; on a command line, --layout zigzag"
        )
    order = starts // (shards[0] // count)
    upward, devices = order[0, 0] == 0, np.arange(size)
    for column in range(count):
        steps = devices if upward == (column % 2 == 0) else devices[::-1]
        if not np.array_equal(order[:, column], column * size + steps):
            raise NotImplementedError(
                f"layout is {layout!r}: the runs of tokens that {function} supports lead up the "
                "devices and back down, as in 'zigzag' and 'contiguous'; use one of these"
            )
    rows = tuple(tuple(int(i) for i in row) for row in order)
    return DeviceRuns(axes, rows, size >= BY_HEADS, size <= GATHERED)
