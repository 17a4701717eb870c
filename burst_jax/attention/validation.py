"""Checks of arguments, each by itself: a message names the argument, its value and the remedy.

Whether the arrays fit what the call asks for is in :mod:`burst_jax.attention.shapes`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from burst_jax.parallel.mesh import AxisNames, flat_names
from burst_jax.ring.rotation import ROTATION_CHOICES
from pallas_kernels import AttentionSpec
from pallas_kernels.arrays import as_int32
from pallas_kernels.dropout import Dropout
from pallas_kernels.inputs import PerHead

# One side of a window: tokens, None for no limit, or a traced integer.
Side = int | jax.Array | None
WindowSize = int | jax.Array | tuple[Side, Side] | None

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
_LETTERS = {"query": "[B, T, N, H]", "key": "[B, S, K, H]", "value": "[B, S, K, Hv]"}


def make_spec(
    head_dim: int,
    is_causal: bool,
    scale: float | None,
    local_window_size: WindowSize,
    logits_soft_cap: float | None,
    lifts_causality: bool = False,
    dropout_rate: float = 0.0,
) -> AttentionSpec:
    """Masks, score and dropout of the public functions' arguments, as one spec.

    ``head_dim`` makes the default scale. Of a mask it has what is static: neither traced sides of
    the window nor, with ``lifts_causality``, causality.
    """
    check_bool("is_causal", is_causal)
    left, right = (
        None if isinstance(side, jax.Array) else side for side in window_sides(local_window_size)
    )
    if is_causal:
        right = None if lifts_causality else 0
    if scale is None:
        scale = head_dim**-0.5
    spec = AttentionSpec.of(
        scale=_scale(scale),
        left=left,
        right=right,
        logits_soft_cap=None
        if logits_soft_cap is None
        else _number("logits_soft_cap", logits_soft_cap),
    )
    if isinstance(dropout_rate, bool) or not isinstance(dropout_rate, (int, float, np.floating)):
        raise ValueError(
            f"dropout_rate is {dropout_rate!r}: it must be a Python number below 1, and is static"
        )
    rate = float(dropout_rate)
    return dataclasses.replace(spec, dropout=Dropout(rate)) if rate else spec


def dropout_seeds(
    query: jax.Array, dropout_rate: float, dropout_key: jax.Array | None
) -> jax.Array | None:
    """A random number for each batch row and head, int32 ``[B, N]``; None if nothing is dropped.

    Raises:
      ValueError: there is no key although weights are dropped, or it is not one key.
    """
    key = None if dropout_key is None else _one_key(dropout_key)
    if not dropout_rate:
        return None
    if key is None:
        raise ValueError(
            f"dropout_rate is {dropout_rate} and dropout_key is None: pass a new jax.random.key "
            "at each call, or dropout_rate=0.0 where nothing is to be dropped"
        )
    batch, _, heads, _ = query.shape
    return lax.bitcast_convert_type(jax.random.bits(key, (batch, heads), jnp.uint32), jnp.int32)


def _one_key(key: jax.Array) -> jax.Array:
    """``key``, of either kind that JAX has, as a ``jax.random.key``."""
    check_is_array("dropout_key", key, "a jax.random.key")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and key.dtype == jnp.uint32 and key.shape == jax.random.PRNGKey(0).shape:
        return jax.random.wrap_key_data(jnp.asarray(key))
    if not typed or key.ndim:
        raise ValueError(
            f"dropout_key has shape {key.shape} and dtype {key.dtype}: it must be one key, as "
            "jax.random.key(0) is"
        )
    return key


def check_bool(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is True or False itself."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} is {value!r}: it must be True or False")


def _scale(scale: Any) -> float:
    """The argument of this name as a float.

    A traced one would have to be a factor on the query, which rounds in 16 bits, or an operand of
    every kernel, where a number that is compiled in is free.
    """
    if isinstance(scale, jax.Array) and not scale.shape and jnp.isrealobj(scale):
        raise NotImplementedError(
            f"scale is {scale!r}, a JAX array: kernels have the scale compiled in, so it must be a "
            "Python number; pass scale=1.0 and multiply the query by the array before the call, "
            "query * scale.astype(query.dtype)"
        )
    return _number("scale", scale)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, jax.core.Tracer)) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} is {value!r}: it must be a Python number or None, and is static")
    try:
        return float(value)
    except OverflowError:
        # An int that no float can hold. Score refuses infinity, and says what it takes instead.
        return math.inf if value == abs(value) else -math.inf


def window_sides(window: object) -> tuple[Side, Side]:
    """``(left, right)`` of ``local_window_size``. An array is one whose value is not known.

    Raises:
      ValueError: it is no window.
    """
    sides: Any = window if isinstance(window, tuple) else (window, window)
    if not (len(sides) == 2 and all(map(_is_side, sides))):
        raise ValueError(
            f"local_window_size is {window!r}: it must be an int or a pair (left, right) of ints, "
            "from 0 to 2**31 - 1, or None for no limit; a side may be a JAX array too, an integer "
            "scalar"
        )
    left, right = (int(s) if isinstance(s, numbers.Integral) else s for s in sides)
    return left, right


def _is_side(side: Any) -> bool:
    if isinstance(side, jax.Array):
        return side.shape == () and jnp.issubdtype(side.dtype, jnp.integer)
    is_int = isinstance(side, numbers.Integral) and not isinstance(side, bool)
    return side is None or (is_int and 0 <= int(side) < 2**31)


def check_arrays(query: Any, key: Any, value: Any) -> None:
    """Raises ValueError unless query, key and value can attend to each other."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_is_array(name, array, "an array")
        letters = _LETTERS[name]
        if len(array.shape) != 4:
            raise ValueError(f"{name} has shape {array.shape}: it must be {letters}")
        _check_static(name, letters, array.shape)
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}: no axis of {letters} may be empty")
        # The name of another byte order, like ">f4", and of a random key's dtype is in the text of
        # the dtype.
        if str(array.dtype) not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} has dtype {array.dtype}: cast it to one of {', '.join(FLOAT_DTYPES)}"
            )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key has shape {key.shape}, value {value.shape}: they must be equal but for the head "
            "dim, [B, S, K, H] and [B, S, K, Hv]"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query has dtype {query.dtype}, key {key.dtype}, value {value.dtype}: "
            "cast them to one dtype, as key.astype(query.dtype); results have the query's"
        )
    for axis, letter in ((0, "batch size"), (3, "head dim")):
        if query.shape[axis] != key.shape[axis]:
            raise ValueError(
                f"query has {letter} {query.shape[axis]}, key {key.shape[axis]}: they must be equal"
            )
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(f"key has {kv_heads} heads, query {heads}: N must be a multiple of K")


