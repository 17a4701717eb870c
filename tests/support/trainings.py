"""A small decoder and its training, shared by the tests of steps and optimizers."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from implementations import QUICK
from meshes import make_mesh

from burst_jax.models import DecoderConfig
from burst_jax.training import (
    evaluate,
    init_train_state,
    make_batch,
    make_eval_step,
    make_optimizer,
    make_train_step,
    place_batch,
)

CONFIG = DecoderConfig(
    vocab_size=20, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24
)
ROWS = np.random.default_rng(5).integers(0, 20, (2, 31))
# The first sequence ends in padding.
SEGMENTS = np.ones_like(ROWS, dtype=np.int32)
SEGMENTS[0, 20:] = 0
STEPS = 12


def optimizer_of(**options: Any):
    return make_optimizer(1e-2, STEPS, warmup_steps=2, **options)


def batch_on(mesh):
    batch = make_batch(ROWS, layout="zigzag", num_shards=mesh.shape["seq"], segment_ids=SEGMENTS)
    return place_batch(batch, mesh, batch_axis="data")


def to_host(tree):
    """A copy on the host; a view would keep the memory from being donated."""
    return jax.device_get(jax.tree.map(jnp.copy, tree))


@functools.cache
def trained(moments: Any = "device") -> Any:
    """Trains on 2 x 2 devices: host copies around step 1, the end, metrics of an empty batch."""
    mesh, optimizer = make_mesh(2, 2), optimizer_of(moments=moments)
    graphdef, params, opt_state = init_train_state(
        CONFIG, optimizer, mesh, 0, batch_axis="data", layout="zigzag"
    )
    donated, initial = (params, opt_state), to_host(nnx.to_pure_dict(params))
    step = make_train_step(graphdef, optimizer, chunk_size=7, compiler_options=QUICK)
    batch, history = batch_on(mesh), []
    eval_step = make_eval_step(graphdef, chunk_size=3)
    before = evaluate(eval_step, params, [batch])
    first: Any = None
    for _ in range(STEPS):
        params, opt_state, metrics = step(params, opt_state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
        state: Any = opt_state
        first = first or to_host((nnx.to_pure_dict(params), state[1].mu))
    after = evaluate(eval_step, params, [batch, batch])
    copy: Any = lambda x: jax.device_put(np.array(x), x.sharding)  # noqa: E731
    blank: Any = batch | {"weights": 0 * batch["weights"]}
    empty = step(jax.tree.map(copy, params), jax.tree.map(copy, opt_state), blank)[2]
    return SimpleNamespace(
        initial=initial, first=first[0], first_moments=first[1], donated=donated, params=params,
        opt_state=opt_state, empty=empty, before=before, history=history, after=after,
    )  # fmt: skip
