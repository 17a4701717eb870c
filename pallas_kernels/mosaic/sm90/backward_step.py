"""One step of the backward kernel's loop: a query tile against the work tile's keys.

A step first computes its weights P and their gradients dS. Then it issues three products together:
its own parts of dV and dK, and dQ of the step before. dQ needs dS of both consumers. One step late,
it reads what the other consumer wrote long ago, so either may run almost a step ahead of the other:
the exponentials of one overlap with the products of the other.

With a causal mask the first query tile comes before the last 64 of 128 keys. Their consumer skips
it (:func:`skip_first_step`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.fragments import (
    along_columns,
    constant,
    i32,
    optimization_barrier,
    proxy_fence,
)
from pallas_kernels.mosaic.sm90 import instructions
from pallas_kernels.mosaic.sm90.backward_epilogue import (
    add_dq,
    add_per_head_sums,
    ds_buffer,
    load_dq_factors,
)
from pallas_kernels.mosaic.sm90.backward_scores import (
    AffineBias,
    Consumer,
    StepTile,
    exponents,
    logit_gradients,
    mask_scores,
    read_tile_and_head,
    tile_scores,
)
from pallas_kernels.mosaic.sm90.configs import WARPGROUP_ROWS
from pallas_kernels.mosaic.sm90.instructions import COLUMNS, TILE
from pallas_kernels.mosaic.sm90.shared_memory import ScratchLayout
from pallas_kernels.mosaic.sm90.static import BackwardStatic
from pallas_kernels.mosaic.work_tiles import TileCoordinates


class State(NamedTuple):
    """A consumer's loop state. dQ of the last step has not been computed yet.

    Attributes:
      dk: float32 ``[64, H]``, the sum over the steps so far; half of the lanes if the consumers
        share keys.
      dv: float32 ``[64, Hv]``, the same.
      q_tile: the last step's query tile; -1 before the first step.
      head: the last step's query head.
    """

    dk: jax.Array
    dv: jax.Array
    q_tile: Any
    head: Any

    @classmethod
    def zeros(cls, static: BackwardStatic) -> State:
        """Before the first step."""
        # With equal head dims, dk and dv start from the same zeros.
        dims = static.dkv_dims
        zeros = {dim: constant((WARPGROUP_ROWS, dim), 0, TILE) for dim in dict.fromkeys(dims)}
        dk, dv = (zeros[dim] for dim in dims)
        return cls(dk, dv, i32(-1), i32(0))


class StepData(NamedTuple):
    """What a step works on, and where it is in shared memory.

    Attributes:
      stage: stage of its queries.
      do_stage: stage of its dO.
      ds: buffer of its dS.
      earlier_ds: buffer of the previous step's dS.
      at: the tile of scores.
      keys: the warpgroup's keys in the work tile.
    """

    stage: Any
    do_stage: Any
    ds: Any
    earlier_ds: Any
    at: StepTile
    keys: Any

    @classmethod
    def of(cls, consumer: Consumer, step: Any) -> StepData:
        """Of a step whose queries have arrived."""
        stage, do_stage = consumer.stage(step), consumer.do_stage(step)
        static = consumer.static
        ds, earlier_ds = ds_buffer(static, step), ds_buffer(static, step - 1)
        # What follows from the warpgroup is recomputed in every step: kept, it would take registers
        # that the tiles need.
        warpgroup = optimization_barrier(consumer.warpgroup)
        scratch = consumer.refs.memory.scratch
        at = StepTile(warpgroup, *read_tile_and_head(static, scratch, stage))
        first_key = static.first_key(warpgroup)
        if static.form.same_keys:
            # So are addresses in memory that is the same in all steps: this is 0.
            ds = earlier_ds = jnp.minimum(warpgroup, 0)
            first_key = ds * WARPGROUP_ROWS
        keys = pl.ds(first_key, WARPGROUP_ROWS)
        return cls(stage, do_stage, ds, earlier_ds, at, keys)


def step(
    consumer: Consumer, masked: bool, copy_ahead: Callable[[Any, bool], None], step: Any,
    state: State,
) -> State:  # fmt: skip
    """One query tile of one head.

    Args:
      consumer: the keys.
      masked: whether any of the step's scores may be masked.
      copy_ahead: ``(step, early)``: called while the step's first products run (``early``), and
        again while its last ones do.
      step: the step, counted over all work tiles of the CTA.
      state: after the previous step.
    """
    static, refs, data = consumer.static, consumer.refs, StepData.of(consumer, step)
    if masked and consumer.masks_by_interval:
        assert consumer.intervals is not None
        intervals = consumer.intervals._replace(part=data.at.warpgroup)
        consumer = consumer._replace(intervals=intervals.loaded())

    # Waits until the other consumer has written its dS of the previous step. By then it has
    # finished the products of the step before that, which with three buffers read the one that is
    # written next. Before the first step nobody has written a dS.
    def wait_for_ds():
        pl.when(state.q_tile >= 0)(lambda: plgpu.barrier_wait(refs.barriers.ds_arrived))

    waits_before_store = _waits_late(static) or not static.exchanges_late

    def early():
        copy_ahead(step, True)
        if not waits_before_store:
            wait_for_ds()

    p, ds = weights_and_gradients(consumer, masked, step, data, early)
    p, ds, dk, dv = optimization_barrier(p, ds, state.dk, state.dv)

    if waits_before_store:
        wait_for_ds()
    if static.config.ds_buffers == 2:
        # Products of the previous step read it, or the last one of the previous work tile.
        pl.when(step > 0)(lambda: plgpu.barrier_wait(refs.barriers.ds_free.at[0]))
    if static.rounds_dkv:
        # dK and dV of the previous work tile may still be on their way out of the buffer.
        pl.when(state.q_tile < 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    store_ds(consumer, data, ds)
    if not static.exchanges_late:
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.barriers.ds_arrived)
    state = state._replace(dk=dk, dv=dv)

    def copy():
        if _waits_late(static):
            wait_for_queries(consumer, step + 1)
        copy_ahead(step, False)

    return _add_products(consumer, data, state, p, ds, copy)


def skip_first_step(consumer: Consumer, state: State) -> tuple[Any, State]:
    """``(first, state)``: the first step to compute, and the state before it.

    If none of a work tile's first queries attends to a consumer's keys, it only writes a dS of
    zeros: it computes no score, no dV and no dK. The other consumer's products have the tensor
    cores to themselves, and this one starts its next step early.

    The queries of the work tile's first step have arrived. A step that is skipped is masked. Needs
    a producer warpgroup, and :attr:`BackwardStatic.exchanges_late`.
    """
    static, first = consumer.static, consumer.work.steps_before
    assert consumer.intervals is not None
    assert (static.config.ds_buffers, static.config.block_q) == (3, WARPGROUP_ROWS)
    q_tile, head = read_tile_and_head(static, consumer.refs.memory.scratch, consumer.stage(first))
    end = (q_tile + 1) * static.config.block_q
    skips = consumer.intervals.begin_at(end)
    pl.when(skips)(lambda: _step_on_zeros(consumer, first))
    # dQ of the step is computed in the next one, as always.
    state = state._replace(
        q_tile=jnp.where(skips, q_tile, state.q_tile), head=jnp.where(skips, head, state.head)
    )
    return first + skips.astype(jnp.int32), state


def _step_on_zeros(consumer: Consumer, step: Any) -> None:
    """What :func:`step` does, without its products."""
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


def store_ds(consumer: Consumer, data: StepData, ds: jax.Array) -> None:
    """Stores a step's dS, ``[64, block_q]``, in shared memory, for both consumers' dQ."""
    for part in range(ds.shape[1] // WARPGROUP_ROWS):
        queries = slice(part * WARPGROUP_ROWS, (part + 1) * WARPGROUP_ROWS)
        target, x = consumer.refs.memory.ds.at[data.ds, part, data.keys], ds[:, queries]
        if consumer.static.stores_left_operands:
            instructions.store_left_operand(target, x)
        else:
            target[...] = x


def weights_and_gradients(
    consumer: Consumer,
    masked: bool,
    step: Any,
    data: StepData,
    also: Callable[[], None],
    *,
    running: int = 0,
    last: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """``(P, dS)``, ``[64, score_queries]``, in the inputs' dtype; P after dropout.

    Args:
      consumer: the keys.
      masked: whether any of the scores may be masked.
      step: the step, counted over all work tiles of the CTA.
      data: of the step; ``data.at.query`` selects the queries.
      also: called when the products of the scores and of dP have been issued.
      running: number of products that ``also`` issues.
      last: whether to wait for the next step's queries.
    """
    static = consumer.static
    memory, barriers = consumer.refs.memory, consumer.refs.barriers
    waits_early = _waits_early(static)
    shape = WARPGROUP_ROWS, static.score_queries
    accumulator = plgpu.ACC(shape, jnp.float32)
    queries = slice(None)
    if shape[1] < static.config.block_q:
        queries = pl.ds(data.at.query, shape[1])

    def with_scores(scores_ref):
        q = memory.q.at[data.stage, queries].transpose((1, 0))
        plgpu.wgmma(scores_ref, memory.k.at[data.keys], q)
        if static.spec.score.has_derivative:
            # P, its derivative and dP would fill the registers: dP is computed once the two others
            # have become one.
            load = functools.partial(plgpu.wgmma_accumulator_load, scores_ref, wait_n=0)
            found = weights(consumer, masked, data, load)
            return pl.run_scoped(functools.partial(with_derivative, found), accumulator)
        plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])
        # This accumulator is allocated after the wait: see :func:`instructions.fresh_zeros`.
        return pl.run_scoped(functools.partial(with_dp, scores_ref), accumulator)

    def with_dp(scores_ref, dp_ref):
        do = memory.do.at[data.do_stage, queries].transpose((1, 0))
        if static.starts_dp_from_zero:
            dp_ref[...] = instructions.fresh_zeros(shape)
        plgpu.wgmma(dp_ref, memory.v.at[data.keys], do)
        if last and waits_early:
            wait_for_queries(consumer, step + 1)
        also()
        products = functools.partial(plgpu.wgmma_accumulator_load, scores_ref, wait_n=1 + running)
        found = weights(consumer, masked, data, products)
        dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=running)
        dp, found = optimization_barrier(dp, found)
        if last and not (waits_early or _waits_late(static)):
            wait_for_queries(consumer, step + 1)
        return gradients(consumer, data, found, dp)

    def with_derivative(found, dp_ref):
        plgpu.barrier_wait(barriers.do_arrived.at[data.do_stage])
        do = memory.do.at[data.do_stage].transpose((1, 0))
        plgpu.wgmma(dp_ref, memory.v.at[data.keys], do)
        wait_for_queries(consumer, step + 1)
        also()
        dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
        return gradients(consumer, data, found, dp)

    return pl.run_scoped(with_scores, accumulator)


class Weights(NamedTuple):
    """A step's weights P, ``[64, score_queries]``, as far as dP does not change them.

    Attributes:
      p: float32; times the derivative of a soft cap or a ``score_mod``, if that is not 1.
      used: with such a derivative: P after dropout, in the inputs' dtype; None without.
      rounded: the same before dropout, if gradients of per-head parameters are computed from it.
    """

    p: jax.Array
    used: jax.Array | None = None
    rounded: jax.Array | None = None


def weights(
    consumer: Consumer, masked: bool, data: StepData, load_products: Callable[[], jax.Array]
) -> Weights:
    """A step's weights; ``load_products()`` waits for the products of keys and queries."""
    static, score = consumer.static, consumer.static.spec.score
    if score.score_mod is not None and score.has_derivative:
        p, derivative = _weights_and_derivative(consumer, masked, data, load_products)
        assert derivative is not None
        # The derivative may be infinite or NaN where a score is masked.
        with_derivative = jnp.where(p == 0, 0.0, p * derivative)
    elif score.logits_soft_cap is not None:
        # Both follow from the same registers: the capped scores are not kept until dP is there.
        capped, _ = tile_scores(consumer, data.at, load_products())
        lse = along_columns(_lse(consumer, data), capped.shape)
        capped = mask_scores(consumer, data.at, capped) if masked else capped
        p = jnp.exp2(exponents(consumer, data.at, capped, lse, masked=False))
        # Masked scores are -inf.
        with_derivative = score.through_cap(jnp.maximum(capped, -1), p)
    else:
        return Weights(_weights_and_derivative(consumer, masked, data, load_products)[0])
    factors = consumer.tile(data.at).dropout_factors(static.dropout_unit)
    used = (p if factors is None else p * factors).astype(static.dtype)
    rounded = p.astype(static.dtype) if score.differentiated else None
    return optimization_barrier(Weights(with_derivative, used, rounded))


