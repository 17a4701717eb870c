"""Ports of this machine, for processes that connect to each other."""

from __future__ import annotations

import socket


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
