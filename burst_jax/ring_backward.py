"""The ring's backward: one side travels with its gradient behind it, the other stays."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from burst_jax.ring_config import RingConfig, bounds_by_stop, home
from burst_jax.route import Stop, cut, paste
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

    The travelling gradient goes after its block, from the second stop on: what the block gets at
    home stays there. Two kernels: it lands while the staying side's runs, and the travelling side's
    adds to it. One kernel: it goes two stops at once, and so lands before the kernel that adds to
    it begins; there are two sums then, of even and of odd stops. The work at home is done in two
    parts, the first beside the block's first hop, the second beside the gradient's last::

        home, part 0      step 1            step 2                        home, part 1
        stay              stay              stay     | sum to stop 2      stay    | sum goes home
        travel | data     travel   | data   travel   | data               travel

        both   | data     both     | data   both     | data               both    | sum goes home
                                            | sum 1 to stop 3
    """
    turn_kv = rotation == "rotate_kv"
    work = _Work(config, local, queries, keys, turn_kv)
    route = work.route
    sums = _Sums(None, None, None, home(route), None)
    travelling = work.travelling
    for turn, following in zip(route.turns, (*route.turns[1:], None), strict=True):
        travelling, sums = _turn(work, turn, following, travelling, sums)
    back = None
    if sums.turned is not None:
        back = route.move(sums.turned, sums.turned_at, home(route))
    stay_sum, own = work.finish_home(sums.staying, sums.own)
    # The gradient comes home in float32: XLA would move the caller's cast to before the last hop.
    # The others pass it too, lest the last kernel runs twice in a scan over layers (ring_forward).
    stay_sum, own, back = (lax.optimization_barrier(x) for x in (stay_sum, own, back))
    travelled = _add(own, back, sums.returned)
    return (stay_sum, travelled) if turn_kv else (travelled, stay_sum)


class _Sums(NamedTuple):
    """The gradients so far.

    Attributes:
      staying: of the side that stays, here.
      own: of the side that travels, what its own device made.
      turned: of the side that travels, what all turns before made, where the last of them ended.
      turned_at: the stop where that is.
      returned: of the side that travels, a sum that is at home already.
    """

    staying: Any
    own: Any
    turned: Any
    turned_at: Stop
    returned: Any


def _add(*parts: Any) -> Any:
    """The sum of those that are not None; None if all are."""
    some = [part for part in parts if part is not None]
    return functools.reduce(operator.add, some) if some else None


class _Work:
    """The local backward at the stops of a route.

    Attributes:
      route: the travelling side's.
      travelling: the block that starts on this device.
      reach: how many stops on a sum goes that a step has added to.
    """

    def __init__(
        self,
        config: RingConfig,
        local: Implementation,
        queries: Block,
        keys: Block,
        turn_kv: bool,
    ):
        q_length, kv_length = half_shape(queries.arrays)[1], half_shape(keys.arrays)[1]
        self.route = route = config.route(q_length, kv_length, queries_travel=not turn_kv)
        if len(route.stops) > 1 and not turn_kv:
            queries = queries._replace(stats=jnp.stack(queries.stats))
        staying, self.travelling = (queries, keys) if turn_kv else (keys, queries)
        stay_length, moved_length = (q_length, kv_length) if turn_kv else (kv_length, q_length)
        stay_tokens = config.tokens(route, stay_length, home(route), staying.segment_ids)

        def tokens(stop, segment_ids):
            moved = config.tokens(route, moved_length, stop, segment_ids)
            return (stay_tokens, moved) if turn_kv else (moved, stay_tokens)

        def bounds(stop, segment_ids):
            of = config.spec, queries.arrays[0], keys.arrays
            return local.backward_bounds(*of, *tokens(stop, segment_ids))

        ids = self.travelling.segment_ids
        self._bounds_at = bounds_by_stop(route, ids, bounds)
        at_home = self._bounds_at(home(route), ids)
        # Of the work at home, the parts in which it is done.
        self._parts = (at_home,)
        if local.split_backward is not None and len(route.stops) > 1:
            self._parts = local.split_backward(at_home)
        # Traced and lowered once for all steps whose arrays are alike, not once a step.
        gradients = functools.partial(_gradients, local, config.spec, turn_kv)
        self._gradients = jax.jit(gradients, static_argnums=0)
        self._tokens, self._staying, self._turn_kv = tokens, staying, turn_kv
        fused = local.backward_dq is None
        self._one_step = _together if fused else _apart
        self.reach = 2 if fused else 1

    def step(
        self,
        stop: Stop,
        block: Block,
        stay_sum: Any,
        landed: Any,
        onward: Callable[[Block], Block] | None,
    ) -> tuple[Any, Any, Any]:
        """``(stay_sum, travelling sum, next block)`` after a step; at home after its first part."""
        at_home = stop == home(self.route)
        bounds = self._parts[0] if at_home else self._bounds_at(stop, block.segment_ids)
        return self._run(stop, bounds, block, stay_sum, landed, onward)

    def finish_home(self, stay_sum: Any, own: Any) -> tuple[Any, Any]:
        """The work that the step at home left."""
        for bounds in self._parts[1:]:
            at = home(self.route), bounds, self.travelling
            stay_sum, own, _ = self._run(*at, stay_sum, own, None)
        return stay_sum, own

    def _run(self, stop, bounds, block, stay_sum, landed, onward):
        def arguments(block):
            q, kv = (self._staying, block) if self._turn_kv else (block, self._staying)
            return (q.arrays, kv.arrays, q.stats, *self._tokens(stop, block.segment_ids), bounds)

        return self._one_step(self._gradients, arguments, block, stay_sum, landed, onward)


