"""The Mosaic GPU kernels compiled for an H100, and what the assembler reports."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_calls import compile_call, compile_grouped
from local import tokens

import burst_jax
from pallas_kernels import Mask, mosaic_sm90
from pallas_kernels.document_bounds import query_intervals
from pallas_kernels.mosaic import work_tiles
from pallas_kernels.mosaic.sm90 import configs, row_intervals
from pallas_kernels.mosaic.sm90 import grouped as grouped_sm90
from pallas_kernels.mosaic.sm90.configs import (
    SHARED_MEMORY,
    MosaicConfig,
    backward_config,
    forward_config,
)
from pallas_kernels.mosaic.sm90.shared_memory import BackwardMemory, ForwardMemory

pytestmark = pytest.mark.cuda_compiler
hopper_kernels = pytest.mark.hopper_kernels


def compile_one(
    half, dim, value_dim=None, config=None, deterministic=False, grouped=False, **options
):
    """Compiles one call of a kernel; ``config``: None is the one that ships.

    There are more work tiles than an H100 has SMs: each CTA loops over several, which takes
    registers.
    """
    if grouped:
        return compile_grouped(grouped_sm90, "h100", half)
    configs = {} if config is None else {f"{half}_config": config}
    local = mosaic_sm90(**configs, deterministic=deterministic)
    return compile_call(local, "h100", half, dim, value_dim, **options)


@pytest.fixture
def report(monkeypatch, assembled):
    """``report(...)``: what the assembler reports while :func:`compile_one` runs."""
    monkeypatch.setattr(row_intervals, "LEAST_ROWS_WITH_INTERVALS", 0)
    return functools.partial(assembled, compile_one)


CLUSTER = MosaicConfig(128, 128, 2, cluster=2, v_stages=3, split_softmax=True)
WIDE_CLUSTER = MosaicConfig(128, 128, 2, cluster=2, split_softmax=True)
FRESH, SEGMENTS, FULL = {"carried": False}, {"segments": True}, {"full": True}
PARAMETERS, BOTH = {"numbers": True}, {"numbers": True, "segments": True}
ROUNDED, LAST = {"rounded": True}, {"carried": False, "rounded": True}
# The last step of a ring, forward.
IN_PLACE = {"carried": "in_place", "rounded": True}
UNMASKED = {"causal": False}
RANGES, BLOCKS, DROPOUT = {"ranges": True}, {"blocks": 64}, {"dropout": True}
# The most registers of each config, of each way to mask and of each term of the scores.
CALLS = [
    *(("forward", 64, options) for options in (
        {}, FULL | ROUNDED, PARAMETERS, RANGES, DROPOUT | SEGMENTS, IN_PLACE,
    )),
    *(("forward", 128, options) for options in (
        FULL | ROUNDED, BOTH, SEGMENTS, RANGES | FULL, BLOCKS | BOTH, {"mods": "score+mask"},
        # Thread-block clusters of two.
        FULL | {"config": CLUSTER}, ROUNDED, IN_PLACE, IN_PLACE | FULL, IN_PLACE | SEGMENTS,
    )),
    # Of multi-head latent attention, 112 keys, 64, and the widest; then 128 keys.
    ("forward", 192, FULL | {"value_dim": 128}), ("forward", 192, BOTH), ("forward", 256, FULL),
    *(("forward", 192, options) for options in (
        LAST, ROUNDED, LAST | SEGMENTS, LAST | PARAMETERS, IN_PLACE,
    )),
    ("forward", 256, IN_PLACE | FULL),
    *(("forward", 160, options) for options in (
        LAST | SEGMENTS, LAST | PARAMETERS, LAST | {"config": WIDE_CLUSTER},
    )),
    # Tiles of 128 queries, then of 64.
    *(("backward", 64, options) for options in (
        {}, LAST | SEGMENTS, RANGES, {"blocks": 128}, LAST | {"deterministic": True}, BOTH,
        FULL | {"value_dim": 128},
    )),
    ("backward", 96, FULL),
    ("backward", 64, {"mods": "score+mask"} | BOTH),
    *(("backward", 128, options) for options in (
        {}, FULL, PARAMETERS, DROPOUT | SEGMENTS, RANGES | PARAMETERS, BLOCKS | BOTH,
        {"mods": "added+mask"}, *(LAST | x for x in (DROPOUT, {"mods": "mask"}, {"mods": "added"})),
        # With intervals: one work tile per CTA, then a loop over them.
        SEGMENTS, LAST | SEGMENTS,
    )),
    # Above 128: keys of their own for each consumer, shared ones, gradients of their own.
    ("backward", 192, LAST | {"value_dim": 128}), ("backward", 192, BOTH | {"value_dim": 128}),
    ("backward", 192, FULL), ("backward", 256, {}), ("backward", 256, FULL),
    *(("backward", 192, options) for options in (
        {}, LAST, LAST | SEGMENTS, LAST | SEGMENTS | RANGES,
    )),
]  # fmt: skip


# Bytes of stack: registers that are stored and loaded once per work tile, not in a loop over tiles.
# Above head dim 128 dK and dV take 128 or 160 of 240 registers, and steps load some, too: scalars
# like bounds and counters.
STACK = {
    ("forward", 64): {"full+rounded": 8},
    ("forward", 128): {"full+rounded": 24, "full+cluster": 8},
    ("forward", 160): {"no_carried+rounded+segments": 8},
    ("forward", 192): {
        "full+128": 8, "no_carried+rounded": 8, "rounded": 8, "no_carried+rounded+segments": 16,
        "no_carried+rounded+numbers": 24, "in_place+rounded": 8,
    },
    ("backward", 128): {
        "causal": 40, "added+mask": 8, "dropout+segments": 8, "no_carried+rounded+segments": 64,
        "no_carried+rounded+mask": 8,
    },
    ("backward", 64): {
        "causal": 32, "no_carried+rounded+segments": 56, "ranges": 40, "128": 24,
        "no_carried+rounded+deterministic": 48, "score+mask+numbers+segments": 8,
    },
    ("backward", 192): {
        "no_carried+rounded+128": 8, "numbers+segments+128": 136,
        "no_carried+rounded+segments": 8, "no_carried+rounded+segments+ranges": 16,
    },
    ("backward", 256): {"causal": 64, "full": 72},
}  # fmt: skip


def call_id(value):
    if not isinstance(value, dict):
        return str(value)
    words = (k if v is True else f"no_{k}" if v is False else v for k, v in value.items())
    return "+".join("cluster" if isinstance(x, MosaicConfig) else str(x) for x in words) or "causal"


@hopper_kernels
@pytest.mark.parametrize(("half", "dim", "options"), CALLS, ids=call_id)
def test_kernels_fit_in_the_registers(report, half, dim, options):
    """No register is spilled in a loop, and matrix instructions overlap."""
    seen = report(half, dim, **options)
    assert len(seen.kernels) == 1
    stack = STACK.get((half, dim), {}).get(call_id(options), 0)
    assert seen.stack <= stack, seen
    assert seen.spills <= 3 * stack, seen
    assert not seen.serialized


@hopper_kernels
@pytest.mark.parametrize(
    ("dim", "options", "most_stack"),
    # At head dim 128 what a work tile keeps over its loop.
    [
        (64, {"numbers": "differentiated"}, 0), (128, LAST, 24), (128, BLOCKS | BOTH, 8),
        (128, LAST | SEGMENTS, 72), (192, LAST, 0),
    ],
    ids=call_id,
)  # fmt: skip
def test_deterministic_kernels_spill_outside_of_their_loops(report, dim, options, most_stack):
    seen = report("backward", dim, deterministic=True, **options)
    assert len(seen.kernels) == 1
    assert seen.stack <= most_stack
    assert seen.spills <= 2 * most_stack
    assert not seen.serialized


@hopper_kernels
@pytest.mark.parametrize("options", [LAST, LAST | {"deterministic": True}, PARAMETERS], ids=call_id)
def test_chunks_of_queries_take_no_registers(monkeypatch, report, options):
    """As where the queries of one head do not fit in the L2 cache."""
    monkeypatch.setattr(work_tiles, "_L2_BYTES", 1)
    seen = report("backward", 128, **options)
    assert len(seen.kernels) == 1
    assert seen.stack <= 24
    assert seen.spills <= 3 * 24
    assert not seen.serialized


# Where registers do not move: bytes of stack, for what a work tile keeps over its loop. Steps read
# of it what their copies need, while products run; at head dim 64 only masked steps do.
SHARED_STACK = {
    ("backward", 128, "causal"): 40, ("backward", 128, "deterministic"): 144,
    ("backward", 64, "causal"): 64, ("backward", 128, "no_carried+rounded+full"): 8,
    ("backward", 128, "no_causal"): 56, ("backward", 128, "no_causal+rounded"): 56,
    ("backward", 192, "no_carried+rounded+128"): 64, ("backward", 256, "no_carried+rounded"): 48,
}  # fmt: skip


@pytest.mark.parametrize(
    ("half", "dim", "options"),
    [
        ("forward", 64, {}), ("forward", 128, FULL | FRESH), ("forward", 256, FULL),
        ("forward", 64, UNMASKED), ("forward", 128, UNMASKED), ("forward", 128, UNMASKED | ROUNDED),
        ("forward", 128, UNMASKED | IN_PLACE),
        ("backward", 64, {}), ("backward", 64, {"shape": (2, 16, 16)}),
        ("backward", 64, LAST | SEGMENTS), ("backward", 128, LAST | FULL),
        ("backward", 128, {}), ("backward", 128, {"deterministic": True}),
        ("backward", 128, UNMASKED), ("backward", 128, UNMASKED | ROUNDED),
        ("forward", 192, LAST | {"value_dim": 128}), ("forward", 192, LAST),
        ("backward", 192, LAST | {"value_dim": 128}), ("backward", 192, LAST),
        ("backward", 256, LAST),
    ],
    ids=call_id,
)  # fmt: skip
def test_kernels_without_a_producer_warpgroup(monkeypatch, report, half, dim, options):
    """With any JAX."""
    monkeypatch.setattr(configs, "EQUAL_REGISTERS_SINCE", (0,))
    seen = report(half, dim, **options)
    assert len(seen.kernels) == 1
    stack = SHARED_STACK.get((half, dim, call_id(options)), 0)
    assert seen.stack <= stack, seen
    assert seen.spills <= 4 * stack, seen
    assert not seen.serialized


@pytest.mark.parametrize("name", ["product", "gradient"])
def test_grouped_products_fit_in_the_registers(report, name):
    """With any JAX: 8 bytes of stack where registers do not move to the consumers."""
    seen = report(name, None, grouped=True)
    assert len(seen.kernels) == 1
    assert seen.stack <= 8
    assert not seen.serialized


@hopper_kernels
def test_a_kernel_that_spills_is_recognised(report):
    """The guard of the tests above: a tile of scores too large for a warpgroup's registers."""
    seen = report("forward", 64, config=MosaicConfig(128, 256, 2))
    assert len(seen.kernels) == 1
    assert seen.spills > 0
    assert seen.stack > 0
    # Where nothing is printed, that is no kernel that fits.
    with pytest.raises(AssertionError, match="no report"):
        compiled.ptxas("")


