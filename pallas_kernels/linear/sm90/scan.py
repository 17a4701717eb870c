"""The scan over the chunks of a sequence.

A chain, one warpgroup, has 64 of a head's value columns. A CTA has one chain, or two where the SMs
are too few for all chains: one computes while the other one waits. The state is kept transposed,
``[64 columns, 128 keys]``, as the accumulator of its warpgroup, and the left operands of all
products, S, R and U, are its registers: ``R^T = V^T - into (S^T K^T)``, ``U^T = R^T (X beta)^T``,
``S^T' = through S^T + (out U)^T K`` and ``O^T = scale into (S^T Q^T) + U^T P^T``. Nothing that a
step waits for goes through shared memory. The products of O run while R and the next S are rounded.
The last warpgroup is the producer: it copies, and computes P if it is not an input.

The letters are those of :mod:`pallas_kernels.linear.xla`: S is the state before a chunk and S' the
state after it, R the values less what S predicts, U the updates, ``X = (I + A)^-1``. The decays
``into``, ``out`` and ``through`` lead from the chunk's start to a token, from a token to the
chunk's end, and through the whole chunk. P is ``scale D Q K^T``, with D the decays from token to
token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import num_sms
from pallas_kernels.linear.chunks import BETA, CHUNK, HEAD_DIM, INTO, OUT
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
    SLOTS,
    STAGES,
    Result,
    Scores,
    copy_to_cluster,
    cta_index,
    for_each_pair,
    free_stage,
    produce,
    stages_barrier,
)
from pallas_kernels.mosaic.fragments import i32, proxy_fence
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm90.instructions import TILE, specialize_warpgroups

# Vectors that scans read: INTO to START.
SCANNED = BETA


class ScanInputs(NamedTuple):
    """What a scan reads.

    Attributes:
      q: bfloat16 ``[B, T, K, 128]``; None unless outputs are computed.
      k: bfloat16 ``[B, T, K, 128]``.
      v: bfloat16 ``[B, T, N, 128]``.
      x: X beta, bfloat16 ``[B, N, T, 64]``.
      vectors: of the chunks.
      start: first state, transposed, float32 ``[B, N, columns, 128]``.
      p: P, bfloat16 ``[B, N, T, 64]``; None where the scan computes it, or does not need it.
      first: the chunk with which a head's scan for the last state begins, int32 ``[B, N]``; None
        is 0.
      k_out: with a decay per key channel, where q and k are ``into Q`` and ``into K``, ``out K``,
        all of every value head; P is given, without the scale, and the vectors are None.
      through: with a decay per key channel, float32 ``[B, N, chunks, 128]``.
    """

    q: Any
    k: Any
    v: Any
    x: Any
    vectors: Any
    start: Any
    p: Any = None
    first: Any = None
    k_out: Any = None
    through: Any = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, value heads, chunks, and value heads per head of k."""
        batch, length, heads, _ = self.v.shape
        return batch, heads, length // CHUNK, heads // self.k.shape[2]


