"""Selects the implementation of the gated delta rule: the one that a user named, or the fastest."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.choice import NAMES, choose, substitute
from pallas_kernels.device import current_target
from pallas_kernels.linear.backend import Implementation, Inputs
from pallas_kernels.linear.xla import XLA


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

    See :func:`pallas_kernels.choice.choose`.

    Args:
      name: as of :func:`check`.
      platform: "gpu", "cpu", ...
      compute_capability: 9.0 for H100; None if it is not known or not a GPU.
      inputs: the call's inputs; only shapes and dtypes are read.

    Raises:
      NotImplementedError: the named one does not support the device or the arrays.
    """
    device = platform, compute_capability

    def obstacle(one: Implementation) -> str | None:
        return one.unavailable(*device) or one.unsupported(inputs)

    chosen: Any = choose(name, _named, device, obstacle)
    return chosen


def supports_step(projected: jax.Array, state: Any) -> bool:
    """Whether the program being traced can run :func:`pallas_kernels.linear.sm80.step.step`.

    It has no other implementation: a caller without the kernel computes a step's parts.

    Args:
      projected: the outputs of the layer's input projections.
      state: of the layer, like ``StepState``.
    """
    target = current_target()
    if target.platform != "gpu" or substitute() is not None:
        return False
    from pallas_kernels.linear.sm80 import step

    reasons = step.unavailable(*target), step.unsupported(projected, state)
    return reasons == (None, None)


def _named(name: str) -> Implementation:
    """Importing kernels takes most of a second, so it is late."""
    if name == "mosaic_sm80":
        from pallas_kernels.linear.sm80.operation import MOSAIC_SM80

        return MOSAIC_SM80
    if name == "mosaic_sm90":
        from pallas_kernels.linear.sm90.operation import MOSAIC_SM90

        return MOSAIC_SM90
    return XLA  # Attention's reference is its own.
