"""Forward local attention on Hopper: a persistent, warp-specialized kernel.

A work tile is a (batch index, query head, query tile) with 64 queries per consumer warpgroup. The
producer warpgroup fetches work tiles and starts the TMA copies of queries and KV tiles as pipeline
stages become free; it also writes zeros in padding (``padding.py``). A consumer loops over the KV
tiles within the bounds: first those that need a mask, then the full ones. In each step it issues
two products together, ``q k^T`` of the step's tile and ``p v`` of the tile before, so the softmax
of one consumer overlaps with the products of the other. Scores and softmax are in
``forward_scores.py``; ``forward_epilogue.py`` merges o with the incoming (o, lse) and writes it, in
place where possible. With ``split_softmax`` the wait for ``p v`` is between two halves of the
exponentials (``online_softmax.py``).

With ``MosaicConfig.cluster`` 2, a work tile is two neighboring query tiles, one per CTA of a
cluster. Both CTAs visit the same KV tiles, and each multicasts one half of every tile.

The KV tiles that need a mask are visited from the last to the first. The consumers whose queries
come first, or are padding, then skip the first steps: they only mark the stages as read.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.arrays import depending_on, pad_axis
from pallas_kernels.bounds import query_bounds
from pallas_kernels.inputs import AttentionInputs, Carry
from pallas_kernels.mosaic.fragments import (
    constant,
    i32,
    optimization_barrier,
    proxy_fence,
    rescale_rows,
)
from pallas_kernels.mosaic.launch import CLUSTER_AXIS, launch
from pallas_kernels.mosaic.score_inputs import BLOCK_TOKENS, ScoreInputs
from pallas_kernels.mosaic.sm90 import (
    forward_epilogue,
    forward_scores,
    instructions,
    online_softmax,
)
from pallas_kernels.mosaic.sm90.configs import (
    REGISTERS,
    SHARED_MEMORY,
    WARPGROUP_ROWS,
    MosaicConfig,
    for_this_jax,
    forward_config,
    plain_forward_config,
)
from pallas_kernels.mosaic.sm90.forward_scores import Consumer
from pallas_kernels.mosaic.sm90.inputs import ForwardInputs, ForwardRefs, ForwardResults
from pallas_kernels.mosaic.sm90.instructions import ROWS, TILE, specialize_warpgroups
from pallas_kernels.mosaic.sm90.padding import PaddedTiles, Tokens, copy_without_padding
from pallas_kernels.mosaic.sm90.producer import Copies, Producer
from pallas_kernels.mosaic.sm90.row_intervals import tile_ranges, with_intervals
from pallas_kernels.mosaic.sm90.static import ForwardStatic
from pallas_kernels.mosaic.tile_iterator import TileIterator
from pallas_kernels.mosaic.tile_scheduler import (
    CTA_AXIS,
    InlineProducer,
    TileScheduler,
    WorkTile,
    for_each_work_tile,
)
from pallas_kernels.spec import AttentionSpec


def forward(
    inputs: AttentionInputs,
    bounds: Any,
    carry: Carry | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
    config: MosaicConfig | None = None,
) -> Carry:
    """See :class:`pallas_kernels.backend.ForwardFunction`; ``config`` None is the default."""
    shipped = _shipped_config(inputs, spec) if config is None else config
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    carry_dtype = None if carry is None else carry[0].dtype
    static = ForwardStatic.of(inputs, spec, shipped, out_dtype=out_dtype, carry_dtype=carry_dtype)
    if static.has_carry and not static.in_place and static.memory.nbytes > SHARED_MEMORY:
        # The largest tiles leave no room to stage o in two dtypes.
        o, lse = forward(inputs, bounds, carry, spec=spec, config=config)
        return o.astype(out_dtype), lse
    if config is None:
        static = static.with_third_stages()
    config = static.config
    if static.consumers not in REGISTERS:
        raise ValueError(f"block_q is {config.block_q}: the forward kernel supports 128 or 192")
    q, k, v = inputs.query.q, inputs.kv.k, inputs.kv.v
    scores, k_positions = ScoreInputs.of(inputs, spec, config.tiles), None
    if static.bias_in_accumulator:
        k_positions = scores.kv_tokens.positions.astype(jnp.float32)
    sink = None if static.has_carry else inputs.shared.sink_logits
    padded = PaddedTiles.of(inputs, config) if static.zeroes_padding else None
    arrays = ForwardInputs(bounds, q, k, v, scores, k_positions, sink, None, padded)
    # TMA writes the lse of a whole tile, also of one that extends past the last query. Without
    # padding it would overwrite the lse of the next head.
    work_tiles = static.work_tiles
    length = work_tiles.tiles * config.tiles.block_q
    results = ForwardResults(
        o=jax.ShapeDtypeStruct(inputs.out_shape, out_dtype),
        lse=jax.ShapeDtypeStruct((static.batch, static.heads, length), jnp.dtype(jnp.float32)),
    )
    if carry is not None:
        given = ForwardResults(carry[0], pad_axis(carry[1], 2, length))
        if static.in_place:
            results = given
        else:
            arrays = arrays._replace(carry=given)
    counter = work_tiles.counter(tile_ranges(bounds), static.kv_tiles)
    counter = None if counter is None else depending_on(counter, q)
    o, lse = launch(
        functools.partial(_kernel, static), "burst_forward", grid={CTA_AXIS: work_tiles.ctas},
        warpgroups=static.warpgroups, cluster=work_tiles.cluster, inputs=arrays,
        results=results, memory=static.memory, counter=counter,
    )  # fmt: skip
    return o, lse[..., : static.q_length]


def forward_bounds(
    inputs: AttentionInputs, *, spec: AttentionSpec, config: MosaicConfig | None = None
) -> Any:
    """The tile bounds that :func:`forward` reads with the same config."""
    config, block_mask = config or _shipped_config(inputs, spec), inputs.shared.block_mask
    # Only tiles with more queries than keys have consumers that can skip much. The CTAs of a
    # cluster would still wait for each other, and consumers that copy may lack registers for it.
    skips = config.block_q > config.block_kv and config.cluster == 1 and block_mask is None
    if inputs.has_bias or inputs.has_segments or inputs.has_kv_bounds:
        skips &= config.producer_warpgroup
    parts = config.block_q // WARPGROUP_ROWS if skips else 1
    bounds = query_bounds(spec.mask, inputs.query, inputs.kv, config.tiles, block_mask, parts)
    return with_intervals(bounds, inputs, spec, config)


def _shipped_config(inputs: AttentionInputs, spec: AttentionSpec) -> MosaicConfig:
    score = spec.score
    # A bias in the accumulator needs too many registers only together with segment ids or a window.
    other_masks = inputs.has_segments or spec.mask.left is not None
    bias_counts = inputs.has_bias and (other_masks or not score.bias_can_start_products)
    needs_registers = score.logits_soft_cap is not None or spec.dropout is not None
    needs_registers = needs_registers or spec.calls_functions
    # KV bounds are two more values per query.
    has_block_mask = inputs.shared.block_mask is not None
    needs_registers = needs_registers or inputs.has_kv_bounds or has_block_mask
    head_dim = max(inputs.head_dim, inputs.value_dim)
    config = forward_config(inputs.head_dim, inputs.value_dim, bias_counts or needs_registers)
    if has_block_mask and config.block_kv % BLOCK_TOKENS:
        config = dataclasses.replace(config, block_kv=BLOCK_TOKENS)
    if other_masks or inputs.has_bias or needs_registers:
        return for_this_jax(config)
    length = min(inputs.q_length, inputs.kv_length)
    return plain_forward_config(config, head_dim, spec.mask.right is not None, length)


def _kernel(static: ForwardStatic, inputs, results, memory, counter=None) -> None:
    """One warpgroup of one CTA."""
    refs = ForwardRefs(inputs, results, memory)
    scheduler = TileScheduler(
        counter, memory.slot_fetched, memory.slot_free, memory.scheduler_slots,
        cluster=static.config.cluster, chooses_groups=static.work_tiles.chooses_groups,
    )  # fmt: skip

    ranges, last = tile_ranges(inputs.bounds), static.kv_tiles - 1

    def iterator_of(batch, head, tile):
        return TileIterator(ranges, batch, head, tile, last, descending=True)

    run_all = functools.partial(
        for_each_work_tile, static.work_tiles, scheduler, iterator_of, skip_empty=True
    )

    def produce():
        steps = run_all(functools.partial(_produce, static, refs), is_producer=True)
        if static.config.cluster > 1:
            _drain_stages(static, refs, steps)

    def consume(warpgroup):
        inline = None
        if not static.config.producer_warpgroup:
            own = static, refs, warpgroup
            inline = InlineProducer(warpgroup == 0, lambda work: _producer(*own, work).start())
        run = functools.partial(_consume, static, refs, warpgroup)
        # In place, queries without keys keep the carry. Otherwise their results must be written.
        run_empty = None
        if not static.in_place:
            run_empty = functools.partial(_write_without_keys, static, refs, warpgroup)
        run_all(run, is_producer=False, inline=inline, run_empty=run_empty)
        plgpu.wait_smem_to_gmem(0)

    specialize_warpgroups(
        static.consumers, consume, produce if static.config.producer_warpgroup else None
    )


# --- producer -------------------------------------------------------------------------------------


def _produce(static: ForwardStatic, refs: ForwardRefs, work: WorkTile) -> None:
    """Starts the copies of a work tile's queries, keys and values, each when its memory is free."""

    @pl.loop(i32(0), work.steps)
    def _(step):
        _copy_kv_tile("k", static, refs, work, step)
        # The queries come after the first keys, whose stage is free earlier: the previous work tile
        # frees its queries only with its last scores.
        pl.when(step == 0)(functools.partial(_copy_all_queries, static, refs, work))
        _copy_kv_tile("v", static, refs, work, step)


