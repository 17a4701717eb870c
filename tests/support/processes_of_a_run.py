"""One process of a run: ``python processes_of_a_run.py PORT PROCESS COUNT MODE [FOLDER]``.

Started by tests/parallel/test_processes.py. The processes of a run have eight CPU devices together.
Each prints what it found as one line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.training import CheckpointError, Checkpoints, barrier, initialize, is_main

PORT, PROCESS, COUNT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
MODE, FOLDER = sys.argv[4], Path(sys.argv[5] if len(sys.argv) > 5 else ".")
HEARTBEAT = 10
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8 // COUNT)


def make_state(mesh, seed: int):
    """Arrays sharded over all processes, with values that depend only on the seed."""
    x = np.random.default_rng(seed).normal(size=(16, 32)).astype(np.float32)
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def place(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    make_keys = jax.jit(lambda: jax.random.split(jax.random.key(seed), 8), out_shardings=split)
    return {"x": place(x, split), "mean": place(x.mean(0), whole), "keys": make_keys()}


def error_of(call) -> str:
    try:
        call()
    except (ValueError, CheckpointError) as error:
        return str(error)
    return "no error"


def use_checkpoints() -> None:
    """Restores the undamaged one of the folder's two checkpoints, and saves two more."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    state = make_state(mesh, seed=5)
    with Checkpoints(FOLDER, keep=2) as checkpoints:
        restored = checkpoints.restore(state)
        assert restored is not None
        first = make_state(mesh, seed=1)
        same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: jnp.all(x == y), a, b))
        seen = {
            "step": restored.step,
            "extra": restored.extra,
            "refused": restored.refused,
            "same": jax.tree.map(bool, same(restored.state, first)),
            "shards": len(restored.state["x"].addressable_shards),
            "local": error_of(lambda: checkpoints.save(9, {"x": jnp.zeros(3)})),
            "extra differs": error_of(lambda: checkpoints.save(9, state, {"p": PROCESS})),
            "other state": error_of(lambda: checkpoints.restore({"y": state["x"]})),
        }
        for step in (6, 7):
            checkpoints.save(step, state, {"step": step})
    barrier("process 0 has removed old ones")
    seen["there"] = sorted(path.name for path in FOLDER.iterdir())
    print(json.dumps(seen))


def fill_the_disk() -> None:
    """Saves one checkpoint, and another one while process 1 has no disk space for its part."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    keys = jax.jit(jax.random.split, static_argnums=1, out_shardings=NamedSharding(mesh, P("data")))
    with Checkpoints(FOLDER) as checkpoints:
        checkpoints.save(1, make_state(mesh, seed=1))
        checkpoints.wait()
        if PROCESS == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
        checkpoints.save(2, {"x": jax.random.key_data(keys(jax.random.key(0), 1 << 20))})


def loop() -> None:
    """Runs a barrier twenty times a second until it is killed."""
    barrier("start")
    print("meeting", flush=True)
    while True:
        barrier("next")
        time.sleep(0.05)


def main() -> None:
    with initialize(
        f"127.0.0.1:{PORT}", COUNT, PROCESS, heartbeat_timeout=HEARTBEAT, start_timeout=60
    ) as processes:
        assert (processes.index, processes.count) == (PROCESS, COUNT)
        assert is_main() == (PROCESS == 0)
        if MODE == "checkpoints":
            use_checkpoints()
        elif MODE == "full":
            fill_the_disk()
        elif MODE == "loop":
            loop()
        elif MODE == "raise" and PROCESS == 1:
            barrier("start")
            raise OSError("the loader's disk is gone")
        else:
            barrier("start")
            barrier("never")


main()
