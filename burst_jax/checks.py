"""Checks of the callers' arguments: every message names the argument, its value and the remedy."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from burst_jax.layout import check_layout
from burst_jax.rotation import BACKWARDS
from pallas_kernels import AttentionSpec
from pallas_kernels.arrays import as_int32

_DTYPES = ("bfloat16", "float16", "float32")


def make_spec(
    query: Any,
    is_causal: bool,
    scale: float | None,
    local_window_size: Any,
    logits_soft_cap: float | None,
) -> AttentionSpec:
    """The masks and the scale of ``jax.nn.dot_product_attention``'s arguments, as one spec."""
    if not isinstance(is_causal, (bool, np.bool_)):
        raise ValueError(f"is_causal is {is_causal!r}: it must be True or False")
    left, right = _window(local_window_size)
    if is_causal:
        right = 0
    if scale is None:
        head_dim = np.shape(query)[-1] if np.ndim(query) else 0
        scale = head_dim**-0.5 if head_dim else 1.0
    return AttentionSpec(
        scale=_number("scale", scale, "fold a traced scale into the query"),
        left=left,
        right=right,
        logits_soft_cap=None
        if logits_soft_cap is None
        else _number("logits_soft_cap", logits_soft_cap, "it is static"),
    )


def _number(name: str, value: Any, remedy: str) -> float:
    if isinstance(value, (bool, jax.core.Tracer)) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} is {value!r}: it must be a Python number or None; {remedy}")
    return float(value)


def _window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    sides = (window, window) if isinstance(window, numbers.Integral) else window
    if not (
        isinstance(sides, tuple)
        and len(sides) == 2
        and all(isinstance(s, numbers.Integral) and not isinstance(s, bool) for s in sides)
        and all(int(s) >= 0 for s in sides)
        and max(sides) < 2**31
    ):
        raise ValueError(
            f"local_window_size is {window!r}: it must be an int or a pair (left, right) of ints, "
            "from 0 to 2**31 - 1, or None for no window"
        )
    return int(sides[0]), int(sides[1])


