"""A decoder of levanter's grug functions, like marin's template, and the documentation's patch."""

import importlib.metadata

import grug_patch
import jax
import jax.numpy as jnp
import numpy as np
from comparison import LENGTH, STEPS, compare, named_leaves, packed_batch
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P
from levanter.grug.attention import AttentionMask, RotaryConfig, apply_rotary_embedding, attention
from levanter.grug.loss import fused_linear_softmax_cross_entropy_loss

VOCABULARY, FEATURES, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 32, 4, 2, 8, 2
TOKENS = P("data", "context")


def init(key):
    shapes = {
        "embedding": (VOCABULARY, FEATURES),
        "head": (FEATURES, VOCABULARY),
        **{
            f"{name}{i}": shape
            for i in range(LAYERS)
            for name, shape in (
                ("q", (FEATURES, HEADS, HEAD_DIM)),
                ("k", (FEATURES, KV_HEADS, HEAD_DIM)),
                ("v", (FEATURES, KV_HEADS, HEAD_DIM)),
                ("out", (HEADS, HEAD_DIM, FEATURES)),
                ("up", (FEATURES, 4 * FEATURES)),
                ("down", (4 * FEATURES, FEATURES)),
            )
        },
    }
    keys = jax.random.split(key, len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in pairs}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss(params, tokens, ids, attend):
    """Shifts inside, as grug's does; the layers alternate between a window and the whole length."""
    x = params["embedding"].at[reshard(tokens, TOKENS)].get(out_sharding=P(*TOKENS, None))
    for i in range(LAYERS):
        heads = P(*TOKENS, "model", None)
        q, k, v = (
            jnp.einsum("btd,dnh->btnh", norm(x), params[f"{name}{i}"], out_sharding=heads)
            for name in "qkv"
        )
        q, k = apply_rotary_embedding(
            q, k, seq_len=LENGTH, head_dim=HEAD_DIM, rope=RotaryConfig(theta=100.0)
        )
        mask = AttentionMask.causal(sliding_window=12 if i % 2 else None).with_segment_ids(
            reshard(ids, TOKENS)
        )
        rows = P(*TOKENS, None)
        out = attend(q, k, v, mask)
        x = x + jnp.einsum("btnh,nhd->btd", out, params[f"out{i}"], out_sharding=rows)
        h = jax.nn.gelu(jnp.einsum("btd,df->btf", norm(x), params[f"up{i}"], out_sharding=rows))
        x = x + jnp.einsum("btf,fd->btd", h, params[f"down{i}"], out_sharding=rows)
    # As in the template, the target of the last token is 0, without a weight.
    labels = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
    following = jnp.concatenate([ids[:, 1:], jnp.full_like(ids[:, :1], -1)], axis=1)
    weight = reshard((following == ids) & (ids >= 0), TOKENS).astype(jnp.float32)
    return fused_linear_softmax_cross_entropy_loss(
        norm(x), params["head"], reshard(labels, TOKENS), weight=weight, reduction="mean",
        implementation="reference",
    )  # fmt: skip


def train(devices, attend):
    shape = (devices // 4, 4, 1) if devices > 1 else (1, 1, 1)
    mesh = jax.make_mesh(
        shape, ("data", "context", "model"), axis_types=(AxisType.Explicit,) * 3,
        devices=jax.devices()[:devices],
    )  # fmt: skip
    data = packed_batch(4, VOCABULARY)
    with jax.set_mesh(mesh):
        tokens = jax.device_put(data["tokens"], jax.NamedSharding(mesh, P("data")))
        ids = jax.device_put(data["segment_ids"] - 1, jax.NamedSharding(mesh, P("data")))
        params = jax.device_put(init(jax.random.key(0)), jax.NamedSharding(mesh, P()))

        @jax.jit
        def step(params):
            value, gradients = jax.value_and_grad(loss)(params, tokens, ids, attend)
            gradients = jax.tree.map(lambda g: reshard(g, P()), gradients)
            return value, jax.tree.map(lambda w, g: w - 0.3 * g, params, gradients)

        before, losses = named_leaves(params), []
        for _ in range(STEPS):
            value, params = step(params)
            losses.append(float(np.asarray(value)))
        return losses, before, named_leaves(params)


def unpatched():
    return train(1, attention)


def patched():
    return train(8, grug_patch.attention)


if __name__ == "__main__":
    compare(f"grug, levanter {importlib.metadata.version('marin-levanter')}", unpatched, patched)
