"""All-gather of weights, reduce-scatter of gradients and all-to-all, inside a ``shard_map``.

NCCL's all-gather and reduce-scatter kernels occupy SMs while they wait and send, and an attention
kernel that needs all SMs takes up to 1.5 times as long next to them. So where the GPUs' copy
engines do permutes, an all-gather, reduce-scatter or all-to-all is n - 1 permutes, one per distance
between two devices. Both send the same bytes.
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
from burst_jax.parallel.xla_options import has_peer_copies
from pallas_kernels.arrays import row_major, unvary, vary, varying_axes

# For each sharded dimension of a weight the mesh axes that shard it.
ShardedDims = tuple[tuple[int, tuple[str, ...]], ...]


def gather_weights(
    weights: Any,
    specs: Any,
    *,
    over: tuple[str, ...],
    keep: Container[str] = (),
    dtype: DTypeLike | None = None,
    widen: bool = False,
) -> Any:
    """All-gathers a pytree of weights over all mesh axes but those in ``keep``, in a ``shard_map``.

    A sharded weight is sent in ``dtype``. Its gradient is summed in float32: by a reduce-scatter
    over the axes that shard the weight, then by an all-reduce of the shards over the rest of
    ``over``.

    Args:
      weights: one device's shards.
      specs: the spec of each weight.
      over: the mesh axes that activations vary over, without those in ``keep``.
      keep: mesh axes along which weights stay sharded.
      dtype: floating dtype in which sharded weights are sent and returned; None keeps their own.
      widen: whether gathered weights are cast back to their own dtype. Needed for a weight whose
        gradient sums many terms, like an embedding's over tokens: the sum has the dtype of the
        returned weight, and in bfloat16 a sum of some hundred terms stops growing.

    Returns:
      A pytree of the same structure.
    """

    def gather(weight: jax.Array, spec: PartitionSpec) -> jax.Array:
        entries = (tuple(n for n in flat_names(entry) if n not in keep) for entry in spec)
        dims = tuple((dim, names) for dim, names in enumerate(entries) if names)
        # The transpose of this cast all-reduces over the axes that do not shard the weight. It is
        # before the gather, so it sums shards, not whole gradients.
        weight = vary(weight, frozenset(over))
        if not dims:
            return weight
        sent = jnp.dtype(weight.dtype if dtype is None else dtype)
        return _gather(weight, dims, sent, weight.dtype if widen else sent)

    return jax.tree.map(gather, weights, specs)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def exchange(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """All-to-all inside a ``shard_map``: part p of ``x`` is sent to device p along ``names``.

    Args:
      x: ``[n, ...]``, one part per device along the mesh axes ``names``, in their order.
      names: mesh axes.

    Returns:
      ``[n, ...]``: part p was received from device p. The function is its own transpose.
    """
    if has_peer_copies():
        n, me, out = lax.axis_size(names), lax.axis_index(names), x
        # A device keeps its own part, and replaces all others.
        for distance in range(1, n):
            part = lax.dynamic_slice_in_dim(x, (me + distance) % n, 1)
            part = _send(part, names, distance)
            out = lax.dynamic_update_slice_in_dim(out, part, (me - distance) % n, 0)
    else:
        out = lax.all_to_all(x, names, 0, 0, tiled=True)
    # With check_vma=False nothing is marked, but JAX marks the results of collectives in gradients.
    return out if varying_axes(x) else unvary(out)


exchange.defvjp(
    lambda x, names: (exchange(x, names), None),
    lambda names, _, gradient: (exchange(gradient, names),),
)


def psum_manual(x: jax.Array, axes: AxisNames) -> jax.Array:
    """``psum`` of ``x`` over those of the mesh axes that are manual here, inside a ``shard_map``.

    Over Auto and Explicit axes arrays are global, and a product of them is the full sum.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = tuple(name for name in flat_names(axes) if name in manual)
    return lax.psum(x, names) if names else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(weight: jax.Array, dims: ShardedDims, sent: jnp.dtype, used: jnp.dtype) -> jax.Array:
    weight = weight.astype(sent)
    for dim, names in dims:
        if has_peer_copies():
            weight = gather_by_permutes(weight, names, dim)
        else:
            # NCCL gathers along the first dimension in memory, and XLA transposes for another one.
            # row_major makes that a transpose of one layer's shard, not of the stack of all layers.
            weight = lax.all_gather(row_major(weight), names, axis=dim, tiled=True)
    return weight.astype(used)


def _gather_fwd(
    weight: jax.Array, dims: ShardedDims, sent: jnp.dtype, used: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    # The empty residual carries the dtype of the weight.
    return _gather(weight, dims, sent, used), jnp.zeros((0,), weight.dtype)


def _gather_bwd(
    dims: ShardedDims, sent: jnp.dtype, used: jnp.dtype, empty: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    del sent, used
    gradient = gradient.astype(jnp.float32)
    for dim, names in reversed(dims):
        if has_peer_copies():
            gradient = scatter_by_permutes(gradient, names, dim)
        else:
            gradient = lax.psum_scatter(gradient, names, scatter_dimension=dim, tiled=True)
            gradient = row_major(gradient)
    return (gradient.astype(empty.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def gather_by_permutes(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """``lax.all_gather(x, names, axis=dim, tiled=True)``, one permute per distance."""
    n, me, size = lax.axis_size(names), lax.axis_index(names), x.shape[dim]
    shape = (*x.shape[:dim], n * size, *x.shape[dim + 1 :])
    whole = vary(jnp.zeros(shape, x.dtype), varying_axes(x) | frozenset(names))
    whole = lax.dynamic_update_slice_in_dim(whole, x, me * size, dim)
    for distance in range(1, n):
        part = _send(x, names, distance, apart=True)
        # Received from the device at that distance before this one.
        whole = lax.dynamic_update_slice_in_dim(whole, part, (me - distance) % n * size, dim)
    return whole


def scatter_by_permutes(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """``lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True)``, by permutes."""
    n, me = lax.axis_size(names), lax.axis_index(names)
    size = x.shape[dim] // n
    total = lax.dynamic_slice_in_dim(x, me * size, size, dim)
    for distance in range(1, n):
        part = lax.dynamic_slice_in_dim(x, (me + distance) % n * size, size, dim)
        total = total + _send(part, names, distance, apart=True)
    return total


def _send(x: jax.Array, names: tuple[str, ...], distance: int, *, apart: bool = False) -> jax.Array:
    """Receives ``x`` from the device at ``distance`` before this one, in the order of ``names``.

    ``apart``: XLA merges permutes with equal lists of pairs; this list starts at another pair, so
    that what is sent is never merged with a ring's arrays.
    """
    # ppermute numbers devices in the mesh's axis order; a weight may be sharded in another order.
    in_mesh = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in names]
    order = np.arange(lax.axis_size(names)).reshape([lax.axis_size(name) for name in in_mesh])
    order = order.transpose([in_mesh.index(name) for name in names]).ravel().tolist()
    pairs = list(zip(order, order[distance:] + order[:distance], strict=True))
    if apart:
        pairs = pairs[1:] + pairs[:1]
    return lax.ppermute(x, tuple(in_mesh), pairs)
