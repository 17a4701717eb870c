"""A plan as text."""

from __future__ import annotations

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
    lines = [
        f"{cluster.hosts} x {cluster.gpus} {gpu.name}, {cluster.link:g} GB/s to a neighbour, "
        f"{cluster.host_link:g} to another host; rates: {gpu.source}",
        f"{attention.batch} x {attention.length:,} tokens, {attention.heads}/{attention.kv_heads} "
        f"heads x {attention.head_dim}, {mask}; one attention, per device",
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
        lines.append(
            f"\nrecommended: burst_attention(..., {best.scheme.options}, "
            f'layout="{best.layout}", backward="{best.backward}")'
        )
    return "\n".join(lines)


def _line(estimate: Estimate) -> str:
    return (
        f"{estimate.scheme.name:28}{estimate.layout:12}{estimate.backward:14}"
        f"{1e3 * estimate.forward_seconds:9.2f}{1e3 * estimate.backward_seconds:9.2f}"
        f"{estimate.tflops:9.0f}{estimate.hidden:8.0%}{estimate.memory:8.2f}"
        f"{estimate.forward_bytes / _MIB:10.0f}{estimate.backward_bytes / _MIB:10.0f}"
        f"{estimate.host_bytes / _MIB:10.0f}"
    )
