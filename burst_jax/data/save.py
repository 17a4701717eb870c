"""Tokens made once and kept on the disk, for a tokenizer that is slower than the training."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import grain
import numpy as np

from burst_jax.data.corpus import Corpus, open_corpus
from burst_jax.data.pieces import Pieces
from burst_jax.data.readers import OFFSETS, offsets_of
from burst_jax.data.tokens import Tokens

# Bytes of a text that are made to tokens at once.
_PIECE = 1 << 24


def save_tokens(corpus: Corpus, tokens: Tokens, path: str | Path) -> Corpus:
    """Makes all tokens of a corpus, and writes them to a file that ``open_corpus`` reads.

    It writes ``NAME.npy``, the ids of all documents one after the other, uint16 if they fit, else
    uint32, and ``NAME.offsets.npy``, int64 ``[documents + 1]``, where each document starts. Texts
    are encoded in as many threads as there are cores, a text file in parts of 16 MB that end where
    lines end. Files that stand there already are replaced when all is written.

    Args:
      corpus: documents of text.
      tokens: makes their ids. A separator is saved with them.
      path: the file to write, whose name ends in ``.npy``.

    Returns:
      The saved tokens, as a corpus.

    Raises:
      ValueError: the path ends in something else, the corpus has token ids already, or a document
        cannot be read.
    """
    path = Path(path)
    if path.suffix != ".npy" or path.name.endswith(OFFSETS):
        raise ValueError(f"path is {path}: its name must end in .npy, like tokens.npy")
    if not corpus.reader.is_text:
        raise ValueError(f"corpus is {corpus!r}, which has token ids already: use it as it is")
    pieces = Pieces(corpus, tokens, tokens.vocab_size, length=_PIECE, stride=_PIECE)
    dtype = np.dtype("<u2" if tokens.vocab_size <= 1 << 16 else "<u4")
    sizes = np.zeros(len(corpus), np.int64)
    threads = os.cpu_count() or 1
    made = grain.MapDataset.source(cast(Any, pieces)).to_iter_dataset(
        grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    )
    raw, ids, offsets = (path.with_name(path.name + end) for end in (".raw", ".part", ".offsets"))
    try:
        with raw.open("wb") as out, closing(iter(made)) as in_order:
            for index, piece in enumerate(in_order):
                out.write(piece["tokens"].astype(dtype).tobytes())
                sizes[pieces.document_of(index)] += len(piece["tokens"])
        with ids.open("wb") as out, raw.open("rb") as written:
            header = {"descr": dtype.str, "fortran_order": False, "shape": (int(sizes.sum()),)}
            np.lib.format.write_array_header_1_0(out, header)
            shutil.copyfileobj(written, out, _PIECE)
        with offsets.open("wb") as out:
            np.save(out, np.append(0, np.cumsum(sizes)))
        # The ids last: without offsets they would be one long document.
        offsets.replace(offsets_of(path))
        ids.replace(path)
    finally:
        for part in (raw, ids, offsets):
            part.unlink(missing_ok=True)
    return open_corpus(path)
