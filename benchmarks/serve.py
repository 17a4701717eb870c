"""Benchmark of serving on all GPUs: prefill and decoding.

The model has random weights, the prompt random tokens. The first answer compiles the programs; the
second is timed. The logits after the prompt must agree between the strategies; one that differs is
left out.

FLOPs of a prompt of T tokens: two per weight and token (of the output projection for the last token
only), and ``4 N H`` per layer and unmasked pair of tokens. Bytes of a decoding step, per device:
its weights (one row of the embedding) and its shard of the cache, once.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from benchmarks.command_line import require_gpus
from benchmarks.train import SHAPES
from burst_jax import ShardingRules
from burst_jax.command_line import integer
from burst_jax.models import Decoder, DecoderConfig
from burst_jax.serving import Generator
from burst_jax.serving.sampling import Sampling

STRATEGIES = ("zigzag", "striped", "contiguous", "tensor parallel")
# Accepted relative difference of a strategy's logits from the first one's, in bfloat16.
_TOLERANCE = 5e-2


class Server(Generator):
    """A generator that records the logits after the prompt, float32 ``[batch, V]``."""

    after_prompt: np.ndarray | None = None

    def _choose(self, sampling: Sampling, logits: jax.Array, key: jax.Array) -> jax.Array:
        if self.after_prompt is None:
            self.after_prompt = np.asarray(logits)
        return super()._choose(sampling, logits, key)


@dataclasses.dataclass
class ServingTimes:
    """The measurement of one strategy.

    Attributes:
      strategy: its name.
      first: seconds to the first token.
      step: seconds per further token.
      cache: GiB of the cache on each device.
      peak: peak GiB in use on a device; None if it does not report that.
    """

    strategy: str
    first: float
    step: float
    cache: float
    peak: float | None


def prompt_flops(config: DecoderConfig, length: int) -> float:
    """FLOPs of a prompt of ``length`` tokens."""
    # A training step is three times the forward pass.
    forward = config.train_flops_per_token(length) / 3 * length
    return forward - 2.0 * config.embed_dim * config.vocab_size * (length - 1)


def step_bytes(server: Generator) -> float:
    """Bytes that each device reads per token, all slots of the cache included."""
    weights = dict(server._steps.model.weights)
    if "head" in weights:
        del weights["embedding"]
    parts = (x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(weights))
    return sum(parts) + server.cache_bytes


def served(config: DecoderConfig, strategy: str, n: int, length: int, **options: Any) -> Server:
    """A server with batch size 1 on ``n`` devices, with the options of a generator."""
    axis = "tensor" if strategy == "tensor parallel" else "seq"
    mesh = jax.make_mesh((n,), (axis,), axis_types=(AxisType.Auto,))
    rules = ShardingRules.of(mesh)
    layout: Any = {} if axis == "tensor" else {"layout": strategy}

    def decoder() -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(0), mesh=mesh, rules=rules, **layout)

    # Initialized sharded: no device ever holds all weights.
    graphdef, shapes = nnx.split(nnx.eval_shape(decoder))
    shardings = nnx.merge(graphdef, shapes).shardings(shapes)
    places = jax.tree.map(
        lambda spec: jax.NamedSharding(mesh, spec),
        shardings.weight_specs(shapes),
        is_leaf=lambda leaf: isinstance(leaf, jax.P),
    )
    weights = jax.jit(lambda: nnx.state(decoder()), out_shardings=places)()
    return Server(nnx.merge(graphdef, weights), max_length=length, **options)


def measure(server: Server, strategy: str, prompt: np.ndarray, new: int) -> ServingTimes:
    """Generates ``new`` tokens twice, and times the second run."""
    for _ in range(2):
        times = [time.perf_counter()]
        for _ in server.generate([prompt], new):
            times.append(time.perf_counter())
    first = server.seconds_to_first_token
    assert first is not None
    steps = np.diff(times)[2:]
    found = jax.devices()[0].memory_stats() or {}
    peak = found.get("peak_bytes_in_use")
    return ServingTimes(
        strategy,
        first,
        statistics.median(steps.tolist()),
        server.cache_bytes / 2**30,
        None if peak is None else peak / 2**30,
    )


def run(args: argparse.Namespace) -> None:
    """Prints the table."""
    require_gpus("benchmarks serve")
    n = len(jax.devices())
    config = dataclasses.replace(SHAPES[args.shape], param_dtype=jnp.bfloat16)
    if args.layers is not None:
        config = dataclasses.replace(config, num_layers=args.layers)
    print(f"{n} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.shape}, "
          f"{config.num_layers} layers, {jnp.dtype(config.dtype).name}")  # fmt: skip
    for length in args.lengths:
        prompt = np.random.default_rng(0).integers(0, config.vocab_size, length)
        want: np.ndarray | None = None
        for strategy in args.strategies:
            server = served(
                config, strategy, n, length + args.new,
                prefill_chunk=args.prefill_chunk, split_weights=args.split_weights,
            )  # fmt: skip
            row = measure(server, strategy, prompt, args.new)
            got = server.after_prompt
            assert got is not None
            want = got if want is None else want
            error = np.abs(got - want).max() / np.abs(want).max()
            if not error < _TOLERANCE:
                print(f"{length:9,} {strategy:16} logits differ by {error:.2g}")
                continue
            rate = prompt_flops(config, length) / row.first / n / 1e12
            read = step_bytes(server) / row.step / 1e9
            peak = "" if row.peak is None else f", peak {row.peak:.1f} GiB"
            print(
                f"{length:9,} {strategy:16} first token {row.first:8.3f} s "
                f"({rate:4.0f} TFLOP/s per GPU), then {row.step * 1e3:7.2f} ms each "
                f"({read:5.0f} GB/s), cache {row.cache:.2f} GiB{peak}",
                flush=True,
            )
            del server


def add_command(commands: Any) -> None:
    """Adds ``serve`` to the command line."""
    parser = commands.add_parser("serve", help=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", nargs="+", type=integer(1), default=[32768], help="prompt lengths"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["zigzag"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b", help="model")
    parser.add_argument("--layers", type=integer(1), help="default: all of the model's")
    parser.add_argument("--new", type=integer(1), default=32, help="tokens to generate, 4 or more")
    parser.add_argument("--prefill-chunk", type=integer(1), help="default: the whole prompt")
    parser.add_argument(
        "--split-weights", action="store_true", help="shard weights over the sequence axis"
    )
    parser.set_defaults(run=run)
