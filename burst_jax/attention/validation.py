"""Validation of a call: every message names the argument, its value and the remedy.

:data:`ARRAYS` is the table of rules for array arguments; :func:`check_arrays` applies it. Static
arguments, and relations between arguments, have one function each.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.attention.arguments import LocalArguments, Side
from burst_jax.attention.segment_ids import (
    SIDES,
    check_ids,
    check_one_or_both,
    check_padding_id,
    with_padding_zero,
)
from burst_jax.layouts.layout import AttentionPass, gathered_pass_lacks
from burst_jax.parallel.mesh import AxisNames
from burst_jax.ring.rotation import ROTATION_CHOICES
from pallas_kernels import Dropout
from pallas_kernels.arrays import as_int32, value_range

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
_INT32 = jnp.iinfo(jnp.int32)
# The difference of two positions whose magnitudes are below this fits int32.
_MAX_POSITION = 2**30
# With batch_axis, a batch of one sequence would raise.
_ONE_AT_A_TIME = "call for one sequence at a time (jax.lax.map), without batch_axis"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Shapes and dtypes that an array argument may have.

    Attributes:
      shapes: the allowed shapes, as letters: "B T N H".
      dtype: "float" (one of :data:`FLOAT_DTYPES`), "float32", "bool", or how integers become int32:
        "id" (a value outside of int32, or one below 0 that is not padding, raises), "position"
        (2^30 or more raises), "bound" (values outside of int32 are clipped to it). Traced values
        are not checked.
    """

    shapes: tuple[str, ...]
    dtype: str


# Letters: B batch, T query length, S key length, N query heads, K key/value heads, H and Hv head
# dims, R and C rows and columns of a block-sparse mask. Shardings are derived from them, too.
ARRAYS: dict[str, Rule] = {
    "query": Rule(("B T N H",), "float"),
    "key": Rule(("B S K H",), "float"),
    "value": Rule(("B S K Hv",), "float"),
    "segment_ids": Rule(("B T",), "id"),
    "query_segment_ids": Rule(("B T",), "id"),
    "key_value_segment_ids": Rule(("B S",), "id"),
    "query_offset": Rule(("", "B"), "position"),
    "query_positions": Rule(("T", "B T"), "position"),
    "key_value_positions": Rule(("S", "B S"), "position"),
    "query_seq_lengths": Rule(("B",), "bound"),
    "key_value_seq_lengths": Rule(("B",), "bound"),
    "prefix_lengths": Rule(("B",), "bound"),
    "key_starts": Rule(("B T", "T"), "bound"),
    "key_ends": Rule(("B T", "T"), "bound"),
    "block_mask": Rule(("R C", "N R C"), "bool"),
    "sink_logits": Rule(("N",), "float32"),
    "alibi_slopes": Rule(("N",), "float32"),
}
PER_HEAD = ("sink_logits", "alibi_slopes")
# Names of local_window_size's sides among a call's arrays.
WINDOW_SIDES = ("local_window_size[0]", "local_window_size[1]")
# Arguments with positions: the number of dimensions that all sequences of the batch share.
POSITIONS = {"query_offset": 0, "query_positions": 1, "key_value_positions": 1}
_WHAT = {"float": "an array", "float32": "a float32 array", "bool": "a bool array"}


def check_arrays(arguments: LocalArguments, query: Any, key: Any, value: Any) -> dict[str, Any]:
    """The arrays among a call's arguments by name, integers as int32; not the block-sparse mask.

    Raises:
      ValueError: an array breaks its rule in :data:`ARRAYS`, or arrays contradict each other.
      NotImplementedError: positions of keys that differ between the sequences of a batch.
    """
    check_qkv(query, key, value)
    layout = arguments.parsed_layout
    sizes = {"B": query.shape[0], "T": query.shape[1], "S": key.shape[1], "N": query.shape[2]}
    given = {name: getattr(arguments, name) for name in ARRAYS if hasattr(arguments, name)}
    del given["block_mask"]
    offset = check_query_offset(given.pop("query_offset"))
    if offset is None:
        given["query_offset"] = arguments.query_offset
    given = {name: x for name, x in given.items() if x is not None}
    padding = check_padding_id(arguments.padding_id)
    arrays = {name: check_array(name, x, sizes, padding) for name, x in given.items()}
    check_one_or_both(arguments, query, key)
    if (ids := arrays.pop("segment_ids", None)) is not None:
        arrays |= dict.fromkeys(SIDES, ids)
    _CHECKS[layout.attention_pass](arguments, arrays, offset)
    return {"query": query, "key": key, "value": value} | arrays


