"""A loader's sequences: every token of every document, as often and where it should be.

The same for any number of processes, and after any interruption.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from typing import Any

import chex
import data_files
import jax
import numpy as np
import pytest
from data_files import LENGTHS, SEQ_LEN, loader_of, taken

from burst_jax.data import (
    ByteTokens,
    TokenizerFile,
    chunks,
    gather_state,
    merge_states,
    open_corpus,
    readers,
    rows_of_process,
    save_tokens,
)
from burst_jax.training import make_batch


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    return data_files.write_arrays(tmp_path_factory.mktemp("data") / "arrays")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return data_files.write_lines(tmp_path_factory.mktemp("data") / "texts.jsonl")


@pytest.fixture(scope="module")
def text():
    words = random.Random(0)
    return "".join(
        " ".join("".join(words.choices("etaonrishd", k=4)) for _ in range(12)) + "\n"
        for _ in range(400)
    )


@pytest.fixture(scope="module")
def bpe(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("data")
    return data_files.write_tokenizer(folder / "tokenizer.json", text[:8000])


def assert_same(got, want, rows: Any = slice(None)):
    chex.assert_trees_all_equal(got, jax.tree.map(lambda x: x[rows], want), strict=True)


def segments(batches):
    """Every segment's tokens, stream by stream, in order."""
    for stream in range(len(batches[0]["rows"])):
        for batch in batches:
            row, ids = batch["rows"][stream], batch["segment_ids"][stream]
            for segment in range(1, ids.max() + 1):
                yield row[ids == segment]


# --- which tokens --------------------------------------------------------------------------------


def test_first_fit_predicts_each_token_but_a_document_s_first_once_an_epoch(arrays):
    batches = taken(loader_of(open_corpus(arrays), epochs=2))
    predicted = Counter()
    for batch in batches:
        assert batch["rows"].shape == batch["segment_ids"].shape == (4, SEQ_LEN + 1)
        assert batch["rows"].dtype == batch["segment_ids"].dtype == np.int32
        made = make_batch(**batch)
        counts = made["weights"] > 0
        predicted.update(made["targets"][counts].tolist())
        # A target is the token after its input in the same document.
        np.testing.assert_array_equal(made["targets"][counts], made["inputs"][counts] + 1)
    every = [1000 * d + p for d, length in enumerate(LENGTHS) for p in range(1, length)]
    assert predicted == Counter(dict.fromkeys(every, 2))
    found = {tuple(each.tolist()) for each in segments(batches)}
    for document, length in enumerate(LENGTHS):
        if 2 <= length <= SEQ_LEN + 1:  # It fits, so it is whole.
            assert tuple(range(1000 * document, 1000 * document + length)) in found


def test_split_has_each_token_once_an_epoch_and_pads_only_ends(arrays):
    """Without packing a sequence of the same tokens is one segment."""
    corpus = open_corpus(arrays)
    batches = taken(loader_of(corpus, epochs=2, packing="split"))
    tokens = Counter(np.concatenate(list(segments(batches))).tolist())
    every = [1000 * d + p for d, n in enumerate(LENGTHS) for p in range(n)]
    assert tokens == Counter(dict.fromkeys(every, 2))
    for each in segments(batches):
        np.testing.assert_array_equal(np.diff(each), 1)
    for stream in range(4):
        ids = np.concatenate([batch["segment_ids"][stream] for batch in batches])
        filled = np.flatnonzero(ids)
        assert len(filled) == filled[-1] + 1, "padding comes only after all tokens"
    # An endless stream, which has no padding, is the same up to the other's padding.
    full = next(i for i, batch in enumerate(batches) if not batch["segment_ids"].all())
    assert full > 3
    for batch in batches:
        batch["segment_ids"] = np.minimum(batch["segment_ids"], 1)
    assert_same(taken(loader_of(corpus, epochs=2, packing="none")), batches)
    for batch in batches:
        batch["segment_ids"] = None
    assert_same(taken(loader_of(corpus, packing="none"), full), batches[:full])


