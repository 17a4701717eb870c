"""Records the attention calls of a program while it is traced, for :mod:`burst_jax.verify`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

if TYPE_CHECKING:
    from burst_jax.attention.arguments import LocalArguments
    from burst_jax.parallel.mesh import AxisNames

PACKAGES = Path(__file__).parents[2]
# Frames of these are not the caller's code.
_LIBRARIES = (
    *(str(PACKAGES / name) + "/" for name in ("burst_jax", "pallas_kernels")),
    *(str(Path(sys.modules[name].__file__ or "").parent) + "/" for name in ("jax",)),
)
_PARTS = ("/site-packages/flax/", "/site-packages/optax/", "/site-packages/jax/", "/contextlib.py")


class Place(NamedTuple):
    """A line of source code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@dataclasses.dataclass(frozen=True)
class WatchedCall:
    """One call of an attention function in a traced program.

    Attributes:
      local: whether the arrays are one device's, as for ``ring_attention``.
      arguments: the keyword arguments.
      axes: mesh axes of the ring.
      varying: mesh axes over which the query varies inside a ``shard_map``; None if unknown.
      manual: the mesh axes that are manual at the call.
      place: the caller's line, None if there is none.
    """

    local: bool
    arguments: LocalArguments
    axes: AxisNames
    varying: frozenset[str] | None
    manual: tuple[str, ...]
    place: Place | None


@dataclasses.dataclass
class _Watch:
    calls: list[WatchedCall]
    implementation: str | None


_WATCH: ContextVar[_Watch | None] = ContextVar("watch", default=None)
# Part of the key of JAX's caches: without it, functions that are traced already call nothing.
_RETRACE = jax.make_user_context()


@contextlib.contextmanager
def watched(implementation: str | None = None) -> Iterator[list[WatchedCall]]:
    """Collects the attention calls that are traced inside the ``with`` block.

    Args:
      implementation: the implementation that all calls use instead of their own; None changes none.
    """
    watch = _Watch([], implementation)
    token = _WATCH.set(watch)
    try:
        with _RETRACE(object()):
            yield watch.calls
    finally:
        _WATCH.reset(token)


def watch_call[Arguments: LocalArguments](
    arguments: Arguments, query: Any, axes: AxisNames, local: bool
) -> Arguments:
    """The arguments that a call uses; records the call if a watch is active."""
    watch = _WATCH.get()
    if watch is None:
        return arguments
    manual = jax.sharding.get_abstract_mesh().manual_axes
    varying = getattr(jax.typeof(query), "vma", None) if manual else None
    watch.calls.append(
        WatchedCall(local, arguments, axes, varying or None, tuple(manual), _caller())
    )
    if watch.implementation is None:
        return arguments
    return dataclasses.replace(arguments, implementation=watch.implementation)


def is_library(file: str) -> bool:
    """Whether a source file belongs to this library, JAX, Flax or optax."""
    return file.startswith(_LIBRARIES) or any(part in file for part in _PARTS)


def _caller() -> Place | None:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_library(file) and not file.startswith("<frozen"):
            return Place(file, frame.f_lineno)
        frame = frame.f_back
    return None
