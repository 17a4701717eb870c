"""Backward local attention as one Pallas kernel, lowered by Mosaic GPU (Hopper).

One pass over the scores makes all three gradients, five matmuls a tile where two kernels need
seven. One program per (batch row, key head, 128 keys) walks the query tiles inside its bounds for
every query head that shares the key head. Two warpgroups hold dK and dV of 64 keys each; dQ of a
tile is summed over both and added to device memory by the copy engine, in whatever order programs
come: its last bits differ from run to run.

A step's dQ is made in the next step. So a warpgroup waits for the other's half of a dS that is long
there, and may run almost a step ahead: one's exponentials overlap with the other's products.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import Pair, half_dtype, half_shape, halves
from pallas_kernels.mosaic_configs import DS_BUFFERS, SLOTS, WARPGROUP_ROWS, MosaicConfig
from pallas_kernels.mosaic_items import Barriers, Items, Line, each_item
from pallas_kernels.mosaic_operands import Halves, call, roles, token_operands
from pallas_kernels.mosaic_tiles import (
    COLUMNS,
    ROWS,
    TILE,
    Walk,
    along_columns,
    along_rows,
    full,
    i32,
    pin,
    score_mask,
    shared,
    tanh,
)
from pallas_kernels.scores import LOG2_E, log2_factor, products_slope, raw_scores
from pallas_kernels.spec import AttentionSpec, Tokens

_WARPGROUPS = 2
# Stands for the log-sum-exp of a row that sees no key: 2^(score - this) is 0.
_NO_KEYS = 1e30
# The least weight whose logarithm is taken.
_TINY = 1e-37


@dataclasses.dataclass(frozen=True)
class _Stats:
    """Where the float32 numbers of the queries in shared memory lie, all in one array.

    One array, because each would be aligned to a KiB: lse of every stage, delta of every stage, two
    numbers that say which queries and which head a stage holds, exact up to 2^24 each, and the
    numbers of the next items.
    """

    block_q: int
    stages: int
    do_stages: int

    @property
    def size(self) -> int:
        """Numbers in all."""
        return self.numbers + SLOTS

    @property
    def numbers(self) -> int:
        """Where the numbers of items begin."""
        return self.place(self.stages, 0)

    def lse(self, slot: Any) -> Any:
        """Those of a stage."""
        return pl.ds(slot * self.block_q, self.block_q)

    def delta(self, slot: Any) -> Any:
        """Those of a stage of dO."""
        return pl.ds((self.stages + slot) * self.block_q, self.block_q)

    def place(self, slot: Any, which: int) -> Any:
        """Of the stage's query tile, or of its head."""
        return (self.stages + self.do_stages) * self.block_q + 2 * slot + which


