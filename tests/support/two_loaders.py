"""One of two processes that load their own rows: ``python two_loaders.py PORT PROCESS FOLDER``.

Started by tests/data/test_data_resume.py. Each process has four CPU devices. It places batches on a
mesh of all eight, gathers the loaders' state, resumes from it with a new loader, and prints what
its devices hold as one line of JSON.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from jax.sharding import AxisType

PORT, PROCESS, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{PORT}", num_processes=2, process_id=PROCESS, initialization_timeout=60
)

from burst_jax.data import Loader, gather_state, open_corpus, rows_of_process  # noqa: E402 - as above
from burst_jax.training import make_batch, place_batch  # noqa: E402

mesh = jax.make_mesh((4, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
rows = rows_of_process(8, jax.process_index(), jax.process_count())


def make_loader() -> Loader:
    return Loader(open_corpus(FOLDER), seq_len=16, batch=8, rows=rows)


def held(loader: Loader) -> list:
    """``[batch index, first token, tokens]`` of each local shard of the next batch."""
    batch = make_batch(**next(loader), layout="zigzag", num_shards=2)
    placed = place_batch(batch, mesh, batch_axis="data", process_local=True)
    return [
        [shard.index[0].start or 0, shard.index[1].start or 0, np.asarray(shard.data).tolist()]
        for shard in placed["inputs"].addressable_shards
    ]


with make_loader() as loader:
    seen = [held(loader) for _ in range(3)]
    state = gather_state(loader.get_state())
with make_loader() as loader:
    loader.set_state(state)
    seen += [held(loader) for _ in range(3)]
print(json.dumps({"seen": seen, "state": state}))
