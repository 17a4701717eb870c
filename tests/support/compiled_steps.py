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


def compile_step(gpu, kernels, sizes, config, *, length, batch, layout="zigzag", whole=False):
    """A step, and the shapes of weights and optimizer state.

    Args:
      gpu: "a100", "h100" or "h200".
      kernels: the implementation.
      sizes: of the mesh's axes, which are named as the fields of ``ShardingRules`` are.
      config: of the decoder.
      length: tokens of a row.
      batch: rows.
      layout: of the tokens.
      whole: whether the weights are whole over the devices of rows and tokens.
    """
    mesh = compiled.named_mesh(gpu, **sizes)
    rules, optimizer = ShardingRules.of(mesh), make_optimizer(1e-3, 10)
    split: Any = {"rules": rules}
    if whole:
        axes = {"batch_axis": rules.data, "seq_axis": rules.seq, "tensor_axis": rules.tensor}
        split = {name: axis for name, axis in axes.items() if axis is not None}
    graphdef, params, state = abstract_train_state(
        config, optimizer, mesh, layout=layout, implementation=kernels, **split
    )
    tokens = NamedSharding(mesh, P(rules.batch_axes or None, rules.seq))
    batch_of: Any = {
        name: jax.ShapeDtypeStruct((batch, length), dtype, sharding=tokens)
        for name, dtype in (
            ("inputs", jnp.int32), ("targets", jnp.int32), ("positions", jnp.int32),
            ("weights", jnp.float32),
        )
    }  # fmt: skip
    step = make_train_step(graphdef, optimizer, compiler_options=compiled.step_options())
    with compiled.mosaic_compiles_for(mesh):
        traced = step.trace(params, state, batch_of | {"segment_ids": None})
        return traced.lower(lowering_platforms=("cuda",)).compile(), params, state
