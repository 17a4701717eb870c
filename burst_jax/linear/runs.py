"""The contiguous runs of tokens that devices hold of a sequence, and in which order."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layouts.permutation import (
    check_layout,
    shard_runs,
    shard_unit,
    stripe_size,
    zone_size,
)


@dataclasses.dataclass(frozen=True)
class Runs:
    """How the devices along mesh axes share sequences. Hashable.

    A device's runs become sequences of the batch: ``[B, T, ...]`` to ``[B * count, T / count,
    ...]``, which moves no data. Zigzag on 4 devices::

        device   0      1      2      3
        order    0, 7   1, 6   2, 5   3, 4

    Attributes:
      axes: the mesh axes, outermost first; none for one device without a ``shard_map``.
      order: for each device the indices of its runs among all runs of a sequence, ascending.
    """

    axes: tuple[str, ...]
    order: tuple[tuple[int, ...], ...]

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
        return jnp.moveaxis(x.reshape(-1, self.count, *x.shape[1:]), 1, 0)

    def in_batch(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`per_run`."""
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])


def runs_of(layout: str, axes: tuple[str, ...], size: int, function: str) -> Runs:
    """The runs of a layout.

    Args:
      layout: its name.
      axes: the mesh axes of the sequence.
      size: number of devices along them.
      function: the caller's function, for messages.

    Raises:
      ValueError: there is no such layout.
      NotImplementedError: the devices of this layout have no long runs.
    """
    check_layout(layout)
    if size == 1:  # All of them are the natural order then, but balanced ones.
        if zone_size(layout) is None:
            return Runs(axes, ((0,),))
    elif stripe_size(layout) is not None:
        raise NotImplementedError(
            f"layout is {layout!r}, in which neighboring tokens are on different devices: "
            f"{function} needs 'zigzag' or 'contiguous', in all layers of the model; make batches "
            "with to_layout(batch, 'zigzag', n)"
        )
    if zone_size(layout) is not None:
        raise NotImplementedError(
            f"layout is {layout!r}: {function} does not know its documents' order on the devices "
            "yet; use 'zigzag', with the same segment_ids"
        )
    starts, _, count = shard_runs(layout, shard_unit(layout), size)
    return Runs(axes, tuple(tuple(int(i) for i in row) for row in starts // count))
