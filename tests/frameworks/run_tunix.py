"""tunix's own Qwen 3, trainer and loss, and the patch of the documentation."""

import importlib.metadata
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
import tunix_patch as recipe
from comparison import STEPS, TOLERANCE, compare, named_leaves, packed_batch
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.sft import peft_trainer

VOCABULARY = 64
CONFIG = qwen3.ModelConfig(
    num_layers=2, vocab_size=VOCABULARY, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8,
    num_kv_heads=2, rope_theta=1_000_000, norm_eps=1e-6,
    shd_config=qwen3.ShardingConfig.get_default_sharding(enable_sp=True),
)  # fmt: skip
BATCH = packed_batch(4, VOCABULARY)


def patched_input(batch):
    """The inputs of the trainer's loss: segment ids in place of the dense mask."""
    ids = batch["segment_ids"]
    return {
        "input_tokens": batch["tokens"],
        "input_mask": (ids > 0) & (jnp.diff(ids, axis=1, prepend=-1) == 0),
        "positions": batch["positions"],
        "attention_mask": ids,
    }


def unpatched_input(batch):
    inputs = patched_input(batch)
    ids = inputs["attention_mask"]
    same = ids[:, :, None] == ids[:, None, :]
    return inputs | {"attention_mask": same & jnp.tri(ids.shape[1], dtype=bool)}


class Trainer(peft_trainer.PeftTrainer):
    """Keeps the losses."""

    def _buffer_metrics(self, metrics_buffer, loss, **kwargs):
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return super()._buffer_metrics(metrics_buffer, loss=loss, **kwargs)


def train(model, inputs, batch):
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=100, max_steps=STEPS, data_sharding_axis=("fsdp",)
    )
    trainer = Trainer(model, optax.sgd(0.5), config).with_gen_model_input_fn(inputs)

    def weights():
        return named_leaves(nnx.state(model, nnx.Param))

    before = weights()
    trainer.train([batch] * STEPS)
    return trainer.losses, before, weights()


def constrain(x, spec):
    """tunix's own constraint of activations, which it leaves out on CPUs."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(recipe.MESH, P(*spec)))


def make_model():
    model = qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(0))
    # tunix initializes the MLP with zeros, for loading a checkpoint.
    rngs = nnx.Rngs(1)
    for layer in model.layers:
        for each in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            each.kernel[...] = 0.2 * jax.random.normal(rngs.params(), each.kernel.shape)
    return model


def unpatched():
    with mock.patch.object(qwen3.Attention, "block", recipe.dense):
        return train(make_model(), unpatched_input, BATCH)


def patched():
    model = make_model()
    with recipe.MESH, mock.patch.object(qwen3, "shard", constrain):
        state = nnx.state(model)
        specs = nnx.get_partition_spec(state)
        shardings = jax.tree.map(lambda s: NamedSharding(recipe.MESH, s), specs)
        nnx.update(model, jax.device_put(state, shardings))
        return train(model, patched_input, BATCH)


def log_probs(model):
    """Of tunix's reinforcement learning: prompts padded at the left, completions at the right."""
    tokens = np.array(BATCH["tokens"])
    tokens[0, :7], tokens[1, -9:], tokens[2, :20], tokens[3, -1:] = 0, 0, 0, 0
    graph, state = nnx.split(model)
    values = common.compute_per_token_logps(
        graph, state, tokens[:, :24], tokens[:, 24:], pad_id=0, eos_id=-1
    )
    return np.where(tokens[:, 24:] > 0, values, 0)


def check_lora():
    """Log-probabilities with adapters, whose weights are drawn."""
    inputs = unpatched_input(BATCH)
    del inputs["input_mask"]
    provider = qwix.LoraProvider(module_path=".*[qkvo]_proj", rank=2, alpha=4.0)
    with mock.patch.object(qwen3.Attention, "block", recipe.dense):
        model = qwix.apply_lora_to_model(make_model(), provider, cache=None, **inputs)
        weights = nnx.state(model, nnx.LoRAParam)
        keys = nnx.Rngs(2)
        drawn = jax.tree.map(lambda x: 0.3 * jax.random.normal(keys.params(), x.shape), weights)
        without = log_probs(model)
        nnx.update(model, drawn)
        expected = log_probs(model)
    assert np.abs(without - expected).max() > 0.1
    with recipe.MESH:
        nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(recipe.MESH, P())))
        error = np.abs(log_probs(model) - expected).max()
    assert error <= TOLERANCE, error
    print(f"tunix: log-probabilities with LoRA differ by at most {error:.1e}")


if __name__ == "__main__":
    compare(f"tunix {importlib.metadata.version('google-tunix')}", unpatched, patched)
    check_lora()