def check_array(name: str, x: Any, sizes: Mapping[str, int], padding_id: int = 0) -> Any:
    """An array argument that satisfies its rule, integers as int32, segment ids with padding 0.

    Args:
      name: of the argument.
      x: its value.
      sizes: of the rule's letters.
      padding_id: the segment id of padding in ``x``.

    Raises:
      ValueError: it is not an array, or has another dtype or shape.
    """
    rule = ARRAYS[name]
    # Per-head parameters are model weights, so Flax variables are accepted, too.
    if rule.dtype == "float32" and _is_variable(x):
        x = x.__jax_array__()
    check_is_array(name, x, _WHAT.get(rule.dtype, "an int32 array"))
    if rule.dtype == "float32" and x.dtype != jnp.float32:
        raise ValueError(f"{name} has dtype {x.dtype}: cast it to float32")
    if rule.dtype == "id":
        converted = with_padding_zero(name, check_ids(name, x, padding_id), padding_id)
    else:
        converted = x if rule.dtype in _WHAT else to_int32(name, x, rule.dtype)
    shapes = {
        f"[{', '.join(letters.split())}]": tuple(sizes[letter] for letter in letters.split())
        for letters in rule.shapes
    }
    if tuple(x.shape) not in shapes.values():
        choices = " or ".join(f"{letters}, {shape}" for letters, shape in shapes.items())
        per_head = (
            ", one value per query head (in ring_attention per head of this device)"
            if name in PER_HEAD
            else ""
        )
        raise ValueError(f"{name} has shape {x.shape}: it must be {choices}{per_head}")
    return converted


def to_int32(name: str, x: Any, kind: str) -> Any:
    """Positions or bounds as int32, as :attr:`Rule.dtype` describes."""
    if kind == "bound" and jnp.issubdtype(x.dtype, jnp.integer) and x.dtype != jnp.int32:
        xp, limits = (jnp if isinstance(x, jax.Array) else np), jnp.iinfo(x.dtype)
        if limits.max > _INT32.max:
            x = xp.minimum(x, xp.asarray(_INT32.max, x.dtype))
        if limits.min < _INT32.min:
            x = xp.maximum(x, xp.asarray(_INT32.min, x.dtype))
    x = as_int32(name, x)
    for value in value_range(x) if kind == "position" else ():
        if not -_MAX_POSITION < value < _MAX_POSITION:
            raise ValueError(f"{name} holds {value}: positions must be between -2**30 and 2**30")
    return x


def check_qkv(query: Any, key: Any, value: Any) -> None:
    """Raises ValueError unless query, key and value can attend to each other."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_is_array(name, array, "an array")
        letters = f"[{', '.join(ARRAYS[name].shapes[0].split())}]"
        if len(array.shape) != 4:
            raise ValueError(f"{name} has shape {array.shape}: it must be {letters}")
        _check_static(name, letters, array.shape)
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}: no axis of {letters} may be empty")
        # Compared as text, which also rejects another byte order (">f4") and dtypes of random keys.
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
        raise ValueError(
            f"key has {kv_heads} heads, query {heads}: the number of query heads must be a "
            "multiple of the number of key heads"
        )


def check_is_array(name: str, value: Any, what: str) -> None:
    """Raises ValueError unless a value is an array; ``what`` names what it must be."""
    # JAX's functions reject both while tracing, with a message that does not name the argument.
    if _is_variable(value) or isinstance(value, jax.Ref):
        raise ValueError(
            f"{name} is a {type(value).__name__}: pass the array in it, {name}=the_variable[...]"
        )
    # A test for dtype and shape would also accept a jax.ShapeDtypeStruct or the class np.ndarray.
    # JAX rejects masked arrays in each function, without the argument's name.
    is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    if not is_array or isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{name} is a {type(value).__name__}: it must be {what}")


def _is_variable(value: Any) -> bool:
    """Whether a value wraps an array, as Flax variables do, without being a ``jax.Array``."""
    return hasattr(type(value), "__jax_array__") and not isinstance(value, jax.Array)


def _check_static(name: str, letters: str, shape: tuple[object, ...]) -> None:
    for letter, size in zip(letters.strip("[]").split(", "), shape, strict=True):
        # A symbolic dimension of jax.export is not an int. A symbolic batch size works.
        if letter != "B" and not isinstance(size, numbers.Integral):
            raise NotImplementedError(
                f"{name} has shape {shape}, whose {letter} is symbolic: tiles and routes need "
                "static sizes; export one program per length, or pad sequences to a few lengths"
            )


def check_query_offset(offset: Any) -> int | None:
    """``query_offset`` as a Python int; None if it is an array.

    Raises:
      ValueError: it is neither, or too far from 0.
    """
    if isinstance(offset, numbers.Integral) and not isinstance(offset, bool):
        if not -_MAX_POSITION < int(offset) < _MAX_POSITION:
            raise ValueError(f"query_offset is {int(offset)}: it must be between -2**30 and 2**30")
        return int(offset)
    if not isinstance(offset, (jax.Array, np.ndarray)) or isinstance(offset, jax.Ref):
        raise ValueError(
            f"query_offset is {offset!r}: it must be an integer, an array of one integer, or an "
            "array [B]"
        )
    return None


def _check_ring(arguments: LocalArguments, arrays: dict[str, Any], offset: int | None) -> None:
    """Checks a call's positions; a static offset next to array positions becomes an array."""
    if "query_positions" in arrays and offset != 0:
        raise ValueError(
            f"query_offset is {arguments.query_offset} and query_positions are given, which are "
            "the position of each query: pass one of them"
        )
    for name, shared_ndim in POSITIONS.items():
        # With one sequence in the batch, its positions are shared by all sequences.
        if name in arrays and arrays[name].ndim > shared_ndim and arrays[name].shape[0] == 1:
            arrays[name] = arrays[name][0]
    keys = arrays.get("key_value_positions")
    if keys is not None and keys.ndim == 2:
        raise NotImplementedError(
            f"key_value_positions has shape {keys.shape}: kernels have keys at the same positions "
            f"in all sequences; pass [S], or {_ONE_AT_A_TIME}"
        )
    if offset and "key_value_positions" in arrays:
        arrays["query_offset"] = np.asarray(offset, np.int32)


