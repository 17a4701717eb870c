"""The sm80 kernels compiled for an A100: registers, spills and shared memory."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    AttentionInputs,
    AttentionSpec,
    Dropout,
    KVSide,
    QuerySide,
    SharedInputs,
    mosaic_sm80,
)

BATCH, LENGTH, HEADS, KV_HEADS = 1, 1024, 4, 2
# With JAX 0.12 the assembler compiles kernels for linking.
LINKED = jax.__version_info__ >= (0, 12)
# A kernel that was compiled before in the same process is not reported again: all scales differ.
SCALES = (0.1 + i / 1024 for i in itertools.count())


@pytest.fixture
def report(monkeypatch, capfd):
    """``report(...)``: what the assembler prints while :func:`compile_one` runs."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled.mosaic_as_on_an_a100(monkeypatch)

    def run(*args, **options):
        capfd.readouterr()
        compile_one(*args, **options)
        return compiled.ptxas("".join(capfd.readouterr()))

    return run


def compile_one(half, dim, value_dim=None, *, carried=False, everything=False, deterministic=False):
    """Compiles one call of a kernel for an A100.

    Args:
      half: "forward" or "backward".
      dim: head dim.
      value_dim: of values; None is ``dim``.
      carried: merges with a carry, or adds to given gradients.
      deterministic: with reproducible gradients.
      everything: with segment ids, a window, a soft cap and dropout.
    """
    local, mesh = mosaic_sm80(deterministic=deterministic), compiled.gpu_mesh("a100", 1)
    value_dim = value_dim or dim
    spec = AttentionSpec.of(next(SCALES), right=0)
    if everything:
        spec = AttentionSpec.of(next(SCALES), left=300, right=0, logits_soft_cap=20.0)
        spec = dataclasses.replace(spec, dropout=Dropout(0.1))

    def array(*shape, dtype=jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    def heads(count, lanes, dtype=jnp.bfloat16) -> Any:
        return array(BATCH, LENGTH, count, lanes, dtype=dtype)

    ids = array(BATCH, LENGTH, dtype=jnp.int32) if everything else None
    positions = array(LENGTH, dtype=jnp.int32)
    seeds = array(BATCH, HEADS, dtype=jnp.int32) if everything else None
    do, stats = heads(HEADS, value_dim), array(2, BATCH, HEADS, LENGTH)
    inputs = AttentionInputs(
        QuerySide(heads(HEADS, dim), positions, ids, do=do, stats=stats),
        KVSide(heads(KV_HEADS, dim), heads(KV_HEADS, value_dim), positions, ids),
        SharedInputs(dropout_seeds=seeds),
    )
    wide = jnp.float32
    sums = (heads(HEADS, value_dim, wide), array(BATCH, HEADS, LENGTH))
    if half == "backward":
        of_keys = heads(KV_HEADS, dim, wide), heads(KV_HEADS, value_dim, wide)
        sums = heads(HEADS, dim, wide), of_keys

    def run(inputs, sums):
        if half == "forward":
            bounds = local.forward_bounds(inputs, spec=spec)
            return local.forward(inputs, bounds, sums, spec=spec)
        assert local.backward is not None
        bounds = local.backward_bounds(inputs, spec=spec)
        return local.backward(inputs, bounds, *(sums or (None, None)), spec=spec)

    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    return compiled.compile_for(run, inputs, sums if carried else None)


@pytest.mark.cuda_compiler
@pytest.mark.parametrize(
    ("half", "dims", "options", "spilled"),
    [
        ("forward", (64,), {}, 0),
        ("forward", (128,), {"carried": True}, 0),
        ("forward", (128,), {"everything": True}, 256),
        ("forward", (192, 128), {}, 0),
        ("backward", (64,), {}, 256),
        ("backward", (128,), {"carried": True}, 528 if LINKED else 448),
        ("backward", (128,), {"deterministic": True}, 528 if LINKED else 448),
        ("backward", (192, 128), {}, 0),
    ],
    ids=lambda value: "+".join(value) or "causal" if isinstance(value, dict) else str(value),
)
def test_registers(report, half, dims, options, spilled):
    """``spilled``: bytes that are stored or loaded; few of them inside of the loops."""
    seen = report(half, *dims, **options)
    assert seen.kernels == {f"burst_{half}"}
    assert seen.spills <= spilled, seen
