"""Changes of a valid call: mistakes, spellings of the same, and what may be either.

A change is a function ``(rng, plan, call) -> arguments to change``, or None where it does not apply
to the call. Whether a change is a mistake follows from the documentation and from the plan's sizes,
never from the library.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from fuzz_valid import AXIS_NAMES, Plan, needed_spec, pick, size_along
from jax.sharding import Mesh, PartitionSpec

import burst_jax
from pallas_kernels import XLA, Implementation

Change = Callable[[np.random.Generator, Plan, dict[str, Any]], "dict[str, Any] | None"]
AXES = ("seq_axis", "ulysses_axis", "batch_axis", "tensor_axis")
ARRAYS = ("query", "key", "value")
IDS = ("query_segment_ids", "key_value_segment_ids")
LENGTHS = ("prefix_lengths", "query_seq_lengths", "key_value_seq_lengths")
RANGES = ("key_starts", "key_ends")
POSITIONS = ("query_positions", "key_value_positions")
NUMBERS = ("sink_logits", "alibi_slopes")

# Values that no argument of this name may have, whatever the rest of the call is.
NEVER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(ARRAYS, (None, 3.0, "query", [[1.0]], object(), np.ndarray, np.float32(1), ())),
    "mesh": ("seq", 3, object(), (), Mesh, {"seq": 2}, PartitionSpec("seq"), ["seq"], True),
    "seq_axis": ((), 0, 1.5, True, ["seq"], ("a", "b", "c"), (None,), (0,), b"seq", ("",)),
    "ulysses_axis": ((), 0, 1.5, ["x"], ("x",), b"x", "nowhere", "", object(), {"x"}, True),
    "batch_axis": (0, 1.5, ["data"], (None,), (0,), b"x", "nowhere", ("nowhere",), "", {"x"}, True),
    "tensor_axis": (
        0,
        1.5,
        ["data"],
        (None,),
        (0,),
        b"x",
        "nowhere",
        ("nowhere",),
        "",
        {},
        object(),
    ),
    "layout": ("zig-zag", "", None, 0, ["zigzag"], np.array(["zigzag"]), ("striped",), "striped:0"),
    "is_causal": (None, 0, 1, "yes", 1.0, np.array(True), np.array([True]), [True], object()),
    "scale": (
        *(math.nan, math.inf, -math.inf, "auto", True, 1j, [1.0], (0.5,), np.array(0.5), 10**400),
        *(jnp.ones(2), object(), 1e39, -1e300, np.float32(np.inf)),
    ),
    "local_window_size": (
        *(-1, (4, -1), 4.0, (1, 2, 3), (3,), (), [4, 4], True, "4", (4, "4"), (1.0, 2), 2**31),
        *((0, 2**40), math.nan, np.array([1, 2]), (True, 2), object(), np.float32(2), -(2**70)),
        *(jnp.float32(2), jnp.arange(2), (jnp.bool_(True), 2), (None, -1)),
    ),
    "logits_soft_cap": (
        *(0, 0.0, -30, math.nan, math.inf, "30", True, [3.0], np.array(3.0), jnp.float32(3), 1e39),
        *(1j, 10**400, object(), -math.inf),
    ),
    **dict.fromkeys(IDS, (3, "ids", [[1]], (1,), object(), np.int32(1), np.ndarray)),
    **dict.fromkeys(
        LENGTHS + RANGES + POSITIONS, (3, "all", [1], (1,), object(), np.int32(1), np.ndarray)
    ),
    "query_offset": (
        *(None, 1.0, "3", True, [1], 2**30, -(2**70), 1j, object(), np.float32(1), np.ones((1, 1))),
        *(jnp.float32(1), np.array(2**40), np.array([True]), ()),
    ),
    "block_mask": (
        *(3, "all", True, [[True]], (), object(), np.bool_(True), np.ndarray, np.ones((2, 2))),
        *(np.ones(4, bool), np.ones((1, 1, 1, 1), bool), np.ones((0, 2), bool)),
        *(np.ones((1000, 1, 1), bool), np.ones((10**4 + 7, 1), bool), jnp.ones((1, 1))),
    ),
    **dict.fromkeys(NUMBERS, (3.0, "ALiBi", [0.0], (), object(), np.float32(1), True)),
    "score_mod": (
        *(3, "ALiBi", (), True, jnp.ones(2), np.array(1.0), {}),
        *(lambda s, b, h, p, c: p, lambda s, b, h, p, c: None, lambda s, b, h, p, c: (s, s)),
        *(lambda s, b, h, p, c: s - s.max(), lambda s, b, h, p, c: jnp.stack([s, s])),
    ),
    "mask_mod": (
        *(3, "causal", (), True, np.ones((2, 2), bool), {}),
        *(lambda b, h, p, c: p - c, lambda b, h, p, c: None, lambda b, h, p, c: jnp.zeros(2, bool)),
    ),
    "dropout_rate": (
        *(None, -0.1, 1, 1.0, 1.5, math.nan, math.inf, "0.1", True, [0.1], jnp.float32(0.1), 1j),
        *(object(), np.array(0.1)),
    ),
    "dropout_key": (3, "key", [0, 1], (), object(), np.float32(1), np.zeros((2, 2), np.uint32)),
    "implementation": ("flash", "", 3, ["xla"], XLA.forward, Implementation, np.array("xla"), True),
    "pad": (None, 0, 1, "yes", 1.0, np.array(True), np.array([True]), [True], object()),
    "deterministic": (None, 0, 1, "yes", 1.0, np.array(True), np.array([True]), [True], object()),
    "backward": ("rotate_q", "", None, 0, ["auto"], np.array("auto"), True, b"auto"),
    "return_residual": (None, 0, 1, "yes", (), 1.0, np.array(True), [True]),
}


def never(rng, plan, call):
    name = pick(rng, tuple(NEVER))
    return {name: pick(rng, NEVER[name])}


# --- arrays --------------------------------------------------------------------------------------


def of_numpy(call, *names):
    """The arrays on no mesh, so that a changed shape meets no sharding."""
    return {name: np.asarray(call[name]) for name in names}


def rank(rng, plan, call):
    name, x = pick(rng, [(name, np.asarray(call[name])) for name in ARRAYS])
    return {name: pick(rng, (x[0], x[None], x[..., 0], x.reshape(-1), x.sum()))}


def empty(rng, plan, call):
    name, axis = pick(rng, ARRAYS), int(rng.integers(4))
    return {name: np.take(np.asarray(call[name]), np.arange(0), axis)}


def dtype(rng, plan, call):
    wrong = [np.float64, np.int32, np.complex64, np.bool_, np.uint8, ">f4", object, "U8", np.int64]
    wrong += [jnp.float8_e4m3fn]
    name, kind = pick(rng, ARRAYS), pick(rng, wrong)
    return {name: np.asarray(call[name]).astype(np.float32).astype(kind)}


def one_other_dtype(rng, plan, call):
    others = [kind for kind in ("float32", "bfloat16", "float16") if kind != plan.dtype]
    name = pick(rng, ARRAYS)
    return {name: np.asarray(call[name]).astype(jnp.dtype(pick(rng, others)))}


def no_array(rng, plan, call):
    name = pick(rng, ARRAYS)
    x = np.asarray(call[name])
    kinds = (
        lambda: jax.ShapeDtypeStruct(x.shape, x.dtype),
        lambda: nnx.Param(jnp.asarray(x)),
        lambda: jax.random.split(jax.random.key(0), x.shape),
        lambda: x.tolist(),
        lambda: np.ma.masked_array(x, x > 0),
        lambda: memoryview(np.zeros(x.shape, np.float32)),
        lambda: jax.new_ref(jnp.asarray(x)),
    )
    return {name: pick(rng, kinds)()}


def longer(x, axis, by=1):
    """``x`` with ``by`` of its entries along the axis again."""
    return np.concatenate([x, np.take(x, np.arange(by) % x.shape[axis], axis)], axis)


def length(rng, plan, call):
    """T or S that the devices do not divide; ids and values have it too."""
    if plan.unit == 1 or call.get("pad"):
        return None
    names = pick(rng, (("query", IDS[0]), ("key", "value", IDS[1])))
    by = int(rng.integers(1, plan.unit))
    given = of_numpy(call, *(name for name in names if name in call))
    return {name: longer(x, 1, by) for name, x in given.items()}


def value_unlike_key(rng, plan, call):
    name = pick(rng, ("key", "value"))
    # Values alone may have a head dim of their own.
    axis = int(rng.integers(4 if name == "key" else 3))
    return {name: longer(np.asarray(call[name]), axis)}


def batch_of_one_side(rng, plan, call):
    names = pick(rng, (("query", IDS[0]), ("key", "value", IDS[1])))
    return {n: longer(x, 0) for n, x in of_numpy(call, *(n for n in names if n in call)).items()}


def batch(rng, plan, call):
    """A batch that its axes do not divide."""
    if size_along(plan.mesh, call.get("batch_axis")) == 1:
        return None
    names = [name for name in (*ARRAYS, *IDS) if name in call]
    return {name: longer(x, 0) for name, x in of_numpy(call, *names).items()}


def head_dim(rng, plan, call):
    names = pick(rng, (("query",), ("key", "value")))
    return {name: longer(x, 3) for name, x in of_numpy(call, *names).items()}


def no_group(rng, plan, call):
    """N that is no multiple of K."""
    if plan.sizes[4] == 1:
        return None
    names = [name for name in ("query", *NUMBERS) if name in call]
    axes = {"query": 2}
    return {name: longer(x, axes.get(name, 0)) for name, x in of_numpy(call, *names).items()}


def heads(rng, plan, call):
    """As many query as key heads, but a number that the devices do not divide."""
    shares = size_along(plan.mesh, call.get("tensor_axis"))
    shares *= size_along(plan.mesh, call.get("ulysses_axis"))
    count = int(rng.integers(1, 8))
    if count % shares == 0:
        return None
    sizes = {"query": 2, "key": 2, "value": 2, "sink_logits": 0, "alibi_slopes": 0}
    given = of_numpy(call, *(name for name in sizes if name in call))
    return {name: np.take(x, [0] * count, sizes[name]) for name, x in given.items()}


# --- segment ids and numbers of each head --------------------------------------------------------


def made_ids(plan):
    batch, t, s, *_ = plan.sizes
    return {name: np.ones((batch, size), np.int32) for name, size in zip(IDS, (t, s), strict=True)}


def ids(rng, plan, call):
    given, name = made_ids(plan), pick(rng, IDS)
    x = given[name]
    wrong = (
        *(x[0], x[..., None], x.astype(np.float32), x.astype(bool), x.tolist(), x[:, :-1], None),
        *(longer(x, 0), longer(x, 1), x.astype(np.int64) * 2**31, x.astype(np.uint32) * 2**31),
        *(-x.astype(np.int64) * 2**40, x.astype(">f4"), nnx.Variable(jnp.asarray(x)), x[:0]),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype), jax.random.split(jax.random.key(0), x.shape)),
    )
    return given | {name: pick(rng, wrong)}


def ranges(rng, plan, call):
    batch, t, *_ = plan.sizes
    name = pick(rng, LENGTHS + RANGES + POSITIONS[:1])
    x = np.ones(batch if name in LENGTHS else (batch, t), np.int32)
    wrong = (
        *(x[..., None], longer(x, 0), x.astype(np.float32), x.astype(bool), x.tolist(), x[:0]),
        *(x.astype(">f4"), nnx.Variable(jnp.asarray(x)), jax.ShapeDtypeStruct(x.shape, x.dtype)),
    )
    return {name: pick(rng, wrong), "is_causal": True}


def prefix_without_causality(rng, plan, call):
    return {"prefix_lengths": np.ones(plan.sizes[0], np.int32), "is_causal": False}


def numbers(rng, plan, call):
    name, n = pick(rng, NUMBERS), plan.sizes[3]
    x = np.ones(n, np.float32)
    wrong = (
        *(x[None], x[:, None], np.ones(n + 1, np.float32), x[:0], x.sum(), x.tolist()),
        *(x.astype(np.float64), x.astype(np.float16), x.astype(np.int32), x.astype(">f4")),
        *(jnp.asarray(x, jnp.bfloat16), nnx.Param(jnp.ones((n + 2,))), jax.new_ref(jnp.asarray(x))),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype), jax.random.split(jax.random.key(0), n)),
    )
    return {name: pick(rng, wrong)}


# --- axes, devices, and how arrays are split -----------------------------------------------------


def no_such_axis(rng, plan, call):
    missing = [name for name in AXIS_NAMES if name not in plan.mesh.axis_names]
    argument, axis = pick(rng, AXES), pick(rng, missing)
    tuples = argument != "ulysses_axis" and rng.random() < 0.5
    return {argument: (axis,) if tuples else axis}


def axis_twice(rng, plan, call):
    """An axis with two roles, or twice in one; a role that takes no tuple takes none here."""
    axis = str(pick(rng, plan.mesh.axis_names))
    if rng.random() < 0.3:
        return {pick(rng, ("seq_axis", "batch_axis", "tensor_axis")): (axis, axis)}
    first, second = rng.choice(4, 2, replace=False)
    return {AXES[first]: axis, AXES[second]: axis}


def three_levels(rng, plan, call):
    names = plan.mesh.axis_names
    return {"seq_axis": tuple(names[:3])} if len(names) > 2 else None


def no_mesh(rng, plan, call):
    return None if plan.in_context else {"mesh": None}


def abstract_mesh(rng, plan, call):
    if plan.in_context or plan.placed == "mesh":
        return None
    return {"mesh": plan.mesh.abstract_mesh}


def other_device(rng, plan, call):
    last = jax.devices()[-1]
    if last in set(plan.mesh.devices.flat):
        return None
    name = pick(rng, [name for name in (*ARRAYS, *IDS, *NUMBERS) if name in call])
    x = np.asarray(call[name])
    return {name: jax.device_put(x.astype(np.int32) if name in IDS else x, last)}


def split_otherwise(rng, plan, call):
    """Over Explicit axes an array must be split as the call says; whole is otherwise."""
    name = pick(rng, ARRAYS)
    spec = needed_spec(plan, name, 4)
    named = [axis for entry in spec if entry for axis in np.atleast_1d(entry)]
    sizes = [plan.mesh.shape[axis] for axis in named if axis in plan.mesh.explicit_axes]
    if max(sizes, default=1) == 1:
        return None
    return {name: jax.device_put(call[name], jax.NamedSharding(plan.mesh, PartitionSpec()))}


MISTAKES: tuple[Change, ...] = (
    *(never,) * 12,
    *(rank, empty, dtype, one_other_dtype, no_array, length, length, value_unlike_key),
    *(batch_of_one_side, batch, head_dim, no_group, heads, ids, ids, numbers, numbers),
    *(ranges, ranges, prefix_without_causality),
    *(no_such_axis, axis_twice, three_levels, no_mesh, abstract_mesh),
    *(other_device, split_otherwise),
)


# --- calls that Python or the platform refuses ---------------------------------------------------


def unknown_keyword(rng, plan, call):
    return {pick(rng, ("is_casual", "mask", "bias", "axis_name", "zzz", "positions")): None}


def cannot_run(rng, plan, call):
    kernels = ({"implementation": name} for name in ("triton", "mosaic_sm90"))
    return pick(rng, (*kernels, {"scale": jnp.float32(0.5)}))


# --- the same call, spelled differently ----------------------------------------------------------


def same_number(rng, plan, call):
    scale, cap = call.get("scale"), call.get("logits_soft_cap")
    if scale is None and cap is None:
        return {"scale": float(plan.sizes[5] ** -0.5)}
    name, value = ("scale", scale) if scale is not None else ("logits_soft_cap", cap)
    return {name: pick(rng, (np.float64(value), fractions.Fraction(value), float(value)))}


def same_window(rng, plan, call):
    window = call.get("local_window_size")
    if window is None:
        return None
    left, right = window if isinstance(window, tuple) else (window, window)

    def spelled(side):
        # An array's value is not known where a program is traced: another mask says the same.
        return side if side is None else pick(rng, (np.int64, np.uint32, jnp.int32))(side)

    return {"local_window_size": (spelled(left), spelled(right))}


def same_flag(rng, plan, call):
    name = pick(rng, ("is_causal", "return_residual"))
    return {name: np.bool_(call.get(name, False))}


def same_name(rng, plan, call):
    names = [name for name in ("layout", "backward") if name in call]
    return {name: np.str_(call[name]) for name in names}


def same_axes(rng, plan, call):
    changed: dict[str, Any] = {}
    for name in ("seq_axis", "batch_axis", "tensor_axis"):
        axes = call.get(name)
        if isinstance(axes, str):
            changed[name] = (axes,)
        elif axes is None and name != "seq_axis":
            changed[name] = pick(rng, ((), None))
    return changed


def same_array(rng, plan, call):
    if plan.placed != "numpy":
        return None
    name = pick(rng, ARRAYS)
    x = np.asarray(call[name])
    locked = x.copy()
    locked.flags.writeable = False
    twice = np.repeat(x, 2, axis=1)[:, ::2]
    return {name: pick(rng, (np.asfortranarray(x), locked, twice))}


def same_ids(rng, plan, call):
    if plan.placed != "numpy" or IDS[0] not in call:
        return None
    kinds = (np.int8, np.int16, np.uint32, np.uint64, ">i4", ">i8")
    return {name: np.asarray(call[name]).astype(pick(rng, kinds)) for name in IDS}


def same_mesh(rng, plan, call):
    return {"mesh": pick(rng, (plan.mesh, plan.mesh.abstract_mesh))} if plan.in_context else None


def same_numbers(rng, plan, call):
    name = next((name for name in NUMBERS if name in call), None)
    if name is None or plan.placed != "jax":
        return None
    return {name: nnx.Param(call[name])}


SPELLINGS: tuple[Change, ...] = (
    *(same_number, same_window, same_flag, same_name, same_axes, same_array, same_ids),
    *(same_numbers, same_mesh),
)


# --- either --------------------------------------------------------------------------------------


def other_axes(rng, plan, call):
    """Axes of the mesh with random roles: the answer is the same wherever tokens lie."""
    names = [None, *map(str, rng.permutation(plan.mesh.axis_names))]
    argument = pick(rng, AXES)
    tuples = argument != "ulysses_axis" and len(names) > 2 and rng.random() < 0.5
    return {argument: tuple(names[1:3]) if tuples else pick(rng, names)}


def other_layout(rng, plan, call):
    return {"layout": pick(rng, ("contiguous", "zigzag", "striped", "striped:2"))}


def other_length(rng, plan, call):
    """Some tokens more, which may or may not be as many as the devices need."""
    by = int(rng.integers(1, 13))
    names = [name for name in ("query", IDS[0]) if name in call]
    return {name: longer(x, 1, by) for name, x in of_numpy(call, *names).items()}


def other_scale(rng, plan, call):
    return {"scale": pick(rng, (0, 0.0, -0.0, 1e-30, -1, 3, 1e-300, math.nan))}


def other_sinks(rng, plan, call):
    x = np.full(plan.sizes[3], pick(rng, (-1e30, -30.0, 30.0, 0.0)), np.float32)
    return {"sink_logits": x}


EITHER: tuple[Change, ...] = (other_axes, other_axes, other_layout, other_length, other_scale)
EITHER += (other_sinks,)

assert set(NEVER) == set(burst_jax.burst_attention.__kwdefaults__ or ()) | set(ARRAYS)
