"""hypothesis strategies for mistakes in valid calls, and for other spellings of the same call.

Whether a change is a mistake follows from the documentation and from the call's sizes, never from
the library.
"""

from __future__ import annotations

import fractions
import inspect
import math
from typing import Any

import functions
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from valid_calls import LAYOUTS, SHAPES, Program, needed_spec
from valid_calls import names_of as _names

import burst_jax
from pallas_kernels import XLA, Implementation

ARGUMENTS = tuple(
    name for name in inspect.signature(burst_jax.burst_attention).parameters if name != "others"
)
PER_HEAD = ("sink_logits", "alibi_slopes")
IDS = ("query_segment_ids", "key_value_segment_ids")
SIDES = (("query", "query_segment_ids"), ("key", "value", "key_value_segment_ids"))

# Whatever a caller may pass by accident.
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.binary(max_size=4), st.lists(st.integers(), max_size=3), st.complex_numbers(),
    st.tuples(st.text(max_size=3)), st.tuples(st.integers(), st.floats()),
    st.sampled_from((object(), (), {}, {"x"}, np.ndarray, Mesh, [1.0], ["seq"], (None,), b"seq")),
    st.sampled_from((np.array("auto"), np.array([True]), np.array(True), np.array(0.5))),
    st.sampled_from((np.float32(np.inf), jnp.ones(2), jnp.bool_(True), np.array([1, 2]))),
)  # fmt: skip


def _is_axes(program: Program, x: Any) -> bool:
    names = (x,) if isinstance(x, str) else x
    return isinstance(names, tuple) and all(name in program.mesh.axis_names for name in names)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, np.floating)) and not isinstance(x, bool)


