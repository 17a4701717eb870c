"""Backward local attention as one Pallas kernel, lowered by Mosaic GPU (Hopper).

One pass over the scores makes all three gradients, five matmuls a tile where two kernels need
seven. An item of work is a (batch row, key head, 128 keys). It visits the query tiles inside its
bounds, for every query head that shares the key head. Two warpgroups hold dK and dV of 64 keys
each. dQ of a tile is summed over both, and the copy engine adds it to device memory, in whatever
order programs come: its last bits differ from run to run.

A third warpgroup copies (``backward_copy.py``). What a computing warpgroup does for an item is in
``backward_compute.py``, one step of its main loop in ``backward_step.py``, and what it writes to
device memory in ``backward_write.py`` and, for per-head arrays, in ``backward_per_head.py``.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.arrays import depending_on, gradient_dtype, pad_axis
from pallas_kernels.backend import Dkv
from pallas_kernels.bounds import key_bounds
from pallas_kernels.inputs import AttentionInputs, PerHead
from pallas_kernels.pallas_mosaic.backward_compute import compute_items
from pallas_kernels.pallas_mosaic.backward_copy import copy_item
from pallas_kernels.pallas_mosaic.blocks import BlockEntries
from pallas_kernels.pallas_mosaic.configs import (
    BACKWARD_WARPGROUPS,
    WARPGROUP_ROWS,
    MosaicConfig,
    backward_config,
)
from pallas_kernels.pallas_mosaic.dropout import DropoutNumbers
from pallas_kernels.pallas_mosaic.items import each_item
from pallas_kernels.pallas_mosaic.launch import call, split_warpgroups
from pallas_kernels.pallas_mosaic.memory import BackwardBarriers, ScratchLayout
from pallas_kernels.pallas_mosaic.operands import (
    BackwardOperands,
    BackwardRefs,
    BackwardResults,
    token_operands,
)
from pallas_kernels.pallas_mosaic.static import BackwardStatic
from pallas_kernels.pallas_mosaic.tickets import TicketCounter
from pallas_kernels.pallas_mosaic.tiles import i32
from pallas_kernels.pallas_mosaic.walk import Walk
from pallas_kernels.score import LOG2_E
from pallas_kernels.spec import AttentionSpec

# Stands for the log-sum-exp of a row that sees no key: every 2^(score - _NO_KEYS) is 0.
_NO_KEYS = 1e30


def log2_stats(lse: jax.Array, delta: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """``(lse in base 2, scale times delta)``, made once a call and not for every tile of scores.

    The lse of a row that sees no key becomes so large that every weight of the row is 0.
    """
    return jnp.where(lse == -jnp.inf, _NO_KEYS, lse * LOG2_E), delta * scale


def backward(
    inputs: AttentionInputs,
    bounds: jax.Array,
    dq: jax.Array | None = None,
    dkv: Dkv | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
    config: MosaicConfig | None = None,
) -> tuple[jax.Array, Dkv, PerHead]:
    """See :class:`pallas_kernels.backend.BackwardFunction`; ``config``: None is the table's.

    dQ is summed in device memory, so it is float32 whatever ``out_dtype`` is.
    """
    config = config or _shipped_config(inputs)
    static = BackwardStatic.of(
        inputs, spec, config, adds_dkv=dkv is not None,
        dkv_dtype=jnp.dtype(gradient_dtype(dkv, out_dtype)),
    )  # fmt: skip
    if not static.can_write_dkv:
        static = dataclasses.replace(static, dkv_dtype=jnp.dtype(jnp.float32))
    most = BACKWARD_WARPGROUPS * WARPGROUP_ROWS
    if config.block_kv != most:
        raise ValueError(f"block_kv is {config.block_kv}: the backward kernel takes {most}")
    if config.cluster != 1:
        raise ValueError(f"cluster is {config.cluster}: the backward kernel takes 1")
    q, k, v = inputs.query.q, inputs.kv.k, inputs.kv.v
    tokens = token_operands(static, inputs)
    do, (lse, delta) = inputs.cotangents()
    lse, delta = log2_stats(lse, delta, spec.score.scale if static.scale_in_ds else 1.0)
    if dq is None:
        # The zeros depend on an operand, so that they are made only when the queries are there: in
        # a ring, zeros for all steps would wait in memory. The scalar zero is this call's own: XLA
        # would make equal arrays of zeros once, and copy them for every call.
        zero, lse = lax.optimization_barrier((jnp.float32(0), lse))
        dq = jnp.full(q.shape, zero)
    if static.has_bias or spec.score.score_mod is not None:
        # Beyond the last query dO is zero, but a bias or a function can make a weight there that
        # overflows, and zero times infinity is not a number. This lse makes the weights 0.
        lse = pad_axis(lse, 2, static.q_tiles * config.block_q, _NO_KEYS)
    q_bases = None
    if static.bias_is_line:
        q_bases, lse = _bases_and_lse(static, inputs, lse)
    by_key = (static.batch, static.heads, static.kv_tiles * config.block_kv)
    per_head_sums = {
        name: depending_on(jnp.zeros(by_key, jnp.float32), lse)
        for name in spec.score.differentiated
    }
    if dkv is None:
        dk, dv = (jax.ShapeDtypeStruct(x.shape, static.dkv_dtype) for x in (k, v))
    else:
        dk, dv = dkv
    results = call(
        functools.partial(_kernel, static), "burst_backward", items=static.items,
        warpgroups=static.warpgroups, results=BackwardResults(dq, dk, dv, per_head_sums),
        memory=static.memory,
        operands=BackwardOperands(
            bounds, q, do, k, v, lse, delta, *tokens, q_bases, inputs.shared.score_parameters,
            DropoutNumbers.padded(inputs, config), BlockEntries.of(inputs, config),
            inputs.shared.indices,
        ),
    )  # fmt: skip
    per_head = {name: x.sum((0, 2)) for name, x in results.per_head_sums.items()}
    return results.dq, (results.dk, results.dv), per_head


def _bases_and_lse(
    static: BackwardStatic, inputs: AttentionInputs, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(q_bases, lse)`` of :class:`BackwardOperands`, from lse in base 2, of whole tiles."""
    positions = inputs.q_positions
    # Beyond the last query are copies of it, which leave the smallest position what it is.
    positions = jnp.pad(positions, (0, lse.shape[2] - positions.shape[0]), mode="edge")
    positions = positions.reshape(static.q_tiles, static.config.block_q)
    bases = positions.min(1)
    from_base = (positions - bases[:, None]).astype(jnp.float32).reshape(-1)
    numbers = {name: x[:, None] for name, x in inputs.shared.score_parameters.items()}
    _, start = static.spec.score.bias_line(from_base, numbers, LOG2_E)
    return bases, jnp.stack([lse, lse - start])


