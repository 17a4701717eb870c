"""The local attention at each ring step, and the choice of its implementation.

A pass over gathered documents calls the implementation itself (:mod:`burst_jax.ring.gathered`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.ring.request import Request
from burst_jax.ring.rotation import Rotation
from burst_jax.ring.route import Offset, Route
from burst_jax.ring.schedule import Part
from pallas_kernels import AttentionInputs, AttentionSpec, Implementation, KVSide, resolve
from pallas_kernels.backend import Dkv, DqAccumulator
from pallas_kernels.device import Target
from pallas_kernels.inputs import Carry, PerHead, Side

# Up to so many scores of all devices and steps, 2^22 tiles of 128 x 128, and so many pairs of a
# device and a step tile bounds are computed while tracing, in less than a second.
_MOST_KNOWN_SCORES, _MOST_KNOWN_STEPS = 2**36, 256


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


def _with_positions(
    request: Request,
    route: Route,
    offset: Offset | jax.Array,
    side: Any,
    device: int | None = None,
) -> Any:
    """The side that this device holds at ``offset``, with the layout's positions if it has none.

    ``device``: with those of the block that this device holds there.
    """
    if side.positions is not None:
        return side
    positions = request.layout_positions(route, side.length, offset, device)
    return side._replace(positions=positions)


class LocalForward:
    """The forward kernel, on this device's queries and the KV block that it holds.

    Attributes:
      route: the route of K and V.
      block: this device's own K and V.
    """

    def __init__(self, request: Request, implementation: Implementation, inputs: AttentionInputs):
        self.route = route = request.route(inputs.q_length, inputs.kv_length)
        self.block = inputs.kv
        query = _with_positions(request, route, route.local, inputs.query)

        def inputs_at(
            offset: Offset | jax.Array, kv: KVSide, device: int | None = None
        ) -> AttentionInputs:
            kv = _with_positions(request, route, offset, kv, device)
            if device is None:
                return AttentionInputs(query, kv, inputs.shared)
            of_device = _with_positions(request, route, route.local, inputs.query, device)
            return AttentionInputs(of_device, kv, inputs.shared)

        def bounds(offset: Offset | jax.Array, kv: KVSide, device: int | None = None) -> Any:
            given = inputs_at(offset, kv, device)
            return implementation.forward_bounds(given, spec=request.spec)

        self._bounds_at = _bounds_at(route, inputs, inputs.kv, bounds)
        # Traced and lowered once for all steps with equal shapes, not once per step.
        self._forward = jax.jit(implementation.forward, static_argnames=("spec", "out_dtype"))
        self._spec, self._inputs_at, self._dtype = request.spec, inputs_at, query.q.dtype

    def __call__(
        self, offset: Offset, kv: KVSide, carry: Carry | None, *, steps_left: int
    ) -> Carry:
        """``(out, lse)`` over these keys and the ``carry`` of earlier steps.

        lse is float32. out is float32, too, except in the last two steps, where it has the query's
        dtype: the last step then updates 16-bit results in place, and skips queries that attend to
        none of its keys. So out is rounded twice in rings of two or more steps.
        """
        return self._forward(
            self._inputs_at(offset, kv),
            self._bounds_at(offset, kv),
            carry,
            spec=self._spec,
            out_dtype=self._dtype if steps_left < 2 else None,
        )


class LocalBackward:
    """The backward kernel, on this device's stationary side and the rotating block that it holds.

    Attributes:
      route: the route of the rotating side.
      rotating: the local block of the rotating side.
      splits_local: whether the local block's work is done in two halves.
      per_head: this device's partial gradients of the per-head parameters that the request's spec
        differentiates, summed over the steps that have run.
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
        own, rotating = _swap(rotate_kv, inputs.query, inputs.kv)
        stationary = _with_positions(request, route, route.local, own)

        def inputs_at(
            offset: Offset | jax.Array, block: Side, device: int | None = None
        ) -> AttentionInputs:
            block, side = _with_positions(request, route, offset, block, device), stationary
            if device is not None:
                side = _with_positions(request, route, route.local, own, device)
            return AttentionInputs(*_swap(rotate_kv, side, block), inputs.shared)

        def bounds(offset: Offset | jax.Array, block: Side, device: int | None = None) -> Any:
            given = inputs_at(offset, block, device)
            return implementation.backward_bounds(given, spec=request.spec)

        self._bounds_at = _bounds_at(route, inputs, rotating, bounds)
        whole = self._bounds_at(route.local, rotating)
        self._local_bounds = _bounds_of_parts(
            implementation, request.spec, whole, inputs_at(route.local, rotating),
            alone=len(route.offsets) == 1,
        )  # fmt: skip
        self.splits_local = "first" in self._local_bounds
        self.rotating = rotating
        self._inputs_at, self._rotate_kv = inputs_at, rotate_kv
        accumulator = _dq_accumulator(
            implementation, request.spec, inputs_at(route.local, rotating), whole, route, rotate_kv
        )
        # With one step and no Ulysses axis (which may sum gradients of copied heads) nothing is
        # added to the kernel's results. A kernel that rounds as it writes then saves a cast.
        alone = len(route.offsets) == 1 and request.ulysses_axis is None
        out_dtype = inputs.query.q.dtype if alone else None
        self._gradients = Gradients(
            implementation, request.spec, accumulator, out_dtype, maximum=route.maximum
        )
        self.per_head = self._gradients.per_head

    def __call__(
        self, offset: Offset, part: Part, block: Side, stationary: Any, rotating: Any
    ) -> tuple[Any, Any]:
        """The gradients of the two sides so far, with those of a ring step added.

        They are float32, or in the query's dtype where nothing is added to them later, and dQ may
        be an implementation's accumulator: :meth:`results` converts it. None starts from zero.
        """
        local = offset == self.route.local
        bounds = self._local_bounds[part] if local else self._bounds_at(offset, block)
        inputs = self._inputs_at(offset, block)
        dq, dkv = _swap(self._rotate_kv, stationary, rotating)
        return _swap(self._rotate_kv, *self._gradients(inputs, bounds, dq, dkv))

    def results(self, stationary: Any, rotating: Any) -> tuple[jax.Array, Dkv]:
        """``(dq, (dk, dv))`` from the gradients of the two sides after all steps."""
        dq, dkv = _swap(self._rotate_kv, stationary, rotating)
        return self._gradients.dq(dq, self._inputs_at(self.route.local, self.rotating)), dkv


