"""Programs at training lengths, lowered for GPUs that are not here: calls as users make them.

Lowering needs neither a GPU nor JAX's CUDA plugin: the arrays are shapes, the mesh is abstract, and
nothing is compiled. It finds what interpreted kernels and short sequences let through: a program
that JAX cannot trace inside a ``shard_map`` that checks varying axes, a kernel's form that is chosen
for long sequences only, a table on the host that grows with their square.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import functions
import jax
import jax.numpy as jnp
import numpy as np
import valid_calls as valid
from jax.experimental.mosaic.gpu import utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import burst_jax
from burst_jax.attention.arguments import MASK_ARRAYS
from burst_jax.attention.validation import PER_HEAD


class Gpu(NamedTuple):
    """A GPU as JAX describes one that is not here."""

    name: str
    sms: int
    capability: tuple[int, int]


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 108, (8, 0)),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 132, (9, 0)),
}
# Meshes of 1, 2 and 8 devices, by the roles of their axes.
MESHES: tuple[dict[str, int], ...] = (
    *({"seq": 1}, {"data": 1, "seq": 1}, {"seq": 2}, {"ulysses": 2}, {"data": 2}),
    *({"seq": 8}, {"outer": 2, "inner": 4}, {"seq": 4, "ulysses": 2}, {"data": 4, "seq": 2}),
    *({"data": 2, "seq": 2, "tensor": 2}, {"data": 2, "seq": 2, "ulysses": 2}),
    {"outer": 2, "inner": 2, "tensor": 2},
)
TOKENS = (8192, 16384, 32768)  # of a device
LAYOUTS = ("contiguous", "zigzag", "striped", "striped:128", "balanced:0", "balanced:1024")
# With the whole shard as zone.
LAYOUTS = (*LAYOUTS, "balanced:all")
DIMS = ((128, 128), (64, 64), (256, 256), (192, 128), (96, 96), (80, 80))
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
BALANCED = {"segments", "is_causal", "window", "cap", "scale", "sink_logits", "deterministic"}
FEATURES = tuple(name for name in valid.FEATURES if name not in ("pad", "value_dim"))
CONFLICTS = valid.CONFLICTS


@contextlib.contextmanager
def traced_for(gpu: str) -> Iterator[None]:
    """Mosaic GPU traces kernels for this GPU; of an abstract device it assumes Hopper."""
    with mock.patch.object(utils, "_infer_arch", return_value=GPUS[gpu].capability):
        yield


def abstract_mesh(gpu: str, sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> AbstractMesh:
    """A mesh of GPUs that are not here."""
    name, sms, _ = GPUS[gpu]
    kinds = (kind,) * len(sizes)
    device = AbstractDevice(name, sms, "gpu")
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), kinds, abstract_device=device)


class Drawn(NamedTuple):
    """A drawn call.

    Attributes:
      program: its arguments.
      gpu: one of ``GPUS``.
      entry: "burst", "ring" or "local".
      differentiated: whether its gradient is taken.
    """

    program: valid.Program
    gpu: str
    entry: str
    differentiated: bool

    @property
    def levels(self) -> frozenset[str]:
        """What it tries, for the design."""
        program, sizes = self.program, self.program.sizes
        options = program.options
        axes = "-".join(f"{name}{size}" for name, size in program.mesh.shape.items())
        return frozenset({
            self.gpu, self.entry, axes, f"gradient={self.differentiated}", options["layout"],
            f"tokens={tokens_of(program)}", f"heads={sizes['N']}/{sizes['K']}",
            f"dims={sizes['H']}/{sizes['V']}", program.dtype, options.get("backward", "auto"),
            *program.features,
        })  # fmt: skip

    def __str__(self) -> str:
        return " ".join(sorted(self.levels))


def tokens_of(program: valid.Program) -> int:
    """Queries of one device."""
    names = valid.names_of(program.axes["seq_axis"]) + valid.names_of(
        program.axes.get("ulysses_axis")
    )
    return program.sizes["T"] // math.prod(program.mesh.shape[name] for name in names)


def draw(rng: np.random.Generator) -> Drawn:
    """A call of attention as a user makes it."""

    def pick(choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    gpu, entry = pick(tuple(GPUS)), pick(("burst", "burst", "ring", "local"))
    sizes = {"seq": 1} if entry == "local" else pick(MESHES)
    mesh = abstract_mesh(gpu, sizes, pick((AxisType.Auto, AxisType.Explicit)))
    layout = "contiguous" if entry == "local" else pick(LAYOUTS)
    balanced = layout.startswith("balanced")
    features: set[str] = set()
    for name in rng.permutation(FEATURES)[: rng.integers(1, 9)].tolist():
        clashes = any(frozenset((name, other)) in CONFLICTS for other in features)
        if not clashes and (not balanced or name in BALANCED):
            features.add(name)
    if rng.random() < 0.5:
        features.add("is_causal")
    features |= {"is_causal"} if "prefix_lengths" in features else set()
    features |= {"segments"} if balanced else set()
    axes = valid.axes_of(sizes)
    ring = math.prod(sizes[name] for name in valid.names_of(axes["seq_axis"]))
    here, ulysses, tensor = pick(TOKENS), sizes.get("ulysses", 1), sizes.get("tensor", 1)
    t = here * ring * ulysses
    s = t if balanced or rng.random() < 0.7 else pick((t // 2, 2 * t))
    if layout == "balanced:all":
        layout = f"balanced:{here * ulysses}"
    heads, kv_heads = pick(((8, 2), (4, 4), (8, 1)))
    options: dict[str, Any] = {"layout": layout} if entry != "local" else {}
    options |= dict.fromkeys([name for name in valid.FLAGS if name in features], True)
    options |= {name: f for name, f in functions.FUNCTIONS.items() if name in features}
    if entry != "local" and not balanced:
        options["backward"] = pick(("auto", "rotate_kv", "rotate_query"))
    if "window" in features:
        options["local_window_size"] = pick((1024, (4096, None), (100, 3000), (here, here)))
    if "chunks" in features:
        options["attention_chunk_size"] = pick((64, 1000, 8192))
    numbers = {"cap": ("logits_soft_cap", 30.0), "dropout": ("dropout_rate", 0.1)}
    numbers |= {"scale": ("scale", 0.1)}
    options |= dict(numbers[name] for name in numbers if name in features)
    options.setdefault("layout", "contiguous")
    h, v = pick(DIMS)
    return Drawn(
        valid.Program(
            mesh=mesh, in_context=bool(rng.integers(2)), axes=axes, options=options,
            features=frozenset(features), dtype=pick(DTYPES), placed="mesh",
            static_table=bool(rng.integers(2)),
            sizes={
                "T": t, "S": s, "B": pick((1, 2)) * sizes.get("data", 1), "N": heads * tensor,
                "K": kv_heads * tensor, "H": h, "V": v,
            },
        ),
        gpu, entry, bool(rng.random() < 0.7),
    )  # fmt: skip


def shapes_of(program: valid.Program, seed: int) -> dict[str, Any]:
    """The arrays of a call as shapes with shardings; static ones are NumPy arrays and numbers."""
    features, sizes = program.features, program.sizes
    rng = np.random.default_rng(seed)

    def shape(name: str, letters: str, dtype: Any) -> jax.ShapeDtypeStruct:
        spec = valid.needed_spec(program, name, len(letters))
        sharding = jax.NamedSharding(program.mesh, spec)
        return jax.ShapeDtypeStruct([sizes[x] for x in letters], dtype, sharding=sharding)

    by_row = ("B T", "T")[rng.integers(2)].replace(" ", "")
    letters = {
        "prefix_lengths": "B", "query_seq_lengths": "B", "key_value_seq_lengths": "B",
        "key_starts": by_row, "key_ends": by_row, "key_value_positions": "S",
    }  # fmt: skip
    arrays: dict[str, Any] = {
        name: shape(name, valid.SHAPES[name], jnp.dtype(program.dtype)) for name in valid.QKV
    }
    arrays |= {
        name: shape(name, letters, np.int32) for name, letters in letters.items()
        if name in features
    }  # fmt: skip
    positions = {
        "offset": ("query_offset", sizes["T"] // 2),
        "traced_offset": ("query_offset", shape("query_offset", "", np.int32)),
        "offset_by_row": ("query_offset", shape("query_offset", "B", np.int32)),
        "positions": ("query_positions", shape("query_positions", "T", np.int32)),
        "positions_by_row": ("query_positions", shape("query_positions", "BT", np.int32)),
    }
    arrays |= dict(positions[name] for name in positions if name in features)
    balanced = program.options["layout"].startswith("balanced")
    if "segments" in features:
        for name in ("query_segment_ids", "key_value_segment_ids"):
            arrays[name] = shape(name, valid.SHAPES[name], np.int32)
    if balanced:
        arrays["query_positions"] = shape("query_positions", "BT", np.int32)
        arrays["key_value_positions"] = shape("query_positions", "BT", np.int32)
    if "block_mask" in features:
        block = int(rng.choice([64, 128, 512, 1024]))
        table = [sizes["T"] // block, sizes["S"] // block]
        if program.static_table:
            arrays["block_mask"] = rng.random(table) < 0.5
        else:
            by_head = [sizes["N"]] * int(rng.integers(2))
            spec = valid.needed_spec(program, "block_mask", len(by_head) + 2)
            sharding = jax.NamedSharding(program.mesh, spec)
            arrays["block_mask"] = jax.ShapeDtypeStruct(by_head + table, bool, sharding=sharding)
    for name in PER_HEAD:
        if name in features:
            arrays[name] = shape(name, "N", np.float32)
    if "dropout" in features:
        arrays["dropout_key"] = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    if "traced_window" in features:
        arrays["local_window_size"] = (jax.ShapeDtypeStruct((), np.int32),) * 2
    return arrays


def lower(drawn: Drawn, seed: int, lowers: bool = True) -> Any:
    """Traces a call for its GPU, and lowers it."""
    program = drawn.program
    arrays = shapes_of(program, seed)
    static = {
        name: x for name, x in arrays.items() if isinstance(x, (int, np.ndarray))
    }  # fmt: skip
    given = {name: x for name, x in arrays.items() if name not in static}
    differentiated = [*valid.QKV, *sorted({*PER_HEAD} & given.keys())]
    options = {**program.options, **static}

    def attend(arrays: dict[str, Any]) -> Any:
        if "traced_scale" in program.features:
            scale = arrays["query"].dtype.type(0.25)
            arrays = arrays | {"query": arrays["query"] * scale}
        if drawn.entry == "burst":
            mesh = {} if program.in_context else {"mesh": program.mesh}
            call = mesh | program.axes | options | arrays
            return burst_jax.burst_attention(**call, return_residual=True)
        ulysses = program.axes.get("ulysses_axis")
        if drawn.entry == "local":
            own = {name: x for name, x in options.items() if name != "layout"}
            return burst_jax.local_attention(**own, **arrays, return_residual=True)
        specs = {
            name: jax.tree.map(lambda x, n=name: valid.needed_spec(program, n, x.ndim), x)
            for name, x in arrays.items()
        }
        outs = (
            valid.needed_spec(program, "query", 4),
            jax.P(*valid.needed_spec(program, "query", 4)[:3]),
        )

        def inside(arrays: dict[str, Any]) -> Any:
            names = {"axis_name": program.axes["seq_axis"], "ulysses_axis": ulysses}
            return burst_jax.ring_attention(**arrays, **names, **options, return_residual=True)

        run = jax.shard_map(inside, mesh=program.mesh, in_specs=(specs,), out_specs=outs)
        return run(arrays)

    def run(arrays: dict[str, Any]) -> Any:
        def of(*xs: Any) -> Any:
            return attend(arrays | dict(zip(differentiated, xs, strict=True)))

        if not drawn.differentiated:
            return attend(arrays)
        results, vjp = jax.vjp(of, *(arrays[name] for name in differentiated))
        return results, vjp(results)

    in_context = program.in_context or drawn.entry == "local"
    context = jax.sharding.use_abstract_mesh(program.mesh)
    with traced_for(drawn.gpu), context if in_context else contextlib.nullcontext():
        traced = jax.jit(run).trace(given)
        return traced.lower(lowering_platforms=("cuda",)) if lowers else traced