def backward_bounds(
    inputs: AttentionInputs, *, spec: AttentionSpec, config: MosaicConfig | None = None
) -> jax.Array:
    """The tables that :func:`backward` reads with the same config."""
    tiles = (config or _shipped_config(inputs)).tiles
    sides, blocks = (inputs.query, inputs.kv), inputs.shared.block_mask
    return key_bounds(spec.mask, *sides, tiles, blocks, inputs.groups)


def _shipped_config(inputs: AttentionInputs) -> MosaicConfig:
    return backward_config(max(inputs.head_dim, inputs.value_dim))


def _kernel(static: BackwardStatic, operands, results, memory, count) -> None:
    """One program, which does one item after the other."""
    barriers = BackwardBarriers.split(memory.barriers, static.config)
    refs = BackwardRefs(operands, results, memory, barriers)
    counter = TicketCounter(
        count,
        barriers.ticket_arrived,
        barriers.ticket_free,
        memory.scratch,
        first=ScratchLayout.of(static.config).tickets,
        arrivals=static.warpgroups,
    )

    def walk_of(batch_row, head, tile):
        # The items of a head begin with different queries, so that they do not all add to the same
        # dQ at once.
        rotate = tile * i32(max(1, static.q_tiles // static.kv_tiles))
        return Walk(operands.bounds, batch_row, head, tile, last=static.q_tiles - 1, rotate=rotate)

    run = functools.partial(
        each_item, static.items, counter, walk_of, steps_per_tile=static.groups, leave_empty=True
    )
    split_warpgroups(
        static.warpgroups,
        compute=functools.partial(compute_items, static, refs, run),
        copy=lambda: run(functools.partial(copy_item, static, refs), draws=True),
    )