def _producer(static: ForwardStatic, refs: ForwardRefs, warpgroup: Any, work: WorkTile) -> Producer:
    """Starts the same copies in the consumer warpgroups: keys in the first, values in the last.

    While a consumer computes the scores of a step, it has read the keys of the step before, and the
    values of the one before that. The values then make the last consumer wait for the others, so
    that the first one is ahead of it, and finds its stage of keys free. With a third stage of keys
    the copies start after the softmax (:func:`_step`), when it has read this step's keys as well.
    """
    call, last = (static, refs), static.consumers - 1
    copy_keys, copy_values = (functools.partial(_copy_kv_tile, name, *call) for name in "kv")
    keys = Copies.of(copy_keys, work, static.config.stages - 1, 0)
    values = Copies.of(copy_values, work, static.v_stages - 2, last)
    queries = functools.partial(_copy_queries, *call, work, warpgroup)
    return Producer(work, warpgroup, (keys, values), queries)


def _copy_kv_tile(
    operand: str, static: ForwardStatic, refs: ForwardRefs, work: WorkTile, step: Any,
    masked: bool = True,
) -> None:  # fmt: skip
    """Starts the copy of a step's keys "k" or values "v", once the stage's previous tile is read.

    Stages are used in turn across all work tiles of a CTA. Each CTA of a cluster multicasts its
    part to the shared memory of all; ``arrived`` waits for the whole tile. If the positions of keys
    are needed, their copies are started as well.
    """
    names = operand, f"{operand}_arrived", f"{operand}_free"
    target, arrived, free = (getattr(refs.memory, name) for name in names)
    cta_step, block_kv, stages = work.steps_before + step, static.config.block_kv, target.shape[0]
    stage = lax.rem(cta_step, i32(stages))
    tile = work.iterator.tile(step, masked)
    tokens = pl.ds(tile * block_kv, block_kv)
    of_tile = Tokens.of(refs.inputs, "kv", work.batch, tile, tokens.start)

    @pl.when(cta_step >= stages)
    def _():
        plgpu.barrier_wait(free.at[stage])

    head, target = lax.div(work.head, i32(static.groups)), target.at[stage]
    source = getattr(refs.inputs, operand).at[work.batch, tokens, head]
    axes = None if static.config.cluster == 1 else CLUSTER_AXIS
    copy = functools.partial(plgpu.copy_gmem_to_smem, source, target, collective_axes=axes)
    zeroed, own = (target, getattr(static.memory, operand)), refs.memory.padded_arrived
    copy_without_padding(of_tile, copy, arrived.at[stage], own, zeroed)
    if operand == "k" and static.bias_in_accumulator:
        # The stage of the positions is free when that of the keys is.
        positions = refs.inputs.k_positions.at[tokens]
        target = refs.memory.k_positions.at[stage, pl.ds(0, block_kv)]
        plgpu.copy_gmem_to_smem(positions, target, arrived.at[stage])


