"""Calls at training lengths, traced and lowered for GPUs that are not here, as users make them.

This needs neither a GPU nor JAX's CUDA plugin: arrays are shapes, meshes are abstract, and nothing
is compiled. It finds what interpreted kernels and short sequences let through: a program that JAX
cannot trace inside a ``shard_map`` that checks varying axes, a form of a kernel that only long
sequences select, a table on the host that grows with their square.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol
from unittest import mock

import functions
import jax
import jax.numpy as jnp
import numpy as np
import valid_calls as valid
from jax.experimental.mosaic.gpu import utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import burst_jax
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
    *({"seq": 1}, {"data": 1, "seq": 1}, {"seq": 2}, {"ulysses": 2}, {"data": 2}, {"seq": 8}),
    *({"outer": 2, "inner": 4}, {"seq": 4, "ulysses": 2}, {"data": 4, "seq": 2}),
    *({"data": 2, "seq": 2, "tensor": 2}, {"data": 2, "seq": 2, "ulysses": 2}),
    {"outer": 2, "inner": 2, "tensor": 2},
)
TOKENS = (8192, 16384, 32768)  # of a device
LAYOUTS = ("contiguous", "zigzag", "striped", "striped:128")
# By the share of a shard that is its zone.
ZONES = {"balanced:none": 0, "balanced:part": 1 / 8, "balanced:all": 1}
DIMS = ((128, 128), (64, 64), (256, 256), (192, 128), (96, 96), (80, 80))
DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
HEADS = ((8, 2), (4, 4), (8, 1))
WINDOWS = (1024, (4096, None), (100, 3000), (40000, 40000))
BLOCKS = (64, 128, 512, 1024)
# Padding makes lengths that the mesh divides: other shapes, the same programs.
FEATURES = tuple(name for name in valid.FEATURES if name not in ("pad", "value_dim"))
# What balanced layouts support.
BALANCED = {"is_causal", "window", "cap", "scale", "traced_scale", "sink_logits", "deterministic"}


def abstract_mesh(gpu: str, sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> AbstractMesh:
    """A mesh of GPUs that are not here."""
    name, sms, _ = GPUS[gpu]
    device, kinds = AbstractDevice(name, sms, "gpu"), (kind,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), kinds, abstract_device=device)


def compiling_for(gpu: str) -> Any:
    """A context. Of an abstract device Mosaic GPU assumes that it is Hopper."""
    return mock.patch.object(utils, "_infer_arch", return_value=GPUS[gpu].capability)


def for_gpu(
    gpu: str, mesh: AbstractMesh, function: Any, *shapes: Any, in_context: bool = True,
    lowers: bool = True,
) -> Any:  # fmt: skip
    """A function's or a jitted one's traced program, which is lowered unless ``lowers`` is False.

    ``in_context``: whether the mesh is entered, as by ``jax.set_mesh``.
    """
    trace = getattr(function, "trace", None) or jax.jit(function).trace
    context = jax.sharding.use_abstract_mesh(mesh) if in_context else contextlib.nullcontext()
    with context, compiling_for(gpu):
        traced = trace(*shapes)
        if lowers:
            traced.lower(lowering_platforms=("cuda",))
    return traced


def a_shape(mesh: AbstractMesh, shape: Iterable[int], dtype: Any, *spec: Any) -> Any:
    """An array's shape and how it is split."""
    sharding = jax.NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


class Levels(Protocol):
    """What a design draws."""

    @property
    def levels(self) -> frozenset[str]:
        """Whatever must occur together with everything else."""
        ...


def designed[Case: Levels](
    draw: Callable[[np.random.Generator], Case], count: int, tries: int = 30
) -> list[Case]:
    """``count`` cases, each the one of some tries that adds most pairs of levels; always the same.

    More cases begin with those of fewer.
    """
    rng, met, cases = np.random.default_rng(0), set[tuple[str, ...]](), []
    for _ in range(count):
        tried = [draw(rng) for _ in range(tries)]
        pairs = [set(itertools.combinations(sorted(case.levels), 2)) for case in tried]
        best = max(range(tries), key=lambda i: len(pairs[i] - met))
        met |= pairs[best]
        cases.append(tried[best])
    return cases


def pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    """One of them."""
    return choices[int(rng.integers(len(choices)))]


