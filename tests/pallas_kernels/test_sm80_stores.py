"""Stores of results that the threads of a row exchange first, thread by thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import warpgroup_threads

from pallas_kernels.mosaic.sm80 import instructions


def test_quads_write_neighboring_columns():
    columns, stride = 64, 72
    x = np.random.default_rng(0).integers(0, 2**16, (64, columns)).astype(np.uint16)
    thread = np.arange(128)
    warp, lane = thread // 32, thread % 32
    registers = np.empty((1, columns // 8, 2), object)
    for _, eight, half in np.ndindex(registers.shape):
        row, column = 16 * warp + 8 * half + lane // 4, 8 * eight + 2 * (lane % 4)
        pairs = np.stack([x[row, column], x[row, column + 1]], 1)
        registers[0, eight, half] = pairs.view(np.uint32).reshape(128).astype(np.int64)
    threads = warpgroup_threads.Warpgroup(np.zeros(2 * 64 * stride, np.uint8))
    # A size stands for the type of elements.
    kind = SimpleNamespace(get_strides_and_offset=lambda: ((stride, 1), 0), element_type=2)
    modules: dict[str, Any] = threads.modules()
    modules["global_pointer"] = lambda ref: np.zeros(128, np.int64)
    del modules["mgpu"], modules["vector"]
    with mock.patch.multiple(instructions, **modules):
        instructions._store_by_quads(
            None, SimpleNamespace(type=kind), SimpleNamespace(registers=registers)
        )
    got = threads.memory.view(np.uint16).reshape(64, stride)
    np.testing.assert_array_equal(got[:, :columns], x)
    assert not got[:, columns:].any()
