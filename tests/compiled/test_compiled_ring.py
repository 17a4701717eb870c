"""What XLA makes of the ring on A100s and H100s, read from the compiled programs.

A program is compiled once, and a test makes all its assertions on it: workers share no programs.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_programs import gradient
from routes import hops_of_passes

import burst_jax
from burst_jax.layouts import document_tables
from burst_jax.ring.rotation import ShardShape, backward_bytes, forward_bytes
from pallas_kernels import AttentionInputs, KVSide, QuerySide, resolve

pytestmark = pytest.mark.cuda_compiler

# Grouped heads, and values of half the keys' head dim; every CTA has several work tiles.
TOKENS, HEADS, KV_HEADS, DIM, VALUE_DIM = 4096, 8, 2, 128, 64
SHAPE = ShardShape(TOKENS, TOKENS, HEADS, KV_HEADS, DIM, 2, value_dim=VALUE_DIM)
# Of all programs but the rings of packed sequences.
NARROW = ShardShape(TOKENS, TOKENS, HEADS, KV_HEADS, 32, 2, value_dim=16)


def narrow(mesh):
    """Query, key and value with narrow heads."""
    return compiled.inputs(mesh, TOKENS, HEADS, KV_HEADS, 32, value_dim=16)


def attend(mesh, **options):
    options = {"implementation": compiled.SMALL, **options}
    return functools.partial(burst_jax.burst_attention, mesh=mesh, **options)


class Ring(NamedTuple):
    """What a ring of packed sequences runs on, and how.

    ``mib``: its memory per device; one more block is too much. ``wide_dq``: how many operations
    other than kernels write float32 arrays of dQ's size; None where that is not counted.
    """

    gpu: str
    n: int
    kernels: Any
    rotation: str
    mib: float
    wide_dq: int | None = None

    def compiled(self, has_kernels=False):
        """The gradient: the forward's hops, then the backward's."""
        mesh, n = compiled.gpu_mesh(self.gpu, self.n), self.n
        arrays = compiled.inputs(mesh, TOKENS, HEADS, KV_HEADS, DIM, value_dim=VALUE_DIM)
        shape = jax.ShapeDtypeStruct((1, TOKENS * n), jnp.int32, sharding=arrays[0].sharding)

        def run(query, key, value, ids):
            options: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
            # "auto" is the rotation that sends fewer bytes: K and V's, of grouped heads.
            backward = "auto" if self.rotation == "rotate_kv" else self.rotation
            options |= {"implementation": self.kernels, "backward": backward}
            options |= {"is_causal": True, "layout": "zigzag"}
            return gradient(attend(mesh, **options))(query, key, value)

        return compiled.compile_for(run, *arrays, shape, has_kernels=has_kernels)


def wires(rotation, n):
    """Bytes that a device sends forward and backward, by the formulas of the docs."""
    hops, c, k, h, s, t = n - 1, TOKENS, KV_HEADS, DIM, 2, 4
    both = DIM + VALUE_DIM
    forward = hops * c * k * both * s
    backward = {
        "rotate_kv": hops * c * k * both * (s + t),
        "rotate_query": hops * c * HEADS * (both * s + 2 * 4) + hops * c * HEADS * h * t,
    }[rotation]
    # The library's own arithmetic, which `auto` decides by, says the same.
    assert forward_bytes(hops_of_passes(n), SHAPE) == forward
    assert backward_bytes(rotation, hops_of_passes(n), SHAPE) == backward
    return forward, backward


def assert_sends(program, wire):
    """``wire`` bytes per device, by permutes alone."""
    assert compiled.permuted_bytes(program) == wire
    for other in ("all-gather", "all-to-all", "all-reduce"):
        assert other not in compiled.text_of(program)


# Rings of two levels have both rotations.
RINGS = (
    # Zeros of one sum over all steps.
    Ring("a100", 8, compiled.SMALL, "rotate_kv", mib=52, wide_dq=1),
    Ring("h100", 4, "mosaic_sm90", "rotate_query", mib=118),
)


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"{ring.n}x{ring.gpu}-{ring.rotation}")
def test_every_permute_of_a_ring_overlaps_with_a_kernel(ring):
    """Its bytes are the formulas'."""
    n, program = ring.n, ring.compiled()
    events, forward = compiled.schedule(program), ["burst_forward"]
    kernels = [name for kind, name in events if kind == "kernel"]
    overlapped = compiled.overlapped(events)
    assert not [event for event in events if event[0] == "sync"]
    assert kernels[:n] == forward * n
    assert overlapped[: n - 1] == [forward] * (n - 1)
    # The local block in two halves. The block is sent to the next step, the previous step's sum to
    # the one after: alone in the first two steps and in the last two.
    assert kernels[n:] == ["burst_backward"] * (n + 1)
    assert overlapped[n - 1 :] == [["burst_backward"]] * (2 * (n - 1))
    names = [x for x in compiled.step_names(program, "custom-call") if "forward_step" in x]
    assert names == [f"ring_forward_step_{i}/jit(forward)/burst_forward" for i in range(n)]
    names = [x for x in compiled.step_names(program, "collective-permute-start") if "forw" in x]
    assert names == [f"ring_forward_step_{i}" for i in range(n - 1)]
    ids = compiled.permuted_bytes(program) - sum(wires(ring.rotation, n))
    # Segment ids are sent with their keys, or with their queries.
    assert n * TOKENS * 4 < ids <= 2 * (n - 1) * TOKENS * 4
    assert_sends(program, sum(wires(ring.rotation, n)) + ids)
    assert compiled.temp_bytes(program) / 2**20 < ring.mib
    if ring.wide_dq is not None:
        wide, moved = ("f32", TOKENS * HEADS * DIM), {"copy", "fusion", "transpose"}
        made = [x for x in compiled.arrays_in_order(program) if x[2:] == wide and x[1] in moved]
        assert len(made) == ring.wide_dq, made


