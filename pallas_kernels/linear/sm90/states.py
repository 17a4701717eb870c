"""The backward pass's scans: states and U again, and the gradients of states, in one launch.

The two do not depend on each other, so that their CTAs fill the GPU together. The scan over the
gradients is built like :mod:`pallas_kernels.linear.sm90.scan`: with dS the gradient of the state
after a chunk, transposed, ``dU^T = out (dS^T K^T) + dO^T P``, ``dV^T = dU^T (X beta)`` and
``dS^T' = through dS^T + scale (into dO)^T Q - (into dV)^T K``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import CHUNK, HEAD_DIM, INTO, OUT
from pallas_kernels.linear.kernel_parts import PARTS, Mode, Place
from pallas_kernels.linear.sm90.chunk_operands import (
    accumulator,
    along_columns,
    matrix,
    numbers,
    transposed,
)
from pallas_kernels.linear.sm90.pipeline import (
    CLUSTER,
    STAGES,
    WARPGROUPS,
    Result,
    Scores,
    copy_to_cluster,
    cta_index,
    for_each_pair,
    free_stage,
    produce,
    stages_barrier,
)
from pallas_kernels.linear.sm90.scan import (
    SCANNED,
    ScanInputs,
    ScanMemory,
    channels_of,
    pair_of,
    pairs_of,
    saved_of,
    scan_cta,
    scores_of,
    slots_of,
    times,
)
from pallas_kernels.mosaic.fragments import i32, proxy_fence
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm90.instructions import TILE


class ReverseInputs(NamedTuple):
    """What the scan over gradients reads.

    Attributes:
      q: bfloat16 ``[B, T, K, 128]``.
      k: the same.
      do: gradient of o, bfloat16 ``[B, T, N, 128]``.
      x: X beta, bfloat16 ``[B, N, T, 64]``.
      vectors: of the chunks.
      last: gradient of the last state, transposed, float32 ``[B, N, 128, 128]``.
      end: the chunk with which a head's scan for the first state alone begins, int32 ``[B, N]``;
        None is the last one.
      p: P, k_out and through: as of :class:`pallas_kernels.linear.sm90.scan.ScanInputs`, with a
        decay per key channel.
      k_out: see p.
      through: see p.
    """

    q: Any
    k: Any
    do: Any
    x: Any
    vectors: Any
    last: Any
    end: Any = None
    p: Any = None
    k_out: Any = None
    through: Any = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, value heads, chunks, and value heads per head of k."""
        batch, length, heads, _ = self.do.shape
        return batch, heads, length // CHUNK, heads // self.k.shape[2]


class ReverseMemory(NamedTuple):
    """Shared memory and barriers; the slots are None where only the first state's is computed.

    Attributes:
      q: ``[stages, 64, 128]``.
      k: the same.
      do: ``[stages, 64, 64]``.
      x: the same.
      vectors: ``[stages, 256]``; None with a decay per key channel.
      arrived: by stage.
      free: by stage.
      p: ``[stages, 64, 64]``.
      p_written: by stage, where the scan computes P.
      columns: ``[slots, 64 tokens, 64 columns]``: dV.
      columns_written: by slot.
      columns_free: by slot.
      states: ``[slots, 64 columns, 128]``: dS.
      states_written: by slot.
      states_free: by slot.
      k_out: ``[stages, 64, 128]``, with a decay per key channel.
      through: ``[stages, 128]``, the same.
    """

    q: Any
    k: Any
    do: Any
    x: Any
    vectors: Any
    arrived: Any
    free: Any
    p: Any
    p_written: Any = None
    columns: Any = None
    columns_written: Any = None
    columns_free: Any = None
    states: Any = None
    states_written: Any = None
    states_free: Any = None
    k_out: Any = None
    through: Any = None

    @classmethod
    def of(cls, stores: bool, channels: bool) -> ReverseMemory:
        """Descriptions.

        Args:
          stores: whether dV and dS are written.
          channels: whether there is a decay per key channel: then there is room for two chunks.
        """
        stages = stages_of(channels)
        slots = channels_of(stages) if channels else {}
        slots |= {"p": matrix(stages, CHUNK, CHUNK)} if channels else scores_of()
        if stores:
            slots |= slots_of("columns", CHUNK) | slots_of("states", HEAD_DIM)
        return cls(
            q=matrix(stages, CHUNK, HEAD_DIM),
            k=matrix(stages, CHUNK, HEAD_DIM),
            do=matrix(stages, CHUNK, CHUNK),
            x=matrix(stages, CHUNK, CHUNK),
            vectors=None if channels else numbers(stages, SCANNED),
            arrived=plgpu.Barrier(num_arrivals=7 if channels else 5, num_barriers=stages),
            free=stages_barrier(stages),
            **slots,
        )

    def for_scan(self, arrived: Any) -> ScanMemory:
        """The same memory for a scan that saves states, with its own barriers of arrival."""
        return ScanMemory(
            None, self.k, self.do, self.x, self.vectors, arrived, self.free, None, None, *self[9:]
        )

    def scaled_state(self, stage: Any, state: jax.Array) -> jax.Array:
        """``through dS``, transposed."""
        return self.for_scan(None).scaled_state(stage, state)