def _is_size(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31


def _is_flag(program: Program, x: Any) -> bool:
    return isinstance(x, bool)


def _is_none(program: Program, x: Any) -> bool:
    return x is None


def _is_name(program: Program, x: Any) -> bool:
    return isinstance(x, str)  # Names are wrong only where they are drawn from NAMES.


# Which of ANYTHING an argument accepts, by the documentation.
ACCEPTS = {
    **dict.fromkeys(("pad", "is_causal", "deterministic", "return_residual"), _is_flag),
    **dict.fromkeys(("query", "key", "value"), lambda program, x: False),
    **dict.fromkeys([name for name in SHAPES if name not in ("query", "key", "value")], _is_none),
    **dict.fromkeys(("mesh", "block_mask", "dropout_key"), _is_none),
    **dict.fromkeys(("layout", "backward"), _is_name),
    "implementation": lambda program, x: x is None or isinstance(x, str),
    "seq_axis": lambda program, x: x is None or (_is_axes(program, x) and x != ()),
    "ulysses_axis": lambda program, x: x is None or (isinstance(x, str) and _is_axes(program, x)),
    **dict.fromkeys(
        ("batch_axis", "tensor_axis"), lambda program, x: x is None or _is_axes(program, x)
    ),
    **dict.fromkeys(("score_mod", "mask_mod"), lambda program, x: x is None or callable(x)),
    "query_offset": lambda program, x: (
        _is_size(abs(x)) and abs(x) < 2**30 if isinstance(x, int) and not isinstance(x, bool)
        else isinstance(x, np.ndarray) and x.dtype == int
    ),
    "scale": lambda program, x: x is None or (_is_number(x) and abs(x) <= 2.0**100),
    "logits_soft_cap": lambda program, x: (
        x is None or (_is_number(x) and 2.0**-60 <= x <= 2.0**60)
    ),
    "local_window_size": lambda program, x: (
        x is None or _is_size(x) or (isinstance(x, tuple) and len(x) == 2 and all(map(_is_size, x)))
    ),
    "dropout_rate": lambda program, x: _is_number(x) and 0 <= x < 1,
}  # fmt: skip

# Mistakes of their own.
SPECIAL: dict[str, tuple[Any, ...]] = {
    "mesh": ("seq", {"seq": 2}, PartitionSpec("seq")),
    "seq_axis": ("nowhere", ("a", "b", "c"), ("nowhere",)),
    **dict.fromkeys(("batch_axis", "tensor_axis"), ("nowhere", ("nowhere",), "")),
    "ulysses_axis": ("nowhere", ""),
    "layout": ("zig-zag", "", "striped:0", "striped:x", "Zigzag"),
    "backward": ("rotate_q", "", "AUTO"),
    "implementation": ("flash", "", XLA.forward, Implementation),
    "scale": (jnp.float32(0.5), -(10**400), 1e39, np.float32(np.inf), math.nan),
    "local_window_size": (
        *((4, -1), 4.0, (1, 2, 3), (3,), [4, 4], (4, "4"), 2**31, (0, 2**40), np.float32(2)),
        *(jnp.float32(2), jnp.arange(2), (jnp.bool_(True), 2), (None, -1)),
    ),
    "logits_soft_cap": (0, 0.0, -30, 1e39, 10**400, jnp.float32(3), -math.inf),
    "query_offset": (2**30, -(2**70), np.ones((1, 1)), np.array(2**40), np.array([True])),
    "block_mask": (
        *(np.ones((2, 2)), np.ones(4, bool), np.ones((1, 1, 1, 1), bool), np.ones((0, 2), bool)),
        *(np.ones((1000, 1, 1), bool), np.ones((10**4 + 7, 1), bool), jnp.ones((1, 1)), [[True]]),
    ),
    "score_mod": (
        *(lambda s, b, h, p, c: p, lambda s, b, h, p, c: None, lambda s, b, h, p, c: (s, s)),
        *(lambda s, b, h, p, c: s - s.max(), lambda s, b, h, p, c: jnp.stack([s, s])),
    ),
    "mask_mod": (
        lambda b, h, p, c: p - c, lambda b, h, p, c: None, lambda b, h, p, c: jnp.zeros(2, bool)
    ),
    "dropout_rate": (1, 1.0, -0.1, jnp.float32(0.1)),
    "dropout_key": (np.zeros((2, 2), np.uint32), jnp.zeros(2, jnp.int32)),
}  # fmt: skip
# A scale that is traced is a limit of the kernels, not a mistake.
LIMITS = {"scale": (jnp.float32(0.5),), "implementation": ("triton", "mosaic_sm90")}


def _longer(x: Any, axis: int, by: int = 1) -> np.ndarray:
    x = np.asarray(x)
    return np.concatenate([x, np.take(x, np.arange(by) % x.shape[axis], axis)], axis)


def _good_array(program: Program, name: str) -> np.ndarray:
    integers = name not in ("query", "key", "value", *PER_HEAD)
    dtype = np.int32 if integers else program.dtype if name not in PER_HEAD else "float32"
    return np.ones([program.sizes[x] for x in SHAPES[name]], jnp.dtype(dtype))


def good_ids(program: Program) -> dict[str, Any]:
    return {name: _good_array(program, name) for name in IDS}


def _bent(program: Program, name: str) -> st.SearchStrategy:
    """Wrong arrays of rank, shape, type or dtype."""
    x = _good_array(program, name)
    kinds = {np.float32, np.bool_} if x.dtype == np.int32 else {np.float64, np.int32, np.bool_}
    wrong = [
        *(x[None, None], x[..., None], _longer(x, 0), x[:0], x.tolist(), memoryview(bytes(4))),
        *(x.astype(kind) for kind in kinds), x.astype(">f4"), np.full(x.shape, "x"),
        x.astype(object),
        x.astype(np.complex64), jax.ShapeDtypeStruct(x.shape, x.dtype),
        np.ma.masked_array(x, x > 0),
        jax.random.split(jax.random.key(0), x.shape), jax.new_ref(jnp.asarray(x)),
        # A Flax variable stands for the array of per-head parameters.
        nnx.Param(jnp.asarray(x[:0] if name in PER_HEAD else x)),
    ]  # fmt: skip
    if name in ("query", "key", "value"):
        wrong += [x.astype(jnp.float8_e4m3fn), x[0], x.sum(), np.moveaxis(x, 3, 0)[:, :, :0]]
        wrong += [x.astype(jnp.dtype(d)) for d in ("bfloat16", "float32") if d != program.dtype]
    return st.sampled_from(wrong)


def wrong_values(name: str, program: Program) -> st.SearchStrategy:
    """Values that one argument does not accept, whatever the rest of the call is."""
    strategies = [ANYTHING.filter(lambda x: not ACCEPTS[name](program, x))]
    if name in SPECIAL:
        strategies.append(st.sampled_from(SPECIAL[name]))
    if name in SHAPES and name != "query_offset":
        strategies += 2 * [_bent(program, name)]
    return st.one_of(strategies)


# --- mistakes in what arguments are together: changes of a call, or None -------------------------


def length(program, call, draw):
    """T or S that the devices do not divide."""
    unit = math.lcm({"zigzag": 2, "striped:3": 3}.get(program.options["layout"], 1))
    unit *= math.prod(program.mesh.shape[x] for x in _names(needed_spec(program, "key", 4)[1]))
    if unit == 1 or call.get("pad"):
        return None
    by = draw(st.integers(1, unit - 1))
    return {n: _longer(call[n], 1, by) for n in draw(st.sampled_from(SIDES)) if n in call}


def one_side(program, call, draw):
    """Batch sizes or head dims that differ."""
    axis, names = draw(st.sampled_from((0, 3))), draw(st.sampled_from((("query",), SIDES[1][:2])))
    return {name: _longer(call[name], axis) for name in names}


def key_unlike_value(program, call, draw):
    return {"value": _longer(call["value"], draw(st.integers(0, 2)))}


def other_dtype(program, call, draw):
    kind = "float32" if program.dtype != "float32" else "bfloat16"
    name = draw(st.sampled_from(("query", "key", "value")))
    return {name: np.asarray(call[name]).astype(jnp.dtype(kind))}


def batch(program, call, draw):
    if program.axes.get("batch_axis") is None:
        return None
    names = [n for n in SHAPES if n in call and np.ndim(call[n]) and "B" in SHAPES[n]]
    return {n: _longer(call[n], 0) for n in names if np.ndim(call[n]) == len(SHAPES[n])}


def heads(program, call, draw):
    """Query heads that the key heads, or heads that the devices, do not divide."""
    if program.sizes["K"] == 1:
        return None
    return {"query": _longer(call["query"], 2)}


def one_side_of_ids(program, call, draw):
    return good_ids(program) | {draw(st.sampled_from(IDS)): None}


def prefix_without_causality(program, call, draw):
    return {"prefix_lengths": _good_array(program, "prefix_lengths"), "is_causal": False}


def positions_twice(program, call, draw):
    return {"query_positions": _good_array(program, "query_positions"), "query_offset": 3}


def dropout_without_key(program, call, draw):
    positions = {"query_positions": None, "query_offset": 0}  # Of all sequences, for dropout.
    return {"dropout_rate": 0.5, "dropout_key": None} | positions


def axis_twice(program, call, draw):
    axis = draw(st.sampled_from(program.mesh.axis_names))
    roles = ["seq_axis", "ulysses_axis", "batch_axis", "tensor_axis"]
    first, second = draw(st.permutations(roles))[:2]
    return {first: axis, second: axis}


def axis_twice_in_one(program, call, draw):
    name = draw(st.sampled_from(("seq_axis", "batch_axis", "tensor_axis")))
    return {name: (program.mesh.axis_names[0],) * 2}


def pad_of_a_permutation(program, call, draw):
    return {"pad": True, "layout": draw(st.sampled_from(LAYOUTS[1:]))}


def no_mesh(program, call, draw):
    return None if program.in_context else {"mesh": None}


def no_devices(program, call, draw):
    sharded = program.in_context or program.placed == "mesh"
    return None if sharded else {"mesh": program.mesh.abstract_mesh}


def other_device(program, call, draw):
    last = jax.devices()[-1]
    if last in set(program.mesh.devices.flat):
        return None
    name = draw(st.sampled_from([name for name in SHAPES if np.ndim(call.get(name, 0))]))
    return {name: jax.device_put(np.asarray(call[name]), last)}


def sharded_otherwise(program, call, draw):
    """Over Explicit axes an array must be sharded as the call specifies."""
    name, mesh = draw(st.sampled_from(("query", "key", "value"))), program.mesh
    entries = [e for e in needed_spec(program, name, 4) if e]
    axes = [axis for e in entries for axis in ((e,) if isinstance(e, str) else e)]
    if max((mesh.shape[a] for a in axes if a in mesh.explicit_axes), default=1) == 1:
        return None
    return {name: jax.device_put(np.asarray(call[name]), jax.NamedSharding(mesh, PartitionSpec()))}


MISTAKES = (
    *(length, one_side, key_unlike_value, other_dtype, batch, heads, one_side_of_ids),
    *(prefix_without_causality, positions_twice, dropout_without_key, axis_twice),
    *(axis_twice_in_one, pad_of_a_permutation, no_mesh, no_devices, other_device),
    sharded_otherwise,
)


# --- other spellings of the same call ------------------------------------------------------------


def spelled(program: Program, call: dict[str, Any], draw) -> dict[str, Any]:
    """The same call with every argument that has another spelling in it."""
    same: dict[str, Any] = {}
    for name, value in call.items():
        if isinstance(value, bool):
            same[name] = np.bool_(value)
        elif isinstance(value, float) and name != "dropout_rate":
            same[name] = draw(st.sampled_from((np.float64, fractions.Fraction)))(value)
        elif name in ("layout", "backward"):
            same[name] = np.str_(value)
        elif name in ("seq_axis", "batch_axis", "tensor_axis") and isinstance(value, str):
            same[name] = (value,)
        elif name == "local_window_size" and isinstance(value, int):
            same[name] = draw(
                st.sampled_from(((np.int64(value), value), (value, np.uint32(value))))
            )
        elif name in IDS and program.placed == "numpy":
            kinds = np.int8, np.int16, np.uint32, np.uint64, ">i4", ">i8"
            same[name] = np.asarray(value).astype(draw(st.sampled_from(kinds)))
        elif name in PER_HEAD and program.placed == "jax":
            same[name] = nnx.Param(value)
        elif name in ("query", "key", "value") and program.placed == "numpy":
            twice = np.repeat(value, 2, axis=1)[:, ::2]
            same[name] = draw(st.sampled_from((np.asfortranarray(value), twice)))
    same.setdefault("tensor_axis", ())
    same.setdefault("scale", float(program.sizes["H"] ** -0.5))
    if program.in_context:
        same["mesh"] = draw(st.sampled_from((program.mesh, program.mesh.abstract_mesh)))
    return same


assert functions.FUNCTIONS.keys() <= ACCEPTS.keys()