class ScanMemory(NamedTuple):
    """Shared memory and barriers; None where a mode does not need it.

    Attributes:
      q: ``[stages, 64, 128]``.
      k: the same.
      v: ``[stages * chains, 64, 64]``.
      x: ``[stages, 64, 64]``.
      vectors: ``[stages, 256]``; None with a decay per key channel.
      arrived: by stage.
      free: by stage.
      p: ``[stages, 64, 64]``.
      p_written: by stage, where the scan computes P.
      columns: ``[slots, 64 tokens, 64 columns]``: o or U.
      columns_written: by slot.
      columns_free: by slot.
      states: ``[slots, 64 columns, 128]``.
      states_written: by slot.
      states_free: by slot.
      k_out: ``[stages, 64, 128]``, with a decay per key channel.
      through: ``[stages, 128]``, the same.
    """

    q: Any
    k: Any
    v: Any
    x: Any
    vectors: Any
    arrived: Any
    free: Any
    p: Any = None
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
    def of(
        cls, mode: Mode, *, scores: bool = True, channels: bool = False, chains: int = 1
    ) -> ScanMemory:
        """Descriptions.

        Args:
          mode: what is computed.
          scores: whether P is computed for outputs, and not copied.
          channels: whether there is a decay per key channel.
          chains: of a CTA.
        """
        outputs, slots = mode is Mode.OUTPUT, {}
        if outputs:
            slots |= scores_of() if scores else {"p": matrix(STAGES, CHUNK, CHUNK)}
        if mode is not Mode.LAST:
            # Three chunks and one buffer fit with a decay per key channel: the copy of an output
            # has the time of a step.
            slots |= slots_of("columns", CHUNK, 1 if channels and outputs else SLOTS)
        if mode is Mode.STATES:
            slots |= slots_of("states", HEAD_DIM)
        if channels:
            slots |= channels_of(STAGES)
        return cls(
            q=matrix(STAGES, CHUNK, HEAD_DIM) if outputs else None,
            k=matrix(STAGES, CHUNK, HEAD_DIM),
            v=matrix(STAGES * chains, CHUNK, CHUNK),
            x=matrix(STAGES, CHUNK, CHUNK),
            vectors=None if channels else numbers(STAGES, SCANNED),
            arrived=plgpu.Barrier(
                num_arrivals=3 + chains + channels + outputs + (outputs and not scores),
                num_barriers=STAGES,
            ),
            free=stages_barrier(STAGES, chains),
            **slots,
        )

    @property
    def stages(self) -> int:
        """Chunks in shared memory."""
        return self.k.shape[0]

    @property
    def chains(self) -> int:
        """Chains of a CTA."""
        return self.v.shape[0] // self.stages

    def scaled_state(self, stage: Any, state: jax.Array) -> jax.Array:
        """``through S``, transposed."""
        if self.through is None:
            return state * self.vectors[stage, INTO + CHUNK - 1]
        return state * along_columns(self.through.at[stage], 0, CHUNK, HEAD_DIM)


def saved_of(chunks: int, channels: bool) -> int:
    """Number of states that are saved, and of their gradients."""
    return chunks if channels else pairs_of(chunks)


