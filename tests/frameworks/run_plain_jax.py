"""A decoder in plain JAX, ``jax.nn.dot_product_attention``, and the documentation's patch."""

from functools import partial

import jax
import jax.numpy as jnp
from comparison import LENGTH, STEPS, compare, named_leaves, packed_batch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_jax_patch import attend, ring_layers

VOCABULARY, FEATURES, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 32, 4, 2, 8, 2
BATCH = packed_batch(4, VOCABULARY)


def init(key):
    shapes = {
        "embedding": (VOCABULARY, FEATURES),
        "head": (FEATURES, VOCABULARY),
        "layers": {
            "q": (LAYERS, FEATURES, HEADS, HEAD_DIM),
            "k": (LAYERS, FEATURES, KV_HEADS, HEAD_DIM),
            "v": (LAYERS, FEATURES, KV_HEADS, HEAD_DIM),
            "out": (LAYERS, HEADS, HEAD_DIM, FEATURES),
            "up": (LAYERS, FEATURES, 4 * FEATURES),
            "down": (LAYERS, 4 * FEATURES, FEATURES),
        },
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten(
        [0.3 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)]
    )


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rope(x, positions):
    angles = positions[..., None, None] * 100.0 ** -jnp.linspace(0, 1, HEAD_DIM // 2)
    first, second = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def dense(query, key, value, positions, segment_ids):
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=same[:, None], is_causal=True)


def layers(x, positions, segment_ids, weights, attention):
    def layer(x, w):
        q, k, v = (jnp.einsum("btd,dnh->btnh", norm(x), w[name]) for name in "qkv")
        out = attention(rope(q, positions), rope(k, positions), v, positions, segment_ids)
        x = x + jnp.einsum("btnh,nhd->btd", out, w["out"])
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, x, weights)[0]


def loss(params, batch, layers):
    tokens, ids = batch["tokens"], batch["segment_ids"]
    x = layers(params["embedding"][tokens], batch["positions"], ids, params["layers"])
    log_probs = jax.nn.log_softmax(norm(x) @ params["head"])[:, :-1]
    log_probs = jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0]
    counted = (ids[:, 1:] > 0) & (ids[:, 1:] == ids[:, :-1])
    return -jnp.sum(log_probs * counted) / jnp.sum(counted)


def train(layers, params, batch):
    @jax.jit
    def step(params):
        value, gradients = jax.value_and_grad(loss)(params, batch, layers)
        return value, jax.tree.map(lambda w, g: w - 0.3 * g, params, gradients)

    before, losses = named_leaves(params), []
    for _ in range(STEPS):
        value, params = step(params)
        losses.append(float(value))
    return losses, before, named_leaves(params)


def unpatched():
    return train(partial(layers, attention=dense), init(jax.random.key(0)), BATCH)


def patched():
    mesh = jax.make_mesh((1, 4, 2), ("data", "seq", "tensor"), axis_types=(AxisType.Auto,) * 3)
    params = jax.device_put(init(jax.random.key(0)), NamedSharding(mesh, P()))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data", "seq")))
    with jax.set_mesh(mesh):
        return train(ring_layers(partial(layers, attention=attend), mesh), params, batch)


if __name__ == "__main__":
    assert LENGTH % 4 == 0
    compare("plain JAX", unpatched, patched)
