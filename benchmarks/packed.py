"""Benchmark of rings on packed documents, one device of the ring at a time on one GPU.

Documents of a mix fill a sequence over n devices. The kernels and the tables of each device's ring
steps run as one program, with the device's own documents; nothing is sent, so communication is not
counted, nor is waiting within a ring. A balanced layout is timed with the tables of its batch and
with the search for them on the device. The share of ideal is the time of the whole sequence on one
device, divided by n and by the time of the slowest device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import burst_jax
from benchmarks.command_line import add_outputs, require_gpus, require_outputs
from benchmarks.results import save_json
from burst_jax.attention.arguments import RingArguments
from burst_jax.attention.call import make_request
from burst_jax.command_line import integer
from burst_jax.layouts import document_tables
from burst_jax.layouts.parse import parse_layout
from burst_jax.layouts.tables import MaskTables, mask_name
from burst_jax.ring.request import Request
from burst_jax.ring.route import Offset, Route
from burst_jax.ring.vjp import outputs_and_residuals, ring_backward, ring_forward, ring_inputs
from pallas_kernels import AttentionInputs, KVSide, QuerySide, SharedInputs
from pallas_kernels.device import target_of
from pallas_kernels.timing import median_time

# XLA crashes in this pass (JAX 0.11) if kernels read slices of blocks that were never sent.
_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}
_ROUNDS = 9
MIXES = ("sft", "8K each", "long mix", "one document")


def documents(mix: str, total: int, seed: int) -> list[int]:
    """Lengths of a mix's documents, which fill ``total`` tokens; the last one is cut off."""
    random, lengths = np.random.default_rng(seed), []
    while total:
        if mix == "sft":
            length = int(np.clip(random.lognormal(7.6, 1.2), 64, 131072))
        elif mix == "long mix":
            long = random.random() < 0.07
            length = int(random.integers(*((32768, 131072) if long else (512, 8192))))
        else:
            length = 8192 if mix == "8K each" else total
        lengths.append(min(length, total))
        total -= lengths[-1]
    return lengths


@dataclasses.dataclass(frozen=True, eq=False)
class _OneDevice(Route):
    """A route on which one device stands for all: it keeps what it would send.

    Attributes:
      shard: int32, the index of the device that it stands for.
      orders: int32 ``[n, 2, B, c]``, segment ids and positions of every device.
      ranks: int32 ``[n, B, z]``, the rank of every zone's tokens among those of all zones.
      received: two arrays ``[n, B, z, K, H]``, in turn what is received as K and V of all zones.
    """

    shard: Any = None
    orders: Any = None
    ranks: Any = None
    received: Any = None

    def source(self, offset: Offset | jax.Array) -> Any:
        """As on the device :attr:`shard`."""
        return jnp.remainder(self.shard - offset[0], np.int32(self.size))

    def send(self, tree: Any, start: Offset, end: Offset) -> Any:
        """The block itself, with the segment ids of the one that would be received."""
        if isinstance(tree, QuerySide | KVSide) and tree.segment_ids is not None:
            return tree._replace(segment_ids=self.orders[self.source(end), 0])
        return tree

    def gather(self, x: jax.Array) -> jax.Array:
        """What every device gathers; K and V are there already."""
        if x.dtype != jnp.int32:
            return next(self.received)
        return self.orders[..., -x.shape[-1] :] if x.ndim == 3 else self.ranks

    def scatter_sum(self, x: jax.Array) -> jax.Array:
        """This device's part."""
        return lax.optimization_barrier(x)[self.shard]

    def maximum(self, x: jax.Array) -> jax.Array:
        """This device's."""
        return x


@dataclasses.dataclass(frozen=True, eq=False)
class _OneDeviceRequest(Request):
    """A request whose routes are :class:`_OneDevice`."""

    shard: Any = None
    orders: Any = None
    ranks: Any = None
    received: Any = None

    def route(self, q_length: int, kv_length: int, *, rotates_query: bool = False) -> Route:
        """The steps of the ring."""
        route = super().route(q_length, kv_length, rotates_query=rotates_query)
        fields = {field.name: getattr(route, field.name) for field in dataclasses.fields(Route)}
        return _OneDevice(
            **fields, shard=self.shard, orders=self.orders, ranks=self.ranks, received=self.received
        )


