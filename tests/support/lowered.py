"""Kernels lowered for a GPU that is not here, without its compiler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import local
from jax.sharding import PartitionSpec as P
from lowered_programs import abstract_mesh, compiling_for

GPUS = {"mosaic_sm80": "a100", "mosaic_sm90": "h100"}


def lower(implementation: Any, spec: Any, *, dim: int = 64, length: int = 128) -> None:
    """Lowers the forward and the backward pass of one head; raises what lowering raises."""
    gpu = GPUS[implementation.name]
    x = jax.ShapeDtypeStruct((1, length, 1, dim), jnp.bfloat16)
    stats = jax.ShapeDtypeStruct((2, 1, 1, length), jnp.float32)

    def run(q, k, v, do, stats):
        side = local.tokens(jnp.arange(length, dtype=jnp.int32))
        inputs = local.inputs_of(q, k, v, side, side, functions=spec.calls_functions)
        tiles = implementation.forward_bounds(inputs, spec=spec)
        o, lse = implementation.forward(inputs, tiles, None, spec=spec)
        tiles = implementation.backward_bounds(inputs, spec=spec)
        given = local.with_cotangents(inputs, do, stats)
        return o, lse, implementation.backward(given, tiles, None, None, spec=spec)

    run = jax.shard_map(run, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.sharding.use_abstract_mesh(abstract_mesh(gpu, {"x": 1})), compiling_for(gpu):
        jax.jit(run).trace(x, x, x, x, stats).lower(lowering_platforms=("cuda",))