@hopper_kernels
@pytest.mark.parametrize(
    ("half", "dim", "value_dim", "rounded"),
    [
        ("forward", 64, 64, False),
        ("forward", 176, 176, True),
        ("backward", 32, 32, False),
        ("forward", 192, 128, True),
        ("backward", 128, 64, False),
    ],
)
def test_computed_shared_memory_is_what_the_compiler_takes(half, dim, value_dim, rounded):
    """With more stages than fit in shared memory, the error reports their size."""
    shipped = forward_config(dim) if half == "forward" else backward_config(dim)
    dims = {"head_dim": dim, "dtype": jnp.bfloat16, "value_dim": value_dim}

    def computed(config):
        if half == "forward":
            out_dtype = jnp.bfloat16 if rounded else jnp.float32
            carry_dtype = None if rounded else jnp.float32
            memory = ForwardMemory.of(config, out_dtype=out_dtype, carry_dtype=carry_dtype, **dims)
        else:
            memory = BackwardMemory.of(config, **dims)
        return memory.nbytes

    stages = (MosaicConfig(shipped.block_q, shipped.block_kv, n) for n in itertools.count(2))
    # Past the limit by more than the estimate may be above the truth.
    config = next(config for config in stages if computed(config) > SHARED_MEMORY + 4096)
    with pytest.raises(Exception, match="exceeds available shared memory") as caught:
        compile_one(half, dim, value_dim, config, carried=not rounded, rounded=rounded)
    taken = int(compiled.find(r"smem_bytes=(\d+)", str(caught.value)).group(1))
    assert taken <= computed(config) <= taken + 2048


