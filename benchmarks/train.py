"""Benchmark of a training step of a language model on all GPUs.

The model has layers of a 7B model's shape, or of Qwen3 30B-A3B's with its experts or as large a
dense MLP as a token uses, or a group of Qwen3-Next's four layers, also so, or all of Llama 3 8B's;
the batch is one long sequence.
The strategies: sequence parallelism in every layout (contiguous is plain Ring Attention), and
tensor parallelism by heads with the same kernels, where every device has the whole sequence and a
shard of the heads, the MLP and the vocabulary. With sequence parallelism, weights and optimizer
states are replicated or sharded; with sharded ones, a mixture of experts can also keep its experts
where they are and exchange tokens. Every strategy takes the first step from the same weights; one
whose loss or gradient norm differs from the first strategy's is left out.

FLOPs of a step of T tokens, for MFU (``DecoderConfig.train_flops_per_token``)::

    T (6 weights + layers with softmax attention * 6 N (H + Hv) T / 2
                 + layers with linear attention * 18 N H Hv)

The weights are those that multiply each token: of a mixture the router, the shared expert and the
experts that a token uses, and the head. Attention is causal; of linear attention the recurrence
counts, not the larger work of its chunks. Recomputation does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import layer_times
from benchmarks.command_line import add_outputs, require_gpus, require_outputs
from benchmarks.communication import Communication, profile_communication
from benchmarks.results import gib, save_json
from burst_jax.command_line import Unusable, integer
from burst_jax.layouts.parse import layout_option, parse_layout
from burst_jax.models import DecoderConfig, LayerKind, MixtureOfExperts
from burst_jax.models.experts import Experts
from burst_jax.models.feed_forward import GatedMLP
from burst_jax.models.remat import Remat
from burst_jax.parallel.peak import peak_flops
from burst_jax.parallel.rules import ShardingRules
from burst_jax.plan.presets import config_of
from burst_jax.training import (
    Optimizer,
    init_train_state,
    make_batch,
    make_optimizer,
    make_train_step,
)
from burst_jax.training.adam import Moments

_LAYERS = DecoderConfig(
    vocab_size=32000, num_layers=4, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128,
    mlp_dim=14336, qk_norm=False, dtype=jnp.bfloat16,
)  # fmt: skip
_EXPERTS = DecoderConfig(
    vocab_size=32000, num_layers=4, embed_dim=2048, num_heads=32, num_kv_heads=4, head_dim=128,
    mlp_dim=768, qk_norm=True, dtype=jnp.bfloat16, feed_forward=MixtureOfExperts,
    experts=Experts(128, 8),
)  # fmt: skip
# A group of layers: three of Gated DeltaNet, one of gated softmax attention.
_HYBRID = dataclasses.replace(config_of("qwen-3-next-80b-a3b"), vocab_size=32000, num_layers=4)
_DENSE_HYBRID = dataclasses.replace(_HYBRID, mlp_dim=11 * 512, feed_forward=GatedMLP, experts=None)
SHAPES = {
    "7b-layers": _LAYERS,
    "llama-3-8b": dataclasses.replace(
        _LAYERS, vocab_size=128256, num_layers=32, rope_theta=500000.0, norm_epsilon=1e-5
    ),
    "qwen3-30b-a3b-layers": _EXPERTS,
    # As many features per token in one MLP: what the experts' routing and ragged products cost.
    "qwen3-30b-a3b-dense": dataclasses.replace(
        _EXPERTS, mlp_dim=8 * 768, feed_forward=GatedMLP, experts=None
    ),
    "qwen3-next-layers": _HYBRID,
    # Ten experts and the shared one in one MLP; and the same with softmax attention in all layers.
    "qwen3-next-dense": _DENSE_HYBRID,
    "qwen3-next-softmax": dataclasses.replace(
        _DENSE_HYBRID, layer_pattern=(LayerKind(),), delta_net=None
    ),
}
STRATEGIES = ("zigzag", "striped", "contiguous", "tensor parallel")
WEIGHTS = ("replicated", "sharded", "exchanged")
# Accepted relative differences of the first metrics from the first strategy's: each rounds its own
# sums. The loss's is small, because on uniformly random tokens even unrelated weights have losses
# that differ by a thousandth.
_TOLERANCE = {"loss": 1e-4, "grad_norm": 5e-3}


class TrainingStep:
    """A model, its optimizer state and its batch on the devices; calling it takes a step.

    Args:
      config: the model's config.
      strategy: one of ``STRATEGIES``.
      weights: one of ``WEIGHTS``: replicated, but for what tensor parallelism shards; sharded over
        the devices of the sequence; or so with expert parallelism over the same devices.
      length: sequence length.
      n: number of devices.
      optimizer: the optimizer.
    """

    def __init__(
        self,
        config: DecoderConfig,
        strategy: str,
        weights: str,
        length: int,
        n: int,
        optimizer: Optimizer,
    ) -> None:
        by_heads = strategy == "tensor parallel"
        shape, kinds = (1, n) if by_heads else (n, 1), (AxisType.Auto,) * 2
        devices = jax.devices()[:n]
        mesh = jax.make_mesh(shape, ("seq", "heads"), axis_types=kinds, devices=devices)
        expert = "seq" if weights == "exchanged" else None
        rules = ShardingRules(data=None, fsdp=None, seq="seq", tensor="heads", expert=expert)
        options: dict[str, Any] = {} if by_heads else {"layout": strategy}
        if by_heads or weights != "replicated":
            options["rules"] = rules
        graphdef, params, state = init_train_state(config, optimizer, mesh, 0, **options)
        rows = np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))
        batch = make_batch(rows, layout=layout_option(options), num_shards=mesh.shape["seq"])
        self._batch = jax.device_put(batch, NamedSharding(mesh, P(None, "seq")))
        step = make_train_step(graphdef, optimizer)
        self._program = step.trace(params, state, self._batch).lower().compile()
        self._states = params, state

    def __call__(self) -> dict[str, float]:
        """Takes a step and waits for it.

        Returns:
          "loss" and "grad_norm" of the weights before the step.
        """
        params, state, metrics = self._program(*self._states, self._batch)
        self._states = params, state
        jax.block_until_ready(self._states)
        return {name: float(metrics[name]) for name in _TOLERANCE}

    @property
    def gib(self) -> float:
        """GiB per device of a step, weights, optimizer state and batch included."""
        return gib(self._program)


def measure(
    config: DecoderConfig,
    strategy: str,
    weights: str,
    length: int,
    n: int,
    *,
    optimizer: Optimizer,
    steps: int,
    profile: bool = True,
) -> dict[str, Any]:
    """Times one strategy.

    Args:
      config: the model's config.
      strategy: one of ``STRATEGIES``.
      weights: one of ``WEIGHTS``.
      length: sequence length.
      n: number of devices.
      optimizer: the optimizer.
      steps: number of timed steps, after a first one that is not timed.
      profile: whether one more step is profiled.

    Returns:
      A row of the table: "strategy", "weights", "length", "seconds" of the median step, "loss" and
      "grad_norm" of the first step, "gib" per device, and the seconds of "communication" between
      GPUs per step, and of the "exposed" part of it (None without GPUs or without a profile).

    Raises:
      ValueError: the strategy cannot shard the length, or the model, over the devices.
    """
    if strategy != "tensor parallel":
        # Other lengths would be padded, and timed with the padding.
        parse_layout(strategy).check_length(length, n)
    step = TrainingStep(config, strategy, weights, length, n, optimizer)
    first, seconds = step(), []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    median = float(np.median(seconds))
    spent = profile_communication(step) if profile else Communication()
    return {
        "strategy": strategy, "weights": weights, "length": length, "seconds": median, **first,
        "gib": step.gib, "communication": spent.total, "exposed": spent.exposed,
    }  # fmt: skip


def add_command(commands: Any) -> None:
    """Adds ``train`` to the command line."""
    parser = commands.add_parser("train", help=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", nargs="+", type=integer(1), default=[65536, 131072, 262144], metavar="TOKENS"
    )
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument(
        "--weights", nargs="+", choices=WEIGHTS, default=["replicated"],
        help="weights and optimizer state: replicated; sharded over the sequence axis; or so with "
        "tokens exchanged over it instead of experts gathered",
    )  # fmt: skip
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="7b-layers", help="default: %(default)s"
    )
    parser.add_argument("--layers", type=integer(1), help="default: those of the shape")
    parser.add_argument(
        "--remat", choices=get_args(Remat), default=DecoderConfig.remat,
        help="what a layer saves for the backward pass",
    )  # fmt: skip
    parser.add_argument(
        "--remat-layers", type=integer(1), help="selective layers, the others have remat attention"
    )
    parser.add_argument("--mlp-chunks", type=integer(1), default=DecoderConfig.mlp_chunks)
    parser.add_argument(
        "--moment-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of AdamW's moments",
    )
    parser.add_argument(
        "--moments", choices=get_args(Moments), default="device", help="where AdamW's moments are"
    )
    parser.add_argument(
        "--steps", type=integer(1), default=3, help="timed steps, after one that is not"
    )
    parser.add_argument(
        "--no-profile", dest="profile", action="store_false",
        help="no profiled step, and no columns of communication",
    )  # fmt: skip
    parser.add_argument(
        "--parts", action="store_true",
        help="also time the layers of each mixer by themselves, forward and backward, in the "
        "layout of the first strategy",
    )  # fmt: skip
    add_outputs(parser, png=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the table and saves it."""
    if "exchanged" in args.weights and SHAPES[args.shape].experts is None:
        shapes = ", ".join(name for name, config in SHAPES.items() if config.experts is not None)
        raise Unusable(f"--weights exchanged needs a --shape with experts: {shapes}")
    if args.parts and (args.strategies[0] == "tensor parallel" or args.remat_layers is not None):
        raise Unusable(
            "--parts times layers of one remat in the layout of the first strategy: name a layout "
            "first in --strategies, like zigzag, and leave --remat-layers out"
        )
    require_gpus("benchmarks train")
    require_outputs(args.json)
    devices = jax.devices()
    n, kind = len(devices), devices[0].device_kind
    config = SHAPES[args.shape]
    config = dataclasses.replace(
        config, num_layers=args.layers or config.num_layers, remat=args.remat,
        remat_layers=args.remat_layers, mlp_chunks=args.mlp_chunks,
    )  # fmt: skip
    optimizer = make_optimizer(1e-4, 100, moment_dtype=args.moment_dtype, moments=args.moments)
    peak = peak_flops(kind)
    heads = f"{config.num_heads}/{config.num_kv_heads} heads x {config.head_dim}"
    print(
        f"{n} x {kind}, jax {jax.__version__}; batch 1; {config.num_layers} layers of "
        f"{config.embed_dim} features, {heads}, vocabulary {config.vocab_size:,}, "
        f"{jnp.dtype(config.dtype).name}; remat {_remat(config)}, MLP in {config.mlp_chunks} "
        f"chunks; AdamW's moments {args.moment_dtype} on the {args.moments}\n"
        "MFU: of the data sheet's peak, without recomputation; GiB per device; comm: ms of "
        "communication per GPU; exposed: the part that nothing overlaps\n"
    )
    heading = (
        f"{'length':>9}  {'strategy':20}{'ms':>9}{'tokens/s':>11}{'MFU':>7}{'GiB':>8}{'loss':>9}"
    )
    heading += f"{'comm':>9}{'exposed':>9}"
    print(heading + "\n" + "-" * len(heading))
    rows: list[dict[str, Any]] = []
    record = {
        "device": kind, "devices": n, "jax": jax.__version__, "shape": args.shape,
        "layers": config.num_layers, "remat": config.remat, "remat_layers": config.remat_layers,
        "mlp_chunks": config.mlp_chunks, "moment_dtype": args.moment_dtype,
        "moments": args.moments, "rows": rows,
    }  # fmt: skip
    for length in args.lengths:
        first: dict[str, Any] | None = None
        for strategy, weights in itertools.product(args.strategies, args.weights):
            if strategy == "tensor parallel" and weights != args.weights[0]:
                continue  # Its weights are not sharded over the sequence.
            name = f"{length:9,}  {_name(strategy, weights):20}"
            try:
                row = measure(
                    config, strategy, weights, length, n, optimizer=optimizer, steps=args.steps,
                    profile=args.profile,
                )  # fmt: skip
            # Too little memory, or an indivisible length: the table has the reason.
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                print(f"{name}  {' '.join(str(error).split())[:70]}", flush=True)
                continue
            first = row if first is None else first
            off = [
                name
                for name, share in _TOLERANCE.items()
                if not abs(row[name] - first[name]) <= share * first[name]  # NaN is wrong too.
            ]
            flops = length * config.train_flops_per_token(length)
            row["mfu"] = None if peak is None else flops / (row["seconds"] * n * peak)
            print(name + _cells(row, off), flush=True)
            if off:
                continue
            rows.append(row)
            if args.json is not None:  # After every row, because each takes a minute.
                save_json(record, args.json)
        if args.parts and first is not None:
            first["parts"] = _timed_parts(config, first, n, args.steps)
            if args.json is not None:
                save_json(record, args.json)


