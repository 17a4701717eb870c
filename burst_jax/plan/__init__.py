"""Which way to split a sequence: bytes, seconds and memory of every scheme, without a GPU.

``burst_jax.plan(...)``, or ``python -m burst_jax.plan --help``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from burst_jax.checks import make_spec
from burst_jax.heads import check_heads
from burst_jax.layout import LAYOUTS, check_length
from burst_jax.plan.machines import GPUS as GPUS
from burst_jax.plan.machines import Gpu as Gpu
from burst_jax.plan.machines import find_gpu
from burst_jax.plan.model import Attention, Cluster, Estimate, Model, Scheme
from burst_jax.plan.table import table
from burst_jax.rotation import BACKWARDS

# By what share of its time two ways must differ for the model to tell them apart: two thirds of
# the measured rings lie within this of their estimates (``python -m burst_jax.plan --measured``).
ACCURACY = 0.03


@dataclasses.dataclass(frozen=True)
class Plan:
    """What :func:`plan` found; ``print`` it for a table.

    Attributes:
      attention: what is computed.
      cluster: on what.
      estimates: every way that can be taken, fastest first.
      left_out: ``(way, reason)`` of those that cannot.
    """

    attention: Attention
    cluster: Cluster
    estimates: tuple[Estimate, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Estimate | None:
        """What is recommended, or None if the memory is there for no way.

        Of the ways that are as fast as the fastest, as far as the model can tell (within
        :data:`ACCURACY`), the one that sends the fewest bytes to other hosts: those links are the
        slow ones, and others use them too.
        """
        fit = [each for each in self.estimates if each.memory <= self.cluster.gpu.memory]
        alike = [each for each in fit if each.seconds <= (1 + ACCURACY) * fit[0].seconds]
        return min(alike, key=lambda each: each.host_bytes, default=None)

    def record(self) -> dict[str, Any]:
        """All of it as plain values, for JSON: what was asked for, every way, and ``best``."""
        best = self.best
        return {
            "attention": dataclasses.asdict(self.attention),
            "cluster": dataclasses.asdict(self.cluster),
            "recommended": None if best is None else best.record(),
            "estimates": [each.record() for each in self.estimates],
            "left_out": dict(self.left_out),
        }

    def __str__(self) -> str:
        return table(self)


def plan(
    *,
    length: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    batch: int = 1,
    gpu: str | Gpu = "h200",
    hosts: int = 1,
    gpus_per_host: int = 8,
    host_link: float = 50.0,
    is_causal: bool = True,
    local_window_size: int | tuple[int, int] | None = None,
) -> Plan:
    """Compares all ways to split one attention over a cluster, by a model of its time and memory.

    The time of a step is its busiest device's scores at the kernel's measured rate, or its
    transfers, whichever is longer (:mod:`burst_jax.plan.model`); rates and their sources are in
    :data:`GPUS`. Bytes are exact. 16-bit activations, float32 travelling gradients.

    Args:
      length: tokens of the whole sequence.
      num_heads: N.
      num_kv_heads: K, a divisor of N; None is N.
      head_dim: H.
      batch: rows.
      gpu: "a100", "h100", "h200", or a :class:`Gpu` of your own.
      hosts: machines.
      gpus_per_host: on each.
      host_link: GB/s that one GPU sends to another host (50: a 400 Gbit/s adapter each).
      is_causal: as in :func:`burst_jax.burst_attention`.
      local_window_size: likewise.

    Returns:
      A :class:`Plan`: estimates by time, and the recommended one, ``best``, with its mesh and its
      arguments for ``burst_attention``.

    Raises:
      ValueError: a size that is not a positive integer, heads that do not fit together, an unknown
        GPU, or no way to split this length at all.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sizes = {
        "length": length,
        "num_heads": num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "batch": batch,
        "hosts": hosts,
        "gpus_per_host": gpus_per_host,
    }
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}: it must be a positive integer")
    if num_heads % kv_heads:
        raise ValueError(
            f"num_kv_heads is {kv_heads}, num_heads {num_heads}: num_heads must be a multiple of it"
        )
    if not isinstance(host_link, int | float) or not 0 < host_link < math.inf:
        raise ValueError(f"host_link is {host_link!r}: it must be a positive number of GB/s")
    make_spec(None, is_causal, 1.0, local_window_size, None)
    cluster = Cluster(
        find_gpu(gpu) if isinstance(gpu, str) else gpu, hosts, gpus_per_host, float(host_link)
    )
    attention = Attention(
        length, batch, num_heads, kv_heads, head_dim, is_causal, local_window_size
    )  # fmt: skip
    masked = is_causal or local_window_size is not None
    estimates, left_out = [], []
    for scheme in _schemes(cluster):
        # Without a mask, or without a ring, all layouts are the same work.
        alike = not masked or not scheme.sizes
        for layout in LAYOUTS[:1] if alike else LAYOUTS:
            try:
                _check(attention, scheme, layout)
            except ValueError as error:
                left_out.append((f"{scheme.name}, {layout}", str(error)))
                continue
            model = Model(attention, cluster, scheme, layout)
            rotations = BACKWARDS[1:] if math.prod(scheme.sizes) > 1 else BACKWARDS[1:2]
            estimates.extend(model.estimate(backward) for backward in rotations)
    if not estimates:
        reasons = "; ".join(f"{way}: {reason}" for way, reason in left_out)
        raise ValueError(f"length is {length}: no way to split it over {cluster.size}: {reasons}")
    # Of ways that take the same time, the one that sends less.
    estimates.sort(key=lambda each: (each.seconds, each.forward_bytes + each.backward_bytes))
    return Plan(attention, cluster, tuple(estimates), tuple(left_out))


def _schemes(cluster: Cluster) -> list[Scheme]:
    """Those that the cluster's shape allows."""
    n, hosts, gpus = cluster.size, cluster.hosts, cluster.gpus
    if n == 1:
        return [Scheme("one device", (1,), 1)]
    schemes = [Scheme("ring", (n,), 1)]
    if hosts > 1 and gpus > 1:
        schemes.append(Scheme("two-level ring", (hosts, gpus), 1))
    for exchange in range(2, gpus + 1):
        if gpus % exchange == 0 and exchange < n:
            name = f"ring of {n // exchange}, heads by {exchange}"
            schemes.append(Scheme(name, (n // exchange,), exchange))
    return [*schemes, Scheme("head parallel", (), n)]


def _check(attention: Attention, scheme: Scheme, layout: str) -> None:
    """Raises ValueError if burst_attention would."""
    ring, exchange = math.prod(scheme.sizes), scheme.exchange
    check_length(layout, attention.length, ring)
    if attention.length % (ring * exchange):
        raise ValueError(
            f"length is {attention.length}: it must be a multiple of {ring * exchange}"
        )
    if exchange > 1:
        check_heads(attention.heads, attention.kv_heads, exchange, "the exchange")


__all__ = ["GPUS", "Estimate", "Gpu", "Plan", "plan"]
