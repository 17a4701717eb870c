"""A loader's state, and which rows of a batch a process reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

type State = dict[str, Any]

VERSION = 1


def rows_of_process(batch: int, process: int, processes: int) -> range:
    """The rows of each batch that a process reads if every process has an equal part.

    It is the part that ``place_batch(..., process_local=True)`` expects where the mesh's batch axes
    are outermost and divide evenly among processes. Processes whose devices share rows, because the
    sequence axis goes through both, read the same rows: count them as one here.

    Args:
      batch: rows of a batch, on all processes together.
      process: index of the process, like ``jax.process_index()``.
      processes: how many there are, like ``jax.process_count()``.

    Raises:
      ValueError: the processes do not divide the batch, or there is no such process.
    """
    if processes < 1 or not 0 <= process < processes:
        raise ValueError(
            f"process is {process}, processes {processes}: it must be from 0 to processes - 1"
        )
    if batch % processes:
        raise ValueError(
            f"batch is {batch}, processes {processes}: use a batch that is a multiple of the "
            f"processes, like {-(-batch // processes) * processes}"
        )
    each = batch // processes
    return range(process * each, (process + 1) * each)


def merge_states(states: Iterable[Mapping[str, Any]]) -> State:
    """Joins the states of the loaders of one run, which have different rows of the same batches.

    Args:
      states: what ``Loader.get_state`` returned on each process, after the same step.

    Returns:
      A state with the rows of all of them, which fits any number of processes.

    Raises:
      ValueError: there are none, or they are of different steps, data or options.
    """
    states = list(states)
    if not states:
        raise ValueError("states is empty: pass what Loader.get_state returned on each process")
    first = states[0]
    for other in states[1:]:
        check_same(first["options"], other["options"], "another loader")
        if other["step"] != first["step"]:
            raise ValueError(
                f"states are of steps {first['step']} and {other['step']}: take them from all "
                "processes after the same step"
            )
    rows = {row: of_row for state in states for row, of_row in state["rows"].items()}
    return {**first, "rows": dict(sorted(rows.items(), key=lambda item: int(item[0])))}


def gather_state(state: State) -> State:
    """The merged states of all processes of the program, on each of them: see :func:`merge_states`.

    With several processes it is a collective of some hundred bytes a row, so every process makes
    this call after the same step. With one process it returns what it is given.

    Args:
      state: this process's, from ``Loader.get_state``.
    """
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return state
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([len(text)], np.int32)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    texts = np.asarray(multihost_utils.process_allgather(padded))
    return merge_states(
        json.loads(each[: int(size)].tobytes())
        for each, size in zip(texts, sizes.reshape(-1), strict=True)
    )


def check_same(
    saved: Mapping[str, Any], here: Mapping[str, Any], whose: str = "this loader"
) -> None:
    """Raises ValueError unless two loaders' options are the same."""
    for name in here:
        if saved.get(name) != here[name]:
            raise ValueError(
                f"the state was saved with {name} {saved.get(name)!r}, {whose} has {here[name]!r}: "
                "rows come out the same with the same documents and options alone; use those it "
                "was saved with, or start anew without the state"
            )
