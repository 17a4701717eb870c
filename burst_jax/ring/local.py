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
# Most numbers in the tables of all devices: a constant of 4 MiB.
_MOST_KNOWN_NUMBERS = 2**20
# Numbers in 128 bytes. XLA passes a slice of an array to a kernel without a copy if it begins at a
# multiple of them.
_ROW = 32


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


class _Steps:
    """What kernels read at the ring steps of a pass: inputs, and tile bounds.

    Attributes:
      route: the route of the rotating side.
      splits_local: whether the local block's work is done in two halves.
    """

    def __init__(
        self,
        request: Request,
        route: Route,
        sides: tuple[Side, Side],
        inputs_of: Callable[[Any, Any], AttentionInputs],
        bounds_of: Callable[[AttentionInputs], Any],
        split: Callable[[Any, AttentionInputs], tuple[Any, Any]] | None = None,
    ):
        """``sides``: the stationary one, and this device's block of the rotating one.

        ``inputs_of`` is of both; ``bounds_of`` and ``split`` are an implementation's.
        """
        self.route, self._request, self._sides = route, request, sides
        self._inputs_of, self._bounds_of, self._split = inputs_of, bounds_of, split
        alone = len(route.offsets) == 1
        # There are no halves if the work cannot be split, or if it is done without a ring.
        self.splits_local = split is not None and not alone
        own, block = sides
        self._own = self._with_positions(route.local, own)
        self._bounds: dict[tuple[Offset, Part], Any] = {}
        self._positions: dict[Offset, Any] = {}
        inputs = inputs_of(own, block)
        if alone or block.token_arrays or inputs.shared.block_mask is not None:
            # Segment ids, KV bounds and positions given as arrays are received with their block, so
            # tables that depend on them are computed at their step. So are the tile lists of a
            # block-sparse mask: those of all steps would use too much memory.
            self._bounds[route.local, "whole"] = self._bounds_of(self.inputs(route.local, block))
            self._add_halves(self._bounds, block)
            return
        known = _known_tables(route, inputs, self._tables_of)
        if known is not None:
            *positions, bounds = known
            if positions:
                self._own = own._replace(positions=positions[0][0])
                self._positions = dict(zip(route.offsets, positions[0][1:], strict=True))
            self._bounds = dict(zip(self._calls, bounds, strict=True))
            return
        # At once they take one small kernel instead of several per step. This also saves memory:
        # XLA allocates tables that are computed step by step between the blocks, and a program for
        # 12 or more A100 then needs one more block of memory.
        offsets = jnp.asarray(np.array(route.offsets, np.int32))
        tables = jax.vmap(lambda offset: self._bounds_of(self.inputs(offset, block)))(offsets)
        for index, offset in enumerate(route.offsets):
            of_step = jax.tree.map(lambda table, i=index: table[i], tables)
            self._bounds[offset, "whole"] = of_step
        self._add_halves(self._bounds, block)

    @property
    def _calls(self) -> list[tuple[Offset, Part]]:
        """The offsets of all steps, and the parts of the local block's work."""
        halves: list[Part] = ["first", "second"] if self.splits_local else []
        whole: Part = "whole"
        return [(x, whole) for x in self.route.offsets] + [(self.route.local, x) for x in halves]

    def inputs(
        self, offset: Offset | jax.Array, block: Side, device: int | None = None
    ) -> AttentionInputs:
        """The inputs at a step, with the block that this device holds there.

        ``device``: with the positions of the device of this index, NumPy arrays.
        """
        own = self._own
        if device is not None:
            own = self._with_positions(self.route.local, self._sides[0], device)
        elif isinstance(offset, tuple) and offset in self._positions:
            block = block._replace(positions=self._positions[offset])
        return self._inputs_of(own, self._with_positions(offset, block, device))

    def bounds(self, offset: Offset, block: Side, part: Part = "whole") -> Any:
        """The tile bounds of a step, or of a part of the local block's work."""
        if (offset, part) in self._bounds:
            return self._bounds[offset, part]
        return self._bounds_of(self.inputs(offset, block))

    def _add_halves(self, bounds: dict[Any, Any], block: Side, device: int | None = None) -> None:
        """Adds the bounds of the local block's parts to those of all of its work."""
        local = self.route.local
        if self.splits_local:
            assert self._split is not None
            halves = self._split(bounds[local, "whole"], self.inputs(local, block, device))
            bounds[local, "first"], bounds[local, "second"] = halves

    def _tables_of(self, device: int) -> tuple[Any, ...]:
        """``(positions, bounds)`` that a device reads, or ``(bounds,)`` if it reads no positions.

        Positions are of the stationary side, then of the block at every step.
        """
        (own, block), route = self._sides, self.route
        bounds: dict[tuple[Offset, Part], Any] = {}
        for offset in route.offsets:
            bounds[offset, "whole"] = self._bounds_of(self.inputs(offset, block, device))
        self._add_halves(bounds, block, device)
        tables = ([bounds[call] for call in self._calls],)
        if not self._request.spec.mask.reads_positions:
            return tables
        positions = [self._with_positions(x, block, device).positions for x in route.offsets]
        return [self._with_positions(route.local, own, device).positions, *positions], *tables

    def _with_positions(
        self, offset: Offset | jax.Array, side: Any, device: int | None = None
    ) -> Any:
        """The side that this device holds at ``offset``, with the layout's positions if none.

        ``device``: with those of the block that the device of this index holds there.
        """
        if side.positions is not None:
            return side
        positions = self._request.layout_positions(self.route, side.length, offset, device)
        return side._replace(positions=positions)


