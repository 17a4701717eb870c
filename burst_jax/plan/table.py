"""A plan as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burst_jax.plan import Plan
    from burst_jax.plan.model import Estimate

_MIB = 2**20


def table(plan: Plan) -> str:
    """The estimates, fastest first, and the recommendation."""
    attention, cluster = plan.attention, plan.cluster
    gpu = cluster.gpu
    mask = "causal" if attention.is_causal else "full"
    if attention.local_window_size is not None:
        mask += f", window {attention.local_window_size}"
    if attention.blocks is not None:
        rows, columns = attention.blocks.shape
        mask += f", {attention.blocks.seen:.0%} of {rows} x {columns} blocks"
    head_dims = f"{attention.head_dim}"
    if attention.value_dim != attention.head_dim:
        head_dims += f"/{attention.value_dim}"
    lines = [
        f"{cluster.hosts} x {cluster.gpus} {gpu.name}, {cluster.link:g} GB/s to a neighbour, "
        f"{cluster.host_link:g} to another host; rates: {gpu.source}",
        f"{attention.batch} x {attention.length:,} tokens, {attention.heads}/{attention.kv_heads} "
        f"heads x {head_dims}, {mask}; one attention, per device",
        "",
        f"{'scheme':28}{'layout':12}{'backward':14}{'fwd ms':>9}{'bwd ms':>9}{'TFLOP/s':>9}"
        f"{'hidden':>8}{'GiB':>8}{'fwd MiB':>10}{'bwd MiB':>10}{'to hosts':>10}",
    ]
    lines.append("-" * len(lines[-1]))
    lines += [_line(estimate) for estimate in plan.estimates]
    lines += [f"left out: {way}: {reason}" for way, reason in plan.left_out]
    best = plan.best
    if best is None:
        lines.append(
            f"\nNone fits {gpu.memory:g} GiB: use more devices, or a smaller batch per device."
        )
    else:
        lines += ["", *_recommended(plan, best)]
    return "\n".join(lines)


def _recommended(plan: Plan, best: Estimate) -> list[str]:
    """The way to take, as code."""
    attention = plan.attention
    fastest = next(each for each in plan.estimates if each.memory <= plan.cluster.gpu.memory)
    mesh, masks = best.scheme.mesh, {}
    if attention.is_causal:
        masks["is_causal"] = True
    if attention.local_window_size is not None:
        masks["local_window_size"] = attention.local_window_size
    arguments = ", ".join(
        f"{name}={as_python(value)}" for name, value in (best.arguments | masks).items()
    )
    if attention.blocks is not None:
        arguments += ", block_mask=block_mask"
    sizes, names = tuple(mesh.values()), as_python(tuple(mesh))
    order = f"{as_python(best.layout)}, {math.prod(best.scheme.sizes)}"
    lines = [
        f"recommended: {best.scheme.name}, {best.layout}",
        f"    mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {len(mesh)})",
        f"    burst_attention(..., mesh=mesh, {arguments})",
        f"    # the tokens' order: to_layout(..., {order})",
    ]
    if best.host_bytes < fastest.host_bytes:
        slower = best.seconds / fastest.seconds - 1
        lines.append(
            f"    # {slower:.1%} slower than the fastest that fits (the model cannot tell), and "
            f"{best.host_bytes / fastest.host_bytes:.0%} of its bytes to other hosts"
        )
    return lines


def as_python(value: object) -> str:
    """As Python, with the quotes that this project writes."""
    return repr(value).replace("'", '"')


def _line(estimate: Estimate) -> str:
    return (
        f"{estimate.scheme.name:28}{estimate.layout:12}{estimate.backward:14}"
        f"{1e3 * estimate.forward_seconds:9.2f}{1e3 * estimate.backward_seconds:9.2f}"
        f"{estimate.tflops:9.0f}{estimate.hidden:8.0%}{estimate.memory:8.2f}"
        f"{estimate.forward_bytes / _MIB:10.0f}{estimate.backward_bytes / _MIB:10.0f}"
        f"{estimate.host_bytes / _MIB:10.0f}"
    )