class Call(NamedTuple):
    """A call of attention.

    Attributes:
      program: its mesh and arguments.
      gpu: one of ``GPUS``.
      entry: "burst_attention", "ring_attention" in a ``shard_map``, or "local_attention".
      gradient: whether the gradient is taken, too.
      layout: the layout's name, "balanced:part" for any that is.
      tokens: of a device.
    """

    program: valid.Program
    gpu: str
    entry: str
    gradient: bool
    layout: str
    tokens: int

    @property
    def levels(self) -> frozenset[str]:
        program, sizes = self.program, self.program.sizes
        axes = "".join(f"{name}{size}" for name, size in program.mesh.shape.items())
        kind = program.mesh.axis_types[0].name
        return program.features | {
            self.gpu, self.entry, self.layout, axes, kind, program.dtype,
            "gradient" if self.gradient else "forward", f"tokens{self.tokens}",
            f"heads{sizes['N']}_{sizes['K']}", f"dims{sizes['H']}_{sizes['V']}",
            *filter(None, [program.options.get("backward")]),
        }  # fmt: skip

    def __str__(self) -> str:
        return "-".join(sorted(self.levels))

    def check(self, *, lowers: bool = True) -> None:
        """Traces it, and lowers it; raises if JAX or the library does."""
        static, shapes = _arrays_of(self)
        run = _gradient_of(self, static) if self.gradient else _function_of(self, static)
        program = self.program
        in_context = program.in_context or self.entry == "local_attention"
        for_gpu(self.gpu, program.mesh, run, shapes, in_context=in_context, lowers=lowers)


