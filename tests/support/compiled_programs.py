"""Whole programs compiled for GPUs that are not here, and what to read in them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import re
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import burst_jax
from benchmarks.ahead import described_mesh, lowering_for
from pallas_kernels import mosaic_sm80
from pallas_kernels.device import listed_capability
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig

# What XLA schedules around kernels, and the memory, do not depend on them: most programs have the
# smallest ones, which compile in half the time.
SMALL = mosaic_sm80(ForwardConfig(64, 32), BackwardConfig(64, 64))
_ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}


def cuda_compiler_present():
    """Whether JAX's CUDA plugin is installed; it compiles without a GPU or a driver."""
    names = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    return any(_found(name) for name in names)


def _found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# Of a matrix product XLA would compile several programs, of which a GPU would time each.
_UNTIMED = {"xla_gpu_autotune_level": 0}


def gpu_mesh(target, *shape):
    """A mesh ("seq",) of one host's GPUs, or ("outer", "inner") of (hosts, GPUs of each).

    target: "a100", "h100" or "h200".
    """
    names = ("seq",) if len(shape) == 1 else ("outer", "inner")
    return described_mesh(target, shape, names, hosts=(1, *shape)[-2])


def named_mesh(target, **sizes):
    """A mesh of one host's GPUs with an axis of each name and size."""
    flat = gpu_mesh(target, math.prod(sizes.values()))
    kinds = (AxisType.Auto,) * len(sizes)
    return Mesh(flat.devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=kinds)


def inputs(
    mesh, tokens, heads, kv_heads, head_dim=128, dtype=jnp.bfloat16, batch=1, value_dim=None
):
    """Query, key and value of ``tokens`` per device, as shapes; ``value_dim``: None as of keys."""
    sharding = jax.NamedSharding(mesh, P(None, mesh.axis_names))
    length = tokens * mesh.size

    def array(count, dim):
        shape = (batch, length, count, dim)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return (
        array(heads, head_dim),
        array(kv_heads, head_dim),
        array(kv_heads, head_dim if value_dim is None else value_dim),
    )


def gradient(attention):
    """(dq, dk, dv); the cotangent is the query, for want of a loss."""

    def run(query, key, value):
        out, vjp = jax.vjp(attention, query, key, value)
        return vjp(out)

    return run


def compile_for(function, *shapes, has_kernels=True, **options):
    """The finished GPU program, with the library's compiler options and those given, untimed.

    ``has_kernels``: False for a program :func:`of_empty_kernels`.
    """
    options = {**_UNTIMED, **burst_jax.compiler_options("gpu"), **options}
    kernels = contextlib.nullcontext() if has_kernels else of_empty_kernels()
    with mosaic_compiles_for(jax.tree.leaves(shapes)[0].sharding.mesh), kernels:
        traced = jax.jit(function).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)


@contextlib.contextmanager
def mosaic_compiles_for(mesh):
    """Mosaic GPU traces kernels for the mesh's GPUs, which are not here, and not for Hopper."""
    capability = listed_capability(mesh.devices.flat[0].device_kind)
    assert capability is not None
    if capability < 9:
        start_mosaic_with_hopper()
    with lowering_for(mesh):
        yield


def of_empty_kernels():
    """A context: the kernels of programs that are lowered inside do nothing.

    XLA sees of a kernel the name, the arrays and which of them it changes: what it schedules around
    kernels, what is sent and the memory are the same, and compiling takes a third of the time.
    tests/compiled/test_compiled_ring.py compares the two.
    """
    lower = lowering.lower_unpipelined_jaxpr_to_module

    def lower_empty(mesh, jax_mesh, jaxpr, *args, **options):
        return lower(mesh, jax_mesh, jaxpr.replace(eqns=[]), *args, **options)

    return mock.patch.object(lowering, "lower_unpipelined_jaxpr_to_module", lower_empty)


@functools.cache
def start_mosaic_with_hopper():
    """Compiles a kernel for Hopper first.

    Mosaic GPU assembles all kernels of a process for the GPU of the first one. Hopper's assembler
    accepts Ampere's code, not the other way round. Registers and spills on Ampere are read in a
    process of its own: :func:`compiled_calls.run_for_ampere`.
    """
    mesh, shape = gpu_mesh("h100", 1), (128,)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, P()))

    def copy(source, target):
        target[...] = source[...]

    def run(x):
        return plgpu.kernel(copy, out_type=jax.ShapeDtypeStruct(shape, jnp.float32))(x)

    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh):  # whatever mesh the caller has set
        compile_for(run, x)


