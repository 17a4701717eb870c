"""Times prompts and generated tokens on all GPUs: ``bench serve``.

The model has random weights, the prompt random tokens. Its first answer compiles the programs; the
second is timed. The ways of sharing a row must agree in the logits after the prompt; one that does
not is not a row of the table.

FLOPs of a prompt of T tokens: two for each weight and token (the output projection's for the last
one alone), and ``4 N H`` for each layer and each pair of a token and one that it sees. Bytes of a
step of decoding, on each device: its weights (of the embedding one row) and its part of the cache,
once.
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

from benchmarks.needs import need_gpus, positive
from benchmarks.train import SHAPES
from burst_jax import ShardingRules
from burst_jax.models import Decoder, DecoderConfig
from burst_jax.serving import Generator
from burst_jax.serving.sampling import Sampling

WAYS = ("zigzag", "striped", "contiguous", "tensor parallel")
# Largest relative difference of a way's logits from the first way's, in bfloat16.
_AGREE = 5e-2


class Server(Generator):
    """A generator that keeps the logits after the prompt, float32 ``[batch, V]``."""

    after_prompt: np.ndarray | None = None

    def _choose(self, sampling: Sampling, logits: jax.Array, key: jax.Array) -> jax.Array:
        if self.after_prompt is None:
            self.after_prompt = np.asarray(logits)
        return super()._choose(sampling, logits, key)


@dataclasses.dataclass
class Row:
    """What was measured of one way.

    Attributes:
      way: its name.
      first: seconds to the first token.
      step: seconds of each token after it.
      cache: GiB of the cache on each device.
      peak: GiB that a device had in use at most; None if it does not say.
    """

    way: str
    first: float
    step: float
    cache: float
    peak: float | None


def prompt_flops(config: DecoderConfig, length: int) -> float:
    """Floating-point operations of a prompt of ``length`` tokens."""
    # A training step is three times the forward pass.
    forward = config.train_flops_per_token(length) / 3 * length
    return forward - 2.0 * config.embed_dim * config.vocab_size * (length - 1)


def step_bytes(server: Generator) -> float:
    """Bytes that each device reads for a token, all slots of the cache counted."""
    weights = dict(server._steps.model.weights)
    if "head" in weights:
        del weights["embedding"]
    parts = (x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(weights))
    return sum(parts) + server.cache_bytes


def served(config: DecoderConfig, way: str, n: int, length: int, **options: Any) -> Server:
    """A server of one row, on ``n`` devices, with the options of a generator."""
    axis = "tensor" if way == "tensor parallel" else "seq"
    mesh = jax.make_mesh((n,), (axis,), axis_types=(AxisType.Auto,))
    rules = ShardingRules.of(mesh)
    layout: Any = {} if axis == "tensor" else {"layout": way}

    def decoder() -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(0), mesh=mesh, rules=rules, **layout)

    # Drawn where they lie: no device ever holds all weights.
    graphdef, shapes = nnx.split(nnx.eval_shape(decoder))
    parts = nnx.merge(graphdef, shapes).shardings(shapes)
    places = jax.tree.map(
        lambda spec: jax.NamedSharding(mesh, spec),
        parts.weight_specs(shapes),
        is_leaf=lambda leaf: isinstance(leaf, jax.P),
    )
    weights = jax.jit(lambda: nnx.state(decoder()), out_shardings=places)()
    return Server(nnx.merge(graphdef, weights), max_length=length, **options)


def measure(server: Server, way: str, prompt: np.ndarray, new: int) -> Row:
    """Generates ``new`` tokens twice, and times the second time."""
    for _ in range(2):
        times = [time.perf_counter()]
        for _ in server.generate([prompt], new):
            times.append(time.perf_counter())
    first = server.seconds_to_first_token
    assert first is not None
    steps = np.diff(times)[2:]
    found = jax.devices()[0].memory_stats() or {}
    peak = found.get("peak_bytes_in_use")
    return Row(
        way,
        first,
        statistics.median(steps.tolist()),
        server.cache_bytes / 2**30,
        None if peak is None else peak / 2**30,
    )


def run(args: argparse.Namespace) -> None:
    """Prints the table."""
    need_gpus("bench serve")
    n = len(jax.devices())
    config = dataclasses.replace(SHAPES[args.shape], param_dtype=jnp.bfloat16)
    if args.layers is not None:
        config = dataclasses.replace(config, num_layers=args.layers)
    print(f"{n} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.shape}, "
          f"{config.num_layers} layers, {jnp.dtype(config.dtype).name}")  # fmt: skip
    for length in args.lengths:
        prompt = np.random.default_rng(0).integers(0, config.vocab_size, length)
        want: np.ndarray | None = None
        for way in args.ways:
            server = served(
                config, way, n, length + args.new,
                prefill_chunk=args.prefill_chunk, split_weights=args.split_weights,
            )  # fmt: skip
            row = measure(server, way, prompt, args.new)
            got = server.after_prompt
            assert got is not None
            want = got if want is None else want
            error = np.abs(got - want).max() / np.abs(want).max()
            if not error < _AGREE:
                print(f"{length:9,} {way:16} logits differ by {error:.2g}")
                continue
            rate = prompt_flops(config, length) / row.first / n / 1e12
            read = step_bytes(server) / row.step / 1e9
            peak = "" if row.peak is None else f", {row.peak:.1f} GiB at most"
            print(
                f"{length:9,} {way:16} first token {row.first:8.3f} s ({rate:4.0f} TFLOP/s a GPU),"
                f" then {row.step * 1e3:7.2f} ms each ({read:5.0f} GB/s), cache {row.cache:.2f} GiB"
                f"{peak}",
                flush=True,
            )
            del server


def add_command(commands: Any) -> None:
    """Adds ``serve`` to the command line."""
    parser = commands.add_parser("serve", help=__doc__.splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=positive, default=[32768], help="of prompts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["zigzag"])
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama-3-8b", help="of the model"
    )
    parser.add_argument("--layers", type=positive, help="default: the shape's")
    parser.add_argument("--new", type=positive, default=32, help="tokens to generate, 4 or more")
    parser.add_argument("--prefill-chunk", type=positive, help="default: the whole prompt")
    parser.add_argument(
        "--split-weights", action="store_true", help="of the ways that share a row's tokens"
    )
    parser.set_defaults(run=run)
