"""The scan over the chunks of a sequence.

A CTA has 64 of a head's value columns. The state is kept transposed, ``[64 columns, 128 keys]``, as
the accumulator of one warpgroup, and the left operands of the chain's products, S, R and U, are its
registers: ``R^T = V^T - into (S^T K^T)``, ``U^T = R^T (X beta)^T`` and ``S^T' = through S^T +
(out U)^T K``. That is the chain. A second warpgroup produces the results of every chunk, one chunk
later: the chain passes S and U to it through shared memory, and it computes
``O = scale (into (Q S) + P U)`` or writes S and U.

The letters are those of :mod:`pallas_kernels.linear.xla`: S is the state before a chunk and S' the
state after it, R the values less what S predicts, U the updates, ``X = (I + A)^-1``. The decays
``into``, ``out`` and ``through`` lead from the chunk's start to a token, from a token to the
chunk's end, and through the whole chunk. P is ``D Q K^T``, with D the decays from token to token.
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

from pallas_kernels.linear.chunks import CHUNK, HEAD_DIM, INTO, OUT
from pallas_kernels.linear.kernel_parts import PARTS, Mode, Place
from pallas_kernels.linear.sm80.chunk_operands import (
    FRAGMENTS,
    Vectors,
    left_operand,
    loaded_left,
    lower_transposed_product,
    matrix,
    numbers,
    product,
    tokens_of,
    transposed,
    widened,
    zeros,
)
from pallas_kernels.mosaic import fragments, transfers
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm80 import instructions

# Chunks of inputs in shared memory, and of what the chain hands over.
STAGES = 2
# Vectors that scans read: INTO and OUT.
SCANNED = 2 * CHUNK
# Of the outputs' products, whose operands are all in shared memory: warps of 32 x 32 read four
# fifths of what those of 16 x 64 would. On a Hopper GPU both take the same time.
_OF_OUTPUTS = instructions.Fragments.of(jnp.bfloat16, 2)


class ScanInputs(NamedTuple):
    """What a scan reads.

    Attributes:
      q: bfloat16 ``[B, T, K, 128]``; None unless outputs are computed.
      k: bfloat16 ``[B, T, K, 128]``.
      v: bfloat16 ``[B, T, N, 128]``.
      p: bfloat16 ``[B, N, T, 64]``; None unless outputs are computed.
      x: X beta, bfloat16 ``[B, N, T, 64]``.
      vectors: of the chunks.
      start: first state, transposed, float32 ``[B, N, columns, 128]``.
    """

    q: Any
    k: Any
    v: Any
    p: Any
    x: Any
    vectors: Any
    start: Any


class ScanMemory(NamedTuple):
    """Shared memory; None where a mode does not need it.

    Attributes:
      k: ``[STAGES, 64, 128]``.
      v: ``[STAGES, 64, 64]``.
      x: the same.
      vectors: ``[STAGES, 128]``.
      q: ``[STAGES, 64, 128]``.
      p: ``[STAGES, 64, 64]``.
      states: ``[STAGES, 64 columns, 128]``, by chunk: S before it.
      columns: ``[STAGES, 64 columns, 64 tokens]``: U, then what leaves, by tokens.
    """

    k: Any
    v: Any
    x: Any
    vectors: Any
    q: Any = None
    p: Any = None
    states: Any = None
    columns: Any = None

    @classmethod
    def of(cls, mode: Mode) -> ScanMemory:
        """Descriptions."""
        outputs, stores = mode is Mode.OUTPUT, mode is not Mode.LAST
        wide, square = matrix(STAGES, CHUNK, HEAD_DIM), matrix(STAGES, CHUNK, CHUNK)
        return cls(
            k=wide,
            v=square,
            x=square,
            vectors=numbers(STAGES, SCANNED),
            q=wide if outputs else None,
            p=square if outputs else None,
            states=wide if stores else None,
            columns=square if stores else None,
        )


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
      place: the CTA's part.
      given: global memory.
      columns: o or U ``[B, T, N, 128]``, or None.
      states: the states before all chunks, or None.
      last: the last state, transposed, or None.
      memory: shared memory.
      wait: waits until a chunk's X and P have been written; None if they were before the launch.
        The second warpgroup waits and copies both, as the chain has no time for it.
    """

    def chain():
        state = _chain(mode, place, given, memory, copies_x=wait is None)
        if last is not None:
            instructions.store(last.at[place.batch, place.head, place.columns], state)

    if mode is Mode.LAST:
        chain()
        return
    chunks = given.vectors.shape[2]
    warpgroup = lax.axis_index(WARPGROUP_AXIS)
    pl.when(warpgroup == 0)(chain)

    @pl.when(warpgroup == 1)
    def _():
        if mode is Mode.OUTPUT:
            _write_outputs(scale, place, given, columns, memory, wait)
        else:
            write_states(chunks, lambda step: step, place, columns, states, memory)


