"""Segment ids: one array for both sides, and the id that means padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.attention.arguments import LocalArguments
from burst_jax.errors import check_integer
from pallas_kernels.arrays import as_int32, value_range

SIDES = ("query_segment_ids", "key_value_segment_ids")
_LARGEST = 2**31 - 1


def check_one_or_both(arguments: LocalArguments, query: Any, key: Any) -> None:
    """Raises ValueError unless there are ``segment_ids``, those of both sides, or none."""
    given = [name for name in SIDES if getattr(arguments, name) is not None]
    if arguments.segment_ids is None:
        if len(given) == 1:
            (missing,) = set(SIDES) - set(given)
            raise ValueError(
                f"{missing} is None but the other side's segment ids are given: pass both, or "
                "segment_ids if queries and keys are the same tokens"
            )
        return
    if given:
        raise ValueError(
            f"segment_ids and {given[0]} are given: pass segment_ids alone, if queries and keys "
            "are the same tokens, or query_segment_ids and key_value_segment_ids"
        )
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"segment_ids is given, and query has {query.shape[1]} tokens, key {key.shape[1]}: "
            "they must be the same tokens; else pass query_segment_ids and key_value_segment_ids"
        )


def check_padding_id(padding_id: Any) -> int:
    """``padding_id`` as an int; raises ValueError unless it is a Python integer of int32."""
    return check_integer("padding_id", padding_id, -(2**31), _LARGEST)


def check_ids(name: str, ids: Any, padding_id: int) -> Any:
    """Ids as int32; raises ValueError if one is negative without being that of padding."""
    ids = as_int32(name, ids)
    for value in value_range(ids)[:1]:
        if value < 0 and value != padding_id:
            raise ValueError(
                f"{name} holds {value}, and padding_id is {padding_id}: pass padding_id={value} if "
                "that marks padding, or count documents from 1"
            )
    return ids


def with_padding_zero(name: str, ids: Any, padding_id: int) -> Any:
    """Ids of the same documents with 0 for padding; NumPy arrays stay NumPy arrays.

    Args:
      name: of the argument.
      ids: int32; those of documents are not negative.
      padding_id: the id of padding. It becomes 0, and unless it was 0 all others grow by 1.

    Raises:
      ValueError: an id cannot grow.
    """
    if not padding_id:
        return ids
    if padding_id != _LARGEST and _LARGEST in value_range(ids):
        raise ValueError(
            f"{name} holds {_LARGEST}, and padding_id is {padding_id}: documents' ids must then be "
            "below 2**31 - 1"
        )
    xp: Any = jnp if isinstance(ids, jax.Array) else np
    is_padding = ids == padding_id
    return xp.where(is_padding, 0, ids + xp.where(is_padding, 0, 1)).astype(np.int32)
