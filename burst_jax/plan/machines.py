"""The GPUs and links that a plan knows, with the sources of their numbers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates and sizes of one GPU.

    Attributes:
      name: name by which :func:`find_gpu` finds it.
      memory: GiB.
      forward: TFLOP/s of the forward kernel on a long causal shard, head dim 128, 16-bit.
      backward: TFLOP/s of the backward kernel on such a shard.
      small_head: share of these rates that head dims up to 64 reach.
      launch: seconds that a kernel takes in addition to its work: launch, filling and draining the
        chip, tables.
      bandwidth: GB/s of its memory, reads and writes together.
      link: GB/s that it sends to a neighbour on the same host, by NCCL while a kernel runs.
      fused: whether one kernel computes dQ, dK and dV.
      source: where the numbers come from.
      peer_link: GB/s of a permute where one process has all GPUs, so that their copy engines move
        the blocks; None is ``link``.
      exchange_link: GB/s of an all-to-all inside a host while no kernel runs, and of a gather of
        weights or a sum of gradients; None is ``link``.
      matmul: TFLOP/s of large 16-bit matrix products in a training step; None is ``forward``.
      peak: TFLOP/s of its data sheet, of which MFU is a share; None says no MFU.
      host_copy: GB/s to the host's memory, and as many back at the same time.
    """

    name: str
    memory: float
    forward: float
    backward: float
    small_head: float
    launch: float
    bandwidth: float
    link: float
    fused: bool
    source: str
    peer_link: float | None = None
    exchange_link: float | None = None
    matmul: float | None = None
    peak: float | None = None
    host_copy: float = 50.0


_H200 = Gpu(
    "h200", 141, 605, 540, 0.66, 60e-6, 3900, 130, True,
    "fitted to rings measured on two and four H200s (burst_jax/EXPERIMENTS.md)", peer_link=380,
    exchange_link=255, matmul=650, peak=989,
)  # fmt: skip
GPUS = {
    "h200": _H200,
    "h100": dataclasses.replace(
        _H200, name="h100", memory=80, bandwidth=2700,
        source="the H200's rates: the same chip, another memory",
    ),
    "a100": Gpu(
        "a100", 80, 175, 110, 0.85, 25e-6, 1600, 87, False,
        "not measured: reasoned from shared-memory reads and others' kernels "
        "(pallas_kernels/EXPERIMENTS.md); NVLink at the H200's share of its peak",
        peer_link=253, exchange_link=170, matmul=240, peak=312, host_copy=25.0,
    ),
}  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
      ValueError: no GPU of that name is known.
    """
    if name not in GPUS:
        raise ValueError(f"gpu is {name!r}: use one of {', '.join(map(repr, GPUS))}, or a Gpu")
    return GPUS[name]
