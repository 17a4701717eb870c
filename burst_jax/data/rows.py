"""From pieces of documents to streams of rows, by grain's packing: a stream per row of a batch."""

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

from burst_jax.data.pieces import Counted, Pieces

Packing = Literal["first_fit", "split", "none"]
# Rows' worth of a long document that stay together in a stream, see plan_pieces.
_ROWS_PER_PIECE = 16
# Most rows that first-fit fills at once in a stream, and most tokens in them.
_BINS, _BIN_TOKENS = 16, 1 << 20
# grain shuffles numbers of 32 bits.
MAX_PIECES = 2**32

# A row of tokens as grain's packing names it.
type Row = dict[str, np.ndarray]


def piece_sizes(packing: Packing, row: int, *, exact: bool) -> tuple[int, int]:
    """The length and the stride of :class:`Pieces` for rows of ``row`` tokens.

    - ``"first_fit"`` packs pieces whole, so a piece of exact tokens is a row. A row's last token is
      only a target, so the next piece starts with it.
    - Where rows are cut out of a stream of documents, each piece that ends inside a row makes one
      more segment there. So pieces are many rows long.
    - A text of longer tokens is cut by its bytes, of which a token has four or so, and the tokens
      are cut into rows later.
    """
    if packing == "first_fit" and exact:
        return row, row - 1
    return _ROWS_PER_PIECE * row, _ROWS_PER_PIECE * row


def row_stream(
    pieces: Pieces | Counted,
    stream: int,
    *,
    row: int,
    batch: int,
    packing: Packing,
    seed: int,
    epochs: int | None,
) -> grain.IterDataset:
    """The stream of rows that makes row ``stream`` of every batch.

    The pieces of all epochs stand in one shuffled order, of which each stream takes every
    ``batch``-th. So the streams share no piece, all together they have each piece once an epoch,
    and a stream depends on nothing that happens in another one.

    Args:
      pieces: the pieces of the documents.
      stream: which row of the batch it is.
      row: tokens in a row.
      batch: number of streams.
      packing: see :class:`burst_jax.data.Loader`.
      seed: of the order.
      epochs: how often each piece comes, or None for endlessly.

    Returns:
      A dataset of :data:`Row`, with ``tokens`` and ``tokens_segment_ids``, int32 ``[row]``.
    """
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    source: Any = pieces  # Not grain's own type, but all that it needs of one.
    documents = grain.MapDataset.source(source).shuffle(seed=shuffle_seed).repeat(epochs)
    # One thread makes all rows of some streams, see JoinedRows: none is needed for each of them.
    in_order = documents[stream::batch].to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )
    cut = _Parts(row if packing == "first_fit" else None, len(pieces))
    parts = FlatMapIterDataset(in_order, cut)
    if packing != "first_fit":
        return ConcatThenSplitIterDataset(parts, length_struct={"tokens": row})
    bins = max(2, min(_BINS, _BIN_TOKENS // row))
    return FirstFitPackIterDataset(
        parts, length_struct={"tokens": row}, num_packing_bins=bins, seed=shuffle_seed
    )


class _Parts(FlatMapTransform):
    """Cuts a piece that is longer than a row, and leaves out parts that have no token to predict.

    The next part starts with the last token of the one before, so that each token but the first of
    a piece is a target once. Without a ``row`` nothing is cut here, and only what is empty is left
    out.

    Where all is left out an endless stream would wait for its first row for ever. So it gives up
    after as many pieces as make it certain, whatever their order.
    """

    max_fan_out = sys.maxsize

    def __init__(self, row: int | None, pieces: int):
        self._row = row
        self._left_out, self._most_left_out = 0, 32 * pieces

    def flat_map(self, element: Row) -> list[Row]:
        parts = self._parts(element)
        self._left_out = 0 if parts else self._left_out + 1
        if self._left_out > self._most_left_out:
            raise ValueError(
                "corpus has no tokens to predict: its documents are empty or of a single token; "
                "use others, or add a separator to the tokens"
            )
        return parts

    def _parts(self, element: Row) -> list[Row]:
        tokens, row = element["tokens"], self._row
        if row is None:
            return [element] if len(tokens) else []
        if len(tokens) <= row:
            return [element] if len(tokens) > 1 else []
        return [
            {"tokens": tokens[start : start + row]} for start in range(0, len(tokens) - 1, row - 1)
        ]


class JoinedRows(grain.IterDataset):
    """Rows of several streams, in their order: ``[streams, row]``.

    A stream that has ended gives empty rows, until all have ended.
    """

    def __init__(self, streams: Sequence[grain.IterDataset], row: int):
        super().__init__(streams)
        self._streams, self._row = streams, row

    def __iter__(self) -> grain.DatasetIterator:
        return _JoinedIterator([stream.__iter__() for stream in self._streams], self._row)


class _JoinedIterator(grain.DatasetIterator):
    def __init__(self, streams: Sequence[grain.DatasetIterator], row: int):
        super().__init__(streams)
        self._row = row
        self._ended = [False] * len(streams)

    def __next__(self) -> Row:
        rows = empty_rows(len(self._parents), self._row)
        for index, stream in enumerate(self._parents):
            if self._ended[index]:
                continue
            try:
                one = next(stream)
            except StopIteration:
                self._ended[index] = True
            else:
                for name, into in rows.items():
                    into[index] = one[name]
        if all(self._ended):
            raise StopIteration
        return rows

    def get_state(self) -> dict[str, Any]:
        return {"streams": [stream.get_state() for stream in self._parents]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._ended = [False] * len(self._parents)
        for stream, of_stream in zip(self._parents, state["streams"], strict=True):
            stream.set_state(of_stream)


def prefetched(streams: Sequence[grain.IterDataset], row: int, ahead: int) -> grain.DatasetIterator:
    """Rows of several streams, made by a thread that stays ``ahead`` of what is taken."""
    return iter(ThreadPrefetchIterDataset(JoinedRows(streams, row), prefetch_buffer_size=ahead))


def empty_rows(rows: int, row: int) -> Row:
    """Rows of padding, ``[rows, row]``."""
    return {name: np.zeros((rows, row), np.int32) for name in ("tokens", "tokens_segment_ids")}


def stream_states(iterator: grain.DatasetIterator) -> list[Any]:
    """The state of each stream of :func:`prefetched`, after the rows last taken, for JSON."""
    return json.loads(json.dumps(iterator.get_state()["streams"]))


def set_stream_states(iterator: grain.DatasetIterator, states: list[Any]) -> None:
    """Restores each stream from :func:`stream_states`."""
    iterator.set_state({"streams": [_with_tuples(state) for state in states]})


def _with_tuples(state: Any) -> Any:
    """A state with tuples where JSON made lists of them: grain compares tuples in its states."""
    if isinstance(state, dict):
        return {name: _with_tuples(value) for name, value in state.items()}
    return tuple(map(_with_tuples, state)) if isinstance(state, list) else state


def count_rows(stream: grain.IterDataset) -> int:
    """How many rows a stream has that ends."""
    return sum(1 for _ in stream)
