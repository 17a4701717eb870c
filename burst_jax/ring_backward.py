"""The ring's backward: one side travels with its gradient behind it, the other stays."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from burst_jax.ring_config import RingConfig, bounds_by_stop, home
from burst_jax.route import cut, paste
from pallas_kernels import AttentionSpec, Implementation
from pallas_kernels.arrays import half_shape


class Block(NamedTuple):
    """What backward needs of one side: (q, dO) and (lse, delta), or K and V and nothing."""

    arrays: Any
    stats: Any
    segment_ids: jax.Array | None


def backward(
    config: RingConfig, local: Implementation, queries: Block, keys: Block, rotation: str
) -> tuple[jax.Array, jax.Array]:
    """Float32 dq ``[B, T, N, H]`` and dkv ``[2, B, S, K, H]``.

    The travelling gradient goes after its block. Two kernels: it lands while the staying side's
    runs, and the travelling side's adds to it. One kernel: it goes two stops at once, and so lands
    before the kernel that adds to it begins; there are two sums then, of even and of odd stops.

        step 0            step 1                          step 2
        stay              stay       | sum to stop 1      stay       | sum to stop 2
        travel | data     travel     | data               travel     | data

        both   | data     both       | data               both       | data
                                     | sum 0 to stop 2               | sum 1 to stop 3
    """
    spec, turn_kv = config.spec, rotation == "rotate_kv"
    route = config.route(
        half_shape(queries.arrays)[1], half_shape(keys.arrays)[1], queries_travel=not turn_kv
    )
    staying, travelling = (queries, keys) if turn_kv else (keys, queries)
    if len(route.stops) > 1 and travelling.stats is not None:
        travelling = travelling._replace(stats=jnp.stack(travelling.stats))
    stay_length, moved_length = (half_shape(x.arrays)[1] for x in (staying, travelling))
    stay_tokens = config.tokens(route, stay_length, home(route), staying.segment_ids)

    def tokens(stop, segment_ids):
        moved = config.tokens(route, moved_length, stop, segment_ids)
        return (stay_tokens, moved) if turn_kv else (moved, stay_tokens)

    bounds_at = bounds_by_stop(
        route,
        travelling.segment_ids,
        lambda stop, segment_ids: local.backward_bounds(
            spec, queries.arrays[0], keys.arrays, *tokens(stop, segment_ids)
        ),
    )
    # Traced and lowered once for all steps whose arrays are alike, not once a step.
    gradients = jax.jit(functools.partial(_gradients, local, spec, turn_kv), static_argnums=0)
    fused = local.backward_dq is None
    step_gradients = _together if fused else _apart
    # How many steps on a sum is added to. With two stops the first one's stays where it is, at
    # home.
    reach = 2 if fused or len(route.stops) == 2 else 1
    stay_sum: Any = None
    # The travelling gradient of all turns before, where the last of them ended.
    turned: Any = None
    turned_at = home(route)
    one_turn = len(route.turns) == 1
    moved: Any = None
    for turn, following in zip(route.turns, (*route.turns[1:], None), strict=True):
        # The block that begins the next turn goes there during this one, a piece a step; so does
        # the gradient from the end of the last turn to the end of this one, where it is added.
        pieces = [] if following is None else cut(travelling, len(turn))
        turned_pieces = [] if turned is None else cut(turned, max(1, len(turn) - 1))
        ahead, turned_ahead = [], []
        # Where a sum goes that no further stop of this turn adds to.
        end = home(route) if one_turn else turn[-1]
        made: Any = None
        moved = None
        for step, stop in enumerate(turn):
            # Invariant: `travelling` is what is here at `stop`; `stay_sum` is the gradient here
            # from all blocks that were here before. `made` is the travelling gradient's sum that
            # the last step added to, still there, and `moved` the one that landed in that step.
            last = step == len(turn) - 1
            tables = bounds_at(stop, travelling.segment_ids)

            def arguments(block, stop=stop, tables=tables):
                q, kv = (queries, block) if turn_kv else (block, keys)
                return (q.arrays, kv.arrays, q.stats, *tokens(stop, block.segment_ids), tables)

            if following is not None:
                ahead.append(route.move(pieces.pop(0), turn[0], following[0]))
            if turned_pieces:
                turned_ahead.append(route.move(turned_pieces.pop(0), turned_at, turn[-1]))
            landed, moved = moved, None
            if made is not None:
                place = step - 1 + reach
                moved = route.move(made, turn[step - 1], end if place >= len(turn) else turn[place])
            if reach == 1:
                landed, moved = moved, None
            onward = None if last else functools.partial(route.move, start=stop, end=turn[step + 1])
            stay_sum, made, next_block = step_gradients(
                gradients, arguments, travelling, stay_sum, landed, onward
            )
            if moved is not None or not (last and following is None):
                outer = moved, ahead, pieces, turned_ahead, turned_pieces
                next_block, outer, stay_sum, made = lax.optimization_barrier(
                    (next_block, outer, stay_sum, made)
                )
                # XLA would make one permute of all pieces, if those to come did not pass too.
                moved, ahead, pieces, turned_ahead, turned_pieces = outer
            if not last:
                travelling = next_block
        if following is not None:
            travelling = paste(ahead, travelling)
        # What is at the turn's end. Of a ring of one turn `moved` has gone home instead.
        parts = [made] if turned is None else [made, paste(turned_ahead, turned)]
        parts += [] if moved is None or one_turn else [moved]
        turned, turned_at = functools.reduce(operator.add, parts), turn[-1]
    # The gradient comes home in float32: XLA would move the caller's cast to before the last hop.
    # The other passes it too, lest the last kernel runs twice in a scan over layers (ring_forward).
    back = route.move(turned, turned_at, home(route))
    stay_sum, back = (lax.optimization_barrier(x) for x in (stay_sum, back))
    if moved is not None and one_turn:
        back = back + moved
    return (stay_sum, back) if turn_kv else (back, stay_sum)


def _gradients(
    local: Implementation,
    spec: AttentionSpec,
    turn_kv: bool,
    which: str,
    arguments: tuple,
    *sums: Any,
) -> Any:
    """The local backward by sides: of the one that "stays", that "travels", or of "both"."""
    if which == "both":
        assert local.backward is not None  # resolve(backward=True) sees to it
        stay_sum, travel_sum = sums
        dq, dkv = (stay_sum, travel_sum) if turn_kv else (travel_sum, stay_sum)
        dq, dkv = local.backward(*arguments, dq=dq, dkv=dkv, spec=spec)
        return (dq, dkv) if turn_kv else (dkv, dq)
    half = local.backward_dq if (which == "stays") == turn_kv else local.backward_dkv
    assert half is not None
    return half(*arguments, *sums, spec=spec)


def _apart(gradients, arguments, block, stay_sum, landed, send):
    """One step with two kernels: each has one permute beside it, and adds in place.

    The gradient travels beside the kernel of the side that stays. The kernel of the side that
    travels waits for it to land; beside that one the next block travels.
    """
    stay_sum = gradients("stays", arguments(block), stay_sum)
    if landed is not None:
        # The block too: free to go earlier, its permute would be merged with the gradient's.
        stay_sum, landed, block = lax.optimization_barrier((stay_sum, landed, block))
    next_block = None if send is None else send(block)
    return stay_sum, gradients("travels", arguments(block), landed), next_block


def _together(gradients, arguments, block, stay_sum, landed, send):
    """One step with one kernel, which adds to both gradients in place, and all permutes beside it.

    ``landed`` was sent a step ago.
    """
    next_block = None if send is None else send(block)
    stay_sum, made = gradients("both", arguments(block), stay_sum, landed)
    return stay_sum, made, next_block
