"""Random valid calls of ``burst_attention``, and what dense attention in float64 makes of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import dense
import functions
import jax
import jax.numpy as jnp
import numpy as np
from cases import packed_segments
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import burst_jax

MESH_SIZES = ((1,), (2,), (3,), (5,), (8,), (2, 2), (1, 4), (3, 2), (2, 4), (2, 2, 2), (1, 2, 3))
AXIS_NAMES = ("data", "seq", "heads", "model", "x")
# What rounding alone explains, relative to the largest number of a result.
LIMITS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a valid call asks for; each draw of its arrays is another call of one program.

    Attributes:
      mesh: the mesh, entered by ``jax.set_mesh`` if ``in_context``, passed as an argument if not.
      options: the keyword arguments that are no arrays, but for the mesh.
      sizes: B, T, S, N, K and H.
      value_dim: Hv.
      unit: what the layout and the devices need lengths to be a multiple of.
      dtype: of query, key and value.
      segments: whether there are segment ids.
      hiding: which of the arrays of masks and positions there are, by the arguments' names.
      numbers: which numbers of each head there are (:func:`dense.per_head`).
      placed: whether arrays are NumPy's ("numpy"), JAX's on no mesh ("jax"), or on the mesh as the
        call needs them ("mesh").
    """

    mesh: Mesh
    in_context: bool
    options: dict[str, Any]
    sizes: tuple[int, ...]
    value_dim: int
    unit: int
    dtype: str
    segments: bool
    hiding: tuple[str, ...]
    numbers: str
    placed: str


def pick(rng: np.random.Generator, choices: Any) -> Any:
    """One of the choices, itself: ``rng.choice`` would make a NumPy value of it."""
    return choices[int(rng.integers(len(choices)))]


def draw_plan(rng: np.random.Generator) -> Plan:
    """A plan by what the documentation of ``burst_attention`` says of its arguments."""
    sizes = pick(rng, MESH_SIZES)
    names = [str(name) for name in rng.permutation(AXIS_NAMES)[: len(sizes)]]
    mesh = _draw_mesh(rng, dict(zip(names, sizes, strict=True)))
    options, rest = _draw_token_axes(rng, names)
    for axis in rest:
        role = pick(rng, ("batch_axis", "tensor_axis", None))
        if role is not None:
            options[role] = (*options.get(role, ()), axis)
    for role in ("batch_axis", "tensor_axis"):
        if len(options.get(role, ())) == 1 and rng.random() < 0.7:
            options[role] = options[role][0]
    layout = pick(rng, ("contiguous", "zigzag", "striped", "striped:3"))
    n, exchange = size_along(mesh, options["seq_axis"]), 1
    if "ulysses_axis" in options:
        exchange = mesh.shape[options["ulysses_axis"]]
    unit = n * math.lcm({"zigzag": 2, "striped:3": 3}.get(layout, 1), exchange)
    length = unit * int(rng.integers(1, 4))
    kv_length = length if rng.random() < 0.6 else unit * int(rng.integers(1, 4))
    heads, kv_heads = _draw_heads(rng, exchange)
    split = size_along(mesh, options.get("tensor_axis"))
    batch = size_along(mesh, options.get("batch_axis")) * int(rng.integers(1, 3))
    drawn = {
        "layout": layout,
        "is_causal": pick(rng, (True, False)),
        "scale": pick(rng, (None, None, 0.3, -0.5, 1)),
        "local_window_size": pick(
            rng, (None, None, None, 0, 3, (5, 2), (2**31 - 1, 4), (0, 6), (4, None))
        ),
        "logits_soft_cap": pick(rng, (None, None, 2.5, 1)),
        "implementation": pick(rng, (None, "xla", "reference")),
        "backward": pick(rng, ("auto", "rotate_kv", "rotate_query")),
        "deterministic": pick(rng, (False, True)),
        "pad": layout == "contiguous" and bool(rng.random() < 0.3),
        "dropout_rate": pick(rng, (0.0, 0.0, 0.0, 0.25)),
        "return_residual": pick(rng, (True, True, False)),
    }
    # An argument with its default may be left out.
    options |= {name: value for name, value in drawn.items() if rng.random() < 0.8 or value}
    options |= functions.called(pick(rng, (None,) * 6 + (True, "score_mod", "mask_mod")))
    head_dim = pick(rng, (1, 4, 5, 8))
    return Plan(
        mesh=mesh,
        in_context=bool(rng.random() < 0.4),
        options=options,
        sizes=(batch, length, kv_length, heads * split, kv_heads * split, head_dim),
        value_dim=pick(rng, (head_dim, head_dim, 3, 6)),
        unit=unit,
        dtype=pick(rng, ("float32", "float32", "float32", "bfloat16", "float16")),
        segments=bool(rng.random() < 0.4),
        hiding=_draw_hiding(rng, options.get("is_causal", False)),
        numbers=pick(rng, ("none", "none", "sinks", "slopes", "both")),
        placed=pick(rng, ("numpy", "jax", "mesh")),
    )


