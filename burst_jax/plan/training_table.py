"""A plan of a training step as text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING

import jax.numpy as jnp

from burst_jax.plan.table import as_python

if TYPE_CHECKING:
    from burst_jax.plan.training_plan import StepEstimate, TrainingPlan
    from burst_jax.plan.way import Way

_GIB = 2**30
# JAX takes this share of a GPU's memory unless it is told otherwise.
_JAX_TAKES = 0.75
# GiB of the host's memory that JAX pins for a process, unless it is told otherwise.
_JAX_PINS = 64


def table(plan: TrainingPlan, *, everything: bool = False, model: str = "DIR") -> str:
    """The best estimate of each mesh, then all of the recommended mesh, then how to run it.

    Args:
      plan: what was found.
      everything: whether to print all estimates, the best first, instead.
      model: the folder that ``examples/train_lm.py`` shall load.
    """
    cluster, config, best = plan.cluster, plan.config, plan.best
    gpu = cluster.gpu
    heads = f"{config.num_heads}/{config.num_kv_heads} heads x {config.head_dim}"
    first = plan.estimates[0] if best is None else best
    meshes = _firsts(plan.estimates, _mesh_of)
    fit = [each for each in meshes if plan.fits(each)]
    shown = list(plan.estimates) if everything else fit or meshes[:5]
    rows = [_cells(plan, each) for each in shown]
    if not everything:
        same = [each for each in plan.estimates if _mesh_of(each) == _mesh_of(first)]
        here = [each for each in same if each.way.layout == first.way.layout]
        there = [each for each in same if each.way.layout != first.way.layout]
        there = _firsts(there, lambda each: each.way.layout)
        rows += [[]] + [_cells(plan, each) for each in [*here, *there]]
    lines = [
        f"{cluster.hosts} x {cluster.gpus} {gpu.name}, {gpu.memory:g} GiB each, "
        f"{cluster.link:g} GB/s to a neighbour, {cluster.host_link:g} to another host; rates: "
        f"{gpu.source}",
        f"{config.num_layers} layers of {config.embed_dim}, {heads}, hidden {config.mlp_dim}, "
        f"vocabulary {config.vocab_size:,}; {jnp.dtype(config.dtype).name}, weights "
        f"{jnp.dtype(config.param_dtype).name}, moments {plan.moment_dtype}",
        f"{plan.batch} x {plan.length:,} tokens a step; seconds of a step, the rest for each GPU",
        "",
        *_aligned(rows),
    ]
    if fit and len(fit) < len(meshes) and not everything:
        names = [_mesh_name(each) for each in meshes if not plan.fits(each)]
        lines.append(f"too little memory whatever layers keep: {'; '.join(names)}")
    lines += [f"left out: {way}: {reason}" for way, reason in plan.left_out]
    if best is None:
        lines.append(
            f"\nNone fits {gpu.memory:g} GiB (in brackets: too much). Use more devices, a shorter "
            "length, or fewer rows a device."
        )
    else:
        lines += ["", *_recommended(plan, best, model)]
    return "\n".join(lines)


_HEADING = (
    "mesh", "weights", "layout", "remat", "mlp chunks", "moments", "s", "tokens/s", "MFU", "GiB",
    "host GiB",
)  # fmt: skip


def _aligned(rows: list[list[str]]) -> list[str]:
    """The rows below the heading, in columns: words to the left, numbers to the right."""
    cells = [list(_HEADING), *rows]
    widths = [max(len(row[i]) for row in cells if row) for i in range(len(_HEADING))]

    def line(row: list[str]) -> str:
        left = ("mesh", "weights", "layout", "remat", "moments")
        pairs = zip(_HEADING, row, widths, strict=True)
        return "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width) for name, cell, width in pairs
        )

    heading = line(list(_HEADING))
    return [heading, "-" * len(heading), *(line(row) if row else "" for row in rows)]


def _mesh_name(estimate: StepEstimate) -> str:
    mesh = " ".join(f"{name}={size}" for name, size in estimate.way.mesh.items())
    return f"{mesh} with {estimate.way.weights} weights"


def _mesh_of(estimate: StepEstimate) -> Hashable:
    return tuple(estimate.way.mesh.items()), estimate.way.weights


def _firsts(
    estimates: Iterable[StepEstimate], key: Callable[[StepEstimate], Hashable]
) -> list[StepEstimate]:
    """The first estimate of each key."""
    found: dict[Hashable, StepEstimate] = {}
    for each in estimates:
        found.setdefault(key(each), each)
    return list(found.values())


def _cells(plan: TrainingPlan, estimate: StepEstimate) -> list[str]:
    way, memory = estimate.way, estimate.memory
    size = f"{memory.total / _GIB:.1f}"
    return [
        " ".join(f"{name}={size}" for name, size in way.mesh.items()),
        way.weights,
        way.layout,
        _remat(way),
        str(way.mlp_chunks),
        way.moments,
        f"{estimate.seconds.total:.2f}",
        f"{estimate.tokens_per_second:,.0f}",
        "-" if estimate.mfu is None else f"{estimate.mfu:.1%}",
        size if plan.fits(estimate) else f"({size})",
        f"{memory.host / _GIB:.1f}",
    ]


def _remat(way: Way) -> str:
    return way.remat if way.remat_layers is None else f"{way.remat} in {way.remat_layers}"


def _recommended(plan: TrainingPlan, best: StepEstimate, model: str) -> list[str]:
    """The way to take, as code and as flags."""
    way = best.way
    mesh = way.mesh
    sizes, names = tuple(mesh.values()), as_python(tuple(mesh))
    arguments = dict(way.arguments)
    rules = arguments.pop("rules", None)
    options = ", ".join(f"{name}={as_python(value)}" for name, value in arguments.items())
    moments = (
        [f"moment_dtype={as_python(plan.moment_dtype)}"] if plan.moment_dtype != "float32" else []
    )
    moments += ['moments="host"'] if way.moments == "host" else []
    lines = [
        "recommended:",
        f"    mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {len(mesh)})",
        f'    config = dataclasses.replace(config, remat="{way.remat}", '
        + ("" if way.remat_layers is None else f"remat_layers={way.remat_layers}, ")
        + f"mlp_chunks={way.mlp_chunks})",
    ]
    if moments:
        lines.append(f"    optimizer = make_optimizer(..., {', '.join(moments)})")
    if rules is not None:
        given = ", ".join(f"{name}={as_python(value)}" for name, value in rules.items())
        lines.append(f"    rules = burst_jax.ShardingRules({given})")
        options = f"rules=rules, {options}"
    lines += [
        f"    init_train_state(config, optimizer, mesh, seed, {options})",
        f"    # the tokens' order: make_batch(..., layout={as_python(way.layout)}, "
        f"num_shards={way.seq})",
    ]
    if way.flags is not None:
        flags = ["--model", shlex.quote(model), *way.flags]
        flags += ["--seq-len", str(plan.length), "--batch", str(plan.batch)]
        if plan.moment_dtype != "float32":
            flags += ["--moment-dtype", plan.moment_dtype]
        lines.append(f"    python examples/train_lm.py {' '.join(flags)}")
    gpu, gpus = plan.cluster.gpu, plan.cluster.gpus
    if best.memory.total > _JAX_TAKES * gpu.memory * _GIB:
        lines.append(
            "    # JAX takes three quarters of the memory: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        )
    pinned = gpus * best.memory.host / _GIB
    if pinned > _JAX_PINS:
        lines.append(
            f"    # JAX pins {_JAX_PINS} GiB of the host's memory for a process, {gpus} GPUs need "
            f"more: set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={math.ceil(1.1 * pinned)}"
        )
    return lines
