"""Training steps compiled for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import compiled_programs as compiled
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax import ShardingRules
from burst_jax.training import abstract_train_state, make_optimizer, make_train_step


def compile_step(gpu, kernels, sizes, config, *, length, batch):
    """A step in the zigzag layout, and the shapes of weights and optimizer state.

    Args:
      gpu: "a100", "h100" or "h200".
      kernels: the implementation.
      sizes: of the mesh's axes, which are named like the fields of ``ShardingRules``.
      config: of the decoder.
      length: sequence length.
      batch: batch size.
    """
    mesh = compiled.named_mesh(gpu, **sizes)
    rules, optimizer = ShardingRules.of(mesh), make_optimizer(1e-3, 10)
    graphdef, params, state = abstract_train_state(
        config, optimizer, mesh, layout="zigzag", implementation=kernels, rules=rules
    )
    tokens = NamedSharding(mesh, P(rules.batch_axes or None, rules.seq))
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "positions": jnp.int32}
    batch_of: Any = {
        name: jax.ShapeDtypeStruct((batch, length), dtype, sharding=tokens)
        for name, dtype in (dtypes | {"weights": jnp.float32}).items()
    }
    step = make_train_step(graphdef, optimizer, compiler_options=compiled.step_options())
    traced = step.trace(params, state, batch_of | {"segment_ids": None})
    return traced.lower(lowering_platforms=("cuda",)).compile(), params, state
