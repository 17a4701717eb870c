"""Documents on disk for the tests of burst_jax.data."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from trained_tokenizers import trained_tokenizer

from burst_jax.data import Loader

# Tokens per document: shorter than a sequence, one sequence, many, and a single token.
LENGTHS = [1, 2, 5, 16, 17, 18, 33, 100, 900, 3, 7, 40, 12, 12, 12, 64, 31, 8]
SEQ_LEN = 16


def write(folder, files):
    """Files by name: text, bytes, or arrays for ``numpy.save``; returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if isinstance(content, str):
            (folder / name).write_text(content)
        elif isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            np.save(folder / name, content)
    return folder


def write_arrays(folder):
    """Documents whose token ids encode their place: 1000 * document + position."""
    return write(
        folder,
        {
            f"{document:02}.npy": 1000 * document + np.arange(length, dtype="u4")
            for document, length in enumerate(LENGTHS)
        },
    )


def write_words(folder):
    """Four text files of three words in random order."""
    words = np.random.default_rng(0).choice(["ring ", "burst ", "stripe\n"], 3000)
    parts = enumerate(np.array_split(words, 4))
    return write(folder, {f"{index}.txt": "".join(part) for index, part in parts})


def write_lines(file):
    """JSON lines of texts of many lengths; with an empty line, which is no document."""
    with file.open("w") as out:
        for document, length in enumerate(LENGTHS):
            text = f"{document:02} é " + "x" * length
            line = json.dumps({"text": text, "n": document}, ensure_ascii=document % 2 == 0)
            out.write(line + "\n")
            out.write("\r\n" * (document == 3))
    return file


def write_tokenizer(file, text):
    """A tokenizer of 400 tokens, with truncation and padding enabled in its file."""
    tokenizer = trained_tokenizer([text], 400, ["<|end|>"])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(file))
    return file


def loader_of(corpus, *, seq_len: int = SEQ_LEN, batch: int = 4, **options: Any):
    """A loader of short sequences."""
    return Loader(corpus, seq_len=seq_len, batch=batch, **options)


def taken(loader, count=None):
    """``count`` batches, or all; closes the loader."""
    with loader:
        return [next(loader) for _ in range(count)] if count is not None else list(loader)


def reads_of(corpus, monkeypatch):
    """A list to which every later read of a document is appended."""
    reads, read = [], corpus.reader.read

    def noted(document, start, stop):
        reads.append(document)
        return read(document, start, stop)

    monkeypatch.setattr(corpus.reader, "read", noted)
    return reads
