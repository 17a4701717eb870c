"""Forward local attention as a Pallas kernel, lowered by Mosaic GPU (Hopper).

An item of work is a (batch row, query head, query tile), 64 queries a warpgroup. One more warpgroup
takes the items, and copies their queries and key tiles into shared memory as room comes free. A
computing warpgroup starts the next tile's ``q k^T`` and this one's ``p v`` together, and makes the
softmax of the former while the other warpgroup's products run; o is merged with the incoming
(o, lse) at the end, in place.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import Pair, half_shape, pad_axis
from pallas_kernels.merge import merge_weights
from pallas_kernels.mosaic_configs import (
    REGISTERS,
    SLOTS,
    WARPGROUP_ROWS,
    MosaicConfig,
    chunk,
    out_chunk,
)
from pallas_kernels.mosaic_items import Items, Line, each_item
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
from pallas_kernels.scores import LOG2_E, log2_factor, raw_scores
from pallas_kernels.spec import AttentionSpec, Tokens

# Finite, so that a row with nothing allowed yet never computes -inf - -inf.
_FLOOR = -1e30


def forward(
    q: jax.Array,
    kv: Pair,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    bounds: jax.Array,
    carry: tuple[jax.Array, jax.Array] | None = None,
    *,
    spec: AttentionSpec,
    config: MosaicConfig,
    out_dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See :class:`pallas_kernels.local_attention.Forward`."""
    batch, q_length, heads, dim = q.shape
    kv_length, kv_heads = half_shape(kv)[1:3]
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    wide = out_dtype == jnp.float32
    carried = carry is not None
    keys = Halves.of(kv)
    block_q, block_kv, stages = config.block_q, config.block_kv, config.stages
    warpgroups, rows = block_q // WARPGROUP_ROWS, WARPGROUP_ROWS
    if warpgroups not in REGISTERS:
        raise ValueError(f"block_q is {block_q}: the forward kernel takes 128 or 192")
    tiles = pl.cdiv(q_length, block_q)
    tokens, token_refs = token_operands(spec, (q_tokens, block_q), (kv_tokens, block_kv))
    factor, lanes, out_lanes = log2_factor(spec), chunk(dim), out_chunk(dim, wide)
    in_place = carried and wide
    # Three warpgroups have no registers left for a loop over items beside segment ids.
    looped = warpgroups < 3 or q_tokens.segment_ids is None
    shared_bytes = 4 * kv_length * dim * kv_heads // heads
    unmasked = spec.left is None and spec.right is None and q_tokens.segment_ids is None
    items = Items(
        batch,
        heads,
        tiles,
        last_first=True,
        shared_bytes=shared_bytes,
        equal=unmasked,
        looped=looped,
    )

    def body(inputs, outputs, scratch, taken):
        bounds_ref, q_ref, k_ref, v_ref, *inputs = inputs
        q_token_refs, kv_token_refs = token_refs(inputs)
        q_smem, k_smem, v_smem, out_smem, o_smem, lse_smem, numbers, *barriers = scratch
        q_here, q_free, k_here, v_here, k_free, v_free, lse_here, o_here, *barriers = barriers
        number_here, number_free = barriers
        o_smem = out_smem if wide else o_smem
        o_ref, lse_ref = outputs
        o_in_ref, lse_in_ref = outputs if not carried or in_place else inputs[-2:]

        def walk_of(row, tile):
            return Walk(bounds_ref, row, tile, last=pl.cdiv(kv_length, block_kv) - 1)

        line = Line(taken, number_here, number_free, numbers)
        run = functools.partial(each_item, items, line, walk_of, leave_empty=in_place)

        def copy_item(item):
            row, head, tile, walk, count, begun, _ = item
            kv_head = lax.div(head, i32(heads // kv_heads))

            def copy_queries():
                for warpgroup in range(warpgroups):

                    @pl.when(begun > 0)
                    def _(warpgroup=warpgroup):
                        plgpu.barrier_wait(q_free.at[warpgroup])

                    mine = pl.ds(tile * block_q + warpgroup * rows, rows)
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[row, mine, head], q_smem.at[warpgroup], q_here.at[warpgroup]
                    )

            @pl.loop(i32(0), count)
            def _(step):
                slot = lax.rem(begun + step, i32(stages))
                at = pl.ds(walk.tile(step) * block_kv, block_kv)
                copies = (
                    (k_ref.at[row, at, kv_head], k_smem, k_here, k_free),
                    (v_ref.at[row + keys.offset, at, kv_head], v_smem, v_here, v_free),
                )
                for source, target, here, free in copies:
                    if target is v_smem:
                        # Behind the first keys, for which there is room before the last item's
                        # last scores have been made.
                        pl.when(step == 0)(copy_queries)

                    @pl.when(begun + step >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(source, target.at[slot], here.at[slot])

        def compute_item(warpgroup, item):
            row, head, tile, walk, count, begun, _ = item
            start = tile * block_q + warpgroup * rows
            mine = pl.ds(start, rows)
            q_here_tokens = q_token_refs.load(row, mine, ROWS)

            def slot_of(step):
                return lax.rem(begun + step, i32(stages))

            def softmax(masked, step, scores, m, total):
                """The tile's weights, the new maximum and sum, what the old ones shrink by."""
                scores = raw_scores(spec, scores, tanh)
                if masked:
                    first_key = walk.tile(step) * block_kv
                    k_tokens = kv_token_refs.load(row, pl.ds(first_key, block_kv), COLUMNS)
                    shape = scores.shape
                    ok = score_mask(spec, shape, q_here_tokens, k_tokens, along_rows, along_columns)
                    if kv_length % block_kv:
                        index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
                        inside = index < kv_length - first_key
                        ok = inside if ok is None else ok & inside
                    if ok is not None:
                        scores = jnp.where(ok, scores, -jnp.inf)
                m_next = jnp.maximum(m, scores.max(axis=1) * factor)
                shrink = jnp.exp2(m - m_next)
                p = jnp.exp2(scores * factor - along_rows(m_next, scores.shape))
                return pin(p, m_next, total * shrink + p.sum(axis=1), shrink)

            def wait_for_keys(step):
                @pl.when(step < count)
                def _():
                    plgpu.barrier_wait(k_here.at[slot_of(step)])

            def scores_of(scores_ref, slot):
                keys_t = k_smem.at[slot].transpose((1, 0))
                # Found anew for every tile: kept, the address would take a register.
                plgpu.wgmma(scores_ref, q_smem.at[pin(warpgroup)], keys_t)

            def first_scores(scores_ref):
                scores_of(scores_ref, slot_of(i32(0)))
                return scores_ref[...]

            accumulators = (
                plgpu.ACC((rows, block_kv), jnp.float32),
                plgpu.ACC((rows, dim), jnp.float32),
            )
            plgpu.barrier_wait(q_here.at[warpgroup])
            wait_for_keys(i32(0))
            scores = pl.run_scoped(first_scores, accumulators[0])
            plgpu.barrier_arrive(k_free.at[slot_of(i32(0))])

            @pl.when(count == 1)
            def _():
                plgpu.barrier_arrive(q_free.at[warpgroup])

            m, total = full((rows,), _FLOOR, ROWS), full((rows,), 0, ROWS)
            p, m, total, _ = softmax(True, i32(0), scores, m, total)
            p = p.astype(q.dtype)
            wait_for_keys(i32(1))

            def visit(masked, step, state):
                # Invariant: acc and total are sums over the tiles visited of 2^(factor scores - m),
                # acc without the last one's, whose weights are p.
                p, acc, m, total = state
                slot, last = slot_of(step), slot_of(step - 1)

                def products(scores_ref, acc_ref):
                    acc_ref[...] = acc
                    scores_of(scores_ref, slot)
                    plgpu.barrier_wait(v_here.at[last])
                    plgpu.wgmma(acc_ref, p, v_smem.at[last])
                    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    plgpu.barrier_arrive(k_free.at[slot])

                    @pl.when(step == count - 1)
                    def _():
                        plgpu.barrier_arrive(q_free.at[warpgroup])

                    p_next, m_next, total_next, shrink = softmax(masked, step, scores, m, total)
                    out = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    # Rounded only now: the product above may still have been reading p's registers.
                    out, p_next = pin(out, p_next)
                    wait_for_keys(step + 1)
                    plgpu.barrier_arrive(v_free.at[last])
                    out = out * along_rows(shrink, out.shape)
                    return p_next.astype(q.dtype), out, m_next, total_next

                return pl.run_scoped(products, *accumulators)

            state = (p, full((rows, dim), 0, TILE), m, total)
            masked_end = jnp.maximum(walk.masked, 1)
            state = lax.fori_loop(i32(1), masked_end, functools.partial(visit, True), state)
            state = lax.fori_loop(masked_end, count, functools.partial(visit, False), state)
            p, acc, m, total = state

            # The last item's results have left the memory that this one's come to.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if carried:
                lse_in = lse_in_ref.at[row, head, mine]
                plgpu.copy_gmem_to_smem(lse_in, lse_smem.at[warpgroup], lse_here.at[warpgroup])
                fetch_o(warpgroup, row, head, mine, 0)

            def last_product(acc_ref):
                acc_ref[...] = acc
                slot = slot_of(count - 1)
                plgpu.barrier_wait(v_here.at[slot])
                plgpu.wgmma(acc_ref, p, v_smem.at[slot])
                return acc_ref[...]

            acc = pl.run_scoped(last_product, accumulators[1])
            # The copies of the next item's keys need not wait for what follows.
            plgpu.barrier_arrive(v_free.at[slot_of(count - 1)])
            finish(warpgroup, row, head, mine, acc, m, total)

        def finish(warpgroup, row, head, mine, acc, m, total):
            """Normalises, merges with the carry, and writes o and lse."""
            empty = total == 0
            total = jnp.where(empty, 1.0, total)
            lse = jnp.where(empty, -jnp.inf, m / LOG2_E + jnp.log(total))
            weight, w_in = 1 / total, total
            if carried:
                plgpu.barrier_wait(lse_here.at[warpgroup])
                old_lse = plgpu.load(lse_smem.at[warpgroup], layout=ROWS)
                w_in, w_new, lse = merge_weights(old_lse, lse)
                weight = weight * w_new
                plgpu.commit_smem()  # What is written next, others still read.
            lse_smem[warpgroup] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[row, head, mine])
            for at in range(0, dim, lanes):
                part = acc[:, at : at + lanes]
                part = part * along_rows(weight, part.shape)
                place = at % out_lanes
                if at and not place:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if carried:
                    if at:
                        fetch_o(warpgroup, row, head, mine, at)
                    plgpu.barrier_wait(o_here.at[warpgroup])
                    old = plgpu.load(o_smem.at[warpgroup], layout=TILE)
                    part = part + old * along_rows(w_in, part.shape)
                    if not wide:
                        plgpu.commit_smem()  # What the next copy overwrites, others still read.
                out_smem[warpgroup, :, place : place + lanes] = part.astype(out_dtype)
                if place + lanes == out_lanes:
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[warpgroup],
                        o_ref.at[row, mine, head, pl.ds(at + lanes - out_lanes, out_lanes)],
                    )

        def fetch_o(warpgroup, row, head, mine, at):
            o_in = o_in_ref.at[row, mine, head, pl.ds(at, lanes)]
            plgpu.copy_gmem_to_smem(o_in, o_smem.at[warpgroup], o_here.at[warpgroup])

        def compute(warpgroup):
            run(functools.partial(compute_item, warpgroup), taker=False)
            plgpu.wait_smem_to_gmem(0)

        roles(warpgroups, compute, lambda: run(copy_item, taker=True))

    scratch = [
        shared((warpgroups, rows, dim), q.dtype),
        shared((stages, block_kv, dim), q.dtype),
        shared((stages, block_kv, dim), q.dtype),
        shared((warpgroups, rows, out_lanes), out_dtype, lanes=lanes),
        shared((warpgroups, rows, lanes), jnp.float32) if carried and not wide else None,
        plgpu.SMEM((warpgroups, rows), jnp.float32),
        plgpu.SMEM((SLOTS,), jnp.float32),
        *(plgpu.Barrier(num_barriers=warpgroups),) * 2,
        *(plgpu.Barrier(num_barriers=stages),) * 2,
        *(plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),) * 2,
        *(plgpu.Barrier(num_barriers=warpgroups),) * 2,
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=SLOTS),
    ]
    operands = [bounds, q, keys.first, keys.second, *tokens]
    # A tile's lse is one run of memory, which the copy engine would write past the last query into
    # the next head's: where tiles are cut off, it goes to whole ones.
    padded = tiles * block_q
    shapes = (q.shape, out_dtype), ((batch, heads, padded), jnp.dtype(jnp.float32))
    results: list = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    if carry is not None:
        state = carry[0], pad_axis(carry[1], 2, padded)
        if in_place:
            results = list(state)
        else:
            operands += state
    o, lse = call(
        body, "burst_forward", items=items, warpgroups=warpgroups,
        operands=operands, scratch=scratch, results=results,
    )  # fmt: skip
    return o, lse[..., :q_length]
