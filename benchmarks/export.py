"""Lowers programs of other benchmarks for GPUs that are not here, for ``benchmarks exported``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import linear_cases, linear_ring, max_logits, ring, ring_strategies
from benchmarks.ahead import Ahead, Argument, Values, Writer, described_mesh
from benchmarks.kernel_cases import Case
from benchmarks.linear import BOTH, BOTH_FLOPS, FORWARD, FORWARD_FLOPS
from benchmarks.train import SHAPES
from burst_jax.command_line import Unusable, integer
from burst_jax.parallel.rules import ShardingRules
from burst_jax.training import abstract_train_state, make_batch, make_optimizer, make_train_step
from burst_jax.training import step as training_step

TARGETS = ("a100", "h100", "h200")


@dataclasses.dataclass(frozen=True)
class Devices:
    """Described GPUs, ``count`` of a ``target``."""

    target: str
    count: int

    def mesh(self, shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("seq",)) -> Any:
        """A mesh of the first ones; all by default."""
        return described_mesh(self.target, shape or (self.count,), names)


def _rings(devices: Devices, cases: Iterator[tuple[Case, tuple[str, ...]]]) -> Iterator[Ahead]:
    for case, names in cases:
        with mock.patch.object(
            ring_strategies, "mesh_of", lambda shape, names: devices.mesh(shape, names)
        ):
            makers = ring_strategies.strategies(case, devices.count)
            made = {name: makers[name]() for name in names}
        for name, strategy in made.items():
            yield from _strategy(case, name, strategy)


def _strategy(case: Case, name: str, strategy: ring_strategies.Strategy) -> Iterator[Ahead]:
    """A strategy's forward pass, and forward and backward pass."""
    length = case.length if strategy.order is None else strategy.order.size
    heads = case.heads, case.kv_heads, case.kv_heads, case.heads
    arrays = [
        Argument(
            (strategy.copies * case.batch, length, each, case.head_dim), jnp.bfloat16, strategy.spec
        )
        for each in heads
    ]
    packed: list[Argument] = []
    structure = jax.tree.structure(())
    if strategy.packing:
        *by_token, tables = strategy.packing
        specs = None if tables is None else tables.specs(None, strategy.axes)
        leaves, structure = jax.tree.flatten((*by_token, tables))
        of_tables = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
        by_leaf = [strategy.spec] * len(by_token) + of_tables
        packed = [
            Argument(x.shape, x.dtype, spec, Values("array", array=np.asarray(x)))
            for x, spec in zip(leaves, by_leaf, strict=True)
        ]

    def attend(q: Any, k: Any, v: Any, *leaves: Any) -> Any:
        return strategy.attend(q, k, v, *jax.tree.unflatten(structure, leaves))

    def both(q: Any, k: Any, v: Any, do: Any, *leaves: Any) -> Any:
        return strategy.both(q, k, v, do, *jax.tree.unflatten(structure, leaves))

    share = strategy.copies / strategy.mesh.size
    for what, run, given, flops in (
        ("forward", attend, arrays[:3], case.flops()),
        ("both", both, arrays, case.flops_with_gradients()),
    ):
        yield Ahead(
            f"ring {case.name}, {what}", name, strategy.mesh, run, [*given, *packed],
            flops=share * flops, overlaps=name != ring_strategies.ALL_ALONE,
        )  # fmt: skip


def _chosen(*indices: int, names: tuple[str, ...] | None = None) -> Any:
    return [(ring.CASES[i][0], names or ring.CASES[i][1]) for i in indices]


_OF_RING = (ring_strategies.ALL_ALONE, ring_strategies.ZIGZAG)


def rings(devices: Devices) -> Iterator[Ahead]:
    """Rings of 128K to 16K tokens, and short ones, next to every GPU alone."""
    return _rings(devices, _chosen(1, 0, 2, 10, 11, names=_OF_RING))


def ring_layouts(devices: Devices) -> Iterator[Ahead]:
    """Other layouts, rotations and methods; a window, batches, no mask."""
    others = "striped", "contiguous", "Ulysses", "zigzag, NCCL"
    rotations = "zigzag, rotate_kv", "zigzag, rotate_query"
    yield from _rings(devices, _chosen(0, 2, names=(*_OF_RING, *others)))
    yield from _rings(devices, _chosen(3, names=rotations))
    yield from _rings(devices, _chosen(5, names=(*_OF_RING, "contiguous")))
    yield from _rings(devices, _chosen(4, names=(ring_strategies.ALL_ALONE, "contiguous")))
    yield from _rings(devices, _chosen(6, 7, 8, names=_OF_RING))


def packed_rings(devices: Devices) -> Iterator[Ahead]:
    """Packed documents in a balanced layout."""
    return _rings(devices, _chosen(12, names=(ring_strategies.ALL_ALONE, "balanced")))


