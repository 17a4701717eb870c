"""Callbacks of JAX's interpreters with NumPy arrays, for the modules that interpret kernels.

The interpreters call Python for every access to memory, and JAX puts each argument on a device
before, which takes longer than the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import shared_memory


@contextlib.contextmanager
def with_numpy() -> Iterator[None]:
    """Programs that run inside call Python with NumPy arrays."""
    api = SimpleNamespace(device_put=_copied)
    with (
        mock.patch.object(callback, "api", api),
        mock.patch.object(shared_memory, "_to_int", _to_int),
    ):
        yield


def _copied(args, _):
    """Numbers as NumPy's. XLA lends the memory of arguments for the call alone."""
    return [np.array(x)[()] for x in args]


def _to_int(x, original=shared_memory._to_int):
    return int(x) if isinstance(x, np.integer) else original(x)
