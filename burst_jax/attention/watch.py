"""Calls of attention and linear attention in a traced program, and marks of its jitted functions.

Both are for :mod:`burst_jax.verify`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from pallas_kernels.choice import substituted

if TYPE_CHECKING:
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


# Compared by identity: arguments may be tracers.
@dataclasses.dataclass(frozen=True, eq=False)
class WatchedCall:
    """One call of an attention function in a traced program.

    Attributes:
      name: what messages call it: "attention", or the name of a function of linear attention.
      local: whether the arrays are one device's, as for ``ring_attention``.
      arguments: the keyword arguments, a dataclass.
      axes: mesh axes of the ring.
      varying: mesh axes over which the query varies inside a ``shard_map``; None if unknown.
      manual: the mesh axes that are manual at the call.
      place: the caller's line, None if there is none.
    """

    name: str
    local: bool
    arguments: Any
    axes: AxisNames
    varying: frozenset[str] | None
    manual: tuple[str, ...]
    place: Place | None


# Name and file of the functions of :func:`attention_program`.
_PROGRAMS: set[tuple[str, str]] = set()
_WATCH: ContextVar[list[WatchedCall] | None] = ContextVar("watch", default=None)
# Part of the key of JAX's caches: without it, functions that are traced already call nothing.
_RETRACE = jax.make_user_context()


@contextlib.contextmanager
def watched(implementation: str | None = None) -> Iterator[list[WatchedCall]]:
    """Collects the attention calls that are traced inside the ``with`` block.

    Args:
      implementation: what all calls use instead of their own implementation, and the products of
        a mixture's experts, too; None changes none.
    """
    calls: list[WatchedCall] = []
    token = _WATCH.set(calls)
    try:
        with _RETRACE(object()), substituted(implementation):
            yield calls
    finally:
        _WATCH.reset(token)


def watch_call(
    arguments: Any, query: Any, axes: AxisNames, local: bool, name: str = "attention"
) -> None:
    """Records a call if a watch is active."""
    calls = _WATCH.get()
    if calls is None:
        return
    manual = jax.sharding.get_abstract_mesh().manual_axes
    varying = getattr(jax.typeof(query), "vma", None) if manual else None
    calls.append(
        WatchedCall(name, local, arguments, axes, varying or None, tuple(manual), _caller())
    )


def attention_program[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function, which is then jitted, as attention in a traced program."""
    _PROGRAMS.add((function.__name__, function.__code__.co_filename))
    return function


def is_attention_program(name: str, file: str) -> bool:
    """Whether the jitted function of this name and file is a marked one."""
    return (name, file) in _PROGRAMS


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
