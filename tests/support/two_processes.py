"""One of two processes that place batches: ``python two_processes.py PORT PROCESS``.

Started by tests/test_processes.py. Each process has two CPU devices; what it saw goes to stdout as
one line of JSON, and a crash is a traceback.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType

PORT, PROCESS = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{PORT}", num_processes=2, process_id=PROCESS, initialization_timeout=60
)

from burst_jax.training import batches, make_batch, place_batch  # noqa: E402 - after initialize, as users do

ROWS = np.arange(4 * 17).reshape(4, 17)


def make_mesh(data: int, seq: int, kind: AxisType = AxisType.Auto):
    return jax.make_mesh((data, seq), ("data", "seq"), axis_types=(kind,) * 2)


def held(batch) -> list:
    """``[global row, first column, tokens]`` of every shard on this process."""
    shards = batch["inputs"].addressable_shards
    return [
        [shard.index[0].start or 0, shard.index[1].start or 0, np.asarray(shard.data).tolist()]
        for shard in sorted(shards, key=lambda shard: shard.device.id)
    ]


def place(rows, mesh, **options):
    """The batch as this process holds it, or the error; of a program's first batch."""
    batches._COMPARED.clear()
    try:
        batch = make_batch(rows, layout="zigzag", num_shards=mesh.shape["seq"])
        if options.pop("segments", False):
            batch["segment_ids"] = np.ones_like(batch["inputs"])
        placed = place_batch(batch, mesh, batch_axis="data", **options)
    except ValueError as error:
        return str(error)
    return {"shape": placed["inputs"].shape, "held": held(placed)}


own = ROWS[2 * PROCESS :][:2]  # A loader per process.
by_rows, by_tokens = make_mesh(2, 2), make_mesh(1, 4)
seen = {
    "whole": place(ROWS, by_rows),
    "whole, explicit": place(ROWS, make_mesh(2, 2, AxisType.Explicit)),
    "own as whole": place(own, by_rows),
    "own": place(own, by_rows, process_local=True),
    "own, four parts": place(own, make_mesh(4, 1), process_local=True),
    "same rows": place(ROWS, by_tokens, process_local=True),
    "own of shared rows": place(own, by_tokens, process_local=True),
    "fewer": place(own[: 1 + PROCESS], by_rows, process_local=True),
    "indivisible": place(ROWS[:3], by_rows),
    "indivisible own": place(own[:1], make_mesh(4, 1), process_local=True),
    "indivisible on one": place(ROWS[: 4 - PROCESS], by_rows),
    "segments on one": place(ROWS, by_rows, segments=PROCESS == 1),
}
print(json.dumps(seen))
