"""Runs Python programs in forks of one process, which has imported what they import.

Importing JAX, Flax and burst_jax takes seconds of CPU time, more than most of these programs. Each
line of the standard input asks for a process: JSON with the program's ``arguments``, of which the
first is its file, the ``environment`` that it has in addition, and the paths ``out``, ``err`` and
``status``. The reply is its process id; its exit code is in ``status`` when it has ended. A process
behaves as ``python -W error FILE ...`` would, except that modules are there.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import sys
from pathlib import Path
from typing import Any

import jax

import burst_jax.data
import burst_jax.models
import burst_jax.training  # noqa: F401 - for the programs


def serve() -> dict[str, Any] | None:
    """Forks until the input ends, and then returns None; in a fork it returns what it was asked."""
    running: dict[int, Path] = {}
    while True:
        # The next request comes after the reply to this one, so none waits in Python's buffer.
        ready, _, _ = select.select([sys.stdin], [], [], 0.02 if running else None)
        if ready:
            line = sys.stdin.readline()
            if not line:
                return None
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return request
            running[pid] = Path(request["status"])
            print(pid, flush=True)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            path = running.pop(pid)
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(str(os.waitstatus_to_exitcode(status)))
            unfinished.rename(path)


def run(request: dict[str, Any]) -> None:
    """Becomes the program, in a process that was forked for it."""
    files = (0, "/dev/null", os.O_RDONLY), (1, request["out"], None), (2, request["err"], None)
    for number, path, flags in files:
        new = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(path, new if flags is None else flags)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(request["environment"])
    # JAX has read the environment when it was imported.
    for name, value in request["environment"].items():
        if (option := name.lower()) in jax.config.values:
            kind = type(jax.config.values[option])
            jax.config.update(option, kind(value) if kind in (int, float) else value)
    sys.argv = request["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    asked = serve()
    if asked is not None:
        run(asked)
