"""Valid calls of ``burst_attention``, drawn by hypothesis or fixed, and their float64 reference."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import compare
import dense
import functions
import jax
import jax.numpy as jnp
import numpy as np
from cases import key_ranges, packed_segments
from hypothesis import assume
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, quick_jit
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import burst_jax

# Sizes of the mesh axes of each role; an axis "idle" has none. "data" and "rows" are batch axes.
MESHES: tuple[dict[str, int], ...] = (
    *({"seq": 1}, {"seq": 2}, {"seq": 3}, {"seq": 5}, {"seq": 7}, {"seq": 8}, {"ulysses": 4}),
    *({"outer": 2, "inner": 3}, {"outer": 2, "inner": 2, "ulysses": 2}, {"seq": 3, "ulysses": 2}),
    *({"data": 2, "seq": 2, "tensor": 2}, {"data": 2, "rows": 2, "seq": 2}, {"idle": 2, "seq": 2}),
    *({"data": 2, "ulysses": 2, "tensor": 2}, {"idle": 2, "data": 2}),
)
FLAGS = ("is_causal", "pad", "deterministic")
LAYOUTS = ("contiguous", "zigzag", "striped", "striped:3")
# At most one of them specifies the positions of the queries; by_row: other ones in each sequence.
QUERY_POSITIONS = ("offset", "traced_offset", "offset_by_row", "positions", "positions_by_row")
READ_POSITIONS = ("alibi_slopes", "dropout", "score_mod", "mask_mod")
FEATURES = (
    *("is_causal", "window", "traced_window", "segments", "prefix_lengths", "query_seq_lengths"),
    *("key_value_seq_lengths", "key_starts", "key_ends", "block_mask", "key_value_positions"),
    *(*QUERY_POSITIONS, *READ_POSITIONS, "pad", "cap", "scale", "traced_scale", "sink_logits"),
    *("value_dim", "deterministic", "chunks"),
)


def _pairs(one, other):
    return {frozenset((a, b)) for a in one for b in other if a != b}


# What the documentation excludes.
CONFLICTS = (
    _pairs(QUERY_POSITIONS, QUERY_POSITIONS)
    | _pairs(("block_mask",), (*QUERY_POSITIONS, "key_value_positions", "pad"))
    | _pairs(("offset_by_row", "positions_by_row"), READ_POSITIONS)
    | _pairs(("window",), ("traced_window",))
    | _pairs(("scale",), ("traced_scale",))
)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What calls share that need one compiled program; the arrays differ.

    Attributes:
      mesh: entered by ``jax.set_mesh`` if ``in_context``, otherwise passed as an argument.
      axes: the arguments that name mesh axes.
      options: the other arguments that are no arrays.
      features: those of ``FEATURES``.
      sizes: T, S, B, N, K, H and Hv, by their letters.
      dtype: of query, key and value.
      placed: whether arrays are NumPy's ("numpy"), JAX's on no mesh ("jax"), or sharded ("mesh").
      static_table: whether block_mask is a NumPy array, compiled into the program.
    """

    mesh: Mesh
    in_context: bool
    axes: dict[str, Any]
    options: dict[str, Any]
    features: frozenset[str]
    sizes: dict[str, int]
    dtype: str
    placed: str
    static_table: bool

    def context(self):
        """``jax.set_mesh``, where the call does not name its mesh."""
        return jax.set_mesh(self.mesh) if self.in_context else contextlib.nullcontext()

    def __repr__(self):
        kinds = "/".join(kind.name for kind in self.mesh.axis_types)
        shown = {name: x for name, x in vars(self).items() if name != "mesh"}
        return f"Program({dict(self.mesh.shape)} {kinds}, {shown})"


def axes_of(sizes: dict[str, int]) -> dict[str, Any]:
    """The arguments that name a mesh's axes, by the axes' roles."""
    ring = tuple(name for name in ("outer", "inner", "seq") if name in sizes)
    batch = tuple(name for name in ("data", "rows") if name in sizes)
    axes: dict[str, Any] = {"seq_axis": (ring[0] if len(ring) == 1 else ring) or None}
    if "ulysses" in sizes:
        axes["ulysses_axis"] = "ulysses"
    if batch:
        axes["batch_axis"] = batch[0] if len(batch) == 1 else batch
    if "tensor" in sizes:
        axes["tensor_axis"] = "tensor"
    return axes