def _draw_hiding(rng: np.random.Generator, is_causal: bool) -> tuple[str, ...]:
    names = ("query_seq_lengths", "key_value_seq_lengths", "key_starts", "key_ends")
    if is_causal:
        names += ("prefix_lengths",)
    positions = pick(rng, ("query_offset", "query_positions")), "key_value_positions"
    return tuple(name for name in (*names, *positions) if rng.random() < 0.15)


def size_along(mesh: Mesh, axes: Any) -> int:
    """How many devices lie along a mesh axis, a tuple of them, or None."""
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def _draw_mesh(rng: np.random.Generator, sizes: dict[str, int]) -> Mesh:
    kinds = [AxisType.Auto, AxisType.Explicit]
    if rng.random() < 0.75:
        return mesh_of(pick(rng, kinds), **sizes)
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=tuple(pick(rng, kinds) for _ in sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )


def _draw_token_axes(rng: np.random.Generator, names: list[str]) -> tuple[dict[str, Any], list]:
    """The arguments that name the axes of the sequence, and the axes that they do not name."""
    names = [str(name) for name in rng.permutation(names)]
    kind = pick(rng, ("ring", "ring", "levels", "exchange", "both", "three", "whole"))
    if kind == "whole":
        return {"seq_axis": None}, names
    if kind == "exchange":
        return {"seq_axis": None, "ulysses_axis": names[0]}, names[1:]
    if kind == "both" and len(names) > 1:
        return {"seq_axis": names[0], "ulysses_axis": names[1]}, names[2:]
    if kind == "three" and len(names) > 2:
        return {"seq_axis": tuple(names[:2]), "ulysses_axis": names[2]}, []
    if kind == "levels" and len(names) > 1:
        return {"seq_axis": tuple(names[:2])}, names[2:]
    return {"seq_axis": names[0] if rng.random() < 0.8 else (names[0],)}, names[1:]


def _draw_heads(rng: np.random.Generator, exchange: int) -> tuple[int, int]:
    """N and K on each device: K a multiple or a divisor of the exchange's devices, N a multiple."""
    kv_heads = pick(rng, [k for k in (1, 2, 3, exchange) if not exchange % k or not k % exchange])
    groups = [group for group in (1, 2, 3, exchange) if not kv_heads * group % exchange]
    return kv_heads * pick(rng, groups), kv_heads


