"""dQ, dK and the sums for the gradients of decay and beta, of every chunk in parallel.

With S the state before the chunk and dS the gradient of the one after it,
``dP = scale decay (dO U^T)``, ``E = -decay (dV U^T)`` below the diagonal,
``dQ = scale into (dO S^T) + dP K``, ``read = -into (dV S^T) + E K``,
``write = out (U dS^T) + dP^T Q + E^T K`` and ``dK = read + write``. The gradients of decay and beta
are row sums of products that exist anyway.

A CTA of one warpgroup has a chunk of a head. dO, dV and U are left operands in registers. Five
buffers of 16 KiB hold everything else in turn, so that an SM has two CTAs. dQ and ``read`` have the
same right operands. Keys are processed 64 at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import CHUNK, HEAD_DIM, INTO, OUT
from pallas_kernels.linear.families import KEYS, LATER_KEYS, QUERIES, STATES, SUMS, UPDATES
from pallas_kernels.linear.kernel_parts import PARTS, GradientInputs, GradientResults
from pallas_kernels.linear.sm80.chunk_operands import (
    FRAGMENTS,
    Vectors,
    along_rows,
    below_diagonal,
    loaded_left,
    loaded_right,
    matrix,
    product,
    tokens_of,
    transposed,
    widened,
    zeros,
)
from pallas_kernels.mosaic import fragments
from pallas_kernels.mosaic.fragments import i32
from pallas_kernels.mosaic.launch import launch
from pallas_kernels.mosaic.sm80 import instructions, warp_operations
from pallas_kernels.mosaic.sm80.configs import WARPS


class _Memory(NamedTuple):
    """Shared memory: what each buffer holds, one after the other.

    Arrays of tokens in ``[128, 64]`` are two parts of 64 columns, one below the other; states are
    ``[128 columns, 64 keys]``.

    Attributes:
      first: ``[128, 64]``: dO, S of the keys from 64 on, q.
      second: the same: dV, dS of the first 64 keys.
      third: ``[64, 128]``: U, then dP and E.
      k: ``[64, 128]``.
      fifth: ``[128, 64]``: S of the first 64 keys, dS of the others.
    """

    first: Any
    second: Any
    third: Any
    k: Any
    fifth: Any


class _Chunk(NamedTuple):
    """A CTA's chunk.

    Attributes:
      given: global memory.
      batch: batch index.
      head: value head.
      key_head: its key head.
      index: of the chunk.
    """

    given: GradientInputs
    batch: Any
    head: Any
    key_head: Any
    index: Any

    def tokens(self, x: Any, head: Any, lanes: Any = slice(None)) -> Any:
        """The chunk's tokens of an array."""
        return x.at[self.batch, tokens_of(self.index), head, lanes]

    def state(self, x: Any, part: int) -> Any:
        """64 keys of the chunk's state."""
        return x.at[self.batch, self.head, pl.ds(self.index * HEAD_DIM, HEAD_DIM), _keys(part)]

    @property
    def vectors(self) -> Vectors:
        """The chunk's vectors."""
        return Vectors.in_global(self.given.vectors.at[self.batch, self.head, self.index])


class _Lefts(NamedTuple):
    """Arrays of tokens as left operands of 64 columns each."""

    do: Sequence[jax.Array]
    dv: Sequence[jax.Array]
    u: Sequence[jax.Array]


def gradients(given: GradientInputs, scale: float) -> GradientResults:
    """Runs the kernel."""
    batch, heads, chunks, _ = given.vectors.shape
    groups = heads // given.k.shape[2]

    def kernel(given: GradientInputs, results: GradientResults, memory: _Memory) -> None:
        n, h, b = (lax.axis_index(name) for name in ("chunk", "head", "batch"))
        chunk = _Chunk(given, b, h, lax.div(h, i32(groups)), n)
        sums = results.sums.at[b, h, n]
        lefts = _start(chunk, memory, sums)
        _write_score_gradients(scale, chunk, memory, lefts)
        reads = _query_gradient(scale, chunk, memory, lefts, results.dq, sums)
        _key_gradient(chunk, memory, lefts.u, reads, results.dk, sums)

    by_token = jax.ShapeDtypeStruct(given.do.shape, jnp.bfloat16)
    sums = jax.ShapeDtypeStruct((batch, heads, chunks, SUMS, CHUNK), jnp.float32)
    by_parts, whole = matrix(HEAD_DIM, CHUNK), matrix(CHUNK, HEAD_DIM)
    return launch(
        kernel,
        "gated_delta_rule_gradients",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"chunk": chunks, "head": heads, "batch": batch},
        warpgroups=1,
        inputs=given,
        results=GradientResults(by_token, by_token, sums),
        memory=_Memory(by_parts, by_parts, whole, whole, by_parts),
    )


def _start(chunk: _Chunk, memory: _Memory, sums: Any) -> _Lefts:
    """Starts the copies of two groups, and loads the left operands from the first."""
    given = chunk.given
    _copy_parts(chunk, given.do, chunk.head, memory.first)
    _copy_parts(chunk, given.dv, chunk.head, memory.second)
    instructions.copy(chunk.tokens(given.u, chunk.head), memory.third)
    warp_operations.commit_copies()
    instructions.copy(chunk.tokens(given.k, chunk.key_head), memory.k)
    instructions.copy(chunk.state(given.states, 0), memory.fifth)
    warp_operations.commit_copies()
    warp_operations.wait_for_copies(1, WARPS)
    lefts = _Lefts(
        [loaded_left(_part(memory.first, i)) for i in range(PARTS)],
        [loaded_left(_part(memory.second, i)) for i in range(PARTS)],
        [loaded_left(memory.third.at[:, _keys(i)]) for i in range(PARTS)],
    )
    updates = _Sum()
    for dv, u in zip(lefts.dv, lefts.u, strict=True):
        updates.add(widened(dv) * widened(u))
    updates.write(sums, UPDATES)
    return lefts


