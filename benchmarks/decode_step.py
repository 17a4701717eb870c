"""Benchmark of a decoding step of a model on one GPU, from a full cache.

The model has random weights, the cache random keys and values, and each step random tokens, one per
sequence. Bytes of a step: the weights of attention or linear attention, the weights of the experts
that are hit, or of the dense MLP, the output projection, and the filled slots of the cache, each
read once; the states of linear attention, read and written. Experts that are hit are counted in
further steps, which are not timed. For comparison: a copy, which reads and writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import add_outputs, require_gpus, require_outputs
from benchmarks.results import save_json
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


class StepBytes(NamedTuple):
    """Bytes of a decoding step.

    Attributes:
      weights: all that every step reads.
      expert: weights of one expert in all layers; after :meth:`with_experts` of those that are hit.
      cache: filled slots of keys and values.
      states: of linear attention with the inputs of the convolutions, read and written.
    """

    weights: float
    expert: float
    cache: float
    states: float

    def with_experts(self, hit: float) -> StepBytes:
        """With ``hit`` experts in each layer."""
        return self._replace(expert=hit * self.expert)

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self)

    def __str__(self) -> str:
        """MB of each."""
        sizes = (f"{name} {size / 1e6:.1f}" for name, size in self._asdict().items())
        return f"{', '.join(sizes)} MB"


def step_bytes(server: Server, length: int) -> StepBytes:
    """The bytes of a step after ``length`` tokens, with one expert in each layer."""
    steps = server._steps
    weights = dict(steps.model.weights)
    if "head" in weights:
        del weights["embedding"]
    config = steps.model.config
    experts = None if config.experts is None else config.experts.count
    fixed = of_experts = cache = states = 0.0
    for leaf in jax.tree.leaves(weights):
        if leaf.ndim == 3 and leaf.shape[0] == experts:
            of_experts += leaf.nbytes
        else:
            fixed += leaf.nbytes
    for index, layer in enumerate(steps._layer_shapes):
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in layer)
        if index in steps.capacity_of:
            cache += size * length / steps.capacities[steps.capacity_of[index]].slots
        else:
            states += 2 * size
    return StepBytes(fixed, of_experts / (experts or 1), cache, states)


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


def expected_hits(config: DecoderConfig, batch: int) -> float:
    """The expected number of experts that have tokens, if each is as likely as any other."""
    if config.experts is None:
        return 0.0
    missed = 1 - config.experts.per_token / config.experts.count
    return config.experts.count * (1 - missed**batch)


def run(args: argparse.Namespace) -> None:
    """Prints the table and saves it."""
    require_gpus("benchmarks decode-step")
    require_outputs(args.json)
    config = dataclasses.replace(SHAPES[args.shape], param_dtype=jnp.bfloat16)
    if args.layers is not None:
        config = dataclasses.replace(config, num_layers=args.layers)
    rate = copy_rate()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.shape}, "
          f"{config.num_layers} layers, a copy {rate / 1e9:,.0f} GB/s", flush=True)  # fmt: skip
    record: dict[str, Any] = {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "shape": args.shape,
        "layers": config.num_layers, "length": args.length, "copy": rate, "rows": [],
    }  # fmt: skip
    for batch in args.batches:
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (args.steps, batch))
        tokens = list(jnp.asarray(tokens, jnp.int32))
        server = served(config, "zigzag", 1, args.length + args.steps, batch=batch)
        fill(server, args.length)
        rounds = [steps(server, args.length, tokens) for _ in range(_WARM_UP + _ROUNDS)]
        second = statistics.median(rounds[_WARM_UP:])
        size = step_bytes(server, args.length)
        del server
        if args.uniform:
            hit = expected_hits(config, batch)
        else:
            hit = experts_hit(config, batch, args.length, tokens)
        size = size.with_experts(hit)
        row = {
            "batch": batch, "ms": 1e3 * second, "bytes": size._asdict(), "experts_hit": hit,
            "share": size.total / second / rate, "rounds_ms": [1e3 * x for x in rounds],
        }  # fmt: skip
        print(
            f"batch {batch:3}  {second * 1e3:7.3f} ms  {size.total / 1e9:6.2f} GB  "
            f"{size.total / second / 1e9:5.0f} GB/s  {row['share']:4.0%} of a copy, "
            f"{hit:.1f} experts hit; {size}",
            flush=True,
        )
        record["rows"].append(row)
        if args.json is not None:
            save_json(record, args.json)


def add_command(commands: Any) -> None:
    """Adds ``decode-step`` to the command line."""
    parser = commands.add_parser("decode-step", help=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b-layers")
    parser.add_argument("--layers", type=integer(1), help="default: all of the model's")
    parser.add_argument("--length", type=integer(1), default=32768, help="tokens in the cache")
    parser.add_argument("--batches", nargs="+", type=integer(1), default=[1, 8, 32])
    parser.add_argument("--steps", type=integer(1), default=20, help="steps per round")
    parser.add_argument(
        "--uniform", action="store_true",
        help="do not count the experts that are hit, which takes another program: assume the "
        "expected number of uniform routing",
    )  # fmt: skip
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)