class Gradients:
    """The backward kernel of several calls, and what they add to dQ in.

    Attributes:
      per_head: partial gradients of the per-head parameters that the spec differentiates, summed
        over the calls so far.
    """

    def __init__(
        self,
        implementation: Implementation,
        spec: AttentionSpec,
        accumulator: DqAccumulator | None,
        out_dtype: Any,
        *,
        maximum: Callable[[jax.Array], jax.Array] | None = None,
    ):
        """``maximum`` is that of :attr:`pallas_kernels.backend.DqAccumulator.zeros`."""
        self._accumulator, self._spec, self._maximum = accumulator, spec, maximum
        self.per_head: PerHead = {}
        run = implementation.backward if accumulator is None else accumulator.add
        assert run is not None  # resolve(backward=True) checks it
        # Traced and lowered once for all calls with equal shapes and kinds of bounds (whole, or one
        # of two halves), not once per call.
        self._run = jax.jit(functools.partial(run, spec=spec, out_dtype=out_dtype))

    def __call__(
        self, inputs: AttentionInputs, bounds: Any, dq: Any, dkv: Dkv | None
    ) -> tuple[Any, Dkv]:
        """``(dq, dkv)`` with this call's gradients added; :meth:`dq` converts the first."""
        dq = self.zeros(inputs, bounds) if dq is None else dq
        dq, dkv, per_head = self._run(inputs, bounds, dq, dkv)
        for name, addend in per_head.items():
            before = self.per_head.get(name)
            self.per_head[name] = addend if before is None else before + addend
        return dq, dkv

    def zeros(self, inputs: AttentionInputs, bounds: Any) -> Any:
        """What the first call adds dQ to; None if it needs nothing."""
        if self._accumulator is None:
            return None
        options = {} if self._maximum is None else {"maximum": self._maximum}
        return self._accumulator.zeros(inputs, bounds, spec=self._spec, **options)

    def dq(self, dq: Any, inputs: AttentionInputs) -> jax.Array:
        """dQ ``[B, T, N, H]`` after all calls."""
        if self._accumulator is None:
            return dq
        return self._accumulator.finish(dq, inputs, spec=self._spec)