def pairs_of(chunks: int) -> int:
    """Number of pairs of chunks: a state is saved of each, before it, and a gradient, after it.

    The other state of a pair is recomputed where it is needed, for half of the memory.
    """
    return -(-chunks // 2)


def slots_of(name: str, columns: int, slots: int = SLOTS) -> dict[str, Any]:
    """The buffers of a result, and their barriers, by the names of a memory's fields."""
    barrier = plgpu.Barrier(num_arrivals=1, num_barriers=slots)
    buffer = matrix(slots, CHUNK, columns)
    return {name: buffer, f"{name}_written": barrier, f"{name}_free": barrier}


def channels_of(stages: int) -> dict[str, Any]:
    """The same of what a decay per key channel needs."""
    return {"k_out": matrix(stages, CHUNK, HEAD_DIM), "through": numbers(stages, HEAD_DIM)}


def scores_of() -> dict[str, Any]:
    """The same of P."""
    written = plgpu.Barrier(num_arrivals=1, num_barriers=STAGES)
    return {"p": matrix(STAGES, CHUNK, CHUNK), "p_written": written}


def scan_cta(
    mode: Mode,
    scale: float,
    place: Place,
    given: ScanInputs,
    columns: Any,
    states: Any,
    last: Any,
    memory: ScanMemory,
    wait: Callable[[Any], None] | None = None,
) -> None:
    """A CTA's scan.

    Args:
      mode: what is computed.
      scale: of q k.
      place: the CTA's part, in the order of the CTAs; with two chains, which have two parts each,
        its columns are those of no chain.
      given: global memory.
      columns: o or U ``[B, T, N, 128]``, or None.
      states: the states before all pairs of chunks, or None.
      last: the last state, transposed, or None.
      memory: shared memory.
      wait: ``wait(step)`` waits until X and P of a step are in global memory; None if all are.
    """
    b, h, *_ = place
    _, _, all_chunks, _ = given.sizes
    first = 0 if given.first is None else given.first[b, h]
    chunks, channels = all_chunks - first, given.through is not None
    chains, warpgroup = memory.chains, lax.axis_index(WARPGROUP_AXIS)

    def tokens(step):
        return pl.ds((first + step) * CHUNK, CHUNK)

    def start(step, stage):
        ready = None if wait is None else functools.partial(wait, step)
        _start_copies(mode, place, given, memory, first + step, stage, ready)

    results, scores = [], None
    if mode is Mode.OUTPUT and given.p is None:
        scores = Scores(
            memory.q, memory.k, memory.vectors, memory.arrived, memory.p, memory.p_written, scale
        )
    if mode is Mode.STATES:
        results.append(
            Result(
                memory.states,
                memory.states_written,
                memory.states_free,
                lambda step: states.at[b, h, place.saved(step if channels else pair_of(step))],
                exists=None if channels else lambda step: lax.rem(step, i32(2)) == 0,
                ordinal=None if channels else pair_of,
            )
        )
    if mode is not Mode.LAST:
        results.append(
            Result(
                memory.columns,
                memory.columns_written,
                memory.columns_free,
                lambda step: columns.at[b, tokens(step), h, place.values],
            )
        )

    def chain():
        own = place if chains == 1 else place._replace(part=place.part * chains + warpgroup)
        state = plgpu.load(given.start.at[b, h, own.columns], layout=TILE, optimized=False)
        step = _step(mode, scale, own, memory, results, scores)
        if mode is Mode.STATES and not channels:
            state = for_each_pair(all_chunks, step, state)
        else:
            state = lax.fori_loop(i32(0), i32(chunks), step, state)
        if last is not None:
            last[b, h, own.columns] = state

    def copies():
        produce(chunks, start, memory.free, results, scores, memory.stages)

    if chains > 1:
        specialize_warpgroups(chains, lambda _: chain(), copies)
    else:
        pl.when(warpgroup == 0)(chain)
        pl.when(warpgroup == 1)(copies)


def _start_copies(
    mode: Mode,
    place: Place,
    given: ScanInputs,
    memory: ScanMemory,
    chunk: Any,
    stage: Any,
    wait: Callable[[], None] | None,
) -> None:
    """Starts the copies of a chunk to a stage; ``wait`` waits for X and P."""
    b, h, key_head, _ = place
    at, arrived = pl.ds(chunk * CHUNK, CHUNK), memory.arrived.at[stage]
    copy_to_cluster(given.k.at[b, at, key_head], memory.k.at[stage], arrived)
    if given.through is not None:
        copy_to_cluster(given.k_out.at[b, at, key_head], memory.k_out.at[stage], arrived)
        through = given.through.at[b, h, chunk]
        plgpu.copy_gmem_to_smem(through, memory.through.at[stage], arrived)
    else:
        vectors = given.vectors.at[b, h, chunk, pl.ds(INTO, SCANNED)]
        plgpu.copy_gmem_to_smem(vectors, memory.vectors.at[stage], arrived)
    if mode is Mode.OUTPUT:
        copy_to_cluster(given.q.at[b, at, key_head], memory.q.at[stage], arrived)
    if memory.chains == 1:
        values = given.v.at[b, at, h, place.values]
        plgpu.copy_gmem_to_smem(values, memory.v.at[stage], arrived)
    else:  # The columns of all values, of which the chains of M have no use.
        for i in range(PARTS):
            values = given.v.at[b, at, h, pl.ds(i * CHUNK, CHUNK)]
            copy_to_cluster(values, memory.v.at[stage * PARTS + i], arrived)
    if wait is not None:
        wait()
    copy_to_cluster(given.x.at[b, h, at], memory.x.at[stage], arrived)
    if given.p is not None:
        copy_to_cluster(given.p.at[b, h, at], memory.p.at[stage], arrived)


def times(x: jax.Array, factors: Any) -> jax.Array:
    """x times factors; None is 1."""
    return x if factors is None else x * factors


def pair_of(chunk: Any) -> Any:
    """Index of a chunk's pair."""
    return lax.div(chunk, i32(2))


def _step(
    mode: Mode,
    scale: float,
    place: Place,
    memory: ScanMemory,
    results: list[Result],
    scores: Scores | None,
) -> Callable[[Any, jax.Array, bool], jax.Array]:
    """``step(index, state, is_first_of_pair)``: the chain's work on a chunk."""
    outputs, channels = mode is Mode.OUTPUT, memory.through is not None
    has_values = (place.part < PARTS).astype(jnp.float32)

    def step(index, state, is_first_of_pair=channels):
        stage = lax.rem(index, i32(memory.stages))
        k, x = memory.k.at[stage], memory.x.at[stage]
        own = stage
        if memory.chains > 1:
            own = stage * memory.chains + lax.axis_index(WARPGROUP_AXIS)
        v = memory.v.at[own]
        k_out = memory.k_out.at[stage] if channels else k

        def along(first) -> Any:
            # With a decay per key channel it is in the operands.
            return None if channels else along_columns(memory.vectors.at[stage], first)

        plgpu.barrier_wait(memory.arrived.at[stage])
        rounded = state.astype(jnp.bfloat16)

        def products(read_acc: Any, u_acc: Any, state_acc: Any, o_acc: Any = None) -> jax.Array:
            plgpu.wgmma(read_acc, rounded, transposed(k))
            if outputs:
                plgpu.wgmma(o_acc, rounded, transposed(memory.q.at[stage]))
            # Computed while the products run.
            values = plgpu.load(transposed(v), layout=TILE).astype(jnp.float32)
            if mode is Mode.LAST:
                values = values * has_values
            into = along(INTO)
            if mode is Mode.STATES and is_first_of_pair:
                results[0].put(index, rounded)
            if channels:
                values = lax.optimization_barrier(values)
            else:
                values, into = lax.optimization_barrier((values, into))
            read = plgpu.wgmma_accumulator_load(read_acc, wait_n=1 if outputs else 0)
            r = (values - times(read, into)).astype(jnp.bfloat16)
            plgpu.wgmma(u_acc, r, transposed(x))
            state_acc[...] = memory.scaled_state(stage, state)
            out = along(OUT)
            if outputs and not channels:
                o = plgpu.wgmma_accumulator_load(o_acc, wait_n=1)
                o_acc[...] = o * (into * scale)
            u = plgpu.wgmma_accumulator_load(u_acc)
            plgpu.wgmma(state_acc, times(u, out).astype(jnp.bfloat16), k_out)
            u = u.astype(jnp.bfloat16)
            if outputs:
                p = memory.p.at[stage] if scores is None else scores.wait(stage)
                plgpu.wgmma(o_acc, u, transposed(p))
            elif mode is Mode.STATES:
                results[-1].put(index, u, transpose=True)
            proxy_fence()
            new = plgpu.wgmma_accumulator_load(state_acc, wait_n=1 if outputs else 0)
            if not outputs:
                free_stage(memory.free.at[stage])
                return new
            o = times(plgpu.wgmma_accumulator_load(o_acc), scale if channels else None)
            free_stage(memory.free.at[stage])
            results[0].put(index, o.astype(jnp.bfloat16), transpose=True)
            return new

        accumulators = [accumulator(), accumulator(), accumulator(HEAD_DIM)]
        return pl.run_scoped(products, *accumulators, *[accumulator()] * outputs)

    return step


class _Outputs(NamedTuple):
    """What a scan writes; None where a mode does not."""

    columns: Any
    states: Any
    last: Any


def scan(
    given: ScanInputs, scale: float, mode: Mode
) -> tuple[jax.Array | None, jax.Array | None, jax.Array]:
    """Runs a scan over every head.

    Args:
      given: its inputs. In the mode LAST the state may have more than 128 columns: those have no
        values.
      scale: of q k.
      mode: OUTPUT for o and the last state; STATES for U and the states before all pairs of
        chunks; LAST for the last state alone.

    Returns:
      o or U ``[B, T, N, 128]``, states ``[B, N, saved * 128 columns, 128]``, and the last state.
    """
    batch, heads, chunks, groups = given.sizes
    parts, channels = given.start.shape[2] // CHUNK, given.through is not None
    columns = jax.ShapeDtypeStruct(given.v.shape, jnp.bfloat16)
    saved = batch, heads, saved_of(chunks, channels) * HEAD_DIM, HEAD_DIM
    states = jax.ShapeDtypeStruct(saved, jnp.bfloat16)

    # Two chains of a CTA share what a chunk's copies bring; one has it for itself, so that two are
    # slower, unless the SMs have one CTA after the other otherwise.
    chains = PARTS if mode is Mode.LAST and batch * heads * parts > num_sms() else 1

    def kernel(given: ScanInputs, outputs: _Outputs, memory: ScanMemory) -> None:
        place = Place.of(cta_index(lax.axis_index("group")), parts // chains, groups)
        scan_cta(mode, scale, place, given, *outputs, memory)

    results = launch(
        kernel,
        f"gated_delta_rule_{mode.value}",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"group": heads * parts // chains // CLUSTER, "batch": batch},
        warpgroups=chains + 1,
        cluster=CLUSTER,
        inputs=given,
        results=_Outputs(
            columns=None if mode is Mode.LAST else columns,
            states=states if mode is Mode.STATES else None,
            last=jax.ShapeDtypeStruct(given.start.shape, jnp.float32),
        ),
        memory=ScanMemory.of(mode, scores=not channels, channels=channels, chains=chains),
    )
    return tuple(results)