def _rule_arguments(length: int, heads: int, channels: bool, dims: tuple[int, int]) -> Any:
    spread, (head_dim, value_dim) = P(None, "seq"), dims
    keys = Argument((1, length, heads, head_dim), jnp.bfloat16, spread, Values(high=head_dim**-0.5))
    values = Argument((1, length, heads, value_dim), jnp.bfloat16, spread)
    decays = (1, length, heads, head_dim) if channels else (1, length, heads)
    return [
        keys, keys, values,
        Argument(decays, jnp.float32, spread, Values("uniform", -0.1, 0.0)),
        Argument((1, length, heads), jnp.float32, spread, Values("uniform")),
        values,
    ]  # fmt: skip


def _rules(
    group: str, name: str, mesh: Any, layout: str, given: list[Argument], tokens: int = 0
) -> Iterator[Ahead]:
    """The rule forward, and forward and backward; ``tokens`` times heads of 128 of each GPU."""
    for what, per_token in ((FORWARD, FORWARD_FLOPS), (BOTH, BOTH_FLOPS)):
        backward = what == BOTH
        yield Ahead(
            f"{group}, {what}", name, mesh, linear_ring.program(layout, mesh, backward=backward),
            given if backward else given[:5], flops=per_token * tokens,
        )  # fmt: skip


def linear_rings(devices: Devices, *, channels: bool = False, heads: int = 32) -> Iterator[Ahead]:
    """The gated delta rule over all GPUs and on one, with as many tokens per GPU."""
    form = "KDA" if channels else "GDN"
    for tokens in (16384, 65536):
        for place in (linear_ring.ONE, "contiguous", "zigzag"):
            mesh = devices.mesh((1,)) if place == linear_ring.ONE else devices.mesh()
            layout = "contiguous" if place == linear_ring.ONE else place
            given = _rule_arguments(
                tokens * mesh.size, heads, channels, (linear_cases.HEAD_DIM,) * 2
            )
            group = f"{form} {tokens:,} per GPU"
            yield from _rules(group, place, mesh, layout, given, tokens * heads)


def linear_dims(devices: Devices) -> Iterator[Ahead]:
    """The gated delta rule of 32K tokens on one GPU, with other head dims and decays by channel."""
    mesh = devices.mesh((1,))
    for channels, dims in (
        (False, (128, 128)), (False, (64, 64)), (False, (96, 192)), (False, (128, 256)),
        (True, (128, 128)),
    ):  # fmt: skip
        given = _rule_arguments(32768, 32, channels, dims)
        name = f"{'KDA' if channels else 'GDN'} {dims[0]}/{dims[1]}"
        yield from _rules("linear 32K", name, mesh, "contiguous", given)


def logits(devices: Devices) -> Iterator[Ahead]:
    """Attention with and without bounds of the largest logits."""
    mesh = devices.mesh((1,))
    for length in (8192, 32768, 65536):
        shape = max_logits.Shape(length)
        counts = shape.heads, shape.kv_heads, shape.kv_heads, shape.heads
        given = [Argument((1, length, n, shape.head_dim), jnp.bfloat16, P()) for n in counts]
        for measures in (False, True):
            yield Ahead(
                f"max logits {length:,}", "with" if measures else "without", mesh,
                shape.program(mesh, measures=measures), given, overlaps=False,
            )  # fmt: skip


def _step(
    devices: Devices, shape: str, length: int, n: int, moment_dtype: Any = "float32",
    weights: str = "sharded", **changes: Any,
) -> Ahead:  # fmt: skip
    """A training step; over several GPUs with weights as in ``benchmarks train``."""
    config = dataclasses.replace(SHAPES[shape], **changes)
    mesh = devices.mesh((n,))
    optimizer = make_optimizer(1e-4, 100, moment_dtype=moment_dtype)
    options: dict[str, Any] = {"layout": "zigzag"}
    if n > 1 and weights != "replicated":
        expert = "seq" if weights == "exchanged" else None
        options["rules"] = ShardingRules(
            data=None, fsdp=None, seq="seq", tensor=None, expert=expert
        )
    graphdef, *state = abstract_train_state(config, optimizer, mesh, **options)
    rows = np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))
    batch = make_batch(rows, layout="zigzag", num_shards=n)
    held, states = jax.tree.flatten(tuple(state))
    fed, batches = jax.tree.flatten(batch)
    num_weights = len(jax.tree.leaves(state[0]))
    given = [
        Argument(x.shape, x.dtype, _spec(x), _values(x, is_weight=i < num_weights))
        for i, x in enumerate(held)
    ]
    given += [
        Argument(x.shape, x.dtype, P(None, "seq"), Values("array", array=np.asarray(x)))
        for x in fed
    ]
    step = make_train_step(graphdef, optimizer)

    def run(*leaves: Any) -> Any:
        params, optimizer_state = jax.tree.unflatten(states, leaves[: len(held)])
        batch = jax.tree.unflatten(batches, leaves[len(held) :])
        # Devices that are not here may not be named inside of a program.
        with mock.patch.object(training_step, "_named_sharding", return_value=None):
            *made, metrics = step._jit(params, optimizer_state)(params, optimizer_state, batch)
        return *jax.tree.leaves(tuple(made)), metrics["loss"], metrics["grad_norm"]

    return Ahead(
        f"step {length:,} on {n}", shape, mesh, run, given, carried=len(held), tokens=length,
        flops=length * config.train_flops_per_token(length) / n,
    )  # fmt: skip