def test_a_plain_ring_has_few_small_launches():
    """Positions and tile bounds of all steps are one constant."""
    mesh, heads, dim = compiled.gpu_mesh("h100", 2), 4, 128
    run = attend(mesh, implementation="mosaic_sm90", layout="zigzag", is_causal=True)
    shapes = compiled.inputs(mesh, TOKENS, heads, heads, dim)
    program = compiled.compile_for(gradient(run), *shapes, has_kernels=False)
    operations = {x.name: x for x in compiled.computations(program)["ENTRY"]}
    small = [
        name
        for name in compiled.small_launches(program)
        if compiled.kernel_of(program, operations[name]) is None
    ]
    # Of both passes: a work-tile counter of each kernel, this device's positions and bounds; of the
    # backward pass: delta in three, lse in base 2 and zeros of dQ twice, and conversions of three
    # gradients.
    assert len(small) <= 17, small


def test_empty_kernels_change_neither_the_schedule_nor_the_memory():
    """Most programs here have them; this is the one of 8 A100s above, with its kernels."""
    ring, *_ = RINGS
    whole, empty = (ring.compiled(has_kernels) for has_kernels in (True, False))
    assert len(compiled.text_of(whole)) > 2 * len(compiled.text_of(empty))
    for read in (
        compiled.schedule, compiled.arrays_in_order, compiled.sent_bytes, compiled.temp_bytes,
    ):  # fmt: skip
        assert read(whole) == read(empty), read.__name__


