"""Selects the implementation of a call: the one that a user named, or the fastest."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, overload

import jax

from pallas_kernels.backend import Implementation
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.reference import REFERENCE
from pallas_kernels.spec import AttentionSpec
from pallas_kernels.xla import XLA

# Fastest first. The last one supports everything.
NAMES = ("mosaic_sm90", "mosaic_sm80", "xla")
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


_ADVICE = "XLA is many times slower; if that is right here, pass implementation='xla'"


class SlowerKernelsWarning(UserWarning):
    """The library takes XLA's operations on a GPU for which there are kernels."""


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


class Kernels(Protocol):
    """One of the implementations of something."""

    @property
    def name(self) -> str:
        """The public name."""
        ...

    @property
    def unavailable(self) -> Callable[[str, float | None], str | None]:
        """See :attr:`pallas_kernels.Implementation.unavailable`."""
        ...


def choose[K: Kernels](
    implementation: Any,
    by_name: Callable[[Any], K],
    target: tuple[str, float | None],
    obstacle: Callable[[K], str | None],
    *,
    names: Sequence[str] = NAMES,
    has_warned: Callable[[K], bool] = lambda _: False,
    subject: str = "implementation=None",
    advice: str = _ADVICE,
) -> K:
    """The implementation to run: the named one, or for None the fastest that supports the call.

    Attention, grouped products and decode attention are all chosen here. The decision does not try
    to lower kernels, because those of a newer GPU abort when they are lowered for an older one. If
    None chooses XLA on a GPU for which there are kernels, a :class:`SlowerKernelsWarning` has the
    reason.

    Args:
      implementation: a name, what else ``by_name`` supports, or None.
      by_name: returns the implementation of a name. Raises ValueError for other names.
      target: platform, and compute capability.
      obstacle: why an implementation cannot run the call there, or None if it can.
      names: what None tries on a GPU, fastest first. The last one supports everything.
      has_warned: whether another call has warned of what keeps the kernels from running.
      subject: what takes XLA's operations, in the warning.
      advice: the end of the warning: what they cost, and what to do if that is right.

    Raises:
      NotImplementedError: the named one cannot run.
    """
    asked = substitute() or implementation
    if asked is not None:
        chosen = by_name(asked)
        if (reason := obstacle(chosen)) is not None:
            raise NotImplementedError(
                f"implementation {chosen.name!r} cannot run: {reason}; use None, which takes the "
                "fastest that can"
            )
        return chosen
    platform, compute_capability = target
    *faster, last = names
    if platform == "gpu":
        chosen = next((x for x in map(by_name, faster) if obstacle(x) is None), None)
        if chosen is not None:
            return chosen
    if platform == "gpu" and (compute_capability or 0) >= 8.0:
        # The fastest that the GPU has, or else the last of them.
        has = (x for x in map(by_name, faster) if x.unavailable(*target) is None)
        kernels = next(has, None) or by_name(faster[-1])
        if not has_warned(kernels):
            _warn(kernels.name, str(obstacle(kernels)), subject, advice)
    return by_name(last)


def _warn(kernels: str, obstacle: str, subject: str, advice: str) -> None:
    """Warns that XLA is chosen, at the line that calls the library.

    Python shows one text once for each line, so a layer that is traced many times warns once.

    Args:
      kernels: name of the kernels that the GPU could run.
      obstacle: why they cannot run this call, with the remedy.
      subject: see :func:`choose`.
      advice: see :func:`choose`.
    """
    warnings.warn(
        f"{subject} takes 'xla' here, and not {kernels!r}: {obstacle}. {advice}",
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


@overload
def find(implementation: None) -> None: ...


@overload
def find(implementation: str | Implementation) -> Implementation: ...


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

    See :func:`choose`.

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

    def variant(name: str | Implementation) -> Implementation:
        return _variant(find(name), deterministic, compute_capability)

    def obstacle(candidate: Implementation, backward: bool = backward) -> str | None:
        options = inputs, backward, deterministic, spec
        return obstacle_of(candidate, platform, compute_capability, *options)

    def forward_has_warned(kernels: Implementation) -> bool:
        return backward and obstacle(kernels, backward=False) is not None

    target = platform, compute_capability
    return choose(implementation, variant, target, obstacle, has_warned=forward_has_warned)


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
