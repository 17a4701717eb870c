"""The loader: rows of every batch, endless or for some epochs, whose state can be saved."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Iterable, Iterator
from typing import Self, TypedDict, get_args

import grain
import numpy as np

from burst_jax.data.corpus import Corpus
from burst_jax.data.pieces import Counted, Pieces
from burst_jax.data.rows import (
    MAX_PIECES,
    Packing,
    Row,
    count_rows,
    empty_rows,
    piece_sizes,
    prefetched,
    row_stream,
    set_stream_states,
    stream_states,
)
from burst_jax.data.states import VERSION, State, check_same
from burst_jax.data.tokens import ByteTokens, Tokens
from burst_jax.errors import check_integer

# Threads that make rows: tokenizers and reads release Python's lock, packing does not.
_THREADS = 4


class Rows(TypedDict):
    """Rows of a batch, the arguments of :func:`burst_jax.training.make_batch`.

    Attributes:
      rows: int32 ``[rows, seq_len + 1]``, token ids.
      segment_ids: int32 ``[rows, seq_len + 1]``, counted from 1 in each row, 0 for padding; None if
        each row is full and one segment.
    """

    rows: np.ndarray
    segment_ids: np.ndarray | None


class Loader(Iterator[Rows]):
    """Rows of token ids for every batch, of which a process makes its own alone.

    ::

        with Loader(corpus, seq_len=1024, batch=8) as loader:
            for rows in loader:
                batch = make_batch(**rows, layout="zigzag", num_shards=4)

    **Order.** Documents are cut into pieces, see below. An epoch has each piece once, in an order
    that ``seed`` and the epoch make. Row i of all batches is a stream of its own, which takes every
    ``batch``-th piece. So a batch is the same whoever makes it: the rows of 1, 2 or 4 processes,
    joined, are the same bits, and no process reads the documents of another one's rows.

    **Packing.** It says what becomes of the ends of documents:

    - ``"first_fit"``: a document that fits into a row stands in it whole, beside others, and the
      rest of the row is padding. A longer document is cut into rows. Each of them starts with the
      last token of the one before, so each token but the document's first is predicted once. The
      last part shares a row with other documents. A document of a single token is left out,
      because it has nothing to predict. Up to 16 rows of a stream are filled at a time.
    - ``"split"``: documents stand one after the other without padding, and rows are cut out of this
      stream. A document that does not fit goes on in the stream's next row, as another segment. The
      first token of a row is not predicted.
    - ``"none"``: as ``"split"``, but a row is one segment, so attention crosses the documents in
      it.

    **Pieces.** Long documents are shuffled in pieces of a row for ``"first_fit"``, else of 16 rows.
    A text file whose tokens are not bytes is cut every ``16 * (seq_len + 1)`` bytes, at the end of
    a line if there is one; tokens beside that cut can differ from those of the whole text. A JSON
    line is one piece.

    **End.** With ``epochs`` a stream that has no more pieces gives padding until all streams have
    ended. A loader of a part of the rows has to know when that is. So it counts the tokens of all
    pieces when it is made. This is quick for bytes of text files and for arrays; otherwise it reads
    everything once.

    Args:
      corpus: the documents, see :func:`burst_jax.data.open_corpus`.
      seq_len: tokens in a row of the model; rows have one more, the last target.
      batch: rows of a batch, on all processes together.
      rows: which of them this loader makes, like ``range(4, 8)``, see
        :func:`burst_jax.data.rows_of_process`; None for all.
      tokens: makes token ids of text, by default :class:`burst_jax.data.ByteTokens`; None for
        arrays.
      vocab_size: of the model; ids that it does not have raise an error. None takes the vocabulary
        of ``tokens``, and checks an array's ids only for being negative.
      packing: ``"first_fit"``, ``"split"`` or ``"none"``.
      seed: of the order, at least 0.
      epochs: how often each document comes, or None for endlessly.
      prefetch: batches that threads make ahead, or 0 for no threads.

    Attributes:
      vocab_size: see above; None if nobody said it.
      step: the number of batches given so far.

    Raises:
      ValueError: an argument is out of its range, or does not fit the others. A document that
        cannot be read raises when its batch is asked for, with the name of its file and line.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        batch: int,
        rows: Iterable[int] | None = None,
        tokens: Tokens | None = None,
        vocab_size: int | None = None,
        packing: Packing = "first_fit",
        seed: int = 0,
        epochs: int | None = None,
        prefetch: int = 2,
    ):
        self._row = check_integer("seq_len", seq_len, 1) + 1
        self._batch = check_integer("batch", batch, 1)
        self._rows = _check_rows(rows, self._batch)
        self._prefetch = check_integer("prefetch", prefetch, 0)
        self._seed = check_integer("seed", seed, 0)
        self._epochs = None if epochs is None else check_integer("epochs", epochs, 1)
        if packing not in get_args(Packing):
            raise ValueError(
                f"packing is {packing!r}: use one of {', '.join(map(repr, get_args(Packing)))}"
            )
        tokens = _check_tokens(corpus, tokens)
        self.vocab_size = _check_vocabulary(tokens, vocab_size)
        exact = corpus.reader.divisible and (tokens is None or tokens.is_bytes)
        length, stride = piece_sizes(packing, self._row, exact=exact)
        self._pieces = Pieces(corpus, tokens, self.vocab_size, length=length, stride=stride)
        _check_size(corpus, self._pieces, self._row, packing)
        self._packing: Packing = packing
        self._options = {
            "documents": corpus.fingerprint(),
            "tokens": None if tokens is None else tokens.fingerprint(),
            "seq_len": self._row - 1,
            "batch": self._batch,
            "packing": packing,
            "seed": self._seed,
            "epochs": self._epochs,
        }
        self.step = 0
        self._steps = None
        if epochs is not None and len(self._rows) < self._batch:
            self._steps = self._count_steps()
        self._iterators = self._start()
        self._ended = [False] * len(self._iterators)
        # Also where nobody closes it: at the interpreter's end grain can no longer do it quietly.
        self._finalize = weakref.finalize(self, _close, self._iterators)

    def __next__(self) -> Rows:
        self._check_open()
        if self.step == self._steps:
            raise StopIteration
        parts = [self._next_of(group) for group in range(len(self._iterators))]
        if self._steps is None and all(self._ended):
            raise StopIteration
        self.step += 1
        tokens, segment_ids = (
            np.concatenate([part[name] for part in parts])
            for name in ("tokens", "tokens_segment_ids")
        )
        if self._packing != "none":
            return {"rows": tokens, "segment_ids": segment_ids}
        # Without an end every row is full.
        ends = self._epochs is not None
        return {"rows": tokens, "segment_ids": np.minimum(segment_ids, 1) if ends else None}

    def get_state(self) -> State:
        """What a loader needs to give the batches that follow the last one given.

        It is a dict for ``json.dumps``, of a few hundred bytes a row. It has this loader's rows
        alone: :func:`burst_jax.data.gather_state` joins the states of all processes into one that
        any number of processes can start from.
        """
        self._check_open()
        states = [
            of_stream for iterator in self._iterators for of_stream in stream_states(iterator)
        ]
        rows = dict(zip(map(str, self._rows), states, strict=True))
        return {"version": VERSION, "step": self.step, "options": self._options, "rows": rows}

    def set_state(self, state: State) -> None:
        """Goes on after the batch that a state was taken after.

        It reads again what the next rows are packed from, some rows of each stream, and nothing
        before that.

        Args:
          state: from :meth:`get_state` of this loader or any other with the same documents and
            options. ``rows`` and ``prefetch`` may differ, if the state has the rows of this loader.

        Raises:
          ValueError: the state is none, is of other documents or options, or lacks rows.
        """
        self._check_open()
        known = isinstance(state, dict) and state.get("version") == VERSION
        if not known or not {"step", "options", "rows"} <= state.keys():
            raise ValueError(
                f"state is {str(state)[:60]!r}: it must be what get_state returned, of version "
                f"{VERSION}"
            )
        check_same(state["options"], self._options)
        missing = [row for row in self._rows if str(row) not in state["rows"]]
        if missing:
            raise ValueError(
                f"state has rows {', '.join(state['rows'])} of the batch, this loader needs "
                f"{missing} too: save the state that gather_state or merge_states joins of all "
                "processes"
            )
        _close(self._iterators)
        self._iterators += self._start()
        self._ended = [False] * len(self._iterators)
        for group, iterator in zip(self._groups(), self._iterators, strict=True):
            set_stream_states(iterator, [state["rows"][str(row)] for row in group])
        self.step = state["step"]

    def close(self) -> None:
        """Ends the threads. It may be called twice; no batch can be taken afterwards."""
        self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalize.alive:
            raise ValueError("the loader is closed: make another one, and give it the state")

    def _next_of(self, group: int) -> Row:
        """The next rows of a group, empty ones if all of its streams have ended."""
        if not self._ended[group]:
            try:
                return next(self._iterators[group])
            except StopIteration:
                self._ended[group] = True
        return empty_rows(len(self._groups()[group]), self._row)

    def _groups(self) -> list[list[int]]:
        """The loader's rows in parts, each of which has a thread."""
        threads = min(_THREADS, len(self._rows))
        return [part.tolist() for part in np.array_split(np.array(self._rows), threads)]

    def _start(self) -> list[grain.DatasetIterator]:
        """For each group its rows from the first batch on."""
        streams = [[self._stream(self._pieces, row) for row in group] for group in self._groups()]
        return [prefetched(group, self._row, self._prefetch) for group in streams]

    def _stream(self, pieces: Pieces | Counted, stream: int) -> grain.IterDataset:
        return row_stream(
            pieces,
            stream,
            row=self._row,
            batch=self._batch,
            packing=self._packing,
            seed=self._seed,
            epochs=self._epochs,
        )

    def _count_steps(self) -> int:
        """The number of batches: the rows of the longest stream of all processes."""
        counted = Counted(self._pieces)
        streams = (self._stream(counted, stream) for stream in range(self._batch))
        return max(count_rows(stream) for stream in streams)


