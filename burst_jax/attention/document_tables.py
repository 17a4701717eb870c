"""The argument ``document_tables`` of a call: its checks, and the arrays that the call reads."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from burst_jax.layouts.layout import Layout
from burst_jax.layouts.tables import DIMENSIONS, DocumentTables, MaskTables, mask_name
from burst_jax.ring.request import Request

_PREFIX = "document_tables."
# The mesh dimensions of a call's tables, by their names among its arrays.
TABLE_DIMENSIONS = {_PREFIX + name: letters for name, letters in DIMENSIONS.items()}


def table_arrays(
    request: Request, tables: DocumentTables | None, shape: tuple[int, ...]
) -> dict[str, Any]:
    """The arrays of a call's tables for its mask, by their names among the call's arrays.

    Args:
      request: the static part of the call.
      tables: the argument.
      shape: ``[B, T]`` of the queries.

    Raises:
      ValueError: the tables are those of another layout, of another number of shards, of sequences
        of another shape, or not of the call's mask.
    """
    if tables is None:
        return {}
    check_tables(tables, request.layout, request.ring_size)
    mask = request.spec.mask
    if mask_name(mask.left, mask.right) not in tables.masks:
        raise ValueError(
            f"document_tables lack those of the mask (left, right) = {(mask.left, mask.right)}: "
            "name the windows of all layers where they are made, as make_batch(..., "
            "local_window_sizes=config.local_window_sizes)"
        )
    found = tables.of_mask(mask_name(mask.left, mask.right))
    for name, x in found._asdict().items():
        if x is None:
            continue
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise ValueError(f"document_tables.{name} is a {type(x).__name__}: it must be an array")
        if x.shape[0] != shape[0] or (name == "is_split" and x.shape != shape):
            raise ValueError(
                f"document_tables.{name} has shape {x.shape}, and the queries are {shape}: pass "
                "the tables of this batch"
            )
    return {_PREFIX + name: x for name, x in found._asdict().items() if x is not None}


def check_tables(tables: Any, layout: Layout, n: int) -> None:
    """Raises ValueError unless tables are those of this layout over n shards."""
    if not isinstance(tables, DocumentTables):
        raise ValueError(
            f"document_tables is a {type(tables).__name__}: it must be what make_batch returned as "
            "batch['document_tables'], or burst_jax.layouts.document_tables"
        )
    if (tables.layout, tables.num_shards) != (layout.name, n):
        raise ValueError(
            f"document_tables are those of layout {tables.layout!r} over {tables.num_shards} "
            f"shards, and the call has layout {layout!r} over {n}: make the batch and the model "
            "with the same layout and number of shards"
        )


def tables_of(arrays: Any) -> MaskTables | None:
    """The tables among a call's arrays; None without."""
    found = {name: arrays.get(_PREFIX + name) for name in MaskTables._fields}
    return None if found["checksums"] is None else MaskTables(**found)