def test_every_epoch_and_seed_has_its_own_order(arrays):
    def order(seed):
        loader = loader_of(open_corpus(arrays), seed=seed, epochs=2, batch=1, packing="split")
        first, second = np.split(np.concatenate(list(segments(taken(loader)))) // 1000, 2)
        return first.tolist(), second.tolist()

    first, second = order(0)
    assert sorted(first) == sorted(second)
    assert first != second
    assert order(0) == (first, second)
    assert order(1)[0] not in (first, second)


def test_long_documents_are_spread(tmp_path):
    np.save(tmp_path / "one.npy", np.arange(64 * SEQ_LEN + 1, dtype="i4"))
    batches = taken(loader_of(open_corpus(tmp_path / "one.npy")), 16)
    starts = np.concatenate([batch["rows"][:, 0] for batch in batches])
    assert sorted(starts.tolist()) == list(range(0, 64 * SEQ_LEN, SEQ_LEN))
    assert (np.diff(starts) != SEQ_LEN).mean() > 0.9


def test_a_two_dimensional_array_has_a_document_per_row_and_stays_on_disk(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(60, dtype="u2").reshape(12, 5))
    corpus = open_corpus(tmp_path / "rows.npy")
    assert (len(corpus), corpus.size) == (12, 60)
    found = sorted(each.tolist() for each in segments(taken(loader_of(corpus, epochs=1))))
    assert found == np.arange(60).reshape(12, 5).tolist()
    reader: Any = corpus.reader
    assert all(isinstance(ids, np.memmap) for ids in reader._ids)


@pytest.mark.parametrize("separator", [None, 256])
def test_json_lines_are_documents_that_end_in_separators(lines, separator, monkeypatch):
    monkeypatch.setattr(readers, "_SCAN", 100)  # Bytes searched for line ends at once.
    corpus, tokens = open_corpus(lines), ByteTokens(separator=separator)
    assert (len(corpus), tokens.vocab_size) == (len(LENGTHS), 256 if separator is None else 257)
    found = list(segments(taken(loader_of(corpus, seq_len=1000, epochs=1, tokens=tokens))))
    if separator is not None:
        assert all((each[-1], each[:-1].max() < 256) == (256, True) for each in found)
    texts = [f"{d:02} é " + "x" * length for d, length in enumerate(LENGTHS)]
    assert sorted(map(tokens.decode, found)) == texts
    # Longer lines are cut into sequences.
    made = (make_batch(**batch)["weights"] for batch in taken(loader_of(corpus, epochs=1)))
    assert sum(int(weights.sum()) for weights in made) == sum(length + 5 for length in LENGTHS)


def test_a_separator_is_no_sequence_of_its_own(tmp_path):
    """A document that fills a sequence exactly is cut so that the separator is predicted."""
    (tmp_path / "a.txt").write_text("x" * (SEQ_LEN + 1))
    loader = loader_of(open_corpus(tmp_path / "a.txt"), epochs=1, tokens=ByteTokens(separator=0))
    found = sorted((each.tolist() for each in segments(taken(loader))), key=len)
    assert found == [[ord("x"), 0], [ord("x")] * (SEQ_LEN + 1)]
    # Nor is the last token of a line that fills two sequences, whose first tokens overlap.
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * (2 * SEQ_LEN + 1)}))
    found = segments(taken(loader_of(open_corpus(tmp_path / "a.jsonl"), epochs=1)))
    assert [len(each) for each in found] == [SEQ_LEN + 1] * 2


