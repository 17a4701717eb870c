"""What the tests of training share: inputs of the loss, a small decoder, its training."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
from implementations import QUICK
from jax.sharding import AxisType
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

RNG = np.random.default_rng(0)
B, T, D, V = 2, 24, 8, 30


def loss_inputs(dtype=jnp.float32):
    hidden, kernel = (
        jnp.asarray(RNG.standard_normal(shape), kind)
        for shape, kind in (((B, T, D), dtype), ((D, V), jnp.float32))
    )
    targets = RNG.integers(0, V, (B, T)).astype(np.int32)
    weights = RNG.uniform(0.5, 2.0, (B, T)).astype(np.float32)
    weights[0, 3:7], weights[1, 20:] = 0, 0
    targets[weights == 0] = -7  # Never read.
    return hidden, kernel, jnp.asarray(targets), jnp.asarray(weights)


def dense_results(hidden, kernel, targets, weights, cotangent):
    arrays = [np.asarray(x, np.float64) for x in (hidden, kernel)]
    others = np.asarray(targets), np.asarray(weights, np.float64)
    with jax.enable_x64(True):
        total, vjp = jax.vjp(
            lambda h, k: plain_model.cross_entropy(h @ k, *others), *map(jnp.asarray, arrays)
        )
        return jax.device_get((total, vjp(jnp.float64(cotangent))))


CONFIG = DecoderConfig(
    vocab_size=20, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24
)
ROWS = np.random.default_rng(5).integers(0, 20, (2, 31))


@functools.cache
def trained(data, seq, dtype="float32", steps=12, kind=AxisType.Auto):
    mesh = make_mesh(data, seq, kind=kind)
    optimizer = make_optimizer(1e-2, steps, warmup_steps=2)
    config = dataclasses.replace(CONFIG, dtype=jnp.dtype(dtype))
    graphdef, params, opt_state = init_train_state(
        config, optimizer, mesh, 0, batch_axis="data", layout="zigzag"
    )
    first = params
    step = make_train_step(graphdef, optimizer, chunk_size=7, compiler_options=QUICK)
    batch = make_batch(ROWS, layout="zigzag", num_shards=seq)
    batch = place_batch(batch, mesh, batch_axis="data")
    eval_step = make_eval_step(graphdef, chunk_size=3)
    before = evaluate(eval_step, params, [batch])
    history = []
    for _ in range(steps):
        params, opt_state, metrics = step(params, opt_state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
    return first, params, opt_state, before, history, evaluate(eval_step, params, [batch, batch])
