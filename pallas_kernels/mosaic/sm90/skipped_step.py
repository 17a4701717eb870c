"""A work tile's first backward step, for a consumer to whose keys none of its queries attends.

With a causal mask the first query tile comes before the last 64 of 128 keys. Their consumer then
only writes a dS of zeros: it computes no score, no dV and no dK. The other consumer's products have
the tensor cores to themselves, and this one starts its next step early.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.fragments import constant, proxy_fence
from pallas_kernels.mosaic.sm90.backward_scores import Consumer, read_tile_and_head
from pallas_kernels.mosaic.sm90.backward_step import State, StepData, store_ds, wait_for_queries
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS
from pallas_kernels.mosaic.sm90.instructions import TILE


def start(consumer: Consumer, state: State) -> tuple[Any, State]:
    """``(first, state)``: the first step to compute, and the state before it.

    The queries of the work tile's first step have arrived. A step that is skipped is masked. Needs
    a producer warpgroup, and :attr:`BackwardStatic.exchanges_late`.
    """
    static, first = consumer.static, consumer.work.steps_before
    assert consumer.intervals is not None
    assert (static.config.ds_buffers, static.config.block_q) == (3, WARPGROUP_ROWS)
    q_tile, head = read_tile_and_head(static, consumer.refs.memory.scratch, consumer.stage(first))
    end = (q_tile + 1) * static.config.block_q
    skips = consumer.intervals.begin_at(end)
    pl.when(skips)(lambda: _write_zeros(consumer, first))
    # dQ of the step is computed in the next one, as always.
    state = state._replace(
        q_tile=jnp.where(skips, q_tile, state.q_tile), head=jnp.where(skips, head, state.head)
    )
    return first + skips.astype(jnp.int32), state


def _write_zeros(consumer: Consumer, step: Any) -> None:
    """What :func:`backward_step.step` does, without its products."""
    static, barriers = consumer.static, consumer.refs.barriers
    data = StepData.of(consumer, step)
    if static.rounds_dkv:
        # dK and dV of the previous work tile may still be on their way out of the buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    zeros = constant((WARPGROUP_ROWS, static.config.block_q), 0, TILE).astype(static.dtype)
    store_ds(consumer, data, zeros)
    proxy_fence()
    plgpu.barrier_arrive(barriers.ds_arrived)
    plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])
    plgpu.barrier_arrive(barriers.do_free.at[data.do_stage])
    plgpu.barrier_arrive(barriers.q_free.at[data.stage])
    wait_for_queries(consumer, step + 1)
