"""Compares the ways to split a sequence: bytes, seconds and memory of each, without a GPU.

``burst_jax.plan.attention(...)`` for one attention, ``burst_jax.plan.training(...)`` for a
decoder's whole training step, or ``python -m burst_jax.plan --help``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.attention.block_mask import with_block_mask
from burst_jax.attention.shardings import check_lengths
from burst_jax.layouts.permutation import LAYOUTS
from burst_jax.plan.machines import GPUS as GPUS
from burst_jax.plan.machines import Gpu as Gpu
from burst_jax.plan.model import (
    Attention,
    Cluster,
    Estimate,
    Model,
    Scheme,
    check_sizes,
    cluster_of,
)
from burst_jax.plan.table import table
from burst_jax.plan.training_plan import TrainingPlan as TrainingPlan
from burst_jax.plan.training_plan import training as training
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import ROTATIONS
from burst_jax.ring.ulysses import check_heads

# The model cannot tell two ways apart whose times differ by less than this share: two thirds of the
# measured rings lie within it of their estimates (``python -m benchmarks plan``).
ACCURACY = 0.03


@dataclasses.dataclass(frozen=True)
class Plan:
    """What :func:`attention` found; ``print`` it for a table.

    Attributes:
      attention: the attention that is computed.
      cluster: the GPUs that compute it.
      estimates: an estimate for every way that is possible, fastest first.
      left_out: ``(way, reason)`` for every way that is not.
    """

    attention: Attention
    cluster: Cluster
    estimates: tuple[Estimate, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Estimate | None:
        """The recommended way, or None if every way needs more memory than a GPU has.

        The model cannot tell ways apart whose times differ by less than :data:`ACCURACY`. Of the
        ways that are so close to the fastest, it is the one that sends the fewest bytes to other
        hosts, because links between hosts are slow, and other programs use them too.
        """
        fit = [each for each in self.estimates if each.memory <= self.cluster.gpu.memory]
        as_fast = [each for each in fit if each.seconds <= (1 + ACCURACY) * fit[0].seconds]
        return min(as_fast, key=lambda each: each.host_bytes, default=None)

    def record(self) -> dict[str, Any]:
        """The whole plan as plain values, for JSON."""
        best, blocks = self.best, self.attention.blocks
        attention = dataclasses.asdict(dataclasses.replace(self.attention, blocks=None))
        if blocks is not None:
            attention["blocks"] = {
                "q_block": blocks.q_block,
                "kv_block": blocks.kv_block,
                "shape": blocks.shape,
                "seen": blocks.seen,
            }
        return {
            "attention": attention,
            "cluster": dataclasses.asdict(self.cluster),
            "recommended": None if best is None else best.record(),
            "estimates": [each.record() for each in self.estimates],
            "left_out": dict(self.left_out),
        }

    def __str__(self) -> str:
        return table(self)


def attention(
    *,
    length: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    value_head_dim: int | None = None,
    batch: int = 1,
    gpu: str | Gpu = "h200",
    hosts: int = 1,
    gpus_per_host: int = 8,
    host_link: float = 50.0,
    is_causal: bool = True,
    local_window_size: int | tuple[int, int] | None = None,
    block_mask: np.ndarray | jax.Array | None = None,
) -> Plan:
    """Compares all ways to split one attention over a cluster, by a model of its time and memory.

    A step takes as long as the kernel on the busiest device, at the kernel's measured rate, or as
    long as the step's transfers, whichever is longer (:mod:`burst_jax.plan.model`). Rates and their
    sources are in :data:`GPUS`. Bytes are exact. Activations are assumed to be 16-bit, and the
    gradients that travel float32.

    Args:
      length: number of tokens of the whole sequence.
      num_heads: number of query heads, N.
      num_kv_heads: number of key/value heads, K, a divisor of N; None is N.
      head_dim: number of features of a query and of a key, H.
      value_head_dim: number of features of a value, Hv; None is H. The kernels' rates were measured
        with H = Hv.
      batch: number of rows.
      gpu: "a100", "h100", "h200", or a :class:`Gpu` of your own.
      hosts: number of machines.
      gpus_per_host: number of GPUs on each machine.
      host_link: GB/s that one GPU sends to another host (50: an adapter of 400 Gbit/s for each).
      is_causal: as in :func:`burst_jax.burst_attention`.
      local_window_size: as in :func:`burst_jax.burst_attention`.
      block_mask: as in :func:`burst_jax.burst_attention`, where it must be a NumPy array for the
        hops to be left out that a plan leaves out. With a table for each head a block counts that
        some head sees.

    Returns:
      A :class:`Plan`: estimates, fastest first, and the recommended estimate, ``best``, with its
      mesh and its arguments for ``burst_attention``.

    Raises:
      ValueError: a size that is not a positive integer, heads that do not fit together, an unknown
        GPU, a ``block_mask`` of another dtype or shape, or no way to split this length at all.
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_sizes(
        length=length, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim, batch=batch,
        value_head_dim=head_dim if value_head_dim is None else value_head_dim,
    )  # fmt: skip
    if num_heads % kv_heads:
        raise ValueError(
            f"num_kv_heads is {kv_heads}, num_heads {num_heads}: num_heads must be a multiple of it"
        )
    cluster = cluster_of(gpu, hosts, gpus_per_host, host_link)
    attention = Attention(
        length, batch, num_heads, kv_heads, head_dim, is_causal, local_window_size,
        value_head_dim=value_head_dim,
    )  # fmt: skip
    if block_mask is not None:
        attention = dataclasses.replace(attention, blocks=_blocks(attention, block_mask))
    estimates, left_out = [], []
    for scheme in _schemes(cluster):
        requests = [scheme.request(attention, layout) for layout in LAYOUTS]
        # Without a mask, or without a ring, the work does not depend on the layout.
        masked = requests[0].spec.mask.reads_positions or attention.blocks is not None
        if not scheme.sizes or not masked:
            requests = requests[:1]
        for request in requests:
            try:
                _check(attention, request)
            except ValueError as error:
                left_out.append((f"{scheme.name}, {request.layout}", str(error)))
                continue
            model = Model(attention, cluster, scheme, request)
            rotations = ROTATIONS if request.ring_size > 1 else ROTATIONS[:1]
            estimates.extend(model.estimate(rotation) for rotation in rotations)
    if not estimates:
        reasons = "; ".join(f"{way}: {reason}" for way, reason in left_out)
        raise ValueError(f"length is {length}: no way to split it over {cluster.size}: {reasons}")
    # Of ways that take the same time, the one that sends less comes first.
    estimates.sort(key=lambda each: (each.seconds, each.forward_bytes + each.backward_bytes))
    return Plan(attention, cluster, tuple(estimates), tuple(left_out))


def _blocks(attention: Attention, block_mask: Any) -> Blocks | None:
    """What a ring knows of a table; ValueError if it does not fit the attention."""
    sides = attention.batch, attention.length, attention.heads, attention.head_dim
    # Of query and key it reads the tokens and the query's heads.
    tokens: Any = jax.ShapeDtypeStruct(sides, jnp.bfloat16)
    request = Scheme("one device", (1,), 1).request(attention, "contiguous")
    return with_block_mask(request, tokens, tokens, np.asarray(block_mask)).blocks


def _schemes(cluster: Cluster) -> list[Scheme]:
    """The schemes that the cluster's shape allows."""
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
    return [*schemes, Scheme("ulysses", (), n)]


def _check(attention: Attention, request: Request) -> None:
    """Raises ValueError if ``burst_attention`` would refuse to split the attention in this way."""
    check_lengths(request, {"length": attention.length})
    heads, kv_heads = attention.heads, attention.kv_heads
    check_heads(heads, kv_heads, request.ulysses_size, "the exchange")


__all__ = ["GPUS", "Estimate", "Gpu", "Plan", "TrainingPlan", "attention", "training"]