class LocalForward:
    """The forward kernel, on this device's queries and the KV block that it holds.

    Attributes:
      route: the route of K and V.
      block: this device's own K and V.
    """

    def __init__(self, request: Request, implementation: Implementation, inputs: AttentionInputs):
        self.route = request.route(inputs.q_length, inputs.kv_length)
        self.block = inputs.kv
        self._steps = _Steps(
            request,
            self.route,
            (inputs.query, inputs.kv),
            lambda query, kv: AttentionInputs(query, kv, inputs.shared),
            functools.partial(implementation.forward_bounds, spec=request.spec),
        )
        # Traced and lowered once for all steps with equal shapes, not once per step.
        self._forward = jax.jit(implementation.forward, static_argnames=("spec", "out_dtype"))
        self._spec, self._dtype = request.spec, inputs.query.q.dtype

    def __call__(
        self, offset: Offset, kv: KVSide, carry: Carry | None, *, steps_left: int
    ) -> Carry:
        """``(out, lse)`` over these keys and the ``carry`` of earlier steps.

        lse is float32. out is float32, too, except in the last two steps, where it has the query's
        dtype: the last step then updates 16-bit results in place, and skips queries that attend to
        none of its keys. So out is rounded twice in rings of two or more steps.
        """
        return self._forward(
            self._steps.inputs(offset, kv),
            self._steps.bounds(offset, kv),
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
        self._rotate_kv = rotate_kv = rotation == "rotate_kv"
        lengths, spec = (inputs.q_length, inputs.kv_length), request.spec
        self.route = route = request.route(*lengths, rotates_query=not rotate_kv)
        _, self.rotating = sides = _swap(rotate_kv, inputs.query, inputs.kv)
        split = implementation.split_backward
        self._steps = steps = _Steps(
            request,
            route,
            sides,
            lambda *sides: AttentionInputs(*_swap(rotate_kv, *sides), inputs.shared),
            functools.partial(implementation.backward_bounds, spec=spec),
            None if split is None else functools.partial(split, spec=spec),
        )
        self.splits_local = steps.splits_local
        local = route.local, self.rotating
        accumulator = _dq_accumulator(
            implementation, spec, steps.inputs(*local), steps.bounds(*local), route, rotate_kv
        )
        # With one step and no Ulysses axis (which may sum gradients of copied heads) nothing is
        # added to the kernel's results. A kernel that rounds as it writes then saves a cast.
        alone = len(route.offsets) == 1 and request.ulysses_axis is None
        out_dtype = inputs.query.q.dtype if alone else None
        self._gradients = Gradients(
            implementation, spec, accumulator, out_dtype, maximum=route.maximum
        )
        self.per_head = self._gradients.per_head

    def __call__(
        self, offset: Offset, part: Part, block: Side, stationary: Any, rotating: Any
    ) -> tuple[Any, Any]:
        """The gradients of the two sides so far, with those of a ring step added.

        They are float32, or in the query's dtype where nothing is added to them later, and dQ may
        be an implementation's accumulator: :meth:`results` converts it. None starts from zero.
        """
        inputs = self._steps.inputs(offset, block)
        bounds = self._steps.bounds(offset, block, part)
        dq, dkv = _swap(self._rotate_kv, stationary, rotating)
        return _swap(self._rotate_kv, *self._gradients(inputs, bounds, dq, dkv))

    def results(self, stationary: Any, rotating: Any) -> tuple[jax.Array, Dkv]:
        """``(dq, (dk, dv))`` from the gradients of the two sides after all steps."""
        dq, dkv = _swap(self._rotate_kv, stationary, rotating)
        return self._gradients.dq(dq, self._steps.inputs(self.route.local, self.rotating)), dkv


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
    route: Route, inputs: AttentionInputs, tables_of: Callable[[int], tuple[Any, ...]]
) -> Any:
    """``tables_of`` this device, from a constant with those of every device.

    A launch that reads them replaces several that compute them; if all devices have the same ones,
    they are constants. Without positions, the first of two tables, if those are too many. None if
    tables depend on more than the layout, or if there are too many.
    """
    steps = route.size * len(route.offsets)
    scores = inputs.q_length * inputs.kv_length * steps
    if scores > _MOST_KNOWN_SCORES or steps > _MOST_KNOWN_STEPS:
        return None
    if inputs.query.token_arrays or inputs.kv.token_arrays:
        return None
    of_first = tables_of(0)
    leaves, structure = jax.tree.flatten(of_first)
    if not leaves:  # An implementation without bounds, and a mask that reads no positions.
        return of_first
    if not all(isinstance(x, np.ndarray) for x in leaves):
        return None
    if sum(x.size for x in leaves) * route.size > _MOST_KNOWN_NUMBERS:
        if len(of_first) == 1:
            return None
        return _known_tables(route, inputs, lambda device: tables_of(device)[1:])
    of_others = [jax.tree.leaves(tables_of(device)) for device in range(1, route.size)]
    packed = np.stack([_packed(of_one) for of_one in (leaves, *of_others)])
    if (packed == packed[0]).all():
        return of_first
    here = jnp.asarray(route.source(route.local), jnp.int32)
    mine = lax.dynamic_index_in_dim(jnp.asarray(packed), here, keepdims=False)
    rows = [-(-x.size // _ROW) for x in leaves]
    parts = jnp.split(mine, np.cumsum(rows)[:-1])
    unpacked = [
        part.reshape(-1)[: x.size].reshape(x.shape) for x, part in zip(leaves, parts, strict=True)
    ]
    return jax.tree.unflatten(structure, unpacked)


def _packed(tables: list[np.ndarray]) -> np.ndarray:
    """Int32 arrays one after the other, each in rows of its own: ``[rows, _ROW]``."""
    return np.concatenate([np.pad(x.reshape(-1), (0, -x.size % _ROW)) for x in tables]).reshape(
        -1, _ROW
    )


def _swap(rotate_kv: bool, first: Any, second: Any) -> tuple[Any, Any]:
    """(query's, KV's) from (stationary, rotating), and the inverse: a swap if queries rotate."""
    return (first, second) if rotate_kv else (second, first)
