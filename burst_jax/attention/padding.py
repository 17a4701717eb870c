"""The argument ``pad``: lengths that the mesh does not divide are padded and masked in the call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.attention.shardings import ArrayShardings, check_devices
from burst_jax.errors import check_bool
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.parallel.mesh import explicit_spec, flat_names, restrict_spec
from burst_jax.ring.request import Request

_IDS = {"query": "query_segment_ids", "key": "key_value_segment_ids"}


def check_pad(pad: object, layout: LayoutLike) -> None:
    """Raises ValueError unless ``pad`` is a bool, and False in other layouts than contiguous."""
    check_bool("pad", pad)
    parsed = parse_layout(layout)
    if pad and not parsed.in_natural_order:
        before = "before to_layout, with pad_to_layout, outside of the call"
        if not parsed.is_fixed:
            before = "where make_batch or burst_jax.layouts.balance places the documents"
        raise ValueError(
            f"pad is True with layout {layout!r}: padding goes to the end of the natural order, so "
            f"pad {before}; or use the contiguous layout"
        )


def padded(request: Request, shardings: ArrayShardings, arrays: dict[str, Any]) -> dict[str, Any]:
    """A call's arrays with T and S padded by zeros to the next lengths that the mesh divides.

    The padding is segment 0. If the mesh divides both lengths, the arrays are only sharded.

    Args:
      request: the static part of the call.
      shardings: of its arrays.
      arrays: its checked arrays by name.

    Raises:
      ValueError: lengths grow under a block-sparse mask, or an array is on other devices.
    """
    check_devices(shardings.mesh, arrays)
    devices = request.token_devices
    lengths = {side: arrays[side].shape[1] for side in _IDS}
    grown, fits = dict(arrays), not any(length % devices for length in lengths.values())
    if "block_mask" in arrays and not fits:
        raise ValueError(
            f"block_mask is given, and lengths {lengths['query']} and {lengths['key']} are padded "
            f"to multiples of {devices}, which changes the size of its blocks: pad outside of the "
            "call, with pad_to_layout, and make the table for the padded lengths"
        )
    for side, name in _IDS.items():
        if name not in grown and not fits:
            grown[name] = jnp.ones(arrays[side].shape[:2], jnp.int32)
    for name, array in grown.items():
        axis = shardings.tokens_axis(name, array.ndim)
        if axis is not None:
            grown[name] = shardings.reshard(name, _pad(array, axis, devices))
    return grown


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """``x`` with zeros at the end of an axis, up to the next multiple of a length."""
    if x.shape[axis] % multiple == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, -x.shape[axis] % multiple
    return jnp.pad(x, widths)


def cut(result: jax.Array, shardings: ArrayShardings, query: jax.Array) -> jax.Array:
    """out or lse ``[B, T_padded, N, ...]`` of a padded call, without the padding.

    Over Explicit mesh axes its tokens are sharded like the query's: over axes that divide T.
    """
    explicit = shardings.mesh.explicit_axes
    if flat_names(*jax.typeof(result).sharding.spec):
        batch, _, heads, _ = shardings.spec("out")
        spec = P(*explicit_spec(query, P(batch, None, heads, None))[: result.ndim])
        result = jax.reshard(result, NamedSharding(shardings.mesh, restrict_spec(spec, explicit)))
    return result if result.shape[1] == query.shape[1] else result[:, : query.shape[1]]
