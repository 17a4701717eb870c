"""Selects the implementation of local attention: the one that a user named, or the fastest."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

import jax

from pallas_kernels.backend import Implementation
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.reference import REFERENCE
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.xla import XLA

NAMES = ("mosaic_sm90", "mosaic_sm80", "xla")
# What implementation=None tries on a GPU, fastest first. The last one supports everything.
_CANDIDATES = NAMES


# What all calls use instead of their own implementation; None changes none.
_SUBSTITUTE: ContextVar[str | None] = ContextVar("substitute", default=None)
# Frames of these are not the caller's code: this project's packages, Python's own modules, and what
# is installed next to JAX.
_LIBRARIES = (
    *(str(Path(__file__).parents[1] / name) + "/" for name in ("burst_jax", "pallas_kernels")),
    *(
        str(Path(module.__file__ or "").parents[up]) + "/"
        for module, up in ((contextlib, 0), (jax, 1))
    ),
)


class SlowerKernelsWarning(UserWarning):
    """``implementation=None`` takes XLA's attention on a GPU for which there are kernels."""


@contextlib.contextmanager
def substituted(implementation: str | None) -> Iterator[None]:
    """Calls that are traced inside the ``with`` block use ``implementation`` instead of their own.

    It is no part of the keys of JAX's caches: the caller makes sure that programs are traced again.
    """
    token = _SUBSTITUTE.set(implementation)
    try:
        yield
    finally:
        _SUBSTITUTE.reset(token)


def substitute() -> str | None:
    """The implementation of :func:`substituted`; None outside of it."""
    return _SUBSTITUTE.get()


def warn_of_xla(kernels: str, obstacle: str) -> None:
    """Warns that ``implementation=None`` takes XLA, at the line that calls the library.

    Python shows one text once for each line, so a layer that is traced many times warns once.

    Args:
      kernels: name of the kernels that the GPU could run.
      obstacle: why they cannot run this call, with the remedy.
    """
    warnings.warn(
        f"implementation=None takes 'xla' here, and not {kernels!r}: {obstacle}. XLA is many times "
        "slower; if that is right here, pass implementation='xla'",
        SlowerKernelsWarning,
        skip_file_prefixes=_LIBRARIES,
    )


def _named(name: str) -> Implementation:
    """An implementation by its name. Importing kernels takes most of a second, so it is late."""
    if name == "mosaic_sm90":
        from pallas_kernels.mosaic.sm90.implementation import MOSAIC_SM90

        return MOSAIC_SM90
    if name == "mosaic_sm80":
        from pallas_kernels.mosaic.sm80.implementation import MOSAIC_SM80

        return MOSAIC_SM80
    return XLA if name == "xla" else REFERENCE


def find(implementation: str | Implementation | None) -> Implementation | None:
    """The implementation that a user named; None if the choice is left to the library.

    Raises:
      ValueError: there is no such implementation.
    """
    if implementation is None or isinstance(implementation, Implementation):
        return implementation
    # The reference is for tests.
    if not isinstance(implementation, str) or implementation not in (*NAMES, "reference"):
        raise ValueError(
            f"implementation is {implementation!r}: use None, an Implementation, or one of "
            f"{', '.join(map(repr, NAMES))}"
        )
    return _named(implementation)


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
    lowered for an older one. If None chooses XLA on a GPU for which there are kernels, a
    :class:`SlowerKernelsWarning` has the reason.

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
    chosen = find(substitute() or implementation)
    if chosen is not None:
        chosen = _variant(chosen, deterministic, compute_capability)
    where = platform, compute_capability, inputs, backward, deterministic, spec
    if chosen is None:
        names = _CANDIDATES if platform == "gpu" else ("xla",)
        candidates = (_variant(_named(x), deterministic, compute_capability) for x in names)
        chosen = next(x for x in candidates if obstacle_of(x, *where) is None)
        if chosen is XLA and (compute_capability or 0) >= 8.0:
            _warn(*where)
    obstacle = obstacle_of(chosen, *where)
    if obstacle is not None:
        raise NotImplementedError(cannot_run(chosen.name, obstacle))
    return chosen


def cannot_run(name: str, obstacle: str) -> str:
    """The message for a named implementation that does not support a call."""
    return (
        f"implementation {name!r} cannot run: {obstacle}; use None, which takes the fastest that "
        "can"
    )


class _Available(Protocol):
    """What has kernels for some devices."""

    @property
    def unavailable(self) -> Callable[[str, float | None], str | None]:
        """See :attr:`pallas_kernels.Implementation.unavailable`."""
        ...


def fastest_available[Kernels: _Available](
    by_speed: Iterable[Kernels], platform: str, compute_capability: float | None
) -> Kernels:
    """The first kernels that a device has, or else the last ones."""
    *faster, last = by_speed
    has = (x for x in (*faster, last) if x.unavailable(platform, compute_capability) is None)
    return next(has, last)


def _warn(
    platform: str,
    compute_capability: float | None,
    inputs: AttentionInputs,
    backward: bool,
    deterministic: bool,
    spec: AttentionSpec | None,
) -> None:
    """Warns that XLA runs on a GPU that has kernels, with the obstacle of the fastest ones."""
    kernels = fastest_available(map(_named, _CANDIDATES[:-1]), platform, compute_capability)
    kernels = _variant(kernels, deterministic, compute_capability)
    call = platform, compute_capability, inputs
    if backward and obstacle_of(kernels, *call, False, deterministic, spec) is not None:
        return  # The forward pass has warned.
    obstacle = obstacle_of(kernels, *call, backward, deterministic, spec)
    if obstacle is not None:
        warn_of_xla(kernels.name, obstacle)


def _variant(
    implementation: Implementation, deterministic: bool, compute_capability: float | None
) -> Implementation:
    """What runs of an implementation: its tiles for the GPU, and its reproducible variant."""
    if implementation.name == "mosaic_sm80":
        from pallas_kernels.mosaic.sm80.implementation import MOSAIC_SM80, fitting_sm80

        if implementation is MOSAIC_SM80:
            implementation = fitting_sm80(compute_capability)
    variant = implementation.deterministic_variant if deterministic else None
    return implementation if variant is None else variant


def obstacle_of(
    candidate: Implementation,
    platform: str,
    compute_capability: float | None,
    inputs: AttentionInputs,
    backward: bool,
    deterministic: bool = False,
    spec: AttentionSpec | None = None,
) -> str | None:
    """Why a candidate cannot run, or None if it can; the arguments are those of :func:`resolve`."""
    unavailable = candidate.unavailable(platform, compute_capability)
    if unavailable is not None:
        return unavailable
    if backward and candidate.backward is None:
        return "it has no backward pass, and gradients are taken"
    if backward and deterministic and not candidate.deterministic:
        return (
            "deterministic is True, and it adds up gradients in an order that differs from run to "
            "run: leave deterministic out"
        )
    if backward and candidate.backward_unsupported is not None:
        unsupported = candidate.backward_unsupported(inputs)
    else:
        unsupported = candidate.unsupported(inputs)
    if unsupported is None and spec is not None and spec.calls_functions:
        return candidate.unsupported_functions(spec, inputs, backward=backward)
    return unsupported
