"""Packing chunks of documents into sequences with grain: one stream per batch index."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

import grain
import numpy as np
from grain.experimental import (
    ConcatThenSplitIterDataset,
    FirstFitPackIterDataset,
    FlatMapIterDataset,
    FlatMapTransform,
    ThreadPrefetchIterDataset,
)

from burst_jax.data.chunks import ChunkLengths, Chunks

Packing = Literal["first_fit", "split", "none"]
# Sequences' worth of a long document per chunk, see chunk_sizes.
_SEQUENCES_PER_CHUNK = 16
# Maximum open bins of first-fit per stream, and maximum tokens in them.
_BINS, _BIN_TOKENS = 16, 1 << 20
# grain shuffles 32-bit indices.
MAX_CHUNKS = 2**32

# One or more packed sequences, by the names of grain's packing.
type Packed = dict[str, np.ndarray]


def chunk_sizes(packing: Packing, length: int, *, exact: bool) -> tuple[int, int]:
    """Length and stride of :class:`Chunks` for sequences of ``length`` tokens.

    - ``"first_fit"`` packs whole chunks, so an exact chunk is one sequence. The last token of a
      sequence is only a target, so the next chunk starts with it.
    - Where sequences are cut out of a stream of documents, each chunk that ends inside a sequence
      adds a segment to it, so chunks are many sequences long.
    - Text of longer tokens is cut by its bytes (about four per token), and its tokens are cut into
      sequences later.
    """
    if packing == "first_fit" and exact:
        return length, length - 1
    return _SEQUENCES_PER_CHUNK * length, _SEQUENCES_PER_CHUNK * length


def sequence_stream(
    chunks: Chunks | ChunkLengths,
    stream: int,
    *,
    length: int,
    batch: int,
    packing: Packing,
    seed: int,
    epochs: int | None,
) -> grain.IterDataset:
    """The stream of sequences at batch index ``stream``.

    The chunks of all epochs are in one shuffled order, of which each stream takes every
    ``batch``-th. So streams share no chunk, together they have each chunk once per epoch, and they
    are independent of each other.

    Arguments are those of :class:`burst_jax.data.Loader`; ``length`` includes the last target.

    Returns:
      A dataset of :data:`Packed`, with ``tokens`` and ``tokens_segment_ids``, int32 ``[length]``.
    """
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    source: Any = chunks  # Implements grain's data source protocol.
    documents = grain.MapDataset.source(source).shuffle(seed=shuffle_seed).repeat(epochs)
    # Streams share the threads of StackedStreams and need none of their own.
    in_order = documents[stream::batch].to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    cut = _Cut(length if packing == "first_fit" else None, len(chunks))
    parts = FlatMapIterDataset(in_order, cut)
    if packing != "first_fit":
        return ConcatThenSplitIterDataset(parts, length_struct={"tokens": length})
    bins = max(2, min(_BINS, _BIN_TOKENS // length))
    return FirstFitPackIterDataset(
        parts, length_struct={"tokens": length}, num_packing_bins=bins, seed=shuffle_seed
    )


class _Cut(FlatMapTransform):
    """Cuts chunks longer than a sequence and drops those without a token to predict.

    Each part starts with the last token of the previous one, so that every token but the first of a
    chunk is a target once. With ``length`` None, only empty chunks are dropped.

    If everything is dropped, an endless stream would wait forever for its first sequence, so it
    raises after enough chunks to be certain in any order.
    """

    max_fan_out = sys.maxsize

    def __init__(self, length: int | None, chunks: int):
        self._length = length
        self._dropped, self._max_dropped = 0, 32 * chunks

    def flat_map(self, element: Packed) -> list[Packed]:
        parts = self._parts(element)
        self._dropped = 0 if parts else self._dropped + 1
        if self._dropped > self._max_dropped:
            raise ValueError(
                "corpus has no tokens to predict: its documents are empty or of a single token; "
                "use others, or add a separator to the tokens"
            )
        return parts

    def _parts(self, element: Packed) -> list[Packed]:
        tokens, length = element["tokens"], self._length
        if length is None:
            return [element] if len(tokens) else []
        if len(tokens) <= length:
            return [element] if len(tokens) > 1 else []
        return [
            {"tokens": tokens[start : start + length]}
            for start in range(0, len(tokens) - 1, length - 1)
        ]


class _StackedStreams(grain.IterDataset):
    """Sequences of several streams, stacked: ``[streams, length]``.

    A stream that has ended yields padding indefinitely.
    """

    def __init__(self, streams: Sequence[grain.IterDataset], length: int):
        super().__init__(streams)
        self._streams, self._length = streams, length

    def __iter__(self) -> grain.DatasetIterator:
        return _StackedIterator([stream.__iter__() for stream in self._streams], self._length)


class _StackedIterator(grain.DatasetIterator):
    def __init__(self, streams: Sequence[grain.DatasetIterator], length: int):
        super().__init__(streams)
        self._length = length
        self._ended = [False] * len(streams)

    def __next__(self) -> Packed:
        shape = len(self._parents), self._length
        stacked = {name: np.zeros(shape, np.int32) for name in ("tokens", "tokens_segment_ids")}
        for index, stream in enumerate(self._parents):
            if self._ended[index]:
                continue
            try:
                one = next(stream)
            except StopIteration:
                self._ended[index] = True
            else:
                for name, array in stacked.items():
                    array[index] = one[name]
        return stacked

    def get_state(self) -> dict[str, Any]:
        return {"streams": [stream.get_state() for stream in self._parents]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._ended = [False] * len(self._parents)
        for stream, saved in zip(self._parents, state["streams"], strict=True):
            stream.set_state(saved)


def prefetched(
    streams: Sequence[grain.IterDataset], length: int, ahead: int
) -> grain.DatasetIterator:
    """Stacked sequences of several streams, prefetched by a thread, ``ahead`` batches."""
    return iter(
        ThreadPrefetchIterDataset(_StackedStreams(streams, length), prefetch_buffer_size=ahead)
    )


def stream_states(iterator: grain.DatasetIterator) -> list[Any]:
    """The state of each stream of :func:`prefetched` after the last batch, as JSON values."""
    return json.loads(json.dumps(iterator.get_state()["streams"]))


def set_stream_states(iterator: grain.DatasetIterator, states: list[Any]) -> None:
    """Restores each stream from :func:`stream_states`."""
    iterator.set_state({"streams": [_with_tuples(state) for state in states]})


def _with_tuples(state: Any) -> Any:
    """A state with tuples instead of JSON's lists: grain compares tuples in its states."""
    if isinstance(state, dict):
        return {name: _with_tuples(value) for name, value in state.items()}
    return tuple(map(_with_tuples, state)) if isinstance(state, list) else state
