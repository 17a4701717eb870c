"""The ring's forward pass: K and V rotate, and each device merges partial results by lse."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from burst_jax.ring.local import LocalForward
from burst_jax.ring.request import Request
from burst_jax.ring.route import ChunkedSend
from burst_jax.ring.schedule import forward_schedule, step_name
from pallas_kernels import AttentionInputs, Implementation, vary, varying_axes
from pallas_kernels.inputs import Carry


def forward(request: Request, implementation: Implementation, inputs: AttentionInputs) -> Carry:
    """Attention of this device's queries over all keys: out in the query's dtype, lse [B, N, T].

    Runs :func:`burst_jax.ring.schedule.forward_schedule`.
    """
    kernel = LocalForward(request, implementation, inputs)
    block = kernel.block
    route, schedule = kernel.route, forward_schedule(kernel.route)
    carry: Any = None
    outer = None  # The block that starts the next pass, while it is sent in chunks.
    for index, step in enumerate(schedule):
        with jax.named_scope(step_name("forward", index)):
            # Invariant: `block` is at `step.offset`, and `carry` is the attention over the blocks
            # of all earlier steps.
            arriving = None
            for send in step.sends:
                if not send.is_outer:
                    arriving = route.send(block, send.start, send.end)
                    continue
                if send.chunk == 0:
                    outer = ChunkedSend(block, send.chunks)
                assert outer is not None
                outer.send(route, send.start, send.end)
            left = len(schedule) - 1 - index
            carry = kernel(step.offset, block, carry, steps_left=left)
            if step.sends:
                # Without the barrier XLA hoists every permute ahead of all kernels and keeps every
                # block alive. With it each permute overlaps with one kernel. The unsent chunks pass
                # it too: XLA would otherwise combine the permutes of all chunks.
                chunks = None if outer is None else outer.arrays
                arriving, chunks, carry = lax.optimization_barrier((arriving, chunks, carry))
                if outer is not None:
                    outer.arrays = chunks
            if arriving is not None:
                block = arriving
            elif outer is not None:
                block, outer = outer.received(), None
    assert carry is not None
    # Without these barriers XLA writes the last kernel's results directly into the arrays that a
    # scan over layers stacks, and runs that kernel again for their other readers. One per result:
    # XLA warns of a barrier over all results of a kernel.
    out, lse = (lax.optimization_barrier(x) for x in carry)
    # Mosaic kernels do not mark their results as varying over mesh axes. Unmarked, the transpose of
    # whatever reads out would sum its gradient over the ring.
    return vary((out, lse), varying_axes(inputs))
