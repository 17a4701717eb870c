"""Selects the implementation of the gated delta rule: the one that a user named, or the fastest."""

from __future__ import annotations

from pallas_kernels.choice import NAMES, cannot_run, substitute, warn_of_xla
from pallas_kernels.linear.backend import Implementation, Inputs
from pallas_kernels.linear.xla import XLA

# Families of attention kernels that have none of the gated delta rule.
_MISSING = {"mosaic_sm80": "there are no Ampere kernels of the gated delta rule"}


def check(implementation: str | None) -> str | None:
    """The name of an implementation, or None; ValueError for anything else."""
    if implementation is not None and implementation not in NAMES:
        raise ValueError(
            f"implementation is {implementation!r}: use None or one of "
            f"{', '.join(map(repr, NAMES))}"
        )
    return implementation


def resolve(
    name: str | None, *, platform: str, compute_capability: float | None, inputs: Inputs
) -> Implementation:
    """The implementation to run: the named one, or for None the fastest that supports the call.

    If None chooses XLA on a GPU for which attention has kernels, a
    :class:`pallas_kernels.SlowerKernelsWarning` has the reason.

    Args:
      name: as of :func:`check`.
      platform: "gpu", "cpu", ...
      compute_capability: 9.0 for H100; None if it is not known or not a GPU.
      inputs: the call's inputs; only shapes and dtypes are read.

    Raises:
      NotImplementedError: the named one does not support the device or the arrays.
    """
    # The reference is one of attention's alone.
    name = "xla" if substitute() else name
    where = platform, compute_capability, inputs
    if name is None:
        fastest = "mosaic_sm90" if compute_capability == 9.0 else "mosaic_sm80"
        obstacle = _obstacle(fastest, *where) if platform == "gpu" else "no GPU"
        if obstacle is not None and platform == "gpu" and (compute_capability or 0) >= 8.0:
            warn_of_xla(fastest, obstacle)
        return XLA if obstacle is not None else _named(fastest)
    obstacle = _obstacle(name, *where)
    if obstacle is not None:
        raise NotImplementedError(cannot_run(name, obstacle))
    return _named(name)


def _named(name: str) -> Implementation:
    """Importing kernels takes most of a second, so it is late."""
    if name == "xla":
        return XLA
    from pallas_kernels.linear.sm90.operation import MOSAIC_SM90

    return MOSAIC_SM90


def _obstacle(
    name: str, platform: str, compute_capability: float | None, inputs: Inputs
) -> str | None:
    """Why an implementation cannot run, or None if it can."""
    if name in _MISSING:
        return _MISSING[name]
    implementation = _named(name)
    unavailable = implementation.unavailable(platform, compute_capability)
    return implementation.unsupported(inputs) if unavailable is None else unavailable
