"""Training runs: of a small decoder on 2 x 2 devices, and on meshes of all kinds."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import plain_model
from flax import nnx
from implementations import QUICK
from jax.sharding import AxisType
from meshes import make_mesh, mesh_of

from burst_jax import ShardingRules
from burst_jax.models import DecoderConfig, abstract_decoder
from burst_jax.parallel.mesh import axes_size
from burst_jax.training import (
    evaluate,
    init_train_state,
    make_batch,
    make_eval_step,
    make_optimizer,
    make_train_step,
    place_batch,
)

AXES = ("data", "fsdp", "stage", "seq", "tensor")
ONE = (1, 1, 1, 1, 1)
# Two key heads, sharded over tensor axes of 2.
CONFIG = DecoderConfig(
    vocab_size=48, num_layers=4, embed_dim=48, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=96
)
B, T, STEPS = 4, 48, 20


def rows(step: int) -> np.ndarray:
    """Learnable tokens ``[B, T + 1]``: each is a function of the previous one."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 48, (B, 1))
    for _ in range(T):
        tokens = np.concatenate([tokens, (5 * tokens[:, -1:] + 7) % 48], axis=1)
    return tokens


def segments(step: int) -> np.ndarray:
    """Documents of odd lengths, with padding at the end of a sequence and inside one."""
    ids = np.ones((B, T + 1), np.int32)
    ids[0, 11 + step % 3 :], ids[1, 41:], ids[2, 7:], ids[2, 8 : 10 + step % 2] = 2, 0, 3, 0
    return ids


