"""What ``benchmarks ring`` times: attention over a sequence on several GPUs, and its parts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import burst_jax
from benchmarks.kernels import Case
from burst_jax.layouts import document_tables
from burst_jax.layouts.parse import parse_layout
from burst_jax.parallel.mesh import AxisNames, axes_size, flat_names
from burst_jax.parallel.xla_options import XlaOptions
from burst_jax.ring.rotation import RotationChoice
from burst_jax.ring.route import Route

ALONE, ALL_ALONE, ZIGZAG = "one GPU", "every GPU alone", "zigzag"
BLOCKS, STEPS = "zigzag's kernels", "zigzag, nothing sent"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One strategy to compute attention over a sequence on several GPUs.

    Attributes:
      mesh: the devices that it uses.
      attend: ``(q, k, v, *packing) -> out``, arrays in the strategy's order.
      axes: mesh axes that shard the sequence.
      layout: the layout.
      shards: number of shards of the layout.
      copies: number of copies of the whole work that run at once, on different devices.
      options: compiler options for ``jax.jit``.
      packing: segment ids and positions of packed documents, int32 ``[B, T']``, and the batch's
        document tables or None, as arguments: of constants XLA would compute what follows from
        them while it compiles.
      order: with packing, the token in each place, ``[T']``; -1 is padding.
      cotangents: the cotangents of what ``attend`` returns, of that of out.
      lowering: entered while the program is traced.
      is_part: whether this is a part of a strategy: its results are not the attention's.
    """

    mesh: Mesh
    attend: Callable[..., Any]
    axes: tuple[str, ...]
    layout: str
    shards: int
    copies: int = 1
    options: XlaOptions = dataclasses.field(default_factory=dict)
    packing: tuple[Any, ...] = ()
    order: np.ndarray | None = None
    cotangents: Callable[[jax.Array], Any] = lambda do: do
    lowering: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    is_part: bool = False

    @property
    def spec(self) -> P:
        """How q, k, v and all results are sharded."""
        return P("copies" if self.copies > 1 else None, self.axes)

    def random(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Random bfloat16 values, the same tokens in any order and on any devices."""
        by_layout = (self.layout, self.shards) if self.order is None else None
        sharding = NamedSharding(self.mesh, self.spec)
        return _random(key, self.order, shape, by_layout, self.copies, sharding)

    def natural(self, x: jax.Array, length: int) -> jax.Array:
        """``x`` in natural order, on the mesh; the last one of several copies."""
        places, by_layout = None, (self.layout, self.shards)
        if self.order is not None:
            tokens = np.flatnonzero(self.order >= 0)
            places, by_layout = tokens[np.argsort(self.order[tokens])][:length], None
        sharding = NamedSharding(self.mesh, P(None, self.axes))
        return _natural(x, places, by_layout, self.copies, sharding)

    def packing_arrays(self) -> list[Any]:
        """:attr:`packing` on the mesh."""
        if not self.packing:
            return []
        *by_token, tables = self.packing
        specs: Any = None if tables is None else tables.specs(None, self.axes)

        def put(x: np.ndarray, spec: P) -> jax.Array:
            return jax.device_put(x, NamedSharding(self.mesh, spec))

        return [*(put(x, self.spec) for x in by_token), jax.tree.map(put, tables, specs)]

    def both(self, q: Any, k: Any, v: Any, do: Any, *packing: Any) -> tuple[Any, ...]:
        """``(out, dq, dk, dv)`` of ``attend``."""
        out, vjp = jax.vjp(lambda *arrays: self.attend(*arrays, *packing), q, k, v)
        return out, *vjp(self.cotangents(do))

    # By identity: jax.jit hashes its bound methods.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


# Orders are arguments: strategies, and cases of other documents, share programs.
@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _random(
    key: jax.Array,
    order: np.ndarray | None,
    shape: tuple[int, ...],
    by_layout: tuple[str, int] | None,
    copies: int,
    sharding: NamedSharding,
) -> jax.Array:
    x: jax.Array = jax.random.normal(key, shape, jnp.bfloat16)
    if by_layout is not None:
        x = burst_jax.to_layout(x, *by_layout)
    else:
        assert order is not None
        is_token = (order >= 0)[:, None, None]
        x = jnp.where(is_token, x[:, jnp.maximum(order, 0)], jnp.zeros((), x.dtype))
    return lax.with_sharding_constraint(jnp.concatenate([x] * copies), sharding)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _natural(
    x: jax.Array,
    places: np.ndarray | None,
    by_layout: tuple[str, int] | None,
    copies: int,
    sharding: NamedSharding,
) -> jax.Array:
    x = x[-(x.shape[0] // copies) :]
    x = x[:, places] if by_layout is None else burst_jax.from_layout(x, *by_layout)
    return lax.with_sharding_constraint(x, sharding)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh of the first devices."""
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def ring(
    case: Case,
    n: int,
    layout: str = "zigzag",
    *,
    shape: tuple[int, ...] = (),
    seq_axis: AxisNames = "seq",
    ulysses_axis: str | None = None,
    backward: RotationChoice = "auto",
    peer_copies: bool | None = None,
) -> Strategy:
    """burst_attention on ``n`` devices with these arguments.

    ``shape`` has the sizes of the mesh axes in ``seq_axis`` and ``ulysses_axis``; () is one axis of
    all devices.
    """
    names = flat_names(seq_axis, ulysses_axis)
    mesh = mesh_of(shape or (n,), names)
    strategy = Strategy(
        mesh, lambda: None, names, layout, axes_size(mesh, seq_axis),
        options=burst_jax.compiler_options(peer_copies=peer_copies),
    )  # fmt: skip
    arguments: dict[str, Any] = {"mesh": mesh, "seq_axis": seq_axis, "backward": backward}
    arguments |= {"ulysses_axis": ulysses_axis, **case.options}
    return _with_attention(strategy, case, arguments)


def _with_attention(strategy: Strategy, case: Case, arguments: dict[str, Any]) -> Strategy:
    """``strategy`` with burst_attention, and the case's documents in the layout's order."""
    ids = case.segment_ids()
    if ids is None:
        attend = functools.partial(burst_jax.burst_attention, layout=strategy.layout, **arguments)
        return dataclasses.replace(strategy, attend=attend)
    layout, order, placed = parse_layout(strategy.layout).order_of(ids[:1], strategy.shards)
    by_batch = case.batch * strategy.copies, 1
    own, positions = (np.tile(x, by_batch).astype(np.int32) for x in (placed, np.maximum(order, 0)))
    tables = None
    if not layout.is_fixed:  # As make_batch returns them.
        options = case.options
        tables = document_tables(
            layout, own, positions, strategy.shards, is_causal=options["is_causal"],
            local_window_sizes=(options["local_window_size"],),
        )  # fmt: skip

    def attend_packed(q: Any, k: Any, v: Any, ids: Any, order: Any, tables: Any) -> jax.Array:
        positions = layout.given_positions(order)
        return burst_jax.burst_attention(
            q, k, v, layout=layout.name, query_segment_ids=ids, key_value_segment_ids=ids,
            query_positions=positions, key_value_positions=positions, document_tables=tables,
            **arguments,
        )  # fmt: skip

    return dataclasses.replace(
        strategy, attend=attend_packed, layout=layout.name, packing=(own, positions, tables),
        order=order[0].astype(np.int32),
    )  # fmt: skip


def cudnn(case: Case) -> Callable[..., jax.Array]:
    """cuDNN on one device's arrays."""
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **case.options)