def _timed_parts(
    config: DecoderConfig, step: dict[str, Any], n: int, calls: int
) -> list[dict[str, Any]]:
    """Times the layers of each mixer by themselves, and prints their shares of the step."""
    rows = []
    strategy, length = step["strategy"], step["length"]
    try:
        for row in layer_times.measure(config, strategy, length, n, calls=calls):
            share = row["share"] = row["seconds"] / step["seconds"]
            print(f"{length:9,}    {row['part']:40}{1e3 * row['seconds']:9.1f} ms{share:8.1%} of "
                  "the step", flush=True)  # fmt: skip
            rows.append(row)
    except jax.errors.JaxRuntimeError as error:  # Too little memory.
        print(f"{length:9,}    {' '.join(str(error).split())[:90]}", flush=True)
    return rows


def _remat(config: DecoderConfig) -> str:
    count = config.remat_layers
    return config.remat if count is None else f"{config.remat} in {count} layers"


def _name(strategy: str, weights: str) -> str:
    return (
        strategy
        if weights == "replicated" or strategy == "tensor parallel"
        else f"{strategy}, {weights}"
    )


def _cells(row: dict[str, Any], off: list[str]) -> str:
    if off:
        return f"  wrong: {', '.join(f'{name} {row[name]:.4f}' for name in off)}"
    mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
    total, exposed = (
        "-" if row[name] is None else f"{1e3 * row[name]:.1f}"
        for name in ("communication", "exposed")
    )
    return (
        f"{1e3 * row['seconds']:9.1f}{row['length'] / row['seconds']:11,.0f}{mfu:>7}"
        f"{row['gib']:8.2f}{row['loss']:9.4f}{total:>9}{exposed:>9}"
    )
