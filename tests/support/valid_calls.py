"""Valid calls of ``burst_attention``, drawn by hypothesis or fixed, and their float64 reference.

Arrays are in natural order until they are placed: permuted by the layout, and on the mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import burst_jax
from burst_jax.attention.arguments import MASK_ARRAYS
from burst_jax.attention.validation import ARRAYS, PER_HEAD

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
QKV = ("query", "key", "value")
READ_POSITIONS = ("alibi_slopes", "dropout", "score_mod", "mask_mod")
FEATURES = (
    *(*FLAGS, *MASK_ARRAYS, *QUERY_POSITIONS, *READ_POSITIONS, "key_value_positions", "segments"),
    *("window", "traced_window", "chunks", "cap", "scale", "traced_scale", "sink_logits"),
    "value_dim",
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

    mesh: Any  # Mesh, or AbstractMesh of what is only lowered.
    in_context: bool
    axes: dict[str, Any]
    options: dict[str, Any]
    features: frozenset[str]
    sizes: dict[str, int]
    dtype: str
    placed: str
    static_table: bool

    @property
    def has_one_array_of_ids(self) -> bool:
        """Whether ``segment_ids`` are those of both sides, count from 0, and have padding -1."""
        of_one_length = self.sizes["T"] == self.sizes["S"]
        return "segments" in self.features and of_one_length and self.static_table

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
    mesh: dict[str, int], features: tuple[str, ...] = (), *, kind=AxisType.Auto, t=24, s=24,
    heads=(4, 2), dims=(8, 8), dtype="float32", implementation="xla", dropout_rate=0.3,
    **options: Any,
) -> Program:  # fmt: skip
    """A fixed program; ``options`` are arguments of the call, ``dims`` are H and Hv."""
    if isinstance(implementation, str):
        implementation = IMPLEMENTATIONS[implementation]
    options = {
        "layout": "contiguous",
        "implementation": implementation,
        **dict.fromkeys([name for name in FLAGS if name in features], True),
        **{name: f for name, f in functions.FUNCTIONS.items() if name in features},
        **({"dropout_rate": dropout_rate} if "dropout" in features else {}),
        **options,
    }
    # Two sequences on each device.
    sizes = {"T": t, "S": s, "B": 2 * mesh.get("data", 1), "N": heads[0], "K": heads[1]}
    return Program(
        mesh=mesh_of(kind, **mesh), in_context=kind is AxisType.Explicit, axes=axes_of(mesh),
        options=options, features=frozenset(features), dtype=dtype, placed="mesh",
        static_table=False, sizes=sizes | {"H": dims[0], "V": dims[1]},
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
        kernels = pick(("xla", "reference"))
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


# The axes of every argument that is an array, but for the block-sparse mask.
SHAPES = {
    name: max(rule.shapes, key=len).replace("Hv", "V").replace(" ", "")
    for name, rule in ARRAYS.items()
    if name != "block_mask"
}


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


Arrays = dict[str, Any]
Cotangents = tuple[np.ndarray, np.ndarray]


def draw(program: Program, seed: int) -> tuple[Arrays, Cotangents]:
    """``(arrays, cotangents)`` of a call, whose masks leave some of the scores."""
    for attempt in range(50):
        rng = np.random.default_rng((seed, attempt))
        arrays = _draw_arrays(program, rng)
        sizes = (program.sizes[letter] for letter in "TS")
        indices = {"batch": program.sizes["B"], "heads": program.sizes["N"]}
        if dense.kept(*sizes, **indices, **_of_masks(program, arrays)).mean() > 0.03:
            do = rng.normal(size=[program.sizes[x] for x in "BTNV"])
            dlse = rng.normal(size=[program.sizes[x] for x in "BTN"])
            return arrays, (do.astype(jnp.dtype(program.dtype)), dlse.astype(np.float32))
    assume(False)
    raise AssertionError  # assume has raised.


def _draw_arrays(program: Program, rng: np.random.Generator) -> Arrays:
    """Of the same shapes for every ``rng``: one program serves all draws."""
    features, sizes = program.features, program.sizes
    batch, t, s, heads = (sizes[letter] for letter in "BTSN")
    arrays: Arrays = {
        name: rng.normal(size=[sizes[x] for x in SHAPES[name]]).astype(jnp.dtype(program.dtype))
        for name in QKV
    }
    starts, ends = key_ranges(rng, batch, max(t, s))
    of_all = slice(None) if t % 2 else 0
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
        same |= program.has_one_array_of_ids
        ids = arrays["query_segment_ids"] if same else packed_segments(rng, batch, s)
        arrays["key_value_segment_ids"] = ids
    if "block_mask" in features:
        rows, columns = (
            max(count for count in range(1, 9) if length % count == 0) for length in (t, s)
        )
        by_head = (heads,) * (t % 2)
        arrays["block_mask"] = rng.random((*by_head, rows, columns)) < 0.6
    numbers = dense.per_head("both", heads, int(rng.integers(99)))
    arrays |= {name: x for name, x in numbers.items() if name in features}
    if "dropout" in features:
        arrays["dropout_key"] = np.asarray([0, int(rng.integers(2**31))], np.uint32)
    if "traced_window" in features:
        arrays["local_window_size"] = tuple(jnp.int32(x) for x in rng.integers(s // 3, s + 1, 2))
    return arrays


def _letters(name: str, ndim: int) -> str:
    """The axes of an argument's array, which may lack a batch axis."""
    letters = SHAPES.get(name, "")
    return letters[len(letters) - ndim :]


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
    return P(*(of_letter.get(letter) for letter in _letters(name, ndim)))


