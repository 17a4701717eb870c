"""The device that the code being traced will run on."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

_H100_SMS = 132
# Compute capability by device name. GPUs that no pattern matches are queried.
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


def num_sms() -> int:
    """Number of SMs of the GPU that the traced code will run on; an H100's if it is unknown."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.num_cores or _H100_SMS
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or _H100_SMS


def current_platform() -> str:
    """The platform ("gpu", "cpu", ...) of the mesh in context, or JAX's default platform."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float | None:
    """The GPU's compute capability: 8.0 for A100, 9.0 for H100 and H200.

    None if the target is not a GPU, or a GPU that is neither listed nor present.
    """
    if current_platform() != "gpu":
        return None
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    if (capability := listed_capability(kind)) is not None:
        return capability
    present = (
        getattr(x, "compute_capability", None) for x in jax.devices() if x.device_kind == kind
    )
    return next((float(capability) for capability in present if capability), None)


class Target(NamedTuple):
    """Platform and compute capability that a program is compiled for.

    Attributes:
      platform: "gpu", "cpu", ...
      compute_capability: of the NVIDIA GPU; None on other devices, or on a GPU that is neither
        listed nor present.
    """

    platform: str
    compute_capability: float | None


def current_target() -> Target:
    """The target of the program being traced."""
    return Target(current_platform(), compute_capability())


def target_of(array: Any) -> Target:
    """The target of a program on this array: its devices, or the current target for a tracer."""
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return current_target()
    device = next(iter(array.sharding.device_set))
    if device.platform != "gpu":
        return Target(device.platform, None)
    capability = listed_capability(device.device_kind)
    return Target("gpu", capability or float(device.compute_capability))


def listed_capability(kind: str) -> float | None:
    """The compute capability of GPUs of this device name, or None if no pattern matches it."""
    return next((number for name, number in _CAPABILITIES if re.search(name, kind)), None)
