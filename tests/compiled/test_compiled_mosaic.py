"""The Mosaic GPU kernels compiled for an H100, and what the assembler reports."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import compiled_programs as compiled
import functions
import jax
import jax.numpy as jnp
import local as local_calls
import pytest

from burst_jax import burst_attention
from pallas_kernels import AttentionSpec, BlockMask, Dropout, mosaic_sm90
from pallas_kernels.mosaic.sm90.configs import (
    SHARED_MEMORY,
    MosaicConfig,
    backward_config,
    forward_config,
)
from pallas_kernels.mosaic.sm90.shared_memory import BackwardMemory, ForwardMemory

pytestmark = [pytest.mark.cuda_compiler, pytest.mark.hopper_kernels]

# More work tiles than an H100 has SMs: each CTA loops over several, which takes registers.
BATCH, HEADS, KV_HEADS = 2, 16, 8
# A kernel that was compiled before in the same process is not reported again: all scales differ.
SCALES = (0.1 + i / 1024 for i in itertools.count())
# JAX 0.12.0.1 links kernels, and linked ones keep the registers they start with: nothing to learn
# there from compiling every head dim.
LINKED = "this compiler links kernels, and gives every warpgroup as many registers"
_compiler_links: list[bool] = []


def compile_one(
    half, dim, *, full=False, carried=True, rounded=False, dtype="bfloat16", numbers=False,
    segments=False, ranges=False, dropout=False, value_dim=None, blocks=False, mods="", **config,
):  # fmt: skip
    """Compiles one call of a kernel.

    Args:
      half: "forward" or "backward".
      dim: the head dim.
      full: with window, soft cap, segment ids and lengths that are no multiple of a tile. Else a
        causal mask over whole tiles.
      carried: changes what is given in place. Else it makes new arrays.
      rounded: writes o, or dK and dV, in the queries' dtype, as a last call does.
      dtype: the arrays'.
      numbers: with sink logits and ALiBi slopes.
      segments: with segment ids, where ``full`` does not say so.
      ranges: with per-query KV bounds.
      blocks: with a block-sparse mask per head.
      dropout: with dropped weights.
      value_dim: the head dim of values; None is ``dim``.
      mods: the functions of scores: "score", "mask", both, or "added" for one that only adds to
        the scores.
      config: ``forward_config`` or ``backward_config``, if not those shipped.
    """
    local, length = mosaic_sm90(**config), 1096 if full else 1152
    mesh, dtype = compiled.gpu_mesh("h100", 1), jnp.dtype(dtype)
    spec = AttentionSpec.of(next(SCALES), right=0)
    if full:
        spec = AttentionSpec.of(next(SCALES), left=300, right=0, logits_soft_cap=20.0)

    if dropout:
        spec = dataclasses.replace(spec, dropout=Dropout(0.1))

    def score_mod(score, batch, head, q_position, kv_position):
        if "added" in mods:
            return score - 0.01 * (q_position - kv_position).astype(jnp.float32)
        return functions.score_mod(score, batch, head, q_position, kv_position)

    if mods not in ("", "mask"):
        spec = dataclasses.replace(spec, score=dataclasses.replace(spec.score, score_mod=score_mod))
    if "mask" in mods:
        mask = dataclasses.replace(spec.mask, mask_mod=functions.mask_mod)
        spec = dataclasses.replace(spec, mask=mask)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    query = array(BATCH, length, HEADS, dim, dtype=dtype)
    key = array(BATCH, length, KV_HEADS, dim, dtype=dtype)
    value_dim = dim if value_dim is None else value_dim
    value = array(BATCH, length, KV_HEADS, value_dim, dtype=dtype)
    do = array(BATCH, length, HEADS, value_dim, dtype=dtype)
    stats = array(2, BATCH, HEADS, length)
    ids = array(BATCH, length, dtype=jnp.int32) if full or segments else None
    of_queries = dict.fromkeys(
        ("kv_starts", "kv_ends") if ranges else (), array(BATCH, length, dtype=jnp.int32)
    )
    seeds = array(BATCH, HEADS, dtype=jnp.int32) if dropout else None
    per_head = dict.fromkeys(("sink_logits", "alibi_slopes") if numbers else (), array(HEADS))
    of_keys = array(*key.shape), array(*value.shape)
    sums = (array(*do.shape), array(*stats.shape[1:]))
    if half == "backward":
        sums = array(*query.shape), of_keys
    sums = sums if carried else None
    out_dtype = dtype if rounded else None

    def inputs_of(q, k, v, ids, ranges, per_head, seeds, table):
        tokens = local_calls.tokens(jnp.arange(length, dtype=jnp.int32), ids)
        mask = None if table is None else BlockMask(table, 64, 64, 64, 64)
        arrays = q, k, v, tokens._replace(**ranges), tokens, per_head, seeds, mask
        return local_calls.inputs_of(*arrays, functions=bool(mods))

    def forward(q, k, v, do, stats, ids, ranges, sums, *of_heads):
        del do, stats
        inputs = inputs_of(q, k, v, ids, ranges, *of_heads)
        bounds = local.forward_bounds(inputs, spec=spec)
        return local.forward(inputs, bounds, sums, spec=spec, out_dtype=out_dtype)

    def backward(q, k, v, do, stats, ids, ranges, sums, *of_heads):
        inputs = inputs_of(q, k, v, ids, ranges, *of_heads)
        bounds = local.backward_bounds(inputs, spec=spec)
        inputs = local_calls.with_cotangents(inputs, do, stats)
        assert local.backward is not None
        sums_or_none = sums or (None, None)
        return local.backward(inputs, bounds, *sums_or_none, spec=spec, out_dtype=out_dtype)

    run = forward if half == "forward" else backward
    # One device: nothing varies, and the kernels take no array in place that is marked as varying.
    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    table = array(HEADS, -(-length // 64), -(-length // 64), dtype=jnp.bool) if blocks else None
    arrays = query, key, value, do, stats, ids, of_queries, sums, per_head, seeds, table
    return compiled.compile_for(run, *arrays)


@pytest.fixture
def report(monkeypatch, capfd):
    """``report(...)``: what the assembler reports while :func:`compile_one` runs."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def run(*args, **kwargs):
        if _compiler_links and args[1] not in (64, 128):
            pytest.xfail(LINKED)
        capfd.readouterr()
        compile_one(*args, **kwargs)
        return compiled.ptxas("".join(capfd.readouterr()))

    return run


