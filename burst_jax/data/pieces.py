"""Random access to pieces of documents as token ids: what is shuffled, then packed into rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from burst_jax.data.corpus import Corpus
from burst_jax.data.tokens import Tokens

# Bytes that are searched for a line's end, near where a text is to be cut.
_CUT_WINDOW = 4096


class Pieces:
    """Pieces of documents as token ids: a data source for grain.

    A long document is cut into pieces, so that shuffling spreads it, and so that none has to be
    read whole. Where a token is a byte, or an element of an array, piece k of a document is its
    tokens ``k * stride`` to ``k * stride + length``. A text whose tokens are longer is cut in the
    same way by its bytes, but at the next end of a line, else a space, else a character. A JSON
    line is one piece, because no part of it can be read alone.

    Args:
      corpus: the documents.
      tokens: makes ids of text; None for a corpus of token arrays.
      vocab_size: ids must be below it, or None to check nothing but that they are not negative.
      length: of a piece, in tokens if they are exact, else in bytes.
      stride: from the start of one piece to the next of the same document.

    Attributes:
      is_exact: whether the number of a piece's tokens is known without reading it.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokens: Tokens | None,
        vocab_size: int | None,
        *,
        length: int,
        stride: int,
    ):
        self._corpus, self._tokens, self._vocab_size = corpus, tokens, vocab_size
        divisible = corpus.reader.divisible
        self.is_exact = divisible and (tokens is None or tokens.is_bytes)
        # Where text is cut near a byte, an overlap would not be one of whole tokens.
        self._length, self._stride = (length, stride) if self.is_exact else (length, length)
        self._separator = None if tokens is None else tokens.separator_id
        # The separator is a token of the last piece.
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
        """``{"tokens": int32 [n]}`` of a piece.

        Raises:
          ValueError: it cannot be read, or holds an id that the vocabulary does not have.
        """
        document, first, last = self._place(int(index))
        if self._tokens is None:
            ids = self._corpus.reader.read(*self._part(document, first, last))
        else:
            ids = self._encode(self._tokens, document, first, last)
        return {"tokens": self._checked(np.asarray(ids), document)}

    def count(self, index: int) -> int:
        """The number of a piece's tokens; unless they are exact it has to be read."""
        if not self.is_exact:
            return len(self[index]["tokens"])
        _, first, last = self._place(index)
        return last - first

    def document_of(self, index: int) -> int:
        """Which of the corpus' documents a piece is of."""
        return self._place(index)[0]

    def _place(self, index: int) -> tuple[int, int, int]:
        """A piece's document in the corpus, its first unit there and the one after its last."""
        document = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[document - 1]) if document else 0
        first = (index - before) * self._stride
        return document, first, min(first + self._length, int(self._sizes[document]))

    def _part(self, document: int, first: int, last: int) -> tuple[int, int, int]:
        """The arguments of the reader for units ``first`` to ``last`` of a corpus' document."""
        start, stop = int(self._corpus.starts[document]), int(self._corpus.stops[document])
        return int(self._corpus.documents[document]), start + first, min(start + last, stop)

    def _encode(self, tokens: Tokens, document: int, first: int, last: int) -> np.ndarray:
        of_reader, start, stop = self._part(document, first, last)
        ends = last == self._sizes[document]
        if self._corpus.reader.divisible and not tokens.is_bytes:
            end = self._cut(of_reader, int(self._corpus.stops[document]))
            start, stop = self._cut(of_reader, start), self._cut(of_reader, stop)
            # If the last line is longer than the last piece, the piece before has all of it.
            ends = start < stop == end
        text = self._corpus.reader.read(of_reader, start, stop)
        assert isinstance(text, bytes)
        try:
            ids = tokens.encode(text)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._corpus.reader.name(of_reader)} is not UTF-8 at byte {start + error.start}:"
                " convert it, or take its bytes as tokens, ByteTokens()"
            ) from None
        if self._separator is not None and ends:
            ids = np.append(ids, np.int32(self._separator))
        return ids

    def _cut(self, document: int, at: int) -> int:
        """The place at or after byte ``at`` where a text is cut.

        It depends on the text around ``at`` alone, so both pieces beside it find the same place.
        """
        if at in (0, int(self._corpus.reader.sizes[document])):
            return at
        text = self._corpus.reader.read(document, at, at + _CUT_WINDOW)
        assert isinstance(text, bytes)
        for end in (b"\n", b" "):
            if (found := text.find(end)) >= 0:
                return at + found + 1
        # A byte 10xxxxxx continues a character of UTF-8, which has at most three of them.
        return at + next((i for i, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)

    def _checked(self, ids: np.ndarray, document: int) -> np.ndarray:
        if not len(ids):
            return ids.astype(np.int32)
        low, high = int(ids.min()), int(ids.max())
        limit = 2**31 if self._vocab_size is None else self._vocab_size
        if low < 0 or high >= limit:
            name = self._corpus.reader.name(int(self._corpus.documents[document]))
            wrong = low if low < 0 else high
            raise ValueError(
                f"{name} holds token id {wrong}, vocab_size is {limit}: ids must be from 0 to "
                "vocab_size - 1; give the model the vocabulary that the tokens were made with"
            )
        return ids.astype(np.int32)


class Counted:
    """Stands in for pieces where their lengths alone matter: zeros, of as many tokens.

    Making it costs reading every piece once, unless their lengths are exact.
    """

    def __init__(self, pieces: Pieces):
        self._counts = [pieces.count(index) for index in range(len(pieces))]

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return {"tokens": np.zeros(self._counts[int(index)], np.int8)}
