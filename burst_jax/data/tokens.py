"""Tokenizers: bytes, or a file of the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from burst_jax.data.special_tokens import CONFIG, added_to_texts, read_config
from burst_jax.errors import first_of, optional, printable
from burst_jax.json_files import read_bounded

# Characters that the library encodes at once, and those searched for the end of a part.
_PART, _PART_END = 1 << 20, 1 << 12
# Bytes of a tokenizer.json.
_MAX_FILE = 1 << 28


class Tokenizer(Protocol):
    """Maps text to token ids.

    Attributes:
      vocab_size: ids are below it.
      separator_id: id appended to each document, or None.
      is_bytes: whether each byte is a token, so that tokens are counted without reading.
    """

    vocab_size: int
    separator_id: int | None
    is_bytes: bool

    def encode(self, text: bytes) -> np.ndarray:
        """int32 ``[tokens]``, without the separator."""
        ...

    def fingerprint(self) -> str:
        """Differs between tokenizers with different results."""
        ...


class ByteTokens:
    """Byte-level tokenizer: each byte is a token.

    Args:
      separator: id appended to each document, or None. Packed sequences separate documents by
        segment ids; a separator is for models that learn where documents end, and for sequences of
        a single segment. 0 is a byte that no text contains; 256 is the first id that is no byte and
        adds one to the vocabulary.

    Attributes:
      vocab_size: 256, or more if the separator is not a byte.

    Raises:
      ValueError: the separator is negative or no integer.
    """

    is_bytes = True

    def __init__(self, separator: int | None = None):
        integer = isinstance(separator, numbers.Integral) and not isinstance(separator, bool)
        if separator is not None and not (integer and 0 <= separator < 2**31):
            raise ValueError(
                f"separator is {separator!r}: it must be a token id, like 0 or 256, or None"
            )
        self.separator_id: int | None = separator
        self.vocab_size = 256 if separator is None else max(256, int(separator) + 1)

    def __repr__(self) -> str:
        return f"ByteTokens(separator={self.separator_id})"

    def encode(self, text: bytes) -> np.ndarray:
        """int32 ``[bytes]``, the bytes."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids ``[tokens]``; ids that are not bytes are skipped."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def fingerprint(self) -> str:
        """Its ``repr``."""
        return repr(self)


class TokenizerFile:
    """A ``tokenizer.json`` of the ``tokenizers`` library, as Hugging Face transformers saves it.

    Truncation and padding of the file are disabled, because documents are packed.

    Args:
      path: the file.
      separator: token appended to each document, like ``"<|endoftext|>"``, or None.
      special_tokens: whether documents start and end with the special tokens that transformers adds
        to a text, usually BOS alone: those of the file's post-processor. Later sequences and chunks
        of a document do not start with them. ``add_bos_token`` and ``add_eos_token`` of a
        ``tokenizer_config.json`` next to the file have no effect, as in transformers 5; one that
        contradicts the post-processor warns.

    Attributes:
      vocab_size: largest id plus 1, including added tokens.
      tokenizer: the ``tokenizers.Tokenizer``.
      prefix_ids: ids that each document starts with; empty without ``special_tokens``.
      suffix_ids: ids that each document ends with, before the separator; empty without
        ``special_tokens``.

    Raises:
      ImportError: ``tokenizers`` is not installed.
      ValueError: there is no such file, it is not a tokenizer, it lacks the separator, or documents
        end with that token already; ``tokenizer_config.json`` is not valid.
    """

    is_bytes = False

    def __init__(
        self, path: str | Path, separator: str | None = None, *, special_tokens: bool = False
    ):
        tokenizers = optional("tokenizers", user="TokenizerFile", extra="data")
        self._path = Path(path)
        try:
            contents = read_bounded(self._path, _MAX_FILE)
        except FileNotFoundError:
            raise ValueError(
                f"path is {printable(path)}: there is no such file; name a tokenizer.json"
            ) from None
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(contents.decode())
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(
                f"path is {printable(path)}, which is no tokenizer ({printable(error)[:200]}): "
                "name a tokenizer.json, as tokenizers.Tokenizer.save writes it"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.separator_id: int | None = vocabulary.get(separator) if separator else None
        if separator is not None and self.separator_id is None:
            special = sorted(
                str(token.content) for token in self.tokenizer.get_added_tokens_decoder().values()
            )
            raise ValueError(
                f"separator is {separator!r}, which is not in {printable(path)}: use one of its "
                f"tokens; its special tokens are {first_of(special, 10)}"
            )
        self.prefix_ids: tuple[int, ...] = ()
        self.suffix_ids: tuple[int, ...] = ()
        if special_tokens:
            folder = self._path.parent
            self.prefix_ids, self.suffix_ids = added_to_texts(
                self.tokenizer, read_config(folder), str(folder / CONFIG)
            )
        if self.separator_id is not None and self.separator_id in self.suffix_ids:
            raise ValueError(
                f"separator is {separator!r}, with which texts of {printable(path)} end already: "
                "leave it out"
            )
        digest = hashlib.blake2b(contents, digest_size=16).hexdigest()
        self._fingerprint = f"tokenizer {digest}, separator {separator!r}"
        if self.prefix_ids or self.suffix_ids:
            self._fingerprint += f", from {self.prefix_ids} to {self.suffix_ids}"

    def __repr__(self) -> str:
        return f"TokenizerFile({str(self._path)!r}, vocab_size={self.vocab_size})"

    def encode(self, text: bytes) -> np.ndarray:
        """int32 ``[tokens]``; raises UnicodeDecodeError if the text is not UTF-8.

        Texts of more than a million characters are encoded in parts, as the library needs up to 290
        bytes per character. Parts end at a line's end or before a space, where most tokenizers
        separate words.
        """
        found = [
            self.tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids
            for part in _parts(text.decode())
        ]
        return np.concatenate([np.array(ids, np.int32) for ids in found])

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """``(ids, offsets)``: int32 ``[tokens]``, and the characters of each, int ``[tokens, 2]``.

        Tokens of parts of a character have all of it.
        """
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids ``[tokens]``."""
        return self.tokenizer.decode(np.asarray(ids).tolist())

    def fingerprint(self) -> str:
        """A hash of the file and the separator."""
        return self._fingerprint


def _parts(text: str) -> Iterator[str]:
    """A text in parts of at most ``_PART`` characters; one part if it is empty."""
    start = 0
    while len(text) - start > _PART:
        end = start + _PART
        if (line := text.rfind("\n", end - _PART_END, end)) >= 0:
            end = line + 1
        elif (space := text.rfind(" ", end - _PART_END, end)) >= 0:
            end = space
        yield text[start:end]
        start = end
    yield text[start:]
