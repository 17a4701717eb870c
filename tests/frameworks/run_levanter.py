"""levanter's own Llama and its loss, and the patch of the documentation."""

import importlib.metadata

import equinox as eqx
import haliax as hax
import jax
import levanter_patch  # noqa: F401 - its effect is on the backend "nvte" alone
import numpy as np
from comparison import LENGTH, STEPS, compare, named_leaves, packed_batch
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from levanter.models.lm_model import LmExample
from levanter.utils.mesh import MeshConfig, create_mesh_from_axis_specs

VOCABULARY = 64
Batch, Pos = hax.Axis("batch", 4), hax.Axis("position", LENGTH)


def example():
    """Documents counted from 0, padding -1, and the weights of the targets."""
    data = packed_batch(Batch.size, VOCABULARY)
    tokens = hax.named(data["tokens"], (Batch, Pos))
    ids = data["segment_ids"] - 1
    following = np.roll(ids, -1, axis=1)
    weights = (following == ids) & (ids >= 0) & (np.arange(LENGTH) < LENGTH - 1)
    mask = AttentionMask.causal(sliding_window=12).with_segment_ids(hax.named(ids, (Batch, Pos)))
    weights = hax.named(weights.astype(np.float32), (Batch, Pos))
    return LmExample(tokens=tokens, loss_weight=weights, attn_mask=mask)


def train(backend, mapping, parameters):
    config = LlamaConfig(
        max_seq_len=LENGTH, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4,
        num_kv_heads=2, attn_backend=backend, initializer_range=0.2, gradient_checkpointing=True,
    )  # fmt: skip
    Vocab = hax.Axis("vocab", VOCABULARY)

    @hax.named_jit(axis_resources=parameters)
    def init():
        return LlamaLMHeadModel.init(Vocab, config, key=jax.random.key(0))

    @hax.named_jit(axis_resources=parameters)
    def step(model, batch):
        def loss(model, batch):
            with hax.axis_mapping(mapping):
                batch = hax.shard(batch, mapping)
                return model.compute_next_token_loss(batch, key=None).scalar()

        value, gradients = eqx.filter_value_and_grad(loss)(model, batch)
        updates = jax.tree.map(lambda g: -0.3 * g, gradients)
        return value, hax.shard(eqx.apply_updates(model, updates), parameters)

    model, batch, losses = init(), example(), []
    before = named_leaves(eqx.filter(model, eqx.is_array))
    for _ in range(STEPS):
        value, model = step(model, batch)
        losses.append(float(value))
    return losses, before, named_leaves(eqx.filter(model, eqx.is_array))


def on(devices, backend):
    """On a mesh like that of levanter's trainer: the fields are those of its configuration."""
    config = MeshConfig(
        axes={"context": min(devices, 4)}, shared_mapping={"kv_head": "model"},
        compute_mapping={"position": "context"},
    )  # fmt: skip
    ici, dcn = config.axis_shapes(devices, 1)
    mesh = create_mesh_from_axis_specs(ici_axes=ici, dcn_axes=dcn, devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        return train(backend, config.resolved_compute_mapping, config.resolved_param_mapping)


def unpatched():
    return on(1, AttentionBackend.VANILLA)


def patched():
    return on(8, AttentionBackend.NVTE)


if __name__ == "__main__":
    compare(f"levanter {importlib.metadata.version('marin-levanter')}", unpatched, patched)
