"""The argument ``document_tables`` of a call, and what a balanced layout needs of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burst_jax.attention.document_tables import check_tables
from burst_jax.layouts.tables import DocumentTables
from burst_jax.linear.devices import Devices
from burst_jax.linear.runs import DocumentRuns


def run_arrays(
    devices: Devices, tables: DocumentTables | None, arrays: Mapping[str, Any], batch: int
) -> dict[str, Any]:
    """The arrays of the tables, by their names among a call's arrays; none in a fixed layout.

    Args:
      devices: those of the call.
      tables: the argument.
      arrays: the other arrays of the call.
      batch: number of sequences.

    Raises:
      ValueError: the tables are missing, those of another layout, or of other sequences; or the
        segment ids are missing.
    """
    layout = devices.layout
    if tables is not None:
        check_tables(tables, layout, devices.size)
    if not isinstance(devices.runs(), DocumentRuns):
        return {}
    made = "make_batch(rows, layout='balanced', ..., linear_attention=True)"
    if tables is None or (found := tables.of_runs()) is None:
        lacking = "None" if tables is None else "those of softmax attention alone"
        raise ValueError(
            f"layout is {layout!r}, and document_tables is {lacking}: {devices.function} needs the "
            f"runs of the batch's documents; pass batch['document_tables'] of {made}"
        )
    if "segment_ids" not in arrays:
        raise ValueError(
            f"layout is {layout!r}, and segment_ids is None: pass the batch's, of {made}"
        )
    if found.run_checksums.shape[0] != batch:
        raise ValueError(
            f"document_tables are those of {found.run_checksums.shape[0]} sequences, and the call "
            f"has {batch}: pass the tables of this batch"
        )
    return {name: x for name, x in found._asdict().items() if x is not None}


def check_no_states(devices: Devices, **states: bool) -> None:
    """Raises NotImplementedError for states of sequences whose documents are in another order."""
    for name, given in states.items():
        if given and not devices.layout.is_fixed:
            raise NotImplementedError(
                f"{name} is given with layout {devices.layout!r}, in which the first and the last "
                "document of a sequence may be anywhere: process sequences in parts in 'zigzag' or "
                "'contiguous', or leave it out"
            )