def _copy_all_queries(static: ForwardStatic, refs: ForwardRefs, work: WorkTile) -> None:
    """Starts the copies of a work tile's queries."""
    for warpgroup in range(static.consumers):
        _copy_queries(static, refs, work, warpgroup)


def _copy_queries(static: ForwardStatic, refs: ForwardRefs, work: WorkTile, warpgroup: Any) -> None:
    """Starts the copy of a consumer's 64 queries."""
    memory = refs.memory
    first = work.tile * static.config.block_q + warpgroup * WARPGROUP_ROWS
    of_tile = Tokens.of(refs.inputs, "q", work.batch, work.tile, first)

    @pl.when(work.steps_before > 0)
    def _():
        plgpu.barrier_wait(memory.q_free.at[warpgroup])

    queries = refs.inputs.q.at[work.batch, pl.ds(first, WARPGROUP_ROWS), work.head]
    target, arrived = memory.q.at[warpgroup], memory.q_arrived.at[warpgroup]
    copy = functools.partial(plgpu.copy_gmem_to_smem, queries, target)
    zeroed = target, static.memory.q
    copy_without_padding(of_tile, copy, arrived, memory.padded_arrived, zeroed)


def _drain_stages(static: ForwardStatic, refs: ForwardRefs, steps: Any) -> None:
    """Waits until all stages are free, after a CTA's last step.

    The other CTA of the cluster arrives at barriers in this one's shared memory, which is gone once
    this CTA has exited.
    """
    memory = refs.memory
    for free, stages in ((memory.k_free, static.config.stages), (memory.v_free, static.v_stages)):
        for stage in range(stages):
            pl.when(steps > stage)(functools.partial(plgpu.barrier_wait, free.at[stage]))


