"""Several processes of one run: starting them, waiting for them, ending them all when one fails."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

# Launchers that JAX knows: (name, a variable of each process, the variable that counts them).
_LAUNCHERS = (
    ("SLURM", "SLURM_STEP_NODELIST", "SLURM_NTASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("Kubernetes", "JOB_COMPLETION_INDEX", None),
)


class Processes:
    """The processes of a run, which :func:`initialize` starts; a context manager around the run.

    When the run in it ends, it waits until all processes have ended theirs. When the run in it
    raises, it prints the error with the number and the host of the process and ends the process
    without waiting, so that the others do not wait for it either: JAX ends them within
    ``heartbeat_timeout`` seconds, with a message that has the number of the one that is gone. Only
    after an error that came of a ``JaxRuntimeError``, which may come of another process that is
    gone, it waits as long for JAX to say so. With one process it does nothing.

    Attributes:
      index: number of this process, from 0 on.
      count: number of processes.
      heartbeat_timeout: seconds, see :func:`initialize`.
    """

    def __init__(self, index: int, count: int, heartbeat_timeout: int) -> None:
        self.index, self.count, self.heartbeat_timeout = index, count, heartbeat_timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.count == 1:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            jax.distributed.shutdown()
            return
        code = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        _say(f"process {self.index} of {self.count} on {socket.gethostname()} ends: {error!r}")
        if another_may_be_gone(error):
            # JAX knows which process that is when its heartbeats have been missing for long enough,
            # says so and ends this process.
            _say(f"waiting up to {self.heartbeat_timeout} s for JAX to say whether another is gone")
            time.sleep(self.heartbeat_timeout + 5)
        # Without JAX's own end, which would wait for the others.
        os._exit(code if isinstance(code, int) else 1)


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    heartbeat_timeout: int = 30,
    start_timeout: int = 300,
) -> Processes:
    """Joins this process to the others of the run; does nothing if there is only one.

    Call it before anything that asks for devices. What is not given is taken from the cluster's
    environment: SLURM (``srun``), Open MPI (``mpirun``) and Kubernetes (an indexed job) are known
    to JAX. Without arguments and without such an environment there is one process; so there is with
    ``num_processes=1``, which also takes a process out of what the launcher has started. ::

        with initialize():
            ...  # The same program on one process and on many.

    A process that dies or stalls (``SIGKILL``, a host that is gone) stops sending heartbeats, and
    JAX ends the others ``heartbeat_timeout`` seconds later. Their last message is "The following
    tasks are unhealthy (stopped sending heartbeats)", with the numbers of those processes. If it is
    process 0, which listens to the heartbeats, the message is about the coordination service. Each
    process prints its host and its number on stderr when it has joined.

    Args:
      coordinator: ``"host:port"`` of process 0, a port that is free there.
      num_processes: number of processes.
      process_id: number of this one, from 0 on.
      local_device_ids: which of the host's GPUs this process takes. None takes all of them, but
        under SLURM and Open MPI, with more than one process, the one whose number on the host is
        the process'. Where the launcher shows each process its own GPU only (``srun
        --gpus-per-task=1``), pass ``[0]``.
      heartbeat_timeout: seconds without a heartbeat after which a process counts as dead. The
        heartbeats come from a thread that neither Python nor a compilation holds up; 10 is enough
        on busy hosts, and less wins nothing.
      start_timeout: seconds that a process waits for the others to start.

    Returns:
      Number of this process and of all, a context manager.

    Raises:
      ValueError: an argument is missing and no environment has it; one is out of range; the
        coordinator is no ``"host:port"``.
      RuntimeError: JAX has devices already.
    """
    _check(coordinator, num_processes, process_id, heartbeat_timeout, start_timeout)
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    launcher, count = _launcher()
    alone = len(missing) == len(given) and (launcher is None or count == "1")
    if num_processes == 1 or alone:
        return Processes(0, 1, heartbeat_timeout)
    if missing and launcher is None:
        known = ", ".join(
            f"{name} is {value!r}" for name, value in given.items() if value is not None
        )
        raise ValueError(
            f"{known}, but nothing says {' and '.join(missing)}: pass all three, or start the "
            "processes by srun, by mpirun or as an indexed Kubernetes job and pass none"
        )
    here = f"{socket.gethostname()}, pid {os.getpid()}"
    # JAX ends a process that has waited in vain, and says nothing that one could understand.
    _say(f"{here}: waiting up to {start_timeout} s for the other processes of the run")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_device_ids=local_device_ids,
            heartbeat_timeout_seconds=heartbeat_timeout,
            initialization_timeout=start_timeout,
        )
    except ValueError as error:
        if not missing:
            raise
        raise ValueError(
            f"{launcher} has started this process, but JAX cannot tell from it "
            f"{' and '.join(missing)} ({error}): pass them, or num_processes=1 "
            "if each process is a run of its own; for Kubernetes, pip install 'jax[k8s]'"
        ) from error
    processes = Processes(jax.process_index(), jax.process_count(), heartbeat_timeout)
    # JAX names a process that is gone by its number only.
    _say(f"{here}: process {processes.index} of {processes.count}")
    return processes


def another_may_be_gone(error: BaseException) -> bool:
    """Whether the error is, or came of, one that a collective raises when its other end is gone."""
    if jax.process_count() == 1:
        return False
    here: BaseException | None = error
    while here is not None and not isinstance(here, jax.errors.JaxRuntimeError):
        here = here.__cause__ or here.__context__
    return here is not None


def is_main() -> bool:
    """Whether this is process 0, the one that prints and writes."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when all processes have called it with this ``name``; at once if there is one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather_json(value: Any) -> list[Any]:
    """The JSON values of all processes, by process index; a collective of their texts."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([len(text)], np.int32)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    texts = np.asarray(multihost_utils.process_allgather(padded))
    return [
        json.loads(row[: int(size)].tobytes())
        for row, size in zip(texts, sizes.reshape(-1), strict=True)
    ]


def _check(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat_timeout: int,
    start_timeout: int,
) -> None:
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"coordinator is {coordinator!r}: write it like host0:1234")
    for name, value in (
        ("num_processes", num_processes),
        ("heartbeat_timeout", heartbeat_timeout),
        ("start_timeout", start_timeout),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if process_id is not None:
        if process_id < 0:
            raise ValueError(f"process_id is {process_id}: processes count from 0")
        if num_processes is not None and process_id >= num_processes:
            raise ValueError(
                f"process_id is {process_id}: with num_processes {num_processes} it must be in "
                f"0 ... {num_processes - 1}"
            )


def _launcher() -> tuple[str | None, str | None]:
    """The launcher that has started this process, and how many it has started."""
    for name, mark, count in _LAUNCHERS:
        if mark in os.environ:
            return name, os.environ.get(count) if count else None
    return None, None


def _say(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