def log2_stats(lse: jax.Array, delta: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """lse in base 2, and ``scale`` times delta: made once a call, not for every tile of scores.

    The lse of a row that sees no key becomes so large that no weight is left.
    """
    return jnp.where(lse == -jnp.inf, _NO_KEYS, lse * LOG2_E), delta * scale


def backward(
    qdo: Pair,
    kv: Pair,
    stats: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: jax.Array,
    dq: jax.Array | None = None,
    dkv: jax.Array | None = None,
    *,
    spec: AttentionSpec,
    config: MosaicConfig,
) -> tuple[jax.Array, jax.Array]:
    """See :class:`pallas_kernels.local_attention.Backward`.

    ``bounds`` are :func:`pallas_kernels.bounds.key_bounds` for the config's tiles.
    """
    batch, q_length, heads, dim = half_shape(qdo)
    kv_length, kv_heads = half_shape(kv)[1:3]
    dtype = half_dtype(qdo)
    groups = heads // kv_heads
    queries, keys = Halves.of(qdo), Halves.of(kv)
    block_q, block_kv = config.block_q, config.block_kv
    stages, do_stages = config.stages, config.do_stages or config.stages
    rows = WARPGROUP_ROWS
    if block_kv != _WARPGROUPS * rows:
        raise ValueError(f"block_kv is {block_kv}: the backward kernel takes {_WARPGROUPS * rows}")
    tiles, q_tiles = pl.cdiv(kv_length, block_kv), pl.cdiv(q_length, block_q)
    tokens, token_refs = token_operands(spec, (q_tokens, block_q), (kv_tokens, block_kv))
    factor, half = log2_factor(spec), dim // 2
    # With the scale in dS no gradient needs it any more: one multiplication and addition a score in
    # place of an addition, and none for dQ. float16 would lose small dS to underflow.
    scaled = dtype == jnp.bfloat16
    stats_of = _Stats(block_q, stages, do_stages)
    # Barriers: K and V here, free; dS here; q and dO here, free; numbers of items here, free.
    counts = (1, 1, 1, stages, do_stages, stages, do_stages, SLOTS, SLOTS)
    # Programs of wide heads have no registers left for a loop over items beside these masks.
    looped = dim <= 96 or (spec.logits_soft_cap is None and q_tokens.segment_ids is None)
    items = Items(
        batch,
        kv_heads,
        tiles,
        last_first=False,
        shared_bytes=8 * q_length * dim,
        looped=looped,
    )

    def body(inputs, outputs, scratch, taken):
        bounds_ref, q_ref, do_ref, k_ref, v_ref, lse_ref, delta_ref, *inputs = inputs
        q_token_refs, kv_token_refs = token_refs(inputs)
        dq_ref, dkv_ref = outputs
        k_smem, v_smem, q_smem, do_smem, *scratch = scratch
        stats_smem, ds_smem, sum_smem, barriers = scratch
        barriers = Barriers.split(barriers, counts)
        kv_here, kv_free, ds_here = (some.at[0] for some in barriers[:3])
        q_here, do_here, q_free, do_free, number_here, number_free = barriers[3:]

        def walk_of(row, tile):
            # Items of a head that all began with the same queries would add to the same dQ at once.
            rotate = tile * i32(max(1, q_tiles // tiles))
            return Walk(bounds_ref, row, tile, last=q_tiles - 1, rotate=rotate)

        def at(item, step):
            """The query tile and the head of a step.

            Tiles that need a mask come first, those of all heads, and heads vary slowest: programs
            that run at one time are then mostly in one head's queries, which the L2 cache holds.
            """
            walk, group = item.walk, 0
            if groups > 1:
                masked_steps = walk.masked * groups
                in_masked = step < masked_steps
                tiles_there = jnp.where(in_masked, walk.masked, walk.total - walk.masked)
                tiles_there = jnp.maximum(tiles_there, 1)
                step = jnp.where(in_masked, step, step - masked_steps)
                group = lax.div(step, tiles_there)
                step = lax.rem(step, tiles_there) + jnp.where(in_masked, 0, walk.masked)
            return walk.tile(step), item.head * groups + group

        def copy_item(item):
            row, kv_head, tile, _, count, begun, _ = item
            here = pl.ds(tile * block_kv, block_kv)

            @pl.when(begun > 0)
            def _():
                plgpu.barrier_wait(kv_free)

            plgpu.copy_gmem_to_smem(k_ref.at[row, here, kv_head], k_smem, kv_here)
            plgpu.copy_gmem_to_smem(v_ref.at[row + keys.offset, here, kv_head], v_smem, kv_here)

            @pl.loop(i32(0), count)
            def _(step):
                tile_at, head = at(item, step)
                some = pl.ds(tile_at * block_q, block_q)
                second = row + queries.offset
                copies = (
                    (q_ref.at[row, some, head], q_smem, lse_ref.at[row, head, some], stats_of.lse),
                    (
                        do_ref.at[second, some, head], do_smem,
                        delta_ref.at[row, head, some], stats_of.delta,
                    ),
                )  # fmt: skip
                barriers = ((q_here, q_free, stages), (do_here, do_free, do_stages))
                for (wide, wide_smem, thin, thin_at), (arrived, free, slots) in zip(
                    copies, barriers, strict=True
                ):
                    slot = lax.rem(begun + step, i32(slots))

                    @pl.when(begun + step >= slots)
                    def _(free=free, slot=slot):
                        plgpu.barrier_wait(free.at[slot])

                    if arrived is q_here:
                        # Whoever waits for these queries reads here which they are.
                        for which, value in enumerate((tile_at, head)):
                            stats_smem[stats_of.place(slot, which)] = value.astype(jnp.float32)
                        plgpu.commit_smem()

                    plgpu.copy_gmem_to_smem(wide, wide_smem.at[slot], arrived.at[slot])
                    # Beyond the last query zeros, not the next head's: 0 times 2^-lse must be 0.
                    plgpu.copy_gmem_to_smem(
                        thin,
                        stats_smem.at[thin_at(slot)],
                        arrived.at[slot],
                        oob_mode=plgpu.OOBFillMode.ZEROS,
                    )

        def add_dq(row, q_tile, head, part, warpgroup, lanes, predicate=None):
            """Adds half the lanes of a step's dQ to device memory."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            sum_smem[warpgroup] = part if scaled else part * spec.scale
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                sum_smem.at[warpgroup],
                dq_ref.at[row, pl.ds(q_tile * block_q, block_q), head, lanes],
                predicate=predicate,
                reduction_op="add",
            )

        def compute_item(warpgroup, item):
            # Steps are counted over all items, and the first one is known by there being none
            # before it: fewer numbers to keep in registers.
            row, _, tile, walk, count, begun, again = item
            end = begun + count
            first_key = tile * block_kv + warpgroup * rows
            k_tokens = kv_token_refs.load(row, pl.ds(first_key, rows), ROWS)

            def wait_for_queries(step):
                @pl.when(step < end)
                def _():
                    plgpu.barrier_wait(q_here.at[lax.rem(step, i32(stages))])

            def ds_buffer(step):
                return lax.rem(step + DS_BUFFERS, i32(DS_BUFFERS))

            def mask(scores, q_tile):
                # One test after the other: the ids of both would not fit in registers.
                q_pos, q_seg = q_token_refs.load(row, pl.ds(q_tile * block_q, block_q), COLUMNS)
                unpacked, unlimited = (q_pos, None), AttentionSpec(spec.scale)
                tests = [(spec, unpacked, (k_tokens[0], None))]
                if q_seg is not None:
                    tests.append((unlimited, (q_pos, q_seg), k_tokens))
                for test, q_some, k_some in tests:
                    shape = scores.shape
                    ok = score_mask(test, shape, q_some, k_some, along_columns, along_rows)
                    scores = scores if ok is None else pin(jnp.where(ok, scores, -jnp.inf))
                return scores

            def beyond(me):
                """-inf for keys beyond the end, zeros that would weigh 2^-lse and may overflow."""
                index = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROWS)
                there = kv_length - (tile * block_kv + me * rows)
                return jnp.where(index < there, 0.0, -jnp.inf)

            # Made once, or with a soft cap in every step: so the compiler has registers for both.
            beyond_once = None
            if kv_length % block_kv and spec.logits_soft_cap is None:
                beyond_once = beyond(warpgroup)

            def visit(masked, step, state):
                # Scores are transposed, [keys, queries]: their weights are a matrix instruction's
                # left operand in registers as they are.
                dk, dv, earlier_tile, earlier_head = state
                slot, do_slot = lax.rem(step, i32(stages)), lax.rem(step, i32(do_stages))
                newer, older = ds_buffer(step), ds_buffer(step - 1)
                # What follows from the warpgroup is made anew in every step: kept, it would be in
                # registers that the tiles need.
                me = pin(warpgroup)
                q_tile, head = (
                    stats_smem[stats_of.place(slot, which)].astype(jnp.int32) for which in (0, 1)
                )
                mine, lanes = pl.ds(me * rows, rows), pl.ds(me * half, half)

                def slopes(scores_ref, dp_ref):
                    plgpu.wgmma(scores_ref, k_smem.at[mine], q_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(do_here.at[do_slot])
                    plgpu.wgmma(dp_ref, v_smem.at[mine], do_smem.at[do_slot].transpose((1, 0)))
                    products = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    scores = raw_scores(spec, products, tanh)
                    if kv_length % block_kv:
                        outside = beyond(me) if beyond_once is None else beyond_once
                        scores = scores + along_rows(outside, scores.shape)
                    shift = plgpu.load(stats_smem.at[stats_of.lse(slot)], layout=COLUMNS)
                    if masked:
                        scores = mask(scores, q_tile)
                    shift = along_columns(shift, scores.shape)
                    p = pin(jnp.exp2(scores * factor - shift))
                    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                    dp, p = pin(dp, p)
                    wait_for_queries(step + 1)
                    delta = plgpu.load(stats_smem.at[stats_of.delta(do_slot)], layout=COLUMNS)
                    dp = dp * spec.scale if scaled else dp
                    ds = p * (dp - along_columns(delta, p.shape))
                    if spec.logits_soft_cap is not None:
                        # From the weights: no registers are left to keep the scores in. Where a
                        # weight is 0 it is any number, which is as good.
                        again = (jnp.log2(jnp.maximum(p, _TINY)) + shift) * (1 / factor)
                        ds = products_slope(spec, jnp.clip(again, -1, 1), ds)
                    return p.astype(dtype), ds.astype(dtype)

                scores = plgpu.ACC((rows, block_q), jnp.float32)
                p, ds = pl.run_scoped(slopes, scores, scores)
                p, ds, dk, dv = pin(p, ds, dk, dv)

                # The other warpgroup has then finished the products of the step before the last,
                # which read the buffer that is written now.
                @pl.when(earlier_tile >= 0)
                def _():
                    plgpu.barrier_wait(ds_here)

                ds_smem[newer, mine] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(ds_here)

                def products(dv_acc, dk_acc, dq_acc):
                    dv_acc[...] = dv
                    dk_acc[...] = dk
                    dq_of(dq_acc, older, lanes)
                    plgpu.wgmma(dv_acc, p, do_smem.at[do_slot])
                    plgpu.wgmma(dk_acc, ds, q_smem.at[slot])
                    part = plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)
                    some = earlier_tile >= 0
                    row = again()[0]
                    add_dq(row, earlier_tile, earlier_head, part, me, lanes, predicate=some)
                    dk_next = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
                    dv_next = plgpu.wgmma_accumulator_load(dv_acc, wait_n=None)
                    plgpu.barrier_arrive(do_free.at[do_slot])
                    plgpu.barrier_arrive(q_free.at[slot])
                    return dk_next, dv_next, q_tile, head

                sums = plgpu.ACC((rows, dim), jnp.float32)
                return pl.run_scoped(products, sums, sums, plgpu.ACC((block_q, half), jnp.float32))

            def dq_of(dq_acc, buffer, lanes):
                plgpu.wgmma(dq_acc, ds_smem.at[buffer].transpose((1, 0)), k_smem.at[:, lanes])

            def last_dq(dq_acc):
                dq_of(dq_acc, ds_buffer(end - 1), my_lanes)
                return dq_acc[...]

            my_lanes = pl.ds(warpgroup * half, half)
            plgpu.barrier_wait(kv_here)
            wait_for_queries(begun)
            zeros = full((rows, dim), 0, TILE)
            masked_end = begun + walk.masked * groups
            state = (zeros, zeros, i32(-1), i32(0))
            state = lax.fori_loop(begun, masked_end, functools.partial(visit, True), state)
            state = lax.fori_loop(masked_end, end, functools.partial(visit, False), state)
            dk, dv, q_tile, head = state
            plgpu.barrier_wait(ds_here)
            part = pl.run_scoped(last_dq, plgpu.ACC((block_q, half), jnp.float32))
            plgpu.barrier_arrive(kv_free)
            row, kv_head, tile = again()
            add_dq(row, q_tile, head, part, warpgroup, my_lanes)
            for which, gradient in enumerate((dk if scaled else dk * spec.scale, dv)):
                for start in (0, half):
                    part = gradient[:, start : start + half]
                    write_dkv(row, kv_head, tile, warpgroup, which, start, part)

        def write_dkv(row, kv_head, tile, warpgroup, which, start, part):
            """Half the lanes of a warpgroup's keys: of dK, or of dV."""
            mine = pl.ds(tile * block_kv + pin(warpgroup) * rows, rows)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part_smem = sum_smem.at[warpgroup, :rows]
            part_smem[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                part_smem,
                dkv_ref.at[row + which * batch, mine, kv_head, pl.ds(start, half)],
                reduction_op=None if dkv is None else "add",
            )

        def write_zeros(warpgroup, item):
            """Where no query sees a tile of keys."""
            row, kv_head, tile = item[:3]
            for which, start in itertools.product((0, 1), (0, half)):
                zeros = full((rows, half), 0, TILE)
                write_dkv(row, kv_head, tile, warpgroup, which, start, zeros)

        line = Line(taken, number_here, number_free, stats_smem, stats_of.numbers, _WARPGROUPS)
        run = functools.partial(
            each_item, items, line, walk_of, steps_per_tile=groups, leave_empty=True
        )

        def compute(warpgroup):
            empty = None if dkv is not None else functools.partial(write_zeros, warpgroup)
            run(functools.partial(compute_item, warpgroup), taker=False, empty=empty)
            plgpu.wait_smem_to_gmem(0)

        roles(_WARPGROUPS, compute, lambda: run(copy_item, taker=True))

    # Half of K's lanes are an operand: where the head dim is small its tiles are half as wide, and
    # both operands of a product must be in equal tiles.
    scratch = [
        shared((block_kv, dim), dtype, lanes=half),
        shared((block_kv, dim), dtype),
        shared((stages, block_q, dim), dtype, lanes=half),
        shared((do_stages, block_q, dim), dtype),
        plgpu.SMEM((stats_of.size,), jnp.float32),
        shared((DS_BUFFERS, block_kv, block_q), dtype, lanes=half),
        shared((_WARPGROUPS, block_q, half), jnp.float32),
        # Two arrive at each: two copies, or both warpgroups.
        plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=sum(counts)),
    ]
    packed_dkv = (2 * batch, *half_shape(kv)[1:])
    lse, delta = log2_stats(*halves(stats), spec.scale if scaled else 1.0)
    if dq is None:
        # Not before the queries are there: in a ring, zeros for all its steps would lie in wait.
        # Of a zero of this call's own: those of equal ones would be made once, and copied.
        zero, lse = lax.optimization_barrier((jnp.float32(0), lse))
        dq = jnp.full(half_shape(qdo), zero)
    results = [
        dq,
        jax.ShapeDtypeStruct(packed_dkv, jnp.float32) if dkv is None else dkv.reshape(packed_dkv),
    ]
    operands = [
        bounds, queries.first, queries.second, keys.first, keys.second,
        lse, delta, *tokens,
    ]  # fmt: skip
    dq, dkv = call(
        body, "burst_backward", items=items, warpgroups=_WARPGROUPS,
        operands=operands, scratch=scratch, results=results,
    )  # fmt: skip
    return dq, dkv.reshape(2, *half_shape(kv))