def _bounds_of_parts(
    implementation: Implementation, spec: AttentionSpec, whole: Any, inputs: AttentionInputs,
    *, alone: bool = False,
) -> dict[Part, Any]:  # fmt: skip
    """The backward bounds of the local block's parts: whole, and first and second half.

    There are no halves if the work cannot be split, or if it is done ``alone``, without a ring.
    """
    split = implementation.split_backward
    if split is None or alone:
        return {"whole": whole}
    first, second = split(whole, inputs, spec=spec)
    return {"whole": whole, "first": first, "second": second}


def _dq_accumulator(
    implementation: Implementation,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    bounds: Any,
    route: Route,
    rotate_kv: bool,
) -> DqAccumulator | None:
    """The implementation's accumulator, if dQ is kept in it over the whole ring.

    One call has nothing to add. Partial sums of dQ that rotate are kept in it if they can be added
    up, and if that sends no more bytes than dQ itself, without a kernel's padding. Otherwise dQ is
    converted at every step.
    """
    accumulator = implementation.dq_accumulator
    if accumulator is None or len(route.offsets) == 1:
        return None
    if rotate_kv:
        return accumulator
    if not accumulator.is_additive:
        return None
    zeros = jax.eval_shape(functools.partial(accumulator.zeros, spec=spec), inputs, bounds)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(zeros))
    return accumulator if size <= inputs.query.q.size * 4 else None


def _known_tables(
    route: Route, inputs: AttentionInputs, block: Side, bounds_of: Callable[..., Any]
) -> Any:
    """The tables of all steps, of which a constant holds those of every device.

    A launch that reads them replaces several that compute them. None if they depend on more than
    the layout, or if there are too many.
    """
    steps = route.size * len(route.offsets)
    scores = inputs.q_length * inputs.kv_length * steps
    if scores > _MOST_KNOWN_SCORES or steps > _MOST_KNOWN_STEPS:
        return None
    if inputs.query.token_arrays or inputs.kv.token_arrays:
        return None
    of_one = jax.tree.leaves(bounds_of(route.local, block, 0))
    if not all(isinstance(x, np.ndarray) for x in of_one):
        return None
    here = jnp.asarray(route.source(route.local), jnp.int32)

    def of_device(device: int) -> Any:
        steps = [bounds_of(offset, block, device) for offset in route.offsets]
        return jax.tree.map(lambda *tables: np.stack(tables), *steps)

    def select(*tables: np.ndarray) -> jax.Array:
        return lax.dynamic_index_in_dim(jnp.asarray(np.stack(tables)), here, keepdims=False)

    return jax.tree.map(select, *map(of_device, range(route.size)))


def _swap(rotate_kv: bool, first: Any, second: Any) -> tuple[Any, Any]:
    """(query's, KV's) from (stationary, rotating), and the inverse: a swap if queries rotate."""
    return (first, second) if rotate_kv else (second, first)


def _bounds_at(
    route: Route, inputs: AttentionInputs, block: Side, bounds_of: Callable[..., Any]
) -> Callable[[Offset, Any], Any]:
    """``bounds_of``, or a lookup in the bounds of all ring steps, computed at once if possible.

    At once they take one small kernel instead of several per step. This also saves memory: XLA
    allocates tables that are computed step by step between the blocks, and a program for 12 or more
    A100 then needs one more block of memory. Segment ids, KV bounds and positions given as arrays
    are received with their block, so tables that depend on them are computed at their step. So are
    the tile lists of a block-sparse mask: those of all steps would use too much memory.

    Args:
      route: of the block.
      inputs: this device's.
      block: its side that rotates.
      bounds_of: ``(offset, block, device=None) -> bounds``.
    """
    is_sparse = inputs.shared.block_mask is not None
    if is_sparse or block.token_arrays or len(route.offsets) == 1:
        return bounds_of
    tables = _known_tables(route, inputs, block, bounds_of)
    if tables is None:
        offsets = jnp.asarray(np.array(route.offsets, np.int32))
        tables = jax.vmap(lambda offset: bounds_of(offset, block))(offsets)

    def bounds(offset: Offset, block: Side) -> Any:
        del block
        index = route.offsets.index(offset)
        return jax.tree.map(lambda table: table[index], tables)

    return bounds