def _turn(
    work: _Work, turn: tuple[Stop, ...], following: tuple[Stop, ...] | None,
    travelling: Block, sums: _Sums,
) -> tuple[Block, _Sums]:  # fmt: skip
    """All steps of a turn; the block that begins the following one, and the gradients so far."""
    route = work.route
    one_turn = len(route.turns) == 1
    # The block that begins the next turn goes there during this one, a piece a step; so does the
    # gradient from the end of the last turn to the end of this one, where it is added.
    pieces = [] if following is None else cut(travelling, len(turn))
    turned_pieces = [] if sums.turned is None else cut(sums.turned, max(1, len(turn) - 1))
    ahead, turned_ahead = [], []
    # Where a sum goes that no further stop of this turn adds to.
    end = home(route) if one_turn else turn[-1]
    stay_sum, own, made, moved = sums.staying, sums.own, None, None
    for step, stop in enumerate(turn):
        # Invariant: `travelling` is what is here at `stop`; `stay_sum` is the gradient here from
        # all blocks that were here before. `made` is the travelling gradient's sum that the last
        # step added to, still there, and `moved` the one that landed in that step.
        last = step == len(turn) - 1
        if following is not None:
            ahead.append(route.move(pieces.pop(0), turn[0], following[0]))
        if turned_pieces:
            turned_ahead.append(route.move(turned_pieces.pop(0), sums.turned_at, turn[-1]))
        landed, moved = moved, None
        if made is not None:
            place = step - 1 + work.reach
            moved = route.move(made, turn[step - 1], end if place >= len(turn) else turn[place])
        if work.reach == 1:
            landed, moved = moved, None
        onward = None if last else functools.partial(route.move, start=stop, end=turn[step + 1])
        stay_sum, made, next_block = work.step(stop, travelling, stay_sum, landed, onward)
        if moved is not None or not (last and following is None):
            outer = moved, ahead, pieces, turned_ahead, turned_pieces
            next_block, outer, stay_sum, made = lax.optimization_barrier(
                (next_block, outer, stay_sum, made)
            )
            # XLA would make one permute of all pieces, if those to come did not pass too.
            moved, ahead, pieces, turned_ahead, turned_pieces = outer
        if stop == home(route):
            own, made = made, None
        if not last:
            travelling = next_block
    if following is not None:
        travelling = paste(ahead, travelling)
    turned = None if sums.turned is None else paste(turned_ahead, sums.turned)
    # Of a ring of one turn `moved` has gone home, else it is at the turn's end.
    parts = (made, turned) if one_turn else (made, turned, moved)
    returned = moved if one_turn else None
    return travelling, _Sums(stay_sum, own, _add(*parts), turn[-1], returned)


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
