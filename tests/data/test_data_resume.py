"""A loader's rows are the same for any number of processes, and after any interruption."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import loader_of, reads_of, taken, write_arrays, write_lines

from burst_jax.data import gather_state, merge_states, open_corpus, rows_of_process
from burst_jax.training import make_batch

PACKINGS = ("first_fit", "split", "none")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def arrays(tmp_path):
    return write_arrays(tmp_path / "arrays")


@pytest.fixture
def lines(tmp_path):
    return write_lines(tmp_path / "texts.jsonl")


def assert_same(got, want):
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one["rows"], other["rows"])
        assert (one["segment_ids"] is None) == (other["segment_ids"] is None)
        if one["segment_ids"] is not None:
            np.testing.assert_array_equal(one["segment_ids"], other["segment_ids"])


# --- processes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("epochs", [None, 2])
def test_any_number_of_processes_reads_the_same_batches(arrays, packing, epochs):
    corpus, count = open_corpus(arrays), 25 if epochs is None else None
    options = {"packing": packing, "epochs": epochs}
    whole = taken(loader_of(corpus, **options), count)
    for processes in (2, 4):
        each = [
            taken(loader_of(corpus, rows=rows_of_process(4, process, processes), **options), count)
            for process in range(processes)
        ]
        joined = [
            {
                name: None
                if of_step[0][name] is None
                else np.concatenate([part[name] for part in of_step])
                for name in whole[0]
            }
            for of_step in zip(*each, strict=True)
        ]
        assert_same(joined, whole)


def test_rows_may_be_any_of_the_batch_in_any_order(arrays):
    corpus = open_corpus(arrays)
    whole = taken(loader_of(corpus), 5)
    some = taken(loader_of(corpus, rows=(3, 1)), 5)
    for one, other in zip(some, whole, strict=True):
        np.testing.assert_array_equal(one["rows"], other["rows"][[3, 1]])


def test_a_process_reads_no_document_of_another_one_s_rows(lines, monkeypatch):
    read = []
    for process in range(2):
        corpus = open_corpus(lines)
        mine = reads_of(corpus, monkeypatch)
        # Endless, because with an end the pieces are counted first; an epoch is 18 pieces.
        loader = loader_of(corpus, rows=rows_of_process(2, process, 2), batch=2, prefetch=0)
        taken(loader, 1)
        read.append(mine[:9])
    assert not set(read[0]) & set(read[1])


# --- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("source", ["arrays", "lines"])
@pytest.mark.parametrize("epochs", [None, 1])
def test_goes_on_from_any_step_with_the_same_rows(request, source, packing, epochs):
    corpus = open_corpus(request.getfixturevalue(source))
    options = {"packing": packing, "epochs": epochs, "batch": 3}
    whole = taken(loader_of(corpus, **options), 25 if epochs is None else None)
    points = random.Random(f"{source}{packing}").sample(range(len(whole)), 2)
    for point in [0, len(whole) - 1, len(whole), *points]:
        with loader_of(corpus, **options) as killed:
            for _ in range(point):
                next(killed)
            state = json.dumps(killed.get_state())
        loader = loader_of(open_corpus(request.getfixturevalue(source)), **options)
        loader.set_state(json.loads(state))
        assert loader.step == point
        if epochs is None:
            assert_same(taken(loader, len(whole) - point), whole[point:])
        else:
            assert_same(taken(loader), whole[point:])


def test_goes_on_from_a_state_that_was_itself_restored(lines):
    whole = taken(loader_of(open_corpus(lines), packing="split"), 40)
    state, got = None, []
    for _ in range(8):
        with loader_of(open_corpus(lines), packing="split") as loader:
            if state is not None:
                loader.set_state(state)
            got += [next(loader) for _ in range(5)]
            state = json.loads(json.dumps(loader.get_state()))
    assert_same(got, whole)


def test_a_state_is_json_whatever_integers_the_options_are(arrays):
    options: dict[str, Any] = dict.fromkeys(("seq_len", "batch", "seed", "epochs"), np.int64(3))
    with loader_of(open_corpus(arrays), **options, rows=np.arange(2)) as loader:
        assert json.loads(json.dumps(loader.get_state())) == loader.get_state()


def test_a_loader_goes_back_too(lines):
    with loader_of(open_corpus(lines)) as loader:
        start = loader.get_state()
        first = [next(loader) for _ in range(9)]
        loader.set_state(start)
        assert_same([next(loader) for _ in range(9)], first)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("epochs", [None, 2])
def test_goes_on_with_another_number_of_processes(arrays, packing, before, after, epochs):
    corpus, options = open_corpus(arrays), {"packing": packing, "epochs": epochs}
    whole = taken(loader_of(corpus, **options), 20)
    states = []
    for process in range(before):
        with loader_of(corpus, rows=rows_of_process(4, process, before), **options) as loader:
            for _ in range(7):
                next(loader)
            states.append(json.loads(json.dumps(loader.get_state())))
    state = merge_states(states)
    for process in range(after):
        rows = rows_of_process(4, process, after)
        loader = loader_of(corpus, rows=rows, **options)
        loader.set_state(state)
        for batch, want in zip(taken(loader, 13), whole[7:], strict=True):
            np.testing.assert_array_equal(batch["rows"], want["rows"][list(rows)])


def test_the_state_of_one_process_needs_no_gathering(arrays):
    with loader_of(open_corpus(arrays)) as loader:
        next(loader)
        assert gather_state(loader.get_state()) == loader.get_state()


@pytest.mark.parametrize("packing", PACKINGS)
def test_resuming_reads_what_the_next_rows_are_packed_from_and_no_more(
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
    assert len(reads) <= 4 * 2 * 17  # Documents of 9 tokens in up to 16 rows of 17, in 4 streams.
    assert len(json.dumps(state)) < 3000


FRESH = """
    import json, sys
    import numpy as np
    from burst_jax.data import Loader, open_corpus

    with Loader(open_corpus(sys.argv[1]), seq_len=16, batch=4) as loader:
        loader.set_state(json.loads(sys.stdin.read()))
        print(json.dumps([next(loader)["rows"].tolist() for _ in range(10)]))
