"""The local attention at the stops of a ring: every call from the ring into ``pallas_kernels``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.parallel.target import Target
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import Rotation
from burst_jax.ring.route import Route, Stop
from burst_jax.ring.schedule import Kernel, Part
from pallas_kernels import AttentionInputs, Implementation, KVSide, resolve
from pallas_kernels.inputs import Carry, PerHead, Side


def local_implementation(
    request: Request, target: Target, inputs: AttentionInputs, *, backward: bool = False
) -> Implementation:
    """The local attention that runs on ``target`` for inputs of these shapes and dtypes."""
    return resolve(
        request.implementation,
        platform=target.platform,
        compute_capability=target.compute_capability,
        inputs=inputs,
        backward=backward,
        deterministic=request.deterministic,
        spec=request.spec,
    )


def with_block_runs(request: Request, inputs: AttentionInputs) -> AttentionInputs:
    """The inputs, with the runs of their block-sparse mask in shards of these lengths."""
    blocks = inputs.shared.block_mask
    if blocks is None:
        return inputs
    q_run, kv_run = request.block_runs(inputs.q_length, inputs.kv_length)
    blocks = dataclasses.replace(blocks, q_run=q_run, kv_run=kv_run)
    return inputs._replace(shared=inputs.shared._replace(block_mask=blocks))


def _positioned(request: Request, route: Route, stop: Stop | jax.Array, side: Any) -> Any:
    """The side that is here at ``stop``, with the layout's positions if it has none of its own."""
    if side.positions is not None:
        return side
    return side._replace(positions=request.layout_positions(route, side.length, stop))


class LocalForward:
    """The forward kernel, which runs on this device's queries and on the keys that are here.

    Attributes:
      route: the way of K and V.
    """

    def __init__(self, request: Request, implementation: Implementation, inputs: AttentionInputs):
        self.route = route = request.route(inputs.q_length, inputs.kv_length)
        query = _positioned(request, route, route.home, inputs.query)

        def inputs_at(stop: Stop | jax.Array, kv: KVSide) -> AttentionInputs:
            kv = _positioned(request, route, stop, kv)
            return AttentionInputs(query, kv, inputs.shared)

        def bounds(stop: Stop | jax.Array, kv: KVSide) -> Any:
            return implementation.forward_bounds(inputs_at(stop, kv), spec=request.spec)

        made_late = inputs.shared.block_mask is not None
        self._bounds_at = _bounds_by_stop(route, inputs.kv, bounds, made_late)
        # Traced and lowered once for all steps whose arrays are alike, not once a step.
        self._forward = jax.jit(implementation.forward, static_argnames=("spec", "out_dtype"))
        self._spec, self._inputs_at, self._dtype = request.spec, inputs_at, query.q.dtype

    def __call__(self, stop: Stop, kv: KVSide, carry: Carry | None, *, last: bool) -> Carry:
        """``(out, lse)`` over these keys and those that ``carry`` is over already.

        Args:
          stop: where the keys are on their way.
          kv: those that are here.
          carry: ``(out, lse)`` so far, float32; None starts it.
          last: whether no keys come after these: then out has the query's dtype.
        """
        return self._forward(
            self._inputs_at(stop, kv),
            self._bounds_at(stop, kv),
            carry,
            spec=self._spec,
            out_dtype=self._dtype if last else None,
        )


