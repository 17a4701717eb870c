"""Selects the implementation of local attention: the one that a user named, or the fastest."""

from __future__ import annotations

import warnings

import jax

from pallas_kernels.backend import Implementation
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mosaic.sm80.implementation import MOSAIC_SM80
from pallas_kernels.mosaic.sm90.implementation import MOSAIC_SM90
from pallas_kernels.pallas_triton.implementation import TRITON, tuned_triton
from pallas_kernels.reference import REFERENCE
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.xla import XLA

# What implementation=None tries, fastest first. The last one supports everything.
_CANDIDATES = (MOSAIC_SM90, MOSAIC_SM80, TRITON, XLA)

# From 0.12.0.1 on JAX assembles Mosaic kernels with the nvJitLink library, as relocatable code. In
# relocatable code all warpgroups of a kernel get the same number of registers, so the consumer
# warpgroups spill, and the Triton kernels are faster. Mosaic kernels can still be chosen by name.
LINKED_SINCE = (0, 12)


class SlowerKernelsWarning(UserWarning):
    """``implementation=None`` does not use the Hopper kernels on a GPU that could run them."""


NAMES = ("mosaic_sm90", "mosaic_sm80", "triton", "xla")
_BY_NAME = {
    "mosaic_sm90": MOSAIC_SM90,
    "mosaic_sm80": MOSAIC_SM80,
    "triton": TRITON,
    "xla": XLA,
    "reference": REFERENCE,  # For tests only.
}


def find(implementation: str | Implementation | None) -> Implementation | None:
    """The implementation that a user named; None if the choice is left to the library.

    Raises:
      ValueError: there is no such implementation.
    """
    if implementation is None or isinstance(implementation, Implementation):
        return implementation
    if not isinstance(implementation, str) or implementation not in _BY_NAME:
        raise ValueError(
            f"implementation is {implementation!r}: use None, an Implementation, or one of "
            f"{', '.join(map(repr, NAMES))}"
        )
    return _BY_NAME[implementation]


def resolve(
    implementation: str | Implementation | None,
    *,
    platform: str,
    compute_capability: float | None,
    inputs: AttentionInputs,
    backward: bool = False,
    deterministic: bool = False,
    spec: AttentionSpec | None = None,
) -> Implementation:
    """The implementation to run: the named one, or for None the fastest that supports the call.

    The decision does not try to lower kernels, because those of a newer GPU abort when they are
    lowered for an older one. If None does not choose the Hopper kernels although they could run, a
    :class:`SlowerKernelsWarning` gives the reason and the remedy.

    Args:
      implementation: a name, an :class:`Implementation`, or None.
      platform: "gpu", "cpu", ...
      compute_capability: 8.0 for A100, 9.0 for H100; None if it is not known or not a GPU.
      inputs: the call's inputs. Only shapes and dtypes are read, so the leaves may be
        ``jax.ShapeDtypeStruct``, and positions may be None.
      backward: whether to choose for the backward pass.
      deterministic: whether the gradient must be bitwise reproducible.
      spec: mask and score of the call; None is one without ``score_mod`` and ``mask_mod``.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the named one does not support the device, the arrays or the user
        functions.
    """
    chosen = find(implementation)
    if chosen is not None:
        chosen = _variant(chosen, deterministic)
    where = platform, compute_capability, inputs, backward, deterministic, spec
    if chosen is None:
        candidates = [_variant(candidate, deterministic) for candidate in _CANDIDATES]
        reasons = [_reason_against(candidate, *where) for candidate in candidates]
        chosen = candidates[reasons.index(None)]
        if _obstacle(MOSAIC_SM90, *where) is None and chosen is not MOSAIC_SM90:
            warnings.warn(
                f"implementation=None takes {chosen.name!r} here, and not this GPU's own, faster "
                f"kernels, 'mosaic_sm90': {reasons[0]}; implementation={chosen.name!r} takes the "
                "slower ones without this warning",
                SlowerKernelsWarning,
                stacklevel=2,
            )
    obstacle = _obstacle(chosen, *where)
    if obstacle is not None:
        raise NotImplementedError(f"implementation {chosen.name!r} cannot run: {obstacle}")
    return tuned_triton(compute_capability) if chosen is TRITON else chosen


def _variant(implementation: Implementation, deterministic: bool) -> Implementation:
    """The deterministic variant of an implementation if required and if it has one, else itself."""
    variant = implementation.deterministic_variant if deterministic else None
    return implementation if variant is None else variant


def _obstacle(
    candidate: Implementation,
    platform: str,
    compute_capability: float | None,
    inputs: AttentionInputs,
    backward: bool,
    deterministic: bool,
    spec: AttentionSpec | None,
) -> str | None:
    """Why a candidate cannot run, or None if it can."""
    unavailable = candidate.unavailable(platform, compute_capability)
    if unavailable is not None:
        return unavailable
    if backward and candidate.backward is None:
        return "it has no backward pass; use None or 'xla' where gradients are taken"
    if backward and deterministic and not candidate.deterministic:
        return (
            "deterministic is True, and it adds up gradients in an order that differs from run to "
            "run; use None or 'triton', or leave deterministic out"
        )
    if backward and candidate.backward_unsupported is not None:
        unsupported = candidate.backward_unsupported(inputs)
    else:
        unsupported = candidate.unsupported(inputs)
    if unsupported is None and spec is not None and spec.calls_functions:
        return candidate.unsupported_functions(spec, inputs, backward=backward)
    return unsupported


def _reason_against(
    candidate: Implementation,
    platform: str,
    compute_capability: float | None,
    inputs: AttentionInputs,
    backward: bool,
    deterministic: bool,
    spec: AttentionSpec | None,
) -> str | None:
    """Why ``implementation=None`` skips a candidate: it cannot run or is slower; None if not."""
    where = platform, compute_capability, inputs, backward, deterministic, spec
    obstacle = _obstacle(candidate, *where)
    if obstacle is None and candidate is MOSAIC_SM90 and jax.__version_info__ >= LINKED_SINCE:
        return (
            f"JAX {jax.__version__} compiles them so that they spill registers; install JAX 0.11.2 "
            "(pip install 'burst-jax[cuda13]' does)"
        )
    return obstacle