def stages_of(channels: bool) -> int:
    """Chunks in shared memory."""
    return STAGES - 1 if channels else STAGES


def reverse_cta(
    scale: float,
    place: Place,
    given: ReverseInputs,
    dv: Any,
    states: Any,
    first: Any,
    memory: ReverseMemory,
) -> None:
    """A CTA's scan over gradients, from the last chunk to the first.

    Args:
      scale: of q k.
      place: the CTA's part.
      given: global memory.
      dv: gradient of v ``[B, T, N, 128]``, or None.
      states: gradients of the states after all pairs of chunks, or None.
      first: gradient of the first state, transposed.
      memory: shared memory.
    """
    b, h, key_head, _ = place
    _, _, all_chunks, _ = given.sizes
    end = all_chunks - 1 if given.end is None else given.end[b, h]
    chunks, channels = end + 1, given.through is not None

    def chunk(step):
        return end - step

    def tokens(step):
        return pl.ds(chunk(step) * CHUNK, CHUNK)

    def saved_as(step):
        return chunk(step) if channels else pair_of(chunk(step))

    def start(step, stage):
        at = tokens(step)
        arrived = memory.arrived.at[stage]
        copy_to_cluster(given.k.at[b, at, key_head], memory.k.at[stage], arrived)
        copy_to_cluster(given.q.at[b, at, key_head], memory.q.at[stage], arrived)
        if channels:
            copy_to_cluster(given.k_out.at[b, at, key_head], memory.k_out.at[stage], arrived)
            copy_to_cluster(given.p.at[b, h, at], memory.p.at[stage], arrived)
            through = given.through.at[b, h, chunk(step)]
            plgpu.copy_gmem_to_smem(through, memory.through.at[stage], arrived)
        else:
            vectors = given.vectors.at[b, h, chunk(step), pl.ds(INTO, SCANNED)]
            plgpu.copy_gmem_to_smem(vectors, memory.vectors.at[stage], arrived)
        do = given.do.at[b, at, h, place.values]
        plgpu.copy_gmem_to_smem(do, memory.do.at[stage], arrived)
        copy_to_cluster(given.x.at[b, h, at], memory.x.at[stage], arrived)

    scores = None
    if not channels:
        scores = Scores(
            memory.q, memory.k, memory.vectors, memory.arrived, memory.p, memory.p_written, scale
        )
    results = []
    if dv is not None:
        results = [
            Result(
                memory.states,
                memory.states_written,
                memory.states_free,
                lambda step: states.at[b, h, place.saved(saved_as(step))],
                # Of the last chunk of each pair; the last pair may have one.
                exists=None
                if channels
                else lambda step: (step == 0) | (lax.rem(chunk(step), i32(2)) == 1),
                ordinal=None if channels else lambda step: pairs_of(chunks) - 1 - saved_as(step),
            ),
            Result(
                memory.columns,
                memory.columns_written,
                memory.columns_free,
                lambda step: dv.at[b, tokens(step), h, place.values],
            ),
        ]

    def chain():
        state = plgpu.load(given.last.at[b, h, place.columns], layout=TILE, optimized=False)
        step = _step(scale, memory, results, scores)
        if results and not channels:
            state = for_each_pair(chunks, step, state, reverse=True)
        else:
            state = lax.fori_loop(i32(0), i32(chunks), step, state)
        first[b, h, place.columns] = state

    warpgroup = lax.axis_index(WARPGROUP_AXIS)
    pl.when(warpgroup == 0)(chain)
    pl.when(warpgroup == 1)(
        lambda: produce(chunks, start, memory.free, results, scores, memory.k.shape[0])
    )


