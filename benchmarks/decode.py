"""Benchmark of decoding: attention of a few queries over a long KV cache on one GPU.

It is bound by reading the keys and values once, so the figure is their bytes per second of a call,
the merge of the splits included. For comparison: a copy of as many bytes, which reads and writes,
and XLA's two matmuls.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.command_line import require_gpus
from burst_jax.command_line import integer
from pallas_kernels import DecodeConfig, decode_config
from pallas_kernels.decode import attend_by_kernel, attend_by_matmuls
from pallas_kernels.timing import median_time, relative_error

# Accepted relative difference from float32, with inputs and probabilities in bfloat16.
_TOLERANCE = 1e-2
# Calls per program, so that the host's launch overhead is not measured.
_CALLS = 10


def _inputs(args: argparse.Namespace, length: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(length), 3)
    shape = (args.batch, length, args.kv_heads, args.head_dim)
    query = (args.batch, args.queries, args.heads, args.head_dim)
    return (
        jax.random.normal(keys[0], query, jnp.bfloat16),
        jax.random.normal(keys[1], shape, jnp.bfloat16),
        jax.random.normal(keys[2], shape, jnp.bfloat16),
    )


@functools.partial(jax.jit, static_argnames=("kernel", "calls"))
def _attend(
    query: jax.Array, keys: jax.Array, values: jax.Array, kernel: Any, calls: int = 1
) -> jax.Array:
    """The output of the last call; each call's query depends on the previous output.

    ``kernel``: ``(config, splits)``, or None for XLA's matmuls.
    """
    batch, length = keys.shape[:2]
    slots = jnp.arange(length, dtype=jnp.int32), jnp.ones((batch, length), jnp.int32)
    ends = jnp.int32(length - 1), jnp.int32(length)
    scale = query.shape[-1] ** -0.5
    arrays = keys, values, *slots, *ends

    def attend(query: jax.Array) -> jax.Array:
        if kernel is None:
            return attend_by_matmuls(query, *arrays, scale=scale).attention(None)
        config, splits = kernel
        partial = attend_by_kernel(query, *arrays, scale=scale, config=config, splits=splits)
        return partial.attention(None)

    def again(_: Any, out: jax.Array) -> jax.Array:
        return attend(query + (1e-6 * out).astype(query.dtype))

    return lax.fori_loop(1, calls, again, attend(query))


@jax.jit
def _copy(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    return keys + 1, values + 1


def _rows(args: argparse.Namespace, length: int) -> Iterator[str]:
    """A line for every implementation and tile."""
    q, k, v = _inputs(args, length)
    size = k.nbytes + v.nbytes
    want = _attend(q.astype(jnp.float32), k, v, None)
    seconds = median_time(lambda: _copy(k, v))
    yield f"{2 * size / seconds / 1e9:6.0f} GB/s {seconds * 1e6:8.1f} us  copy, read and written"
    default = decode_config(args.queries * args.heads // args.kv_heads, *[args.head_dim] * 2)
    tiles = itertools.product(args.block_kv, args.stages, args.splits)
    kernels = [
        (dataclasses.replace(default, block_kv=block or default.block_kv,
                             stages=stages or default.stages), splits)
        for block, stages, splits in tiles
    ]  # fmt: skip
    for kernel in (None, *kernels):
        name = "XLA's matmuls" if kernel is None else _name(*kernel)
        try:
            error = relative_error(_attend(q, k, v, kernel), want)
            if not error < _TOLERANCE:
                yield f"{name}: wrong by {error:.2g}"
                continue
            run = functools.partial(_attend, q, k, v, kernel, _CALLS)
            seconds = median_time(run) / _CALLS
        except jax.errors.JaxRuntimeError as failure:
            yield f"{name}: {str(failure).splitlines()[0]}"
            continue
        yield f"{size / seconds / 1e9:6.0f} GB/s {seconds * 1e6:8.1f} us  {name}"


def _name(config: DecodeConfig, splits: int | None) -> str:
    """The tiles as words."""
    words = f"block_kv {config.block_kv} stages {config.stages}"
    return words if splits is None else f"{words} splits {splits}"


def run(args: argparse.Namespace) -> None:
    """Times all lengths and tiles."""
    require_gpus("benchmarks decode")
    for length in args.lengths:
        print(f"{length:,} keys, {args.heads} / {args.kv_heads} heads, {args.queries} queries")
        for row in _rows(args, length):
            print(f"  {row}", flush=True)


def add_command(commands: Any) -> None:
    """Adds ``decode`` to the command line."""
    parser = commands.add_parser("decode", help=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", nargs="+", type=integer(1), default=[131072], help="cache lengths"
    )
    parser.add_argument("--batch", type=integer(1), default=1)
    parser.add_argument("--queries", type=integer(1, 16), default=1, help="1 to 16")
    parser.add_argument("--heads", type=integer(1), default=32)
    parser.add_argument("--kv-heads", type=integer(1), default=8)
    parser.add_argument("--head-dim", type=integer(1), default=128)
    parser.add_argument(
        "--block-kv", nargs="+", type=integer(1), default=[None], help="keys per tile"
    )
    parser.add_argument("--stages", nargs="+", type=integer(1), default=[None])
    parser.add_argument(
        "--splits", nargs="+", type=integer(1), default=[None], help="splits of the keys"
    )
    parser.set_defaults(run=run)
