"""A decoder of Equinox's own layers for one example, and the patch of the documentation."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from comparison import STEPS, compare, named_leaves, packed_batch
from equinox_patch import RingAttention
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY, FEATURES, HEADS, LAYERS = 61, 32, 4, 2
BATCH = packed_batch(4, VOCABULARY)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    rope: eqx.nn.RotaryPositionalEmbedding | None
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, attention, key, rope):
        first, second = jax.random.split(key)
        self.attention = attention(HEADS, FEATURES, key=first)
        self.rope = (
            eqx.nn.RotaryPositionalEmbedding(FEATURES // HEADS, theta=100.0) if rope else None
        )
        self.norm = eqx.nn.LayerNorm(FEATURES)
        self.mlp = eqx.nn.MLP(FEATURES, FEATURES, 4 * FEATURES, 1, jax.nn.gelu, key=second)

    def __call__(self, x, mask):
        def process_heads(query, key, value):
            rotate = jax.vmap(self.rope, in_axes=1, out_axes=1)
            return rotate(query), rotate(key), value

        h = jax.vmap(self.norm)(x)
        options = {} if self.rope is None else {"process_heads": process_heads}
        x = x + self.attention(h, h, h, mask, key=jax.random.key(0), **options)
        return x + jax.vmap(self.mlp)(x)


class Decoder(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key, attention=eqx.nn.MultiheadAttention):
        keys = jax.random.split(key, LAYERS + 2)
        self.embedding = eqx.nn.Embedding(VOCABULARY, FEATURES, key=keys[-1])
        # The last layer has no RoPE.
        self.blocks = [Block(attention, k, i < LAYERS - 1) for i, k in enumerate(keys[:LAYERS])]
        self.head = eqx.nn.Linear(FEATURES, VOCABULARY, key=keys[-2])

    def layers(self, x, segment_ids):
        same = segment_ids[:, None] == segment_ids
        mask = same & jnp.tri(len(x), dtype=bool)
        for block in self.blocks:
            x = block(x, mask)
        return x

    def __call__(self, tokens, segment_ids):
        x = self.layers(jax.vmap(self.embedding)(tokens), segment_ids)
        return jax.vmap(self.head)(x)


class RingDecoder(Decoder):
    """Passes segment ids where the masks were."""

    def layers(self, x, segment_ids):
        for block in self.blocks:
            x = block(x, segment_ids)
        return x


def loss(model, batch, spmd_axis_name):
    tokens, ids = batch["tokens"], batch["segment_ids"]
    logits = jax.vmap(model, spmd_axis_name=spmd_axis_name)(tokens, ids)[:, :-1]
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
    counted = (ids[:, 1:] > 0) & (ids[:, 1:] == ids[:, :-1])
    return -jnp.sum(log_probs * counted) / jnp.sum(counted)


def train(model, batch, spmd_axis_name=None):
    @eqx.filter_jit
    def step(model):
        value, gradients = eqx.filter_value_and_grad(loss)(model, batch, spmd_axis_name)
        return value, eqx.apply_updates(model, jax.tree.map(lambda g: -0.3 * g, gradients))

    arrays = partial(eqx.filter, filter_spec=eqx.is_array)
    before, losses = named_leaves(arrays(model)), []
    for _ in range(STEPS):
        value, model = step(model)
        losses.append(float(value))
    return losses, before, named_leaves(arrays(model))


def unpatched():
    return train(Decoder(jax.random.key(0)), BATCH)


def patched():
    model = RingDecoder(jax.random.key(0), RingAttention)
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    model = eqx.filter_shard(model, NamedSharding(mesh, P()))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data", "seq")))
    with jax.set_mesh(mesh):
        return train(model, batch, spmd_axis_name="data")


if __name__ == "__main__":
    compare(f"Equinox {eqx.__version__}", unpatched, patched)
