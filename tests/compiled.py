"""Whole programs compiled for GPUs that are not here, and what to read in them."""

from __future__ import annotations

import importlib.util
import math
import re
from importlib import resources

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

import burst_jax

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


def gpu_mesh(target, n):
    """A mesh of ``n`` GPUs of one host: "a100", "h100" or "h200"."""
    description = resources.files(burst_jax) / "gpu_targets" / f"{target}.txtpb"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description.read_text(), topology=f"1x1x{n}"
    )
    return topologies.make_mesh(topo=topology, mesh_shape=(n,), axis_names=("seq",))


def inputs(mesh, tokens, heads, kv_heads, head_dim=128, dtype=jnp.bfloat16, batch=1):
    """Query, key and value of ``tokens`` per device, as shapes."""
    sharding = jax.NamedSharding(mesh, P(None, "seq"))
    length = tokens * mesh.size

    def array(count):
        shape = (batch, length, count, head_dim)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return array(heads), array(kv_heads), array(kv_heads)


def segment_ids(mesh, tokens, batch=1):
    sharding = jax.NamedSharding(mesh, P(None, "seq"))
    return jax.ShapeDtypeStruct((batch, tokens * mesh.size), jnp.int32, sharding=sharding)


def compile_for(function, *shapes, **options):
    """The finished GPU program, with the library's compiler options and those given."""
    options = {**burst_jax.compiler_options("gpu"), **options}
    traced = jax.jit(function).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)


def entry(program):
    """The scheduled main computation, line by line in the order it runs."""
    text = program.as_text()
    assert "is_scheduled=true" in text
    return text[text.index("\nENTRY") :].splitlines()


_OPERATION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\(([^)]*)\)(.*)")


def operations(program):
    """``(name, result type, opcode, operands, the rest)`` of the main computation, in order."""
    matches = (_OPERATION.match(line) for line in entry(program))
    return [match.groups() for match in matches if match]


def schedule(program):
    """The ring's events in order: ("start", hop), ("done", hop), ("sync", name), ("kernel", name).

    Only the library's own kernels count: a permute beside a copy is not hidden.
    """
    events, started = [], {}
    for name, _, opcode, operands, rest in operations(program):
        if opcode == "collective-permute-start":
            started[name] = len(started)
            events.append(("start", started[name]))
        elif opcode == "collective-permute-done":
            events.append(("done", started[operands.strip().lstrip("%")]))
        elif opcode == "collective-permute":
            events.append(("sync", name))
        elif opcode == "custom-call" and (kernel := re.search(r"\bburst_(forward|dq|dkv)\b", rest)):
            events.append(("kernel", kernel.group()))
    return events


def beside(events):
    """For every permute, in order, the kernels that run while it is on its way."""
    return [
        [name for kind, name in events[i + 1 : events.index(("done", hop))] if kind == "kernel"]
        for i, (what, hop) in enumerate(events)
        if what == "start"
    ] + [[] for kind, _ in events if kind == "sync"]


def _bytes(type_text):
    return sum(
        _ITEMSIZE[kind] * math.prod(int(size) for size in sizes.split(",") if size)
        for kind, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", type_text)
    )


def permuted_bytes(program):
    """Bytes that one device sends by permutes, loops not counted."""
    total = 0
    for _, result, opcode, _, _ in operations(program):
        if opcode == "collective-permute-start":
            total += _bytes(result) // 2  # its result names the operands and the results
        elif opcode == "collective-permute":
            total += _bytes(result)
    return total


def temp_bytes(program):
    """Bytes per device that the program needs beside its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes
