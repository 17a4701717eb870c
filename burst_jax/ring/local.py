"""The local attention at each ring step: every call from the ring into ``pallas_kernels``."""

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
from burst_jax.ring.route import Offset, Route
from burst_jax.ring.schedule import Kernel, Part
from pallas_kernels import AttentionInputs, Implementation, KVSide, resolve
from pallas_kernels.inputs import Carry, PerHead, Side


def local_implementation(
    request: Request, target: Target, inputs: AttentionInputs, *, backward: bool = False
) -> Implementation:
    """The implementation of local attention on ``target`` for these shapes and dtypes."""
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
    """The inputs, with ``q_run`` and ``kv_run`` of a block-sparse mask set for their lengths."""
    blocks = inputs.shared.block_mask
    if blocks is None:
        return inputs
    q_run, kv_run = request.block_runs(inputs.q_length, inputs.kv_length)
    blocks = dataclasses.replace(blocks, q_run=q_run, kv_run=kv_run)
    return inputs._replace(shared=inputs.shared._replace(block_mask=blocks))


def _with_positions(request: Request, route: Route, offset: Offset | jax.Array, side: Any) -> Any:
    """The side that this device holds at ``offset``, with the layout's positions if it has none."""
    if side.positions is not None:
        return side
    return side._replace(positions=request.layout_positions(route, side.length, offset))


class LocalForward:
    """The forward kernel, on this device's queries and the KV block that it holds.

    Attributes:
      route: the route of K and V.
    """

    def __init__(self, request: Request, implementation: Implementation, inputs: AttentionInputs):
        self.route = route = request.route(inputs.q_length, inputs.kv_length)
        query = _with_positions(request, route, route.local, inputs.query)

        def inputs_at(offset: Offset | jax.Array, kv: KVSide) -> AttentionInputs:
            kv = _with_positions(request, route, offset, kv)
            return AttentionInputs(query, kv, inputs.shared)

        def bounds(offset: Offset | jax.Array, kv: KVSide) -> Any:
            return implementation.forward_bounds(inputs_at(offset, kv), spec=request.spec)

        per_step = inputs.shared.block_mask is not None
        self._bounds_at = _bounds_at(route, inputs.kv, bounds, per_step)
        # Traced and lowered once for all steps with equal shapes, not once per step.
        self._forward = jax.jit(implementation.forward, static_argnames=("spec", "out_dtype"))
        self._spec, self._inputs_at, self._dtype = request.spec, inputs_at, query.q.dtype

    def __call__(self, offset: Offset, kv: KVSide, carry: Carry | None, *, last: bool) -> Carry:
        """``(out, lse)`` over these keys and the ``carry`` of earlier steps, in float32.

        In the ``last`` step ``out`` has the query's dtype.
        """
        return self._forward(
            self._inputs_at(offset, kv),
            self._bounds_at(offset, kv),
            carry,
            spec=self._spec,
            out_dtype=self._dtype if last else None,
        )