def check_is_array(name: str, value: Any, what: str) -> None:
    """Raises ValueError unless a value is an array; ``what`` is what it must be."""
    # JAX's functions refuse both where a program is traced, and say nothing of the argument.
    if _is_variable(value) or isinstance(value, jax.Ref):
        raise ValueError(
            f"{name} is a {type(value).__name__}: pass the array in it, {name}=the_variable[...]"
        )
    # A jax.ShapeDtypeStruct and a class like np.ndarray have a dtype and a shape, too.
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise ValueError(f"{name} is a {type(value).__name__}: it must be {what}")


def _is_variable(value: Any) -> bool:
    """Whether it is no array, but stands for one, as Flax's variables do."""
    return hasattr(type(value), "__jax_array__") and not isinstance(value, jax.Array)


def _check_static(name: str, letters: str, shape: tuple[object, ...]) -> None:
    for letter, size in zip(letters.strip("[]").split(", "), shape, strict=True):
        # A symbolic dimension of jax.export is no int. One of the batch passes through.
        if letter != "B" and not isinstance(size, numbers.Integral):
            raise NotImplementedError(
                f"{name} has shape {shape}, whose {letter} is symbolic: tiles and routes are made "
                "for numbers; export one program for each length, or pad sequences to a few lengths"
            )


def check_outside_shard_map() -> None:
    """Raises ValueError if ``burst_attention`` is called inside a ``shard_map``."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise ValueError(
            f"burst_attention is called inside a shard_map over {manual}: call "
            "ring_attention there, on one device's arrays"
        )


def check_inside_shard_map() -> None:
    """Raises ValueError if ``ring_attention`` without mesh axes is called outside a ``shard_map``.

    An axis that is named is looked for where its size is needed.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            "axis_name is None outside of a shard_map, where arrays may be those of all devices: "
            "call burst_attention with seq_axis=None there, local_attention if they are one "
            "device's, or ring_attention inside a shard_map"
        )