FRESH, SEGMENTS, FULL = {"carried": False}, {"segments": True}, {"full": True}
PARAMETERS, BOTH = {"numbers": True}, {"numbers": True, "segments": True}
LAST = {"carried": False, "rounded": True}
CLUSTERS = ((64, 128), (80, 128), (112, 128), (128, 128), (192, 64), (256, 64))
CALLS = [
    # Every head dim, on a float32 carry that is changed in place.
    *(("forward", dim, {}) for dim in range(16, 257, 16)),
    *(("forward", dim, FULL) for dim in (64, 128, 192, 240, 256)),
    # A ring's first call has no carry, its last one rounds o.
    *(("forward", dim, FULL | last) for dim in (64, 128) for last in (FRESH, {"rounded": True})),
    *(("backward", d, x) for d in (32, 64, 96, 128) for x in (FULL | FRESH, FULL, {})),
    # Without a ring dK and dV are rounded in the kernel.
    *(("backward", dim, LAST | masks) for dim in (64, 128) for masks in (FULL, SEGMENTS)),
    # Sink logits and ALiBi slopes.
    *(("forward", d, x | FRESH) for d in (64, 128, 256) for x in (PARAMETERS, BOTH)),
    *(("forward", 128, parameters) for parameters in (PARAMETERS, BOTH)),
    *(("backward", dim, parameters) for dim in (64, 128) for parameters in (PARAMETERS, BOTH)),
    *(("backward", 128, parameters | FRESH) for parameters in (PARAMETERS, BOTH)),
    *(
        (half, dim, {"dropout": True} | masks)
        for half in ("forward", "backward")
        for dim in (64, 128)
        for masks in ({}, SEGMENTS)
    ),
    # Per-query KV bounds.
    *((half, dim, {"ranges": True} | more) for half, dim, more in (
        ("forward", 64, {}), ("forward", 128, FULL), ("forward", 256, {}), ("backward", 64, FULL),
        ("backward", 128, {}), ("backward", 128, SEGMENTS), ("backward", 128, PARAMETERS),
    )),
    *((half, dim, {"blocks": True} | more) for half, dim, more in (
        ("forward", 64, {}), ("forward", 128, FULL), ("forward", 128, BOTH),
        ("backward", 64, FULL), ("backward", 128, {}), ("backward", 128, BOTH),
    )),
    *((half, dim, {"mods": mods} | more) for half, dim, mods, more in (
        ("forward", 64, "score", {}), ("forward", 64, "score+mask", FULL),
        ("forward", 128, "score+mask", FULL), ("forward", 256, "score+mask", {}),
        ("backward", 64, "score", {}), ("backward", 64, "score+mask", FULL),
        ("backward", 64, "score+mask", BOTH), ("backward", 128, "mask", {}),
        ("backward", 128, "added", {}), ("backward", 128, "added+mask", {}),
    )),
    # Multi-head latent attention, and other head dims of values.
    *(("forward", 192, {"value_dim": 128} | x) for x in (FRESH, FULL, {"rounded": True}, BOTH)),
    ("forward", 64, FULL | {"value_dim": 256}),
    ("backward", 128, FULL | {"value_dim": 64}),
    ("backward", 64, FULL | {"value_dim": 128}),
    # Thread-block clusters of two.
    *(
        ("forward", dim, masks | {"forward_config": MosaicConfig(128, block_kv, 2, cluster=2)})
        for dim, block_kv in CLUSTERS
        for masks in ({}, FULL)
    ),
    *((half, 128, FULL | {"dtype": "float16"}) for half in ("forward", "backward")),
]  # fmt: skip


