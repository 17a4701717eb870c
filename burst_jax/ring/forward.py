"""The ring's forward: K and V travel, and each device merges what it sees by log-sum-exp."""

from __future__ import annotations

import jax
from jax import lax

from burst_jax.ring.local import LocalForward
from burst_jax.ring.request import Request
from burst_jax.ring.route import Pieces
from burst_jax.ring.schedule import forward_schedule, step_name
from pallas_kernels import AttentionInputs, Implementation, vary, varying_axes
from pallas_kernels.inputs import Carry


def forward(request: Request, implementation: Implementation, inputs: AttentionInputs) -> Carry:
    """Attention of this device's queries over all keys: out in the query's dtype, lse [B, N, T].

    Runs :func:`burst_jax.ring.schedule.forward_schedule`.
    """
    kernel = LocalForward(request, implementation, inputs)
    block = inputs.kv
    route, schedule = kernel.route, forward_schedule(kernel.route)
    carry: Carry | None = None
    ahead = None  # The block that begins the next turn, on its way.
    for index, step in enumerate(schedule):
        with jax.named_scope(step_name("forward", index)):
            # Invariant: `block` is what is here at `step.stop`, and `carry` is the attention over
            # all blocks that were here before it.
            (launch,) = step.launches
            arriving = [route.move(block, send.start, send.end) for send in launch.sends]
            for send in step.sends:
                if send.piece == 0:
                    ahead = Pieces(block, send.pieces)
                assert ahead is not None
                ahead.move(route, send.start, send.end)
            carry = kernel(step.stop, block, carry, last=step is schedule[-1])
            if launch.sends or step.sends:
                # Without the barrier XLA would hoist every permute to the front, ahead of all
                # kernels, and keep every block alive. With it each permute lies beside one kernel.
                # The pieces that are yet to go pass it too: XLA would otherwise make one permute of
                # all pieces.
                pieces = None if ahead is None else ahead.arrays
                arriving, pieces, carry = lax.optimization_barrier((arriving, pieces, carry))
                if ahead is not None:
                    ahead.arrays = pieces
            if arriving:
                (block,) = arriving
            elif ahead is not None:
                block, ahead = ahead.whole(), None
    assert carry is not None
    # Without these barriers XLA writes the last kernel's results straight into what a scan over
    # layers stacks up, and runs that kernel a second time for whoever else reads them. There is one
    # for each result: XLA warns of a barrier that takes all results of a kernel together.
    out, lse = (lax.optimization_barrier(x) for x in carry)
    # Mosaic kernels' results are not marked as varying from device to device, nor may what they
    # change in place be. So they are marked here. Without it the transpose of whatever reads out
    # would sum its gradient over the ring.
    return vary((out, lse), varying_axes(inputs))
