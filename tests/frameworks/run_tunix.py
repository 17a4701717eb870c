"""tunix's own Qwen 3, trainer and loss, and the patch of the documentation."""

from unittest import mock

import jax
import jax.numpy as jnp
import optax
import tunix_patch as recipe
from comparison import STEPS, compare, named_leaves, packed_batch
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.models.qwen3 import model as qwen3
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


if __name__ == "__main__":
    compare("tunix", unpatched, patched)