def alone(case: Case, attend: Callable[..., jax.Array] | None = None) -> Strategy:
    """One GPU with the whole sequence, by ``attend`` or else by burst_attention."""
    strategy = ring(case, 1, "contiguous")
    return strategy if attend is None else dataclasses.replace(strategy, attend=attend)


def all_alone(case: Case, n: int) -> Strategy:
    """Every GPU computes the whole sequence on its own, all at once: the slowest one decides."""
    mesh = mesh_of((n, 1), ("copies", "seq"))
    strategy = Strategy(mesh, lambda: None, ("seq",), "contiguous", 1, copies=n)
    return _with_attention(strategy, case, {"mesh": mesh, "batch_axis": "copies", **case.options})


def blocks(case: Case, n: int) -> Strategy:
    """The kernels of a zigzag ring's steps alone, in 16 bits: causal, and all others as one block.

    Every remote step computes half of the queries with all keys, or all queries with half of them.
    """
    strategy = dataclasses.replace(ring(case, n), is_part=True)
    spec = strategy.spec

    def remote(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:, x.shape[1] // 2 :]] * (n - 1), 1)

    @functools.partial(
        jax.shard_map, mesh=strategy.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    def attend(q: Any, k: Any, v: Any) -> Any:
        own = burst_jax.local_attention(q, k, v, **case.options)
        return own, burst_jax.local_attention(remote(q), k, v)

    def cotangents(do: jax.Array) -> Any:
        return do, jax.shard_map(remote, mesh=strategy.mesh, in_specs=spec, out_specs=spec)(do)

    return dataclasses.replace(strategy, attend=attend, cotangents=cotangents)


def steps(case: Case, n: int) -> Strategy:
    """A zigzag ring's program that sends nothing: every device works on its own keys and values."""

    @contextlib.contextmanager
    def nothing_sent() -> Iterator[None]:
        jax.clear_caches()  # Traces of the ring that sends.
        with mock.patch.object(Route, "permute", lambda self, tree, targets: tree):
            yield
        jax.clear_caches()

    strategy = ring(case, n)
    # Fused, the updates of one buffer by several steps are no longer in place.
    options: XlaOptions = {**strategy.options, "xla_gpu_enable_dynamic_slice_fusion": False}
    return dataclasses.replace(strategy, lowering=nothing_sent, is_part=True, options=options)


def ulysses(case: Case, n: int) -> Strategy:
    """Ulysses: all-to-all to shards of the heads, cuDNN on the whole sequence, all-to-all back.

    Raises:
      NotImplementedError: the devices cannot share the key heads equally.
    """
    if case.kv_heads % n:
        raise NotImplementedError(f"{case.kv_heads} key heads for {n} devices")
    mesh = mesh_of((n,), ("seq",))
    all_to_all = functools.partial(lax.all_to_all, axis_name="seq", tiled=True)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=False
    )
    def attend(q, k, v):
        q, k, v = (all_to_all(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        return all_to_all(cudnn(case)(q, k, v), split_axis=1, concat_axis=2)

    return Strategy(mesh, attend, ("seq",), "contiguous", n)


def all_gather(case: Case, n: int) -> Strategy:
    """Keys and values all-gathered on every device, and cuDNN.

    Raises:
      NotImplementedError: the case is causal.
    """
    if case.is_causal:
        raise NotImplementedError("cuDNN through JAX has no offset of the first query")
    mesh = mesh_of((n,), ("seq",))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=False
    )
    def attend(q, k, v):
        k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        return cudnn(case)(q, k, v)

    return Strategy(mesh, attend, ("seq",), "contiguous", n)


def strategies(case: Case, n: int) -> dict[str, Callable[[], Strategy]]:
    """Constructors of the strategies by name; they raise for an unsupported case."""

    def by_two(what: str, shape: tuple[int, int], **options: Any) -> Strategy:
        if n % 2 or n < 4:
            raise NotImplementedError(f"{n} devices cannot form a {what}")
        return ring(case, n, shape=shape, **options)

    return {
        ALONE: lambda: alone(case),
        ALL_ALONE: lambda: all_alone(case, n),
        BLOCKS: lambda: blocks(case, n),
        STEPS: lambda: steps(case, n),
        "one GPU, cuDNN": lambda: alone(case, cudnn(case)),
        ZIGZAG: lambda: ring(case, n),
        "zigzag, rotate_kv": lambda: ring(case, n, backward="rotate_kv"),
        "zigzag, rotate_query": lambda: ring(case, n, backward="rotate_query"),
        "zigzag, NCCL": lambda: ring(case, n, peer_copies=False),
        "balanced": lambda: ring(case, n, "balanced"),
        "striped": lambda: ring(case, n, "striped"),
        "striped:128": lambda: ring(case, n, "striped:128"),
        "contiguous": lambda: ring(case, n, "contiguous"),
        "two-level ring": lambda: by_two(
            "ring of two levels", (2, n // 2), seq_axis=("outer", "inner")
        ),
        "ring + Ulysses of 2": lambda: by_two(
            "ring of pairs", (n // 2, 2), ulysses_axis="heads"
        ),
        "Ulysses": lambda: ring(
            case, n, "contiguous", seq_axis=None, ulysses_axis="heads"
        ),
        "all-gather, cuDNN": lambda: all_gather(case, n),
        "Ulysses, cuDNN": lambda: ulysses(case, n),
    }  # fmt: skip