def _chain(
    mode: Mode, place: Place, given: ScanInputs, memory: ScanMemory, copies_x: bool
) -> jax.Array:
    """The last state; ``copies_x``: or else the second warpgroup does."""
    b, h, key_head, part = place
    # Columns of the matrix M have no values.
    has_values = (part < PARTS).astype(jnp.float32)

    def start(n, stage):
        tokens = tokens_of(n)
        copied = [
            (given.k.at[b, tokens, key_head], memory.k),
            (given.v.at[b, tokens, h, place.values], memory.v),
            (given.vectors.at[b, h, n, pl.ds(INTO, SCANNED)], memory.vectors),
        ]
        if copies_x:
            copied.insert(2, (given.x.at[b, h, tokens], memory.x))
        for source, target in copied:
            instructions.copy(source, target.at[stage])

    def step(stage, state):
        k, vectors = memory.k.at[stage], Vectors.shared(memory.vectors.at[stage], INTO)
        rounded = left_operand(state)
        read = product(zeros(), rounded, transposed(k))
        if mode is not Mode.LAST:
            memory.states.at[stage][...] = state.astype(jnp.bfloat16)
        values = widened(loaded_left(transposed(memory.v.at[stage])))
        if mode is Mode.LAST:
            values = values * has_values
        r = left_operand(values - vectors.columns(INTO) * read)
        u = lower_transposed_product(zeros(), r, memory.x.at[stage])
        if mode is not Mode.LAST:
            memory.columns.at[stage][...] = u.astype(jnp.bfloat16)
        state = state * memory.vectors[stage, INTO + CHUNK - 1]
        return product(state, left_operand(u * vectors.columns(OUT)), k)

    state = instructions.load(given.start.at[b, h, place.columns], FRAGMENTS.tile)
    return run_chain(given.vectors.shape[2], start, step, state)


def run_chain(
    chunks: int,
    start: Callable[[Any, Any], None],
    step: Callable[[Any, jax.Array], jax.Array],
    state: jax.Array,
) -> jax.Array:
    """Runs ``state = step(stage, state)`` for every chunk, and returns the last one.

    What a step leaves in a stage is read by the other warpgroup during the next step.

    Args:
      chunks: number of steps.
      start: ``start(index, stage)`` starts the copies of a step.
      step: the work on the chunk in a stage.
      state: the first one.
    """

    def body(index, state):
        stage = lax.rem(index, i32(STAGES))
        instructions.wait_for_copies_of_cta()  # The other stage has been read.
        start(jnp.minimum(index + 1, chunks - 1), 1 - stage)
        return step(stage, state)

    start(i32(0), i32(0))
    state = lax.fori_loop(i32(0), i32(chunks), body, state)
    instructions.wait_for_copies_of_cta()
    return state


def for_each_result(
    chunks: int,
    step: Callable[[Any, Any], None],
    start: Callable[[Any, Any], None] | None = None,
) -> None:
    """Runs ``step(index, stage)`` of the second warpgroup, one step behind the chain.

    Args:
      chunks: number of steps.
      step: reads what the chain has left in a stage.
      start: ``start(index, stage)`` starts the copies of a step; None without inputs of its own.
    """

    @pl.loop(0, chunks)
    def _(index):
        stage = lax.rem(index, i32(STAGES))
        instructions.wait_for_copies_of_cta()
        if start is not None:
            start(jnp.minimum(index + 1, chunks - 1), 1 - stage)
        step(index, stage)


