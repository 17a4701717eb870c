"""A process that saves checkpoints until it is killed, the disk is full, or it exits.

``python checkpoint_writer.py FOLDER forever|limited|unclosed|unclosed-error``; started by
tests/training/test_checkpoints.py.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from burst_jax.training import CheckpointError, Checkpoints


def save_forever(folder: Path) -> None:
    """Saves the step number as state, one checkpoint after another."""
    checkpoints = Checkpoints(folder, keep=2)
    step = (checkpoints.latest() or 0) + 1
    while True:
        checkpoints.save(step, {"x": jnp.full((256, 1024), step, jnp.float32)}, {"step": step})
        print("saving", flush=True)
        step += 1


def save_limited(folder: Path) -> None:
    """Saves one that fits, two that do not, and one that fits after the limit is lifted."""
    checkpoints = Checkpoints(folder)
    small, large = (jax.random.normal(jax.random.key(0), (n, 1024)) for n in (16, 1024))
    checkpoints.save(1, {"x": small})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    for step in (2, 3):
        try:
            checkpoints.save(step, {"x": large})
            checkpoints.close()
        except CheckpointError as error:
            print(json.dumps(str(error)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoints.save(4, {"x": small})
    checkpoints.close()
    restored = checkpoints.restore({"x": small})
    assert restored is not None
    there = sorted(path.name for path in folder.iterdir())
    print(json.dumps({"there": there, "restored": restored.step}))


def end_unclosed(folder: Path) -> Checkpoints:
    """Saves one that is complete and one that is still being written at exit."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"x": jnp.ones((8, 8))})
    checkpoints.save(2, {"x": jax.random.normal(jax.random.key(0), (2048, 1024))})
    return checkpoints


def end_unclosed_by_an_error(folder: Path) -> None:
    """The same in a program that fails."""
    checkpoints = end_unclosed(folder)
    raise RuntimeError(f"the training has failed, {checkpoints.folder}")


CHECKPOINTS = {
    "forever": save_forever,
    "limited": save_limited,
    "unclosed": end_unclosed,
    "unclosed-error": end_unclosed_by_an_error,
}[sys.argv[2]](Path(sys.argv[1]))