# What the gathered pass needs, what it supports besides, and what it does not.
_OF_DOCUMENTS = (
    "query_positions", "key_value_positions", "query_segment_ids", "key_value_segment_ids",
)  # fmt: skip
_WITH_DOCUMENTS = (*_OF_DOCUMENTS, "sink_logits")
_STATIC_WITHOUT_DOCUMENTS = ("attention_chunk_size", "score_mod", "mask_mod", "block_mask")


def _check_gathered(arguments: LocalArguments, arrays: dict[str, Any], offset: int | None) -> None:
    """Raises unless a call of the gathered pass has its documents, and no other mask."""
    layout = arguments.parsed_layout
    if missing := [name for name in _OF_DOCUMENTS if name not in arrays]:
        raise ValueError(
            f"{missing[0]} is None with layout {layout!r}: pass the positions and segment ids "
            "that burst_jax.layouts.balance returned, for queries and keys"
        )
    queries, keys = (arrays[name].shape[1] for name in _OF_DOCUMENTS[2:])
    if queries != keys:
        raise ValueError(
            f"query has {queries} tokens, key {keys}, with layout {layout!r}: queries and keys "
            "must be the same tokens"
        )
    if getattr(arguments, "backward", None) == "rotate_query":
        raise NotImplementedError(
            f"backward is 'rotate_query' with layout {layout!r}, in which K and V of split "
            "documents are gathered: use 'auto'"
        )
    other = [name for name in arrays if name not in _WITH_DOCUMENTS and name != "query_offset"]
    other += [name for name in _STATIC_WITHOUT_DOCUMENTS if getattr(arguments, name) is not None]
    other += [] if offset == 0 else ["query_offset"]
    other += ["dropout_rate"] if arguments.dropout_rate else []
    if any(isinstance(side, jax.Array) for side in window_sides(arguments.local_window_size)):
        other.append("a traced local_window_size")
    if other:
        raise NotImplementedError(gathered_pass_lacks(layout, other[0]))


_CHECKS: dict[AttentionPass, Callable[..., None]] = {
    "ring": _check_ring, "gathered": _check_gathered,
}  # fmt: skip


def positions_per_sequence(arguments: LocalArguments, arrays: Mapping[str, Any]) -> str | None:
    """The argument whose positions differ between the sequences of the batch, or None.

    None for the gathered pass, which reads every sequence's positions itself.
    """
    if arguments.parsed_layout.attention_pass == "gathered":
        return None
    return next((n for n, ndim in POSITIONS.items() if n in arrays and arrays[n].ndim > ndim), None)


def check_readers_of_positions(arguments: LocalArguments, arrays: Mapping[str, Any]) -> None:
    """Raises if ALiBi, dropout or user functions would read per-sequence positions."""
    name = positions_per_sequence(arguments, arrays)
    readers = ["dropout_rate"] if arguments.dropout_rate else []
    readers += [
        reader
        for reader in ("alibi_slopes", "score_mod", "mask_mod")
        if getattr(arguments, reader) is not None
    ]
    if name is not None and readers:
        raise NotImplementedError(
            f"{name} has shape {arrays[name].shape}, and {readers[0]} reads positions: kernels "
            "have one position per query, the same in all sequences; pass a query_offset of one "
            f"number or query_positions [T], or {_ONE_AT_A_TIME}"
        )