def _step(
    scale: float, memory: ReverseMemory, results: list[Result], scores: Scores | None
) -> Callable[[Any, jax.Array, bool], jax.Array]:
    """``step(index, state, is_first_of_pair)``: the chain's work on a chunk."""

    channels = memory.through is not None

    def step(index, state, is_first_of_pair=channels):
        stage = lax.rem(index, i32(memory.k.shape[0]))
        q, k, do, x = (ref.at[stage] for ref in memory[:4])
        k_out = memory.k_out.at[stage] if channels else k

        def along(first) -> Any:
            # With a decay per key channel it is in the operands.
            return None if channels else along_columns(memory.vectors.at[stage], first)

        plgpu.barrier_wait(memory.arrived.at[stage])
        # Nothing is running. ptxas does not see it across the loop's end: it would wait for the
        # first products of this step before each use of the state, the last step's accumulator.
        plgpu.wgmma_wait(0)

        def products(p_acc, write_acc, dv_acc, state_acc):
            do_columns = plgpu.load(transposed(do), layout=TILE)
            rounded = state.astype(jnp.bfloat16)
            plgpu.wgmma(write_acc, rounded, transposed(k_out))
            plgpu.wgmma(
                p_acc, do_columns, memory.p.at[stage] if scores is None else scores.wait(stage)
            )
            # Computed while the products run.
            if results and is_first_of_pair:
                results[0].put(index, rounded)
            into, out = along(INTO), along(OUT)
            scaled = do_columns.astype(jnp.float32) * (scale if channels else into * scale)
            scaled = scaled.astype(jnp.bfloat16)
            state_acc[...] = memory.scaled_state(stage, state)
            if channels:
                scaled = lax.optimization_barrier(scaled)
            else:
                scaled, out = lax.optimization_barrier((scaled, out))
            plgpu.wgmma(state_acc, scaled, q)
            # Of the products only that with Q still runs, while dU is rounded.
            write = times(plgpu.wgmma_accumulator_load(write_acc, wait_n=1), out)
            p = plgpu.wgmma_accumulator_load(p_acc, wait_n=None)
            du = write + times(p, scale if channels else None)
            plgpu.wgmma(dv_acc, du.astype(jnp.bfloat16), x)
            if not channels:  # Kept, it would take 16 registers more.
                into = lax.optimization_barrier(along(INTO))
            dv = plgpu.wgmma_accumulator_load(dv_acc)
            plgpu.wgmma(state_acc, times(-dv, into).astype(jnp.bfloat16), k)
            if results:
                results[1].put(index, dv.astype(jnp.bfloat16), transpose=True)
            proxy_fence()
            new = plgpu.wgmma_accumulator_load(state_acc)
            free_stage(memory.free.at[stage])
            return new

        square = accumulator()
        return pl.run_scoped(products, square, square, square, accumulator(HEAD_DIM))

    return step


class _Outputs(NamedTuple):
    """What is written: of the scan over states, and of that over gradients."""

    u: Any
    states: Any
    dv: Any
    dstates: Any
    first: Any


class _Memory(NamedTuple):
    """Shared memory of both kinds of CTAs.

    Attributes:
      reverse: of the scan over gradients; the other uses part of it.
      arrived: the other's barriers of arrival.
    """

    reverse: ReverseMemory
    arrived: Any


def states(
    given: ScanInputs, gradients: ReverseInputs, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Both scans.

    Returns:
      U, the states before all pairs of chunks, dV, the gradients of the states after all pairs,
      and that of the first state; with a decay per key channel the states of all chunks.
    """
    batch, heads, chunks, groups = given.sizes
    clusters, channels = heads * PARTS // CLUSTER, given.through is not None

    def kernel(inputs, outputs: _Outputs, memory: _Memory) -> None:
        given, gradients = inputs
        cluster = lax.axis_index("group")

        # The longer scan's CTAs come first.
        @pl.when(cluster < clusters)
        def _():
            place = Place.of(cta_index(cluster), PARTS, groups)
            reverse_cta(scale, place, gradients, *outputs[2:], memory.reverse)

        @pl.when(cluster >= clusters)
        def _():
            place = Place.of(cta_index(cluster - clusters), PARTS, groups)
            own = memory.reverse.for_scan(memory.arrived)
            scan_cta(Mode.STATES, scale, place, given, outputs.u, outputs.states, None, own)

    tokens = jax.ShapeDtypeStruct(given.v.shape, jnp.bfloat16)
    saved = batch, heads, saved_of(chunks, channels) * HEAD_DIM, HEAD_DIM
    saved = jax.ShapeDtypeStruct(saved, jnp.bfloat16)
    first = jax.ShapeDtypeStruct(gradients.last.shape, jnp.float32)
    return tuple(
        launch(
            kernel,
            "gated_delta_rule_states",
            semantics=plgpu.LoweringSemantics.Lane,
            grid={"group": 2 * clusters, "batch": batch},
            warpgroups=WARPGROUPS,
            cluster=CLUSTER,
            inputs=(given, gradients),
            results=_Outputs(tokens, saved, tokens, saved, first),
            memory=_Memory(
                ReverseMemory.of(stores=True, channels=channels),
                plgpu.Barrier(num_arrivals=4 + channels, num_barriers=stages_of(channels)),
            ),
        )
    )


def first_gradient(gradients: ReverseInputs, scale: float) -> jax.Array:
    """The gradient of the first state alone, transposed."""
    batch, heads, _, groups = gradients.sizes

    def kernel(gradients: ReverseInputs, first: Any, memory: ReverseMemory) -> None:
        place = Place.of(cta_index(lax.axis_index("group")), PARTS, groups)
        reverse_cta(scale, place, gradients, None, None, first, memory)

    first: Any = jax.ShapeDtypeStruct(gradients.last.shape, jnp.float32)
    return launch(
        kernel,
        "gated_delta_rule_first_gradient",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"group": heads * PARTS // CLUSTER, "batch": batch},
        warpgroups=WARPGROUPS,
        cluster=CLUSTER,
        inputs=gradients,
        results=first,
        memory=ReverseMemory.of(stores=False, channels=gradients.through is not None),
    )