def _values(x: Any, *, is_weight: bool) -> Values:
    """Of a leaf of a training state: as before the first step, about."""
    if not is_weight or not jnp.issubdtype(x.dtype, jnp.floating):
        return Values(high=0 if jnp.issubdtype(x.dtype, jnp.floating) else 1)
    return Values(high=0.02) if x.ndim > 1 else Values("uniform", 0.5, 1.5)


def _spec(x: Any) -> P:
    return x.sharding.spec if isinstance(x.sharding, NamedSharding) else P()


def hybrid_steps(devices: Devices) -> Iterator[Ahead]:
    """Training steps of a group of Qwen3-Next's layers on one GPU."""
    for length in (32768, 131072):
        for shape in ("qwen3-next-dense", "qwen3-next-softmax"):
            yield _step(devices, shape, length, 1)
    # 6.7 billion weights: with moments in float32 they take 75 GiB.
    for shape in ("qwen3-next-layers", "qwen3-next-dense"):
        step = _step(devices, shape, 32768, 1, moment_dtype="bfloat16")
        yield dataclasses.replace(step, group=f"{step.group}, bfloat16 moments")


def large_steps(devices: Devices) -> Iterator[Ahead]:
    """Training steps of Llama 3 8B over all GPUs, as much saved as fits two H200."""
    saved_at: dict[int, dict[str, Any]] = {
        65536: {"remat": "selective"},
        131072: {"remat": "selective", "remat_layers": 11},
        262144: {"remat": "attention"},
    }
    for length, saved in saved_at.items():
        step = _step(devices, "llama-3-8b", length, devices.count, moment_dtype="bfloat16", **saved)
        yield dataclasses.replace(step, group=f"8B {step.group}")


def expert_steps(devices: Devices) -> Iterator[Ahead]:
    """Steps of mixtures of experts over all GPUs, by what is sent: experts, or tokens."""
    sharded = ("sharded", "exchanged")
    for shape, tokens, kinds in (
        ("qwen3-30b-a3b-layers", 32768, ("replicated", *sharded)),
        ("qwen3-30b-a3b-layers", 8192, sharded),
        ("qwen3-next-layers", 32768, sharded),
        ("qwen3-next-layers", 8192, sharded),
    ):
        for weights in kinds:
            step = _step(
                devices, shape, tokens * devices.count, devices.count, moment_dtype="bfloat16",
                weights=weights,
            )  # fmt: skip
            yield dataclasses.replace(step, group=f"{shape}, {step.group}", name=weights)


SUITES: dict[str, Callable[[Devices], Iterator[Ahead]]] = {
    "rings": rings,
    "layouts": ring_layouts,
    "packed": packed_rings,
    "gdn": linear_rings,
    "kda": functools.partial(linear_rings, channels=True),
    "linear": linear_dims,
    "logits": logits,
    "steps": hybrid_steps,
    "8b": large_steps,
    "experts": expert_steps,
}


def add_command(commands: Any) -> None:
    """Adds ``export`` to the command line."""
    parser = commands.add_parser("export", help=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--target", choices=TARGETS, default="h200", help="(%(default)s)")
    parser.add_argument("--devices", type=integer(1), default=2, help="(%(default)s)")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="groups whose names contain a word"
    )
    parser.add_argument(
        "--suffix", default="", help="of the names of programs: those of several checkouts in one"
        " folder are timed in turns",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Writes all programs."""
    if jax.default_backend() != "cpu":
        raise Unusable("benchmarks export lowers for GPUs that are not here: set JAX_PLATFORMS=cpu")
    writer, devices = Writer(args.folder), Devices(args.target, args.devices)
    for suite in args.suites:
        for program in SUITES[suite](devices):
            if not any(word in program.group for word in args.only):
                continue
            begin = time.perf_counter()
            program = dataclasses.replace(program, name=program.name + args.suffix)
            size = writer.write(program)
            print(
                f"{program.group}, {program.name}: {size / 2**20:.2f} MiB, "
                f"{time.perf_counter() - begin:.0f} s",
                flush=True,
            )