def balanced(zone, *, has_tables):
    """The gradient in a balanced layout on 8 A100s, its events and its kernels."""
    mesh = compiled.gpu_mesh("a100", 8)
    arrays = narrow(mesh)
    shape = jax.ShapeDtypeStruct((1, TOKENS * 8), jnp.int32, sharding=arrays[0].sharding)
    tables: Any = None
    if has_tables:
        padding = np.zeros(shape.shape, np.int32)
        tables = document_tables(f"balanced:{zone}", padding, padding, 8)
        tables = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)
            ),
            tables,
            tables.specs(None, "seq"),
        )

    def run(query, key, value, ids, order, tables):
        options: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
        options |= dict.fromkeys(("query_positions", "key_value_positions"), order)
        options |= {"is_causal": True, "layout": f"balanced:{zone}", "document_tables": tables}
        return gradient(attend(mesh, **options))(query, key, value)

    program = compiled.compile_for(run, *arrays, shape, shape, tables, has_kernels=False)
    events = compiled.schedule(program)
    assert not [event for event in events if event[0] == "sync"]
    kernels = [name.removeprefix("burst_") for kind, name in events if kind == "kernel"]
    return program, events, kernels


@pytest.mark.parametrize(("zone", "slices"), [(3072, 3), (512, 1)])
def test_a_balanced_layout_gathers_its_zone_during_kernels(zone, slices):
    # The second one's order is searched on the devices.
    has_tables = slices > 1
    program, events, kernels = balanced(zone, has_tables=has_tables)
    # Each slice of the zone, and whole documents: first, or last.
    assert kernels == ["forward"] * (1 + slices) + ["backward"] * (slices + 1)
    assert not any(kind == "start" for kind, _ in events)
    # K and V of all zones for each pass, and the sums of their gradients.
    elements = 8 * zone * KV_HEADS * (32 + 16)
    for opcode, dtype, count in (("all-gather", "bf16", 2), ("reduce-scatter", "f32", 1)):
        found = compiled.transfers(program, opcode)["ENTRY"]
        assert has_tables <= all(f"{dtype}[" in each.result for each, _ in found)
        large = [(each.result, during) for each, during in found if f"{dtype}[" in each.result]
        shapes = [re.findall(rf"{dtype}\[([\d,]+)\]", result) for result, _ in large]
        sizes = [math.prod(map(int, sizes.split(","))) for each in shapes for sizes in each]
        # What is sent, and n times as much that is received; or the other way round.
        assert sum(sizes) == count * elements * 9 // 8
        # The backward pass has nothing but small kernels during its first gather.
        alone = sum(not during for _, during in large)
        assert alone <= (2 if opcode == "all-gather" else 0), opcode
    # The zone's part of out is read and written in place, without a copy of the shard, and so is
    # the token that is NaN in another placement.
    written = []
    for operations in compiled.computations(program).values():
        for update in (x for x in operations if x.opcode == "dynamic-update-slice"):
            if f"[1,{TOKENS},{HEADS},16]" in update.result:
                out = update.operands.split(", ")[0]
                readers = {x.opcode for x in operations if out in x.operands.split(", ")}
                written.append(sorted(readers))
    assert sorted(written) == [["dynamic-slice", "dynamic-update-slice"], ["dynamic-update-slice"]]


def two_levels(hosts, gpus, rotation):
    """The gradient on an A100 ring of nodes."""
    mesh = compiled.gpu_mesh("a100", hosts, gpus)
    run = attend(mesh, seq_axis=("outer", "inner"), backward=rotation)
    return compiled.compile_for(gradient(run), *narrow(mesh), has_kernels=False)


@pytest.mark.parametrize("rotation", ["rotate_query", "rotate_kv"])
def test_two_level_ring(rotation):
    """Of two nodes: every permute overlaps with a kernel, on both interconnects at once."""
    hosts, gpus = 2, 4
    program = two_levels(hosts, gpus, rotation)
    events = compiled.schedule(program)
    assert events.count(("kernel", "burst_forward")) == hosts * gpus
    assert all(compiled.overlapped(events))
    # The outer block in chunks, one during each forward kernel of the first pass; the same
    # backward, and the gradient of the first pass in one chunk less.
    outer = compiled.sent_bytes(program, between_hosts_of=gpus)
    assert len(outer) == gpus + gpus + (gpus - 1) + 1
    hops = hops_of_passes(*[gpus] * hosts)
    # Between the hosts: a block forward, a block and two gradients backward.
    for sent, of_hops in ((compiled.sent_bytes(program), hops), (outer, hops.between_passes)):
        wire = forward_bytes(of_hops, NARROW) + backward_bytes(rotation, of_hops, NARROW)
        assert sum(sent) == wire
    # On one level every hop would cross between some hosts.
    assert 3 * (hops.between_passes.blocks + hops.between_passes.sums) < hops.blocks + hops.sums


