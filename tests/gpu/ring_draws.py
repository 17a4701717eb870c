"""Drawn calls of ``burst_attention`` on a ring, as people train: documents, lengths, windows.

A draw is a function of the family and its index, so that a failure is run again by
``python tests/gpu/drawn_rings.py --implementation FAMILY --only INDEX``.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any

import numpy as np

from burst_jax.layouts.balanced import Placement, balance_batch

# Coprime numbers of layouts and masks: consecutive indices have every pair of them, and the first
# nine every layout and, with documents in the balanced one, every mask.
LAYOUTS = ("contiguous", "zigzag", "striped", "striped:128", "balanced")
MASKS = (
    "documents", "lengths", "window", "causal", "documents_window", "padded_documents",
    "lengths_window", "chunks", "full",
)  # fmt: skip
# Masks that a balanced layout replaces, because it has documents and windows alone.
INSTEAD = {
    "lengths": "documents", "window": "documents_window", "causal": "padded_documents",
    "lengths_window": "documents_window", "chunks": "documents", "full": "padded_documents",
}  # fmt: skip
# Of keys and of values. mosaic_sm90 pads 80 to 96.
HEAD_DIMS = (*3 * ((128, 128),), *3 * ((64, 64),), (96, 96), (80, 80), (192, 128), (256, 256))
HEADS = ((4, 2), (4, 1), (2, 2), (4, 4))


@dataclasses.dataclass(frozen=True)
class Ring:
    """A drawn call.

    Attributes:
      index: number of the draw.
      implementation: name of the kernels.
      axes: sizes of the mesh axes: "outer", "inner" or "seq" of the ring, "ulysses", "data".
      layout: one of LAYOUTS.
      mask: one of MASKS.
      tokens: query tokens per device.
      key_tokens: key tokens per device.
      heads: N and K.
      head_dims: H and Hv.
      dtype: of query, key and value.
      options: the call's further static arguments.
      sinks: whether there are sink logits.
      sharpness: standard deviation of the logits. With 3 few keys dominate, so that one missing
        tile of keys is an error of the size of the result.
    """

    index: int
    implementation: str
    axes: dict[str, int]
    layout: str
    mask: str
    tokens: int
    key_tokens: int
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    dtype: str
    options: dict[str, Any]
    sinks: bool
    sharpness: float

    @property
    def shards(self) -> int:
        """Shards of the layout."""
        return math.prod(self.axes.get(name, 1) for name in ("outer", "inner", "seq"))

    @property
    def batch(self) -> int:
        """Sequences: one per device of the data axis."""
        return self.axes.get("data", 1)

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S, of whole sequences."""
        devices = self.shards * self.axes.get("ulysses", 1)
        return devices * self.tokens, devices * self.key_tokens

    def __str__(self) -> str:
        mesh = ",".join(f"{name}={size}" for name, size in self.axes.items())
        (heads, kv_heads), (dim, value_dim) = self.heads, self.head_dims
        tokens = f"{self.tokens}" if self.tokens == self.key_tokens else (
            f"{self.tokens}x{self.key_tokens}"
        )  # fmt: skip
        options = [f"{name}={value}" for name, value in self.options.items() if value]
        return (
            f"{self.index} {self.implementation} {mesh} {self.layout} {self.mask} {tokens} tokens "
            f"a device, heads {heads}/{kv_heads} of {dim}/{value_dim}, {self.dtype}, "
            f"logits of {self.sharpness:g} {' '.join(options)}{' sinks' * self.sinks}"
        )


