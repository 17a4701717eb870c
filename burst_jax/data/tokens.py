"""From text to token ids: bytes, or a file of the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
import numbers
from pathlib import Path
from typing import Protocol

import numpy as np

from burst_jax.errors import optional


class Tokens(Protocol):
    """Makes token ids of text.

    Attributes:
      vocab_size: ids are below it.
      separator_id: the id that follows each document, or None.
      is_bytes: whether each byte of the text is a token, so that nothing has to be read to count
        them.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def separator_id(self) -> int | None: ...  # noqa: D102

    @property
    def is_bytes(self) -> bool: ...  # noqa: D102

    def encode(self, text: bytes) -> np.ndarray:
        """int32 ``[tokens]`` of a text, without the separator."""
        ...

    def fingerprint(self) -> str:
        """Differs between tokens that make other ids of a text."""
        ...


class ByteTokens:
    """Each byte of the text is a token, its id the byte.

    Args:
      separator: the id that follows each document, or None for none. Packed rows mark documents by
        segment ids and need none to tell them apart; it is for a model that shall learn where a
        document ends, and for rows of a single segment. 0 is a byte that no text has; 256 is the
        first id that is no byte, and makes the vocabulary a token larger.

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
        self.separator_id = separator
        self.vocab_size = 256 if separator is None else max(256, int(separator) + 1)

    def __repr__(self) -> str:
        return f"ByteTokens(separator={self.separator_id})"

    def encode(self, text: bytes) -> np.ndarray:
        """int32 ``[bytes]``, the bytes."""
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids ``[tokens]``; ids that are no bytes are left out."""
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def fingerprint(self) -> str:
        """Its own text."""
        return repr(self)


class TokenizerFile:
    """Tokens of a ``tokenizer.json``, the file of the ``tokenizers`` library and of transformers.

    What the file says of truncation and padding is switched off, because rows are packed here and
    nothing may be lost. No special tokens are added but the separator.

    Args:
      path: the file.
      separator: the token that follows each document, like ``"<|endoftext|>"``, or None for none.

    Attributes:
      vocab_size: the largest id, of added tokens too, plus 1.
      tokenizer: the ``tokenizers.Tokenizer``, which also decodes.

    Raises:
      ImportError: ``tokenizers`` is not installed.
      ValueError: there is no such file, it is no tokenizer, or it does not know the separator.
    """

    is_bytes = False

    def __init__(self, path: str | Path, separator: str | None = None):
        tokenizers = optional("tokenizers", user="TokenizerFile", extra="data")
        self._path = Path(path)
        if not self._path.is_file():
            raise ValueError(f"path is {path}: there is no such file; name a tokenizer.json")
        contents = self._path.read_bytes()
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(contents.decode())
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(
                f"path is {path}, which is no tokenizer ({error}): name a tokenizer.json, as "
                "tokenizers.Tokenizer.save writes it"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.separator_id = None if separator is None else vocabulary.get(separator)
        if separator is not None and self.separator_id is None:
            special = sorted(
                str(token.content) for token in self.tokenizer.get_added_tokens_decoder().values()
            )
            raise ValueError(
                f"separator is {separator!r}, which {path} does not know: use one of its tokens; "
                f"its special ones are {special}"
            )
        digest = hashlib.blake2b(contents, digest_size=16).hexdigest()
        self._fingerprint = f"tokenizer {digest}, separator {separator!r}"

    def __repr__(self) -> str:
        return f"TokenizerFile({str(self._path)!r}, vocab_size={self.vocab_size})"

    def encode(self, text: bytes) -> np.ndarray:
        """int32 ``[tokens]``; a UnicodeDecodeError if the text is not UTF-8."""
        (encoded,) = self.tokenizer.encode_batch_fast([text.decode()], add_special_tokens=False)
        return np.array(encoded.ids, np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids ``[tokens]``."""
        return self.tokenizer.decode(np.asarray(ids).tolist())

    def fingerprint(self) -> str:
        """A hash of the file, and the separator."""
        return self._fingerprint