def program_of(
    mesh: dict[str, int], features: tuple[str, ...], *, kind=AxisType.Auto, t=24, s=24,
    implementation="xla", **options: Any,
) -> Program:  # fmt: skip
    """A fixed program, float32, GQA with 4 heads; ``options`` are arguments of the call."""
    options = {
        "layout": "contiguous",
        "implementation": IMPLEMENTATIONS[implementation],
        **dict.fromkeys([name for name in FLAGS if name in features], True),
        **{name: f for name, f in functions.FUNCTIONS.items() if name in features},
        **({"dropout_rate": 0.3} if "dropout" in features else {}),
        **options,
    }
    return Program(
        mesh=mesh_of(kind, **mesh), in_context=kind is AxisType.Explicit, axes=axes_of(mesh),
        options=options, features=frozenset(features), dtype="float32", placed="mesh",
        static_table=False,
        # Two sequences on each device.
        sizes={"T": t, "S": s, "B": 2 * mesh.get("data", 1), "N": 4, "K": 2, "H": 8, "V": 8},
    )  # fmt: skip


@st.composite
def programs(draw, small=False, least=3):
    """Programs with at least ``least`` drawn features; ``small``: for calls that never compile."""
    pick = lambda choices: draw(st.sampled_from(choices))  # noqa: E731
    sizes = pick(MESHES)
    names = draw(st.permutations(list(sizes)))
    kinds = pick((AxisType.Auto, AxisType.Explicit, None))
    kinds = [kinds or pick((AxisType.Auto, AxisType.Explicit)) for _ in names]
    devices = jax.devices()[: math.prod(sizes.values())]
    shape = tuple(sizes[name] for name in names)
    mesh = jax.make_mesh(shape, tuple(names), axis_types=tuple(kinds), devices=devices)
    drawn = draw(st.lists(st.sampled_from(FEATURES), unique=True, min_size=least, max_size=12))
    features: set[str] = set()
    for name in drawn:
        if not any(frozenset((name, other)) in CONFLICTS for other in features):
            features.add(name)
    if "prefix_lengths" in features:
        features.add("is_causal")

    axes, ulysses = axes_of(sizes), sizes.get("ulysses", 1)
    batch, ring = names_of(axes.get("batch_axis")), names_of(axes["seq_axis"])
    layout = "contiguous" if "pad" in features else pick(LAYOUTS)
    n = math.prod(sizes[name] for name in ring)
    step = math.lcm({"zigzag": 2, "striped:3": 3}.get(layout, 1), ulysses)
    # Tokens per shard, but with pad those of the whole sequences.
    # Several keys for most queries: the gradients of a softmax over one key are 0.
    least_length, most = (4, 4) if small else (8, 33)
    fewest = -(-least_length // (n * step))
    tokens = st.integers(fewest, max(fewest, most // step)).map(lambda k: n * step * k)
    if "pad" in features:
        tokens = st.integers(least_length, 9 if small else 90)
    t = draw(tokens)
    kv_heads = pick([k for k in (1, 2, 3, ulysses) if not ulysses % k or not k % ulysses])
    group = pick([group for group in (1, 2, 3, ulysses) if not kv_heads * group % ulysses])
    if {"sink_logits", "alibi_slopes"} & features:
        # The rounding of one number says nothing of its size: gradients of several are compared.
        group = max(group, 4)
    tensor, dim = sizes.get("tensor", 1), pick((8, 16, 33) if not small else (1, 4))
    options: dict[str, Any] = {
        "layout": layout,
        "backward": pick(("auto", "rotate_kv", "rotate_query")),
    }
    if "window" in features:
        side = st.integers(t // 4, t + 3)
        window = st.one_of(side, st.tuples(side, side), st.tuples(side, st.none()))
        options["local_window_size"] = draw(window)
    if "chunks" in features:
        options["attention_chunk_size"] = draw(st.integers(max(1, t // 4), t + 3))
    options |= dict.fromkeys([name for name in FLAGS if name in features], True)
    options |= {name: f for name, f in functions.FUNCTIONS.items() if name in features}
    numbers = {"cap": ("logits_soft_cap", 2.0), "traced_scale": ("scale", 1.0)}
    numbers |= {"dropout": ("dropout_rate", 0.3), "scale": ("scale", pick((0.3, -0.2, 0.1)))}
    options |= dict(numbers[name] for name in numbers if name in features)
    if not small or draw(st.booleans()):
        kernels = pick(("xla", "xla", "triton", "reference"))
        options["implementation"] = IMPLEMENTATIONS[kernels]
    return Program(
        mesh=mesh,
        in_context=draw(st.booleans()),
        axes=axes,
        options=options,
        features=frozenset(features),
        sizes={
            "T": t, "S": draw(st.one_of(st.just(t), tokens)),
            "B": 2 if not batch else math.prod(sizes[name] for name in batch),
            "N": kv_heads * group * tensor, "K": kv_heads * tensor, "H": dim,
            "V": pick((5, 24, 40)) if "value_dim" in features else dim,
        },
        dtype=pick(("float32", "float32", "bfloat16", "float16")),
        placed=pick(("numpy", "jax", "mesh")),
        static_table=draw(st.booleans()),
    )  # fmt: skip


# The axes of every argument that is an array.
SHAPES = {
    "query": "BTNH", "key": "BSKH", "value": "BSKV", "query_segment_ids": "BT",
    "key_value_segment_ids": "BS", "query_seq_lengths": "B", "key_value_seq_lengths": "B",
    "prefix_lengths": "B", "key_starts": "BT", "key_ends": "BT", "query_positions": "BT",
    "key_value_positions": "S", "query_offset": "B", "sink_logits": "N", "alibi_slopes": "N",
}  # fmt: skip


def order_of(program: Program, letter: str, layout: str | None = None) -> np.ndarray:
    """Index in the natural order of the token at each place, by the definition of the layouts."""
    length, layout = program.sizes[letter], layout or program.options["layout"]
    n = math.prod(program.mesh.shape[name] for name in names_of(program.axes["seq_axis"]))
    tokens = np.arange(length)
    if layout.startswith("striped"):
        stripes = tokens.reshape(-1, int(layout.partition(":")[2] or 1))
        return np.concatenate([stripes[shard::n].reshape(-1) for shard in range(n)])
    if layout == "zigzag":
        halves = np.split(tokens, 2 * n)
        return np.concatenate([x for i in range(n) for x in (halves[i], halves[2 * n - 1 - i])])
    return tokens


def names_of(axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def draw_arrays(program: Program, seed: int) -> dict[str, Any]:
    """All arrays of a call, in the layout's order; its masks leave some of the scores."""
    for attempt in range(50):
        arrays = _draw_arrays(program, np.random.default_rng((seed, attempt)))
        if _keep(program, arrays).mean() > 0.03:
            return arrays
    assume(False)
    raise AssertionError  # assume has raised.


def _draw_arrays(program: Program, rng: np.random.Generator) -> dict[str, Any]:
    features, sizes = program.features, program.sizes
    batch, t, s, heads = (sizes[letter] for letter in "BTSN")
    arrays: dict[str, Any] = {
        name: rng.normal(size=[sizes[x] for x in SHAPES[name]]).astype(jnp.dtype(program.dtype))
        for name in ("query", "key", "value")
    }
    starts, ends = key_ranges(rng, batch, max(t, s))
    of_all = slice(None) if rng.random() < 0.5 else 0
    drawn = {
        "prefix_lengths": rng.integers(-1, s + 2, batch),
        "query_seq_lengths": rng.integers(t // 2, t + 2, batch),
        "key_value_seq_lengths": rng.integers(s // 2, s + 2, batch),
        "key_starts": starts[of_all, :t],
        "key_ends": ends[of_all, :t],
        "key_value_positions": rng.permutation(s + s // 4)[:s],
    }
    arrays |= {name: x.astype(np.int32) for name, x in drawn.items() if name in features}
    positions = {
        "offset": ("query_offset", 3 * t // 4 - t // 3),
        "traced_offset": ("query_offset", np.int32(rng.integers(-t // 3, s))[...]),
        "offset_by_row": ("query_offset", rng.integers(-t // 3, s, batch)),
        "positions": ("query_positions", rng.integers(-5, s + 5, t)),
        "positions_by_row": ("query_positions", rng.integers(-5, s + 5, (batch, t))),
    }
    arrays |= dict(positions[name] for name in positions if name in features)
    if "segments" in features:
        arrays["query_segment_ids"] = packed_segments(rng, batch, t)
        same = t == s and rng.random() < 0.7
        ids = arrays["query_segment_ids"] if same else packed_segments(rng, batch, s)
        arrays["key_value_segment_ids"] = ids
    if "block_mask" in features:
        # The same shape for every seed: a table that is no constant serves one program.
        rows, columns = (
            max(count for count in range(1, 9) if length % count == 0) for length in (t, s)
        )
        by_head = (heads,) * (t % 2)
        arrays["block_mask"] = rng.random((*by_head, rows, columns)) < 0.6
    kind = {(0, 0): "none", (1, 0): "sinks", (0, 1): "slopes", (1, 1): "both"}
    given = kind["sink_logits" in features, "alibi_slopes" in features]
    arrays |= dense.per_head(given, heads, int(rng.integers(99)))
    if "dropout" in features:
        arrays["dropout_key"] = np.asarray([0, int(rng.integers(2**31))], np.uint32)
    if "traced_window" in features:
        arrays["local_window_size"] = tuple(jnp.int32(x) for x in rng.integers(s // 3, s + 1, 2))
    for name, axes in SHAPES.items():
        letter = axes[-1:] if axes[-1:] in ("T", "S") else ""
        if letter and name in arrays:
            arrays[name] = np.asarray(arrays[name])[..., order_of(program, letter)]
    return {name: _placed(program, name, x) for name, x in arrays.items()}


def needed_spec(program: Program, name: str, ndim: int) -> P:
    """How a call's array is sharded, by what its arguments name."""
    axes = program.axes
    tokens = names_of(axes["seq_axis"]) + names_of(axes.get("ulysses_axis"))
    of_letter: dict[str, Any] = dict.fromkeys("TS", tokens)
    of_letter |= dict.fromkeys("NK", axes.get("tensor_axis"))
    of_letter["B"] = axes.get("batch_axis")
    if program.options.get("pad"):
        of_letter |= dict.fromkeys("TS")
    if name == "block_mask":
        return P(of_letter["N"] if ndim == 3 else None)
    letters = SHAPES.get(name, "")
    return P(*(of_letter.get(letter) for letter in letters[len(letters) - ndim :]))


def _placed(program: Program, name: str, x: Any) -> Any:
    if isinstance(x, (int, tuple)) or (name == "block_mask" and program.static_table):
        return x
    if program.placed == "numpy":
        return np.asarray(x)
    x = jnp.asarray(np.asarray(x))
    if program.placed == "jax":
        return x
    return jax.device_put(x, jax.NamedSharding(program.mesh, needed_spec(program, name, x.ndim)))


def arguments(program: Program, arrays: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, without a mesh that the context has."""
    mesh = {} if program.in_context else {"mesh": program.mesh}
    return mesh | program.axes | program.options | arrays


def draw_cotangents(program: Program, seed: int) -> tuple[Any, Any]:
    rng, sizes = np.random.default_rng((seed, 1)), program.sizes
    do = rng.normal(size=[sizes[x] for x in "BTNV"]).astype(jnp.dtype(program.dtype))
    return do, rng.normal(size=[sizes[x] for x in "BTN"]).astype(np.float32)


def static_arrays(program: Program, arrays: dict[str, Any]) -> dict[str, Any]:
    """Those that are compiled in."""
    static = {name: x for name, x in arrays.items() if isinstance(x, int)}
    if program.static_table and "block_mask" in arrays:
        static["block_mask"] = arrays["block_mask"]
    return static


def compiled(program: Program, arrays: dict[str, Any], attention=burst_jax.burst_attention):
    """``(arrays, cotangents) -> (out, lse, dq, dk, dv, gradients of per-head parameters)``.

    ``attention`` accepts the arguments of ``burst_attention``.
    """
    static = static_arrays(program, arrays)

    @quick_jit
    def run(arrays, cotangents):
        differentiated = ["query", "key", "value"]
        differentiated += sorted({"sink_logits", "alibi_slopes"} & arrays.keys())

        def attend(*given):
            given = arrays | dict(zip(differentiated, given, strict=True))
            if "traced_scale" in program.features:
                given["query"] = given["query"] * given["query"].dtype.type(0.25)
            call = arguments(program, static | given)
            return attention(**call, return_residual=True)

        results, vjp = jax.vjp(attend, *(arrays[name] for name in differentiated))
        if program.mesh.explicit_axes:
            cotangents = [
                jax.reshard(d, jax.typeof(x).sharding)
                for d, x in zip(cotangents, results, strict=True)
            ]
        return *results, *vjp(tuple(cotangents))

    return lambda arrays, cotangents: run(
        {name: x for name, x in arrays.items() if name not in static}, cotangents
    )


def _natural(program: Program, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays in natural order."""
    result = {}
    for name, x in arrays.items():
        letters, x = SHAPES.get(name, ""), np.asarray(x)
        for letter in {"T", "S"} & set(letters):
            # Arrays without a batch axis have the tokens first.
            axis = letters.index(letter) - (len(letters) - x.ndim)
            x = np.take(x, np.argsort(order_of(program, letter)), axis)
        result[name] = x
    return result


def _keep(program: Program, arrays: dict[str, Any]) -> np.ndarray:
    """Which scores count, ``[B, N or 1, T, S]``, in natural order."""
    sizes, options, given = program.sizes, program.options, _natural(program, arrays)
    window = arrays.get("local_window_size", options.get("local_window_size"))
    sides = window if isinstance(window, tuple) else (window, window)
    left, right = (None if side is None else int(side) for side in sides)
    causal, chunk = bool(options.get("is_causal", False)), options.get("attention_chunk_size")
    mask = dense.Mask(is_causal=causal, window=(left, right), chunk=chunk)
    ids = given.get("query_segment_ids"), given.get("key_value_segment_ids")
    keep = mask.dense(*ids, sizes["T"], sizes["S"], **given)
    keep = keep[:, None] if keep.ndim == 3 else keep
    if options.get("mask_mod") is not None:
        q, kv = dense.places(sizes["T"], sizes["S"], **given)
        keep = keep & functions.on_all(sizes["B"], sizes["N"], q[0], kv)[1]
    return np.broadcast_to(keep, (sizes["B"], *keep.shape[1:]))


def reference(program: Program, arrays: dict[str, Any], cotangents: tuple[Any, Any]):
    """``(truth, one device's results, keep)`` in natural order, as :mod:`dense` makes them."""
    options, sizes, given = program.options, program.sizes, _natural(program, arrays)
    q, kv = dense.places(sizes["T"], sizes["S"], **given)
    numbers = {name: given[name] for name in ("alibi_slopes", "sink_logits") if name in given}
    rows, score, factors = (sizes["B"], sizes["N"]), None, None
    if options.get("score_mod") is not None:
        score, _ = functions.on_all(*rows, q[0], kv)
    if rate := options.get("dropout_rate"):
        seeds = jax.random.bits(given["dropout_key"], rows)
        factors = dense.dropout_factors(seeds, rate, q[0], kv)
    scale = 0.25 if "traced_scale" in program.features else options.get("scale")
    scale = None if scale is None else float(scale)
    cap = options.get("logits_soft_cap")
    distance = dense.distances(sizes["T"], sizes["S"], **given)
    order = np.argsort(order_of(program, "T"))
    do, dlse = (np.asarray(x)[:, order] for x in cotangents)
    keep = _keep(program, arrays)
    qkv = (given[name] for name in ("query", "key", "value"))
    args = *qkv, keep, do, dlse, None if cap is None else float(cap), numbers, distance
    of_scores = {"factors": factors, "score": score, "scale": scale}
    return dense.truth(*args, **of_scores), dense.one_device(*args, **of_scores), keep


def assert_right(program: Program, got, truth, one_device, keep) -> None:
    """As exact as one device, in the dtypes of the inputs, and exactly 0 where nothing is seen."""
    order = {letter: np.argsort(order_of(program, letter)) for letter in "TS"}
    got = [np.asarray(x)[:, order[y]] for x, y in zip(got, "TTTSS", strict=False)] + [*got[5:]]
    kinds = (program.dtype, "float32", *[program.dtype] * 3)
    assert tuple(x.dtype.name for x in got[:5]) == kinds
    compare.assert_as_good_as(got, one_device, truth, program.dtype, 2)
    blind = ~np.broadcast_to(dense.sees(keep), truth[1].shape)
    assert (got[0][blind] == 0).all()
    if "sink_logits" not in program.features:
        assert (got[1][blind] == -np.inf).all()
    unseen = ~np.broadcast_to(dense.is_seen(keep, truth[3].shape[2]), truth[3].shape[:3])
    assert (got[2][blind] == 0).all()
    assert (got[3][unseen] == 0).all()
    assert (got[4][unseen] == 0).all()


def assert_exact(program: Program, attention=burst_jax.burst_attention) -> None:
    """A call with drawn arrays is right; ``attention`` is that of :func:`compiled`."""
    arrays, cotangents = draw_arrays(program, 0), draw_cotangents(program, 0)
    with program.context():
        got = jax.device_get(compiled(program, arrays, attention)(arrays, cotangents))
    assert_right(program, got, *reference(program, arrays, cotangents))
