"""Benchmark of a decoding step of a model on one GPU, from a full cache.

The model has random weights, the cache random keys and values, and each step random tokens, one per
sequence. Bytes of a step: the attention's weights, the weights of the experts that are hit, or of
the dense MLP, the output projection, and the filled slots of the cache, each read once. Experts
that are hit are counted in further steps, which are not timed. For comparison: a copy, which reads
and writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import require_gpus
from benchmarks.serve import Server, served
from benchmarks.train import SHAPES
from burst_jax.command_line import integer
from burst_jax.models import DecoderConfig, MixtureOfExperts
from burst_jax.serving.cache import Cache, FillState, SlotMetadata
from pallas_kernels.timing import median_time

# Rounds before those that are timed. The first ones after compiling are slower; why is not known.
_WARM_UP, _ROUNDS = 20, 20
_COPIED = 2**29


class _Counted(MixtureOfExperts):
    """Experts that report how many of them have tokens."""

    hit: ClassVar[list[int]] = []

    def with_sums(self, x: jax.Array, present: Any, *, keeps_products: bool) -> Any:
        out, sums = super().with_sums(x, present, keeps_products=keeps_products)
        jax.debug.callback(lambda counts: self.hit.append(int((counts > 0).sum())), sums.counts)
        return out, sums


def fill(server: Server, length: int) -> None:
    """Fills the cache with ``length`` random tokens per sequence, for :func:`steps`."""

    @jax.jit
    def normal(key: jax.Array, like: jax.Array) -> jax.Array:
        return jax.random.normal(key, like.shape, like.dtype)

    def slots(empty: SlotMetadata) -> SlotMetadata:
        batch, capacity = empty.present.shape
        index = jnp.arange(capacity, dtype=jnp.int32)
        present = jnp.broadcast_to((index < length).astype(jnp.int32), (batch, capacity))
        return SlotMetadata(jnp.where(index < length, index, empty.cache_positions), present)

    cache = server._cache
    assert cache is not None
    arrays, structure = jax.tree.flatten(cache.layers)
    drawn = [normal(jax.random.key(i), x) for i, x in enumerate(arrays)]
    layers = jax.tree.unflatten(structure, drawn)
    server._cache = Cache(layers, tuple(map(slots, cache.slots)), cache.lengths)


def rewind(server: Server, length: int) -> None:
    """Lets the next tokens replace those after the first ``length``."""
    cache = server._cache
    assert cache is not None
    server._cache = dataclasses.replace(cache, lengths=jnp.full_like(cache.lengths, length))
    server._filled = FillState(length, length)
    server._lengths[:] = length


def steps(server: Server, length: int, tokens: list[jax.Array]) -> float:
    """Seconds per step after ``length`` tokens, one for each of ``tokens``, int32 ``[batch]``."""
    rewind(server, length)
    running = np.ones(server.batch, bool)
    start = time.perf_counter()
    # Steps finish in order.
    jax.block_until_ready([server._decode(row, running) for row in tokens][-1])
    return (time.perf_counter() - start) / len(tokens)


def step_bytes(server: Server, length: int) -> tuple[float, float]:
    """``(bytes, of each expert)`` that a step reads, the latter from the weights of all layers."""
    weights = dict(server._steps.model.weights)
    config = server._steps.model.config
    if "head" in weights:
        del weights["embedding"]
    slot = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    size, of_experts = float(config.num_layers * server.batch * length * slot), 0.0
    for leaf in jax.tree.leaves(weights):
        if config.experts is not None and leaf.shape[0] == config.experts.count:
            of_experts += leaf.nbytes
        else:
            size += leaf.nbytes
    return size, of_experts / (1 if config.experts is None else config.experts.count)


def copy_rate() -> float:
    """Bytes per second, read and written, of a copy."""
    x, copy = jnp.arange(_COPIED // 4, dtype=jnp.int32), jax.jit(lambda x: x + 1)
    return 2 * _COPIED / median_time(lambda: copy(x))


def experts_hit(config: DecoderConfig, batch: int, length: int, tokens: list[jax.Array]) -> float:
    """The mean number of experts that have tokens, per layer, in the given steps."""
    if config.experts is None:
        return 0.0
    if batch == 1:
        return config.experts.per_token
    _Counted.hit.clear()
    counted = dataclasses.replace(config, feed_forward=_Counted)
    server = served(counted, "zigzag", 1, length + len(tokens), batch=batch)
    fill(server, length)
    steps(server, length, tokens)
    jax.effects_barrier()
    return statistics.mean(_Counted.hit)


def run(args: argparse.Namespace) -> None:
    """Prints the table."""
    require_gpus("benchmarks decode-step")
    config = dataclasses.replace(SHAPES[args.shape], param_dtype=jnp.bfloat16)
    if args.layers is not None:
        config = dataclasses.replace(config, num_layers=args.layers)
    rate = copy_rate()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.shape}, "
          f"{config.num_layers} layers, a copy {rate / 1e9:,.0f} GB/s", flush=True)  # fmt: skip
    for batch in args.batches:
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (args.steps, batch))
        tokens = list(jnp.asarray(tokens, jnp.int32))
        server = served(config, "zigzag", 1, args.length + args.steps, batch=batch)
        fill(server, args.length)
        rounds = [steps(server, args.length, tokens) for _ in range(_WARM_UP + _ROUNDS)]
        second = statistics.median(rounds[_WARM_UP:])
        size, of_expert = step_bytes(server, args.length)
        del server
        hit = experts_hit(config, batch, args.length, tokens)
        size += hit * of_expert
        print(
            f"batch {batch:3}  {second * 1e3:7.3f} ms  {size / 1e9:6.2f} GB  "
            f"{size / second / 1e9:5.0f} GB/s  {size / second / rate:4.0%} of a copy, "
            f"{hit:.1f} experts hit",
            flush=True,
        )


def add_command(commands: Any) -> None:
    """Adds ``decode-step`` to the command line."""
    parser = commands.add_parser("decode-step", help=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b-layers")
    parser.add_argument("--layers", type=integer(1), help="default: all of the model's")
    parser.add_argument("--length", type=integer(1), default=32768, help="tokens in the cache")
    parser.add_argument("--batches", nargs="+", type=integer(1), default=[1, 8, 32])
    parser.add_argument("--steps", type=integer(1), default=20, help="steps per round")
    parser.set_defaults(run=run)