def _write_score_gradients(scale: float, chunk: _Chunk, memory: _Memory, lefts: _Lefts) -> None:
    """Writes dP and E over U, and starts the copies of a third group over dO and dV."""
    fragments.warpgroup_barrier()
    instructions.copy(chunk.state(chunk.given.states, 1), memory.first)
    instructions.copy(chunk.state(chunk.given.dstates, 0), memory.second)
    warp_operations.commit_copies()
    dp, e = zeros(), zeros()
    for i in range(PARTS):
        right = loaded_right(transposed(memory.third.at[:, _keys(i)]))
        dp, e = plgpu.mma(dp, lefts.do[i], right), plgpu.mma(e, lefts.dv[i], right)
    decay = chunk.vectors.decay()
    dp, e = dp * (decay * scale), below_diagonal(e * -decay)
    fragments.warpgroup_barrier()  # U has been read.
    memory.third[:, _keys(0)] = dp.astype(jnp.bfloat16)
    memory.third[:, _keys(1)] = e.astype(jnp.bfloat16)
    warp_operations.wait_for_copies(1, WARPS)  # k and S of the first keys.


def _query_gradient(
    scale: float, chunk: _Chunk, memory: _Memory, lefts: _Lefts, dq: Any, sums: Any
) -> list[jax.Array]:
    """Writes dQ, and returns ``read`` by 64 keys."""
    given = chunk.given
    into, reads = chunk.vectors.rows(INTO), []
    queries, of_states = _Sum(), _Sum()
    for i, state in enumerate((memory.fifth, memory.first)):
        y, read = zeros(), zeros()
        for j in range(PARTS):
            right = loaded_right(_part(state, j))
            y, read = plgpu.mma(y, lefts.do[j], right), plgpu.mma(read, lefts.dv[j], right)
        y, read = y * along_rows(into * scale), read * along_rows(-into)
        right = loaded_right(memory.k.at[:, _keys(i)])
        y = plgpu.mma(y, loaded_left(memory.third.at[:, _keys(0)]), right)
        read = plgpu.mma(read, loaded_left(memory.third.at[:, _keys(1)]), right)
        reads.append(read)
        q = instructions.load(chunk.tokens(given.q, chunk.key_head, _keys(i)), FRAGMENTS.tile)
        target = chunk.tokens(dq, chunk.head, _keys(i))
        instructions.store_by_quads(target, y.astype(jnp.bfloat16), FRAGMENTS)
        queries.add(y * q.astype(jnp.float32))
        instructions.wait_for_copies()  # dS of these keys, and S of the next.
        gradient = memory.second if i == 0 else memory.fifth
        for j in range(PARTS):
            of_states.add(
                widened(loaded_left(_part(state, j))) * widened(loaded_left(_part(gradient, j)))
            )
        fragments.warpgroup_barrier()
        if i == 0:
            instructions.copy(chunk.state(given.dstates, 1), memory.fifth)
        else:
            _copy_parts(chunk, given.q, chunk.key_head, memory.first)
    queries.write(sums, QUERIES)
    of_states.write(sums, STATES)
    return reads


def _key_gradient(
    chunk: _Chunk,
    memory: _Memory,
    u: Sequence[jax.Array],
    reads: Sequence[jax.Array],
    dk: Any,
    sums: Any,
) -> None:
    """Writes dK."""
    out, keys, later = chunk.vectors.rows(OUT), _Sum(), _Sum()
    for i, gradient in enumerate((memory.second, memory.fifth)):
        write = zeros()
        for j in range(PARTS):
            write = product(write, u[j], _part(gradient, j))
        write = write * along_rows(out)
        k = memory.k.at[:, _keys(i)]
        of_keys = widened(loaded_left(k))
        later.add(write * of_keys)
        write = product(write, loaded_left(transposed(memory.third.at[:, _keys(1)])), k)
        if i == 0:
            instructions.wait_for_copies()  # q.
        dp = loaded_left(transposed(memory.third.at[:, _keys(0)]))
        write = product(write, dp, _part(memory.first, i))
        keys.add((reads[i] - write) * of_keys)
        target = chunk.tokens(dk, chunk.head, _keys(i))
        rounded = (reads[i] + write).astype(jnp.bfloat16)
        instructions.store_by_quads(target, rounded, FRAGMENTS)
    keys.write(sums, KEYS)
    later.write(sums, LATER_KEYS)


class _Sum:
    """Row sums of products, which the threads of a row have in parts."""

    def __init__(self) -> None:
        self._parts = plgpu.layout_cast(jnp.zeros(CHUNK, jnp.float32), FRAGMENTS.rows)

    def add(self, x: jax.Array) -> None:
        """Adds the rows of ``[64, 64]``."""
        self._parts = instructions.add_to_row_parts(self._parts, x, FRAGMENTS)

    def write(self, sums: Any, which: int) -> None:
        """Writes a chunk's sums."""
        sums[which] = instructions.sum_row_parts(self._parts, FRAGMENTS)


def _keys(part: int) -> Any:
    """64 keys, or columns of values."""
    return pl.ds(part * CHUNK, CHUNK)


def _part(buffer: Any, part: int) -> Any:
    """64 columns of an array of tokens, or the keys of 64 columns of a state."""
    return buffer.at[_keys(part)]


def _copy_parts(chunk: _Chunk, x: Any, head: Any, buffer: Any) -> None:
    """Starts the copy of an array of tokens, as two parts of 64 columns."""
    for part in range(PARTS):
        instructions.copy(chunk.tokens(x, head, _keys(part)), _part(buffer, part))