def _write_outputs(
    scale: float,
    place: Place,
    given: ScanInputs,
    target: Any,
    memory: ScanMemory,
    wait: Callable[[Any], None] | None,
) -> None:
    """The second warpgroup: ``O = scale (into (Q S) + P U)``.

    Where it waits for X and P, it copies X for the chain: while the chain has chunk n, this has
    chunk n - 1, copies q and P of n, and X of n + 1, whose P has then been written, too.
    """
    b, h, key_head, _ = place
    square, chunks = (CHUNK, CHUNK), given.vectors.shape[2]
    add_product = functools.partial(instructions.transposed_product, _OF_OUTPUTS, lanes=CHUNK)

    def start(n, stage):
        tokens = tokens_of(n)
        instructions.copy(given.q.at[b, tokens, key_head], memory.q.at[stage])
        instructions.copy(given.p.at[b, h, tokens], memory.p.at[stage])

    def start_x(n, stage):
        assert wait is not None
        wait(n)
        instructions.copy(given.x.at[b, h, tokens_of(n)], memory.x.at[stage])

    def start_all(n, stage):
        start(n, stage)
        start_x(jnp.minimum(n + 1, chunks - 1), 1 - stage)

    def step(n, stage):
        into = given.vectors.at[b, h, n, pl.ds(INTO, CHUNK)]
        into = _OF_OUTPUTS.along_rows(instructions.load(into, _OF_OUTPUTS.rows), square)
        u = memory.columns.at[stage]
        o = add_product(_OF_OUTPUTS.zeros(square), memory.q.at[stage], memory.states.at[stage])
        o = add_product(o * into, memory.p.at[stage], u)
        _send(o * scale, u, target.at[b, tokens_of(n), h, place.values])

    if wait is not None:
        start_x(i32(0), i32(0))
    start(i32(0), i32(0))
    instructions.wait_for_copies_of_cta()
    if wait is not None:
        start_x(i32(min(1, chunks - 1)), i32(1))
    for_each_result(chunks, step, start if wait is None else start_all)


def write_states(
    chunks: int,
    chunk_of: Callable[[Any], Any],
    place: Place,
    columns: Any,
    states: Any,
    memory: Any,
) -> None:
    """The second warpgroup: writes what the chain hands over of every chunk.

    Args:
      chunks: number of steps.
      chunk_of: from the index of a step to its chunk.
      place: the CTA's part.
      columns: ``[B, T, N, 128]``.
      states: ``[B, N, chunks * 128, 128]``.
      memory: shared memory with ``states`` and ``columns``.
    """
    b, h, _, _ = place

    def step(index, stage):
        n, buffer = chunk_of(index), memory.columns.at[stage]
        transfers.store_matrix(memory.states.at[stage], states.at[b, h, place.saved(n)])
        by_token = widened(loaded_left(transposed(buffer)))
        _send(by_token, buffer, columns.at[b, tokens_of(n), h, place.values])

    instructions.wait_for_copies_of_cta()
    for_each_result(chunks, step)


def _send(x: jax.Array, buffer: Any, target: Any) -> None:
    """Writes a result, rounded, through memory that this warpgroup alone has read."""
    fragments.warpgroup_barrier()
    buffer[...] = x.astype(jnp.bfloat16)
    fragments.warpgroup_barrier()
    transfers.store_matrix(buffer, target)


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
      mode: OUTPUT for o and the last state; STATES for U and the states before all chunks; LAST for
        the last state alone.

    Returns:
      o or U ``[B, T, N, 128]``, states ``[B, N, chunks * 128 columns, 128]``, and the last state.
    """
    batch, heads, chunks, _ = given.vectors.shape
    groups, parts = heads // given.k.shape[2], given.start.shape[2] // CHUNK
    columns = jax.ShapeDtypeStruct(given.v.shape, jnp.bfloat16)
    saved = batch, heads, chunks * HEAD_DIM, HEAD_DIM
    states = jax.ShapeDtypeStruct(saved, jnp.bfloat16)

    def kernel(given: ScanInputs, outputs: _Outputs, memory: ScanMemory) -> None:
        place = Place.of(lax.axis_index("group"), parts, groups)
        scan_cta(mode, scale, place, given, *outputs, memory)

    results = launch(
        kernel,
        f"gated_delta_rule_{mode.value}",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"group": heads * parts, "batch": batch},
        warpgroups=1 if mode is Mode.LAST else 2,
        inputs=given,
        results=_Outputs(
            columns=None if mode is Mode.LAST else columns,
            states=states if mode is Mode.STATES else None,
            last=jax.ShapeDtypeStruct(given.start.shape, jnp.float32),
        ),
        memory=ScanMemory.of(mode),
    )
    return tuple(results)
