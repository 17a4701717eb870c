"""Drawn rings on this machine's devices, with gradients, against float32 attention in chunks.

    python tests/gpu/drawn_rings.py --implementation mosaic_sm90 --count 40
    python tests/gpu/drawn_rings.py --implementation mosaic_sm90 --next FILE  # as others do
    python tests/gpu/drawn_rings.py --implementation mosaic_sm80 --only 17

Every call is public, under ``jax.jit`` with the library's compiler options, and runs often: out and
lse must have the same bits, gradients too where ``deterministic``. On a GPU newer than Ampere,
Mosaic GPU compiles the kernels of mosaic_sm80 as it does for an A100.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import itertools
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import chunked_attention
import jax
import jax.numpy as jnp
import numpy as np
from ampere import compile_as_ampere
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from repeated import run_repeatedly
from ring_draws import Ring, Tables, draw_ring, draw_tables, order_of

import burst_jax

_RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")


def mesh_of(ring: Ring, devices: Any = None) -> Mesh:
    """The ring's mesh, over the first devices."""
    shape, names = tuple(ring.axes.values()), tuple(ring.axes)
    kinds = (AxisType.Auto,) * len(names)
    devices = jax.devices() if devices is None else devices
    return Mesh(np.reshape(devices[: np.prod(shape)], shape), names, axis_types=kinds)


def token_axes(ring: Ring) -> tuple[str, ...]:
    """Mesh axes of the sequence; Ulysses devices split a shard."""
    return tuple(name for name in ("outer", "inner", "seq", "ulysses") if name in ring.axes)


def call_of(ring: Ring, mesh: Mesh | AbstractMesh, layout: str) -> Any:
    """``f(arrays, cotangents) -> results by name``; ``layout`` is the name that the call has."""
    axes = tuple(name for name in token_axes(ring) if name != "ulysses")
    options: dict[str, Any] = {
        "mesh": mesh, "layout": layout, "implementation": ring.implementation,
        "seq_axis": axes[0] if len(axes) == 1 else axes, **ring.options,
    }  # fmt: skip
    options |= {"ulysses_axis": "ulysses"} if "ulysses" in ring.axes else {}
    options |= {"batch_axis": "data"} if "data" in ring.axes else {}

    def run(arrays: dict[str, Any], cotangents: tuple[Any, Any]) -> dict[str, Any]:
        differentiated = [n for n in ("query", "key", "value", "sink_logits") if n in arrays]
        rest = {name: x for name, x in arrays.items() if name not in differentiated}

        def attend(*given: Any) -> Any:
            named = dict(zip(differentiated, given, strict=True))
            return burst_jax.burst_attention(**named, **rest, **options, return_residual=True)

        results, vjp = jax.vjp(attend, *(arrays[name] for name in differentiated))
        return dict(zip(_RESULTS, (*results, *vjp(cotangents)), strict=False))

    return run


def tables_of_call(ring: Ring, tables: Tables) -> tuple[str, dict[str, Any]]:
    """The layout and the arguments that are tables, in its order."""
    arrays: dict[str, Any] = {}
    if tables.placements is not None:
        ids, at = (
            np.stack([getattr(p, name) for p in tables.placements])
            for name in ("segment_ids", "positions")
        )
        arrays |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
        arrays |= dict.fromkeys(("query_positions", "key_value_positions"), at)
        return tables.placements[0].layout, arrays
    if tables.segment_ids is not None:
        ids = tables.segment_ids[:, order_of(ring.layout, ring.lengths[0], ring.shards)]
        arrays |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    for name in ("query", "key"):
        lengths = getattr(tables, f"{name}_lengths")
        if lengths is not None:
            arrays[f"{'query' if name == 'query' else 'key_value'}_seq_lengths"] = lengths
    return ring.layout, arrays


