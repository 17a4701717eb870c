"""SkyRL-tx's own backend, training LoRA adapters of Qwen 3, and the documentation's patch."""
# ruff: noqa: E402 - two modules are replaced before SkyRL imports them.

import importlib.metadata
import json
import logging
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import transformers

# peft saves adapters, torch decodes images; transformers has looked for torch before.
for name in ("peft", "torch"):
    sys.modules[name] = types.ModuleType(name)

import jax
import jax.numpy as jnp
import numpy as np
import skyrl_patch as recipe
from comparison import LENGTH, STEPS, compare, named_leaves, packed_batch
from flax import nnx
from jax.sharding import AxisType
from skyrl.backends.jax import JaxBackendConfig, JaxBackendImpl
from skyrl.tinker import types as tinker
from skyrl.tx.layers.lora import LoRAMixin
from skyrl.tx.models import qwen3
from skyrl.tx.models.configs import Qwen3Config
from skyrl.tx.utils.models import save_safetensors
from tokenizers import Tokenizer, models

VOCABULARY = 64
# Padded at the right, as SkyRL's batches are; its own attention knows no packed documents.
LENGTHS = [LENGTH, 51, 40, 13]
# The adapter of each sequence: SkyRL trains those of several users at once.
ADAPTERS = ["first", "second", "first", "second"]
# Adam divides by a gradient's size: with a smaller eps it amplifies the rounding of small ones.
ADAM = tinker.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=0.1, weight_decay=0.0)


def save_model(folder):
    """A checkpoint like Qwen 3's: configuration, tokenizer and weights, which are drawn."""
    base = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"], dtype="float32",
    )  # fmt: skip
    base.save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    config = Qwen3Config(base, max_lora_adapters=0, max_lora_rank=0, shard_attention_heads=True)
    with nnx.use_eager_sharding(False):
        model = qwen3.Qwen3ForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    keys = nnx.Rngs(1)

    def draw(path, x):
        mean = float("norm" in jax.tree_util.keystr(path))
        return mean + 0.3 * jax.random.normal(keys.params(), x.shape)

    nnx.update(model, jax.tree.map_with_path(draw, nnx.state(model)))
    save_safetensors(config, model, folder / "model.safetensors")


def make_batch():
    rows = packed_batch(len(LENGTHS), VOCABULARY)["tokens"]
    rows = [[*row[:length], 1] for row, length in zip(rows.tolist(), LENGTHS, strict=True)]
    nothing = [[0.0] * length for length in LENGTHS]
    return tinker.PreparedModelPassBatch(
        all_model_inputs=[
            tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=row[:-1])]) for row in rows
        ],
        all_targets=[row[1:] for row in rows],
        all_token_weights=[[1.0] * length for length in LENGTHS],
        all_sampling_logprobs=nothing, all_advantages=nothing, all_values=nothing,
        all_returns=nothing, all_model_ids=ADAPTERS, all_loss_fns=["cross_entropy"] * len(rows),
        all_loss_fn_configs=[None] * len(rows), request_batch_slices=[("all", "", 0, len(rows))],
    )  # fmt: skip


def train(folder, tensor_parallel_size):
    config = JaxBackendConfig(
        max_lora_adapters=3, max_lora_rank=4, tensor_parallel_size=tensor_parallel_size
    )
    backend = JaxBackendImpl(str(folder), config, 0)
    for seed, name in enumerate(dict.fromkeys(ADAPTERS)):
        # train_unembed: the adapters of the embedding and of the head, too.
        backend.create_model(
            name, tinker.LoraConfig(rank=4, alpha=8.0, seed=seed, train_unembed=True)
        )
    before, losses = named_leaves(backend.lora_params), []
    for _ in range(STEPS):
        outputs = backend.forward_backward(make_batch())["all"].loss_fn_outputs
        losses.append(np.mean([np.mean(each["elementwise_loss"]["data"]) for each in outputs]))
        for name in dict.fromkeys(ADAPTERS):
            backend.optim_step(name, tinker.OptimStepInput(adam_params=ADAM))
    return losses, before, named_leaves(backend.lora_params)


def unpatched(folder):
    with (
        mock.patch.object(qwen3, "dot_product_attention", recipe.dense),
        mock.patch.object(LoRAMixin, "apply_lora", recipe.sorting),
    ):
        return train(folder, tensor_parallel_size=1)


def patched(folder):
    make_mesh = jax.make_mesh

    def with_sequence(sizes, names, axis_types):
        return make_mesh((*sizes, 4), (*names, "seq"), axis_types=(*axis_types, AxisType.Auto))

    with mock.patch.object(jax, "make_mesh", with_sequence):
        return train(folder, tensor_parallel_size=2)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        compare(
            f"SkyRL-tx {importlib.metadata.version('skyrl')}",
            lambda: unpatched(folder), lambda: patched(folder),
        )  # fmt: skip
