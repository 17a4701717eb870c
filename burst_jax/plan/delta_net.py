"""Costs of one linear-attention layer on a cluster: kernels, exchanged states, saved bytes.

A device scans its tokens in chunks of 64. The chunks of one head follow each other, so a scan takes
at least the time of a chain of chunks, however few heads there are; with many chains the SMs or
device memory are the bound. With C chunks in a run, ``waves`` of the chains over the GPU's SMs, and
the tokens and value heads of the device::

    seconds = fixed + max(C waves chunk, tokens heads token, tokens heads bytes / bandwidth)

The numbers for Hopper are fitted to one H200 (JAX 0.11.2, 32 heads of 128, forward / forward and
backward, ms; pallas_kernels/EXPERIMENTS.md)::

    1 x 32,768 tokens   0.724 / 2.630       affine map 0.448, gradient of the first state 0.633
    1 x 8,192           0.195 / 0.698
    2 x 16,384          0.583 / 2.431       (what zigzag has of 32,768); on an H100 0.620 / 2.646

Affine map and first state's gradient are those of heads that forget slowly; where all decays are
strong they take 0.061 and 0.072. The numbers for Ampere are estimates: its code takes 1.19 / 3.71
at 32,768 tokens on an H200. By count it took 1.6 / 5.1 on an A100 when it took 1.31 / 3.84 on an
H200, before X and P were computed in the scan's launch.

With a decay per key channel (Kimi Delta Attention) kernels of their own compute the operands before
the scans, and the gradients after them, in parallel: ``parallel`` seconds per token and head are
added. On the same H200::

    1 x 32,768 tokens   1.726 / 6.242       operands 1.063, affine map 0.470, gradient 0.577
    1 x 8,192           0.529 / 1.755       these two rows are of an earlier version, with
    2 x 16,384          1.600 / 6.360       operands of 1.192 per 32,768 tokens
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from burst_jax.layouts.parse import parse_layout
from burst_jax.linear.runs import GATHERED, DeviceRuns, device_runs
from burst_jax.models.delta_net import DeltaNet, KimiDelta
from burst_jax.plan.hardware import Cluster
from burst_jax.plan.training_strategy import TrainingStrategy

CHUNK = 64
# The kernels' head dims; XLA's path has no rates.
HEAD_DIM = 128
# CTAs of a chain: each has half of the state's columns. And SMs of a GPU, by its kernels.
_CTAS_PER_CHAIN = 2
_SMS = {"fused": 132, "reordered": 108}
# Seconds of a collective of few bytes: an exchange of two arrays over two H200 takes 0.13 ms, 0.03
# of it at the rate of the interconnect (burst_jax/EXPERIMENTS.md).
_LATENCY = 50e-6
# Bytes that the operations around the kernels (convolutions, SiLU, norms, the output's gate) read
# and write per feature of the convolutions and of the gated output, forward, and backward with
# recomputation. Counted, not measured.
_AROUND = {"forward": 6, "backward": 15}


class Pass(NamedTuple):
    """A pass over all tokens.

    Attributes:
      chunk: seconds of a chunk in a chain.
      token: seconds of a token and value head, where all SMs have work.
      bytes: of device memory per token and value head.
      parallel: seconds of a token and value head in kernels before or after the scan.
    """

    chunk: float
    token: float
    bytes: float
    parallel: float = 0.0


class Rates(NamedTuple):
    """The kernels of a GPU family.

    Attributes:
      forward: of a run from a known state.
      backward: all gradients.
      affine: the map of a run.
      first_gradient: the gradient of the first state alone.
      fixed: seconds of each pass: launches, prologues.
    """

    forward: Pass
    backward: Pass
    affine: Pass
    first_gradient: Pass
    fixed: float = 20e-6


# By the kernels of a ``burst_jax.plan.Gpu``.
RATES = {
    "fused": Rates(
        Pass(1.38e-6, 0.538e-9, 1570),
        Pass(3.65e-6, 1.73e-9, 5000),
        Pass(0.84e-6, 0.41e-9, 900),
        Pass(1.20e-6, 0.36e-9, 1200),
    ),
    "reordered": Rates(
        Pass(3.1e-6, 0.0, 2300), Pass(6.8e-6, 0.0, 5300), Pass(1.5e-6, 0.0, 1100),
        Pass(2.2e-6, 0.0, 1400),
    ),
}  # fmt: skip


# The same with a decay per key channel.
CHANNEL_RATES = {
    "fused": Rates(
        Pass(1.25e-6, 0.39e-9, 1500, 1.01e-9),
        Pass(2.07e-6, 1.08e-9, 2900, 3.28e-9),
        Pass(0.92e-6, 0.43e-9, 900),
        Pass(1.13e-6, 0.38e-9, 1200),
    )
}


@dataclasses.dataclass(frozen=True)
class DeltaNetSizes:
    """One device's share of a linear-attention layer.

    Attributes:
      heads: its value heads.
      key_heads: its query and key heads.
      head_dim: of queries and keys, H.
      value_dim: of values, Hv.
      taps: of the convolutions.
      runs: runs of tokens of a sequence on the device: 2 in zigzag.
      gathers: whether the devices of a sequence gather all maps.
      devices: number of these devices.
      channels: whether decays are per key channel, as in Kimi Delta Attention.
    """

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    taps: int
    runs: int
    gathers: bool
    devices: int
    channels: bool

    @classmethod
    def of(cls, sizes: DeltaNet, strategy: TrainingStrategy) -> DeltaNetSizes:
        """The share of one device, of a strategy that supports such layers (:func:`obstacle`).

        Raises:
          ValueError: the tensor axis does not divide the heads.
          NotImplementedError: head dims without kernels.
        """
        tensor = strategy.tensor
        if (sizes.head_dim, sizes.value_head_dim) != (HEAD_DIM, HEAD_DIM):
            raise NotImplementedError(
                f"delta_net has head dims {(sizes.head_dim, sizes.value_head_dim)}: the planner "
                f"has rates of the kernels' {(HEAD_DIM, HEAD_DIM)} alone, none of XLA's path"
            )
        for name, count in (("heads", sizes.num_heads), ("key heads", sizes.num_key_heads)):
            if count % tensor:
                raise ValueError(
                    f"delta_net has {count} {name}: {tensor} devices do not divide them"
                )
        runs = device_runs(parse_layout(strategy.layout), (), strategy.seq, "Gated DeltaNet")
        assert isinstance(runs, DeviceRuns)
        heads, key_heads = sizes.num_heads // tensor, sizes.num_key_heads // tensor
        return cls(
            heads=heads,
            key_heads=key_heads,
            head_dim=sizes.head_dim,
            value_dim=sizes.value_head_dim,
            taps=sizes.conv_taps,
            runs=runs.count,
            gathers=strategy.seq <= GATHERED,
            devices=strategy.seq,
            channels=isinstance(sizes, KimiDelta),
        )

    @property
    def convolved(self) -> int:
        """Features of the convolutions: of queries, keys and values."""
        return 2 * self.key_heads * self.head_dim + self.out

    @property
    def out(self) -> int:
        """Features of the output projection's input."""
        return self.heads * self.value_dim

    @property
    def map_bytes(self) -> int:
        """Bytes of a run's affine map (M, U) of all heads, float32."""
        return 4 * self.heads * self.head_dim * (self.head_dim + self.value_dim)

    def exchanged_bytes(self, rows: int) -> int:
        """Bytes that a device receives of maps, in one direction (docs/linear.md).

        All-gathered over up to 8 devices; else ``ceil(log2 n) + 1`` permutes, and with two runs an
        all-reduce of the state between the first runs and the second ones.
        """
        n, own = self.devices, rows * self.runs * self.map_bytes
        if n == 1:
            return 0
        if self.gathers:
            return (n - 1) * own
        steps = math.ceil(math.log2(n)) + 1
        state = 4 * rows * self.heads * self.head_dim * self.value_dim
        return steps * own + (2 * (n - 1) * state // n if self.runs > 1 else 0)

    def halo_bytes(self, rows: int, itemsize: int) -> int:
        """Bytes of the convolutions' inputs that a device receives before its runs."""
        halo = rows * self.runs * (self.taps - 1) * self.convolved * itemsize
        return 0 if self.devices == 1 else halo

    def kept_bytes(self, kernels: str) -> int:
        """Bytes that a layer keeps per token: out in bfloat16, and what the kernels keep of chunks.

        These are the inverses, on Ampere also the scores, 64 numbers a token, and five float32;
        with a decay per key channel nothing.
        """
        if self.channels:
            return self.heads * 2 * self.value_dim
        matrices = 1 if kernels == "fused" else 2
        return self.heads * (2 * self.value_dim + 2 * CHUNK * matrices + 4 * 5)

    def state_bytes(self, rows: int) -> int:
        """Bytes that a layer keeps of M and of the state before each run, float32."""
        return 0 if self.devices == 1 else rows * self.runs * self.map_bytes


def obstacle(strategy: TrainingStrategy) -> tuple[str, str] | None:
    """``(what, reason)`` if Gated DeltaNet layers do not support a strategy's mesh or layout."""
    if strategy.ulysses > 1:
        return "meshes with a Ulysses axis", "Gated DeltaNet layers support none"
    layout = parse_layout(strategy.layout)
    try:
        device_runs(layout, (), strategy.seq, "Gated DeltaNet")
    except NotImplementedError:
        reason = "Gated DeltaNet needs long runs of tokens, 'zigzag' or 'contiguous'"
        return f"the {strategy.layout} layout", reason
    return None


@dataclasses.dataclass(frozen=True)
class DeltaNetEstimate:
    """The cost of one layer without its projections, per device.

    Attributes:
      forward_seconds: kernels, exchange, halo, and the operations around them.
      backward_seconds: the same backward, with the recomputation of what is around the kernels.
      forward_bytes: received in the forward pass.
      backward_bytes: received in the backward pass.
      host_bytes: sent to another host in both passes, at most.
    """

    forward_seconds: float
    backward_seconds: float
    forward_bytes: int
    backward_bytes: int
    host_bytes: int


def estimate(
    sizes: DeltaNetSizes, cluster: Cluster, strategy: TrainingStrategy, *, tokens: int, rows: int
) -> DeltaNetEstimate:
    """The cost of one layer.

    Args:
      sizes: of the device.
      cluster: all GPUs.
      strategy: of the step.
      tokens: of all of the device's sequences.
      rows: number of these sequences.

    Raises:
      NotImplementedError: decays per key channel on GPUs other than Hopper's.
    """
    gpu = cluster.gpu
    of_kind = CHANNEL_RATES if sizes.channels else RATES
    if gpu.kernels not in of_kind:
        raise NotImplementedError(
            f"delta_net is KimiDelta, and the GPU {gpu.name}: decays per key channel have kernels, "
            "whose rates the planner has, on Hopper GPUs alone; plan with gpu='h100' or 'h200'"
        )
    rates, bandwidth = of_kind[gpu.kernels], 1e9 * gpu.bandwidth
    chunks = -(-tokens // (rows * sizes.runs * CHUNK))
    ctas = _CTAS_PER_CHAIN * rows * sizes.runs * sizes.heads
    waves = -(-ctas // _SMS[gpu.kernels])

    def seconds(work: Pass) -> float:
        each, all_heads = max(work.token, work.bytes / bandwidth), tokens * sizes.heads
        scan = max(chunks * waves * work.chunk, all_heads * each)
        return rates.fixed + scan + all_heads * work.parallel

    features = tokens * (sizes.convolved + 2 * sizes.out)
    around = {name: features * count / bandwidth for name, count in _AROUND.items()}
    forward = seconds(rates.forward) + around["forward"]
    backward = seconds(rates.backward) + around["backward"]
    maps, halo = sizes.exchanged_bytes(rows), sizes.halo_bytes(rows, itemsize=2)
    if sizes.devices > 1:
        hosts = -(-sizes.devices * strategy.tensor // cluster.gpus)
        rate = 1e9 * cluster.exchange_link
        if hosts > 1:
            rate = min(rate, 1e9 * cluster.host_link)
        # M and U are two arrays; the convolutions' permutes do not wait for each other.
        steps = 2 if sizes.gathers else 2 * (math.ceil(math.log2(sizes.devices)) + 1)
        sent = (maps + halo) / rate + (steps + 1) * _LATENCY
        forward += seconds(rates.affine) + sent
        backward += seconds(rates.first_gradient) + sent
    else:
        hosts = 1
    received = maps + halo
    host_bytes = 2 * received if hosts > 1 else 0
    return DeltaNetEstimate(forward, backward, received, received, host_bytes)