def call_id(value):
    if not isinstance(value, dict):
        return str(value)
    words = (k if v is True else f"no_{k}" if v is False else v for k, v in value.items())
    return "+".join("cluster" if isinstance(x, MosaicConfig) else str(x) for x in words) or "causal"


@pytest.mark.parametrize(("half", "dim", "options"), CALLS, ids=call_id)
def test_kernels_fit_in_the_registers(report, half, dim, options):
    """No register is spilled, and matrix instructions overlap."""
    seen = report(half, dim, **options)
    assert len(seen.kernels) == 1
    if seen.shares_ignored:
        _compiler_links.append(True)
        pytest.xfail(LINKED)
    assert (seen.spills, seen.stack, seen.serialized) == (0, 0, False), seen


def test_a_kernel_that_spills_is_recognised(report):
    """The guard of the tests above: a tile of scores too large for a warpgroup's registers."""
    seen = report("forward", 64, full=True, forward_config=MosaicConfig(128, 256, 2))
    assert len(seen.kernels) == 1
    assert seen.spills > 0
    assert seen.stack > 0


def test_a_report_is_never_taken_for_granted(capfd):
    """Without the variable nothing is printed, and that is no kernel that fits."""
    compile_one("forward", 64)
    with pytest.raises(AssertionError, match="no report"):
        compiled.ptxas("".join(capfd.readouterr()))


# What the assembler and, in newer versions of JAX, the linker print.
ASSEMBLER = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 7 by compiler to allow use of
ptxas info    : Compiling entry function 'burst_forward_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for burst_forward_mosaic_gpu_kernel
    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads
"""
LINKER = """\
info    : Function properties for 'burst_forward_mosaic_gpu_kernel':
info    : used 168 registers, used 16 barriers, {} stack, 1025 bytes smem, 0 bytes lmem
"""
SERIAL = (
    "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"
)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (ASSEMBLER.format(0, 0, 0), True),
        (ASSEMBLER.format(16, 8, 4), False),
        (ASSEMBLER.format(0, 0, 0) + LINKER.format(0), True),
        (LINKER.format(0), True),
        (LINKER.format(112), False),
        (SERIAL + ASSEMBLER.format(0, 0, 0), False),
    ],
)
def test_both_forms_of_the_report_are_read(text, fits):
    seen = compiled.ptxas(text)
    assert len(seen.kernels) == 1
    assert ((seen.spills, seen.stack, seen.serialized) == (0, 0, False)) == fits


@pytest.mark.parametrize(
    ("half", "dim", "value_dim", "rounded"),
    [
        *((half, dim, dim, rounded) for half, dim, rounded in (
            *itertools.product(["forward"], [64, 176, 256], [False, True]),
            *itertools.product(["backward"], [32, 128], [False]),
        )),
        ("forward", 192, 128, True),
        ("backward", 128, 64, False),
    ],
)  # fmt: skip
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
        compile_one(
            half, dim, value_dim=value_dim, carried=not rounded, rounded=rounded,
            **{f"{half}_config": config},
        )  # fmt: skip
    taken = int(compiled.find(r"smem_bytes=(\d+)", str(caught.value)).group(1))
    assert taken <= computed(config) <= taken + 2048


def test_ctas_with_several_work_tiles_compile_under_a_checked_shard_map():
    """The work-tile counter is an argument, whatever mesh axes shard_map marks the arrays with."""
    mesh = compiled.gpu_mesh("h100", 1)
    sharding = jax.NamedSharding(mesh, jax.P(None, "seq"))
    query = jax.ShapeDtypeStruct((1, 2048, 16, 64), jnp.bfloat16, sharding=sharding)

    def gradients(q, k, v, do):
        run = functools.partial(
            burst_attention, mesh=mesh, is_causal=True, implementation="mosaic_sm90"
        )
        return jax.vjp(run, q, k, v)[1](do)

    program = compiled.text_of(compiled.compile_for(gradients, *(query,) * 4))
    for kernel in ("burst_forward", "burst_backward"):
        call = next(
            line for line in program.splitlines() if kernel in line and " custom-call(" in line
        )
        assert "s32[1]{0}" in call.split(" custom-call(")[0], kernel
