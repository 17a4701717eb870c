"""A pipeline inside one program: the layers are split over a mesh axis, rows travel through it.

The rows of a device are cut into microbatches. In each tick every stage runs its layers on one
microbatch and passes the result on to the next stage::

    3 microbatches a b c, 2 stages      tick     0   1   2   3
                                        stage 0  a   b   c   -
                                        stage 1  -   a   b   c

In the first and the last ticks some stages have nothing to do. They compute on rows whose results
nobody reads, because all devices must make the same collectives: a ``lax.cond`` around a ring's
permutes would hang, as the devices that skip it never send (GPipe, Huang et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import vary


def pipelined(
    run: Callable[[jax.Array, Any], jax.Array],
    x: jax.Array,
    sides: Any,
    axis: str,
    microbatches: int,
) -> jax.Array:
    """Runs all stages' layers on one device's rows, inside a ``shard_map`` over ``axis``.

    Args:
      run: ``(x, sides) -> x``, this stage's layers on the rows of one microbatch.
      x: ``[B, T, D]``, the input of the first layer, the same on all stages.
      sides: pytree of arrays ``[B, ...]`` which all layers read, like positions.
      axis: the mesh axis of the stages.
      microbatches: number of microbatches, which divides B.

    Returns:
      ``[B / stages, T, D]``: of the last layer's rows those of this stage, the first stage's first.
      Each stage goes on with a part of the rows, so that all have the same work.
    """
    stages, stage = lax.axis_size(axis), lax.axis_index(axis)
    x, sides = vary((x, sides), frozenset((axis,)))
    cut = jax.tree.map(
        lambda a: a.reshape(microbatches, a.shape[0] // microbatches, *a.shape[1:]), (x, sides)
    )

    def of(tree: Any, index: jax.Array) -> Any:
        index = jnp.clip(index, 0, microbatches - 1)
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), tree)

    def tick(received: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, these_sides = of(cut[0], time), of(cut[1], time - stage)
        out = run(jnp.where(stage == 0, rows, received), these_sides)
        sent = lax.ppermute(out, axis, [(here, here + 1) for here in range(stages - 1)])
        return sent, out

    # Zeros are finite in every layer. What is not finite would make 0 times NaN of a zero gradient.
    first = jnp.zeros_like(cut[0][0])
    _, outs = lax.scan(tick, first, jnp.arange(microbatches + stages - 1, dtype=jnp.int32))
    last = outs[stages - 1 :].reshape(x.shape)
    mine = jnp.where(stage == stages - 1, last, 0)
    return lax.psum_scatter(mine, axis, scatter_dimension=0, tiled=True)
