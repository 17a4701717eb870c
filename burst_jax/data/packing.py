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


def chunk_sizes(
    packing: Packing, length: int, *, exact: bool, chats: bool = False
) -> tuple[int, int]:
    """Length and stride of :class:`Chunks` for sequences of ``length`` tokens.

    - ``"first_fit"`` packs whole chunks, so an exact chunk is one sequence. The last token of a
      sequence is only a target, so the next chunk starts with it.
    - Where sequences are cut out of a stream of documents, each chunk that ends inside a sequence
      adds a segment to it, so chunks are many sequences long.
    - Text of longer tokens is cut by its bytes (about four per token), and its tokens are cut into
      sequences later.

    Conversations are never cut into chunks: their length is that of a sequence.
    """
    if chats:
        return length, length
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
    chats: bool = False,
) -> grain.IterDataset:
    """The stream of sequences at batch index ``stream``.

    The chunks of all epochs are in one shuffled order, of which each stream takes every
    ``batch``-th. So streams share no chunk, together they have each chunk once per epoch, and they
    are independent of each other.

    Arguments are those of :class:`burst_jax.data.Loader`; ``length`` includes the last target, and
    ``chats`` specifies whether the chunks are conversations.

    Returns:
      A dataset of :data:`Packed`, with ``tokens`` and ``tokens_segment_ids``, int32 ``[length]``,
      and ``weights``, float32 ``[length]``, if the chunks have them.
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
    features = ("tokens", "weights") if chats else ("tokens",)
    return FirstFitPackIterDataset(
        parts,
        length_struct=dict.fromkeys(features, length),
        num_packing_bins=bins,
        seed=shuffle_seed,
    )


class _Cut(FlatMapTransform):
    """Cuts chunks longer than a sequence and drops those without a token to predict.

    Each part starts with the last token of the previous one, so that every token but the first of a
    chunk is a target once. With ``length`` None, only empty chunks are dropped. Of conversations,
    each sequence is cut by itself, and parts are dropped whose targets all have weight 0.

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
        if "weights" not in element:
            return self._parts_of(element)
        ends = np.cumsum(element["lengths"])[:-1]
        arrays = (np.split(element[name], ends) for name in ("tokens", "weights"))
        found = []
        for tokens, weights in zip(*arrays, strict=True):
            found += self._parts_of({"tokens": tokens, "weights": weights})
        return [part for part in found if part["weights"][1:].any()]

    def _parts_of(self, element: Packed) -> list[Packed]:
        tokens, length = element["tokens"], self._length
        if length is None:
            return [element] if len(tokens) else []
        if len(tokens) <= length:
            return [element] if len(tokens) > 1 else []
        return [
            {name: array[start : start + length] for name, array in element.items()}
            for start in range(0, len(tokens) - 1, length - 1)
        ]


class _StackedStreams(grain.IterDataset):
    """Sequences of several streams, stacked: ``[streams, length]``.

    A stream that has ended yields padding indefinitely.
    """

    def __init__(self, streams: Sequence[grain.IterDataset], length: int, chats: bool):
        super().__init__(streams)
        self._streams, self._length, self._chats = streams, length, chats

    def __iter__(self) -> grain.DatasetIterator:
        streams = [stream.__iter__() for stream in self._streams]
        return _StackedIterator(streams, self._length, self._chats)


class _StackedIterator(grain.DatasetIterator):
    def __init__(self, streams: Sequence[grain.DatasetIterator], length: int, chats: bool):
        super().__init__(streams)
        self._length = length
        dtypes = {"tokens": np.int32, "tokens_segment_ids": np.int32}
        self._dtypes: dict[str, Any] = dtypes | ({"weights": np.float32} if chats else {})
        self._ended = [False] * len(streams)

    def __next__(self) -> Packed:
        shape = len(self._parents), self._length
        stacked = {name: np.zeros(shape, dtype) for name, dtype in self._dtypes.items()}
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
    streams: Sequence[grain.IterDataset], length: int, ahead: int, chats: bool = False
) -> grain.DatasetIterator:
    """Stacked sequences of several streams, prefetched by a thread, ``ahead`` batches."""
    stacked = _StackedStreams(streams, length, chats)
    return iter(ThreadPrefetchIterDataset(stacked, prefetch_buffer_size=ahead))


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