@dataclasses.dataclass(frozen=True)
class PackedCase:
    """Sizes of one device's attention.

    Attributes:
      devices: number of devices, n.
      tokens: tokens per device.
      heads: query heads.
      kv_heads: key/value heads.
      head_dim: head dim.
      implementation: the implementation, or None.
    """

    devices: int = 8
    tokens: int = 16384
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    implementation: Any = None

    def arrays(self, length: int) -> tuple[jax.Array, ...]:
        """Random q, k, v and do, bfloat16 ``[1, length, heads, head_dim]``."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        return tuple(
            jax.random.normal(key, (1, length, count, self.head_dim), jnp.bfloat16)
            for key, count in zip(keys, heads, strict=True)
        )

    def request(self, layout: str, **fields: Any) -> Request:
        """The request of a causal ring in a layout; with ``fields`` of one device alone."""
        ring = make_request(
            RingArguments(layout=layout, is_causal=True, implementation=self.implementation),
            axis_argument="axis_name",
            axes="seq",
            size_of=lambda *_: self.devices,
            head_dim=self.head_dim,
        )
        own = {field.name: getattr(ring, field.name) for field in dataclasses.fields(Request)}
        own["query_offset"] = 0 if ring.layout.is_fixed else None
        return _OneDeviceRequest(**own, **fields)


def programs(case: PackedCase, layout: str) -> tuple[Any, Any]:
    """``(forward, forward and backward)`` of one device: of its arrays and its fields."""
    target = target_of(jnp.zeros(()))

    def prepared(arrays: tuple[jax.Array, ...], device: dict[str, Any]) -> tuple[Any, ...]:
        q, k, v, _ = arrays
        ids, order = device["orders"][device["shard"]]
        query = QuerySide(q, parse_layout(layout).given_positions(order), ids)
        shared = SharedInputs(caller=device["tables"])
        inputs = AttentionInputs(query, KVSide(k, v, query.positions, ids), shared)
        fields = device | {"received": itertools.cycle(device["received"])}
        del fields["tables"]
        request = case.request(layout, **fields)
        of_ring = ring_inputs(request, inputs)
        return request, inputs, of_ring, ring_forward(request, target, of_ring)

    def forward(arrays: tuple[jax.Array, ...], device: dict[str, Any]) -> Any:
        return prepared(arrays, device)[-1]

    def both(arrays: tuple[jax.Array, ...], device: dict[str, Any]) -> Any:
        request, inputs, of_ring, carry = prepared(arrays, device)
        (out, lse), residuals = outputs_and_residuals(request, inputs, of_ring, carry, {})
        cotangents = arrays[-1], jnp.zeros_like(lse)
        gradients = ring_backward(request, target, case.kv_heads, residuals, cotangents)
        return out, gradients

    return jax.jit(forward), jax.jit(both)


def device_fields(
    case: PackedCase, layout: str, orders: np.ndarray, device: int, *, has_tables: bool
) -> dict[str, Any]:
    """The fields of :class:`_OneDevice` on a device, with :func:`order_of`'s ``orders``.

    "tables" are the batch's tables of this device, None without.
    """
    zone = parse_layout(layout).known_zone
    # Random: products of equal numbers take less power, so the GPU would run them faster.
    received = case.devices, 1, zone, case.kv_heads, case.head_dim
    keys = jax.random.split(jax.random.key(1))
    tables = _tables(layout, orders, device) if has_tables else None
    return {
        "shard": jnp.int32(device), "tables": tables,
        "orders": jnp.asarray(orders),
        "ranks": jnp.asarray(_ranks(orders, zone)),
        "received": tuple(jax.random.normal(key, received, jnp.bfloat16) for key in keys),
    }  # fmt: skip


def _tables(layout: str, orders: np.ndarray, device: int) -> MaskTables:
    """The tables of a causal mask on one device."""
    n, _, batch, length = orders.shape
    ids, positions = np.moveaxis(orders, 0, 2).reshape(2, batch, n * length)
    tables = document_tables(layout, ids, positions, n).of_mask(mask_name(None, 0))
    own = slice(device * length, (device + 1) * length)
    return jax.tree.map(jnp.asarray, tables.with_tokens(lambda x: x[..., own]))


def whole(case: PackedCase) -> tuple[Any, Any]:
    """``(forward, forward and backward)`` of all tokens on one device: ``(q, k, v, do, ids)``."""

    def attend(ids: Any, *arrays: Any) -> Any:
        return burst_jax.local_attention(
            *arrays, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids,
            implementation=case.implementation,
        )  # fmt: skip

    def both(q: Any, k: Any, v: Any, do: Any, ids: Any) -> Any:
        out, vjp = jax.vjp(functools.partial(attend, ids), q, k, v)
        return out, vjp(do)

    return jax.jit(lambda q, k, v, do, ids: attend(ids, q, k, v)), jax.jit(both)


def order_of(case: PackedCase, layout: str, lengths: list[int]) -> tuple[str, np.ndarray]:
    """The layout's full name, and int32 ``[n, 2, 1, c]``: every device's ids and positions."""
    n, c = case.devices, case.tokens
    ids = np.zeros((1, n * c), np.int32)
    ids[0, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    fitted, order, ids = parse_layout(layout).order_of(ids, n)
    both = ids.reshape(n, 1, c), np.maximum(order, 0).reshape(n, 1, c)
    return fitted.name, np.stack(both, 1).astype(np.int32)


def measure(
    case: PackedCase, mixes: list[str], seeds: int, layouts: list[str]
) -> Iterator[dict[str, Any]]:
    """Times of every mix, seed and layout, in milliseconds; one record each."""
    total = case.devices * case.tokens
    draws = [
        (mix, seed, documents(mix, total, seed))
        for mix, seed in itertools.product(mixes, range(seeds))
        if not seed or mix in ("sft", "long mix")
    ]
    shapes = jax.eval_shape(lambda: case.arrays(case.tokens))
    any_order = np.zeros((case.devices, 2, 1, case.tokens), np.int32)
    # Each layout, without and with tables.
    ways = [
        (layout, has_tables)
        for layout in layouts
        for has_tables in ((False,) if parse_layout(layout).is_fixed else (False, True))
    ]
    names = {(order_of(case, way[0], lengths)[0], way[1]) for *_, lengths in draws for way in ways}

    def compiled(way: tuple[str, bool]) -> list[Any]:
        name, has_tables = way
        device = device_fields(case, name, any_order, 0, has_tables=has_tables)
        device = jax.eval_shape(lambda: device)
        lowered = [f.lower(shapes, device) for f in programs(case, name)]
        return [each.compile(compiler_options=_OPTIONS) for each in lowered]

    with ThreadPoolExecutor() as pool:
        made = dict(zip(names, pool.map(compiled, names), strict=True))
    arrays, long = case.arrays(case.tokens), case.arrays(total)
    of_whole = whole(case)
    for mix, seed, lengths in draws:
        ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]
        calls = [functools.partial(f, *long, ids) for f in of_whole]
        placed = [(*order_of(case, layout, lengths), has) for layout, has in ways]
        for name, orders, has in placed:
            devices = range(case.devices)
            given = [device_fields(case, name, orders, i, has_tables=has) for i in devices]
            run = made[name, has]
            calls += [functools.partial(f, arrays, each) for each in given for f in run]
        times = _times(calls).reshape(-1, len(of_whole))
        ideal, times = times[0] / case.devices, times[1:].reshape(len(ways), case.devices, -1)
        for (name, _, has), each in zip(placed, times, strict=True):
            slowest = each.max(0)
            yield {
                "mix": mix, "seed": seed, "documents": len(lengths), "longest": max(lengths),
                "layout": name, "tables": has, "ideal": ideal.tolist(), "slowest": slowest.tolist(),
                "mean": each.mean(0).tolist(), "share": (ideal / slowest).tolist(),
            }  # fmt: skip


def _ranks(orders: np.ndarray, zone: int) -> np.ndarray:
    """:attr:`_OneDevice.ranks` of :func:`order_of`'s array."""
    n, _, batch, length = orders.shape
    ids, order = np.moveaxis(orders[..., length - zone :], 1, 0).reshape(2, -1)
    ids = np.where(ids == 0, np.iinfo(np.int32).max, ids)
    return np.argsort(np.lexsort((order, ids))).astype(np.int32).reshape(n, batch, zone)


