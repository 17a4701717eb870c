"""Processes of a run: start-up, barriers, process-0 actions, and termination when one fails."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

# Launchers that JAX detects: (name, a variable of each process, the variable with their number).
_LAUNCHERS = (
    ("SLURM", "SLURM_STEP_NODELIST", "SLURM_NTASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("Kubernetes", "JOB_COMPLETION_INDEX", None),
)
# Errors of process 0 that the other processes raise with the same class; others are RuntimeErrors.
_KINDS: tuple[type[Exception], ...] = (
    FileExistsError,
    FileNotFoundError,
    PermissionError,
    OSError,
    ImportError,
    ValueError,
)
# Seconds after start_timeout when JAX itself would end the process, with the stack of its own code.
_SPARE = 600
# Seconds that process 0 waits for longer than the others.
_GRACE = 2.0
# Size of the broadcast error message in bytes: the array has the same shape on all processes.
_MESSAGE_BYTES = 2048


class Processes:
    """The processes of a run, started by :func:`initialize`; a context manager around the run.

    If the body returns, it waits until all processes have returned. If the body raises, it prints
    the error with the process index and host, and exits this process at once, so that the others do
    not wait for it: JAX ends them within ``heartbeat_timeout`` seconds, with a message that names
    the missing process. Only after a ``JaxRuntimeError``, which may be caused by another process
    that has exited, it waits for JAX to report that. With one process it does nothing.

    Attributes:
      index: index of this process, from 0.
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
        _log(f"process {self.index} of {self.count} on {socket.gethostname()} ends: {error!r}")
        if another_may_be_gone(error):
            # After the heartbeat timeout JAX names the missing process and ends this one.
            _log(f"waiting up to {self.heartbeat_timeout} s for JAX to report a missing process")
            time.sleep(self.heartbeat_timeout + 5)
        # Not sys.exit: JAX's exit handler would wait for the other processes.
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
    """Joins this process to the others of the run; a no-op for a single process.

    Call it before anything that asks for devices. Arguments that are None are read from the cluster
    environment: JAX detects SLURM (``srun``), Open MPI (``mpirun``) and Kubernetes (an indexed
    job). Without arguments and without such an environment the run has one process; the same holds
    for ``num_processes=1``, also under a launcher. ::

        with initialize():
            ...  # The same program on one process and on many.

    A process that is killed or stalls, or whose host is lost, stops sending heartbeats, and JAX
    ends the others ``heartbeat_timeout`` seconds later with the message "The following tasks are
    unhealthy (stopped sending heartbeats)" and the indices of those processes. If process 0, which
    monitors the heartbeats, is lost, the message is about the coordination service. Each process
    prints its host and index on stderr when it has joined.

    Args:
      coordinator: ``"host:port"`` of process 0, with a port that is free there.
      num_processes: number of processes.
      process_id: index of this process, from 0.
      local_device_ids: the host's GPUs that this process uses. None is all of them, but under SLURM
        and Open MPI, with several processes, the GPU of the process's local rank. If the launcher
        shows each process its own GPU only (``srun --gpus-per-task=1``), pass ``[0]``.
      heartbeat_timeout: seconds without a heartbeat after which a process is considered lost.
        Heartbeats are sent by a thread that neither Python nor compilation blocks; 10 is enough on
        busy hosts.
      start_timeout: seconds that a process waits for the others to start.

    Returns:
      Index of this process and number of processes, a context manager.

    Raises:
      ValueError: an argument is missing and the environment does not define it; one is out of
        range; the coordinator is not ``"host:port"``; the processes have different
        ``num_processes``, numbers of devices, or versions of JAX.
      TimeoutError: nothing listens at ``coordinator`` within ``start_timeout``: process 0 has not
        started, or has ended. Or other processes have not joined, or ``num_processes`` is larger
        than their number. End the process then: JAX still waits in a thread.
      RuntimeError: JAX's backends have started.
    """
    _check(
        coordinator,
        num_processes=num_processes,
        process_id=process_id,
        heartbeat_timeout=heartbeat_timeout,
        start_timeout=start_timeout,
    )
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    launcher, count = _launcher()
    alone = len(missing) == len(given) and (launcher is None or count == "1")
    if num_processes == 1 or alone:
        return Processes(0, 1, heartbeat_timeout)
    if missing and launcher is None:
        raise ValueError(_without_launcher(given))
    here = f"{socket.gethostname()}, pid {os.getpid()}"
    _log(f"{here}: waiting up to {start_timeout} s for the other processes of the run")
    start = time.monotonic()
    if coordinator is not None and process_id:
        _wait_for(coordinator, start_timeout)
    join = functools.partial(
        jax.distributed.initialize, coordinator, num_processes, process_id,
        local_device_ids=local_device_ids, heartbeat_timeout_seconds=heartbeat_timeout,
        initialization_timeout=start_timeout + _SPARE,
    )  # fmt: skip
    try:
        left = max(1.0, start_timeout - (time.monotonic() - start))
        # Processes time out together. Process 0 serves the others, so it ends last.
        _join(join, left if process_id else left + _GRACE, num_processes or count)
    except ValueError as error:
        if not missing:
            raise
        raise ValueError(
            f"{launcher} has started this process, but JAX cannot detect {' and '.join(missing)} "
            f"({error}): pass them, or num_processes=1 if each process is a run of its own; for "
            "Kubernetes, pip install 'jax[k8s]'"
        ) from error
    processes = Processes(jax.process_index(), jax.process_count(), heartbeat_timeout)
    # JAX names a missing process by its index only.
    _log(f"{here}: process {processes.index} of {processes.count}")
    _check_devices([device.process_index for device in jax.devices()])
    check_same(
        {
            "num_processes": num_processes or processes.count,
            "the version of jax": jax.__version__,
        }
    )
    return processes