def shapes_of(ring: Ring) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the floating arrays, cotangents last."""
    (t, s), (heads, kv_heads), (dim, value_dim) = ring.lengths, ring.heads, ring.head_dims
    batch, dtype = ring.batch, jnp.dtype(ring.dtype)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "query": ((batch, t, heads, dim), dtype), "key": ((batch, s, kv_heads, dim), dtype),
        "value": ((batch, s, kv_heads, value_dim), dtype),
        "do": ((batch, t, heads, value_dim), dtype), "dlse": ((batch, t, heads), jnp.float32),
    }  # fmt: skip
    return shapes | ({"sink_logits": ((heads,), jnp.float32)} if ring.sinks else {})


def spec_of(ring: Ring, name: str, ndim: int) -> P:
    """How a call's array is sharded."""
    if name == "sink_logits":
        return P()
    batch = "data" if "data" in ring.axes else None
    return P(batch) if ndim == 1 else P(batch, token_axes(ring))


def draw_arrays(ring: Ring) -> dict[str, np.ndarray]:
    """Query, key, value, cotangents and sinks in natural order."""
    rng = np.random.default_rng((ring.index, 2))
    found = {}
    for name, (shape, dtype) in shapes_of(ring).items():
        x = rng.standard_normal(shape, np.float32)
        found[name] = (x * ring.sharpness if name == "query" else x).astype(dtype)
    return found


class Ordered:
    """Permutations between natural order and that of a layout, for each side."""

    def __init__(self, ring: Ring, tables: Tables) -> None:
        self._placements = tables.placements
        self._orders = [order_of(ring.layout, n, ring.shards) for n in ring.lengths]

    def place(self, name: str, x: np.ndarray) -> np.ndarray:
        """Into the layout."""
        if name == "sink_logits":
            return x
        if self._placements is not None:
            return np.stack([p.place(row, 0) for p, row in zip(self._placements, x, strict=True)])
        return x[:, self._orders[name in ("key", "value")]]

    def restore(self, name: str, x: np.ndarray, empty: Any = 0) -> np.ndarray:
        """Back. In a balanced layout padding has no place, and must be ``empty``."""
        if name == "dsinks":
            return x
        if self._placements is None:
            back = np.empty_like(x)
            back[:, self._orders[name in ("dk", "dv")]] = x
            return back
        rows = np.empty_like(x)
        rows[...] = empty
        for row, placement, own in zip(rows, self._placements, x, strict=True):
            documents = placement.restore(own, 0)
            row[: len(documents)] = documents
            padding = own[placement.order < 0]
            expected = row[len(row) - len(padding) :]
            # A kernel computes in base 2, so a sink's lse is a rounded one.
            if not np.allclose(padding, expected, rtol=1e-6, atol=1e-6):
                raise AssertionError(f"{name} of padding is {np.unique(padding)[:4]}")
        return rows


def check(ring: Ring) -> float:
    """Runs a draw and returns its largest error, relative to what is allowed.

    Raises:
      AssertionError: two runs differ in bits that must be equal.
    """
    mesh, tables, natural = mesh_of(ring), draw_tables(ring), draw_arrays(ring)
    if tables.placements is not None and tables.segment_ids is not None:
        # Padding has no place, nor a cotangent.
        natural["dlse"] = np.where(tables.segment_ids[..., None] == 0, 0, natural["dlse"])
    layout, arrays = tables_of_call(ring, tables)
    ordered = Ordered(ring, tables)
    arrays |= {name: ordered.place(name, x) for name, x in natural.items()}
    arrays = {
        name: jax.device_put(x, NamedSharding(mesh, spec_of(ring, name, x.ndim)))
        for name, x in arrays.items()
    }
    cotangents = arrays.pop("do"), arrays.pop("dlse")
    call: Any = jax.jit(call_of(ring, mesh, layout), compiler_options=burst_jax.compiler_options())
    same = None if ring.options["deterministic"] else ("out", "lse")
    got = run_repeatedly(functools.partial(call, arrays, cotangents), same)
    del arrays, cotangents
    call.clear_cache()  # Programs differ, and stay in memory.
    # A query that attends to nothing has its sinks alone.
    empty = {"lse": natural.get("sink_logits", -np.inf)}
    got = {name: ordered.restore(name, x, empty.get(name, 0)) for name, x in got.items()}
    return compared(ring, tables, natural, got)


