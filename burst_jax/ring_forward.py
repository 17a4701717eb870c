"""The ring's forward: K and V travel, each device merges what it sees by log-sum-exp."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from burst_jax.ring_config import RingConfig, bounds_by_stop, home
from burst_jax.route import cut, paste
from pallas_kernels import Implementation, vary, varying_axes
from pallas_kernels.arrays import Pair, half_shape


def forward(
    config: RingConfig,
    local: Implementation,
    query: jax.Array,
    kv: Pair,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of this device's queries over all keys: out in the query's dtype, lse [B, N, T]."""
    spec = config.spec
    kv_length = half_shape(kv)[1]
    route = config.route(query.shape[1], kv_length)
    q_tokens = config.tokens(route, query.shape[1], home(route), q_segment_ids)

    def kv_tokens(stop, segment_ids):
        return config.tokens(route, kv_length, stop, segment_ids)

    bounds_at = bounds_by_stop(
        route,
        kv_segment_ids,
        lambda stop, ids: local.forward_bounds(spec, query, kv, q_tokens, kv_tokens(stop, ids)),
    )
    # Traced and lowered once for all steps whose arrays are alike, not once a step.
    attend = jax.jit(local.forward, static_argnames=("spec", "out_dtype"))
    travelling: Any = (kv, kv_segment_ids)
    carry: tuple[jax.Array, jax.Array] | None = None
    for turn, following in zip(route.turns, (*route.turns[1:], None), strict=True):
        # The block that begins the next turn goes there during this one, a piece a step.
        pieces = [] if following is None else cut(travelling, len(turn))
        ahead = []
        for step, stop in enumerate(turn):
            # Invariant: `travelling` is what is here at `stop`; `carry` is the attention over all
            # blocks that were here before it.
            last = step == len(turn) - 1
            arriving = [] if last else [route.move(travelling, stop, turn[step + 1])]
            if following is not None:
                ahead.append(route.move(pieces.pop(0), turn[0], following[0]))
            block, segment_ids = travelling
            carry = attend(
                query,
                block,
                q_tokens,
                kv_tokens(stop, segment_ids),
                bounds_at(stop, segment_ids),
                carry,
                spec=spec,
                out_dtype=query.dtype if last and following is None else None,
            )
            if arriving or ahead:
                # Without it XLA hoists every permute to the front, ahead of all compute, and keeps
                # every block alive. With it each permute lies beside one kernel.
                # Pieces that are yet to go pass it too: XLA would make one permute of them all.
                arriving, ahead, pieces, carry = lax.optimization_barrier(
                    (arriving, ahead, pieces, carry)
                )
            if arriving:
                (travelling,) = arriving
        if following is not None:
            travelling = paste(ahead, travelling)
    # Without it XLA writes the last kernel's results straight into what a scan over layers stacks
    # up, and runs that kernel a second time for whoever else reads them. One for each: XLA warns of
    # a barrier that takes a kernel's results as one.
    assert carry is not None
    carry = tuple(lax.optimization_barrier(x) for x in carry)
    # Mosaic kernels' results are not marked as varying from device to device, nor may what they
    # change in place be: so they are marked here. Without it the transpose of whatever reads out
    # would sum its gradient over the ring.
    return vary(carry, varying_axes(query, kv))
