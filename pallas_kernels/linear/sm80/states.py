"""The backward pass's scans: states and U again, and the gradients of states, in one launch.

The two do not depend on each other, so that their CTAs fill the GPU together. The scan over the
gradients is built like :mod:`pallas_kernels.linear.sm80.scan`: with dS the gradient of the state
after a chunk, transposed, ``dU^T = out (dS^T K^T) + scale dO^T P``, ``dV^T = dU^T (X beta)`` and
``dS^T' = through dS^T + scale (into dO)^T Q - (into dV)^T K``.
"""

from __future__ import annotations

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
    lower_product,
    matrix,
    numbers,
    product,
    tokens_of,
    transposed,
    widened,
    zeros,
)
from pallas_kernels.linear.sm80.scan import (
    SCANNED,
    STAGES,
    ScanInputs,
    ScanMemory,
    run_chain,
    scan_cta,
    write_states,
)
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm80 import instructions


class ReverseInputs(NamedTuple):
    """What the scan over gradients reads.

    Attributes:
      q: bfloat16 ``[B, T, K, 128]``.
      k: the same.
      do: gradient of o, bfloat16 ``[B, T, N, 128]``.
      p: bfloat16 ``[B, N, T, 64]``.
      x: X beta, the same shape.
      vectors: of the chunks.
      last: gradient of the last state, transposed, float32 ``[B, N, 128, 128]``.
    """

    q: Any
    k: Any
    do: Any
    p: Any
    x: Any
    vectors: Any
    last: Any