def test_memory_does_not_grow_with_the_number_of_nodes():
    # With two, no block is sent in chunks while a gradient is.
    three, five = (compiled.temp_bytes(two_levels(hosts, 2, "rotate_kv")) for hosts in (3, 5))
    # Chunks leave gaps: for four more steps less than one K/V block.
    assert five - three < TOKENS * KV_HEADS * (32 + 16) * 2, (three, five)


def test_ulysses_within_a_node_and_a_ring_between_nodes():
    """Two nodes of four: one all-to-all per array, in its dtype; nothing is gathered."""
    mesh, (tokens, heads, kv_heads, dim) = compiled.gpu_mesh("a100", 2, 4), (1024, 16, 2, 32)
    attention = attend(mesh, seq_axis="outer", ulysses_axis="inner", backward="rotate_kv")
    shapes = compiled.inputs(mesh, tokens, heads, kv_heads, dim)
    program = compiled.compile_for(gradient(attention), *shapes, has_kernels=False)
    assert "all-gather" not in compiled.text_of(program)
    exchanged = [
        *[tokens * heads * dim * 2] * 4,  # q, out, do, dq
        # Two heads for four devices are copied, and their gradients summed.
        *[tokens * 4 * dim * 2] * 2,  # k, v
        *[tokens * 4 * dim * 4] * 2,  # dk, dv
        tokens * heads * 4,  # delta
    ]
    assert sorted(compiled.sent_bytes(program, "all-to-all")) == sorted(exchanged)
    assert all(compiled.overlapped(compiled.schedule(program)))


def test_blocks_of_a_mask_with_segment_ids_are_those_after_the_all_to_all():
    """Of 160 tokens per device before it blocks of 64 are no blocks of the kernels."""
    mesh, mask = compiled.named_mesh("h100", heads=2), np.tril(np.ones((5, 5), bool))
    shard = jax.NamedSharding(mesh, jax.P(None, "heads"))

    def run(q, k, v, ids):
        return burst_jax.burst_attention(
            q, k, v, mesh=mesh, seq_axis=None, ulysses_axis="heads", block_mask=mask,
            query_segment_ids=ids, key_value_segment_ids=ids, implementation="mosaic_sm90",
        )  # fmt: skip

    tokens = jax.ShapeDtypeStruct((1, 320, 4, 64), jnp.bfloat16, sharding=shard)
    ids = jax.ShapeDtypeStruct((1, 320), jnp.int32, sharding=shard)
    assert "burst_forward" in str(jax.jit(run).trace(tokens, tokens, tokens, ids).jaxpr)


@pytest.mark.parametrize(("gpu", "capability"), [("a100", 8.0), ("h100", 9.0), ("h200", 9.0)])
def test_the_gpu_is_known_before_tracing(gpu, capability):
    """Without this the choice of kernels would fall to what the compiling machine has."""
    mesh, seen = compiled.gpu_mesh(gpu, 1), []

    def local(x):
        from pallas_kernels.device import compute_capability, current_platform

        seen.append((current_platform(), compute_capability()))
        return x

    spec = jax.P("seq")
    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)).trace(
        jax.ShapeDtypeStruct((8,), jnp.float32)
    )
    assert seen[0] == ("gpu", capability)
    query: Any = jax.ShapeDtypeStruct((1, 8, 1, 16), jnp.bfloat16)
    inputs = AttentionInputs(QuerySide(query), KVSide(query, query))
    where = {"platform": "gpu", "compute_capability": capability, "inputs": inputs}
    with compiled.mosaic_compiles_for(mesh):
        name = resolve(None, **where).name
    assert name == ("mosaic_sm90" if capability == 9.0 else "mosaic_sm80")
