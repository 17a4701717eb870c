"""Checksums of documents, by which devices notice tables of another batch."""

from __future__ import annotations

from typing import Any

import numpy as np


def checksums(segment_ids: Any, positions: Any, xp: Any) -> Any:
    """uint32 ``[...]`` of int32 ``[..., tokens]``, by ``xp`` (NumPy or JAX's).

    Hashes are summed, not the numbers, whose sums may be equal for other documents.
    """
    index = np.arange(segment_ids.shape[-1], dtype=np.uint32)
    ids, positions = (x.astype(np.uint32) for x in (segment_ids, positions))
    bits = ids * np.uint32(0x9E3779B1) + positions * np.uint32(0x85EBCA77)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x2C1B3C6D) + index * np.uint32(0xC2B2AE3D)
    bits = (bits ^ (bits >> np.uint32(13))) * np.uint32(0x297A2D39)
    return xp.sum(bits ^ (bits >> np.uint32(16)), -1, dtype=np.uint32)