"""


@pytest.mark.slow
def test_two_processes_put_the_same_batches_onto_a_mesh_and_go_on(arrays):
    """And the state that they gather is that of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "error", str(ROOT / "tests/support/two_loaders.py"), str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(arrays)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ended = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
    said = [json.loads(out.splitlines()[-1]) for out, _ in ended]
    with loader_of(open_corpus(arrays), batch=8) as loader:
        whole = [next(loader) for _ in range(3)]
        assert said[0]["state"] == said[1]["state"] == loader.get_state()
        whole += [next(loader) for _ in range(3)]
    for step, rows in enumerate(whole):
        want = make_batch(**rows, layout="zigzag", num_shards=2)["inputs"]
        for shards in (each["seen"][step] for each in said):
            assert len(shards) == 4
            for row, column, tokens in shards:
                np.testing.assert_array_equal(tokens, want[row : row + 2, column : column + 8])


@pytest.mark.slow
def test_goes_on_in_a_fresh_process(lines):
    with loader_of(open_corpus(lines)) as loader:
        for _ in range(11):
            next(loader)
        state = json.dumps(loader.get_state())
        want = [next(loader)["rows"].tolist() for _ in range(10)]
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(FRESH), str(lines)]
    run = subprocess.run(command, input=state, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert (json.loads(run.stdout), run.stderr) == (want, "")


# --- threads and imports -----------------------------------------------------------------------


def test_threads_end_with_the_loader(arrays):
    before = threading.active_count()
    loader = loader_of(open_corpus(arrays))
    next(loader)
    assert threading.active_count() > before
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="the loader is closed: make another one"):
        next(loader)
    with pytest.raises(ValueError, match="the loader is closed: make another one"):
        loader.get_state()


def test_an_unclosed_loader_s_threads_end_with_it(arrays):
    before = threading.active_count()
    loader = loader_of(open_corpus(arrays))
    next(loader)
    del loader
    assert threading.active_count() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import sys, burst_jax, burst_jax.training; assert 'grain' not in sys.modules",
        # Nothing is printed where a loader is still open when the interpreter ends.
        "from burst_jax.data import *; l = Loader(open_corpus(), seq_len=64, batch=4); next(l)",
    ],
    ids=["core-without-grain", "left-open"],
)
def test_in_a_fresh_interpreter(code):
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")
