"""One of two processes that place batches and save a model: arguments PORT PROCESS FOLDER.

Started by tests/parallel/test_processes.py. Each process has two CPU devices, and prints what it
found as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
from jax.sharding import AxisType

PORT, PROCESS, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{PORT}", num_processes=2, process_id=PROCESS, initialization_timeout=60
)

# After initialize, as users do.
from burst_jax import ShardingRules  # noqa: E402
from burst_jax.models import load, save  # noqa: E402
from burst_jax.training import batches, make_batch, place_batch  # noqa: E402

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
    """This process's shards of the batch, or the error, as for the first batch of a program."""
    batches._COMPARED.clear()
    try:
        batch = make_batch(rows, layout="zigzag", num_shards=mesh.shape["seq"])
        if options.pop("segments", False):
            batch["segment_ids"] = np.ones_like(batch["inputs"])
        placed = place_batch(batch, mesh, batch_axis="data", **options)
    except ValueError as error:
        return str(error)
    return {"shape": placed["inputs"].shape, "held": held(placed)}


def saved(model, name: str) -> list[str]:
    """The saved files when ``save`` returns on this process, or the error."""
    try:
        save(model, FOLDER / name, max_file_bytes=1000)
    except (OSError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return sorted(path.name for path in (FOLDER / name).iterdir())


def full(*_, **__):
    raise OSError(28, "No space left on device")


def save_models() -> dict[str, list[str]]:
    mesh = jax.make_mesh((2, 2), ("fsdp", "seq"), axis_types=(AxisType.Auto,) * 2)
    model = load(FOLDER / "model", mesh=mesh, rules=ShardingRules.of(mesh))
    found = {"saved": saved(model, "saved"), "saved again": saved(model, "saved")}
    if PROCESS == 0:
        safetensors.numpy.save_file = full
    found["full disk"] = saved(model, "full")
    return found


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
print(json.dumps(seen | save_models()))