def step_options():
    """Compiler options of a training step: the library's, and all matrix products by cuBLAS."""
    return _UNTIMED | burst_jax.compiler_options("gpu") | {"xla_gpu_enable_triton_gemm": False}


@functools.lru_cache(maxsize=2)
def text_of(program) -> str:
    """The optimized program. Writing it out takes seconds, so the latest texts are kept."""
    text = program.as_text()
    assert text is not None
    return text


def find(pattern: str, text: str) -> re.Match[str]:
    """The first match of what must be there."""
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in {text[-500:]}"
    return found


class Operation(NamedTuple):
    """An operation of a program, as its line in the text has it; ``rest`` are its attributes."""

    name: str
    result: str
    opcode: str
    operands: str
    rest: str


_OPERATION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\(([^)]*)\)(.*)")
_KERNEL = re.compile(r"\bburst_(?:forward|backward|grouped(?:_gradient)?)\b")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


@functools.lru_cache(maxsize=2)
def computations(program) -> dict[str, list[Operation]]:
    """The operations of every computation by its name, in the order they run; "ENTRY" is main."""
    text = text_of(program)
    assert "is_scheduled=true" in text
    found, operations = {}, []
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%(\S+) \(", line):
            operations = found["ENTRY" if header.group(1) else header.group(2)] = []
        elif match := _OPERATION.match(line):
            operations.append(Operation(*match.groups()))
    return found


def kernel_of(program, operation):
    """The library's kernel that an operation runs, by its metadata; None for everything else."""
    if operation.opcode == "fusion":  # XLA puts a kernel and the slice that it reads into one.
        inside = computations(program)[find(r"\bcalls=%([^\s,]+)", operation.rest).group(1)]
        return next(filter(None, (kernel_of(program, each) for each in inside)), None)
    found = _KERNEL.search(operation.rest) if operation.opcode == "custom-call" else None
    return found and found.group()


def loop_schedules(program):
    """:func:`schedule` of every loop that runs a ring, in the order in which they run."""
    loops = (x.rest for x in computations(program)["ENTRY"] if x.opcode == "while")
    schedules = (schedule(program, find(r"\bbody=%([^\s,]+)", rest).group(1)) for rest in loops)
    return [events for events in schedules if events]


def schedule(program, computation="ENTRY"):
    """The ring's events in order: ("start", hop), ("done", hop), ("sync", name), ("kernel", name).

    Only the library's own kernels count: a permute that overlaps with a copy is exposed.
    """
    events, started = [], {}
    for operation in computations(program)[computation]:
        match operation.opcode:
            case "collective-permute-start":
                started[operation.name] = len(started)
                events.append(("start", started[operation.name]))
            case "collective-permute-done":
                events.append(("done", started[operation.operands.strip().lstrip("%")]))
            case "collective-permute":
                events.append(("sync", operation.name))
            case _:
                if kernel := kernel_of(program, operation):
                    events.append(("kernel", kernel))
    return events


def step_names(program, opcode):
    """What profiles call the operations of a ring's steps, the primitive left out, in order."""
    path = rf'\b{opcode}\(.*op_name="[^"]*/(ring_\w+_step_\d+(?:/[^"]*)?)/\w+"'
    return re.findall(path, text_of(program))


def overlapped(events):
    """For every permute, in order, the kernels that run while it is on its way."""
    return [
        [name for kind, name in events[i + 1 : events.index(("done", hop))] if kind == "kernel"]
        for i, (what, hop) in enumerate(events)
        if what == "start"
    ] + [[] for kind, _ in events if kind == "sync"]


def transfers(program, opcode):
    """``{computation: [(operation, what overlaps), ...]}`` of the program's transfers.

    What overlaps are the names of the matrix products and of the library's kernels between its
    start and its end: nothing where it is exposed. ``opcode``: "all-gather", "collective-permute"
    or, for copies between device and host memory, "fusion".
    """
    found, starts = {}, {f"{opcode}-start", *({opcode} - {"fusion"})}
    for computation, operations in computations(program).items():
        started = {}
        for operation in operations:
            if operation.opcode in starts:
                during = []
                found.setdefault(computation, []).append((operation, during))
                if operation.opcode != opcode:
                    started[operation.name] = during
            elif operation.opcode == f"{opcode}-done":
                started.pop(operation.operands.strip().lstrip("%"))
            elif (kernel := kernel_of(program, operation)) or _is_product(operation):
                for during in started.values():
                    during.append(kernel or operation.name)
    return found


def _is_product(operation):
    return "gemm" in operation.name or "__cublas" in operation.rest


def moves(program, opcode):
    """``(shapes that it sends, what overlaps)`` of every transfer, by computation."""

    def shapes(operation):
        sizes = [sizes for _, sizes in _SHAPE.findall(operation.result)]
        if operation.opcode.endswith("start"):  # Its result names the operands, then the results.
            sizes = sizes[: len(sizes) // 2]
        return [tuple(map(int, each.split(","))) for each in sizes]

    return {
        computation: [(shapes(operation), during) for operation, during in each]
        for computation, each in transfers(program, opcode).items()
    }


def host_copies(program):
    """``(name, what overlaps)`` of the copies between device and host memory, by computation."""
    return [
        [(operation.name, during) for operation, during in each if "S(5)" in operation.result]
        for each in transfers(program, "fusion").values()
    ]


def matrix_products(program):
    """Of every matrix product of the program the types of its factors and of its result."""
    operations = [x for each in computations(program).values() for x in each]
    results = {x.name: x.result for x in operations}
    found = []
    for _, result, opcode, operands, rest in operations:
        if opcode == "dot" or (opcode == "custom-call" and "__cublas" in rest):
            factors = (results[name.strip().lstrip("%")] for name in operands.split(",")[:2])
            found.append(tuple(find(_SHAPE.pattern, text).group() for text in (*factors, result)))
    return found


# What a program has for free.
_NO_LAUNCH = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "opt-barrier"}
_NO_LAUNCH |= {"partition-id", "replica-id", "after-all"}
_COLLECTIVE = re.compile("all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter|async")


def small_launches(program):
    """Names of main's operations but for Mosaic's kernels and collectives: a launch each."""
    return [
        x.name
        for x in computations(program)["ENTRY"]
        if x.opcode not in _NO_LAUNCH
        and not _COLLECTIVE.match(x.opcode)
        and not (x.opcode == "custom-call" and "mosaic" in x.rest)
    ]


def arrays_in_order(program):
    """``(name, opcode, dtype, elements)`` of each array that main's operations make, in order."""
    return [
        (x.name, x.opcode, dtype, math.prod(map(int, filter(None, sizes.split(",")))))
        for x in computations(program)["ENTRY"]
        for dtype, sizes in _SHAPE.findall(x.result)
    ]


def sent_bytes(program, opcode="collective-permute", between_hosts_of=None):
    """Bytes that one device sends by every such operation, loops not counted.

    With ``between_hosts_of`` by those permutes whose devices send to another host, of so many GPUs
    each.
    """
    found = []
    for _, result, code, _, rest in computations(program)["ENTRY"]:
        if code not in (opcode, f"{opcode}-start"):
            continue
        if between_hosts_of:
            pair = find(r"source_target_pairs=\{\{(\d+),(\d+)\}", rest).groups()
            source, target = (int(device) // between_hosts_of for device in pair)
            if source == target:
                continue
        size = sum(
            _ITEMSIZE[kind] * math.prod(int(size) for size in sizes.split(",") if size)
            for kind, sizes in _SHAPE.findall(result)
        )
        # The result of a start names the operands and the results.
        found.append(size // (2 if code.endswith("start") else 1))
    return found


def permuted_bytes(program):
    """Bytes that one device sends by permutes, loops not counted."""
    return sum(sent_bytes(program))


def temp_bytes(program):
    """Bytes per device that the program needs in addition to its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


class Ptxas(NamedTuple):
    """What the assembler says of the Mosaic kernels it compiled.

    Attributes:
      kernels: their names.
      stack: bytes of local memory, the most that one of them has: spilled registers lie there.
      spills: bytes stored to it and loaded from it, of all.
      serialized: whether matrix instructions of one of them wait for each other.
    """

    kernels: frozenset[str]
    stack: int
    spills: int
    serialized: bool


def ptxas(text):
    """Reads what is printed under MOSAIC_GPU_DUMP_PTXAS=1 while a program is compiled.

    The assembler's report has a kernel's spills ("0 bytes stack frame, 0 bytes spill stores"). The
    linker's, which newer versions of JAX print after it, has its stack alone ("112 stack"), and "0
    bytes lmem" whether it spills or not.
    """
    names = r"(?:burst|gated_delta_rule)_\w+?"
    kernels = re.findall(rf"Function properties for '?({names})_mosaic_gpu_kernel'?", text)
    assert kernels, f"no report was printed: {text[-500:]!r}"
    stacks = re.findall(r"(\d+) (?:bytes )?stack\b", text)
    assert len(stacks) == len(kernels), text
    spilled = r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    return Ptxas(
        kernels=frozenset(kernels),
        stack=max(map(int, stacks)),
        # A warning, in some versions, has the same numbers again.
        spills=sum(int(a) + int(b) for a, b in re.findall(spilled, text)),
        serialized="C7512" in text or "instructions are serialized" in text,
    )