class LocalBackward:
    """The backward kernels.

    They run on what this device has of the side that stays, and on the block that is here of the
    side that travels.

    Attributes:
      route: the way of the travelling side.
      travelling: the block that starts on this device.
      fused: whether one kernel makes the gradients of both sides.
      cuts_home: whether the work at home is done in two parts.
      per_head: this device's part of the gradients of the numbers of each head, from all kernels
        that ran; of those that the request's spec asks for.
    """

    def __init__(
        self,
        request: Request,
        implementation: Implementation,
        inputs: AttentionInputs,
        rotation: Rotation,
    ):
        rotate_kv = rotation == "rotate_kv"
        lengths = inputs.q_length, inputs.kv_length
        self.route = route = request.route(*lengths, queries_travel=not rotate_kv)
        staying, travelling = _swap(rotate_kv, inputs.query, inputs.kv)
        staying = _positioned(request, route, route.home, staying)

        def inputs_at(stop: Stop | jax.Array, block: Side) -> AttentionInputs:
            block = _positioned(request, route, stop, block)
            return AttentionInputs(*_swap(rotate_kv, staying, block), inputs.shared)

        def bounds(stop: Stop | jax.Array, block: Side) -> Any:
            return implementation.backward_bounds(inputs_at(stop, block), spec=request.spec)

        made_late = inputs.shared.block_mask is not None
        self._bounds_at = _bounds_by_stop(route, travelling, bounds, made_late)
        at_home = self._bounds_at(route.home, travelling)
        self._bounds_at_home: dict[Part, Any] = {"whole": at_home}
        split = implementation.split_backward
        self.cuts_home = split is not None and len(route.stops) > 1
        if split is not None and self.cuts_home:
            first, second = split(at_home)
            self._bounds_at_home |= {"first": first, "second": second}
        self.fused = implementation.backward_dq is None
        self.travelling = travelling
        self.per_head: PerHead = {}
        self._inputs_at, self._rotate_kv = inputs_at, rotate_kv
        # Where nothing travels, the sums are the gradients, unless heads were copied and the sums
        # of the copies are added. A kernel that rounds them as it writes them spares XLA a cast.
        alone = len(route.stops) == 1 and request.ulysses_axis is None
        out_dtype = inputs.query.q.dtype if alone else None
        options: Any = {"spec": request.spec, "out_dtype": out_dtype}
        # Traced and lowered once for all steps whose arrays are alike, not once a step.
        gradients = functools.partial(_gradients, implementation, options, rotate_kv)
        self._gradients = jax.jit(gradients, static_argnums=0)

    def bounds(self, stop: Stop, part: Part, block: Side) -> Any:
        """The tiles that a step visits, for the kernels of that step."""
        if stop == self.route.home:
            return self._bounds_at_home[part]
        return self._bounds_at(stop, block)

    def __call__(self, kernel: Kernel, stop: Stop, bounds: Any, block: Side, *sums: Any) -> Any:
        """Runs a kernel of the backward.

        Args:
          kernel: "stays", "travels" or "both": of which side it makes the gradient.
          stop: where the block is on its way.
          bounds: :meth:`bounds` of this step.
          block: what is here of the travelling side.
          *sums: the float32 gradients that it adds to, of the staying side before the travelling
            side's; None starts from zero.

        Returns:
          The sums with this step's gradients; a pair of them for "both". Float32, or in the dtype
          of the queries where nothing will be added to them.
        """
        result, per_head = self._gradients(kernel, self._inputs_at(stop, block), bounds, *sums)
        for name, part in per_head.items():
            self.per_head[name] = self.per_head[name] + part if name in self.per_head else part
        return result

    def by_side(self, staying: Any, travelling: Any) -> tuple[Any, Any]:
        """``(the queries', the keys')`` of two gradients."""
        return _swap(self._rotate_kv, staying, travelling)


def _swap(rotate_kv: bool, first: Any, second: Any) -> tuple[Any, Any]:
    """(queries', keys') from (staying, travelling), and the other way: a swap if queries travel."""
    return (first, second) if rotate_kv else (second, first)


def _gradients(
    implementation: Implementation,
    options: dict[str, Any],
    rotate_kv: bool,
    kernel: Kernel,
    inputs: AttentionInputs,
    bounds: Any,
    *sums: Any,
) -> tuple[Any, PerHead]:
    """The local backward, by the sides that stay and travel instead of by queries and keys.

    The gradients of each head's numbers come from the kernel that makes dQ.
    """
    if kernel == "both":
        assert implementation.backward is not None  # resolve(backward=True) sees to it
        dq, dkv, per_head = implementation.backward(
            inputs, bounds, *_swap(rotate_kv, *sums), **options
        )
        return _swap(rotate_kv, dq, dkv), per_head
    if (kernel == "stays") == rotate_kv:
        assert implementation.backward_dq is not None
        return implementation.backward_dq(inputs, bounds, *sums, **options)
    assert implementation.backward_dkv is not None
    return implementation.backward_dkv(inputs, bounds, *sums, **options), {}


def _bounds_by_stop(
    route: Route,
    block: Side,
    bounds_of: Callable[[Any, Any], Any],
    made_late: bool,
) -> Callable[[Stop, Any], Any]:
    """``bounds_of(stop, block) -> bounds``, made once for all stops where that is possible.

    Tables that depend on positions and on the side that stays are made for all stops at once, by
    one small kernel instead of several per step. It saves memory, too: tables that are made step by
    step lie between the blocks, and a program for 12 or more A100 then needs one block of memory
    more. Segment ids, ranges of keys and positions of the caller's arrive with their block, so
    tables that depend on them are made when the block has landed. So are lists of tiles, which a
    mask by blocks needs: those of all stops would take much memory.

    Args:
      route: the way of the travelling side.
      block: the block that starts here; others have the same arrays.
      bounds_of: reads the block's shapes and token arrays.
      made_late: make them step by step in any case.
    """
    if made_late or block.token_arrays or len(route.stops) == 1:
        return bounds_of
    stops = jnp.asarray(np.array(route.stops, np.int32))
    tables = jax.vmap(lambda stop: bounds_of(stop, block))(stops)

    def made_before(stop: Stop, block: Side) -> Any:
        del block
        index = route.stops.index(stop)
        return jax.tree.map(lambda table: table[index], tables)

    return made_before
