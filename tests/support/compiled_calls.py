"""One call of local attention compiled for a GPU that is not here."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from typing import Any

import compiled_programs as compiled
import functions
import jax
import jax.numpy as jnp
import local as local_calls

from pallas_kernels import AttentionSpec, BlockMask, Dropout
from pallas_kernels.linear.backend import Inputs
from pallas_kernels.linear.kernel_parts import Form

# A kernel that was compiled before in the same process is not reported again: all scales differ.
_SCALES = (0.1 + i / 1024 for i in itertools.count())


def run_for_ampere(code):
    """What ``code`` prints, the assembler's reports included, in a process that starts with Ampere.

    There Mosaic GPU assembles kernels for an A100: see
    :func:`compiled_programs.start_mosaic_with_hopper`.
    """
    code = f"import compiled_programs as c; c.start_mosaic_with_hopper = lambda: None\n{code}"
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # A cached program has no report.
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, env=os.environ | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def compile_linear(operation, gpu, *, channels=False):
    """Compiles all kernels of the gated delta rule: those of a device alone, and of a shard.

    With ``channels``, those of a decay per key channel.

    An odd number of chunks: the Hopper scans have a step that is no pair's, which takes code and
    registers.
    """
    mesh, (length, heads, key_heads) = compiled.gpu_mesh(gpu, 1), (448, 4, 2)

    def array(*shape, dtype=jnp.bfloat16):
        sharding = jax.NamedSharding(mesh, jax.P())
        return jax.ShapeDtypeStruct((1, *shape), dtype, sharding=sharding)

    def run(inputs, start, do, last):
        scale, forms = 0.1, list(Form)[: 1 if channels else None]  # One with decays per channel.
        # The first form has prepared everything.
        prepared, *others = (operation.prepare(inputs, form) for form in forms)
        return (
            [operation.forward(inputs, x, start, scale) for x in (prepared, *others)],
            operation.affine(inputs, prepared, start),
            operation.first_state_gradient(inputs, prepared, do, last, scale),
            operation.backward(inputs, prepared, start, do, last, scale),
        )

    keys, values = array(length, key_heads, 128), array(length, heads, 128)
    gates = array(length, heads, dtype=jnp.float32)
    state = array(heads, 128, 128, dtype=jnp.float32)
    decays = array(length, heads, 128, dtype=jnp.float32) if channels else gates
    given = Inputs(keys, keys, values, decays, gates)
    return compiled.compile_for(run, given, state, values, state)


def compile_grouped(kernels, gpu, name, columns=768):
    """Compiles a grouped matrix product of 8 groups: "product", "transposed" or "gradient"."""
    mesh = compiled.gpu_mesh(gpu, 1)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    rows, weights = array(4096, 2048), array(8, 2048, columns)
    if name == "transposed":
        weights = array(8, columns, 2048)
    sides = (rows, array(4096, columns)) if name == "gradient" else (rows, weights)

    def run(left, right, sizes):
        if name == "gradient":
            return kernels.weight_gradient(left, right, sizes)
        return kernels.product(left, right, sizes, transposed=name == "transposed")

    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    return compiled.compile_for(run, *sides, array(8, dtype=jnp.int32))


def added(score, batch, head, q_position, kv_position):
    """A ``score_mod`` that only adds to the scores."""
    del batch, head
    return score - 0.01 * (q_position - kv_position).astype(jnp.float32)


def _spec_of(full, dropout, mods, differentiated, causal):
    spec = AttentionSpec.of(next(_SCALES), right=0 if causal else None)
    if full:
        spec = AttentionSpec.of(next(_SCALES), left=300, right=0, logits_soft_cap=20.0)
    score_mod = {"score": functions.score_mod, "added": added}.get(mods.split("+")[0])
    mask_mod = functions.mask_mod if "mask" in mods else None
    return dataclasses.replace(
        spec,
        mask=dataclasses.replace(spec.mask, mask_mod=mask_mod),
        score=dataclasses.replace(
            spec.score, score_mod=score_mod, differentiated=("alibi_slopes",) * differentiated
        ),
        dropout=Dropout(0.1) if dropout else None,
    )


def compile_call(
    local, gpu, halves, dim, value_dim=None, *, shape=(2, 16, 8), full=False, carried: Any = True,
    rounded=False, dtype="bfloat16", numbers=False, segments=False, ranges=False, dropout=False,
    blocks=0, mods="", causal=True, **options,
):  # fmt: skip
    """Compiles one call.

    Args:
      local: the implementation.
      gpu: "a100" or "h100".
      halves: "forward", "backward", or both, separated by "+".
      dim: the head dim.
      value_dim: of values; None is ``dim``.
      shape: sequences, query heads and key heads.
      full: with window, soft cap, segment ids and lengths that are no multiple of a tile. Else a
        causal mask over whole tiles.
      carried: changes what is given in place. Else it makes new arrays. "in_place": also an o that
        is ``rounded``.
      rounded: writes o, or dK and dV, in the queries' dtype, as a last call does.
      dtype: the arrays'.
      numbers: with sink logits and ALiBi slopes; "differentiated": and the gradient of slopes.
      segments: with segment ids, where ``full`` does not say so.
      ranges: with per-query KV bounds.
      dropout: with dropped weights.
      blocks: tokens of a block, of a block-sparse mask per head; 0 is no such mask.
      mods: the functions of scores: "score", "mask", both, or "added" for one that only adds to
        the scores.
      causal: with a causal mask.
      options: XLA's, of :func:`compiled_programs.compile_for`.
    """
    mesh, dtype = compiled.gpu_mesh(gpu, 1), jnp.dtype(dtype)
    spec = _spec_of(full, dropout, mods, numbers == "differentiated", causal)
    (batch, heads, kv_heads), length = shape, 1096 if full else 1152
    out_dtype = dtype if rounded else None

    def array(*shape, dtype=jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    def tokens(count, lanes, dtype=dtype):
        return array(batch, length, count, lanes, dtype=dtype)

    value_dim, wide = value_dim or dim, jnp.float32
    ints = array(batch, length, dtype=jnp.int32)
    bounds = dict.fromkeys(("kv_starts", "kv_ends"), ints) if ranges else {}
    per_head = dict.fromkeys(("sink_logits", "alibi_slopes"), array(heads)) if numbers else {}
    seeds = array(batch, heads, dtype=jnp.int32) if dropout else None
    table = None
    if blocks:
        table = array(heads, -(-length // blocks), -(-length // blocks), dtype=jnp.bool)
    sides = tokens(heads, dim), tokens(kv_heads, dim), tokens(kv_heads, value_dim)
    arrays = *sides, ints if full or segments else None, bounds, per_head, seeds, table
    cotangents = tokens(heads, value_dim), array(2, batch, heads, length)
    sums: Any = None, None, None
    if carried:
        carried_dtype = out_dtype if carried == "in_place" else wide
        carry = tokens(heads, value_dim, carried_dtype), array(batch, heads, length)
        dkv = tokens(kv_heads, dim, wide), tokens(kv_heads, value_dim, wide)
        sums = carry, tokens(heads, dim, wide), dkv

    def inputs_of(arrays):
        q, k, v, ids, bounds, per_head, seeds, table = arrays
        positions = local_calls.tokens(jnp.arange(length, dtype=jnp.int32), ids)
        mask = None if table is None else BlockMask(table, *[blocks] * 4)
        of_heads = per_head, seeds, mask, bool(mods)
        sides = q, k, v, positions._replace(**bounds), positions
        return local_calls.inputs_of(*sides, *of_heads)

    # Arguments, so that XLA compiles no program that computes them.
    bounds_of = {"forward": local.forward_bounds, "backward": local.backward_bounds}
    tiles = {
        half: jax.eval_shape(lambda arrays, of=of: of(inputs_of(arrays), spec=spec), arrays)
        for half, of in bounds_of.items()
        if half in halves
    }
    tiles = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), tiles)

    def run(arrays, cotangents, sums, tiles):
        inputs, results = inputs_of(arrays), []
        if "forward" in halves:
            given = tiles["forward"], sums[0]
            results.append(local.forward(inputs, *given, spec=spec, out_dtype=out_dtype))
        if "backward" in halves:
            inputs = local_calls.with_cotangents(inputs, *cotangents)
            given = tiles["backward"], *sums[1:]
            results.append(local.backward(inputs, *given, spec=spec, out_dtype=out_dtype))
        return results

    # One device: nothing varies, and the kernels take no array in place that is marked as varying.
    run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    return compiled.compile_for(run, arrays, cotangents, sums, tiles, **options)