def _weights_and_derivative(
    consumer: Consumer, masked: bool, data: StepData, load_products: Callable[[], jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """P in float32, and the derivative of :func:`tile_scores`."""
    static = consumer.static
    affine = None
    if static.bias_is_affine and not masked:
        # Loaded while the products run.
        affine = AffineBias.of(consumer, data.at)
    scores, derivative = tile_scores(consumer, data.at, load_products())
    # lse is loaded before the masks are tested: loaded after them, programs with segment ids spill.
    lse = _lse(consumer, data)
    if affine is None:
        lse = along_columns(lse, scores.shape)
        scores = exponents(consumer, data.at, scores, lse, masked)
    else:
        scores = scores * static.base_2_factor + affine.minus(lse, scores.shape)
    return optimization_barrier(jnp.exp2(scores)), derivative


def gradients(
    consumer: Consumer, data: StepData, of_step: Weights, dp: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``(P, dS)``, in the inputs' dtype; P after dropout."""
    static, (p, used, rounded) = consumer.static, of_step
    factors = consumer.tile(data.at).dropout_factors(static.dropout_unit)
    if used is None:
        used = p if factors is None else p * factors
    dp = dp if factors is None else dp * factors
    delta = _delta(consumer, data)
    ds = logit_gradients(consumer, p, dp, delta)
    if static.spec.score.differentiated:
        of_logits = ds
        if rounded is not None:
            of_logits = logit_gradients(consumer, rounded.astype(jnp.float32), dp, delta)
        add_per_head_sums(consumer, data.at, of_logits)
    return used.astype(static.dtype), ds.astype(static.dtype)


def _lse(consumer: Consumer, data: StepData) -> jax.Array:
    """lse of a step's queries, in base 2, in registers."""
    static = consumer.static
    place = data.stage, data.at.query, static.score_queries
    offset = ScratchLayout.of(static.config).lse(*place)
    return plgpu.load(consumer.refs.memory.scratch.at[offset], layout=COLUMNS)


def _delta(consumer: Consumer, data: StepData) -> jax.Array:
    """delta of a step's queries, in registers."""
    static = consumer.static
    place = data.do_stage, data.at.query, static.score_queries
    offset = ScratchLayout.of(static.config).delta(*place)
    return plgpu.load(consumer.refs.memory.scratch.at[offset], layout=COLUMNS)


def _add_products(
    consumer: Consumer, data: StepData, state: State, p: jax.Array, ds: jax.Array,
    copy_ahead: Callable[[], None],
) -> State:  # fmt: skip
    """Adds a step's parts of dV and dK to the state, and the previous dQ to global memory."""
    static, memory, barriers = consumer.static, consumer.refs.memory, consumer.refs.barriers

    def earlier(q_tile):
        return TileCoordinates(consumer.work.recompute().batch, state.head, q_tile)

    factors = None
    if static.deterministic:
        # Loaded early to hide the latency.
        loaded = earlier(jnp.maximum(state.q_tile, 0))
        factors = load_dq_factors(static, consumer.refs, data.at.warpgroup, loaded)

    def products(dv_acc, dk_acc, dq_acc):
        dv_acc[...] = state.dv
        dk_acc[...] = state.dk
        lane = static.first_lane(data.at.warpgroup)
        _issue_dq(consumer, dq_acc, data.earlier_ds, data.at.warpgroup, lane)
        plgpu.wgmma(dv_acc, p, memory.do.at[data.do_stage])
        plgpu.wgmma(dk_acc, ds, memory.q.at[data.stage])
        if not _waits_late(static):
            copy_ahead()
        if static.exchanges_late:
            # Every thread arrives by itself, after its own stores.
            proxy_fence()
            plgpu.barrier_arrive(barriers.ds_arrived)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if _waits_late(static):
            copy_ahead()
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=2)
        arrive_ds_free(consumer)
        add_dq(
            static, consumer.refs, data.at.warpgroup, earlier(state.q_tile), dq, factors,
            predicate=state.q_tile >= 0, staging_is_free=static.exchanges_late,
        )  # fmt: skip
        dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
        dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=None)
        plgpu.barrier_arrive(barriers.do_free.at[data.do_stage])
        plgpu.barrier_arrive(barriers.q_free.at[data.stage])
        return State(dk, dv, data.at.q_tile, data.at.head)

    dk_acc, dv_acc = (
        plgpu.ACC((WARPGROUP_ROWS, dim), jnp.float32) for dim in (static.head_dim, static.value_dim)
    )
    return pl.run_scoped(products, dv_acc, dk_acc, _dq_accumulator(static))


def last_dq(consumer: Consumer, lane: Any) -> jax.Array:
    """The warpgroup's part of dQ of the work tile's last step, which no further step computes.

    ``lane``: its :meth:`BackwardStatic.first_lane`.
    """

    def product(dq_acc):
        buffer = ds_buffer(consumer.static, consumer.end - 1)
        _issue_dq(consumer, dq_acc, buffer, consumer.warpgroup, lane)
        dq = dq_acc[...]
        arrive_ds_free(consumer)
        return dq

    plgpu.barrier_wait(consumer.refs.barriers.ds_arrived)
    if consumer.static.config.ds_buffers == 2:
        # The last step's products have read the buffer to which dK and dV may go.
        plgpu.barrier_wait(consumer.refs.barriers.ds_free.at[0])
    return pl.run_scoped(product, _dq_accumulator(consumer.static))


def arrive_ds_free(consumer: Consumer) -> None:
    """With fewer than three dS buffers, tells that this consumer has finished reading one."""
    if consumer.static.config.ds_buffers < 3:
        plgpu.barrier_arrive(consumer.refs.barriers.ds_free.at[0])


def _waits_late(static: BackwardStatic) -> bool:
    """Whether a step waits for the next queries once its last products have been issued.

    The first consumer starts the queries' copies, so a second one that is ahead of it waits for
    them, and least so late. For the same reason a step waits for the other's previous dS just
    before it stores its own, and hands that over before copies start. With a causal mask this gains
    only where query heads share key heads.
    """
    is_plain_mask = static.needs_mask and static.groups == 1
    return static.exchanges_late and not (static.config.producer_warpgroup or is_plain_mask)


def _waits_early(static: BackwardStatic) -> bool:
    """Whether a step waits for the next queries while its scores are computed."""
    early = static.exchanges_late and not _waits_late(static)
    return early or (static.do_follows_queries and static.config.dq_by_rows)


def wait_for_queries(consumer: Consumer, step: Any) -> None:
    """Waits until the queries of a step have arrived, if the work tile has such a step."""

    @pl.when(step < consumer.end)
    def _():
        plgpu.barrier_wait(consumer.refs.barriers.q_arrived.at[consumer.stage(step)])


def _issue_dq(consumer: Consumer, dq_acc: Any, buffer: Any, warpgroup: Any, lane: Any) -> None:
    """Issues the product of a dS, of both consumers, and the keys: the warpgroup's part of dQ."""
    memory, (_, lanes) = consumer.refs.memory, consumer.static.dq_part
    if consumer.static.starts_dq_from_zero:
        dq_acc[...] = instructions.fresh_zeros(consumer.static.dq_part)
    if consumer.static.config.dq_by_rows:
        plgpu.wgmma(dq_acc, memory.ds.at[buffer, warpgroup].transpose((1, 0)), memory.k)
    else:
        k = memory.k.at[:, pl.ds(lane, lanes)]
        plgpu.wgmma(dq_acc, memory.ds.at[buffer, 0].transpose((1, 0)), k)


def _dq_accumulator(static: BackwardStatic) -> Any:
    """Accumulator of a warpgroup's part of a query tile's dQ."""
    return plgpu.ACC(static.dq_part, jnp.float32)
