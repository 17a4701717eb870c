"""Python programs in processes on this machine, which may connect to each other."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ONE_AT_A_TIME = threading.Lock()


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Program:
    """A process of :mod:`fork_server`, like ``subprocess.Popen``.

    Args:
      arguments: the program's file and arguments.
      environment: variables in addition to those that this process had when it started the first
        of them.
      out: the file to which its output is appended; a new one by default.
      err: that of its errors.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        out: Path | None = None,
        err: Path | None = None,
    ) -> None:
        folder = Path(tempfile.mkdtemp(dir=_server()[1]))
        self._out, self._err = out or folder / "out", err or folder / "err"
        self._status = folder / "status"
        for path in (self._out, self._err):
            path.touch()
        request = {"arguments": arguments, "environment": environment}
        files = {"out": self._out, "err": self._err, "status": self._status}
        self.pid = _asked(request | {name: str(path) for name, path in files.items()})
        self.returncode: int | None = None

    @property
    def stdout(self) -> Iterator[str]:
        """The lines of its output, as they come."""
        with self._out.open() as file:
            while True:
                ended = self.poll() is not None
                yield from file
                if ended:
                    return
                time.sleep(0.01)

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.returncode is None and self._status.exists():
            self.returncode = int(self._status.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""
        end = time.monotonic() + (timeout or float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} runs for more than {timeout} s")
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output and errors, when it has ended."""
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def send_signal(self, number: int) -> None:
        """Sends a signal if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> tuple[subprocess.Popen[str], str]:
    """The process whose forks are the programs, and a folder for their files."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    server = subprocess.Popen(
        [sys.executable, "-W", "error", str(Path(__file__).with_name("fork_server.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip

    def end() -> None:
        server.communicate(timeout=60)  # The end of its input.
        folder.cleanup()

    atexit.register(end)
    return server, folder.name


def _asked(request: dict) -> int:
    """The process id of a new fork."""
    with _ONE_AT_A_TIME:
        server, _ = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())


@contextmanager
def started(
    commands: list[list[str]], environments: list[dict[str, str]]
) -> Iterator[list[Program]]:
    """Processes of these Python programs, killed when the block ends."""
    processes = [
        Program(command, environment)
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
