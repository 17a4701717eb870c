"""A small training run that goes on where it was killed: ``python small_run.py OUT DEVICES``.

Started by tests/test_checkpoints.py. Its weights, optimizer, random keys and loader are in its
checkpoints, and its losses in ``OUT/metrics.jsonl``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.training import Checkpoints, RunLog

OUT, DEVICES = Path(sys.argv[1]), int(sys.argv[2])
STEPS, EVERY = 60, 3
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
OPTIMIZER = optax.adam(1e-2)


def init():
    params = {"w": jax.random.normal(jax.random.key(1), (32, 64)) / 8}
    return {"params": params, "opt_state": OPTIMIZER.init(params), "key": jax.random.key(2)}


def sharding(x):
    return NamedSharding(MESH, P("data") if x.ndim == 2 else P())


@jax.jit
def train_step(state, rows):
    key, noise = jax.random.split(state["key"])

    def loss_of(params):
        return ((rows @ params["w"] + jax.random.normal(noise, (8, 64)) / 10) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return {"params": params, "opt_state": opt_state, "key": key}, metrics


def rows_from(place: int):
    """The loader: eight rows from ``place`` on, and where the next ones are."""
    draw = np.random.default_rng(place)
    return draw.normal(size=(8, 32)).astype(np.float32), place + 8


def main() -> None:
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)),
        jax.eval_shape(init),
    )
    with Checkpoints(OUT / "checkpoints", keep=2) as checkpoints:
        restored = checkpoints.restore(abstract)
        if restored is None:
            start, place = 0, 0
            state = jax.jit(init, out_shardings=jax.tree.map(sharding, abstract))()
        else:
            start, place, state = restored.step, restored.extra["place"], restored.state
        with RunLog(
            OUT,
            STEPS,
            start=start,
            tokens_per_step=8,
            flops_per_step=1.0,
            peak=None,
            checkpoints=checkpoints,
        ) as log:
            for step in range(start + 1, STEPS + 1):
                rows, place = rows_from(place)
                state, metrics = train_step(state, jnp.asarray(rows))
                log.step(step, {name: float(value) for name, value in metrics.items()})
                if step % EVERY == 0:
                    checkpoints.save(step, state, {"place": place})
                time.sleep(0.02)  # So that a signal finds it at work.


main()
