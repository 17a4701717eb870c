"""Processes on this machine that connect to each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def started(commands: list[list[str]], environments: list[dict[str, str]]):
    """Processes of these Python commands, killed when the block ends."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