@pytest.mark.parametrize("known", [True, False])
def test_intervals_write_no_comparison_of_every_key_to_memory(known):
    """``known``: whether positions are, while tracing. XLA does write 4,096 keys."""
    mesh, (batch, length, block) = compiled.gpu_mesh("h100", 1), (2, 8192, 64)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=jax.NamedSharding(mesh, jax.P()))

    def run(ids, positions):
        side = tokens(np.arange(length, dtype=np.int32) if known else positions, ids)
        return query_intervals(Mask(right=0), side, side, block, 2)

    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    program = compiled.compile_for(run, array(batch, length), array(length))
    most = max(elements for *_, elements in compiled.arrays_in_order(program))
    assert most <= batch * length


@hopper_kernels
@pytest.mark.parametrize("zone", [None, 0, 512], ids=str)
def test_padding_takes_no_copies_of_whole_arrays(zone):
    """With segment ids as an argument, queries, keys, values and dO go to kernels as they are.

    ``zone``: that of a balanced layout over two devices; None is one device.
    """
    n = 1 if zone is None else 2
    mesh, shape = compiled.gpu_mesh("h100", n), (1, 2048 * n, 4, 128)

    def run(q, k, v, do, ids, order):
        options: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
        if zone is not None:
            options |= dict.fromkeys(("query_positions", "key_value_positions"), order)
            options["layout"] = f"balanced:{zone}"

        def attend(q, k, v):
            return burst_jax.burst_attention(q, k, v, mesh=mesh, is_causal=True, **options)

        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(do)

    def array(*shape, dtype=jnp.bfloat16):
        sharding = jax.NamedSharding(mesh, jax.P(None, "seq"))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arrays = *[array(*shape)] * 4, *[array(*shape[:2], dtype=jnp.int32)] * 2
    program: Any = compiled.compile_for(run, *arrays, has_kernels=False)
    entry = program.as_text().partition("ENTRY")[2]
    made = re.findall(r"= bf16\[1,2048,4,128\]\S* ((?!parameter|get-tuple-element)\S+\(.*)", entry)
    casts = [line for line in made if re.search(r"calls=%(fused|wrapped)_convert", line)]
    # A token, or the zone, of out.
    in_place = [line for line in made if "calls=%fused_dynamic_update_slice" in line]
    # Of dQ; what is split has dK and dV in float32, too.
    assert (len(casts), len(in_place)) == {None: (1, 0), 0: (1, 1), 512: (3, 2)}[zone], made
    assert len(made) == len(casts) + len(in_place), made
    assert not re.search(r"= \(bf16\[1,2048,4,128\].* fusion\(", entry)