def _without_launcher(given: Mapping[str, Any]) -> str:
    """The message of arguments of :func:`initialize` some of which nothing defines."""
    known = ", ".join(f"{name} is {value!r}" for name, value in given.items() if value is not None)
    missing = " and ".join(name for name, value in given.items() if value is None)
    return (
        f"{known}, but {missing} cannot be detected: pass all three, or start the processes by "
        "srun, by mpirun or as an indexed Kubernetes job and pass none"
    )


def _join(
    initialize: Callable[[], None],
    seconds: float,
    count: int | str | None,
) -> None:
    """Calls ``initialize`` in a thread, for some seconds.

    Where it does not end, JAX would end this process with the stack of its own code.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            initialize()
        except BaseException as error:  # Raised below, in the caller's thread.
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="jax.distributed.initialize")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise TimeoutError(
            f"not all processes of this run have joined within {seconds:.0f} s: num_processes is "
            f"{count} here; start the missing ones, see whether they have ended with an "
            "error, or correct num_processes, which must be the same for all"
        )


def _wait_for(coordinator: str, seconds: int) -> None:
    """Returns when something listens at ``coordinator``.

    JAX would end this process with the stack of its own code.
    """
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"no process 0 at {coordinator} within {seconds} s ({error}): start it, see "
                    "whether it has ended with an error, or correct coordinator"
                ) from None
        time.sleep(0.2)


def _check_devices(owners: Sequence[int]) -> None:
    """Raises ValueError unless all processes own equally many devices, as collectives need."""
    counts = {process: owners.count(process) for process in sorted(set(owners))}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} on process {process}" for process, count in counts.items())
        raise ValueError(
            f"the processes of this run have different numbers of devices, {each}: show each the "
            "same number (on CPUs JAX_NUM_CPU_DEVICES, on GPUs local_device_ids)"
        )


def another_may_be_gone(error: BaseException) -> bool:
    """Whether the error is, or was caused by, the error of a collective whose peer has exited."""
    if jax.process_count() == 1:
        return False
    here: BaseException | None = error
    while here is not None and not isinstance(here, jax.errors.JaxRuntimeError):
        here = here.__cause__ or here.__context__
    return here is not None


def is_main() -> bool:
    """Whether this is process 0, which prints and writes files."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when all processes have called it with this ``name``; at once for one process."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def by_first_process(action: Callable[[], None]) -> None:
    """Calls ``action`` on process 0 only; all processes return when it has returned.

    All processes must call this together. With one process it is ``action()``.

    Raises:
      Exception: the error of ``action``. Process 0 raises it; the others raise one with the same
        message, of the same class if that is a common one, else a RuntimeError.
    """
    error = None
    if jax.process_index() == 0:
        try:
            action()
        except Exception as raised:
            error = raised
    # The broadcast is also the barrier: it returns when process 0 has finished.
    encoded = np.asarray(multihost_utils.broadcast_one_to_all(_encode(error)))
    if error is not None:
        raise error
    number, message = int(encoded[0]), bytes(encoded[1:]).rstrip(b"\0").decode(errors="replace")
    if number:
        kind = (*_KINDS, RuntimeError)[number - 1]
        raise kind(f"process 0 of the run raised: {message}")