def lower(ring: Ring, mesh: Mesh | AbstractMesh) -> Any:
    """The program of a draw, lowered for a mesh of GPUs that need not be here."""
    layout, tables = tables_of_call(ring, draw_tables(ring))

    def shape(name: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec_of(ring, name, len(shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arrays = {name: shape(name, x.shape, x.dtype) for name, x in tables.items()}
    arrays |= {name: shape(name, *of) for name, of in shapes_of(ring).items()}
    cotangents = arrays.pop("do"), arrays.pop("dlse")
    traced = jax.jit(call_of(ring, mesh, layout)).trace(arrays, cotangents)
    return traced.lower(lowering_platforms=("cuda",))


def compared(ring: Ring, tables: Tables, natural: dict[str, Any], got: dict[str, Any]) -> float:
    """The largest error of results in natural order, relative to what is allowed."""
    options, (t, s) = ring.options, ring.lengths

    def masks_of(row: int) -> chunked_attention.Masks:
        ids, of_query, of_key = tables.segment_ids, tables.query_lengths, tables.key_lengths
        return chunked_attention.Masks.of(
            t, s, is_causal=options["is_causal"],
            segment_ids=None if ids is None else (ids[row], ids[row]),
            lengths=None
            if of_query is None or of_key is None
            else (of_query[row], of_key[row]),
            local_window_size=options.get("local_window_size", (None, None)),
            attention_chunk_size=options.get("attention_chunk_size"),
        )  # fmt: skip

    found = chunked_attention.compare(
        natural, got, [masks_of(row) for row in range(ring.batch)], dtype=ring.dtype,
        cap=options["logits_soft_cap"],
    )  # fmt: skip
    largest = found.largest()
    if not largest <= 1:
        print({name: np.round(x, 3).tolist() for name, x in found._asdict().items()})
    return largest


def take(counter: Path) -> int:
    """The next number of a file that processes share."""
    with counter.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or 0)
        file.truncate(0)
        file.write(str(number + 1))
        return number


def main(argv: list[str] | None = None) -> int:
    """Runs draws until ``--minutes`` are over; returns 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--implementation", required=True, help="of local attention")
    add("--count", type=int, default=45, help="number of draws (default: 45)")
    add("--minutes", type=float, default=float("inf"), help="after which no further one starts")
    add("--next", type=Path, help="file with the next draw's number, for many processes")
    add("--worker", type=int, default=0, help="number of this process (default: 0)")
    add("--tokens", type=int, nargs=2, default=(8192, 32768), help="least and most per device")
    add("--only", type=int, help="one draw alone")
    args = parser.parse_args(argv)
    start, largest, ran, wrong = time.perf_counter(), 0.0, 0, 0
    if args.only is not None:
        indices = iter([args.only])
    elif args.next is None:
        indices = iter(range(args.count))
    else:
        indices = itertools.takewhile(
            lambda number: number < args.count, map(take, itertools.repeat(args.next))
        )
    compile_as_ampere(args.implementation)
    # Processes compute their references on different GPUs.
    jax.config.update("jax_default_device", jax.devices()[args.worker % jax.device_count()])
    late = start + 60 * args.minutes
    while time.perf_counter() < late and (index := next(indices, None)) is not None:
        ring = draw_ring(args.implementation, index, jax.device_count(), tuple(args.tokens))
        began = time.perf_counter()
        try:
            error = check(ring)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            error = float("nan")
        right = error <= 1
        ran, wrong, largest = ran + 1, wrong + (not right), max(largest, error)
        seconds = time.perf_counter() - began
        verdict = "right" if right else "WRONG"
        print(f"{verdict}  {ring}: {error:.2f} of allowed, {seconds:.0f} s", flush=True)
        # A process that is ended has told what it found.
        print(f"figure: {json.dumps({'rings': 1, 'wrong': int(not right)})}", flush=True)
    if ran:
        print(f"figure: {json.dumps({'largest error over allowed': round(largest, 2)})}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
