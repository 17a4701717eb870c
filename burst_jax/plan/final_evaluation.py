"""The evaluation that ends a run of the training script: its time, and its memory on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

from burst_jax.models.config import DecoderConfig
from burst_jax.plan.device_sizes import device_sizes
from burst_jax.plan.hardware import Cluster
from burst_jax.plan.step_time import evaluation_seconds, mixer_of
from burst_jax.plan.training_strategy import TrainingStrategy
from burst_jax.training.evaluation import evaluation_memory

# Held-out batches that the script evaluates on GPUs by default.
EVAL_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class FinalEvaluation:
    """What evaluating all held-out batches costs, in the dtype of the training.

    On the mesh it needs less memory than a step: it saves nothing, and has no gradients.

    Attributes:
      batches: number of batches, as large as those of a step.
      mesh_seconds: on the mesh.
      device_seconds: again on one device, which the results are compared with.
      device_memory: bytes on that device: all weights, its shard of them, and one batch.
      device_fits: whether they fit in what JAX allocates there.
    """

    batches: int
    mesh_seconds: float
    device_seconds: float
    device_memory: int
    device_fits: bool


def final_evaluation(
    config: DecoderConfig,
    shapes: Any,
    cluster: Cluster,
    *,
    length: int,
    batch: int,
    shard: int,
    mesh_seconds: float,
    allocated: float,
) -> FinalEvaluation:
    """The evaluation that follows a training.

    Args:
      config: the decoder, with the ``mlp_chunks`` of the training.
      shapes: its state as shapes.
      cluster: the GPUs.
      length: sequence length.
      batch: batch size.
      shard: bytes of the weights that a device of the mesh stores.
      mesh_seconds: of one batch on the mesh.
      allocated: bytes of a GPU that JAX allocates.
    """
    alone = dataclasses.replace(cluster, hosts=1, gpus=1)
    one = TrainingStrategy("replicated", 1, (1,), 1, "contiguous", "attention")
    sizes = device_sizes(config, shapes, one, length=length, batch=batch)
    of_kind = {
        kind: mixer_of(config, kind, alone, one, sizes, length=length)
        for kind in dict.fromkeys(config.layer_kinds)
    }
    attentions = [of_kind[kind] for kind in config.layer_kinds]
    needed = sizes.param * sizes.parts + shard + evaluation_memory(config, batch * length)
    return FinalEvaluation(
        batches=EVAL_BATCHES,
        mesh_seconds=EVAL_BATCHES * mesh_seconds,
        device_seconds=EVAL_BATCHES * evaluation_seconds(sizes, alone, attentions),
        device_memory=needed,
        device_fits=needed <= allocated,
    )
