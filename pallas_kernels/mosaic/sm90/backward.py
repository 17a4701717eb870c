"""Backward local attention on Hopper: dQ, dK and dV from one pass over the scores.

The pass takes five matrix products per tile, where separate kernels for dQ and for dK, dV take
seven. A work tile is a (batch index, key/value head, 128 keys). It loops over the query tiles
within its bounds, for every query head that shares the key/value head. Two consumer warpgroups
accumulate dK and dV of 64 keys each. dQ of a tile is summed over both, and bulk copies add it to
global memory in whatever order CTAs arrive: its last bits differ from run to run. Where gradients
must be bitwise reproducible, they add integers instead (:mod:`pallas_kernels.mosaic.fixed_point`).
All else is summed in one CTA, in the same order in every run.

For head dims up to 64 a tile has 128 queries, half of whose dQ each warpgroup computes. It leaves
in register order (:func:`pallas_kernels.mosaic.sm90.instructions.add_in_register_order`). Wider
heads have tiles of 64 queries. There each warpgroup computes half the lanes, which TMA adds to a
row-major dQ. A transpose at the end, or none, makes dQ (:mod:`pallas_kernels.mosaic.sm90.dq`).

How the consumers share the work depends on the head dims (``backward_forms.py``). A consumer's loop
step is in ``backward_step.py``, those of head dims above 128 in ``wide_step.py`` and
``split_step.py``, scores and their gradients in ``backward_scores.py``, zeros in padding in
``padding.py``, writes to global memory in ``backward_epilogue.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import softmax
from pallas_kernels.arrays import depending_on, pad_axis
from pallas_kernels.backend import Dkv, HalfDkv
from pallas_kernels.bounds import HalfBounds, key_bounds, split_tiles
from pallas_kernels.document_bounds import DocumentBounds
from pallas_kernels.inputs import AttentionInputs, PerHead
from pallas_kernels.mosaic import fixed_point
from pallas_kernels.mosaic.dq import DqSum
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.score_inputs import ScoreInputs
from pallas_kernels.mosaic.sm90 import (
    backward_epilogue,
    backward_step,
    query_order,
    split_step,
    wide_step,
)
from pallas_kernels.mosaic.sm90.backward_forms import FORMS, NARROW, SPLIT
from pallas_kernels.mosaic.sm90.backward_scores import Consumer, read_tile_and_head
from pallas_kernels.mosaic.sm90.configs import (
    BACKWARD_WARPGROUPS,
    WARPGROUP_ROWS,
    MosaicConfig,
)
from pallas_kernels.mosaic.sm90.dq import backward_static, shipped_config
from pallas_kernels.mosaic.sm90.inputs import BackwardInputs, BackwardRefs, BackwardResults
from pallas_kernels.mosaic.sm90.instructions import specialize_warpgroups
from pallas_kernels.mosaic.sm90.padding import PaddedTiles, Tokens, copy_without_padding
from pallas_kernels.mosaic.sm90.producer import Copies, Producer
from pallas_kernels.mosaic.sm90.row_intervals import tile_ranges, with_key_intervals
from pallas_kernels.mosaic.sm90.shared_memory import BackwardBarriers, ScratchLayout
from pallas_kernels.mosaic.sm90.static import BackwardStatic
from pallas_kernels.mosaic.tile_iterator import TileIterator
from pallas_kernels.mosaic.tile_scheduler import (
    CTA_AXIS,
    InlineProducer,
    TileScheduler,
    WorkTile,
    for_each_work_tile,
)
from pallas_kernels.mosaic.work_tiles import Half, TileCoordinates
from pallas_kernels.score import LOG2_E
from pallas_kernels.spec import AttentionSpec


def backward(
    inputs: AttentionInputs,
    bounds: Any,
    dq: DqSum,
    dkv: Dkv | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
    config: MosaicConfig | None = None,
    deterministic: bool = False,
) -> tuple[DqSum, Dkv, PerHead]:
    """``add`` of a :class:`pallas_kernels.backend.DqAccumulator`.

    ``config`` None is the shipped one; ``deterministic``: whether the result is bitwise
    reproducible.
    """
    static = backward_static(
        inputs, spec, config, dkv=dkv, out_dtype=out_dtype, deterministic=deterministic
    )
    config = static.config
    if isinstance(bounds, HalfBounds):
        writes_half = bounds.writes_half and dkv is None and static.may_write_half
        static = dataclasses.replace(
            static, group_heads=bounds.group_heads, writes_half=writes_half
        )
        bounds = bounds.bounds
    if isinstance(dkv, HalfDkv):
        static = dataclasses.replace(static, stores_half=True)
    static = dataclasses.replace(static, has_intervals=isinstance(bounds, DocumentBounds))
    if not static.can_round_dkv:
        static = dataclasses.replace(static, dkv_dtype=jnp.dtype(jnp.float32))
    keys = BACKWARD_WARPGROUPS * WARPGROUP_ROWS
    dims = static.head_dim, static.value_dim
    if not config.form.supports(*dims):
        able = " or ".join(form.name for form in FORMS.values() if form.supports(*dims))
        raise ValueError(
            f"form is {config.form}: with head dims {dims} the backward kernel supports {able}"
        )
    if config.block_kv != config.form.block_kv:
        raise ValueError(
            f"block_kv is {config.block_kv}: the backward kernel supports {config.form.block_kv}"
        )
    if config.form is SPLIT:
        split_step.check(static)
    if config.stages == 2 and not (config.form.copies_early or config.producer_warpgroup):
        raise ValueError("stages is 2: without a producer warpgroup the backward kernel needs 3")
    if config.cluster != 1:
        raise ValueError(f"cluster is {config.cluster}: the backward kernel supports 1")
    q, k, v = inputs.query.q, inputs.kv.k, inputs.kv.v
    do, (lse, delta) = inputs.cotangents()
    lse, delta = softmax.stats_in_base_2(lse, delta)
    delta = delta * (spec.score.scale if static.scale_in_ds else 1.0)
    factors = None
    if dq.bound is not None:
        factors = fixed_point.factor_32(dq.bound)
        factors = pad_axis(factors, 2, static.q_tiles * config.block_q)
    if static.has_bias or spec.score.score_mod is not None:
        # Past the last query dO is zero, but a bias or a user function can make a weight there that
        # overflows, and zero times infinity is NaN. This lse makes the weights 0.
        lse = pad_axis(lse, 2, static.q_tiles * config.block_q, softmax.NO_KEYS)
    q_bases = None
    if static.bias_is_affine:
        q_bases, lse = _bases_and_lse(static, inputs, lse)
    by_key = (static.batch, static.heads, static.kv_tiles * keys)
    per_head_sums = {
        name: depending_on(jnp.zeros(by_key, jnp.float32), lse)
        for name in spec.score.differentiated
    }
    if static.adds_dkv:
        assert dkv is not None
        dk, dv = dkv
    else:
        dk, dv = (jax.ShapeDtypeStruct(x.shape, static.written_dkv_dtype) for x in (k, v))
    work_tiles = static.work_tiles
    counter = work_tiles.counter(tile_ranges(bounds), static.q_tiles)
    counter = None if counter is None else depending_on(counter, q)
    scores = ScoreInputs.of(inputs, spec, config.tiles)
    padded = PaddedTiles.of(inputs, config) if static.zeroes_padding else None
    results = launch(
        functools.partial(_kernel, static), "burst_backward", grid={CTA_AXIS: work_tiles.ctas},
        warpgroups=static.warpgroups,
        inputs=BackwardInputs(bounds, q, do, k, v, lse, delta, scores, q_bases, factors, padded),
        results=BackwardResults(dq.values, dk, dv, per_head_sums),
        memory=static.memory, counter=counter,
    )  # fmt: skip
    per_head = {name: x.sum((0, 2)) for name, x in results.per_head_sums.items()}
    dk, dv = results.dk, results.dv
    if static.deterministic:
        dk, dv = (lax.bitcast_convert_type(x, static.dkv_dtype) for x in (dk, dv))
        if dkv is not None:
            dk, dv = dkv[0] + dk, dkv[1] + dv
    made = HalfDkv(dk, dv) if static.writes_half else (dk, dv)
    return dq._replace(values=results.dq), made, per_head


def _bases_and_lse(
    static: BackwardStatic, inputs: AttentionInputs, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(q_bases, lse)`` of :class:`BackwardInputs`, from lse in base 2, of whole tiles."""
    positions = inputs.q_positions
    # The padding repeats the last query, which does not change the smallest position.
    positions = jnp.pad(positions, (0, lse.shape[2] - positions.shape[0]), mode="edge")
    positions = positions.reshape(static.q_tiles, static.config.block_q)
    bases = positions.min(1)
    from_base = (positions - bases[:, None]).astype(jnp.float32).reshape(-1)
    per_head = {name: x[:, None] for name, x in inputs.shared.score_parameters.items()}
    _, intercept = static.spec.score.affine_bias(from_base, per_head, LOG2_E)
    return bases, jnp.stack([lse, lse - intercept])


