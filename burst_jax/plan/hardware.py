"""GPUs and clusters known to the planner, with the sources of their rates."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from burst_jax.errors import check_integer


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates and sizes of one GPU.

    Attributes:
      name: like its key in :data:`GPUS`.
      memory: GiB.
      forward: TFLOP/s of the forward kernel on a long causal shard, head dim 128, 16-bit.
      backward: TFLOP/s of the backward kernel on such a shard.
      small_head: fraction of these rates reached with head dims up to 64.
      large_head: fraction of each of them reached with head dims of 256; between 128 and 256 it is
        interpolated.
      launch: fixed cost of a kernel in seconds: launch, prologue and epilogue, tile tables.
      bandwidth: GB/s of device memory, reads and writes together.
      link: GB/s sent to a GPU of the same host by an NCCL permute while a kernel runs.
      kernels: of the backward pass: "fused", or "reordered" if it has its own order of dQ's
        elements.
      source: where the rates come from.
      peer_link: GB/s of a permute by the copy engines, where one process has all GPUs; None is
        ``link``.
      exchange_link: GB/s within a host of all-to-alls while no kernel runs, and of all-gathers of
        weights and reductions of gradients; None is ``link``.
      matmul: TFLOP/s of large 16-bit matmuls in a training step; None is ``forward``.
      peak: TFLOP/s of the data sheet, for MFU; None omits the MFU.
      host_copy: GB/s to host memory, and the same back at the same time.
      host_link: GB/s that one GPU sends to another host, unless the plan is given another rate.
    """

    name: str
    memory: float
    forward: float
    backward: float
    small_head: float
    launch: float
    bandwidth: float
    link: float
    kernels: Literal["fused", "reordered"]
    source: str
    peer_link: float | None = None
    exchange_link: float | None = None
    matmul: float | None = None
    peak: float | None = None
    host_copy: float = 50.0
    # A 400 Gbit/s adapter for each GPU: a DGX H100 or H200 has eight ConnectX-7 (its user guide).
    host_link: float = 50.0
    large_head: tuple[float, float] = (1.0, 1.0)


# At head dim 64: docs/performance.md, an H100. At 256: the steps of qwen3-next-softmax and
# qwen3-next-dense there.
_H200 = Gpu(
    "h200", 141, 665, 570, 0.69, 60e-6, 3900, 130, "fused",
    "fitted to rings and steps on two H200s, links on four (burst_jax/EXPERIMENTS.md)",
    peer_link=380, exchange_link=255, matmul=650, peak=989, large_head=(0.95, 0.65),
)  # fmt: skip
GPUS = {
    "h200": _H200,
    "h100": dataclasses.replace(
        _H200, name="h100", memory=80, bandwidth=2700,
        source="the H200's rates: the same chip with other memory",
    ),
    # FlashAttention-2 on an A100 at 16K tokens, full mask (arXiv 2307.08691): forward 73 % of the
    # peak, 203 forward and backward. On an H100 mosaic_sm80 makes 1.05 and 1.06 of its rates, under
    # a causal mask 0.96 and 0.97 of its own, at head dim 64 0.80, at 256 0.83 and 0.75
    # (docs/performance.md). A DGX A100 has a 200 Gbit/s adapter for each GPU, eight ConnectX-6 (its
    # user guide), behind PCIe 4 x16.
    "a100": Gpu(
        "a100", 80, 228, 200, 0.80, 25e-6, 1600, 87, "reordered",
        "not measured on an A100: FlashAttention-2's published rates there times the ratio to it "
        "on an H100 (docs/performance.md); NVLink at the H200's share of its peak",
        peer_link=253, exchange_link=170, matmul=240, peak=312, host_copy=25.0,
        host_link=25.0, large_head=(0.83, 0.75),
    ),
}  # fmt: skip
GPUS["a100-40gb"] = dataclasses.replace(
    GPUS["a100"], name="a100-40gb", memory=40, bandwidth=1220,
    source=f"those of a100, with the data sheets' ratio of memory bandwidths; "
    f"{GPUS['a100'].source}",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts, their GPUs and the interconnect.

    Attributes:
      gpu: the GPU model.
      hosts: number of hosts.
      gpus: number of GPUs per host.
      host_link: GB/s that one GPU sends to another host.
    """

    gpu: Gpu
    hosts: int
    gpus: int
    host_link: float

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.gpus

    @property
    def link(self) -> float:
        """GB/s of a permute within a host; several hosts are several processes, which use NCCL."""
        gpu = self.gpu
        return gpu.link if self.hosts > 1 or gpu.peer_link is None else gpu.peer_link

    @property
    def exchange_link(self) -> float:
        """GB/s within a host of an all-to-all, all-gather or reduction."""
        gpu = self.gpu
        return gpu.link if gpu.exchange_link is None else gpu.exchange_link


def cluster_of(gpu: str | Gpu, hosts: int, gpus_per_host: int, host_link: float | None) -> Cluster:
    """The cluster of a plan's arguments; ``host_link`` None is the GPU's.

    Raises:
      ValueError: an unknown GPU, or a number that is not positive.
    """
    if isinstance(gpu, str):
        gpu = gpu.lower()
    hosts = check_integer("hosts", hosts, 1)
    gpus_per_host = check_integer("gpus_per_host", gpus_per_host, 1)
    if isinstance(gpu, str) and gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: use one of {', '.join(map(repr, GPUS))}, or a Gpu")
    known = GPUS[gpu] if isinstance(gpu, str) else gpu
    link = known.host_link if host_link is None else host_link
    if not isinstance(link, int | float) or not 0 < link < math.inf:
        raise ValueError(f"host_link is {link!r}: it must be a positive number of GB/s")
    return Cluster(known, hosts, gpus_per_host, float(link))
