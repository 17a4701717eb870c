"""The device that the program being traced will run on, and its peak rate."""

from __future__ import annotations

from pallas_kernels.device import Target as Target
from pallas_kernels.device import compute_capability as compute_capability
from pallas_kernels.device import current_platform as current_platform
from pallas_kernels.device import current_target as current_target
from pallas_kernels.device import listed_capability as listed_capability
from pallas_kernels.device import target_of as target_of

# Dense bfloat16 peak in FLOP/s by a part of the device name, from the vendor's data sheets.
_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s, or None for a device that is not listed."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_kind), None)
