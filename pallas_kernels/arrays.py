"""Small helpers on arrays that every implementation needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

# Two equally shaped arrays that belong together (K and V, or Q and dO): either a tuple, or packed
# into one array along a new first axis, as the ring moves lse and delta.
Pair = jax.Array | tuple[jax.Array, jax.Array]


def halves(pair: Pair) -> tuple[jax.Array, jax.Array]:
    """The two arrays of a pair, sliced if packed."""
    first, second = pair
    return first, second


def half_shape(pair: Pair) -> tuple[int, ...]:
    """Shape of one of a pair's arrays."""
    return pair[0].shape if isinstance(pair, tuple) else pair.shape[1:]


def half_dtype(pair: Pair) -> Any:
    """Dtype of a pair's arrays."""
    return pair[0].dtype if isinstance(pair, tuple) else pair.dtype


def as_int32(name: str, x: Any) -> Any:
    """An array of any integer dtype as int32, which kernels take; NumPy stays NumPy.

    Under ``jax_enable_x64`` ``jnp.arange`` gives int64, and NumPy's integers are int64 by default.

    Raises:
      ValueError: another dtype, or a NumPy array with a value that int32 cannot hold. A JAX array's
        values are not looked at, because that would wait for them.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}: convert it to int32")
    if x.dtype == jnp.int32:
        return x
    if isinstance(x, np.ndarray) and x.size:
        for value in (x.min(), x.max()):
            if not -(2**31) <= int(value) < 2**31:
                raise ValueError(f"{name} holds {value}: int32 cannot, so number them anew")
    return x.astype(jnp.int32)


def varying_axes(*arrays: Any) -> frozenset:
    """Manual mesh axes over which any of the arrays may differ from device to device."""
    axes = frozenset()
    for leaf in jax.tree.leaves(arrays):
        axes |= jax.typeof(leaf).manual_axis_type.varying
    return axes


def vary(x: Any, axes: frozenset) -> Any:
    """Marks a pytree as varying over manual mesh axes; values are untouched.

    Inside ``shard_map`` with ``check_vma=True`` a loop's initial value must vary over the same axes
    as what the loop makes of it, and a fresh ``zeros`` varies over none.
    """

    def cast(leaf):
        missing = axes - jax.typeof(leaf).manual_axis_type.varying
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, x)


def unvary(x: jax.Array) -> jax.Array:
    """Takes the marks of :func:`vary` off; values are untouched.

    For what takes no marked arrays. Nothing can check its results: whoever calls it marks them.
    """
    return _unvary.bind(x) if varying_axes(x) else x


def tied(x: jax.Array, to: jax.Array) -> jax.Array:
    """``x``, which for JAX is computed from ``to``; values are untouched.

    ``jax.checkpoint`` computes what depends on constants alone ahead, and hands it over as a
    residual. A reference may not be one.
    """
    return _tied.bind(x, to)


def _first(name: str, abstract: Callable[..., Any]) -> Primitive:
    """A primitive that is its first operand at run time, and for tracing of ``abstract``'s type."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, *_: x)
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, lambda _, x, *__: [x])
    batching.primitive_batchers[primitive] = lambda args, axes: (primitive.bind(*args), axes[0])
    return primitive


_unvary = _first(
    "burst_unvary",
    lambda x: x.update(manual_axis_type=x.manual_axis_type.update(varying=frozenset())),
)
_tied = _first("burst_tied", lambda x, _: x)


def pad_axis(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Pads with zeros at the end of one axis up to ``length``; returns ``x`` itself if it fits."""
    extra = length - x.shape[axis]
    if not extra:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, extra)
    return jnp.pad(x, widths)
