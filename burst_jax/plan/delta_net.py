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

With a decay per key channel (Kimi Delta Attention) a parallel kernel, "operands", runs before the
scans, again in the backward pass. Its rates are fitted to one H200 (JAX 0.11.2; kernels by a
version that took 1.726 / 6.242)::

    1 x 65,536 tokens   3.132 / 11.880
    1 x 32,768          1.601 / 5.976       affine map 0.470, gradient of the first state 0.577
    1 x 16,384          0.820 / 3.041
    kernels at 32,768   operands 1.063, scan 0.639, states 1.059, gradients 2.762

The backward pass of these programs computes the operands again, as that of a training step does.

Affine map and first state's gradient are those of heads that forget slowly; where all decays are
strong they take 0.061 and 0.072. Where whole runs would leave most SMs without a scan, kernels scan
each in parts, which are planned like runs, on one GPU with maps of their own. Composition of
parts, 0.02 to 0.03 ms a pass, is not counted, nor what two chains of a map in one CTA save, 0.07 ms
at 16,384 tokens: both by count.

Heads of other dims are as many heads of 128 as the kernels pad and split them to
(``DeltaNetSizes.kernel_heads``), and arrays that are padded are copied: counted, not measured. The
numbers for Ampere are estimates: its code takes 1.19 / 3.71 at 32,768 tokens on an H200. By count
it took 1.6 / 5.1 on an A100 when it took 1.31 / 3.84 on an H200, before X and P were computed in
the scan's launch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from burst_jax.layouts.parse import parse_layout
from burst_jax.linear.runs import DeviceRuns, Exchange, device_runs
from burst_jax.models.delta_net import DeltaNet, KimiDelta
from burst_jax.plan.hardware import Cluster
from burst_jax.plan.training_strategy import TrainingStrategy
from pallas_kernels.linear.chunks import CHUNK, HEAD_DIM
from pallas_kernels.linear.head_dims import value_parts
from pallas_kernels.linear.sm90.parts import parts_of