# --- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["first_fit", "split"])
def test_tokens_are_those_of_the_text(tmp_path, text, bpe, packing):
    """Truncation and padding of the file are disabled, and texts are cut at ends of lines."""
    tokens = TokenizerFile(bpe, separator="<|end|>")
    texts = [text[:9000], text[9000:9300] + "é" * 40 + "\n", "a line's end\n" * 30, "one\n"]
    for name, part in enumerate(texts):
        (tmp_path / f"{name}.txt").write_text(part)
    loader = loader_of(open_corpus(tmp_path), tokens=tokens, epochs=1, packing=packing, batch=1)
    assert loader.vocab_size == tokens.vocab_size == 400
    found = list(segments(taken(loader)))
    ids = np.concatenate(found)
    assert (ids == tokens.separator_id).sum() == len(texts)
    if packing == "split":
        # Chunks start and end at ends of lines, so every line is whole.
        assert Counter(tokens.decode(ids).splitlines()) == Counter("".join(texts).splitlines())
    else:
        # Each chunk's first token is not predicted and duplicated.
        whole = sum(len(tokens.encode(part.encode())) + 1 for part in texts)
        chunks = sum(-(-len(part.encode()) // (16 * (SEQ_LEN + 1))) for part in texts)
        assert whole - chunks <= sum(len(each) - 1 for each in found) < whole


@pytest.mark.parametrize("letters", ["漢字", "aé漢🌀"], ids=["3-bytes", "mixed"])
def test_cuts_never_split_a_character(tmp_path, bpe, letters):
    tokens = TokenizerFile(bpe)
    for shift in range(len(letters[-1].encode())):  # Cuts at each byte of a character.
        text, decoded = "b" * shift + letters * 300, ""
        (tmp_path / "a.txt").write_text(text)
        for part in open_corpus(tmp_path / "a.txt").split(0.3):
            batches = taken(loader_of(part, tokens=tokens, epochs=1, packing="split", batch=1))
            decoded += tokens.decode(np.concatenate(list(segments(batches))))
        assert Counter(decoded) == Counter(text)


def test_saved_tokens_are_those_of_the_tokenizer(lines, tmp_path, bpe, text, monkeypatch):
    tokens, corpus = TokenizerFile(bpe, separator="<|end|>"), open_corpus(lines)
    saved = save_tokens(corpus, tokens, tmp_path / "tokens.npy")
    assert len(saved) == len(corpus)
    assert np.load(tmp_path / "tokens.npy").dtype == np.uint16
    names = sorted(file.name for file in tmp_path.glob("tokens*"))
    assert names == ["tokens.npy", "tokens.offsets.npy"]
    options: Any = {"epochs": 1, "seq_len": 2000, "batch": 1}
    encoded = taken(loader_of(corpus, tokens=tokens, **options))
    assert_same(taken(loader_of(saved, **options)), encoded)
    # A large file is encoded in chunks, which are one document.
    monkeypatch.setattr(chunks, "_SAVE_CHUNK", 100)
    (tmp_path / "long.txt").write_text(text[:1000])
    saved = save_tokens(open_corpus(tmp_path / "long.txt"), tokens, tmp_path / "long.npy")
    assert len(saved) == 1
    ((one,),) = (batch["rows"] for batch in taken(loader_of(saved, **options)))
    assert tokens.decode(one[: saved.size - 1]) == text[:1000]


# --- held out ------------------------------------------------------------------------------------


def test_training_and_held_out_documents_are_disjoint(arrays, tmp_path):
    corpus = open_corpus(arrays)
    for fraction, count in ((0.05, 1), (0.5, 9), (0.99, 17)):
        parts, seen = corpus.split(fraction), []
        for part in parts:
            batches = taken(loader_of(part, epochs=1, packing="split"))
            seen.append({int(each[0]) // 1000 for each in segments(batches)})
        assert not seen[0] & seen[1]
        assert seen[0] | seen[1] == set(range(len(LENGTHS)))
        assert [len(part) for part in parts] == [18 - count, count]
    assert corpus.split(0.5)[1].documents.tolist() == list(range(1, 18, 2))
    train, held_out = corpus.split(0)
    assert (len(train), len(held_out)) == (len(corpus), 0)
    assert train.fingerprint() == corpus.fingerprint()
    # Of a single document the end is held out.
    np.save(tmp_path / "one.npy", np.arange(1000, dtype="i4"))
    seen = [
        np.concatenate(list(segments(taken(loader_of(part, epochs=1, packing="split")))))
        for part in open_corpus(tmp_path / "one.npy").split(0.1)
    ]
    assert [sorted(each.tolist()) for each in seen] == [list(range(900)), list(range(900, 1000))]


# --- processes and resuming -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "packing", "epochs"),
    [
        ("arrays", "first_fit", None),
        ("arrays", "split", 1),
        ("arrays", "none", None),
        ("lines", "first_fit", 1),
        ("lines", "split", None),
        ("lines", "none", 1),
    ],
)
def test_processes_load_the_same_batches_and_resume_from_any_step(request, source, packing, epochs):
    """As any number of processes; also backwards, and after the end."""
    file, batch = request.getfixturevalue(source), 4 if source == "arrays" else 9
    options: Any = {"packing": packing, "epochs": epochs}
    options |= {"batch": np.int64(batch), "seed": np.int64(3)}

    def load(rows=None):
        return loader_of(open_corpus(file), rows=rows, **options)

    states, whole = [], []
    with load() as loader:  # Of 9 streams, several share a thread.
        states.append(json.dumps(loader.get_state()))
        for sequences in loader:
            whole.append(sequences)
            states.append(json.dumps(loader.get_state()))
            if epochs is None and len(whole) == 10:
                break
        half = len(whole) // 2
        for point in (len(whole), half, 0):
            loader.set_state(json.loads(states[point]))
            assert loader.step == point
            assert_same([next(loader) for _ in whole[point:]], whole[point:])
            assert epochs is None or next(loader, None) is None
    state, got = states[1], whole[:1]
    for _ in range(3):  # Loaders whose state was itself restored.
        with load() as fresh:
            fresh.set_state(json.loads(state))
            got += [next(fresh) for _ in range((len(whole) - 1) // 3)]
            state = json.dumps(fresh.get_state())
    assert len(got) > 3
    assert_same(got, whole[: len(got)])
    processes, parts = batch if batch < 9 else 3, []
    for process in range(processes):
        rows = rows_of_process(batch, process, processes)
        with load(rows) as loader:
            assert_same([next(loader) for _ in range(half)], whole[:half], list(rows))
            parts.append(json.loads(json.dumps(loader.get_state())))
    merged = merge_states(reversed(parts))
    assert merged == json.loads(states[half]) == gather_state(merged)
    for rows in (range(2), (3, 2)):
        loader = load(rows)
        loader.set_state(merged)
        count = len(whole) - half if epochs is None else None
        assert_same(taken(loader, count), whole[half:], list(rows))


def test_a_process_reads_no_document_of_another_s_sequences(lines, monkeypatch):
    read = []
    for process in range(2):
        corpus = open_corpus(lines)
        own = data_files.reads_of(corpus, monkeypatch)
        # Endless, because with an end all chunks are counted first; an epoch is 18 chunks.
        loader = loader_of(corpus, rows=rows_of_process(2, process, 2), batch=2, prefetch=0)
        taken(loader, 1)
        read.append(own[:9])
    assert not set(read[0]) & set(read[1])


@pytest.mark.parametrize("packing", ["first_fit", "split", "none"])
def test_resuming_reads_only_what_the_next_sequences_are_packed_from(
    tmp_path, packing, monkeypatch
):
    np.save(tmp_path / "many.npy", np.arange(1000 * 9, dtype="i4").reshape(1000, 9))
    corpus = open_corpus(tmp_path / "many.npy")
    with loader_of(corpus, packing=packing) as loader:
        for _ in range(100):  # More than 700 documents.
            next(loader)
        state = loader.get_state()
    reads = data_files.reads_of(corpus, monkeypatch)
    with loader_of(corpus, packing=packing, prefetch=0) as loader:
        loader.set_state(state)
        next(loader)
    assert len(reads) <= 4 * 2 * 17  # Documents of 9 tokens in up to 16 bins of 17, in 4 streams.
    assert len(json.dumps(state)) < 3000


# --- threads -------------------------------------------------------------------------


def test_threads_end_with_the_loader_closed_or_not(arrays):
    before = threading.active_count()
    loader, unclosed = (loader_of(open_corpus(arrays)) for _ in range(2))
    next(loader)
    next(unclosed)
    assert threading.active_count() > before
    for _ in range(2):
        loader.close()
    del unclosed
    assert threading.active_count() == before
    for call in (next, type(loader).get_state):
        with pytest.raises(ValueError, match="the loader is closed: make another one"):
            call(loader)
