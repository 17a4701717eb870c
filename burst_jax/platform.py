"""What the code being traced will run on, read from the mesh in context."""

from __future__ import annotations

import re

import jax

# By the name that the driver gives a GPU. One that is not listed is asked itself.
_CAPABILITIES = (
    (r"A100|A800|A30\b", 8.0),
    (r"A10\b|A10G|A40|A16|RTX A\d|RTX 30\d\d", 8.6),
    (r"L4\b|L40|RTX 40\d\d|Ada", 8.9),
    (r"H100|H200|H800|H20\b|GH200", 9.0),
    (r"GB300|B300", 10.3),
    (r"B200|GB200|B100", 10.0),
    (r"RTX 50\d\d|RTX PRO", 12.0),
    (r"V100", 7.0),
    (r"T4\b|RTX 20\d\d", 7.5),
)
# Dense bfloat16 peak, in FLOP/s, from the vendor's data sheets.
_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}

# Compute capabilities of GPUs that NVLink connects.
_LINKED = (8.0, 9.0, 10.0, 10.3)
# Bytes beyond which XLA makes no one permute of those that begin and end together.
_ANY_SIZE = 2**50


def peak_flops(device_kind: str) -> float | None:
    """The peak of one device by its kind, or None where it is not known."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_kind), None)


def current_platform() -> str:
    """ "gpu", "cpu", ...: of the mesh in context if it says, else JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float | None:
    """8.0 for A100, 9.0 for H100 and H200; None if the platform is not a known NVIDIA GPU."""
    if current_platform() != "gpu":
        return None
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    for pattern, capability in _CAPABILITIES:
        if re.search(pattern, kind):
            return capability
    for present in jax.devices():
        if present.device_kind == kind and hasattr(present, "compute_capability"):
            return float(present.compute_capability)
    return None


def compiler_options(
    platform: str | None = None, *, peer_copies: bool | None = None
) -> dict[str, bool | int | str]:
    """What XLA needs to hide the links behind the kernels, for the outermost ``jax.jit``.

    On GPUs: the latency-hiding scheduler, which XLA leaves off on some generations; one permute for
    all arrays that travel together, however large; and more than one on their way at once, so that
    a block and a gradient, the inner and the outer links of a two-level ring are used together::

        step = jax.jit(step, compiler_options=burst_jax.compiler_options())

    Args:
      platform: "gpu", "cpu", ...; None is the mesh's in context, or JAX's default.
      peer_copies: blocks are moved by the GPUs' copy engines, not by NCCL's kernels, which take
        multiprocessors from the attention: 2.7 times as fast on four H200 while a kernel runs. All
        GPUs must belong to one process and reach each other's memory. None: if there is one process
        and its GPUs are of a kind that NVLink connects (A100, H100, H200, B200, B300).

    Returns:
      Options for ``jax.jit(..., compiler_options=)``; empty where there is nothing to set.
    """
    if (platform or current_platform()) not in ("gpu", "cuda"):
        return {}
    options: dict[str, bool | int | str] = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
        "xla_gpu_collective_permute_combine_threshold_bytes": _ANY_SIZE,
    }
    if peer_copies is None:
        peer_copies = jax.process_count() == 1 and compute_capability() in _LINKED
    if peer_copies:
        options["xla_gpu_collective_permute_mode"] = "COLLECTIVES_PEER_MEMORY"
    return options
