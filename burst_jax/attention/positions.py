"""Positions that a call says itself, in place of the layout's.

Kernels have one position of each token, the same in all rows. Masks of queries whose positions
differ from row to row are said by ranges of keys instead (:mod:`burst_jax.attention.kv_bounds`),
which may differ from row to row.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from burst_jax.attention.validation import check_is_array
from burst_jax.ring.request import Request
from pallas_kernels.arrays import as_int32
from pallas_kernels.score import SCORE_PARAMETERS
from pallas_kernels.spec import AttentionSpec

# The difference of two positions that are nearer to 0 is an int32.
_FAR = 2**30


@dataclasses.dataclass(frozen=True)
class OwnPositions:
    """What a call says of positions.

    Attributes:
      query_offset: :attr:`burst_jax.ring.request.Request.query_offset`.
      by_row: the argument that says other positions of the queries in each row; None if none does.
      arrays: the arrays of the call's arguments that are arrays, as int32, by name.
    """

    query_offset: int | None
    by_row: str | None
    arrays: dict[str, Any]


def check_positions(
    query: jax.Array,
    key: jax.Array,
    query_offset: Any,
    query_positions: Any,
    key_value_positions: Any,
) -> OwnPositions:
    """The arguments of these names, checked.

    Raises:
      ValueError: one of them has another shape or dtype, or an integer is too far from 0, or there
        are an offset and positions of the queries.
      NotImplementedError: keys are at other positions in each row.
    """
    batch, arrays = query.shape[0], {}
    offset = _checked_offset(query_offset, batch)
    if not isinstance(offset, int):
        arrays["query_offset"] = offset
    for name, positions, x, letter in (
        ("query_positions", query_positions, query, "T"),
        ("key_value_positions", key_value_positions, key, "S"),
    ):
        if positions is not None:
            arrays[name] = _checked_positions(name, positions, batch, x.shape[1], letter)
    if "query_positions" in arrays and ("query_offset" in arrays or offset != 0):
        raise ValueError(
            f"query_offset is {query_offset} and query_positions are given, which say where each "
            "query is: give one of them"
        )
    keys = arrays.get("key_value_positions")
    if keys is not None and keys.ndim == 2:
        raise NotImplementedError(
            f"key_value_positions has shape {keys.shape}: kernels have keys at the same positions "
            "in all rows; pass [S], or call for one row at a time (jax.lax.map)"
        )
    if arrays and isinstance(offset, int) and offset:
        arrays["query_offset"] = np.asarray(offset, np.int32)
    of_one_row = {"query_offset": 0, "query_positions": 1}
    by_row = [
        name for name, ndim in of_one_row.items() if name in arrays and arrays[name].ndim > ndim
    ]
    return OwnPositions(None if arrays else offset, next(iter(by_row), None), arrays)


def _checked_offset(offset: Any, batch: int) -> Any:
    """``query_offset`` as a Python int, or as an int32 array ``[]`` or ``[B]`` of several rows."""
    if isinstance(offset, numbers.Integral) and not isinstance(offset, bool):
        tokens = int(offset)
        if not -_FAR < tokens < _FAR:
            raise ValueError(f"query_offset is {tokens}: it must be between -2**30 and 2**30")
        return tokens
    if not isinstance(offset, (jax.Array, np.ndarray)) or isinstance(offset, jax.Ref):
        raise ValueError(
            f"query_offset is {offset!r}: it must be an integer, or an array of one or of one for "
            "each row, [B]"
        )
    if offset.shape not in ((), (batch,)):
        raise ValueError(f"query_offset has shape {offset.shape}: it must be () or [B], {(batch,)}")
    offset = _near("query_offset", as_int32("query_offset", offset))
    return offset[0] if offset.shape == (1,) else offset


def _checked_positions(name: str, x: Any, batch: int, length: int, letter: str) -> Any:
    """Positions as an int32 array ``[length]``, or ``[B, length]`` of several rows."""
    check_is_array(name, x, "an int32 array")
    x = _near(name, as_int32(name, x))
    if tuple(x.shape) not in ((length,), (batch, length)):
        raise ValueError(
            f"{name} has shape {x.shape}: it must be [{letter}], {(length,)}, or [B, {letter}], "
            f"{(batch, length)}"
        )
    return x[0] if x.ndim == 2 and x.shape[0] == 1 else x


def _near(name: str, x: Any) -> Any:
    """``x``; ValueError if it is a NumPy array of positions that are too far from 0."""
    for value in (x.min(), x.max()) if isinstance(x, np.ndarray) and x.size else ():
        if not -_FAR < int(value) < _FAR:
            raise ValueError(f"{name} holds {value}: positions must be between -2**30 and 2**30")
    return x


def refuse_by_row(
    positions: OwnPositions, per_head: Iterable[str], dropout_rate: float, spec: AttentionSpec
) -> None:
    """Raises NotImplementedError if more than masks reads positions that differ from row to row.

    Args:
      positions: of the call.
      per_head: the names of the numbers of each head that the call has.
      dropout_rate: the argument of this name.
      spec: of the call.
    """
    readers = [name for name in per_head if name in SCORE_PARAMETERS]
    if dropout_rate:
        readers.append("dropout_rate")
    functions = {"score_mod": spec.score.score_mod, "mask_mod": spec.mask.mask_mod}
    readers += [name for name, function in functions.items() if function is not None]
    name = positions.by_row
    if name is not None and readers:
        raise NotImplementedError(
            f"{name} has shape {positions.arrays[name].shape}, and {readers[0]} reads positions: "
            "kernels have one position of each query, the same in all rows; pass a query_offset of "
            "one number or query_positions [T], or call for one row at a time (jax.lax.map)"
        )


def positions_of_queries(request: Request, arrays: Mapping[str, jax.Array]) -> jax.Array | None:
    """Where a call says that this device's queries are, int32 ``[B or 1, T]``.

    None if they are where the layout has them.

    Args:
      request: what the call asks for.
      arrays: this device's, by name.
    """
    if "query_positions" in arrays:
        return rows(arrays["query_positions"])
    offset = arrays.get("query_offset", request.query_offset)
    if offset is None or (isinstance(offset, int) and offset == 0):
        return None
    in_layout = request.positions_here(arrays["query"].shape[1])[None]
    return in_layout + (offset if isinstance(offset, int) or not offset.ndim else offset[:, None])


def positions_of_keys(arrays: Mapping[str, jax.Array]) -> jax.Array | None:
    """The same of this device's keys, ``[1, S]``."""
    positions = arrays.get("key_value_positions")
    return None if positions is None else rows(positions)


def rows(x: jax.Array) -> jax.Array:
    """``[B, T]`` itself; ``[T]``, which is alike in all rows, as ``[1, T]``."""
    return x[None] if x.ndim == 1 else x