def backward_bounds(
    inputs: AttentionInputs,
    *,
    spec: AttentionSpec,
    config: MosaicConfig | None = None,
    deterministic: bool = False,
) -> Any:
    """The tile bounds that :func:`backward` reads with the same options."""
    config = config or shipped_config(inputs, spec, deterministic)
    sides, block_mask = (inputs.query, inputs.kv), inputs.shared.block_mask
    bounds = key_bounds(spec.mask, *sides, config.tiles, block_mask, inputs.groups)
    return with_key_intervals(bounds, inputs, spec, config)


def split_backward(
    bounds: Any,
    inputs: AttentionInputs,
    *,
    spec: AttentionSpec,
    config: MosaicConfig | None = None,
    deterministic: bool = False,
) -> tuple[Any, Any]:
    """``split_backward`` of an :class:`Implementation`: the halves of the KV tiles.

    A causal mask gives the first half more work than the second. Where L2 swizzle groups of other
    sizes are better for a half, it has a kernel of its own; the first one also where it leaves the
    second half of dK and dV unset. All other parts run the same one, which is lowered once.
    """
    static = backward_static(inputs, spec, config, deterministic=deterministic)
    static = dataclasses.replace(static, has_intervals=isinstance(bounds, DocumentBounds))
    first, second = split_tiles(bounds)
    if not static.is_causal:
        return first, second
    whole = static.work_tiles

    def of_half(part: Any, half: Half, writes_half: bool = False) -> Any:
        group_heads = dataclasses.replace(whole, half=half).group_heads
        if group_heads == whole.group_heads and not writes_half:
            return part
        return HalfBounds(part, group_heads, writes_half)

    return of_half(first, "first", static.may_write_half), of_half(second, "second")


