"""The loader: packed sequences of every batch, whose state can be saved and resumed exactly."""

from __future__ import annotations

import numbers
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NotRequired, Self, TypedDict, get_args

import grain
import numpy as np

from burst_jax.data.chats import ChatTokens
from burst_jax.data.chunks import ChunkLengths, Chunks
from burst_jax.data.corpus import Corpus
from burst_jax.data.packing import (
    MAX_CHUNKS,
    Packing,
    chunk_sizes,
    prefetched,
    sequence_stream,
    set_stream_states,
    stream_states,
)
from burst_jax.data.tokens import ByteTokens, Tokenizer
from burst_jax.errors import MAX_BATCH, check_integer, first_of, printable, shown
from burst_jax.parallel.processes import gather_json

type State = dict[str, Any]

VERSION = 1
_INDEX = re.compile("0|[1-9][0-9]{0,18}")
# What grain and numpy raise for a place that a stream does not have.
_DAMAGED = (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
# Threads that make batches: tokenizers and reads release Python's lock, packing does not.
_THREADS = 4


class Rows(TypedDict):
    """Sequences of a batch, the arguments of :func:`burst_jax.training.make_batch`.

    Attributes:
      rows: int32 ``[B, seq_len + 1]``, token ids.
      segment_ids: int32 ``[B, seq_len + 1]``, counted from 1 in each sequence, 0 for padding; None
        if each sequence is full and one segment.
      weights: float32 ``[B, seq_len + 1]``, the weight of predicting each token, 1 for what the
        assistant writes, else 0; of conversations alone.
    """

    rows: np.ndarray
    segment_ids: np.ndarray | None
    weights: NotRequired[np.ndarray]


class Loader(Iterator[Rows]):
    """Token sequences of every batch; each process makes only its own.

    ::

        with Loader(corpus, seq_len=1024, batch=8) as loader:
            for rows in loader:
                batch = make_batch(**rows, layout="zigzag", num_shards=4)

    **Order.** Documents are cut into chunks, see below. An epoch has each chunk once, in an order
    that depends on ``seed`` and the epoch. Each batch index is a stream of its own, of every
    ``batch``-th chunk. So batches do not depend on the number of processes, and no process reads
    documents of another's sequences.

    **Packing.**

    - ``"first_fit"``: documents that fit are never split; several share a sequence, and the rest is
      padding. A longer document is cut into sequences, each starting with the last token of the
      previous one, so every token but the document's first is predicted once; the last part shares
      a sequence. Documents of one token are dropped. Each stream keeps up to 16 sequences open.
    - ``"split"``: documents are concatenated without padding, and sequences are cut out of this
      stream. A document that does not fit continues in the next sequence as a new segment, whose
      first token is not predicted.
    - ``"none"``: as ``"split"``, but a sequence is one segment, so attention crosses documents.

    **Chunks.** Long documents are shuffled in chunks of one sequence for ``"first_fit"``, else of
    16. A text file whose tokens are not bytes is cut every ``16 * (seq_len + 1)`` bytes, at the end
    of a line if there is one; tokens next to a cut can differ from those of the whole text. A JSON
    line is one chunk.

    **Conversations.** With :class:`burst_jax.data.ChatTokens` a document is a conversation, and
    sequences have weights. They are packed by ``"first_fit"`` alone, which keeps them whole.

    **End.** With ``epochs``, a stream without further chunks yields padding until all streams have
    ended. To know when, a loader of part of the batch counts all tokens when it is created: fast
    for bytes of text files and for arrays, otherwise it reads everything once.

    Args:
      corpus: the documents, see :func:`burst_jax.data.open_corpus`.
      seq_len: tokens per sequence of the model; each has one more, the last target.
      batch: global batch size, over all processes, at most 1,048,576.
      rows: batch indices that this loader makes, like ``range(4, 8)``, see
        :func:`burst_jax.data.rows_of_process`; None for all.
      tokens: tokenizer of text, default :class:`burst_jax.data.ByteTokens`; None for arrays;
        :class:`burst_jax.data.ChatTokens` for conversations.
      vocab_size: of the model; other ids raise an error. None is the tokenizer's vocabulary; ids in
        arrays are then only checked for being negative.
      packing: ``"first_fit"``, ``"split"`` or ``"none"``.
      seed: seed of the order, at least 0.
      epochs: number of epochs, or None for endless.
      prefetch: batches that threads make ahead, or 0 for no threads.

    Attributes:
      vocab_size: see above; None if unknown.
      step: number of batches returned so far.

    Raises:
      ValueError: an argument is out of range or does not fit the others. A document that cannot be
        read raises when its batch is requested, with the name of its file and line.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seq_len: int,
        batch: int,
        rows: Iterable[int] | None = None,
        tokens: Tokenizer | None = None,
        vocab_size: int | None = None,
        packing: Packing = "first_fit",
        seed: int = 0,
        epochs: int | None = None,
        prefetch: int = 2,
    ):
        self._length = check_integer("seq_len", seq_len, 1) + 1
        self._batch = check_integer("batch", batch, 1, MAX_BATCH)
        self._indices = _check_rows(rows, self._batch)
        prefetch = check_integer("prefetch", prefetch, 0)
        self._seed = check_integer("seed", seed, 0)
        self._epochs = None if epochs is None else check_integer("epochs", epochs, 1)
        if packing not in get_args(Packing):
            raise ValueError(
                f"packing is {packing!r}: use one of {', '.join(map(repr, get_args(Packing)))}"
            )
        tokens = _check_tokens(corpus, tokens)
        self.vocab_size = _check_vocabulary(tokens, vocab_size)
        exact = corpus.reader.divisible and (tokens is None or tokens.is_bytes)
        self._chats = isinstance(tokens, ChatTokens)
        if self._chats and packing != "first_fit":
            raise ValueError(
                f"packing is {packing!r}, which cuts conversations anywhere: use 'first_fit', "
                "which keeps them whole"
            )
        length, stride = chunk_sizes(packing, self._length, exact=exact, chats=self._chats)
        self._chunks = Chunks(corpus, tokens, self.vocab_size, length=length, stride=stride)
        _check_size(corpus, self._chunks, self._length, packing)
        # Sequences of the longest document.
        self._most = corpus.size // self._length + 16
        self._packing: Packing = packing
        self._options = {
            "documents": corpus.fingerprint(),
            "tokens": None if tokens is None else tokens.fingerprint(),
            "seq_len": self._length - 1,
            "batch": self._batch,
            "packing": packing,
            "seed": self._seed,
            "epochs": self._epochs,
        }
        self._stream = partial(
            sequence_stream,
            length=self._length, batch=self._batch, packing=packing, seed=self._seed, epochs=epochs,
            chats=self._chats,
        )  # fmt: skip
        self.step, self._resumed = 0, False
        self._steps = None
        if epochs is not None and len(self._indices) < self._batch:
            self._steps = self._count_steps()
        self._iterators = [
            prefetched(
                [self._stream(self._chunks, index) for index in group],
                self._length,
                prefetch,
                self._chats,
            )
            for group in self._groups()
        ]
        # Also without close(): at interpreter shutdown grain prints errors.
        self._finalize = weakref.finalize(self, _close, self._iterators)

    def __next__(self) -> Rows:
        self._check_open()
        if self.step == self._steps:
            raise StopIteration
        try:
            parts = [next(iterator) for iterator in self._iterators]
        except _DAMAGED as error:
            if self._resumed:
                raise _damaged(self._indices, error) from error
            raise
        self._resumed = False
        stacked = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        tokens, segment_ids = stacked["tokens"], stacked["tokens_segment_ids"]
        if self._steps is None and not segment_ids.any():
            raise StopIteration  # All streams have ended.
        self.step += 1
        if self._chats:
            return {"rows": tokens, "segment_ids": segment_ids, "weights": stacked["weights"]}
        if self._packing != "none":
            return {"rows": tokens, "segment_ids": segment_ids}
        # An endless stream has no padding.
        ends = self._epochs is not None
        return {"rows": tokens, "segment_ids": np.minimum(segment_ids, 1) if ends else None}

    def get_state(self) -> State:
        """State after the last batch, from which a loader continues.

        A JSON value of a few hundred bytes per sequence of this loader.
        :func:`burst_jax.data.gather_state` merges the states of all processes into one that any
        number of processes can resume from.
        """
        self._check_open()
        states = [state for iterator in self._iterators for state in stream_states(iterator)]
        rows = dict(zip(map(str, self._indices), states, strict=True))
        return {"version": VERSION, "step": self.step, "options": self._options, "rows": rows}

    def set_state(self, state: State) -> None:
        """Resumes after the batch at which ``state`` was taken.

        Reads only the documents that the next sequences are packed from.

        Args:
          state: from :meth:`get_state` of any loader with the same documents and options. ``rows``
            and ``prefetch`` may differ if the state covers this loader's batch indices.

        Raises:
          ValueError: it is no state, has other documents or options, or lacks batch indices. The
            next batch raises if the state names a place that the documents do not have.
        """
        self._check_open()
        rows = _check_state(state)["rows"]
        _check_same_options(state["options"], self._options)
        missing = [index for index in self._indices if str(index) not in rows]
        if missing:
            raise ValueError(
                f"state has rows {first_of(rows)} of the batch, this loader also needs {missing}: "
                "save the result of gather_state or merge_states over all processes"
            )
        own = self.get_state()["rows"]
        for index in map(str, self._indices):
            _check_stream(f"state has rows.{index}", rows[index], own[index], self._most)
        for group, iterator in zip(self._groups(), self._iterators, strict=True):
            try:
                set_stream_states(iterator, [rows[str(index)] for index in group])
            except _DAMAGED as error:
                for others, each in zip(self._groups(), self._iterators, strict=True):
                    set_stream_states(each, [own[str(index)] for index in others])
                raise _damaged(group, error) from error
        self.step = state["step"]
        self._resumed = True

    def close(self) -> None:
        """Ends the threads. It may be called twice; no batch can be requested afterwards."""
        self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalize.alive:
            raise ValueError("the loader is closed: make another one, and give it the state")

    def _groups(self) -> list[list[int]]:
        """The batch indices in groups, each with a thread."""
        threads = min(_THREADS, len(self._indices))
        return [part.tolist() for part in np.array_split(np.array(self._indices), threads)]

    def _count_steps(self) -> int:
        """Number of batches: the length of the longest stream of all processes."""
        # Which parts of a conversation are dropped depends on more than its length.
        lengths = self._chunks if self._chats else ChunkLengths(self._chunks)
        streams = (self._stream(lengths, stream) for stream in range(self._batch))
        return max(sum(1 for _ in stream) for stream in streams)


def rows_of_process(batch: int, process: int, processes: int) -> range:
    """Batch indices of a process if every process loads an equal share.

    It is what ``place_batch(..., process_local=True)`` expects where the mesh's batch axes are
    outermost and divide evenly among processes. Processes whose devices share sequences, because
    the sequence axis spans them, load the same ones: count them as one here.

    Args:
      batch: global batch size.
      process: index of the process, like ``jax.process_index()``.
      processes: number of processes, like ``jax.process_count()``.

    Raises:
      ValueError: the processes do not divide the batch, or there is no such process.
    """
    if processes < 1 or not 0 <= process < processes:
        raise ValueError(
            f"process is {process}, processes {processes}: it must be from 0 to processes - 1"
        )
    if batch % processes:
        raise ValueError(
            f"batch is {batch}, processes {processes}: use a batch that is a multiple of the "
            f"processes, like {-(-batch // processes) * processes}"
        )
    each = batch // processes
    return range(process * each, (process + 1) * each)


def merge_states(states: Iterable[Mapping[str, Any]]) -> State:
    """Merges the states of the loaders of one run, which have different indices of one batch.

    Args:
      states: result of ``Loader.get_state`` on each process, after the same step.

    Returns:
      A state of all their batch indices, for any number of processes.

    Raises:
      ValueError: there are none, or they have different steps, data or options.
    """
    states = [_check_state(state) for state in states]
    if not states:
        raise ValueError("states is empty: pass what Loader.get_state returned on each process")
    first = states[0]
    for other in states[1:]:
        _check_same_options(first["options"], other["options"], "another loader")
        if other["step"] != first["step"]:
            raise ValueError(
                f"states are of steps {first['step']} and {other['step']}: take them from all "
                "processes after the same step"
            )
    rows = {index: stream for state in states for index, stream in state["rows"].items()}
    return {**first, "rows": dict(sorted(rows.items(), key=lambda item: int(item[0])))}


def gather_state(state: State) -> State:
    """The merged states of all processes, on each of them: see :func:`merge_states`.

    A collective of a few hundred bytes per sequence: every process calls it after the same step.
    With one process it returns its argument.

    Args:
      state: result of this process' ``Loader.get_state``.
    """
    return merge_states(gather_json(state))


def _close(iterators: list[grain.DatasetIterator]) -> None:
    for iterator in iterators:
        iterator.close()
    iterators.clear()


def _check_state(state: Any) -> State:
    """Raises ValueError unless ``state`` is a state of a loader; its streams are not checked."""
    remedy = f"it must be what get_state returned, of version {VERSION}"
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"state is {shown(state)}: {remedy}")
    if other := sorted(map(str, state.keys() ^ {"version", "step", "options", "rows"})):
        raise ValueError(f"state lacks, or alone has, {first_of(other)}: {remedy}")
    for name in ("options", "rows"):
        if not isinstance(state[name], Mapping):
            raise ValueError(f"state has {name} {shown(state[name])}: it must be an object")
    _check_stream("state has step", state["step"], 0)
    wrong = [str(name) for name in state["rows"] if not _INDEX.fullmatch(str(name))]
    if wrong:
        raise ValueError(f"state has rows {first_of(wrong)}: their names must be batch indices")
    return dict(state)


def _check_stream(name: str, state: Any, like: Any, most: int = 2**63 - 1) -> None:
    """Raises ValueError unless a stream's state has the form of another one.

    Both are JSON values, as objects, lists and integers. ``most`` limits the sequences that grain
    makes and drops to reach the state.
    """
    if isinstance(like, Mapping):
        if not isinstance(state, Mapping) or state.keys() != like.keys():
            raise ValueError(
                f"{name} {shown(state)}: it must have {', '.join(like)} and nothing else"
            )
        for key in like:
            _check_stream(f"{name}.{key}", state[key], like[key], most)
    elif isinstance(like, list | tuple):
        if not isinstance(state, list | tuple) or len(state) != len(like):
            raise ValueError(f"{name} {shown(state)}: it must have {len(like)} values")
        for index, (each, other) in enumerate(zip(state, like, strict=True)):
            _check_stream(f"{name}.{index}", each, other, most)
    elif type(like) is int:
        # An empty remainder is from -1 to -1.
        least = -1 if "slices" in name else 0
        most = most if "elements_from_buffer" in name else 2**63 - 1
        if type(state) is not int or not least <= state <= most:
            raise ValueError(f"{name} {shown(state)}: it must be an integer, 0 to {most}")
    elif type(state) is not type(like):
        raise ValueError(f"{name} {shown(state)}: it must be a {type(like).__name__}")


def _damaged(rows: list[int], error: Exception) -> ValueError:
    return ValueError(
        f"state has rows {first_of([str(row) for row in rows])}, from which the streams cannot "
        f"resume ({type(error).__name__}: {printable(error)[:200]}): it is damaged; use another one"
    )


def _check_same_options(
    saved: Mapping[str, Any], here: Mapping[str, Any], whose: str = "this loader"
) -> None:
    for name in here:
        if saved.get(name) != here[name]:
            raise ValueError(
                f"the state was saved with {name} {shown(saved.get(name))}, {whose} has "
                f"{here[name]!r}: "
                "use the same documents and options, or start over without the state"
            )


def _check_rows(rows: Iterable[int] | None, batch: int) -> list[int]:
    rows = range(batch) if rows is None else rows
    chosen = list(rows) if isinstance(rows, Iterable) else []
    valid = all(isinstance(row, numbers.Integral) and 0 <= row < batch for row in chosen)
    if not chosen or not valid or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"rows is {rows}, batch {batch}: it must hold distinct batch indices, from 0 to "
            "batch - 1, like rows_of_process(batch, process, processes)"
        )
    return [int(row) for row in chosen]


def _check_tokens(corpus: Corpus, tokens: Tokenizer | None) -> Tokenizer | None:
    if not isinstance(corpus, Corpus):
        raise ValueError(f"corpus is {corpus!r}: make it with open_corpus(path)")
    if corpus.reader.is_chats != isinstance(tokens, ChatTokens):
        raise ValueError(
            f"tokens is {tokens!r}, and corpus {corpus!r}: conversations need ChatTokens, and "
            "ChatTokens need conversations, open_corpus(path, chats=True)"
        )
    if corpus.reader.is_text:
        return ByteTokens() if tokens is None else tokens
    if tokens is not None:
        raise ValueError(
            f"tokens is {tokens!r}, but {corpus.description} has arrays of token ids already: pass "
            "tokens=None"
        )
    return None


def _check_vocabulary(tokens: Tokenizer | None, vocab_size: int | None) -> int | None:
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


def _check_size(corpus: Corpus, chunks: Chunks, length: int, packing: Packing) -> None:
    if not len(chunks):
        raise ValueError(
            f"corpus is {corpus!r}: there is nothing to read; is it the held-out part of "
            "held_out=0, or are there too few documents?"
        )
    if len(chunks) >= MAX_CHUNKS:
        raise ValueError(
            f"corpus has {len(chunks)} chunks of documents: fewer than {MAX_CHUNKS} can be "
            "shuffled; use a longer seq_len, or train on a part"
        )
    if packing == "none" and corpus.size < length:
        raise ValueError(
            f"seq_len is {length - 1}, and {corpus!r} has {corpus.size} bytes or tokens, less than "
            f"one sequence of {length}: use a shorter seq_len, more documents, or "
            "packing='first_fit', which pads"
        )