def place(program: Program, arrays: Arrays) -> Arrays:
    """The arrays as the call gets them: in the layout's order, and where the program has them."""
    return {name: _placed(program, name, x) for name, x in arrays.items()}


def _placed(program: Program, name: str, x: Any) -> Any:
    if isinstance(x, (int, tuple)) or (name == "block_mask" and program.static_table):
        return x
    for axis, letter in enumerate(_letters(name, np.ndim(x))):
        x = np.take(x, order_of(program, letter), axis) if letter in "TS" else x
    x = np.asarray(x)
    if program.placed == "numpy":
        return x
    if program.placed == "jax":
        return jax.device_put(x)
    # Of NumPy's arrays: to split one of JAX's is a program of its own, compiled for every shape.
    return jax.device_put(x, jax.NamedSharding(program.mesh, needed_spec(program, name, x.ndim)))


def arguments(program: Program, arrays: Arrays) -> dict[str, Any]:
    """The keyword arguments of a call, without a mesh that the context has."""
    mesh = {} if program.in_context else {"mesh": program.mesh}
    if program.has_one_array_of_ids:
        others = {name: x for name, x in arrays.items() if not name.endswith("segment_ids")}
        arrays = others | {"segment_ids": arrays["query_segment_ids"] - 1, "padding_id": -1}
    return mesh | program.axes | program.options | arrays


def static_arrays(program: Program, arrays: Arrays) -> Arrays:
    """Those that are compiled in."""
    static = {name: x for name, x in arrays.items() if isinstance(x, int)}
    if program.static_table and "block_mask" in arrays:
        static["block_mask"] = arrays["block_mask"]
    return static


def compiled(program: Program, arrays: Arrays, attention=burst_jax.burst_attention, jit=quick_jit):
    """``(arrays, cotangents) -> (out, lse, dq, dk, dv, gradients of per-head parameters)``.

    Everything is in natural order. ``attention`` accepts the arguments of ``burst_attention``.
    ``jit`` makes a program of a function.
    """
    static = static_arrays(program, arrays)

    @jit
    def compute(arrays, cotangents):
        differentiated = [*QKV, *sorted({*PER_HEAD} & arrays.keys())]

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

    def run(arrays: Arrays, cotangents: Cotangents) -> list[np.ndarray]:
        traced = {name: x for name, x in arrays.items() if name not in static}
        order = {letter: order_of(program, letter) for letter in "TS"}
        given = place(program, traced), tuple(x[:, order["T"]] for x in cotangents)
        with program.context():
            got = [np.asarray(x) for x in jax.device_get(compute(*given))]
        natural = [x[:, np.argsort(order[y])] for x, y in zip(got, "TTTSS", strict=False)]
        return natural + got[5:]

    return run


def _of_masks(program: Program, arrays: Arrays) -> dict[str, Any]:
    """The arguments of a call that :func:`dense.kept` reads."""
    names = {*inspect.signature(dense.kept).parameters, *inspect.signature(dense.places).parameters}
    call = program.options | arrays
    return {name: call[name] for name in names & call.keys()}


def reference(program: Program, arrays: Arrays, cotangents: Cotangents) -> dense.Reference:
    """Dense attention with the arguments of the call."""
    functions_of_call = dense.reference, dense.arguments
    names = {name for each in functions_of_call for name in inspect.signature(each).parameters}
    call = program.options | arrays
    call = {name: call[name] for name in names & call.keys()}
    if "traced_scale" in program.features:
        call["scale"] = 0.25
    return dense.reference(*cotangents, **call, **_of_masks(program, arrays))


def assert_exact(
    program: Program,
    attention=burst_jax.burst_attention,
    factor: float = 2,
    seed: int = 0,
    jit=quick_jit,
) -> None:
    """A call with drawn arrays is right; others are those of :func:`compiled`."""
    arrays, cotangents = draw(program, seed)
    got = compiled(program, arrays, attention, jit)(arrays, cotangents)
    compare.assert_exact(got, reference(program, arrays, cotangents), program.dtype, factor)
