"""Documents as chunks of token ids with random access, and saving all tokens to a file."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import grain
import numpy as np

from burst_jax.data.chats import ChatTokens
from burst_jax.data.corpus import Corpus, open_corpus
from burst_jax.data.readers import OFFSETS, ChatLines, offsets_path
from burst_jax.data.tokens import Tokenizer, TokenizerFile
from burst_jax.json_files import check_regular

# Bytes searched for the end of a line, near where a text is to be cut.
_CUT_WINDOW = 4096
# Bytes of text tokenized at once when all tokens are saved.
_SAVE_CHUNK = 1 << 24


class Chunks:
    """Chunks of documents as token ids: a data source for grain.

    A long document is cut into chunks, so that shuffling spreads it and none is read as a whole. If
    a token is a byte or an array element, chunk k is tokens ``k * stride`` to ``k * stride +
    length`` of the document. Other text is cut the same way by its bytes, but at the next end of a
    line, else a space, else a character. A JSON line is one chunk, because it cannot be read in
    parts. A conversation is one, too, of one sequence or several.

    Args:
      corpus: the documents.
      tokens: tokenizer of text; None for a corpus of token arrays.
      vocab_size: ids must be below it; None only checks that they are not negative.
      length: of a chunk, in tokens if :attr:`is_exact`, else in bytes; with
        :class:`burst_jax.data.ChatTokens` that are not cut, the most tokens of a sequence.
      stride: distance between the starts of two chunks of a document.

    Attributes:
      is_exact: whether the number of a chunk's tokens is known without reading it.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokens: Tokenizer | None,
        vocab_size: int | None,
        *,
        length: int,
        stride: int,
    ):
        self._corpus, self._tokens, self._vocab_size = corpus, tokens, vocab_size
        divisible = corpus.reader.divisible
        self.is_exact = divisible and (tokens is None or tokens.is_bytes)
        # Text is cut near a byte, so an overlap would not consist of whole tokens.
        self._length, self._stride = (length, stride) if self.is_exact else (length, length)
        special = isinstance(tokens, TokenizerFile)
        self._prefix = np.array(tokens.prefix_ids if special else (), np.int32)
        self._suffix = np.array(tokens.suffix_ids if special else (), np.int32)
        self._separator = None if tokens is None else tokens.separator_id
        # The separator is a token of the last chunk.
        self._sizes = corpus.stops - corpus.starts
        if self.is_exact and self._separator is not None:
            self._sizes = self._sizes + (self._sizes > 0)
        overlap = self._length - self._stride
        counts = np.maximum(-(-(self._sizes - overlap) // self._stride), 1)
        if not divisible:
            counts = np.ones_like(counts)
        self._ends = np.cumsum(np.where(self._sizes > 0, counts, 0))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        """``{"tokens": int32 [n]}`` of a chunk.

        A conversation has ``"weights"``, float32 ``[n]``, and ``"lengths"`` of its sequences, too.

        Raises:
          ValueError: it cannot be read, is longer than a sequence and must not be cut, or holds an
            id outside the vocabulary.
        """
        document, first, last = self._locate(int(index))
        if isinstance(self._tokens, ChatTokens):
            return self._conversation(self._tokens, document)
        if self._tokens is None:
            ids = self._corpus.reader.read(*self._range(document, first, last))
        else:
            ids = self._encode(self._tokens, document, first, last)
        return {"tokens": self._checked(np.asarray(ids), document)}

    def _conversation(self, tokens: ChatTokens, document: int) -> dict[str, np.ndarray]:
        source = int(self._corpus.documents[document])
        reader = cast(ChatLines, self._corpus.reader)
        sequences = tokens.sequences(reader.record(source), reader.name(source))
        lengths = np.array([len(each.tokens) for each in sequences])
        if tokens.too_long == "error" and lengths.max() > self._length:
            raise ValueError(
                f"{reader.name(source)} has {lengths.max()} tokens, and a sequence {self._length}: "
                "use a longer seq_len, remove the line, or cut such conversations with "
                "too_long='cut'"
            )
        ids = np.concatenate([each.tokens for each in sequences])
        weights = np.concatenate([each.weights for each in sequences])
        return {"tokens": self._checked(ids, document), "weights": weights, "lengths": lengths}

    def count(self, index: int) -> int:
        """Number of a chunk's tokens; it is read unless chunks are exact."""
        if not self.is_exact:
            return len(self[index]["tokens"])
        _, first, last = self._locate(index)
        return last - first

    def document_of(self, index: int) -> int:
        """The index of a chunk's document in the corpus."""
        return self._locate(index)[0]

    def _locate(self, index: int) -> tuple[int, int, int]:
        """A chunk's document and its range there, ``(document, first, last)``."""
        document = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[document - 1]) if document else 0
        first = (index - before) * self._stride
        return document, first, min(first + self._length, int(self._sizes[document]))

    def _range(self, document: int, first: int, last: int) -> tuple[int, int, int]:
        """The reader's arguments for a range of a document in the corpus."""
        start, stop = int(self._corpus.starts[document]), int(self._corpus.stops[document])
        return int(self._corpus.documents[document]), start + first, min(start + last, stop)

    def _encode(self, tokens: Tokenizer, document: int, first: int, last: int) -> np.ndarray:
        source, start, stop = self._range(document, first, last)
        starts, ends = first == 0, last == self._sizes[document]
        if self._corpus.reader.divisible and not tokens.is_bytes:
            end = self._cut(source, int(self._corpus.stops[document]))
            begin = self._cut(source, int(self._corpus.starts[document]))
            start, stop = self._cut(source, start), self._cut(source, stop)
            # If the last line is longer than the last chunk, the chunk before has all of it.
            ends = start < stop == end
            starts = begin == start < stop
        text = self._corpus.reader.read(source, start, stop)
        assert isinstance(text, bytes)
        try:
            ids = tokens.encode(text)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._corpus.reader.name(source)} is not UTF-8 at byte {start + error.start}:"
                " convert it, or train on its bytes, ByteTokens()"
            ) from None
        parts = [self._prefix, ids] if starts else [ids]
        if ends:
            parts.append(self._suffix)
        if ends and self._separator is not None:
            parts.append(np.array([self._separator], np.int32))
        return np.concatenate(parts)

    def _cut(self, document: int, at: int) -> int:
        """Where a text is cut, at or after byte ``at``.

        Depends only on the text after ``at``, so both adjacent chunks find the same place.
        """
        if at in (0, int(self._corpus.reader.sizes[document])):
            return at
        text = self._corpus.reader.read(document, at, at + _CUT_WINDOW)
        assert isinstance(text, bytes)
        for end in (b"\n", b" "):
            if (found := text.find(end)) >= 0:
                return at + found + 1
        # Bytes 10xxxxxx continue a UTF-8 character, which has at most three of them.
        return at + next((i for i, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)

    def _checked(self, ids: np.ndarray, document: int) -> np.ndarray:
        if not len(ids):
            return ids.astype(np.int32)
        low, high = int(ids.min()), int(ids.max())
        limit = 2**31 if self._vocab_size is None else self._vocab_size
        if low < 0 or high >= limit:
            name = self._corpus.reader.name(int(self._corpus.documents[document]))
            raise ValueError(
                f"{name} holds token id {low if low < 0 else high}, vocab_size is {limit}: ids "
                "must be from 0 to vocab_size - 1; use the vocabulary of the tokenizer"
            )
        return ids.astype(np.int32)


class ChunkLengths:
    """A stand-in for :class:`Chunks` of the same lengths, all zeros, for counting sequences.

    Creating it reads every chunk once, unless lengths are exact. It is not for conversations.
    """

    def __init__(self, chunks: Chunks):
        self._counts = [chunks.count(index) for index in range(len(chunks))]

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return {"tokens": np.zeros(self._counts[int(index)], np.int8)}


def save_tokens(corpus: Corpus, tokens: Tokenizer, path: str | Path) -> Corpus:
    """Tokenizes a corpus into a file that ``open_corpus`` reads, for slow tokenizers.

    Writes ``NAME.npy``, the ids of all documents concatenated, uint16 if they fit, else uint32, and
    ``NAME.offsets.npy``, int64 ``[documents + 1]``, where each document starts. Texts are encoded
    by one thread per core, text files in chunks of 16 MB that end at a line's end. Existing files
    are replaced when all is written.

    Args:
      corpus: documents of text.
      tokens: the tokenizer; its special tokens and separators are saved too.
      path: the file to write, with suffix ``.npy``.

    Returns:
      The saved tokens, as a corpus.

    Raises:
      ValueError: the path has another suffix or is not a regular file, the corpus holds token ids
        already or conversations, or a document cannot be read.
    """
    path = Path(path)
    if path.suffix != ".npy" or path.name.endswith(OFFSETS):
        raise ValueError(f"path is {path}: its name must end in .npy, like tokens.npy")
    if not corpus.reader.is_text:
        raise ValueError(f"corpus is {corpus!r}, which has token ids already: use it as it is")
    if corpus.reader.is_chats:
        raise ValueError(
            f"corpus is {corpus!r}, whose loss weights cannot be saved: give its lines to a Loader"
        )
    chunks = Chunks(corpus, tokens, tokens.vocab_size, length=_SAVE_CHUNK, stride=_SAVE_CHUNK)
    dtype = np.dtype("<u2" if tokens.vocab_size <= 1 << 16 else "<u4")
    sizes = np.zeros(len(corpus), np.int64)
    threads = os.cpu_count() or 1
    encoded = grain.MapDataset.source(cast(Any, chunks)).to_iter_dataset(
        grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    )
    for file in (path, offsets_path(path)):
        with contextlib.suppress(FileNotFoundError):
            check_regular(file)
    # A folder of its own next to the file: any other name could be a file of the user's.
    prefix = f".{path.name}.being-written-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as temporary:
        raw, ids, offsets = (Path(temporary) / name for name in ("raw", "ids", "offsets"))
        with raw.open("wb") as out, closing(iter(encoded)) as in_order:
            for index, chunk in enumerate(in_order):
                out.write(chunk["tokens"].astype(dtype).tobytes())
                sizes[chunks.document_of(index)] += len(chunk["tokens"])
        with ids.open("wb") as out, raw.open("rb") as written:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (int(sizes.sum()),)}
            np.lib.format.write_array_header_1_0(out, header)
            shutil.copyfileobj(written, out, _SAVE_CHUNK)
        with offsets.open("wb") as out:
            np.save(out, np.append(0, np.cumsum(sizes)))
        # The ids last: without offsets they would be one long document.
        offsets.replace(offsets_path(path))
        ids.replace(path)
    return open_corpus(path)