def draw_ring(
    implementation: str, index: int, devices: int, tokens: tuple[int, int] = (8192, 32768)
) -> Ring:
    """The draw of this index for a number of devices; ``tokens``: least and most per device."""
    # The families draw apart from each other.
    rng = np.random.default_rng((zlib.crc32(implementation.encode()), index))

    def pick(levels: Any) -> Any:
        return levels[rng.integers(len(levels))]

    def count(unit: int) -> int:
        """Half of the sizes are those that people choose, half are any that the layout allows."""
        least, most = tokens
        usual = [size for size in (least, 2 * least, most) if size % unit == 0]
        if usual and rng.random() < 0.5:
            return pick(usual)
        return unit * int(rng.integers(-(-least // unit), most // unit + 1))

    axes = pick(meshes(devices))
    layout, mask = LAYOUTS[index % len(LAYOUTS)], MASKS[index % len(MASKS)]
    balanced = layout == "balanced"
    mask = INSTEAD.get(mask, mask) if balanced else mask
    # Ulysses devices split a shard equally.
    unit = {"zigzag": 2, "striped:128": 128}.get(layout, 1)
    queries = count(unit)
    keys = queries
    if mask in ("full", "lengths") and not balanced and rng.random() < 0.5:
        keys = count(unit)  # Cross-attention.
    causal = mask in ("causal", "chunks") or (mask not in ("full", "window") and rng.random() < 0.8)
    options: dict[str, Any] = {
        "is_causal": causal,
        "deterministic": bool(rng.random() < 0.2),
        "logits_soft_cap": pick((None, None, None, 20.0)),
    }
    if not balanced:
        options["backward"] = pick(("auto", "rotate_kv", "rotate_query"))
    if "window" in mask:
        left = int(rng.integers(1, 2 * queries))
        right = 0 if causal else int(rng.integers(0, queries))
        options["local_window_size"] = (left, right)
    if mask == "chunks":
        # Multiples of the stripes, else any.
        options["attention_chunk_size"] = 128 * int(rng.integers(max(1, tokens[0] // 512), 129))
    return Ring(
        index=index, implementation=implementation, axes=axes, layout=layout, mask=mask,
        tokens=queries, key_tokens=keys, heads=pick(HEADS), head_dims=pick(HEAD_DIMS),
        dtype=pick(("bfloat16", "bfloat16", "float16")), options=options,
        sinks=bool(rng.random() < 0.2), sharpness=pick((1.0, 3.0)),
    )  # fmt: skip


def meshes(devices: int) -> list[dict[str, int]]:
    """The meshes to draw from, rings of one axis most often."""
    flat = {"seq": devices}
    if devices == 1 or devices % 2:
        return [flat]
    half = devices // 2
    if devices == 2:
        return [flat, flat, flat, {"seq": 1, "ulysses": 2}]
    return [
        flat, flat, {"seq": half, "ulysses": 2}, {"data": 2, "seq": half},
        {"outer": 2, "inner": half},
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tables:
    """Arrays of a call that are not query, key or value, in natural order.

    Attributes:
      segment_ids: int32 ``[B, T]`` of queries and keys, or None.
      query_lengths: int32 ``[B]``, or None.
      key_lengths: int32 ``[B]``, or None.
      placements: of each sequence, in a balanced layout.
    """

    segment_ids: np.ndarray | None
    query_lengths: np.ndarray | None
    key_lengths: np.ndarray | None
    placements: list[Placement] | None


def draw_tables(ring: Ring) -> Tables:
    """The documents or lengths of a draw."""
    rng = np.random.default_rng((ring.index, 1))
    (t, s), ids, places = ring.lengths, None, None
    query_lengths = key_lengths = None
    if "documents" in ring.mask:
        documents = [draw_documents(rng, t, ring.mask) for _ in range(ring.batch)]
        if ring.layout == "balanced":
            # The documents of a placement lie one after the other, and padding has no place.
            documents = [[(n, True) for n, counts in row if counts] for row in documents]
            places = balance_batch(
                [[n for n, _ in row] for row in documents],
                num_shards=ring.shards, tokens_per_shard=t // ring.shards,
            )  # fmt: skip
        ids = np.stack([ids_of(row, t) for row in documents])
    if "lengths" in ring.mask:
        query_lengths, key_lengths = (
            rng.integers(1, n + 1, ring.batch).astype(np.int32) for n in (t, s)
        )
    return Tables(ids, query_lengths, key_lengths, places)


def draw_documents(rng: np.random.Generator, length: int, mask: str) -> list[tuple[int, bool]]:
    """Lengths of documents, and whether each is one and not padding; some of few tokens."""
    found, left = [], length
    typical = length / rng.choice((2, 8, 40))
    while left:
        tokens = min(left, 1 + int(rng.exponential(typical)))
        if rng.random() < 0.1:
            tokens = min(left, int(rng.integers(1, 4)))
        # Padding at the end of each document, as packed sequences with a fixed stride have.
        found.append((tokens, mask != "padded_documents" or len(found) % 3 != 1))
        left -= tokens
    return found


def ids_of(documents: list[tuple[int, bool]], length: int) -> np.ndarray:
    """Segment ids of a sequence, 0 for padding."""
    ids = [n if counts else 0 for n, (_, counts) in enumerate(documents, 1)]
    filled = np.repeat(ids, [tokens for tokens, _ in documents]).astype(np.int32)
    return np.pad(filled, (0, length - len(filled)))


def order_of(layout: str, length: int, shards: int) -> np.ndarray:
    """The position of each token of a fixed layout, by the documentation's definition."""
    index = np.arange(length)
    if layout == "zigzag":
        halves = index.reshape(2 * shards, -1)
        return np.concatenate([np.append(halves[r], halves[-1 - r]) for r in range(shards)])
    if layout.startswith("striped"):
        stripe = int(layout.partition(":")[2] or 1)
        return index.reshape(-1, shards, stripe).swapaxes(0, 1).reshape(-1)
    return index
