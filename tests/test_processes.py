"""Batches placed by two processes, as on two machines, over local CPU devices."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from burst_jax.layout import to_layout

SCRIPT = Path(__file__).parent / "support" / "two_processes.py"
ROWS = np.arange(4 * 17).reshape(4, 17)  # As in the script.


@pytest.fixture(scope="module")
def seen():
    """What each of the processes saw."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "error", str(SCRIPT), str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(index)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    try:
        ended = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.parametrize(
    ("case", "data", "seq"),
    [
        ("whole", 2, 2),
        ("whole, explicit", 2, 2),
        ("own", 2, 2),
        ("own, four parts", 4, 1),
        ("same rows", 1, 4),
    ],
)
def test_every_device_has_its_part_of_all_rows(seen, case, data, seq):
    whole = to_layout(ROWS[:, :-1], "zigzag", seq)
    rows, columns = 4 // data, 16 // seq
    for process, each in enumerate(seen):
        assert each[case]["shape"] == [4, 16]
        for device, (row, column, tokens) in enumerate(each[case]["held"], 2 * process):
            assert (row, column) == (device // seq * rows, device % seq * columns)
            part = whole[row : row + rows, column : column + columns]
            np.testing.assert_array_equal(tokens, part)


MISTAKES = {
    "own as whole": "batch differs between processes [0, 1]: every process must pass the same "
    "whole batch; for rows that are the process's own, pass process_local=True",
    "own of shared rows": "batch differs between processes [0, 1], whose devices hold parts of the "
    "same rows: pass the same rows",
    "fewer": "batch has other names, dtypes or sizes on another process",
    "indivisible": "batch has 3 rows: they must be a multiple of 2, the parts of mesh axes "
    "('data',) that they are for; rows that are this process's own need process_local=True",
    "indivisible own": "batch has 1 rows: they must be a multiple of 2, the parts of mesh axes "
    "('data',) that they are for",
    "segments on one": "make segment_ids on all processes or on none",
}


@pytest.mark.parametrize(("case", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_raises_on_both_processes(seen, case, message):
    for each in seen:
        assert isinstance(each[case], str)
        assert message in each[case]


def test_an_error_of_one_process_does_not_leave_the_other_waiting(seen):
    first, second = (each["indivisible on one"] for each in seen)
    assert "batch has other names, dtypes or sizes on another process" in first
    assert "batch has 3 rows: they must be a multiple of 2" in second