# --- consumers ------------------------------------------------------------------------------------


class _State(NamedTuple):
    """A consumer's loop state.

    All weights are ``2^(score - m)``, with scores in base 2. ``total`` is over all tiles visited;
    ``acc`` lacks the last one, whose product with the values is issued in the next step.

    Attributes:
      weights: ``[64, block_kv]``, of the last tile visited, in the inputs' dtype.
      acc: float32 ``[64, Hv]``, the sum of weights times values.
      m: float32 ``[64]``, the largest score so far, in base 2, or a margin below it.
      total: float32 ``[64]``, the sum of weights; with ``split_softmax`` each thread's part of it.
    """

    weights: jax.Array
    acc: jax.Array
    m: jax.Array
    total: jax.Array


def _consume(static: ForwardStatic, refs: ForwardRefs, warpgroup: Any, work: WorkTile) -> None:
    """One work tile of a consumer: the KV loop and the epilogue."""
    consumer = Consumer.of(static, refs, warpgroup, work)
    plgpu.barrier_wait(refs.memory.q_arrived.at[warpgroup])
    first = work.iterator.skipped(warpgroup)
    if first is None:
        first = i32(0)
    else:
        pl.loop(i32(0), first)(functools.partial(_skip_step, consumer))
    state = _first_step(consumer, first)
    masked_end = jnp.maximum(work.iterator.masked, first + 1)
    state = lax.fori_loop(first + 1, masked_end, functools.partial(_step, consumer, True), state)
    state = lax.fori_loop(masked_end, work.steps, functools.partial(_step, consumer, False), state)

    # Waits until the previous work tile's results have left the staging buffers.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if static.has_carry:
        forward_epilogue.fetch_carry(consumer)
    acc = _last_product(consumer, state)
    forward_epilogue.finish(consumer, acc, state.m, state.total)


def _write_without_keys(
    static: ForwardStatic, refs: ForwardRefs, warpgroup: Any, work: WorkTile
) -> None:
    """The epilogue of a work tile whose queries attend to no key."""
    consumer = Consumer.of(static, refs, warpgroup, work)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if static.has_carry:
        forward_epilogue.fetch_carry(consumer)
    acc = constant((WARPGROUP_ROWS, static.value_dim), 0, TILE)
    forward_epilogue.finish(consumer, acc, *forward_scores.start_softmax(consumer))


def _skip_step(consumer: Consumer, step: Any) -> None:
    """A KV tile to which none of this consumer's queries attends."""
    memory, v_stage = consumer.refs.memory, consumer.v_stage(step)
    _copy_ahead(consumer, step, masked=True)
    _wait_for_keys(consumer, step)
    _free_keys(consumer, consumer.stage(step))
    plgpu.barrier_wait(memory.v_arrived.at[v_stage])
    consumer.free_stage(memory.v_free, v_stage)


def _first_step(consumer: Consumer, step: Any) -> _State:
    """The first KV tile that is not skipped, which has no tile before it."""
    static, work, consumer = consumer.static, consumer.work, consumer.loading_intervals(True)
    _wait_for_keys(consumer, step)

    def products(scores_ref):
        _issue_scores(consumer, scores_ref, consumer.stage(step))
        _copy_ahead(consumer, step, masked=True)
        return scores_ref[...]

    scores = pl.run_scoped(products, forward_scores.accumulators(static)[0])
    _free_keys(consumer, consumer.stage(step))
    _free_queries(consumer, step == work.steps - 1)
    m, total = forward_scores.start_softmax(consumer)
    p, m, total, _ = forward_scores.update_softmax(consumer, step, scores, m, total, masked=True)
    p = p.astype(static.dtype)
    _wait_for_keys(consumer, step + 1)
    acc = constant((WARPGROUP_ROWS, static.value_dim), 0, TILE)
    return _State(p, acc, m, total)


