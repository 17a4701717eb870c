"""One process of a run: ``python processes_of_a_run.py MODE FOLDER [PORT COUNT PROCESS]``.

Started by tests/parallel/test_processes.py; without PORT, a launcher's variables are set. The
processes of a run have four CPU devices together. Each prints what it found as one line of JSON.
Eight of them start at the same time, so modules that only one mode needs are imported there.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.parallel.processes import barrier, check_same, initialize, is_main

ROWS = np.arange(4 * 17).reshape(4, 17)
HEARTBEAT = 5


def make_mesh(kind: AxisType = AxisType.Auto, **sizes: int):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def error_of(call) -> str:
    try:
        return f"no error: {call()}"
    except (ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def held(batch) -> list:
    """``[global row, first column, tokens]`` of every shard on this process."""
    shards = batch["inputs"].addressable_shards
    return [
        [shard.index[0].start or 0, shard.index[1].start or 0, np.asarray(shard.data).tolist()]
        for shard in sorted(shards, key=lambda shard: shard.device.id)
    ]


def place_batches(_: Path, process: int) -> dict:
    """This process's shards of batches, and the errors of wrong ones."""
    from burst_jax.training import batches, make_batch, place_batch

    def place(rows, mesh, *, process_local=False, segments=False):
        batches._COMPARED.clear()  # As the first batch of a program.
        batch = make_batch(rows, layout="zigzag", num_shards=mesh.shape["seq"])
        if segments:
            batch["segment_ids"] = np.ones_like(batch["inputs"])
        placed = place_batch(batch, mesh, batch_axis="data", process_local=process_local)
        return {"shape": placed["inputs"].shape, "held": held(placed)}

    own = ROWS[2 * process :][:2]  # A loader per process.
    square, by_rows, by_tokens = (make_mesh(data=d, seq=4 // d) for d in (2, 4, 1))
    explicit = make_mesh(AxisType.Explicit, data=2, seq=2)
    return {
        "whole": place(ROWS, square),
        "whole, explicit": place(ROWS, explicit),
        "own": place(own, square, process_local=True),
        "own, four parts": place(own, by_rows, process_local=True),
        "same rows": place(ROWS, by_tokens, process_local=True),
        **{
            name: error_of(lambda given=given, options=options: place(*given, **options))
            for name, given, options in (
                ("own as whole", (own, square), {}),
                ("own of shared rows", (own, by_tokens), {"process_local": True}),
                ("fewer", (own[: 1 + process], square), {"process_local": True}),
                ("indivisible", (ROWS[:3], square), {}),
                ("indivisible own", (own[:1], by_rows), {"process_local": True}),
                ("indivisible on one", (ROWS[: 4 - process], square), {}),
                ("segments on one", (ROWS, square), {"segments": process == 1}),
            )
        },
    }


def save_models(folder: Path, process: int) -> dict:
    """The files that ``save`` has written when it returns on this process, and its errors."""
    import safetensors.numpy

    from burst_jax import ShardingRules
    from burst_jax.models import load, save

    mesh = make_mesh(fsdp=2, seq=2)
    model = load(folder / "model", mesh=mesh, rules=ShardingRules.of(mesh))

    def saved(name: str) -> list[str]:
        save(model, folder / name, max_file_bytes=1000)
        return sorted(path.name for path in (folder / name).iterdir())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    found = {"saved": saved("saved"), "saved again": error_of(lambda: saved("saved"))}
    if process == 0:
        safetensors.numpy.save_file = full
    return found | {"full disk": error_of(lambda: saved("full"))}


def load_rows(folder: Path, process: int) -> dict:
    """What the devices hold of six batches; after the third another loader resumes."""
    from burst_jax.data import Loader, gather_state, open_corpus, rows_of_process
    from burst_jax.training import make_batch, place_batch

    mesh, rows = make_mesh(data=2, seq=2), rows_of_process(4, process, jax.process_count())
    seen, state = [], None
    for _ in range(2):
        with Loader(open_corpus(folder / "arrays"), seq_len=16, batch=4, rows=rows) as loader:
            if state is not None:
                loader.set_state(state)
            for _ in range(3):
                batch = make_batch(**next(loader), layout="zigzag", num_shards=2)
                placed = place_batch(batch, mesh, batch_axis="data", process_local=True)
                seen.append(held(placed))
            state = state or gather_state(loader.get_state())
    return {"loaded": seen, "loader": state}


def make_state(seed: int):
    """Arrays sharded over all processes, with values that depend only on the seed."""
    mesh = make_mesh(data=4)
    x = np.random.default_rng(seed).normal(size=(16, 32)).astype(np.float32)
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def place(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    make_keys = jax.jit(lambda: jax.random.split(jax.random.key(seed), 8), out_shardings=split)
    return {"x": place(x, split), "mean": place(x.mean(0), whole), "keys": make_keys()}


def use_checkpoints(folder: Path, process: int) -> dict:
    """Restores the undamaged one of the folder's two checkpoints, and saves two more."""
    from burst_jax.training import Checkpoints

    state = make_state(seed=5)
    with Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        restored = checkpoints.restore(state)
        assert restored is not None
        same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: jnp.all(x == y), a, b))
        seen = {
            "step": restored.step,
            "extra": restored.extra,
            "refused": restored.refused,
            "same": jax.tree.map(bool, same(restored.state, make_state(seed=1))),
            "local": error_of(lambda: checkpoints.save(9, {"x": jnp.zeros(3)})),
            "extra differs": error_of(lambda: checkpoints.save(9, state, {"p": process})),
            "options": error_of(
                lambda: check_same({"--steps": 9, "--lr": 0.1 * (1 + process), "--seed": 0})
            ),
            "other state": error_of(lambda: checkpoints.restore({"y": state["x"]})),
        }
        for step in (6, 7):
            checkpoints.save(step, state, {"step": step})
    barrier("process 0 has removed old ones")
    there = {path.name for path in checkpoints.folder.iterdir()} - {".checkpoints.lock"}
    return seen | {"there": sorted(there)}


def fill_the_disk(folder: Path, process: int) -> None:
    """Saves one checkpoint, and another one while process 1 has no disk space for its part."""
    from burst_jax.training import Checkpoints

    split = NamedSharding(make_mesh(data=4), P("data"))
    keys = jax.jit(jax.random.split, static_argnums=1, out_shardings=split)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, make_state(seed=1))
        checkpoints.wait()
        if process == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
        checkpoints.save(2, {"x": jax.random.key_data(keys(jax.random.key(0), 1 << 20))})


def loop(*_) -> None:
    """Runs a barrier twenty times a second until it is killed."""
    barrier("start")
    print("meeting", flush=True)
    while True:
        barrier("next")
        time.sleep(0.05)


def raise_on_one(_: Path, process: int) -> None:
    barrier("start")
    if process == 1:
        raise OSError("the loader's disk is gone")
    barrier("never")


def main(mode: str, folder: str, port: str = "", count: str = "", process: str = "") -> None:
    connection: Any = (f"127.0.0.1:{port}", int(count), int(process)) if port else ()
    with initialize(*connection, heartbeat_timeout=HEARTBEAT, start_timeout=60) as processes:
        assert processes.count == 2
        assert is_main() == (processes.index == 0)
        actions = {
            "everything": (place_batches, save_models, load_rows, use_checkpoints),
            "full": (fill_the_disk,), "loop": (loop,), "raise": (raise_on_one,),
        }[mode]  # fmt: skip
        seen = {"process": processes.index}
        for action in actions:
            seen |= action(Path(folder), processes.index) or {}
        print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