def window_sides(window: Any) -> tuple[Side, Side]:
    """``(left, right)`` of ``local_window_size``. A JAX array is a side whose value is traced."""
    return window if isinstance(window, tuple) else (window, window)


def check_window(window: object) -> None:
    """Raises ValueError unless ``local_window_size`` is a window."""
    sides = window_sides(window)
    if not (len(sides) == 2 and all(map(_is_side, sides))):
        raise ValueError(
            f"local_window_size is {window!r}: it must be an int or a pair (left, right) of ints, "
            "from 0 to 2**31 - 1, or None for no limit; a side may be a JAX array too, an integer "
            "scalar"
        )


def _is_side(side: Any) -> bool:
    if isinstance(side, jax.Array):
        return side.shape == () and jnp.issubdtype(side.dtype, jnp.integer)
    is_int = isinstance(side, numbers.Integral) and not isinstance(side, bool)
    return side is None or (is_int and 0 <= int(side) < 2**31)


def check_prefix(arguments: LocalArguments) -> None:
    """Raises ValueError if ``prefix_lengths`` is given without ``is_causal``."""
    if arguments.prefix_lengths is not None and not arguments.is_causal:
        raise ValueError(
            "prefix_lengths is given but is_causal is False, so there is no causal mask for it to "
            "lift: set is_causal=True, or leave prefix_lengths out"
        )


def check_scale(scale: Any, head_dim: int) -> float:
    """The argument ``scale`` as a float, ``1 / sqrt(H)`` for None.

    A traced scale would have to multiply the query, which rounds in 16 bits, or be an operand of
    every kernel. A compiled-in scale costs nothing.
    """
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, jax.Array) and not scale.shape and jnp.isrealobj(scale):
        raise NotImplementedError(
            f"scale is {scale!r}, a JAX array: kernels have the scale compiled in, so it must be a "
            "Python number; pass scale=1.0 and multiply the query by the array before the call, "
            "query * scale.astype(query.dtype)"
        )
    return check_number("scale", scale)


def check_number(name: str, value: Any) -> float:
    """``value`` as a float; raises ValueError unless it is a Python number."""
    if isinstance(value, (bool, jax.core.Tracer)) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} is {value!r}: it must be a Python number or None, and is static")
    try:
        return float(value)
    except OverflowError:
        # An int beyond float's range. Score rejects infinity; its message names the valid range.
        return math.inf if value == abs(value) else -math.inf


def check_dropout_rate(rate: Any) -> float:
    """``dropout_rate`` as a float; raises ValueError unless it is a probability below 1."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float, np.floating)):
        raise ValueError(
            f"dropout_rate is {rate!r}: it must be a Python number below 1, and is static"
        )
    return Dropout(float(rate)).rate


def check_dropout_key(rate: float, key: Any) -> jax.Array | None:
    """``dropout_key`` as a ``jax.random.key``; None without dropout.

    Raises:
      ValueError: there is no key for a nonzero rate, or it is not one key.
    """
    if key is None:
        if rate:
            raise ValueError(
                f"dropout_rate is {rate} and dropout_key is None: pass a new jax.random.key "
                "at each call, or dropout_rate=0.0 for no dropout"
            )
        return None
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


def check_rotation(backward: str) -> None:
    """Raises ValueError unless ``backward`` is a rotation or "auto"."""
    if not isinstance(backward, str) or backward not in ROTATION_CHOICES:
        choices = ", ".join(map(repr, ROTATION_CHOICES))
        raise ValueError(f"backward is {backward!r}: use one of {choices}")


def check_ring_axes(name: str, axes: AxisNames, ulysses_axis: str | None) -> tuple[str, ...]:
    """The ring's mesh axes, outermost first; none for None.

    Raises:
      ValueError: they are not one name or two.
    """
    if ulysses_axis is not None and not isinstance(ulysses_axis, str):
        raise ValueError(
            f"ulysses_axis is {ulysses_axis!r}: it must be the name of a mesh axis, or None"
        )
    if axes is None:
        return ()
    names = (axes,) if isinstance(axes, str) else axes
    if not (
        isinstance(names, tuple)
        and len(names) in (1, 2)
        and all(isinstance(axis, str) for axis in names)
        and len(set(names)) == len(names)
    ):
        raise ValueError(
            f"{name} is {axes!r}: it must be the name of a mesh axis, a pair (outer, inner) of "
            "them for a two-level ring, or None for no ring"
        )
    if ulysses_axis in names:
        raise ValueError(
            f"ulysses_axis is {ulysses_axis!r}, and so is {name}: use different mesh axes"
        )
    return names