def _encode(error: Exception | None) -> np.ndarray:
    """uint8 array: 0 for None, or the number of the error's class from 1 on, and the message."""
    encoded = np.zeros(1 + _MESSAGE_BYTES, np.uint8)
    if error is not None:
        known = (number for number, kind in enumerate(_KINDS, 1) if isinstance(error, kind))
        encoded[0] = next(known, len(_KINDS) + 1)
        text = f"{type(error).__name__}: {error}".encode()[:_MESSAGE_BYTES]
        encoded[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
    return encoded


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


def check_same(values: Mapping[str, Any]) -> None:
    """Raises unless all processes pass equal values: options, a seed, a fingerprint of the data.

    Processes with different learning rates train on, each with other weights; with different
    numbers of steps or sizes they end inside of a collective, whose error names neither. So call it
    before the first step, on all processes; a collective of a few hundred bytes. ::

        check_same({"--lr": args.lr, "--steps": args.steps, "data": loader.get_state()["options"]})

    Args:
      values: name -> value, anything whose ``repr`` is the same if it is equal; names as the user
        knows them, for the message.

    Raises:
      ValueError: on all processes, with the name of each value that differs and what each process
        has.
    """
    own = {str(name): repr(value) for name, value in values.items()}
    seen = gather_json(own)
    lines = []
    for name in dict.fromkeys(name for each in seen for name in each):
        found: dict[str, list[int]] = {}
        for process, each in enumerate(seen):
            found.setdefault(each.get(name, "missing"), []).append(process)
        if len(found) > 1:
            lines.append(
                f"{name} is "
                + ", ".join(f"{value} on {_listed(where)}" for value, where in found.items())
            )
    if lines:
        raise ValueError(
            "the processes of this run differ: "
            + "; ".join(lines)
            + ". Start all of them with the same program and options"
        )


def _listed(processes: list[int]) -> str:
    more = f" and {len(processes) - 4} more" if len(processes) > 4 else ""
    return f"process {', '.join(map(str, processes[:4]))}{more}"


def _check(coordinator: str | None, **numbers: int | None) -> None:
    if coordinator is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"coordinator is {coordinator!r}: write it like host0:1234")
    for name, value in numbers.items():
        least = 0 if name == "process_id" else 1
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")
    index, count = numbers["process_id"], numbers["num_processes"]
    if index is not None and count is not None and index >= count:
        raise ValueError(
            f"process_id is {index}: with num_processes {count} it must be in 0 ... {count - 1}"
        )


def _launcher() -> tuple[str | None, str | None]:
    """The launcher that started this process, and the number of processes it started."""
    for name, mark, count in _LAUNCHERS:
        if mark in os.environ:
            return name, os.environ.get(count) if count else None
    return None, None


def _log(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