def draw_arrays(rng: np.random.Generator, plan: Plan) -> dict[str, Any]:
    """All arguments of a call but the mesh."""
    batch, t, s, heads, kv_heads, dim = plan.sizes
    shapes = {
        "query": (batch, t, heads, dim),
        "key": (batch, s, kv_heads, dim),
        "value": (batch, s, kv_heads, plan.value_dim),
    }
    dtype = jnp.dtype(plan.dtype)
    arrays: dict[str, Any] = {
        name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()
    }
    if plan.segments:
        integers = pick(rng, (np.int32, np.int32, np.int64, np.uint8))
        ids = {
            "query_segment_ids": packed_segments(rng, batch, t),
            "key_value_segment_ids": packed_segments(rng, batch, s),
        }
        if t == s and rng.random() < 0.7:
            ids["key_value_segment_ids"] = ids["query_segment_ids"]
        arrays |= {name: x.astype(integers) for name, x in ids.items()}
    lengths = {"prefix_lengths": s, "query_seq_lengths": t, "key_value_seq_lengths": s}
    drawn = {name: rng.integers(-1, size + 2, size=batch) for name, size in lengths.items()}
    rows = () if rng.random() < 0.3 else (batch,)
    drawn["key_starts"] = rng.integers(-2, max(1, s // 2), size=(*rows, t))
    drawn["key_ends"] = rng.integers(s // 3, s + 2, size=(*rows, t))
    # Kernels have one position of each query for what reads it beside masks.
    readers = functions.FUNCTIONS.keys() | {"dropout_rate"}
    alike = plan.numbers in ("slopes", "both") or any(map(plan.options.get, readers))
    rows = () if alike or rng.random() < 0.5 else (batch,)
    drawn["query_offset"] = rng.integers(-t, s, size=rows)
    drawn["query_positions"] = rng.integers(-5, s + 5, size=(*rows, t))
    drawn["key_value_positions"] = rng.permutation(s) - 3
    arrays |= {name: np.asarray(drawn[name], np.int32) for name in plan.hiding}
    if plan.placed == "numpy" and arrays.get("query_offset", np.ones(1)).ndim == 0:
        arrays["query_offset"] = int(arrays["query_offset"])
    arrays |= dense.per_head(plan.numbers, heads, seed=int(rng.integers(100)))
    if plan.options.get("dropout_rate"):
        arrays["dropout_key"] = np.asarray([0, int(rng.integers(2**31))], np.uint32)
    if plan.placed == "jax":
        arrays = {name: jnp.asarray(np.asarray(x)) for name, x in _int32_ids(arrays).items()}
    elif plan.placed == "mesh":
        arrays = {
            name: jax.device_put(x, jax.NamedSharding(plan.mesh, needed_spec(plan, name, x.ndim)))
            for name, x in _int32_ids(arrays).items()
        }
    return arrays | plan.options


def _int32_ids(arrays: dict[str, Any]) -> dict[str, Any]:
    """JAX's own integers have 32 bits."""
    return {n: x.astype(np.int32) if n.endswith("_ids") else x for n, x in arrays.items()}


def needed_spec(plan: Plan, name: str, ndim: int) -> P:
    """How a call's array is split, by what the arguments say."""
    named = [plan.options["seq_axis"], plan.options.get("ulysses_axis")]
    tokens: tuple[str, ...] = ()
    for axes in named:
        tokens += () if axes is None else (axes,) if isinstance(axes, str) else axes
    batch, heads = (plan.options.get(role) for role in ("batch_axis", "tensor_axis"))
    if name in ("sink_logits", "alibi_slopes"):
        return P(heads)
    if name.endswith("_lengths"):
        return P(batch)
    if name == "query_offset":
        return P(*(batch,)[:ndim])
    if name in ("key_starts", "key_ends", "query_positions", "key_value_positions"):
        return P(*(batch, tokens)[2 - ndim :])
    if name == "dropout_key":
        return P()
    return P(batch, tokens) if name.endswith("_ids") else P(batch, tokens, heads)


def natural_order(layout: str, length: int, n: int) -> np.ndarray:
    """Where in the layout each token of the natural order is; the layouts by their definition."""
    blocks = np.arange(length)
    if layout.startswith("striped"):
        stripes = blocks.reshape(-1, int(layout.partition(":")[2] or 1))
        held = [stripes[shard::n].reshape(-1) for shard in range(n)]
    elif layout == "zigzag":
        halves = np.split(blocks, 2 * n)
        held = [np.concatenate([halves[i], halves[2 * n - 1 - i]]) for i in range(n)]
    else:
        held = [blocks]
    return np.argsort(np.concatenate(held))


def reference(call: dict[str, Any], cotangents: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """``(out, lse, dq, dk, dv)`` in float64 in the layout's order, then gradients of numbers.

    ``call`` holds the arguments of a call, and the mesh in any case.
    """
    n = size_along(call["mesh"], call.get("seq_axis", "seq"))
    layout = call.get("layout", "contiguous")
    query, key, value = (np.asarray(call[name]) for name in ("query", "key", "value"))
    q_order = natural_order(layout, query.shape[1], n)
    kv_order = natural_order(layout, key.shape[1], n)
    window = call.get("local_window_size")
    sides = window if isinstance(window, tuple) else (window, window)
    left, right = (None if side is None else int(side) for side in sides)
    mask = dense.Mask(is_causal=bool(call.get("is_causal", False)), window=(left, right))
    q_ids = kv_ids = None
    if call.get("query_segment_ids") is not None:
        q_ids = np.asarray(call["query_segment_ids"])[:, q_order]
        kv_ids = np.asarray(call["key_value_segment_ids"])[:, kv_order]
    hiding = {
        name: np.asarray(call[name])
        for name in ("prefix_lengths", "query_seq_lengths", "key_value_seq_lengths", "query_offset")
        if call.get(name) is not None
    }
    by_token = dict.fromkeys(("key_starts", "key_ends", "query_positions"), q_order)
    for name, order in (by_token | {"key_value_positions": kv_order}).items():
        if call.get(name) is not None:
            hiding[name] = np.asarray(call[name])[..., order]
    keep = mask.dense(q_ids, kv_ids, query.shape[1], key.shape[1], **hiding)
    keep = np.broadcast_to(keep, (query.shape[0], *keep.shape[1:]))
    scale, dim = call.get("scale"), query.shape[-1]
    # dense.truth scales by 1 / sqrt(H).
    factor = 1.0 if scale is None else float(scale) * math.sqrt(dim)
    numbers = {
        name: np.asarray(call[name])
        for name in ("sink_logits", "alibi_slopes")
        if call.get(name) is not None
    }
    cap, rate, factors = call.get("logits_soft_cap"), call.get("dropout_rate"), None
    score, rows_and_heads = None, (query.shape[0], query.shape[2])
    q_at, kv_at = dense.places(query.shape[1], key.shape[1], **hiding)
    if rate:
        seeds = jax.random.bits(np.asarray(call["dropout_key"]), rows_and_heads)
        factors = dense.dropout_factors(seeds, rate, q_at[0], kv_at)
    if call.get("score_mod") is not None:
        score, _ = functions.on_all(*rows_and_heads, q_at[0], kv_at)
    if call.get("mask_mod") is not None:
        keep = functions.both(keep, functions.on_all(*rows_and_heads, q_at[0], kv_at)[1])
    do, dlse = (np.asarray(x)[:, q_order] for x in cotangents)
    out, lse, dq, dk, dv, *of_numbers = dense.truth(
        query[:, q_order].astype(np.float64) * factor,
        key[:, kv_order],
        value[:, kv_order],
        keep,
        do,
        dlse,
        None if cap is None else float(cap),
        numbers,
        dense.distances(query.shape[1], key.shape[1], **hiding),
        factors,
        score,
    )
    back_q, back_kv = np.argsort(q_order), np.argsort(kv_order)
    results = [out[:, back_q], lse[:, back_q], dq[:, back_q] * factor]
    return [*results, dk[:, back_kv], dv[:, back_kv], *of_numbers]


def assert_equal(got: Any, want: np.ndarray, dtype: str, what: str, slack: float = 1) -> None:
    """Every number of ``got`` is ``want``'s up to rounding; what is infinite is equal."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=what)
    largest = np.abs(want[finite]).max(initial=0.1)
    worst = np.abs(got[finite] - want[finite]).max(initial=0)
    allowed = LIMITS[dtype] * slack * largest
    assert worst <= allowed, f"{what}: error {worst:.3g}, numbers up to {largest:.3g}"


def draw_cotangents(rng: np.random.Generator, call: dict[str, Any]) -> tuple[Any, Any]:
    """Of out, in the query's dtype, and of lse."""
    query, value_dim = call["query"], call["value"].shape[3]
    do = rng.normal(size=(*query.shape[:3], value_dim))
    dlse = rng.normal(size=query.shape[:3])
    return do.astype(query.dtype), dlse.astype(np.float32)


def eager_gradients_work(plan: Plan) -> bool:
    """Whether JAX differentiates outside of a ``jax.jit`` here.

    On a mesh that also has Auto axes, JAX drops an Explicit axis of one device from the type of
    what a program returned, and then refuses cotangents of that type.
    """
    mesh = plan.mesh
    return not mesh.auto_axes or all(mesh.shape[axis] > 1 for axis in mesh.explicit_axes)


def gradients_of(call: dict[str, Any], cotangents: tuple[Any, Any]) -> list[Any]:
    """Gradients of query, key and value, and of the numbers of each head, by the library."""
    names = [name for name in ("alibi_slopes", "sink_logits") if call.get(name) is not None]
    names = ["query", "key", "value", *names]

    def attend(*arrays: Any) -> Any:
        given = dict(zip(names, arrays, strict=True))
        return burst_jax.burst_attention(**call | given | {"return_residual": True})

    (out, lse), vjp = jax.vjp(attend, *(call[name] for name in names))
    do, dlse = cotangents
    return list(vjp((jax.device_put(do, out.sharding), jax.device_put(dlse, lse.sharding))))