def check_devices(mesh: Mesh | AbstractMesh, arrays: dict[str, jax.Array]) -> None:
    """Raises ValueError if an array lies on other devices than the mesh has, or none are known.

    Inside a jax.jit arrays lie on no devices yet, so nothing is checked.
    """
    if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        return
    placed = {
        name: array.sharding.device_set
        for name, array in arrays.items()
        if getattr(array, "committed", False)
    }
    if not isinstance(mesh, Mesh):
        # The abstract mesh of jax.set_mesh names no devices. get_mesh has the mesh that does, but
        # raises inside a jax.jit.
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:
            return
        if mesh.empty and not placed:
            raise ValueError(
                "mesh is an AbstractMesh, and neither it nor an array names devices: pass a "
                "jax.sharding.Mesh, or enter jax.set_mesh(mesh)"
            )
    if not placed or mesh.empty:
        return
    of_mesh = set(mesh.devices.flat)
    for name, devices in placed.items():
        if devices != of_mesh:
            raise ValueError(
                f"{name} is on {_ids(devices)}, the mesh on {_ids(of_mesh)}: put it onto the mesh, "
                f"jax.device_put({name}, jax.NamedSharding(mesh, jax.P(...)))"
            )


def check_one_device(arrays: Mapping[str, jax.Array]) -> None:
    """Raises ValueError if an array of ``local_attention`` is known to be split over devices."""
    for name, array in arrays.items():
        split = bool(flat_names(*getattr(jax.typeof(array).sharding, "spec", ())))
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            split = not array.is_fully_replicated
        if split:
            raise ValueError(
                f"{name} is split over several devices, {jax.typeof(array)}, and local_attention "
                "is for one device's arrays: call burst_attention, with seq_axis=None if no axis "
                "splits the tokens, or local_attention inside a shard_map"
            )


def _ids(devices: set[jax.Device]) -> str:
    ids = sorted(device.id for device in devices)
    return f"device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"


def check_segment_ids(
    query: jax.Array,
    key: jax.Array,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
) -> dict[str, jax.Array]:
    """Both sides' segment ids as int32, by the names of the arguments; empty if there are none.

    Raises:
      ValueError: they do not fit query and key, or one of them is missing.
    """
    given = {"query_segment_ids": q_segment_ids, "key_value_segment_ids": kv_segment_ids}
    missing = [name for name, ids in given.items() if ids is None]
    if len(missing) == 1:
        raise ValueError(
            f"{missing[0]} is None but the other side's segment ids are given: pass both"
        )
    checked: dict[str, jax.Array] = {}
    if missing:
        return checked
    for (name, value), array in zip(given.items(), (query, key), strict=True):
        ids: Any = value
        check_is_array(name, ids, "an int32 array")
        checked[name] = as_int32(name, ids)
        if tuple(ids.shape) != tuple(array.shape[:2]):
            raise ValueError(f"{name} has shape {ids.shape}: it must be {tuple(array.shape[:2])}")
    return checked


def check_per_head(heads: int, arrays: Mapping[str, Any]) -> PerHead:
    """Those of a call's per-head arguments that are given, by name.

    They are weights of a model, so a Flax variable stands for its array.

    Raises:
      ValueError: one of them is not float32 ``[N]``.
    """
    given = {}
    for name, array in arrays.items():
        if array is None:
            continue
        if _is_variable(array):
            array = array.__jax_array__()
        check_is_array(name, array, "a float32 array")
        if array.dtype != jnp.float32:
            raise ValueError(f"{name} has dtype {array.dtype}: cast it to float32")
        if tuple(array.shape) != (heads,):
            raise ValueError(
                f"{name} has shape {array.shape}: it must be [N], {(heads,)}, a number for each of "
                "the query's heads (in ring_attention for those on one device)"
            )
        given[name] = array
    return given


def check_seq_axes(name: str, seq_axis: AxisNames, ulysses_axis: str | None) -> tuple[str, ...]:
    """The ring's mesh axes, outermost first; none for None.

    Raises:
      ValueError: they are not one name or two.
    """
    if ulysses_axis is not None and not isinstance(ulysses_axis, str):
        raise ValueError(
            f"ulysses_axis is {ulysses_axis!r}: it must be the name of a mesh axis, or None"
        )
    if seq_axis is None:
        return ()
    axes = (seq_axis,) if isinstance(seq_axis, str) else seq_axis
    if not (
        isinstance(axes, tuple)
        and len(axes) in (1, 2)
        and all(isinstance(axis, str) for axis in axes)
        and len(set(axes)) == len(axes)
    ):
        raise ValueError(
            f"{name} is {seq_axis!r}: it must be the name of a mesh axis, a pair (outer, inner) of "
            "them for a two-level ring, or None for no ring"
        )
    if ulysses_axis in axes:
        raise ValueError(
            f"ulysses_axis is {ulysses_axis!r}, and so is {name}: use different mesh axes"
        )
    return axes


def check_rotation(backward: str) -> None:
    """Raises ValueError unless ``backward`` is a rotation or "auto"."""
    if not isinstance(backward, str) or backward not in ROTATION_CHOICES:
        choices = ", ".join(map(repr, ROTATION_CHOICES))
        raise ValueError(f"backward is {backward!r}: use one of {choices}")
