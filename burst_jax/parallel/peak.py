"""The peak rate of a device."""

from __future__ import annotations

# Dense bfloat16 peak in FLOP/s by a part of the device name, from the vendor's data sheets.
_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 peak of one device in FLOP/s, or None for a device that is not listed."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_kind), None)