def sized(sizes: tuple[int | None, ...], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """A mesh of AXES of these sizes, without those that are None.

    If all are None, an axis of another name has two devices, which compute the same.
    """
    given = {name: size for name, size in zip(AXES, sizes, strict=True) if size is not None}
    return mesh_of(kind, **(given or {"copies": 2}))


def rules_of(mesh: jax.sharding.Mesh) -> ShardingRules:
    """The rules for the AXES of the mesh."""
    return ShardingRules(**{name: name if name in mesh.axis_names else None for name in AXES})


def run(
    sizes: tuple[int | None, ...],
    kind: AxisType = AxisType.Auto,
    packed: bool = True,
    steps: int = STEPS,
    accumulate: int = 1,
    config: DecoderConfig = CONFIG,
    optimizer: Any = None,
    expert: str | None = None,
    program: Any = None,
    **options: Any,
) -> tuple[list[list[float]], Any, Any]:
    """``([[loss, gradient norm] of each step], weights, optimizer state)``.

    The mesh has AXES of these sizes, see :func:`sized`, of which ``expert`` shards experts;
    ``program`` evaluates the step, which is compiled without; options are those of AdamW, the
    default.
    """
    mesh = sized(sizes, kind)
    rules = dataclasses.replace(rules_of(mesh), expert=expert)
    optimizer = optimizer or make_optimizer(2e-3, STEPS, warmup_steps=2, **options)
    # From the host: to slice one device's array for the others is a program for each shape.
    params = jax.device_get(decoders.drawn(abstract_decoder(config)[1]))
    graphdef, params, state = init_train_state(
        config, optimizer, mesh, 0, rules=rules, layout="zigzag", params=params
    )
    step = make_train_step(
        graphdef, optimizer, chunk_size=7, compiler_options=QUICK, accumulate=accumulate
    )
    step = step if program is None else program(step)
    history = []
    with jax.set_mesh(mesh):
        for index in range(steps):
            ids = segments(index) if packed else None
            batch = make_batch(
                rows(index), layout="zigzag", num_shards=axes_size(mesh, rules.seq), segment_ids=ids
            )
            placed = place_batch(batch, mesh, batch_axis=rules.batch_axes, seq_axis=rules.seq)
            params, state, metrics = step(params, state, placed)
            history.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    assert all(map(math.isfinite, np.ravel(history)))
    return history, params, state


@functools.cache
def losses(*args: Any, **options: Any) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step of a :func:`run`."""
    history, _, _ = run(*args, **options)
    return [loss for loss, _ in history], [norm for _, norm in history]


def plain_losses(
    steps: int,
    rate: float,
    momentum: float,
    config: DecoderConfig = CONFIG,
    feed_forward: Any = plain_model.gated_mlp,
) -> tuple[list[float], list[float]]:
    """:func:`losses` of packed documents with SGD, by the decoder's formula in float64."""
    params = jax.device_get(nnx.to_pure_dict(decoders.drawn(abstract_decoder(config)[1])))
    positions = np.tile(np.arange(T), (B, 1))

    def mean_loss(params, inputs, targets, weights, keep):
        hidden = plain_model.decoder(
            params, inputs.astype(int), positions, keep != 0, config.rope_theta,
            feed_forward=feed_forward,
        )  # fmt: skip
        logits = hidden @ params["head"]["kernel"]
        return plain_model.cross_entropy(logits, targets.astype(int), weights) / weights.sum()

    def arrays(step):
        tokens, ids = rows(step), segments(step)
        weights = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
        return tokens[:, :-1], tokens[:, 1:], weights, plain_model.causal(ids[:, :-1])

    run, moments = plain_model.traced_gradients(mean_loss, 1.0, params, *arrays(0)), params
    history: list[tuple[float, float]] = []
    for step in range(steps):
        loss, (gradients, *_) = run(1.0, params, *arrays(step))
        squares = sum(np.sum(x**2) for x in jax.tree.leaves(gradients))
        history.append((float(loss), float(np.sqrt(squares))))
        kept = momentum if step else 0.0
        moments = jax.tree.map(lambda m, g: kept * m + g, moments, gradients)  # noqa: B023
        params = jax.tree.map(lambda w, m: w - rate * m, params, moments)
    return [loss for loss, _ in history], [norm for _, norm in history]


# --- a run whose states are kept -----------------------------------------------------------------

SMALL = dataclasses.replace(
    CONFIG, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=24
)
# 30 tokens, which the zigzag layout pads; the first sequence ends in padding of its own.
ROWS = rows(0)[:2, :31]
SEGMENTS = np.ones_like(ROWS, dtype=np.int32)
SEGMENTS[0, 20:] = 0
SMALL_STEPS = 12


def optimizer_of(**options: Any):
    return make_optimizer(1e-2, SMALL_STEPS, warmup_steps=2, **options)


def batch_on(mesh: jax.sharding.Mesh) -> Any:
    batch = make_batch(ROWS, layout="zigzag", num_shards=mesh.shape["seq"], segment_ids=SEGMENTS)
    return place_batch(batch, mesh, batch_axis="data")


@functools.cache
def trained() -> Any:
    """Trains on 2 x 2 devices: host copies around step 1, the end, metrics of an empty batch."""
    mesh, optimizer = make_mesh(2, 2), optimizer_of()
    graphdef, params, opt_state = init_train_state(
        SMALL, optimizer, mesh, 0, batch_axis="data", layout="zigzag"
    )
    donated, initial = (
        (params, opt_state),
        jax.device_get(jax.tree.map(jnp.copy, nnx.to_pure_dict(params))),
    )
    step = make_train_step(graphdef, optimizer, chunk_size=7, compiler_options=QUICK)
    batch, history = batch_on(mesh), []
    eval_step = make_eval_step(graphdef, chunk_size=3)
    before = evaluate(eval_step, params, [batch])
    first: Any = None
    for _ in range(SMALL_STEPS):
        params, opt_state, metrics = step(params, opt_state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
        state: Any = opt_state
        if first is None:  # Copied: views would keep the memory from being donated.
            first = jax.device_get(jax.tree.map(jnp.copy, (nnx.to_pure_dict(params), state[1].mu)))
    after = evaluate(eval_step, params, [batch, batch])
    copy: Any = lambda x: jax.device_put(np.array(x), x.sharding)  # noqa: E731
    blank: Any = batch | {"weights": 0 * batch["weights"]}
    empty = step(jax.tree.map(copy, params), jax.tree.map(copy, opt_state), blank)[2]
    return SimpleNamespace(
        initial=initial, first=first[0], first_moments=first[1], donated=donated, params=params,
        opt_state=opt_state, empty=empty, before=before, history=history, after=after,
    )  # fmt: skip