class ReverseMemory(NamedTuple):
    """Shared memory; the last two are None where only the first state's gradient is computed.

    Attributes:
      q: ``[STAGES, 64, 128]``.
      k: the same.
      do: ``[STAGES, 64, 64]``.
      p: the same.
      x: the same.
      vectors: ``[STAGES, 128]``.
      states: ``[STAGES, 64 columns, 128]``, by step: dS after its chunk.
      columns: ``[STAGES, 64 columns, 64 tokens]``: dV.
    """

    q: Any
    k: Any
    do: Any
    p: Any
    x: Any
    vectors: Any
    states: Any = None
    columns: Any = None

    @classmethod
    def of(cls, stores: bool) -> ReverseMemory:
        """Descriptions."""
        wide, square = matrix(STAGES, CHUNK, HEAD_DIM), matrix(STAGES, CHUNK, CHUNK)
        handed_over = (wide, square) if stores else ()
        return cls(wide, wide, square, square, square, numbers(STAGES, SCANNED), *handed_over)

    def for_scan(self) -> ScanMemory:
        """The same memory for a scan that saves states."""
        return ScanMemory(
            self.k, self.do, self.x, self.vectors, states=self.states, columns=self.columns
        )


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
      states: gradients of the states after all chunks, or None.
      first: gradient of the first state, transposed.
      memory: shared memory.
    """
    chunks = given.vectors.shape[2]

    def chain():
        state = _chain(scale, place, given, memory)
        instructions.store(first.at[place.batch, place.head, place.columns], state)

    if dv is None:
        chain()
        return
    warpgroup = lax.axis_index(WARPGROUP_AXIS)
    pl.when(warpgroup == 0)(chain)

    @pl.when(warpgroup == 1)
    def _():
        write_states(chunks, lambda step: chunks - 1 - step, place, dv, states, memory)


def _chain(scale: float, place: Place, given: ReverseInputs, memory: ReverseMemory) -> jax.Array:
    """The gradient of the first state."""
    chunks = given.vectors.shape[2]
    b, h, key_head, _ = place

    def start(step, stage):
        n = chunks - 1 - step
        tokens = tokens_of(n)
        for source, target in (
            (given.k.at[b, tokens, key_head], memory.k),
            (given.do.at[b, tokens, h, place.values], memory.do),
            (given.p.at[b, h, tokens], memory.p),
            (given.x.at[b, h, tokens], memory.x),
            (given.q.at[b, tokens, key_head], memory.q),
            (given.vectors.at[b, h, n, pl.ds(INTO, SCANNED)], memory.vectors),
        ):
            instructions.copy(source, target.at[stage])

    def step(stage, state):
        k, vectors = memory.k.at[stage], Vectors.shared(memory.vectors.at[stage], INTO)
        do = loaded_left(transposed(memory.do.at[stage]))
        write = product(zeros(), left_operand(state), transposed(k))
        of_scores = lower_product(zeros(), do, memory.p.at[stage])
        if memory.states is not None:
            memory.states.at[stage][...] = state.astype(jnp.bfloat16)
        du = left_operand(write * vectors.columns(OUT) + of_scores * scale)
        into = vectors.columns(INTO)
        state = state * memory.vectors[stage, INTO + CHUNK - 1]
        state = product(state, left_operand(widened(do) * (into * scale)), memory.q.at[stage])
        dv = lower_product(zeros(), du, memory.x.at[stage])
        if memory.columns is not None:
            memory.columns.at[stage][...] = dv.astype(jnp.bfloat16)
        return product(state, left_operand(dv * -into), k)

    state = instructions.load(given.last.at[b, h, place.columns], FRAGMENTS.tile)
    return run_chain(chunks, start, step, state)


class _Outputs(NamedTuple):
    """What is written: of the scan over states, and of that over gradients."""

    u: Any
    states: Any
    dv: Any
    dstates: Any
    first: Any


def states(
    given: ScanInputs, gradients: ReverseInputs, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Both scans.

    Returns:
      U, the states before all chunks, dV, the gradients of the states after all chunks, and that of
      the first state.
    """
    batch, heads, chunks, _ = given.vectors.shape
    groups, ctas = heads // given.k.shape[2], heads * PARTS

    def kernel(inputs, outputs: _Outputs, memory: ReverseMemory) -> None:
        given, gradients = inputs
        index = lax.axis_index("group")

        # The longer scan's CTAs come first.
        @pl.when(index < ctas)
        def _():
            place = Place.of(index, PARTS, groups)
            reverse_cta(scale, place, gradients, *outputs[2:], memory)

        @pl.when(index >= ctas)
        def _():
            place, own = Place.of(index - ctas, PARTS, groups), memory.for_scan()
            scan_cta(Mode.STATES, scale, place, given, outputs.u, outputs.states, None, own)

    tokens = jax.ShapeDtypeStruct(given.v.shape, jnp.bfloat16)
    saved = batch, heads, chunks * HEAD_DIM, HEAD_DIM
    saved = jax.ShapeDtypeStruct(saved, jnp.bfloat16)
    first = jax.ShapeDtypeStruct(gradients.last.shape, jnp.float32)
    return tuple(
        launch(
            kernel,
            "gated_delta_rule_states",
            semantics=plgpu.LoweringSemantics.Lane,
            grid={"group": 2 * ctas, "batch": batch},
            warpgroups=2,
            inputs=(given, gradients),
            results=_Outputs(tokens, saved, tokens, saved, first),
            memory=ReverseMemory.of(stores=True),
        )
    )


def first_gradient(gradients: ReverseInputs, scale: float) -> jax.Array:
    """The gradient of the first state alone, transposed."""
    batch, heads, _, _ = gradients.vectors.shape
    groups = heads // gradients.k.shape[2]

    def kernel(gradients: ReverseInputs, first: Any, memory: ReverseMemory) -> None:
        place = Place.of(lax.axis_index("group"), PARTS, groups)
        reverse_cta(scale, place, gradients, None, None, first, memory)

    first: Any = jax.ShapeDtypeStruct(gradients.last.shape, jnp.float32)
    return launch(
        kernel,
        "gated_delta_rule_first_gradient",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"group": heads * PARTS, "batch": batch},
        warpgroups=1,
        inputs=gradients,
        results=first,
        memory=ReverseMemory.of(stores=False),
    )
