"""The plan of a training step: estimates of all strategies, the recommended one, and a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from burst_jax.models.config import DecoderConfig
from burst_jax.plan.attention_plan import IMPORTS, as_arguments, as_python, mesh_code
from burst_jax.plan.config_code import config_code
from burst_jax.plan.final_evaluation import FinalEvaluation, final_evaluation
from burst_jax.plan.hardware import Cluster
from burst_jax.plan.step_memory import StepMemory
from burst_jax.plan.step_time import StepSeconds
from burst_jax.plan.training_strategy import TrainingStrategy

# Fraction of a GPU's memory that a step may use: the rest is for CUDA and NCCL.
USABLE = 0.94
# A step's memory is estimated within this fraction.
MEMORY_ACCURACY = 0.10
# A strategy that exceeds the usable memory by that error is recommended only if what surely fits
# takes longer by more than this fraction.
WORTH_A_RISK = 0.05
# Strategies whose times differ by at most this factor are equally fast, within the model's error.
AS_FAST = 1.01
# A difference of less than this fraction is not worth a sentence.
_SHOWN = 0.0005
_GIB = 2**30
# JAX preallocates this fraction of a GPU's memory by default.
_JAX_PREALLOCATES = 0.75
# GiB of host memory that JAX pins per process by default.
_JAX_PINS = 64


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """The estimated cost of a training step on each device, for one strategy.

    Attributes:
      strategy: how the step is sharded, and what its layers save.
      memory: bytes.
      seconds: of a step.
      evaluation_seconds: of a held-out batch.
      ring_host_bytes: bytes that the rings of a step send to another host, by the device that sends
        most there.
      tokens_per_second: per GPU.
      mfu: model FLOPs utilization; None if the GPU's peak is unknown.
    """

    strategy: TrainingStrategy
    memory: StepMemory
    seconds: StepSeconds
    evaluation_seconds: float
    ring_host_bytes: int
    tokens_per_second: float
    mfu: float | None

    def record(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        strategy, arguments = self.strategy, self.strategy.arguments
        if "rules" in arguments:
            arguments["rules"] = dataclasses.asdict(arguments["rules"])
        return {
            **dataclasses.asdict(strategy),
            "mesh": strategy.mesh,
            "arguments": arguments,
            "num_shards": strategy.seq,
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total},
            "seconds": dataclasses.asdict(self.seconds) | {"total": self.seconds.total},
            "evaluation_seconds": self.evaluation_seconds,
            "ring_host_bytes": self.ring_host_bytes,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }


def fits(memory: StepMemory, cluster: Cluster) -> bool:
    """Whether a step fits in the usable memory of a GPU."""
    return memory.total <= USABLE * cluster.gpu.memory * _GIB


def surely_fits(memory: StepMemory, cluster: Cluster) -> bool:
    """Whether it fits even if the estimated memory is too low by the model's error."""
    return (1 + MEMORY_ACCURACY) * memory.total <= USABLE * cluster.gpu.memory * _GIB


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The result of :func:`burst_jax.plan.training`; ``print`` it for a table.

    Attributes:
      config: the decoder.
      length: sequence length.
      batch: batch size.
      moment_dtype: dtype of the optimizer's moments.
      cluster: the GPUs.
      estimates: an estimate for every possible strategy: those that fit in memory first, fastest
        first.
      left_out: ``(strategy and layout, reason)`` for every impossible mesh and layout.
      shapes: the decoder's state as shapes.
    """

    config: DecoderConfig
    length: int
    batch: int
    moment_dtype: str
    cluster: Cluster
    estimates: tuple[StepEstimate, ...]
    left_out: tuple[tuple[str, str], ...]
    shapes: Any = dataclasses.field(repr=False)

    def fits(self, estimate: StepEstimate) -> bool:
        """Whether a step fits in the usable memory of a GPU."""
        return fits(estimate.memory, self.cluster)

    @property
    def best(self) -> StepEstimate | None:
        """The recommended estimate, or None if none fits.

        It is chosen from those that fit even with the model's error of :data:`MEMORY_ACCURACY`, if
        these take at most :data:`WORTH_A_RISK` longer than the fastest that fits without it. Of
        those that take at most :data:`AS_FAST` times as long as the fastest of the choice, it is
        one that needs the least host memory; of these one that sends the fewest bytes to other
        hosts; of these one with the smallest Ulysses axis; of these the one that needs the least
        memory.
        """
        fit = list(filter(self.fits, self.estimates))
        sure = [each for each in fit if surely_fits(each.memory, self.cluster)]
        if sure and sure[0].seconds.total <= (1 + WORTH_A_RISK) * fit[0].seconds.total:
            fit = sure
        as_fast = [each for each in fit if each.seconds.total <= AS_FAST * fit[0].seconds.total]

        def cost(each: StepEstimate) -> tuple[int, int, int, int]:
            memory = each.memory
            return memory.host, each.ring_host_bytes, each.strategy.ulysses, memory.total

        return min(as_fast, key=cost, default=None)

    @property
    def evaluation(self) -> FinalEvaluation | None:
        """The evaluation after training with the recommended strategy, or None if none fits."""
        best = self.best
        if best is None:
            return None
        fraction = float(self.environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _JAX_PREALLOCATES))
        return final_evaluation(
            dataclasses.replace(self.config, mlp_chunks=best.strategy.mlp_chunks),
            self.shapes, self.cluster, length=self.length, batch=self.batch,
            shard=best.memory.weights, mesh_seconds=best.evaluation_seconds,
            allocated=fraction * self.cluster.gpu.memory * _GIB,
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        """The whole plan as plain values, for JSON."""
        evaluation = self.evaluation
        config = dataclasses.asdict(self.config)
        names = ("dtype", "param_dtype")
        config |= {name: jnp.dtype(config[name]).name for name in names}
        config["feed_forward"] = self.config.feed_forward.__name__
        del config["hf_config"]
        return {
            "config": config,
            "length": self.length,
            "batch": self.batch,
            "moment_dtype": self.moment_dtype,
            "cluster": dataclasses.asdict(self.cluster),
            "recommended": None if self.best is None else self.best.record(),
            "environment": self.environment,
            "evaluation": None if evaluation is None else dataclasses.asdict(evaluation),
            "estimates": [each.record() | {"fits": self.fits(each)} for each in self.estimates],
            "left_out": dict(self.left_out),
        }

    def __str__(self) -> str:
        return self.table()

    def table(
        self, *, show_all: bool = False, model: str = "DIR", ignore: Sequence[str] = ()
    ) -> str:
        """The best estimate of each mesh, others of the recommended mesh, and how to run that.

        Args:
          show_all: print all estimates instead, the best first.
          model: the checkpoint folder that the printed code loads; "DIR" prints the config instead.
          ignore: the keys that it ignores, see :func:`burst_jax.models.load`.
        """
        cluster, config, best = self.cluster, self.config, self.best
        gpu = cluster.gpu
        meshes = _firsts(self.estimates, lambda each: each.strategy.name)
        fit = [each for each in meshes if self.fits(each)]
        shown = list(self.estimates) if show_all else fit or meshes[:5]
        tables = {"every strategy" if show_all else "the fastest strategy of each mesh": shown}
        if not show_all:
            first = self.estimates[0] if best is None else best
            name = first.strategy.name
            same = [each for each in self.estimates if each.strategy.name == name]
            layout = first.strategy.layout
            same_layout = [each for each in same if each.strategy.layout == layout]
            others = [each for each in same if each.strategy.layout != layout]
            others = _firsts(others, lambda each: each.strategy.layout)
            title = f"mesh {first.strategy.name}: every remat and place of the moments"
            tables[f"{title}; other layouts with the fastest"] = [*same_layout, *others]
        usable = USABLE * gpu.memory
        lines = [
            f"{cluster.hosts} x {cluster.gpus} {gpu.name}, {gpu.memory:g} GiB each, "
            f"{cluster.link:g} GB/s within a host, {cluster.host_link:g} to another host; rates: "
            f"{gpu.source}",
            f"{config.num_layers} layers of {config.embed_dim}, {_mixers(config)}, "
            f"{_feed_forward(config)}, "
            f"vocabulary {config.vocab_size:,}; {jnp.dtype(config.dtype).name}, weights "
            f"{jnp.dtype(config.param_dtype).name}, moments {self.moment_dtype}",
            f"{self.batch} x {self.length:,} tokens per step; s is of a step, all else per GPU",
            "remat, mlp chunks: of DecoderConfig (selective in 12: remat_layers=12); moments: the "
            "memory of AdamW's; MFU: without recomputation",
            f"GiB: memory of a step, within {MEMORY_ACCURACY:.0%}, at most {usable:.1f} (in "
            "brackets: too much); host GiB: host memory",
            "",
            *_aligned({title: list(map(self._cells, each)) for title, each in tables.items()}),
        ]
        if fit and len(fit) < len(meshes) and not show_all:
            names = [each.strategy.name for each in meshes if not self.fits(each)]
            lines.append(f"too little memory with any remat: {'; '.join(names)}")
        left_out: dict[str, list[str]] = {}
        for name, reason in self.left_out:
            left_out.setdefault(reason, []).append(name)
        lines += [f"left out: {'; '.join(names)}: {reason}" for reason, names in left_out.items()]
        if best is None:
            lines.append(
                f"\nNone fits {gpu.memory:g} GiB (in brackets: too much). Use more devices, a "
                "shorter length, or a smaller batch."
            )
        else:
            lines += ["", *self._recommended(best, model, ignore)]
        return "\n".join(lines)

    def _cells(self, estimate: StepEstimate) -> list[str]:
        strategy, memory = estimate.strategy, estimate.memory
        size = f"{memory.total / _GIB:.1f}"
        remat = strategy.remat
        if strategy.remat_layers is not None:
            remat += f" in {strategy.remat_layers}"
        return [
            " ".join(f"{name}={size}" for name, size in strategy.mesh.items()),
            strategy.weights + strategy.experts,
            strategy.layout,
            remat,
            str(strategy.mlp_chunks),
            strategy.moments,
            f"{estimate.seconds.total:.2f}",
            f"{estimate.tokens_per_second:,.0f}",
            "-" if estimate.mfu is None else f"{estimate.mfu:.1%}",
            size if self.fits(estimate) else f"({size})",
            f"{memory.host / _GIB:.1f}",
        ]

    def _recommended(self, best: StepEstimate, model: str, ignore: Sequence[str]) -> list[str]:
        """The recommended strategy as code, and comments on how to run it."""
        strategy, bfloat16 = best.strategy, self.moment_dtype != "float32"
        arguments = dict(strategy.arguments)
        rules = arguments.pop("rules", None)
        options = as_arguments(arguments)
        moments = [f"moment_dtype={as_python(self.moment_dtype)}"] if bfloat16 else []
        moments += ['moments="host"'] if strategy.moments == "host" else []
        count = strategy.remat_layers
        if model == "DIR":
            config = config_code(self.config)
        else:
            loaded = f"{model!r}, dtype=jnp.bfloat16, param_dtype=jnp.float32"
            loaded += f", ignore={as_python(tuple(ignore))}" if ignore else ""
            config = [f"config = burst_jax.models.load_config({loaded})"]
        lines = [
            "recommended:",
            "    import dataclasses",
            *IMPORTS[:-1],
            "    import jax.numpy as jnp",
            *(f"    {line}" for line in config),
            "    learning_rate, steps, seed = 1e-5, 1000, 0  # yours",
            "",
            f"    {mesh_code(strategy.mesh)}",
            f'    config = dataclasses.replace(config, remat="{strategy.remat}", '
            + ("" if count is None else f"remat_layers={count}, ")
            + f"mlp_chunks={strategy.mlp_chunks})",
            "    optimizer = burst_jax.training.make_optimizer(",
            f"        {', '.join(['learning_rate', 'steps', *moments])}",
            "    )",
        ]
        if rules is not None:
            axes = as_arguments(dataclasses.asdict(rules))
            lines.append(f"    rules = burst_jax.ShardingRules({axes})")
            options = f"rules=rules, {options}"
        layout = f"layout={as_python(strategy.layout)}, num_shards={strategy.seq}"
        lines += [
            "    graphdef, params, opt_state = burst_jax.training.init_train_state(",
            f"        config, optimizer, mesh, seed, {options}",
            "    )",
            f"    # permute the tokens: burst_jax.training.make_batch(..., {layout})",
        ]
        return [*lines, *self._start(), self._last(), *self._reason(best), *self._risk(best)]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the recommended strategy needs, set before JAX starts."""
        best, cluster, found = self.best, self.cluster, {}
        if best is None:
            return found
        if best.memory.total > _JAX_PREALLOCATES * cluster.gpu.memory * _GIB:
            found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.95"
        # On one host one process has all GPUs, on several each has one.
        pinned = (cluster.gpus if cluster.hosts == 1 else 1) * best.memory.host / _GIB
        if pinned > _JAX_PINS:
            found["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] = str(math.ceil(1.1 * pinned))
        return found

    def _start(self) -> list[str]:
        """Comments on how to start the processes of the recommended strategy."""
        reasons = {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "JAX preallocates three quarters of a GPU's memory",
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": f"a process pins {_JAX_PINS} GiB of host memory",
        }
        lines = [
            f"    # By default {reasons[name]}: set {name}={value}."
            for name, value in self.environment.items()
        ]
        hosts, gpus = self.cluster.hosts, self.cluster.gpus
        if hosts > 1:
            tasks = f"--ntasks-per-node={gpus} --gpus-per-node={gpus}"
            lines.append(f"    # One process per GPU: srun --nodes={hosts} {tasks}")
        return lines

    def _last(self) -> str:
        """A comment on an evaluation after the last step."""
        found = self.evaluation
        assert found is not None
        line = (
            f"    # An evaluation of {found.batches} batches after the last step takes about "
            f"{_duration(found.mesh_seconds)} on the mesh"
        )
        if self.cluster.size == 1 or self.cluster.hosts > 1:
            return f"{line}."
        if not found.device_fits:
            needed = found.device_memory / _GIB
            return f"{line}, not on one GPU, which would need {needed:.0f} GiB."
        return f"{line}, and {_duration(found.device_seconds)} on one GPU."

    def _reason(self, best: StepEstimate) -> list[str]:
        """Why the recommended strategy is not the fastest that fits; empty if it is."""
        fastest = self.estimates[0]
        slower = best.seconds.total / fastest.seconds.total - 1
        if best is fastest or slower < _SHOWN:
            return []
        gains = []
        if best.memory.host < fastest.memory.host:
            freed = (fastest.memory.host - best.memory.host) / _GIB
            less = f"{freed:.1f} GiB less host memory per GPU"
            gains.append(less if best.memory.host else "no host memory")
        if best.ring_host_bytes < fastest.ring_host_bytes:
            share = best.ring_host_bytes / fastest.ring_host_bytes
            gains.append(f"{share:.0%} of the ring's bytes to other hosts")
        if best.strategy.ulysses < fastest.strategy.ulysses:
            gains.append("a smaller Ulysses axis")
        saved = (fastest.memory.total - best.memory.total) / _GIB
        if saved > 0:
            gains.append(f"{saved:.1f} GiB less memory per GPU")
        cells = zip(_DIFFERENCES, self._cells(fastest), self._cells(best), strict=False)
        differences = [text.format(theirs) for text, theirs, ours in cells if theirs != ours]
        error = ", within the model's error" if slower <= AS_FAST - 1 else ""
        return [
            f"    # {slower:.1%} slower than the fastest that fits ({', '.join(differences)})"
            f"{error}, but {', '.join(gains)}"
        ]

    def _risk(self, best: StepEstimate) -> list[str]:
        """A warning that the recommended strategy may not fit; empty if it fits for certain."""
        if surely_fits(best.memory, self.cluster):
            return []
        usable = USABLE * self.cluster.gpu.memory
        return [
            f"    # It needs {best.memory.total / _GIB:.1f} of {usable:.1f} GiB, within "
            f"{MEMORY_ACCURACY:.0%}: try it with two steps. What surely fits is more than "
            f"{WORTH_A_RISK:.0%} slower, if anything does."
        ]


_HEADING = (
    "mesh", "weights", "layout", "remat", "mlp chunks", "moments", "s", "tokens/s", "MFU", "GiB",
    "host GiB",
)  # fmt: skip
# What another strategy differs in, for the first columns.
_DIFFERENCES = (
    "mesh {}", "{} weights", "{} layout", "remat {}", "mlp chunks {}", "moments on the {}",
)  # fmt: skip


def _mixers(config: DecoderConfig) -> str:
    """The heads of attention, and of linear attention."""
    heads, sizes = f"{config.num_heads}/{config.num_kv_heads} heads x {config.head_dim}", []
    if config.latent is not None:
        heads = (
            f"latent attention of {config.num_heads} heads x {config.head_dim}/"
            f"{config.value_head_dim}"
        )
    delta_net = config.delta_net
    if delta_net is None:
        return heads
    if count := config.mixers.get("attention"):
        sizes.append(f"{count} with {heads}")
    dims = dict.fromkeys((delta_net.head_dim, delta_net.value_head_dim))
    return ", ".join(
        [
            *sizes,
            f"{config.mixers['delta_net']} with {delta_net.title} of {delta_net.num_heads}/"
            f"{delta_net.num_key_heads} heads x {'/'.join(map(str, dims))}",
        ]
    )


def _feed_forward(config: DecoderConfig) -> str:
    """The sizes of the feed-forward; with experts also the weights a token uses, of all."""
    experts = config.experts
    if experts is None:
        return f"hidden {config.mlp_dim}"
    layers = sum(not kind.dense for kind in config.layer_kinds)
    unused = 3 * layers * config.embed_dim * config.mlp_dim
    total = config.num_matmul_params + unused * (experts.count - experts.per_token)
    shared = f" and a shared one of {experts.shared_dim}" if experts.shared_dim else ""
    dense = config.num_layers - layers
    others = f"{dense} layers of {config.dense_dim} without experts, " if dense else ""
    return (
        f"{others}{experts.count} experts of {config.mlp_dim}, {experts.per_token} per token"
        f"{shared} "
        f"({1e-9 * config.num_matmul_params:.3g} of {1e-9 * total:.3g} billion weights)"
    )


def _aligned(tables: dict[str, list[list[str]]]) -> list[str]:
    """The rows of each title below one heading, words left-aligned and numbers right-aligned."""
    cells = [list(_HEADING), *(row for rows in tables.values() for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADING))]

    def line(row: list[str]) -> str:
        left = ("mesh", "weights", "layout", "remat", "moments")
        pairs = zip(_HEADING, row, widths, strict=True)
        return "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width) for name, cell, width in pairs
        )

    heading, lines = line(list(_HEADING)), []
    for title, rows in tables.items():
        lines += [f"{title}:", heading, "-" * len(heading), *map(line, rows), ""]
    return lines[:-1]


def _duration(seconds: float) -> str:
    """Seconds as text, minutes from 100 s on."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _firsts(
    estimates: Iterable[StepEstimate], key: Callable[[StepEstimate], Hashable]
) -> list[StepEstimate]:
    """The first estimate of each key."""
    found: dict[Hashable, StepEstimate] = {}
    for each in estimates:
        found.setdefault(key(each), each)
    return list(found.values())