def a_call(rng: np.random.Generator) -> Call:
    """A call with some of all arguments."""
    gpu = pick(rng, tuple(GPUS))
    entry = pick(rng, ("burst_attention", "burst_attention", "ring_attention", "local_attention"))
    local = entry == "local_attention"
    sizes = {"seq": 1} if local else pick(rng, MESHES)
    layout = "contiguous" if local else pick(rng, (*LAYOUTS, *ZONES))
    features: set[str] = set()
    for name in rng.permutation(FEATURES)[: rng.integers(1, 9)].tolist():
        clashes = any(frozenset((name, other)) in valid.CONFLICTS for other in features)
        if not clashes and (layout not in ZONES or name in BALANCED):
            features.add(name)
    if rng.random() < 0.5 or "prefix_lengths" in features:
        features.add("is_causal")
    if rng.random() < 0.5 or layout in ZONES:
        features.add("segments")
    axes, tokens = valid.axes_of(sizes), pick(rng, TOKENS)
    shard = tokens * sizes.get("ulysses", 1)
    t = shard * math.prod(sizes[name] for name in valid.names_of(axes["seq_axis"]))
    s = t if layout in ZONES or rng.random() < 0.7 else pick(rng, (t // 2, 2 * t))
    heads, kv_heads = (count * sizes.get("tensor", 1) for count in pick(rng, HEADS))
    name = f"balanced:{int(ZONES[layout] * shard)}" if layout in ZONES else layout
    options: dict[str, Any] = {} if local else {"layout": name}
    if not local and layout not in ZONES:
        options["backward"] = pick(rng, ("auto", "rotate_kv", "rotate_query"))
    options |= dict.fromkeys([name for name in valid.FLAGS if name in features], True)
    options |= {name: f for name, f in functions.FUNCTIONS.items() if name in features}
    values = {
        "window": ("local_window_size", pick(rng, WINDOWS)),
        "chunks": ("attention_chunk_size", pick(rng, (16, 1000, 8192))),
        "cap": ("logits_soft_cap", 30.0), "dropout": ("dropout_rate", 0.1),
        "scale": ("scale", 0.1), "traced_scale": ("scale", 1.0),
    }  # fmt: skip
    options |= dict(values[name] for name in values if name in features)
    dims = pick(rng, DIMS)
    program = valid.Program(
        mesh=abstract_mesh(gpu, sizes, pick(rng, (AxisType.Auto, AxisType.Explicit))),
        in_context=bool(rng.integers(2)), axes=axes, options=options, placed="mesh",
        features=frozenset(features), dtype=pick(rng, DTYPES), static_table=bool(rng.integers(2)),
        sizes={
            "T": t, "S": s, "B": pick(rng, (1, 2)) * sizes.get("data", 1), "N": heads,
            "K": kv_heads, "H": dims[0], "V": dims[1],
        },
    )  # fmt: skip
    return Call(program, gpu, entry, bool(rng.random() < 0.7), layout, tokens)


def packed_calls() -> list[Call]:
    """What most users run: packed documents, causal, with gradients, on both GPU families.

    Each layout on each family, and with each head dim on one of them.
    """
    calls = []
    layouts = "zigzag", "striped:128", "balanced:all"
    for i, (gpu, layout) in enumerate(itertools.product(GPUS, layouts)):
        dim = (128, 64)[i % 2]
        tokens, mesh = TOKENS[0], abstract_mesh(gpu, {"seq": 2}, AxisType.Explicit)
        name = f"balanced:{tokens}" if layout in ZONES else layout
        program = valid.Program(
            mesh=mesh, in_context=True, axes={"seq_axis": "seq"}, placed="mesh",
            options={"layout": name, "is_causal": True}, static_table=False, dtype="bfloat16",
            features=frozenset({"is_causal", "segments"}),
            sizes={"T": 2 * tokens, "S": 2 * tokens, "B": 1, "N": 32, "K": 8, "H": dim, "V": dim},
        )  # fmt: skip
        calls.append(Call(program, gpu, "burst_attention", True, layout, tokens))
    return calls


def _arrays_of(call: Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(static, shapes)``: arguments that are known while tracing, and shapes of the others."""
    program, sizes = call.program, call.program.sizes
    mesh, features = program.mesh, program.features
    rng = np.random.default_rng(sum(map(ord, str(call))))
    ints: Any = np.int32
    by_row = pick(rng, ("T", "BT"))
    letters: dict[str, tuple[str, str]] = {
        **{name: (name, valid.SHAPES[name]) for name in features & {
            "prefix_lengths", "query_seq_lengths", "key_value_seq_lengths", "key_value_positions",
        }},
        **{name: (name, by_row) for name in features & {"key_starts", "key_ends"}},
        "traced_offset": ("query_offset", ""), "offset_by_row": ("query_offset", "B"),
        "positions": ("query_positions", "T"), "positions_by_row": ("query_positions", "BT"),
    }  # fmt: skip
    letters["key_value_positions"] = ("key_value_positions", "S")
    wanted = dict(letters[name] for name in letters if name in features)
    if "segments" in features:
        wanted |= {"query_segment_ids": "BT", "key_value_segment_ids": "BS"}
    if call.layout in ZONES:
        wanted |= {"query_positions": "BT", "key_value_positions": "BS"}
    wanted = {name: (axes, ints) for name, axes in wanted.items()}
    wanted |= dict.fromkeys({*PER_HEAD} & features, ("N", np.float32))
    wanted |= {name: (valid.SHAPES[name], jnp.dtype(program.dtype)) for name in valid.QKV}
    local = call.entry == "local_attention"
    shapes = {
        name: a_shape(
            mesh, (sizes[x] for x in axes), dtype,
            *([] if local else valid.needed_spec(program, name, len(axes))),
        )
        for name, (axes, dtype) in wanted.items()
    }  # fmt: skip
    static: dict[str, Any] = {"query_offset": sizes["T"] // 2} if "offset" in features else {}
    if "dropout" in features:
        shapes["dropout_key"] = a_shape(mesh, (), jax.random.key(0).dtype)
    if "traced_window" in features:
        shapes["local_window_size"] = (a_shape(mesh, (), ints),) * 2
    if "block_mask" in features:
        block, by_head = pick(rng, BLOCKS), [sizes["N"]] * int(rng.integers(2))
        table = [sizes["T"] // block, sizes["S"] // block]
        if program.static_table:
            static["block_mask"] = rng.random(table) < 0.5
        else:
            spec = [] if local else valid.needed_spec(program, "block_mask", len(by_head) + 2)
            shapes["block_mask"] = a_shape(mesh, by_head + table, bool, *spec)
    return static, shapes


def _function_of(call: Call, static: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """``arrays -> (out, lse)``."""
    program, options = call.program, call.program.options | static

    def attend(arrays: dict[str, Any]) -> Any:
        if "traced_scale" in program.features:
            arrays = arrays | {"query": arrays["query"] * arrays["query"].dtype.type(0.25)}
        if call.entry == "local_attention":
            return burst_jax.local_attention(**arrays, **options, return_residual=True)
        if call.entry == "burst_attention":
            mesh = {} if program.in_context else {"mesh": program.mesh}
            given = arrays | mesh | program.axes | options
            return burst_jax.burst_attention(**given, return_residual=True)
        axes = {"axis_name": program.axes["seq_axis"]}
        axes |= {"ulysses_axis": program.axes.get("ulysses_axis")}
        specs = {
            name: jax.tree.map(lambda x, name=name: valid.needed_spec(program, name, x.ndim), each)
            for name, each in arrays.items()
        }
        tokens = P(*valid.needed_spec(program, "query", 4)[:3])
        return jax.shard_map(
            lambda arrays: burst_jax.ring_attention(
                **arrays, **axes, **options, return_residual=True
            ),
            mesh=program.mesh, in_specs=(specs,), out_specs=(tokens, tokens),
        )(arrays)  # fmt: skip

    return attend


def _gradient_of(call: Call, static: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """``arrays -> ((out, lse), gradients)``; the cotangents are the results, for want of a loss."""
    attend = _function_of(call, static)

    def run(arrays: dict[str, Any]) -> Any:
        names = [*valid.QKV, *sorted({*PER_HEAD} & arrays.keys())]
        results, vjp = jax.vjp(
            lambda *xs: attend(arrays | dict(zip(names, xs, strict=True))),
            *(arrays[name] for name in names),
        )
        return results, vjp(results)

    return run