def _close(iterators: list[grain.DatasetIterator]) -> None:
    for iterator in iterators:
        iterator.close()
    iterators.clear()


def _check_rows(rows: Iterable[int] | None, batch: int) -> list[int]:
    rows = range(batch) if rows is None else rows
    chosen = list(rows) if isinstance(rows, Iterable) else []
    valid = all(isinstance(row, numbers.Integral) and 0 <= row < batch for row in chosen)
    if not chosen or not valid or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"rows is {rows}, batch {batch}: it must name rows of the batch, from 0 to batch - 1, "
            "each once, like rows_of_process(batch, process, processes)"
        )
    return [int(row) for row in chosen]


def _check_tokens(corpus: Corpus, tokens: Tokens | None) -> Tokens | None:
    if not isinstance(corpus, Corpus):
        raise ValueError(f"corpus is {corpus!r}: make it with open_corpus(path)")
    if corpus.reader.is_text:
        return ByteTokens() if tokens is None else tokens
    if tokens is not None:
        raise ValueError(
            f"tokens is {tokens!r}, but {corpus.description} has arrays of token ids already: pass "
            "tokens=None"
        )
    return None


def _check_vocabulary(tokens: Tokens | None, vocab_size: int | None) -> int | None:
    if vocab_size is not None:
        check_integer("vocab_size", vocab_size, 1)
    if tokens is None:
        return vocab_size
    if vocab_size is not None and tokens.vocab_size > vocab_size:
        raise ValueError(
            f"vocab_size is {vocab_size}, but {tokens!r} makes ids up to {tokens.vocab_size - 1}: "
            f"give the model a vocabulary of {tokens.vocab_size} or more"
        )
    return tokens.vocab_size if vocab_size is None else vocab_size


def _check_size(corpus: Corpus, pieces: Pieces, row: int, packing: Packing) -> None:
    if not len(pieces):
        raise ValueError(
            f"corpus is {corpus!r}: there is nothing to read; was held_out=0 asked for, or are "
            "there too few documents?"
        )
    if len(pieces) >= MAX_PIECES:
        raise ValueError(
            f"corpus has {len(pieces)} pieces of documents: fewer than {MAX_PIECES} can be "
            "shuffled; use a longer seq_len, or train on a part"
        )
    if packing == "none" and corpus.size < row:
        raise ValueError(
            f"seq_len is {row - 1}, and {corpus!r} has {corpus.size} bytes or tokens in all, less "
            f"than a row of {row}: use a shorter seq_len, more documents, or packing='first_fit', "
            "which pads"
        )
