"""A loader's batches are the same for any number of processes and after any interruption."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from data_files import loader_of, reads_of, taken, write_arrays, write_lines

from burst_jax.data import gather_state, merge_states, open_corpus, rows_of_process

PACKINGS = ("first_fit", "split", "none")


@pytest.fixture
def arrays(tmp_path):
    return write_arrays(tmp_path / "arrays")


@pytest.fixture
def lines(tmp_path):
    return write_lines(tmp_path / "texts.jsonl")


def assert_same(got, want, rows: Any = slice(None)):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        for name in ("rows", "segment_ids"):
            assert (one[name] is None) == (other[name] is None)
            if one[name] is not None:
                np.testing.assert_array_equal(one[name], other[name][rows])


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "epochs"), [("first_fit", None), ("first_fit", 2), ("split", 1), ("none", None)]
)
def test_processes_load_their_parts_of_the_same_batches_and_resume_as_any_number(
    arrays, packing, epochs
):
    corpus, options = open_corpus(arrays), {"packing": packing, "epochs": epochs}
    whole = taken(loader_of(corpus, **options), 25 if epochs is None else None)
    half, merged = len(whole) // 2, {}
    for processes in (1, 4):
        states = []
        for process in range(processes):
            rows = rows_of_process(4, process, processes)
            with loader_of(corpus, rows=rows, **options) as loader:
                assert_same([next(loader) for _ in range(half)], whole[:half], list(rows))
                states.append(json.loads(json.dumps(loader.get_state())))
        merged[processes] = merge_states(reversed(states))
    assert merged[1] == merged[4]
    for rows in (rows_of_process(4, 0, 2), (3, 2)):
        loader = loader_of(corpus, rows=rows, **options)
        loader.set_state(merged[4])
        count = len(whole) - half if epochs is None else None
        assert_same(taken(loader, count), whole[half:], list(rows))


def test_a_process_reads_no_document_of_another_s_sequences(lines, monkeypatch):
    read = []
    for process in range(2):
        corpus = open_corpus(lines)
        own = reads_of(corpus, monkeypatch)
        # Endless, because with an end all chunks are counted first; an epoch is 18 chunks.
        loader = loader_of(corpus, rows=rows_of_process(2, process, 2), batch=2, prefetch=0)
        taken(loader, 1)
        read.append(own[:9])
    assert not set(read[0]) & set(read[1])


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("source", "batch"), [("arrays", 3), ("lines", 9)])
@pytest.mark.parametrize("epochs", [None, 1])
def test_resumes_from_any_step_with_the_same_batches(request, source, packing, epochs, batch):
    """Also backwards, after the end. With 9 streams, several share a thread."""
    corpus = open_corpus(request.getfixturevalue(source))
    options = {"packing": packing, "epochs": epochs, "batch": batch}
    states, whole = [], []
    with loader_of(corpus, **options) as loader:
        states.append(json.dumps(loader.get_state()))
        for rows in loader:
            whole.append(rows)
            states.append(json.dumps(loader.get_state()))
            if epochs is None and len(whole) == 15:
                break
        for point in (len(whole), len(whole) // 2, 0):
            loader.set_state(json.loads(states[point]))
            assert loader.step == point
            assert_same([next(loader) for _ in whole[point:]], whole[point:])
            assert epochs is None or next(loader, None) is None
    state, got = states[1], whole[:1]
    for _ in range(3):  # Loaders whose state was itself restored.
        with loader_of(open_corpus(request.getfixturevalue(source)), **options) as fresh:
            fresh.set_state(json.loads(state))
            got += [next(fresh) for _ in range((len(whole) - 1) // 3)]
            state = json.dumps(fresh.get_state())
    assert len(got) > 3
    assert_same(got, whole[: len(got)])


def test_a_state_is_json_for_any_integer_types_of_options(arrays):
    options: dict[str, Any] = dict.fromkeys(("seq_len", "batch", "seed", "epochs"), np.int64(3))
    with loader_of(open_corpus(arrays), **options, rows=np.arange(2)) as loader:
        next(loader)
        state = loader.get_state()
        assert json.loads(json.dumps(state)) == state == gather_state(state)


@pytest.mark.parametrize("packing", PACKINGS)
def test_resuming_reads_only_what_the_next_sequences_are_packed_from(
    tmp_path, packing, monkeypatch
):
    documents = 3000
    np.save(tmp_path / "many.npy", np.arange(documents * 9, dtype="i4").reshape(documents, 9))
    corpus = open_corpus(tmp_path / "many.npy")
    with loader_of(corpus, packing=packing) as loader:
        for _ in range(300):
            next(loader)
        state = loader.get_state()
    reads = reads_of(corpus, monkeypatch)
    with loader_of(corpus, packing=packing, prefetch=0) as loader:
        loader.set_state(state)
        next(loader)
    assert len(reads) <= 4 * 2 * 17  # Documents of 9 tokens in up to 16 bins of 17, in 4 streams.
    assert len(json.dumps(state)) < 3000


# --- threads and imports -------------------------------------------------------------------------


def test_threads_end_with_the_loader_closed_or_not(arrays):
    before = threading.active_count()
    loader = loader_of(open_corpus(arrays))
    next(loader)
    assert threading.active_count() > before
    loader.close()
    loader.close()
    assert threading.active_count() == before
    for call in (next, type(loader).get_state):
        with pytest.raises(ValueError, match="the loader is closed: make another one"):
            call(loader)
    unclosed = loader_of(open_corpus(arrays))
    next(unclosed)
    del unclosed
    assert threading.active_count() == before


@pytest.mark.slow
def test_a_loader_that_is_open_at_interpreter_shutdown_prints_nothing():
    """And the core does not import grain."""
    code = """
import sys, burst_jax, burst_jax.training
assert 'grain' not in sys.modules
from burst_jax.data import *
loader = Loader(open_corpus(), seq_len=64, batch=4)
next(loader)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
