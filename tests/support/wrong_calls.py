"""hypothesis strategies for mistakes in valid calls of ``burst_attention``.

Whether a change is a mistake follows from the documentation and from the call's sizes, never from
the library.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from valid_calls import LAYOUTS, SHAPES, Program, names_of, needed_spec

import burst_jax
from pallas_kernels import XLA, Implementation

ARGUMENTS = tuple(inspect.signature(burst_jax.burst_attention).parameters)
QKV = ("query", "key", "value")
PER_HEAD = ("sink_logits", "alibi_slopes")
IDS = ("query_segment_ids", "key_value_segment_ids")

# fmt: off
# Whatever a caller may pass by accident.
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.complex_numbers(),
    st.binary(max_size=4), st.lists(st.integers(), max_size=3), st.tuples(st.text(max_size=3)),
    st.tuples(st.integers(), st.floats()),
    st.sampled_from((object(), (), {}, {"x"}, np.ndarray, Mesh, [1.0], ["seq"], (None,), b"seq")),
    st.sampled_from((np.array("auto"), np.array([True]), np.array(True), np.array(0.5))),
    st.sampled_from((np.float32(np.inf), jnp.ones(2), jnp.bool_(True), np.array([1, 2]))),
)


def _is_axes(program: Program, x: Any) -> bool:
    names = (x,) if isinstance(x, str) else x
    return isinstance(names, tuple) and all(name in program.mesh.axis_names for name in names)


def _is_real(x: Any) -> bool:
    return isinstance(x, (int, float, np.floating)) and not isinstance(x, bool)


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_side(x: Any) -> bool:
    return _is_int(x) and 0 <= x < 2**31


# Which of ANYTHING an argument accepts, by the documentation. Names are wrong only in SPECIAL.
ACCEPTS = {
    **dict.fromkeys([*SHAPES, "mesh", "block_mask", "dropout_key"], lambda p, x: x is None),
    **dict.fromkeys(QKV, lambda p, x: False),
    **dict.fromkeys(("pad", "is_causal", "deterministic", "return_residual"),
                    lambda p, x: isinstance(x, bool)),
    **dict.fromkeys(("layout", "backward"), lambda p, x: isinstance(x, str)),
    "implementation": lambda p, x: x is None or isinstance(x, str),
    "seq_axis": lambda p, x: x is None or (_is_axes(p, x) and x != ()),
    "ulysses_axis": lambda p, x: x is None or (isinstance(x, str) and _is_axes(p, x)),
    **dict.fromkeys(("batch_axis", "tensor_axis"), lambda p, x: x is None or _is_axes(p, x)),
    **dict.fromkeys(("score_mod", "mask_mod"), lambda p, x: x is None or callable(x)),
    "query_offset": lambda p, x: (_is_int(x) and abs(x) < 2**30) or (
        isinstance(x, np.ndarray) and x.dtype.kind == "i"),
    "scale": lambda p, x: x is None or (_is_real(x) and abs(x) <= 2.0**100),
    "logits_soft_cap": lambda p, x: x is None or (_is_real(x) and 2.0**-60 <= x <= 2.0**60),
    "local_window_size": lambda p, x: x is None or _is_side(x) or (
        isinstance(x, tuple) and len(x) == 2 and all(map(_is_side, x))),
    "attention_chunk_size": lambda p, x: x is None or (_is_int(x) and x > 0),
    "dropout_rate": lambda p, x: _is_real(x) and 0 <= x < 1,
}
# Mistakes that only some arguments have.
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
        (4, -1), 4.0, (1, 2, 3), (3,), [4, 4], (4, "4"), 2**31, (0, 2**40), np.float32(2),
        jnp.float32(2), jnp.arange(2), (jnp.bool_(True), 2), (None, -1),
    ),
    "logits_soft_cap": (0, 0.0, -30, 1e39, 10**400, jnp.float32(3), -math.inf),
    "query_offset": (2**30, -(2**70), np.ones((1, 1)), np.array(2**40), np.array([True])),
    "block_mask": (
        np.ones((2, 2)), np.ones(4, bool), np.ones((1, 1, 1, 1), bool), np.ones((0, 2), bool),
        np.ones((1000, 1, 1), bool), np.ones((10**4 + 7, 1), bool), jnp.ones((1, 1)), [[True]],
    ),
    "score_mod": (
        lambda s, b, h, p, c: p, lambda s, b, h, p, c: None, lambda s, b, h, p, c: (s, s),
        lambda s, b, h, p, c: s - s.max(), lambda s, b, h, p, c: jnp.stack([s, s]),
    ),
    "mask_mod": (
        lambda b, h, p, c: p - c, lambda b, h, p, c: None, lambda b, h, p, c: jnp.zeros(2, bool),
    ),
    "attention_chunk_size": (0, -3, 2.5, np.array([8]), jnp.int32(8)),
    "dropout_rate": (1, 1.0, -0.1, jnp.float32(0.1)),
    "dropout_key": (np.zeros((2, 2), np.uint32), jnp.zeros(2, jnp.int32)),
}
# Limits of kernels and of the platform.
LIMITS = {"scale": (jnp.float32(0.5),), "implementation": ("triton", "mosaic_sm90")}
# fmt: on


def longer(x: Any, axis: int, by: int = 1) -> np.ndarray:
    x = np.asarray(x)
    return np.concatenate([x, np.take(x, np.arange(by) % x.shape[axis], axis)], axis)


def good(program: Program, *names: str) -> dict[str, Any]:
    """Arrays of ones for these arguments."""
    arrays = {}
    for name in names:
        dtype = program.dtype if name in QKV else "float32" if name in PER_HEAD else "int32"
        arrays[name] = np.ones([program.sizes[x] for x in SHAPES[name]], jnp.dtype(dtype))
    return arrays


def _bent(program: Program, name: str) -> st.SearchStrategy:
    """Wrong arrays of rank, shape, type or dtype."""
    x = good(program, name)[name]
    kinds = (np.float32, np.bool_) if x.dtype == np.int32 else (np.float64, np.int32, np.bool_)
    wrong = [
        *(x[None, None], x[..., None], longer(x, 0), x[:0], x.tolist(), memoryview(bytes(4))),
        *(x.astype(kind) for kind in (*kinds, ">f4", object, np.complex64)), np.full(x.shape, "x"),
        jax.ShapeDtypeStruct(x.shape, x.dtype), np.ma.masked_array(x, x > 0),
        jax.random.split(jax.random.key(0), x.shape), jax.new_ref(jnp.asarray(x)),
        # A Flax variable stands for the array of per-head parameters.
        nnx.Param(jnp.asarray(x[:0] if name in PER_HEAD else x)),
    ]  # fmt: skip
    if name in QKV:
        wrong += [x.astype(jnp.float8_e4m3fn), x[0], x.sum(), np.moveaxis(x, 3, 0)[:, :, :0]]
        wrong += [x.astype(jnp.dtype(d)) for d in ("bfloat16", "float32") if d != program.dtype]
    return st.sampled_from(wrong)


def wrong_values(name: str, program: Program) -> st.SearchStrategy:
    """Values that one argument does not accept, whatever the rest of the call is."""
    strategies = [ANYTHING.filter(lambda x: not ACCEPTS[name](program, x))]
    strategies += [st.sampled_from(SPECIAL[name])] if name in SPECIAL else []
    strategies += 2 * [_bent(program, name)] if name in SHAPES and name != "query_offset" else []
    return st.one_of(strategies)


# --- mistakes in what several arguments are together: changes of a call, or None -----------------


def length(program, call, draw):
    """T or S that the devices do not divide."""
    ring, ulysses = (
        math.prod(program.mesh.shape[axis] for axis in names_of(program.axes.get(name)))
        for name in ("seq_axis", "ulysses_axis")
    )
    unit = ring * math.lcm({"zigzag": 2, "striped:3": 3}.get(program.options["layout"], 1), ulysses)
    if unit == 1 or call.get("pad") or "block_mask" in call:
        return None
    by, letter = draw(st.integers(1, unit - 1)), draw(st.sampled_from("TS"))
    changed = {}
    for name, axes in SHAPES.items():
        if name in call and letter in axes:
            axis = axes.index(letter) - len(axes)
            changed[name] = longer(call[name], axis, by)
    return changed


def one_side(program, call, draw):
    """Batch sizes or head dims that differ."""
    axis, names = draw(st.sampled_from((0, 3))), draw(st.sampled_from((("query",), QKV[1:])))
    return {name: longer(call[name], axis) for name in names}


def other_dtype(program, call, draw):
    kind, name = "bfloat16" if program.dtype == "float32" else "float32", draw(st.sampled_from(QKV))
    return {name: np.asarray(call[name]).astype(jnp.dtype(kind))}


def batch(program, call, draw):
    if program.axes.get("batch_axis") is None:
        return None
    whole = [n for n in SHAPES if n in call and SHAPES[n][0] == "B"]
    return {n: longer(call[n], 0) for n in whole if np.ndim(call[n]) == len(SHAPES[n])}


def axis_twice(program, call, draw):
    axis = draw(st.sampled_from(program.mesh.axis_names))
    roles = draw(st.permutations(("seq_axis", "ulysses_axis", "batch_axis", "tensor_axis")))
    twice_in_one = roles[0] != "ulysses_axis" and draw(st.booleans())
    return {roles[0]: (axis, axis)} if twice_in_one else dict.fromkeys(roles[:2], axis)


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
    if "pad" in program.features:
        return None  # Padded arrays are resharded in any case.
    name, mesh = draw(st.sampled_from(QKV)), program.mesh
    axes = [axis for entry in needed_spec(program, name, 4) for axis in names_of(entry)]
    if max((mesh.shape[a] for a in axes if a in mesh.explicit_axes), default=1) == 1:
        return None
    return {name: jax.device_put(np.asarray(call[name]), jax.NamedSharding(mesh, PartitionSpec()))}


MISTAKES = {
    each.__name__: each
    for each in (
        *(length, one_side, other_dtype, batch, axis_twice, no_devices, other_device),
        sharded_otherwise,
    )
} | {
    "value_unlike_key": lambda p, c, draw: {"value": longer(c["value"], draw(st.integers(0, 2)))},
    "heads": lambda p, c, draw: {"query": longer(c["query"], 2)} if p.sizes["K"] > 1 else None,
    "one_sides_ids": lambda p, c, draw: good(p, *IDS) | {draw(st.sampled_from(IDS)): None},
    "prefix": lambda p, c, draw: good(p, "prefix_lengths") | {"is_causal": False},
    "positions": lambda p, c, draw: good(p, "query_positions") | {"query_offset": 3},
    "dropout": lambda p, c, draw: {
        "dropout_rate": 0.5, "dropout_key": None, "query_positions": None, "query_offset": 0
    },
    "pad": lambda p, c, draw: {"pad": True, "layout": draw(st.sampled_from(LAYOUTS[1:]))},
    "no_mesh": lambda p, c, draw: None if p.in_context else {"mesh": None},
}  # fmt: skip
