"""In how many parts Hopper's kernels scan each sequence."""

from __future__ import annotations

# The most parts of a sequence, and the fewest chunks of a part; of one with a map for the parts'
# sake.
MOST_PARTS = 4
LEAST_PART, LEAST_CHANNEL_PART, LEAST_MAPPED_PART = 128, 64, 64


def parts_of(ctas: int, chunks: int, sms: int, *, channels: bool, has_maps: bool) -> int:
    """Two or four where the scans of whole sequences would leave most SMs without one.

    Where a map is needed anyway, parts cost its composition alone. Where that takes as long as
    they gain, a sequence is one part. Maps for the parts' sake scan all tokens once more if a head
    forgets nothing: only four parts gain more than that, and none with a decay per key channel.

    Args:
      ctas: of a scan of whole sequences.
      chunks: of a sequence.
      sms: of the GPU.
      channels: whether there is a decay per key channel.
      has_maps: whether a sequence needs its map anyway.
    """
    least, found = LEAST_CHANNEL_PART if channels else LEAST_PART, 1
    if not has_maps:
        least = LEAST_MAPPED_PART
    while found < MOST_PARTS and 2 * found * ctas <= sms:
        if chunks % (2 * found) or chunks // (2 * found) < least:
            break
        found *= 2
    pays = has_maps or (found == MOST_PARTS and not channels)
    return found if pays else 1
