"""The Mosaic GPU kernels compiled for an H100, and what the assembler reports."""

from __future__ import annotations

import itertools

import compiled_programs as compiled
import jax.numpy as jnp
import pytest
from compiled_calls import compile_call

from pallas_kernels import mosaic_sm90
from pallas_kernels.mosaic.sm90 import configs
from pallas_kernels.mosaic.sm90.configs import (
    SHARED_MEMORY,
    MosaicConfig,
    backward_config,
    forward_config,
)
from pallas_kernels.mosaic.sm90.shared_memory import BackwardMemory, ForwardMemory

pytestmark = pytest.mark.cuda_compiler
hopper_kernels = pytest.mark.hopper_kernels


def compile_one(half, dim, value_dim=None, config=None, deterministic=False, **options):
    """Compiles one call of a kernel; ``config``: None is the one that ships.

    There are more work tiles than an H100 has SMs: each CTA loops over several, which takes
    registers.
    """
    configs = {} if config is None else {f"{half}_config": config}
    local = mosaic_sm90(**configs, deterministic=deterministic)
    return compile_call(local, "h100", half, dim, value_dim, **options)


@pytest.fixture
def report(monkeypatch, capfd):
    """``report(...)``: what the assembler reports while :func:`compile_one` runs."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def run(*args, **kwargs):
        capfd.readouterr()
        compile_one(*args, **kwargs)
        return compiled.ptxas("".join(capfd.readouterr()))

    return run


FRESH, SEGMENTS, FULL = {"carried": False}, {"segments": True}, {"full": True}
PARAMETERS, BOTH = {"numbers": True}, {"numbers": True, "segments": True}
ROUNDED, LAST = {"rounded": True}, {"carried": False, "rounded": True}
RANGES, BLOCKS, DROPOUT = {"ranges": True}, {"blocks": 64}, {"dropout": True}
CALLS = [
    # On a float32 carry that is changed in place; the narrowest and widest heads of every config.
    *(("forward", dim, {}) for dim in (16, 64, 80, 128, 144, 208, 256)),
    *(("forward", dim, FULL) for dim in (64, 128, 192, 240, 256)),
    # A ring's first call has no carry, its last one rounds o.
    *(("forward", 128, FULL | last) for last in (FRESH, ROUNDED)), ("forward", 64, FULL | ROUNDED),
    *(("backward", dim, FULL) for dim in (32, 64, 96, 128)),
    *(("backward", dim, {}) for dim in (64, 96, 128)), ("backward", 128, FULL | FRESH),
    # Without a ring dK and dV are rounded in the kernel.
    ("backward", 64, LAST | SEGMENTS), ("backward", 128, LAST | FULL),
    # Sink logits and ALiBi slopes.
    ("forward", 64, BOTH | FRESH), ("forward", 64, PARAMETERS), ("forward", 128, BOTH),
    ("forward", 128, PARAMETERS | FRESH), ("forward", 256, BOTH | FRESH),
    ("backward", 64, BOTH), ("backward", 128, PARAMETERS), ("backward", 128, BOTH | FRESH),
    ("forward", 64, DROPOUT | SEGMENTS), ("forward", 128, DROPOUT),
    ("backward", 64, DROPOUT), ("backward", 128, DROPOUT | SEGMENTS),
    # Per-query KV bounds, and block-sparse masks.
    ("forward", 64, RANGES), ("forward", 128, RANGES | FULL), ("forward", 256, RANGES),
    ("backward", 64, RANGES | FULL), ("backward", 128, RANGES | SEGMENTS),
    ("backward", 128, RANGES | PARAMETERS),
    ("forward", 64, BLOCKS), ("forward", 128, BLOCKS | BOTH),
    ("backward", 64, BLOCKS | FULL), ("backward", 128, BLOCKS | BOTH),
    *((half, dim, {"mods": mods} | more) for half, dim, mods, more in (
        ("forward", 64, "score", {}), ("forward", 128, "score+mask", FULL),
        ("forward", 256, "score+mask", {}), ("backward", 64, "score+mask", FULL),
        ("backward", 64, "score+mask", BOTH), ("backward", 128, "mask", {}),
        ("backward", 128, "added+mask", {}),
    )),
    # Multi-head latent attention, and other head dims of values.
    *(("forward", 192, {"value_dim": 128} | more) for more in (FRESH, FULL, BOTH)),
    ("forward", 64, FULL | {"value_dim": 256}),
    ("backward", 128, FULL | {"value_dim": 64}), ("backward", 64, FULL | {"value_dim": 128}),
    # Thread-block clusters of two.
    *(("forward", dim, masks | {"config": MosaicConfig(128, block_kv, 2, cluster=2)})
      for dim, block_kv, masks in (
          (80, 128, {}), (128, 128, {}), (128, 128, FULL), (192, 64, {}), (256, 64, FULL),
      )),
    *((half, 128, FULL | {"dtype": "float16"}) for half in ("forward", "backward")),
]  # fmt: skip


# One register is stored and loaded outside of the loops over tiles, once per work tile.
ONE_SPILL = {("forward", 128): {"full+cluster"}, ("backward", 128): {"added+mask"}}


def call_id(value):
    if not isinstance(value, dict):
        return str(value)
    words = (k if v is True else f"no_{k}" if v is False else v for k, v in value.items())
    return "+".join("cluster" if isinstance(x, MosaicConfig) else str(x) for x in words) or "causal"


@hopper_kernels
@pytest.mark.parametrize(("half", "dim", "options"), CALLS, ids=call_id)
def test_kernels_fit_in_the_registers(report, half, dim, options):
    """No register is spilled, and matrix instructions overlap."""
    seen = report(half, dim, **options)
    assert len(seen.kernels) == 1
    if call_id(options) in ONE_SPILL.get((half, dim), ()):
        assert seen.stack <= 8, seen
        assert seen.spills <= 12, seen
        assert not seen.serialized
        return
    assert (seen.spills, seen.stack, seen.serialized) == (0, 0, False), seen


@hopper_kernels
@pytest.mark.parametrize(
    ("dim", "options", "most_stack"),
    [
        (64, FULL, 0), (96, {}, 0), (64, {"numbers": "differentiated"}, 0), (128, RANGES, 8),
        # What a work tile keeps over its loop.
        (128, {}, 24), (128, LAST, 24), (128, BLOCKS | BOTH, 8),
    ],
    ids=call_id,
)  # fmt: skip
def test_deterministic_kernels_spill_outside_of_their_loops(report, dim, options, most_stack):
    seen = report("backward", dim, deterministic=True, **options)
    assert len(seen.kernels) == 1
    assert seen.stack <= most_stack
    assert seen.spills <= 2 * most_stack
    assert not seen.serialized


@pytest.mark.parametrize(
    ("half", "dim", "options"),
    [
        ("forward", 64, {}), ("forward", 128, FULL | FRESH), ("forward", 256, FULL),
        ("backward", 64, LAST | SEGMENTS), ("backward", 128, {}), ("backward", 128, LAST | FULL),
        ("backward", 64, {"deterministic": True}), ("backward", 128, {"deterministic": True}),
    ],
    ids=call_id,
)  # fmt: skip
def test_kernels_without_a_producer_warpgroup(monkeypatch, report, half, dim, options):
    """With any JAX. At head dim 128 the backward spills what a work tile keeps over its loop."""
    monkeypatch.setattr(configs, "EQUAL_REGISTERS_SINCE", (0,))
    seen = report(half, dim, **options)
    assert len(seen.kernels) == 1
    most_stack, most_spills = (144, 400) if (half, dim) == ("backward", 128) else (0, 0)
    assert seen.stack <= most_stack
    assert seen.spills <= most_spills
    assert not seen.serialized


@hopper_kernels
def test_a_kernel_that_spills_is_recognised(report):
    """The guard of the tests above: a tile of scores too large for a warpgroup's registers."""
    seen = report("forward", 64, full=True, config=MosaicConfig(128, 256, 2))
    assert len(seen.kernels) == 1
    assert seen.spills > 0
    assert seen.stack > 0


@hopper_kernels
def test_a_report_is_never_taken_for_granted(capfd):
    """Without the variable nothing is printed, and that is no kernel that fits."""
    compile_one("forward", 64)
    with pytest.raises(AssertionError, match="no report"):
        compiled.ptxas("".join(capfd.readouterr()))


@hopper_kernels
@pytest.mark.parametrize(
    ("half", "dim", "value_dim", "rounded"),
    [
        ("forward", 64, 64, False),
        ("forward", 176, 176, True),
        ("forward", 256, 256, False),
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
            memory = ForwardMemory.of(config, out_dtype=out_dtype, has_carry=not rounded, **dims)
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
