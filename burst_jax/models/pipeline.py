"""A pipeline inside one program, with the layers sharded over a mesh axis (GPipe, Huang 2019).

A device's batch is split into microbatches. In each tick every stage runs its layers on one
microbatch and sends the result to the next stage::

    3 microbatches a b c, 2 stages      tick     0   1   2   3
                                        stage 0  a   b   c   -
                                        stage 1  -   a   b   c

In the first and last ticks some stages are idle. They compute on data whose results are unused,
because all devices must run the same collectives: a ``lax.cond`` around a ring's permutes would
deadlock, as the devices that skip it never send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from burst_jax.models.config import DecoderConfig, LayerKind
from burst_jax.models.layer_sums import LayerSums
from burst_jax.models.remat import Remat, remat_of_layers
from burst_jax.models.shardings import DecoderShardings
from burst_jax.parallel.mesh import axes_size
from pallas_kernels.arrays import vary


def pipelined(
    run: Callable[[jax.Array, Any], tuple[jax.Array, LayerSums]],
    x: jax.Array,
    shared: Any,
    axis: str,
    microbatches: int,
) -> tuple[jax.Array, LayerSums]:
    """Runs all stages' layers on one device's batch, inside a ``shard_map`` over ``axis``.

    Args:
      run: ``(x, shared) -> (x, sums)``, this stage's layers on one microbatch.
      x: ``[B, T, D]``, the first layer's input, the same on all stages.
      shared: pytree of arrays ``[B, ...]`` that all layers read, like positions.
      axis: the mesh axis of the stages.
      microbatches: number of microbatches, which divides B.

    Returns:
      ``(x, sums)``: ``[B / stages, T, D]``, this stage's part of the last layer's batch, in the
      order of the stages, so that all stages have the same work afterwards; and the sums of this
      stage's layers over all microbatches.
    """
    stages, stage = lax.axis_size(axis), lax.axis_index(axis)
    x, shared = vary((x, shared), frozenset((axis,)))
    inputs = jax.tree.map(
        lambda a: a.reshape(microbatches, a.shape[0] // microbatches, *a.shape[1:]), (x, shared)
    )

    def microbatch(tree: Any, index: jax.Array) -> Any:
        index = jnp.clip(index, 0, microbatches - 1)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), tree)

    def tick(received: jax.Array, time: jax.Array) -> tuple[jax.Array, Any]:
        first_input = microbatch(inputs[0], time)
        x = jnp.where(stage == 0, first_input, received)
        out, sums = run(x, microbatch(inputs[1], time - stage))
        sent = lax.ppermute(out, axis, [(index, index + 1) for index in range(stages - 1)])
        busy = (time >= stage) & (time < stage + microbatches)
        return sent, (out, sums.where(busy))

    # Zeros, because idle stages must stay finite: their zero gradients would turn NaN into NaN.
    first = jnp.zeros_like(inputs[0][0])
    _, (outs, sums) = lax.scan(tick, first, jnp.arange(microbatches + stages - 1, dtype=jnp.int32))
    last = outs[stages - 1 :].reshape(x.shape)
    from_last_stage = jnp.where(stage == stages - 1, last, 0)
    x = lax.psum_scatter(from_last_stage, axis, scatter_dimension=0, tiled=True)
    return x, sums.over_microbatches()


def kinds_of_a_stage(
    config: DecoderConfig, shardings: DecoderShardings
) -> list[tuple[LayerKind, Remat]]:
    """``(kind, remat)`` of each layer of one pipeline stage, or of all layers without a pipeline.

    Raises:
      NotImplementedError: stages differ, and all devices run one program.
    """
    kinds, stages = config.layer_kinds, axes_size(shardings.mesh, shardings.stage_axis)
    count = len(kinds) // stages
    if any(kinds[stage * count : (stage + 1) * count] != kinds[:count] for stage in range(stages)):
        raise NotImplementedError(
            f"{len(kinds)} layers in {stages} stages: each stage must have layers of the same "
            "kinds in the same order, as all devices run one program; use a number of layers per "
            "stage that is a multiple of layer_pattern's length, or no stage axis"
        )
    selective = None if config.remat_layers is None else config.remat_layers // stages
    return list(zip(kinds[:count], remat_of_layers(config.remat, selective, count), strict=True))
