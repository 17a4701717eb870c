"""Errors of burst_jax.data name the argument, its value and the remedy."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from data_files import loader_of, write, write_arrays, write_tokenizer

from burst_jax.data import (
    ByteTokens,
    Loader,
    TokenizerFile,
    loader,
    merge_states,
    open_corpus,
    packing,
    rows_of_process,
    save_tokens,
)


@pytest.fixture
def arrays(tmp_path):
    return write_arrays(tmp_path / "arrays")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("bpe") / "tokenizer.json", "one two three " * 99)


OFFSETS = "a.offsets.npy does not fit a.npy: offsets must be [documents + 1], from 0 up to"
THREE = np.zeros(3, int)
# Files, arguments of open_corpus, message.
CORPORA: list[Any] = [
    ({}, {"name": "nowhere"}, "nowhere: there is no such file or folder"),
    ({}, {}, "no file in it matches '**/*'; hidden files are skipped"),
    ({".a.txt": "a"}, {}, "no file in it matches '**/*'"),
    ({"a.txt": "a"}, {"pattern": "*.md"}, "no file in it matches '*.md'"),
    ({"a.txt": "a"}, {"pattern": "/a"}, "pattern is '/a'"),
    ({"a.txt": "a"}, {"pattern": ""}, "pattern is ''"),
    ({"a.txt": "", "b.txt": ""}, {}, "no document: all files are empty"),
    ({"a.jsonl": "\n\n"}, {}, "no document: all files are empty"),
    ({"a.npy": np.zeros((0, 4), int)}, {}, "no document: all files are empty"),
    ({"a.txt": "a", "b.jsonl": "b"}, {}, "holds text (a.txt) and JSON lines (b.jsonl): "),
    ({"a.parquet": "a"}, {}, "a.parquet ends in .parquet, which is not supported"),
    ({"a.jsonl.gz": b"a"}, {}, "a.jsonl.gz ends in .gz, which is not supported"),
    ({"a.json": "[]"}, {"name": "a.json"}, "ends in .json, which is not supported: use"),
    ({"a.jsonl": "hello"}, {}, "a.jsonl, line 1, is not JSON (Expecting value"),
    ({"a.jsonl": "[1]"}, {}, "line 1, has list, and no key 'text': set key= to the key of"),
    ({"a.jsonl": '{"body": "a", "id": 1}'}, {}, "has keys ['body', 'id'], and no key 'text': set"),
    ({"a.jsonl": '{"messages": []}'}, {}, "no key 'text': for conversations set chats=True, on a"),
    ({"a.jsonl": '{"text": "a"}'}, {"key": "body"}, "and no key 'body'"),
    ({"a.jsonl": '{"text": 5}'}, {}, "line 1, has 5 under 'text': it must be a"),
    ({"a.jsonl": r'{"text": "\ud800"}'}, {}, "line 1, has half of a surrogate pair"),
    ({"a.npy": np.zeros(4)}, {}, "a.npy has dtype float64: token ids are integers; cast"),
    ({"a.npy": np.zeros(4, bool)}, {}, "a.npy has dtype bool: token ids are integers"),
    ({"a.npy": np.zeros((2, 2, 2), int)}, {}, "shape (2, 2, 2): it must be [tokens]"),
    ({"a.npy": np.zeros((), int)}, {}, "a.npy has shape (): it must be [tokens]"),
    ({"a.npy": THREE, "a.offsets.npy": np.zeros(2)}, {}, "a.offsets.npy has dtype float64"),
    ({"a.npy": THREE, "a.offsets.npy": np.array([0, 2])}, {}, OFFSETS),
    ({"a.npy": THREE, "a.offsets.npy": np.array([1, 3])}, {}, OFFSETS),
    ({"a.npy": THREE, "a.offsets.npy": np.array([0, 2, 1, 3])}, {}, OFFSETS),
    ({"a.npy": THREE[None], "a.offsets.npy": THREE}, {}, "shape (1, 3), and there is a.off"),
    ({"a.npy": b"no array"}, {}, "a.npy is no array of numpy.save"),
    ({"a.npy": b"\x93NUMPY"}, {}, "a.npy is no array of numpy.save"),
    ({"a.npy": np.array([None])}, {}, "a.npy is no array of numpy.save"),
]


def test_bad_files_raise(tmp_path):
    for index, (files, options, message) in enumerate(CORPORA):
        path = write(tmp_path / str(index), files) / options.pop("name", "")
        with pytest.raises(ValueError, match=re.escape(message)):
            open_corpus(path, **options)
    with pytest.raises(ValueError, match="path is '': name a file or a folder, or use None"):
        open_corpus("")  # For pathlib it is the current folder.


LOADERS: list[tuple[dict[str, Any], str]] = [
    ({"seq_len": 0}, "seq_len is 0: it must be an integer, at least 1"),
    ({"seq_len": 8.0}, "seq_len is 8.0: it must be an integer"),
    ({"batch": 0}, "batch is 0: it must be an integer, at least 1"),
    ({"batch": 10**20}, "batch is 100000000000000000000: it must be an integer, at least 1 and at"),
    ({"epochs": 0}, "epochs is 0: it must be an integer, at least 1"),
    ({"seed": -1}, "seed is -1: it must be an integer, at least 0"),
    ({"prefetch": -1}, "prefetch is -1: it must be an integer, at least 0"),
    ({"packing": "best"}, "packing is 'best': use one of 'first_fit', 'split', 'none'"),
    ({"rows": range(2, 5)}, "rows is range(2, 5), batch 4: it must hold distinct"),
    ({"rows": [-1]}, "rows is [-1], batch 4"),
    ({"rows": [1, 1]}, "rows is [1, 1], batch 4"),
    ({"rows": []}, "rows is [], batch 4"),
    ({"rows": 2}, "rows is 2, batch 4: it must hold distinct batch"),
    ({"vocab_size": 0}, "vocab_size is 0: it must be an integer, at least 1"),
    ({"vocab_size": 255}, "vocab_size is 255, but ByteTokens(separator=None) makes ids up to 255"),
    ({"tokens": ByteTokens(256), "vocab_size": 256}, "makes ids up to 256: give the model a vocab"),
    ({"corpus": "a.txt"}, "corpus is 'a.txt': make it with open_corpus(path)"),
    ({"packing": "none", "seq_len": 64}, "seq_len is 64, and Corpus("),
]


def test_bad_loader_options_raise(tmp_path, monkeypatch):
    corpus = open_corpus(write(tmp_path, {"a.txt": "a text of 24 bytes, say."}))
    given: dict[str, Any] = {"corpus": corpus, "seq_len": 8, "batch": 4}
    for options, message in LOADERS:
        with pytest.raises(ValueError, match=re.escape(message)):
            Loader(**given | options)
    monkeypatch.setattr(loader, "MAX_CHUNKS", 3)
    with pytest.raises(ValueError, match="has 3 chunks of documents: fewer than 3 can be shuffled"):
        Loader(**given)


def test_bad_splits_and_tokenizers_raise(arrays, tmp_path, bpe):
    text = open_corpus(write(tmp_path / "text", {"a.txt": "some text"}))
    line = open_corpus(write(tmp_path / "line", {"a.jsonl": '{"text": "a b c"}'}))
    numbers, tokens_of = open_corpus(arrays), cast(Any, ByteTokens)
    write(tmp_path, {"a.json": "{}", "b.json": "no json", "c.json": b"\xff"})
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: line.split(0.5), "single document, which cannot be cut: add documents"),
        (lambda: loader_of(numbers.split(0)[1]), "is it the held-out part of held_out=0"),
        (
            lambda: TokenizerFile(tmp_path / "no.json"),
            r"no\.json: there is no such file; name a tok",
        ),
        (lambda: TokenizerFile(bpe, separator="<eos>"), r"separator is '<eos>', .*in .*<\|end\|>"),
        (lambda: loader_of(numbers, tokens=ByteTokens()), "token ids already: pass tokens=None"),
        (
            lambda: loader_of(text, tokens=TokenizerFile(bpe), vocab_size=266),
            "makes ids up to 266: give the model a vocabulary of 267",
        ),
    ]
    for x in (1, -0.1, 1.5, float("nan"), True):
        calls.append((lambda x=x: numbers.split(x), f"held_out is {x}: it must be a fraction"))
    for x in (-1, 1.5, "a", True):
        calls.append((lambda x=x: tokens_of(x), f"separator is {x!r}: it must be a token id"))
    for x in ("a.json", "b.json", "c.json"):
        calls.append((lambda x=x: TokenizerFile(tmp_path / x), f"{x}, which is no tokenizer"))
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_only_text_is_saved_and_only_whole(arrays, tmp_path):
    text = open_corpus(write(tmp_path / "text", {"a.txt": "some text"}))
    for name in ("tokens.bin", "tokens", "a.offsets.npy"):
        with pytest.raises(ValueError, match=rf"{name}: its name must end in \.npy, like tokens"):
            save_tokens(text, ByteTokens(), tmp_path / name)
    with pytest.raises(ValueError, match="has token ids already: use it as it is"):
        save_tokens(open_corpus(arrays), ByteTokens(), tmp_path / "b.npy")
    lines = '{"text": "a"}\n{"text": "b"\n'
    corpus = open_corpus(write(tmp_path / "lines", {"a.jsonl": lines}))
    with pytest.raises(ValueError, match="line 2, is not JSON"):
        save_tokens(corpus, ByteTokens(), tmp_path / "tokens.npy")
    assert not list(tmp_path.glob("tokens*"))


# Raised when a batch is requested, with the file's name.
ONE_ID = "a.npy, document 0, holds token id"
READS: list[Any] = [
    ({"a.npy": np.array([1, 400, 2])}, f"{ONE_ID} 400, vocab_size is 400"),
    ({"a.npy": np.array([1, -2])}, f"{ONE_ID} -2"),
    ({"a.jsonl": '{"text": "a b"}\n\n{"text": "a b"\n'}, "a.jsonl, line 3, is not JSON (Expectin"),
    ({"a.jsonl": '{"text": "a b"}\n{"txt": "a"}\n'}, "a.jsonl, line 2, has keys ['txt']"),
    ({"a.txt": "an é".encode("latin-1")}, "a.txt is not UTF-8 at byte 3: convert it"),
]


def test_unreadable_documents_raise_with_their_place_and_end_the_threads(tmp_path, bpe):
    before = set(threading.enumerate())
    for index, (files, message) in enumerate(READS):
        corpus = open_corpus(write(tmp_path / str(index), files))
        tokens = TokenizerFile(bpe) if corpus.reader.is_text else None
        for prefetch in (0, 2):
            loader = loader_of(corpus, tokens=tokens, vocab_size=400, prefetch=prefetch)
            with loader, pytest.raises(ValueError, match=re.escape(message)):
                list(itertools.islice(loader, 10))
            assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("text", "packing"), [("", "split"), ("a", "first_fit")])
def test_documents_without_anything_to_predict_raise(tmp_path, text, packing):
    corpus = open_corpus(write(tmp_path, {"a.jsonl": f'{{"text": "{text}"}}\n'}))
    with (
        loader_of(corpus, packing=packing, batch=1) as loader,
        pytest.raises(ValueError, match="corpus has no tokens to predict: its doc"),
    ):
        next(loader)


def test_short_documents_between_others_may_be_many():
    cut = packing._Cut(length=17, chunks=1)
    for _ in range(50):
        assert cut.flat_map({"tokens": np.zeros(1)}) == []
        assert len(cut.flat_map({"tokens": np.zeros(40)})) == 3


def test_bad_numbers_of_processes_raise():
    for arguments, message in (
        ((6, 0, 4), "batch is 6, processes 4: use a batch that is a multiple .* like 8"),
        ((8, 4, 4), "process is 4, processes 4: it must be from 0 to processes - 1"),
        ((8, -1, 4), "process is -1, processes 4"),
        ((8, 0, 0), "process is 0, processes 0"),
    ):
        with pytest.raises(ValueError, match=message):
            rows_of_process(*arguments)


STATES: list[Any] = [
    (lambda state: None, "state is None: it must be what get_state returned"),
    (lambda state: {}, "state is {}: it must be what get_state returned"),
    (lambda state: state | {"version": 0}, "of version 1"),
    (lambda state: {"version": 1}, "it must be what get_state returned"),
    (
        lambda state: state | {"rows": {"0": state["rows"]["0"]}},
        "state has rows 0 of the batch, this loader also needs [1, 2, 3]: save the result",
    ),
]
OPTIONS = ("documents", "tokens", "seq_len", "batch", "packing", "seed", "epochs")


def test_bad_states_raise(arrays):
    with loader_of(open_corpus(arrays)) as loader:
        first, state = next(loader), loader.get_state()
        for change, message in STATES:
            with pytest.raises(ValueError, match=re.escape(message)):
                loader.set_state(change(state))
        for name in OPTIONS:
            with pytest.raises(ValueError, match=f"state was saved with {name} 'other', this load"):
                loader.set_state(state | {"options": state["options"] | {name: "other"}})
        assert loader.step == 1  # The loader is unchanged.
        assert (next(loader)["rows"] != first["rows"]).any()


def test_states_of_changed_documents_and_other_runs_raise(arrays):
    states = []
    for seed, steps in ((0, 1), (0, 2), (1, 1)):
        with loader_of(open_corpus(arrays), seed=seed) as loader:
            for _ in range(steps):
                next(loader)
            states.append(loader.get_state())
    with pytest.raises(ValueError, match="states are of steps 1 and 2: take them from all"):
        merge_states(states[:2])
    with pytest.raises(ValueError, match="the state was saved with seed 0, another loader has 1"):
        merge_states(states[::2])
    with pytest.raises(ValueError, match="states is empty: pass what"):
        merge_states([])
    np.save(arrays / "00.npy", np.arange(5))
    with (
        loader_of(open_corpus(arrays)) as loader,
        pytest.raises(ValueError, match="the state was saved with documents"),
    ):
        loader.set_state(states[0])