def _times(calls: list[Any]) -> np.ndarray:
    """Milliseconds of each call, the median of rounds over all of them.

    One after the other, equal devices would differ by 9 %: the GPU's clock changes meanwhile.
    """
    rounds = [[1e3 * median_time(call, 1, 0.02) for call in calls] for _ in range(_ROUNDS)]
    return np.median(rounds, 0)


def run(args: argparse.Namespace) -> None:
    """Measures, prints a table, and saves the records."""
    require_gpus("benchmarks packed")
    require_outputs(args.json)
    case = PackedCase(args.devices, args.tokens, args.heads, args.kv_heads, args.head_dim)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {case}")
    print("ms of the slowest device, forward and forward+backward; share of ideal in brackets")
    records = []
    for record in measure(case, args.mixes, args.seeds, args.layouts):
        records.append(record)
        ideal, slowest, share = (record[name] for name in ("ideal", "slowest", "share"))
        print(
            f"{record['mix']:12} {record['seed']} {record['documents']:4} documents "
            f"{record['layout']:16} {'tables' if record['tables'] else '':6} "
            f"ideal {ideal[0]:6.2f} {ideal[1]:7.2f}   "
            f"{slowest[0]:6.2f} {slowest[1]:7.2f} ({share[0]:.0%} {share[1]:.0%})",
            flush=True,
        )
    if args.json is not None:
        save_json({"case": dataclasses.asdict(case), "records": records}, args.json)


def add_command(commands: Any) -> None:
    """Adds ``packed`` to the command line."""
    parser = commands.add_parser("packed", help=__doc__.splitlines()[0], description=__doc__)
    parser.add_argument("--devices", type=integer(1), default=8, help="n (default: 8)")
    parser.add_argument("--tokens", type=integer(1), default=16384, help="per device")
    parser.add_argument("--heads", type=integer(1), default=32)
    parser.add_argument("--kv-heads", type=integer(1), default=8)
    parser.add_argument("--head-dim", type=integer(1), default=128)
    parser.add_argument("--seeds", type=integer(1), default=5, help="draws of each random mix")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    layouts = ["balanced", "zigzag", "striped:128"]
    parser.add_argument("--layouts", nargs="+", default=layouts, metavar="LAYOUT")
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)
