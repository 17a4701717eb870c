"""SkyRL-tx's own Qwen 3 and its log-probabilities, and the patch of the documentation."""
# ruff: noqa: E402 - a module is replaced before SkyRL imports it.

import importlib.metadata
import sys
import types
from unittest import mock

# Saves adapters, and imports PyTorch.
sys.modules["peft"] = types.ModuleType("peft")

import jax
import jax.numpy as jnp
import numpy as np
import skyrl_patch as recipe
from comparison import LENGTH, STEPS, compare, named_leaves, packed_batch
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from skyrl.tx.models import qwen3
from skyrl.tx.models.configs import Qwen3Config
from transformers import Qwen3Config as BaseConfig

VOCABULARY = 64
# Padded at the right, as SkyRL's batches are; its own attention knows no packed documents.
LENGTHS = np.array([LENGTH, 51, 40, 13])


def make_model():
    base = BaseConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    config = Qwen3Config(base, max_lora_adapters=0, max_lora_rank=0, shard_attention_heads=True)
    model = qwen3.Qwen3ForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    # Matrices are drawn: initial values differ so much that most would hardly move.
    keys, state = nnx.Rngs(1), nnx.state(model)
    drawn = jax.tree.map(
        lambda x: 0.3 * jax.random.normal(keys.params(), x.shape) if x.ndim > 1 and x.size else x,
        state,
    )
    nnx.update(model, jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), drawn, state))
    return model


def loss(model, tokens, mask):
    """SkyRL's loader shifts the targets."""
    out = model(tokens[:, :-1], attention_mask=mask[:, :-1], is_training=True)
    log_probs = model.compute_logprobs(out.last_hidden_state, tokens[:, 1:])
    return -jnp.sum(log_probs * mask[:, 1:]) / jnp.sum(mask[:, 1:])


def train(devices):
    shape = (devices // 8 or 1, 1, 2, 4) if devices > 1 else (1, 1, 1, 1)
    mesh = jax.make_mesh(
        shape, ("fsdp", "ep", "tp", "seq"), axis_types=(AxisType.Auto,) * 4,
        devices=jax.devices()[:devices],
    )  # fmt: skip
    tokens = packed_batch(4, VOCABULARY)["tokens"]
    tokens = np.concatenate([tokens, tokens[:, :1]], axis=1)
    mask = (np.arange(LENGTH + 1) < LENGTHS[:, None] + 1).astype(np.int32)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(True):
        model = make_model()
        batch = jax.device_put((tokens, mask), NamedSharding(mesh, P("fsdp")))
        graph, params = nnx.split(model)

        @jax.jit
        def step(params):
            value, gradients = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p), *batch))(
                params
            )
            return value, jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients)

        def read(params):
            leaves = named_leaves(params)
            return {key: x for key, x in leaves.items() if "lora" not in key}

        before, losses = read(params), []
        for _ in range(STEPS):
            value, params = step(params)
            losses.append(float(value))
        return losses, before, read(params)


def unpatched():
    with mock.patch.object(qwen3, "dot_product_attention", recipe.dense):
        return train(1)


def patched():
    return train(8)


if __name__ == "__main__":
    compare(f"SkyRL-tx {importlib.metadata.version('skyrl')}", unpatched, patched)