def _kernel(static: BackwardStatic, inputs, results, memory, counter=None) -> None:
    """One warpgroup of one CTA."""
    barriers = BackwardBarriers.split(memory.barriers, static.barrier_counts)
    refs = BackwardRefs(inputs, results, memory, barriers)
    scheduler = TileScheduler(
        counter,
        barriers.slot_fetched,
        barriers.slot_free,
        memory.scratch,
        first=ScratchLayout.of(static.config).slots,
        arrivals=static.consumers,
        chooses_groups=static.work_tiles.chooses_groups,
    )

    def iterator_of(batch, head, tile):
        # The work tiles of a head start with different queries, so that they do not all add to the
        # same dQ at once.
        rotate = tile * i32(max(1, static.q_tiles // static.kv_tiles))
        return TileIterator(
            tile_ranges(inputs.bounds), batch, head, tile, last=static.q_tiles - 1, rotate=rotate
        )

    run_all = functools.partial(
        for_each_work_tile, static.work_tiles, scheduler, iterator_of,
        steps_per_tile=static.groups, skip_empty=True, empty_first=static.form is NARROW,
    )  # fmt: skip

    def consume(warpgroup):
        # Keys that no query attends to add nothing, but new arrays must be written.
        run_empty = None
        if not static.adds_dkv or static.stores_half:
            of_form = split_step if static.form is SPLIT else backward_epilogue
            run_empty = functools.partial(of_form.write_zeros, static, refs, warpgroup)
        inline = None
        if not static.config.producer_warpgroup:
            own = static, refs, warpgroup
            inline = InlineProducer(warpgroup == 0, lambda work: _producer(*own, work).start())
        run = functools.partial(_consume, static, refs, warpgroup)
        run_all(run, is_producer=False, inline=inline, run_empty=run_empty)
        plgpu.wait_smem_to_gmem(0)

    def produce():
        run_all(functools.partial(_produce, static, refs), is_producer=True)

    specialize_warpgroups(
        static.consumers, consume, produce if static.config.producer_warpgroup else None
    )


def _consume(static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, work: WorkTile) -> None:
    """One work tile of a consumer: masked steps, full steps, then the last dQ, dK and dV."""
    if static.form is SPLIT:
        split_step.run(static, refs, warpgroup, work)
        return
    consumer = Consumer.of(static, refs, warpgroup, work)
    has_intervals = None if consumer.intervals is None else consumer.intervals.exist()
    plgpu.barrier_wait(refs.barriers.kv_arrived)
    backward_step.wait_for_queries(consumer, work.steps_before)
    state = backward_step.State.zeros(static)
    # Computed after the loops it would take a register there (dropout with segment ids).
    lane = static.first_lane(warpgroup)
    masked_end = work.steps_before + work.iterator.masked * static.groups

    def copy_ahead(masked, step, early):
        if static.config.producer_warpgroup:
            return
        producer = _producer(static, refs, warpgroup, work)
        for operand, is_early in enumerate(static.copies_early):
            if is_early == early:
                producer.advance(operand, step - work.steps_before, masked)

    def run_steps(first, end, state, masked, by_interval=False):
        run_step = backward_step.step if static.form is NARROW else wide_step.step
        of_steps = consumer._replace(masks_by_interval=by_interval)
        step = functools.partial(run_step, of_steps, masked, functools.partial(copy_ahead, masked))
        return lax.fori_loop(first, end, step, state)

    first = work.steps_before
    if has_intervals is not None:
        if static.exchanges_late:
            first, state = backward_step.skip_first_step(consumer, state)
        # All of the keys' masked steps, or none. In one loop with the other masks, every step would
        # keep in registers whether there are intervals.
        end = jnp.where(has_intervals, masked_end, first)
        state = run_steps(first, end, state, masked=True, by_interval=True)
        first = end
    state = run_steps(first, masked_end, state, masked=True)
    state = run_steps(masked_end, consumer.end, state, masked=False)
    dq = None
    if static.form is NARROW:
        if static.stages_dv_in_values:
            backward_epilogue.write_dv(static, refs, warpgroup, work.recompute(), state.dv)
        dq = backward_step.last_dq(consumer, lane)
    else:
        state = wide_step.finish(consumer, state)
    plgpu.barrier_arrive(refs.barriers.kv_free)
    kv_tile = work.recompute()
    q_tile = TileCoordinates(kv_tile.batch, state.head, state.q_tile)
    # Empirical: with dQ last, the backward of a causal mask takes 1.5 % less than with dQ first.
    # The other warpgroup may still read other dS buffers than the next step's.
    buffer = backward_epilogue.ds_buffer(static, consumer.end)
    backward_epilogue.write_dkv(static, refs, warpgroup, kv_tile, buffer, state.dk, state.dv)
    work.start_next()
    if dq is None:
        return
    factors = backward_epilogue.load_dq_factors(static, refs, warpgroup, q_tile)
    # Rounded gradients, whose last copy may still run, left through another buffer.
    backward_epilogue.add_dq(
        static, refs, warpgroup, q_tile, dq, factors, running=int(static.rounds_dkv)
    )


# --- producer -------------------------------------------------------------------------------------


def _produce(static: BackwardStatic, refs: BackwardRefs, work: WorkTile) -> None:
    """Starts the copies of a work tile's keys and values, then of each step's queries and dO."""
    keys_and_values = functools.partial(_copy_keys_and_values, static, refs, work)
    # With short work tiles the first queries and dO come first: their stages are free earlier.
    queries_first = static.stages_dv_in_values
    if not queries_first:
        keys_and_values()

    @pl.loop(i32(0), work.steps)
    def _(step):
        tile_and_head = query_order.tile_and_head(static, work, step)
        _copy_queries(static, refs, work, step, tile_and_head)
        _copy_do(static, refs, work, step, tile_and_head)
        if queries_first:
            pl.when(step == 0)(keys_and_values)


def _producer(
    static: BackwardStatic, refs: BackwardRefs, warpgroup: Any, work: WorkTile
) -> Producer:
    """Starts the same copies in the consumer warpgroups: queries in the first, dO in the last.

    A consumer that starts them has read what the step before needed: see
    :attr:`BackwardStatic.copies_early`.
    """

    def copy(start, counts, at, step, masked):
        following = None
        if counts and not masked:
            following = query_order.following_tile_and_head(static, refs, at, step)
        tile_and_head = following or query_order.tile_and_head(static, at, step, masked)
        start(static, refs, at, step, tile_and_head)

    def copy_following_do(step, masked):
        del masked
        stage = lax.rem(work.steps_before + step, i32(static.stages))
        tile_and_head = read_tile_and_head(static, refs.memory.scratch, stage)
        _copy_do(static, refs, work, step, tile_and_head)

    def copy_once():
        pl.when(warpgroup == 0)(lambda: _copy_keys_and_values(static, refs, work))

    counts, last = static.counts_queries, static.consumers - 1
    queries = Copies.of(functools.partial(copy, _copy_queries, counts), work, static.stages - 1, 0)
    # Of the step before dO's, this consumer must have waited for the queries.
    counts = counts and static.do_stages == 2
    do = Copies.of(functools.partial(copy, _copy_do, counts), work, static.do_stages - 1, last)
    if static.do_follows_queries:
        do = do._replace(start=copy_following_do)
    return Producer(work, warpgroup, (queries, do), copy_once)


def _copy_keys_and_values(static: BackwardStatic, refs: BackwardRefs, work: WorkTile) -> None:
    """Starts the copies of a work tile's keys and values."""
    inputs, memory, barriers = refs.inputs, refs.memory, refs.barriers
    keys = pl.ds(work.tile * static.config.block_kv, static.config.block_kv)
    tokens = Tokens.of(inputs, "kv", work.batch, work.tile, keys.start)

    @pl.when(work.steps_before > 0)
    def _():
        plgpu.barrier_wait(barriers.kv_free)

    def copy(arrived):
        k = inputs.k.at[work.batch, keys, work.head]
        plgpu.copy_gmem_to_smem(k, memory.k, arrived)
        if static.stages_dv_in_values:
            pl.when(work.steps_before > 0)(lambda: plgpu.barrier_wait(barriers.v_free.at[0]))
        v = inputs.v.at[work.batch, keys, work.head]
        plgpu.copy_gmem_to_smem(v, memory.v, arrived)

    zeroed = (memory.k, static.memory.k), (memory.v, static.memory.v)
    own = barriers.padded_arrived
    copy_without_padding(tokens, copy, barriers.kv_arrived, own, *zeroed, copies=2)


def _copy_queries(
    static: BackwardStatic, refs: BackwardRefs, work: WorkTile, step: Any, tile_and_head: Any
) -> None:
    """Starts the copies of a step's queries and their lse."""
    inputs, memory, barriers = refs.inputs, refs.memory, refs.barriers
    layout, block_q = ScratchLayout.of(static.config), static.config.block_q
    q_tile, head = tile_and_head
    queries = pl.ds(q_tile * block_q, block_q)
    lse = _lse(static, inputs.lse, work, step).at[work.batch, head, queries]
    tokens = Tokens.of(inputs, "q", work.batch, q_tile, queries.start)
    stage = _free_stage(work, step, static.stages, barriers.q_free)
    # The consumers wait for these queries, and then read in scratch memory which they are.
    for index, value in zip(layout.tile_and_head(stage), tile_and_head, strict=True):
        memory.scratch[index] = value.astype(jnp.float32)
    if static.config.producer_warpgroup:
        plgpu.commit_smem()
    target = memory.q.at[stage]

    def copy(arrived):
        plgpu.copy_gmem_to_smem(inputs.q.at[work.batch, queries, head], target, arrived)
        _copy_stats(lse, memory.scratch.at[layout.lse(stage)], arrived)

    arrived, own = barriers.q_arrived.at[stage], barriers.padded_arrived
    copy_without_padding(tokens, copy, arrived, own, (target, static.memory.q), copies=2)


def _copy_do(
    static: BackwardStatic, refs: BackwardRefs, work: WorkTile, step: Any, tile_and_head: Any
) -> None:
    """Starts the copies of a step's dO and delta."""
    inputs, memory, barriers = refs.inputs, refs.memory, refs.barriers
    layout, block_q = ScratchLayout.of(static.config), static.config.block_q
    q_tile, head = tile_and_head
    queries = pl.ds(q_tile * block_q, block_q)
    tokens = Tokens.of(inputs, "q", work.batch, q_tile, queries.start)
    stage = _free_stage(work, step, static.do_stages, barriers.do_free)
    target = memory.do.at[stage]

    def copy(arrived):
        plgpu.copy_gmem_to_smem(inputs.do.at[work.batch, queries, head], target, arrived)
        delta = inputs.delta.at[work.batch, head, queries]
        _copy_stats(delta, memory.scratch.at[layout.delta(stage)], arrived)

    arrived, own = barriers.do_arrived.at[stage], barriers.padded_arrived
    copy_without_padding(tokens, copy, arrived, own, (target, static.memory.do), copies=2)


def _lse(static: BackwardStatic, lse: Any, work: WorkTile, step: Any) -> Any:
    """The lse for a step's scores; with an affine bias, steps without a mask have another one."""
    if not static.bias_is_affine:
        return lse
    return lse.at[(step >= work.iterator.masked * static.groups).astype(jnp.int32)]


def _free_stage(work: WorkTile, step: Any, stages: int, free: Any) -> Any:
    """The stage of a step's copy, when both consumers have read its previous contents, if any."""
    cta_step = work.steps_before + step
    stage = lax.rem(cta_step, i32(stages))

    @pl.when(cta_step >= stages)
    def _():
        plgpu.barrier_wait(free.at[stage])

    return stage


def _copy_stats(source: Any, target: Any, arrived: Any) -> None:
    """Starts the copy of lse or delta of a query tile.

    Past the last query the copy writes zeros, and not the next head's stats, which follow in global
    memory: the zeros of dO times 2^-lse must stay 0.
    """
    plgpu.copy_gmem_to_smem(source, target, arrived, oob_mode=plgpu.OOBFillMode.ZEROS)
