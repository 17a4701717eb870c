"""The local attention at the stops of a ring: every call from the ring into ``pallas_kernels``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.ring.request import Request
from burst_jax.ring.rotation import Rotation
from burst_jax.ring.route import Route, Stop
from burst_jax.ring.schedule import Kernel, Part
from pallas_kernels import Implementation, Operands
from pallas_kernels.elementwise import Numbering
from pallas_kernels.operands import Carry, PerHead


class Queries(NamedTuple):
    """The queries of one shard, and in the backward the arrays that travel with them.

    Attributes:
      q: ``[B, T, N, H]``.
      segment_ids: int32 ``[B, T]``, or None.
      key_starts: int32 ``[B or 1, T]``, or None: see :class:`pallas_kernels.Tokens`.
      key_ends: int32 ``[B or 1, T]``, or None.
      positions: int32 ``[1, T]``; None where they are the layout's.
      do: the gradient of out, ``[B, T, N, Hv]``; None in the forward.
      stats: float32 lse and delta, ``[2, B, N, T]``; None in the forward. They are one array, so
        that they travel by one permute.
    """

    q: jax.Array
    segment_ids: jax.Array | None = None
    key_starts: jax.Array | None = None
    key_ends: jax.Array | None = None
    positions: jax.Array | None = None
    do: jax.Array | None = None
    stats: jax.Array | None = None

    @property
    def length(self) -> int:
        """T."""
        return self.q.shape[1]

    @property
    def token_arrays(self) -> dict[str, jax.Array]:
        """What masks read of the queries, by name; positions only where there is no layout's."""
        return _given(self, ("segment_ids", "key_starts", "key_ends", "positions"))


class Keys(NamedTuple):
    """The keys and values of one shard.

    Attributes:
      k: ``[B, S, K, H]``.
      v: ``[B, S, K, Hv]``.
      segment_ids: int32 ``[B, S]``, or None.
      positions: int32 ``[1, S]``; None where they are the layout's.
    """

    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array | None = None
    positions: jax.Array | None = None

    @property
    def length(self) -> int:
        """S."""
        return self.k.shape[1]

    @property
    def token_arrays(self) -> dict[str, jax.Array]:
        """What masks read of the keys, by name; positions only where there is no layout's."""
        return _given(self, ("segment_ids", "positions"))


