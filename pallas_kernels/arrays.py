"""Array helpers for all implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.typing import DTypeLike


def as_int32(name: str, x: Any) -> Any:
    """Converts integers to int32, the dtype kernels read; NumPy arrays stay NumPy arrays.

    Under ``jax_enable_x64`` ``jnp.arange`` gives int64, and NumPy's integers are int64 by default.

    Raises:
      ValueError: another dtype, or a value that int32 cannot hold. Traced values are unknown, and
        wrap.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}: convert it to int32")
    if x.dtype == jnp.int32:
        return x
    for value in value_range(x):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{name} holds {value}: int32 cannot; renumber them")
    return x.astype(jnp.int32)


def value_range(x: Any) -> tuple[int, ...]:
    """The smallest and the largest of an array's integers; none if it is traced or empty.

    An array that several processes share: of the part that this process holds.
    """
    if isinstance(x, jax.core.Tracer):
        return ()
    parts = [x]
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        parts = [shard.data for shard in x.addressable_shards]
    parts = [part for part in jax.device_get(parts) if part.size]
    return (min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)) if parts else ()


def varying_axes(*arrays: Any) -> frozenset:
    """Manual mesh axes over which any of the arrays may differ from device to device."""
    axes = frozenset()
    for leaf in jax.tree.leaves(arrays):
        axes |= jax.typeof(leaf).manual_axis_type.varying
    return axes


def vary(x: Any, axes: frozenset) -> Any:
    """Marks a pytree as varying over manual mesh axes; values are unchanged.

    Inside ``shard_map`` with ``check_vma=True`` a loop's initial value must vary over the same axes
    as its result, and new ``zeros`` vary over none.
    """

    def cast(leaf):
        missing = axes - jax.typeof(leaf).manual_axis_type.varying
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, x)


def rounded(x: jax.Array) -> jax.Array:
    """``x``, rounded before anything is computed from it.

    A product that is used twice, as itself and fused with a subtraction, would be two numbers.
    """
    return lax.optimization_barrier(x)


def unvary(x: jax.Array) -> jax.Array:
    """Removes the marks of :func:`vary`; values are unchanged.

    For calls that accept no marked arrays. JAX cannot check what such a call returns, so the caller
    must mark it.
    """
    return _unvary.bind(x) if varying_axes(x) else x


def depending_on(x: jax.Array, other: jax.Array) -> jax.Array:
    """``x`` with a fake dependency on ``other``; values are unchanged.

    ``jax.checkpoint`` precomputes whatever depends on constants only, and keeps it as a residual.
    An array that a kernel updates in place must not be one, so it must depend on an input.
    """
    return _depending_on.bind(x, other)


def row_major(x: jax.Array) -> jax.Array:
    """``x`` in row-major layout; values are unchanged.

    XLA chooses layouts for the operations that read an array, and propagates them to what it is
    computed from. If that is a slice of a stack that a scan runs over, the whole stack is copied to
    the other layout before the scan, and both are in memory.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _identity(name: str, abstract: Callable[..., Any]) -> Primitive:
    """A primitive that returns its first operand; while tracing, with the type of ``abstract``."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, *_: x)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, lambda _, x, *__: [x])
    batching.primitive_batchers[primitive] = lambda args, axes: (primitive.bind(*args), axes[0])
    return primitive


_unvary = _identity(
    "burst_unvary",
    lambda x: x.update(manual_axis_type=x.manual_axis_type.update(varying=frozenset())),
)
_depending_on = _identity("burst_depending_on", lambda x, _: x)


def gradient_dtype(added_to: Any, out_dtype: DTypeLike | None) -> DTypeLike:
    """The dtype a kernel writes a gradient in: float32 where it adds to a given sum."""
    return jnp.float32 if added_to is not None or out_dtype is None else out_dtype


def pad_axis(x: jax.Array, axis: int, length: int, value: float = 0) -> jax.Array:
    """Pads the end of one axis to ``length`` with ``value``; returns ``x`` itself if it fits."""
    extra = length - x.shape[axis]
    if not extra:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, extra)
    return jnp.pad(x, widths, constant_values=value)