# CTAs of a chain: each has half of the state's columns. And SMs of a GPU, by its kernels.
_CTAS_PER_CHAIN = 2
_SMS = {"fused": 132, "reordered": 108}
# Seconds of a collective of few bytes, and of the products that compose maps, in a program: with it
# two H200 take what was measured (docs/linear.md) to 3 % with a decay per head, to 5 % with one per
# key channel. Two all-to-alls, and permutes, were not measured.
_LATENCY = 30e-6
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
    """

    chunk: float
    token: float
    bytes: float


class Rates(NamedTuple):
    """The kernels of a GPU family.

    Attributes:
      forward: of a run from a known state, one after the other.
      backward: the same of all gradients.
      affine: the map of a run.
      first_gradient: the gradient of the first state alone.
      fixed: seconds of each pass: launches, prologues.
    """

    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]
    affine: Pass
    first_gradient: Pass
    fixed: float = 20e-6


_OPERANDS = Pass(0.0, 0.903e-9, 1800)
# By the kernels of a ``burst_jax.plan.Gpu``, and whether there is a decay per key channel.
RATES = {
    ("fused", False): Rates(
        (Pass(1.38e-6, 0.538e-9, 1570),),
        (Pass(3.65e-6, 1.73e-9, 5000),),
        Pass(0.84e-6, 0.41e-9, 900),
        Pass(1.20e-6, 0.36e-9, 1200),
    ),
    ("fused", True): Rates(
        (_OPERANDS, Pass(1.14e-6, 0.36e-9, 1500)),
        (_OPERANDS, Pass(1.92e-6, 1.15e-9, 2900), Pass(0.0, 2.12e-9, 3500)),
        Pass(0.76e-6, 0.36e-9, 1500),
        Pass(0.97e-6, 0.36e-9, 1900),
        fixed=45e-6,
    ),
    ("reordered", False): Rates(
        (Pass(3.1e-6, 0.0, 2300),), (Pass(6.8e-6, 0.0, 5300),), Pass(1.5e-6, 0.0, 1100),
        Pass(2.2e-6, 0.0, 1400),
    ),
}  # fmt: skip


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
      devices: number of devices of a sequence.
      exchange: how these exchange maps.
      channels: whether there is a decay per key channel.
    """

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    taps: int
    runs: int
    devices: int
    exchange: Exchange
    channels: bool = False

    @classmethod
    def of(cls, sizes: DeltaNet, strategy: TrainingStrategy) -> DeltaNetSizes:
        """The share of one device, of a strategy that supports such layers (:func:`obstacle`).

        Raises:
          ValueError: the tensor axis does not divide the heads.
          NotImplementedError: a key head dim without kernels.
        """
        tensor = strategy.tensor
        if sizes.head_dim > HEAD_DIM:
            raise NotImplementedError(
                f"delta_net has head_dim {sizes.head_dim}: the planner has rates of the kernels, "
                f"which support up to {HEAD_DIM}, none of XLA's path"
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
            devices=strategy.seq,
            exchange=runs.exchange(heads),
            channels=isinstance(sizes, KimiDelta),
        )

    @property
    def convolved(self) -> int:
        """Features of the convolutions: of queries, keys and values."""
        return sum(self.features)

    @property
    def out(self) -> int:
        """Features of the output projection's input."""
        return self.heads * self.value_dim

    @property
    def kernel_heads(self) -> int:
        """Value heads of 128 that the kernels have for them."""
        return self.heads * value_parts(self.value_dim)

    @property
    def features(self) -> tuple[int, int]:
        """Features of values, and those of queries and keys together."""
        return self.out, 2 * self.key_heads * self.head_dim

    @property
    def kernel_features(self) -> tuple[int, int]:
        """The same of the arrays that the kernels have."""
        return self.kernel_heads * HEAD_DIM, 2 * self.key_heads * HEAD_DIM

    def copied_bytes(self, *, backward: bool = False) -> int:
        """Bytes per token that are read and written to pad arrays and to undo it, in bfloat16.

        At most: XLA fuses some of it. Forward queries, keys, values and the output; backward
        queries, keys, values, the output's gradient, and the gradients of the first three. Decays
        per key channel are like queries, in float32, and repeated for every head of the kernels.
        """
        (values, keys), (own_values, own_keys) = self.kernel_features, self.features
        passes = 2 if backward else 1
        total = passes * 2 * (keys + own_keys) if keys != own_keys else 0
        if values != own_values:
            total += (1 + passes) * 2 * (values + own_values)
        if self.channels and values != self.heads * self.head_dim:
            total += passes * 4 * (values + self.heads * self.head_dim)
        return total

    @property
    def map_bytes(self) -> int:
        """Bytes of a run's affine map (M, U) of all heads, float32."""
        return 4 * self.heads * self.head_dim * (self.head_dim + self.value_dim)

    def exchanged_bytes(self, rows: int, *, backward: bool = False) -> int:
        """Bytes that a device receives of maps and states, in one direction (docs/linear.md).

        By heads in two all-to-alls, of maps and states, or of gradients and gradients; all-gathered
        over up to 8 devices; else in ``ceil(log2 n) + 1`` permutes, and with two runs an all-reduce
        of the state between the first runs and the second ones.
        """
        n, own = self.devices, rows * self.runs * self.map_bytes
        if n == 1:
            return 0
        state = 4 * rows * self.heads * self.head_dim * self.value_dim
        states = self.runs * state
        match self.exchange:
            case "heads":
                return (n - 1) * ((states if backward else own) + states) // n
            case "gather":
                return (n - 1) * (own if n * self.runs > 2 else states)
        steps = math.ceil(math.log2(n)) + 1
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
        out = self.heads * 2 * self.value_dim
        if self.channels:
            return out
        matrices = 1 if kernels == "fused" else 2
        return out + self.kernel_heads * (2 * CHUNK * matrices + 4 * 5)

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
      NotImplementedError: a decay per key channel on GPUs that have no kernels for it.
    """
    gpu = cluster.gpu
    if (gpu.kernels, sizes.channels) not in RATES:
        raise NotImplementedError(
            f"gpu is {gpu.name}, and delta_net is a KimiDelta: the planner has rates of Hopper's "
            "kernels alone, none of XLA's path, which other GPUs take; plan for an H100 or H200"
        )
    rates, bandwidth = RATES[gpu.kernels, sizes.channels], 1e9 * gpu.bandwidth
    chunks = -(-tokens // (rows * sizes.runs * CHUNK))
    heads, sms = sizes.kernel_heads, _SMS[gpu.kernels]
    ctas = _CTAS_PER_CHAIN * rows * sizes.runs * heads
    parts, has_maps = 1, sizes.devices > 1
    if gpu.kernels == "fused":
        parts = parts_of(ctas, chunks, sms, channels=sizes.channels, has_maps=has_maps)
    chunks, ctas = chunks // parts, ctas * parts
    waves = -(-ctas // sms)

    def seconds(*passes: Pass) -> float:
        each = ((x.chunk, max(x.token, x.bytes / bandwidth)) for x in passes)
        times = (max(chunks * waves * a, tokens * heads * b) for a, b in each)
        return rates.fixed + sum(times)

    features = tokens * (sizes.convolved + 2 * sizes.out)
    around = {
        name: (features * count + tokens * sizes.copied_bytes(backward=name == "backward"))
        / bandwidth
        for name, count in _AROUND.items()
    }
    forward = seconds(*rates.forward) + around["forward"]
    backward = seconds(*rates.backward) + around["backward"]
    if has_maps or parts > 1:
        forward += seconds(rates.affine)
        backward += seconds(rates.first_gradient)
    halo, hosts = sizes.halo_bytes(rows, itemsize=2), 1
    received = sizes.exchanged_bytes(rows) + halo
    received_back = sizes.exchanged_bytes(rows, backward=True) + halo
    if sizes.devices > 1:
        hosts = -(-sizes.devices * strategy.tensor // cluster.gpus)
        rate = 1e9 * cluster.exchange_link
        if hosts > 1:
            rate = min(rate, 1e9 * cluster.host_link)
        # M and U are two arrays of permutes; the convolutions' permutes do not wait for each other.
        steps = 2 * (math.ceil(math.log2(sizes.devices)) + 1)
        steps = {"gather": 2, "heads": 3}.get(sizes.exchange, steps)
        latency = (steps + 1) * _LATENCY
        forward += received / rate + latency
        backward += received_back / rate + latency
    host_bytes = received + received_back if hosts > 1 else 0
    return DeltaNetEstimate(forward, backward, received, received_back, host_bytes)