class LocalBackward:
    """The backward kernels, on this device's stationary side and the rotating block that it holds.

    Attributes:
      route: the route of the rotating side.
      rotating: the local block of the rotating side.
      fused: whether one kernel computes the gradients of both sides.
      splits_local: whether the local block's work is done in two halves.
      per_head: this device's partial gradients of the per-head parameters that the request's spec
        differentiates, summed over the kernels that have run.
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
        self.route = route = request.route(*lengths, rotates_query=not rotate_kv)
        stationary, rotating = _swap(rotate_kv, inputs.query, inputs.kv)
        stationary = _with_positions(request, route, route.local, stationary)

        def inputs_at(offset: Offset | jax.Array, block: Side) -> AttentionInputs:
            block = _with_positions(request, route, offset, block)
            return AttentionInputs(*_swap(rotate_kv, stationary, block), inputs.shared)

        def bounds(offset: Offset | jax.Array, block: Side) -> Any:
            return implementation.backward_bounds(inputs_at(offset, block), spec=request.spec)

        per_step = inputs.shared.block_mask is not None
        self._bounds_at = _bounds_at(route, rotating, bounds, per_step)
        whole = self._bounds_at(route.local, rotating)
        self._local_bounds: dict[Part, Any] = {"whole": whole}
        split = implementation.split_backward
        self.splits_local = split is not None and len(route.offsets) > 1
        if split is not None and self.splits_local:
            first, second = split(whole)
            self._local_bounds |= {"first": first, "second": second}
        self.fused = implementation.backward_dq is None
        self.rotating = rotating
        self.per_head: PerHead = {}
        self._inputs_at, self._rotate_kv = inputs_at, rotate_kv
        # With one step and no Ulysses axis (which may sum gradients of copied heads) nothing is
        # added to the kernel's results. A kernel that rounds as it writes then saves a cast.
        alone = len(route.offsets) == 1 and request.ulysses_axis is None
        out_dtype = inputs.query.q.dtype if alone else None
        options: Any = {"spec": request.spec, "out_dtype": out_dtype}
        # Traced and lowered once for all steps with equal shapes, not once per step.
        gradients = functools.partial(_gradients, implementation, options, rotate_kv)
        self._gradients = jax.jit(gradients, static_argnums=0)

    def bounds(self, offset: Offset, part: Part, block: Side) -> Any:
        """The tile bounds of a ring step's kernels."""
        if offset == self.route.local:
            return self._local_bounds[part]
        return self._bounds_at(offset, block)

    def __call__(self, kernel: Kernel, offset: Offset, bounds: Any, block: Side, *sums: Any) -> Any:
        """The sums with a ring step's gradients; for "both" a pair, the stationary side's first.

        They are float32, or in the query's dtype where nothing is added to them later. A sum of
        None starts from zero.
        """
        result, per_head = self._gradients(kernel, self._inputs_at(offset, block), bounds, *sums)
        for name, part in per_head.items():
            self.per_head[name] = self.per_head[name] + part if name in self.per_head else part
        return result

    def by_side(self, stationary: Any, rotating: Any) -> tuple[Any, Any]:
        """``(dq, (dk, dv))`` from the gradients of the two sides."""
        return _swap(self._rotate_kv, stationary, rotating)


def _swap(rotate_kv: bool, first: Any, second: Any) -> tuple[Any, Any]:
    """(query's, KV's) from (stationary, rotating), and the inverse: a swap if queries rotate."""
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
    """The local backward pass in terms of the stationary and the rotating side.

    The kernel that computes dQ also computes the gradients of per-head parameters.
    """
    if kernel == "both":
        assert implementation.backward is not None  # resolve(backward=True) checks it
        dq, dkv, per_head = implementation.backward(
            inputs, bounds, *_swap(rotate_kv, *sums), **options
        )
        return _swap(rotate_kv, dq, dkv), per_head
    if (kernel == "stationary") == rotate_kv:
        assert implementation.backward_dq is not None
        return implementation.backward_dq(inputs, bounds, *sums, **options)
    assert implementation.backward_dkv is not None
    return implementation.backward_dkv(inputs, bounds, *sums, **options), {}


def _bounds_at(
    route: Route, block: Side, bounds_of: Callable[[Any, Any], Any], per_step: bool
) -> Callable[[Offset, Any], Any]:
    """``bounds_of``, or a lookup in the bounds of all ring steps, computed at once if possible.

    At once they take one small kernel instead of several per step. This also saves memory: XLA
    allocates tables that are computed step by step between the blocks, and a program for 12 or more
    A100 then needs one more block of memory. Segment ids, KV bounds and positions given as arrays
    are received with their block, so tables that depend on them are computed at their step. So are
    the tile lists of a block-sparse mask (``per_step``): those of all steps would use too much
    memory.
    """
    if per_step or block.token_arrays or len(route.offsets) == 1:
        return bounds_of
    offsets = jnp.asarray(np.array(route.offsets, np.int32))
    tables = jax.vmap(lambda offset: bounds_of(offset, block))(offsets)

    def bounds(offset: Offset, block: Side) -> Any:
        del block
        index = route.offsets.index(offset)
        return jax.tree.map(lambda table: table[index], tables)

    return bounds