def check_arrays(query: Any, key: Any, value: Any) -> None:
    """Raises ValueError unless query, key and value can attend to each other."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise ValueError(f"{name} is a {type(array).__name__}: it must be an array")
        letters = "[B, T, N, H]" if name == "query" else "[B, S, K, H]"
        if len(array.shape) != 4:
            raise ValueError(f"{name} has shape {array.shape}: it must be {letters}")
        _check_static(name, letters, array.shape)
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}: no axis of {letters} may be empty")
        if jnp.dtype(array.dtype).name not in _DTYPES:
            raise ValueError(
                f"{name} has dtype {array.dtype}: cast it to one of {', '.join(_DTYPES)}"
            )
    if key.shape != value.shape:
        raise ValueError(
            f"key has shape {key.shape}, value {value.shape}: they must be equal, [B, S, K, H]"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query has dtype {query.dtype}, key {key.dtype}, value {value.dtype}: "
            "cast them to one dtype"
        )
    for axis, letter in ((0, "batch size"), (3, "head dim")):
        if query.shape[axis] != key.shape[axis]:
            raise ValueError(
                f"query has {letter} {query.shape[axis]}, key {key.shape[axis]}: they must be equal"
            )
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(f"key has {kv_heads} heads, query {heads}: N must be a multiple of K")


def _check_static(name: str, letters: str, shape: Any) -> None:
    for letter, size in zip(letters.strip("[]").split(", "), shape, strict=True):
        # A symbolic dimension of jax.export is no int. One of the batch passes through.
        if letter != "B" and not isinstance(size, numbers.Integral):
            raise NotImplementedError(
                f"{name} has shape {shape}, whose {letter} is symbolic: tiles and routes are made "
                "for numbers; export one program for each length, or pad sequences to a few lengths"
            )


def check_static_batch(query: Any, devices: int) -> None:
    """Raises NotImplementedError if the batch size is symbolic and several devices share a row."""
    if devices > 1 and not isinstance(query.shape[0], numbers.Integral):
        raise NotImplementedError(
            f"query has shape {query.shape}, whose B is symbolic, on a ring of {devices} devices: "
            "JAX crashes where such a program is called; export one program for each batch size, "
            "or for one device"
        )


def check_devices(mesh: Any, arrays: dict[str, Any]) -> None:
    """Raises ValueError if an array lies on other devices than the mesh has.

    Inside a jax.jit nobody knows yet, and JAX puts constants where they are needed.
    """
    if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        return
    placed = {
        name: array.sharding.device_set
        for name, array in arrays.items()
        if getattr(array, "committed", False)
    }
    if placed and not isinstance(mesh, Mesh):
        # An abstract mesh is that of jax.set_mesh, which has its devices elsewhere, and gives them
        # to nobody inside a jax.jit.
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:
            return
    if not placed or mesh.empty:
        return
    of_mesh = set(mesh.devices.flat)
    for name, devices in placed.items():
        if devices != of_mesh:
            raise ValueError(
                f"{name} is on {_ids(devices)}, the mesh on {_ids(of_mesh)}: put it onto the mesh, "
                f"jax.device_put({name}, jax.NamedSharding(mesh, jax.P(...)))"
            )


def _ids(devices: Any) -> str:
    ids = sorted(device.id for device in devices)
    return f"device{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"


def check_segment_ids(query: Any, key: Any, q_segment_ids: Any, kv_segment_ids: Any) -> Any:
    """Both sides' segment ids as int32, or None and None.

    Raises:
      ValueError: they do not fit query and key, or one of them is missing.
    """
    given = {"query_segment_ids": q_segment_ids, "key_value_segment_ids": kv_segment_ids}
    missing = [name for name, ids in given.items() if ids is None]
    if len(missing) == 1:
        raise ValueError(
            f"{missing[0]} is None but the other side's segment ids are given: pass both"
        )
    if missing:
        return None, None
    for (name, ids), array in zip(given.items(), (query, key), strict=True):
        if not hasattr(ids, "dtype") or not hasattr(ids, "shape"):
            raise ValueError(f"{name} is a {type(ids).__name__}: it must be an int32 array")
        given[name] = as_int32(name, ids)
        if tuple(ids.shape) != tuple(array.shape[:2]):
            raise ValueError(f"{name} has shape {ids.shape}: it must be {tuple(array.shape[:2])}")
    return tuple(given.values())


def check_seq_axes(name: str, seq_axis: Any, head_parallel_axis: Any) -> tuple[str, ...]:
    """The ring's mesh axes, outermost first.

    Raises:
      ValueError: they are not one name or two, or there is neither a ring nor an exchange of heads.
    """
    if head_parallel_axis is not None and not isinstance(head_parallel_axis, str):
        raise ValueError(
            f"head_parallel_axis is {head_parallel_axis!r}: it must be the name of a mesh axis, or "
            "None"
        )
    if seq_axis is None:
        if head_parallel_axis is None:
            raise ValueError(
                f"{name} is None, and so is head_parallel_axis: name the mesh axis that the "
                "sequence is split over"
            )
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
            "them for a two-level ring, or None with head_parallel_axis"
        )
    if head_parallel_axis in axes:
        raise ValueError(
            f"head_parallel_axis is {head_parallel_axis!r}, and so is {name}: use different mesh "
            "axes"
        )
    return axes


def check_backward(backward: str) -> None:
    """Raises ValueError unless ``backward`` names a rotation."""
    if backward not in BACKWARDS:
        raise ValueError(f"backward is {backward!r}: use one of {', '.join(map(repr, BACKWARDS))}")


def check_local_arguments(
    query: Any,
    key: Any,
    value: Any,
    q_segment_ids: Any,
    kv_segment_ids: Any,
    layout: str,
    backward: str,
    devices: int = 1,
) -> Any:
    """Checks everything about one device's arrays; ``devices`` hold one shard of the ring.

    Returns:
      What :func:`check_segment_ids` does.
    """
    check_arrays(query, key, value)
    segment_ids = check_segment_ids(query, key, q_segment_ids, kv_segment_ids)
    check_layout(layout)
    check_backward(backward)
    if layout == "zigzag":
        for name, length in (("query", query.shape[1]), ("key", key.shape[1])):
            if length * devices % 2:
                raise ValueError(
                    f"{name} holds {length * devices} tokens per shard: the zigzag layout needs an "
                    "even number; pad the sequence with pad_to_layout"
                )
    return segment_ids
