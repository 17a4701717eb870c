"""Weights inside a ``shard_map``: gathered where a layer uses them, their gradients scattered.

NCCL's kernels for a gather or a reduce-scatter keep some multiprocessors for as long as they wait
and move. Attention kernels want all multiprocessors, and take up to half as long again beside them.
So where the GPUs' copy engines can move blocks, a gather and a reduce-scatter are permutes: one for
each distance between two devices. Both ways send the same bytes.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from burst_jax.parallel.mesh import AxisNames, flat_names
from burst_jax.parallel.platform import has_peer_copies
from pallas_kernels.arrays import row_major, vary, varying_axes

# For each split dimension of a weight the mesh axes that split it.
Split = tuple[tuple[int, tuple[str, ...]], ...]


def gather_weights(
    weights: Any,
    specs: Any,
    *,
    over: tuple[str, ...],
    keep: Container[str] = (),
    dtype: DTypeLike | None = None,
    widen: bool = False,
) -> Any:
    """The weights of a pytree, whole but for the mesh axes in ``keep``, inside a ``shard_map``.

    A weight that is split travels in ``dtype``. Its gradient is summed in float32: over the axes
    that split the weight by a reduce-scatter, which leaves each device the gradient of its own
    part, and over the other axes of ``over`` by a sum of these parts.

    Args:
      weights: one device's parts.
      specs: for each weight how it is split.
      over: the mesh axes that activations vary over, those in ``keep`` left out.
      keep: mesh axes along which weights stay split.
      dtype: floating dtype in which split weights travel, and which they have then; None keeps each
        weight's.
      widen: whether they have their own dtype again after they have travelled. A weight whose
        gradient is a sum of many parts, like an embedding's over tokens, needs it: the sum has the
        dtype of the weight that is used, and in bfloat16 a sum of some hundred terms stops growing.

    Returns:
      Weights of the same tree.
    """

    def gather(weight: jax.Array, spec: PartitionSpec) -> jax.Array:
        entries = (tuple(n for n in flat_names(entry) if n not in keep) for entry in spec)
        split = tuple((dim, names) for dim, names in enumerate(entries) if names)
        # The transpose of this mark sums over the axes that do not split the weight. It stands
        # before the gather, so it sums parts, not whole gradients.
        weight = vary(weight, frozenset(over))
        if not split:
            return weight
        travels = jnp.dtype(weight.dtype if dtype is None else dtype)
        return _gather(weight, split, travels, weight.dtype if widen else travels)

    return jax.tree.map(gather, weights, specs)


def sum_over(x: jax.Array, axes: AxisNames) -> jax.Array:
    """``x`` summed over those of the mesh axes that are manual here: inside a ``shard_map``.

    Over Auto and Explicit axes arrays are global, and a product of them is a whole sum already.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = tuple(name for name in flat_names(axes) if name in manual)
    return lax.psum(x, names) if names else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(weight: jax.Array, split: Split, travels: jnp.dtype, used: jnp.dtype) -> jax.Array:
    weight = weight.astype(travels)
    for dim, names in split:
        if has_peer_copies():
            weight = gather_by_permutes(weight, names, dim)
        else:
            # NCCL gathers along the first dimension in memory. For another one XLA transposes: here
            # one layer's part, not the stack of all layers' that it may be a slice of.
            weight = lax.all_gather(row_major(weight), names, axis=dim, tiled=True)
    return weight.astype(used)


def _gather_fwd(
    weight: jax.Array, split: Split, travels: jnp.dtype, used: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    # The residual, which holds nothing, has the dtype of the weight.
    return _gather(weight, split, travels, used), jnp.zeros((0,), weight.dtype)


def _gather_bwd(
    split: Split, travels: jnp.dtype, used: jnp.dtype, empty: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    del travels, used
    gradient = gradient.astype(jnp.float32)
    for dim, names in reversed(split):
        if has_peer_copies():
            gradient = scatter_by_permutes(gradient, names, dim)
        else:
            gradient = lax.psum_scatter(gradient, names, scatter_dimension=dim, tiled=True)
            gradient = row_major(gradient)
    return (gradient.astype(empty.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def gather_by_permutes(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """``lax.all_gather(x, names, axis=dim, tiled=True)``, one permute for each distance."""
    n, me, size = lax.axis_size(names), lax.axis_index(names), x.shape[dim]
    shape = (*x.shape[:dim], n * size, *x.shape[dim + 1 :])
    whole = vary(jnp.zeros(shape, x.dtype), varying_axes(x) | frozenset(names))
    whole = lax.dynamic_update_slice_in_dim(whole, x, me * size, dim)
    for distance in range(1, n):
        part = _send(x, names, distance)
        # It comes from the device that many places before this one.
        whole = lax.dynamic_update_slice_in_dim(whole, part, (me - distance) % n * size, dim)
    return whole


def scatter_by_permutes(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """``lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)``, a permute a distance."""
    n, me = lax.axis_size(names), lax.axis_index(names)
    size = x.shape[dim] // n
    total = lax.dynamic_slice_in_dim(x, me * size, size, dim)
    for distance in range(1, n):
        part = lax.dynamic_slice_in_dim(x, (me + distance) % n * size, size, dim)
        total = total + _send(part, names, distance)
    return total


def _send(x: jax.Array, names: tuple[str, ...], distance: int) -> jax.Array:
    """``x`` of the device ``distance`` places before, in the order of the axes ``names``."""
    # JAX permutes over axes in the mesh's order alone; a weight may be split in another order.
    in_mesh = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in names]
    places = np.arange(lax.axis_size(names)).reshape([lax.axis_size(name) for name in in_mesh])
    places = places.transpose([in_mesh.index(name) for name in names]).ravel().tolist()
    pairs = zip(places, places[distance:] + places[:distance], strict=True)
    return lax.ppermute(x, tuple(in_mesh), list(pairs))