def _given(block: Queries | Keys, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """The arrays of these names that there are."""
    arrays = {name: getattr(block, name) for name in names}
    return {name: x for name, x in arrays.items() if x is not None}


# What travels: either side of the attention.
Block = Queries | Keys


class Shard(NamedTuple):
    """All arrays of one device.

    Attributes:
      queries: its queries.
      keys: its keys and values.
      per_head: float32 ``[N]`` each, by the name of the public argument: the numbers of each head.
      dropout_seeds: int32 ``[B, N]``, where weights are dropped.
      block_table: bool ``[N or 1, rows, columns]``, the whole table of a mask by blocks; None
        without one. Every device has all of it, and it does not travel.
      numbering: which rows of the batch and which heads these are, where functions of the caller's
        read that; else None.
    """

    queries: Queries
    keys: Keys
    per_head: PerHead
    dropout_seeds: jax.Array | None = None
    block_table: jax.Array | None = None
    numbering: Numbering | None = None


class LocalForward:
    """The forward kernel, which runs on this device's queries and on the keys that are here.

    Attributes:
      route: the way of K and V.
    """

    def __init__(self, request: Request, implementation: Implementation, shard: Shard):
        queries, keys, per_head, seeds, table, numbering = shard
        self.route = route = request.route(queries.length, keys.length)
        blocks = request.block_mask(table, queries.length, keys.length)
        q_tokens = request.tokens(route, queries.length, route.home, queries.token_arrays)

        def operands(stop: Stop | jax.Array, keys: Keys) -> Operands:
            kv_tokens = request.tokens(route, keys.length, stop, keys.token_arrays)
            arrays = queries.q, keys.k, keys.v, q_tokens, kv_tokens, per_head, seeds
            return Operands(*arrays, block_mask=blocks, numbering=numbering)

        def bounds(stop: Stop | jax.Array, block: Block) -> Any:
            assert isinstance(block, Keys)
            return implementation.forward_bounds(operands(stop, block), spec=request.spec)

        self._bounds_at = _bounds_by_stop(route, keys, bounds, blocks is not None)
        # Traced and lowered once for all steps whose arrays are alike, not once a step.
        self._forward = jax.jit(implementation.forward, static_argnames=("spec", "out_dtype"))
        self._spec, self._operands, self._dtype = request.spec, operands, queries.q.dtype

    def __call__(self, stop: Stop, keys: Keys, carry: Carry | None, *, last: bool) -> Carry:
        """``(out, lse)`` over these keys and those that ``carry`` is over already.

        Args:
          stop: where the keys are on their way.
          keys: those that are here.
          carry: ``(out, lse)`` so far, float32; None starts it.
          last: whether no keys come after these: then out has the query's dtype.
        """
        operands = self._operands(stop, keys)
        return self._forward(
            operands.replace(bounds=self._bounds_at(stop, keys)),
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
        self, request: Request, implementation: Implementation, shard: Shard, rotation: Rotation
    ):
        queries, keys, per_head, seeds, table, numbering = shard
        rotate_kv = rotation == "rotate_kv"
        lengths = queries.length, keys.length
        self.route = route = request.route(*lengths, queries_travel=not rotate_kv)
        blocks = request.block_mask(table, *lengths)
        staying: Block
        travelling: Block
        staying, travelling = _swap(rotate_kv, queries, keys)
        here = request.tokens(route, staying.length, route.home, staying.token_arrays)

        def operands(stop: Stop | jax.Array, block: Block) -> Operands:
            arriving = request.tokens(route, block.length, stop, block.token_arrays)
            queries, keys = _swap(rotate_kv, staying, block)
            tokens = _swap(rotate_kv, here, arriving)
            arrays = queries.q, keys.k, keys.v, *tokens, per_head, seeds
            of_queries = {"do": queries.do, "stats": queries.stats}
            return Operands(*arrays, blocks, **of_queries, numbering=numbering)

        def bounds(stop: Stop | jax.Array, block: Block) -> Any:
            return implementation.backward_bounds(operands(stop, block), spec=request.spec)

        self._bounds_at = _bounds_by_stop(route, travelling, bounds, blocks is not None)
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
        self._operands, self._rotate_kv = operands, rotate_kv
        # Where nothing travels, the sums are the gradients, unless heads were copied and the sums
        # of the copies are added. A kernel that rounds them as it writes them spares XLA a cast.
        alone = len(route.stops) == 1 and request.ulysses_axis is None
        out_dtype = queries.q.dtype if alone else None
        options: Any = {"spec": request.spec, "out_dtype": out_dtype}
        # Traced and lowered once for all steps whose arrays are alike, not once a step.
        gradients = functools.partial(_gradients, implementation, options, rotate_kv)
        self._gradients = jax.jit(gradients, static_argnums=0)

    def bounds(self, stop: Stop, part: Part, block: Block) -> Any:
        """The tiles that a step visits, for the kernels of that step."""
        if stop == self.route.home:
            return self._bounds_at_home[part]
        return self._bounds_at(stop, block)

    def __call__(self, kernel: Kernel, stop: Stop, bounds: Any, block: Block, *sums: Any) -> Any:
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
        operands = self._operands(stop, block).replace(bounds=bounds)
        result, per_head = self._gradients(kernel, operands, *sums)
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
    operands: Operands,
    *sums: Any,
) -> tuple[Any, PerHead]:
    """The local backward, by the sides that stay and travel instead of by queries and keys.

    The gradients of each head's numbers come from the kernel that makes dQ.
    """
    if kernel == "both":
        assert implementation.backward is not None  # resolve(backward=True) sees to it
        dq, dkv, per_head = implementation.backward(operands, *_swap(rotate_kv, *sums), **options)
        return _swap(rotate_kv, dq, dkv), per_head
    if (kernel == "stays") == rotate_kv:
        assert implementation.backward_dq is not None
        return implementation.backward_dq(operands, *sums, **options)
    assert implementation.backward_dkv is not None
    return implementation.backward_dkv(operands, *sums, **options), {}


def _bounds_by_stop(
    route: Route,
    block: Block,
    bounds_of: Callable[[Any, Block], Any],
    made_late: bool = False,
) -> Callable[[Stop, Block], Any]:
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

    def made_before(stop: Stop, block: Block) -> Any:
        del block
        index = route.stops.index(stop)
        return jax.tree.map(lambda table: table[index], tables)

    return made_before