def _step(consumer: Consumer, masked: bool, step: Any, state: _State) -> _State:
    """One more KV tile; adds the previous tile's weighted values to acc."""
    static, memory = consumer.static, consumer.refs.memory
    stage, v_stage = consumer.stage(step), consumer.v_stage(step - 1)
    consumer = consumer.loading_intervals(masked)

    def products(scores_ref, acc_ref):
        acc_ref[...] = state.acc
        _issue_scores(consumer, scores_ref, stage)
        plgpu.barrier_wait(memory.v_arrived.at[v_stage])
        wait = instructions.start_product(acc_ref, state.weights, memory.v.at[v_stage])
        if not static.copies_late:
            _copy_ahead(consumer, step, masked)
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
        _free_keys(consumer, stage)
        _free_queries(consumer, step == consumer.work.steps - 1)
        softmax, half = (consumer, step, scores, state.m, state.total, masked), None
        if static.config.split_softmax:
            half = forward_scores.first_half(*softmax)
            p, m, total, shrink, _ = half
        else:
            p, m, total, shrink = forward_scores.update_softmax(*softmax)
        if static.copies_late:
            _copy_ahead(consumer, step, masked)
        # This branch keeps the assembler from moving the wait for p v before the exponentials.
        exists = step + 1 < consumer.work.steps
        if static.config.sums_early:
            exists = online_softmax.known_by_warp_after(exists, total)
        _wait_for_keys(consumer, step + 1, exists)
        acc = wait()
        # The weights are rounded only now: until here the product above may still have read the
        # registers of the previous weights.
        acc, p = optimization_barrier(acc, p)
        late_m = m if half is None else online_softmax.known_after(m, acc)
        consumer.free_stage(memory.v_free, v_stage)
        # Most tiles raise no m: then nothing is rescaled.
        acc = rescale_rows(acc, shrink, tile=TILE, rows=ROWS)
        if half is not None:
            p, total = forward_scores.second_half(consumer, half._replace(p=p, m=late_m))
        return _State(p.astype(static.dtype), acc, m, total)

    return pl.run_scoped(products, *forward_scores.accumulators(static))


def _last_product(consumer: Consumer, state: _State) -> jax.Array:
    """acc with the last tile's weighted values, which no further step adds."""
    memory, stage = consumer.refs.memory, consumer.v_stage(consumer.work.steps - 1)

    def product(acc_ref):
        acc_ref[...] = state.acc
        plgpu.barrier_wait(memory.v_arrived.at[stage])
        wait = instructions.start_product(acc_ref, state.weights, memory.v.at[stage])
        consumer.work.start_next()
        return wait()

    acc = pl.run_scoped(product, forward_scores.accumulators(consumer.static)[1])
    # Copies of the next work tile's keys need not wait for the epilogue.
    consumer.free_stage(memory.v_free, stage)
    return acc


def _copy_ahead(consumer: Consumer, step: Any, masked: bool) -> None:
    """Without a producer warpgroup, starts this warpgroup's share of later steps' copies."""
    static, refs, warpgroup, work = consumer[:4]
    if not static.config.producer_warpgroup:
        producer = _producer(static, refs, warpgroup, work)
        for operand in range(len(producer.operands)):
            producer.advance(operand, step, masked)


def _issue_scores(consumer: Consumer, scores_ref: Any, stage: Any) -> None:
    """Issues ``q k^T`` with the keys of a stage."""
    memory = consumer.refs.memory
    if consumer.static.bias_in_accumulator:
        scores_ref[...] = forward_scores.bias_accumulator(consumer, stage)
    keys_t = memory.k.at[stage].transpose((1, 0))
    # The queries' address is recomputed for every tile, because keeping it would use a register.
    queries = memory.q.at[optimization_barrier(consumer.warpgroup)]
    plgpu.wgmma(scores_ref, queries, keys_t)


def _wait_for_keys(consumer: Consumer, step: Any, exists: Any = None) -> None:
    """Waits until the keys of a step have arrived, if there is such a step."""

    @pl.when(step < consumer.work.steps if exists is None else exists)
    def _():
        plgpu.barrier_wait(consumer.refs.memory.k_arrived.at[consumer.stage(step)])


def _free_keys(consumer: Consumer, stage: Any) -> None:
    """Marks the keys of a stage as read, and their positions."""
    if consumer.static.bias_in_accumulator:
        proxy_fence()
    consumer.free_stage(consumer.refs.memory.k_free, stage)


def _free_queries(consumer: Consumer, condition: Any) -> None:
    """If ``condition``, marks the queries as read for the last time."""

    @pl.when(condition)
    def _():
        plgpu.barrier_arrive(consumer.refs.memory.q_free.at[consumer.warpgroup])
