"""MaxText's own models and train step, and the documentation's patch."""

import importlib.metadata
from functools import partial
from pathlib import Path

import jax
import maxtext_patch  # noqa: F401 - its effect is on attention=cudnn_flash_te alone
import numpy as np
from comparison import LENGTH, STEPS, compare, named_leaves, packed_batch
from flax import nnx
from maxtext.common.common_types import ReorderStrategy
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import max_utils, maxtext_utils, sharding, train_utils

BASE = Path(pyconfig.__file__).parent / "base.yml"
VOCABULARY, SEQUENCES = 64, 4
OPTIONS = {
    "run_name": "compare", "base_output_directory": "out/maxtext", "hardware": "cpu",
    "enable_checkpointing": False, "dataset_type": "synthetic",
    "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 8,
    "base_mlp_dim": 64, "base_num_decoder_layers": 2, "vocab_size": VOCABULARY,
    "max_target_length": LENGTH,
    "dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest",
    "opt_type": "sgd", "learning_rate": 0.3, "warmup_steps_fraction": 0.0, "steps": STEPS,
    "gradient_clipping_threshold": 0.0, "skip_jax_distributed_system": True, "log_config": False,
    "enable_goodput_recording": False, "monitor_goodput": False,
}  # fmt: skip

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "sparse_matmul": False, "megablox": False}
MODELS = {
    "gemma2": {"sliding_window_size": 12, "attn_logits_soft_cap": 5.0},
    "gpt_oss": {
        "sliding_window_size": 12, "attention_sink": True, "inhomogeneous_layer_cycle_interval": 2,
        "base_moe_mlp_dim": 64, "mlp_activations": ["sigmoid", "linear"],
        "mlp_activations_limit": 7.0, **EXPERTS,
    },
    "llama4": {
        "chunk_attn_window_size": 16, "nope_layer_interval": 2,
        "inhomogeneous_layer_cycle_interval": 2, "interleave_moe_layer_step": 2,
        "base_moe_mlp_dim": 64, **EXPERTS, "num_experts_per_tok": 1,
    },
}  # fmt: skip


def steps(model, devices, **options):
    options = OPTIONS | MODELS[model] | options
    config = pyconfig.initialize(
        ["", str(BASE)],
        decoder_block=model,
        per_device_batch_size=SEQUENCES / len(devices),
        **options,
    )
    (
        _, _, state_shardings, _, mesh, _, _, _, _, _, state
    ) = train_utils.setup_train_loop(config, None, devices=devices)  # fmt: skip
    graph, state = nnx.split(state)
    weights, state_shardings = sharding.maybe_update_params_sharding_with_opt(
        config, state_shardings
    )
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, state_shardings, train.train_step, params_shardings=weights
    )
    data = packed_batch(SEQUENCES, VOCABULARY)
    tokens, ids, positions = (data[key] for key in ("tokens", "segment_ids", "positions"))
    targets = np.roll(tokens, -1, axis=1)
    counted = (np.roll(ids, -1, axis=1) == ids) & (np.arange(LENGTH) < LENGTH - 1)
    batch = {
        "inputs": tokens, "inputs_segmentation": ids, "inputs_position": positions,
        "targets": targets, "targets_segmentation": ids * counted, "targets_position": positions,
    }  # fmt: skip
    with jax.set_mesh(mesh):
        place = sharding.get_input_data_sharding(config, mesh)
        batch = {key: jax.device_put(x.astype(np.int32), place) for key, x in batch.items()}
        if (n := max_utils.reordered_cp_size(config, mesh)) > 1:
            strategy = ReorderStrategy.DUAL_CHUNK_SWAP
            batch = maxtext_utils.get_reorder_callable(
                n, config.shard_mode, strategy, config.hardware
            )(batch)

    def read(state):
        return named_leaves(nnx.filter_state(state, nnx.Param).to_pure_dict())

    before, losses = read(state), []
    for _ in range(STEPS):
        with jax.set_mesh(mesh), train.logical_axis_rules(config.logical_axis_rules):
            state, metrics = step(state, dict(batch))
        losses.append(float(metrics["scalar"]["learning/loss"]))
    return losses, before, read(state)


def unpatched(model):
    return steps(model, jax.devices()[:1], attention="dot_product")


def patched(model, order="dual_chunk_swap"):
    return steps(
        # Not the strategy "ring", which MaxText rejects on CPUs: nothing but its checks reads it.
        model, jax.devices(), attention="cudnn_flash_te", context_parallel_strategy="all_gather",
        context_parallel_reorder_strategy=order, ici_context_parallelism=4, ici_fsdp_parallelism=2,
    )  # fmt: skip


def check_default_order():
    """``auto`` may be another order than zigzag."""
    raised = None
    try:
        patched("gemma2", order="auto")
    except KeyError as error:
        raised = error.args
    assert raised == ("auto",), raised
    print("MaxText: the order auto raises")


if __name__ == "__main__":
    for model in MODELS:
        compare(
            f"MaxText {importlib.metadata.version('maxtext')}, {model}",
            partial(unpatched, model), partial(patched, model),
        )  # fmt: skip
    check_default_order()
