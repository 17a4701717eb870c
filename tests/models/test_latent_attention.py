"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) on a ring.

Queries and keys have 192 features, 64 of them rotated, and values 128, as in DeepSeek-V3.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
from implementations import quick_jit
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of, relative_rms

import burst_jax

B, T, D, N = 2, 64, 48, 4
NOPE, ROPE, VALUE = 128, 64, 128
Q_RANK, KV_RANK = 24, 16
THETA, EPSILON = 10000.0, 1e-6
SHAPES = {
    "q_a": (D, Q_RANK),
    "q_a_norm": (Q_RANK,),
    "q_b": (Q_RANK, N, NOPE + ROPE),
    # One rotated part of the keys, which all heads share.
    "kv_a": (D, KV_RANK + ROPE),
    "kv_a_norm": (KV_RANK,),
    "kv_b": (KV_RANK, N, NOPE + VALUE),
    "o": (N, VALUE, D),
}


def latent_attention(weights, x, positions, product):
    """The module; ``product(query, key, value)`` is its attention, ``[B, T, N, VALUE]``."""
    norm = functools.partial(plain_model.rms_norm, epsilon=EPSILON)
    query = norm(x @ weights["q_a"], weights["q_a_norm"])
    query = jnp.einsum("btr,rnh->btnh", query, weights["q_b"])
    compressed = x @ weights["kv_a"]
    latent = norm(compressed[..., :KV_RANK], weights["kv_a_norm"])
    key_value = jnp.einsum("btr,rnh->btnh", latent, weights["kv_b"])
    key, value = key_value[..., :NOPE], key_value[..., NOPE:]
    rotated_key = _rotate(compressed[:, :, None, KV_RANK:], positions)
    rotated_key = jnp.broadcast_to(rotated_key, (*key.shape[:3], ROPE))
    query = jnp.concatenate([query[..., :NOPE], _rotate(query[..., NOPE:], positions)], -1)
    key = jnp.concatenate([key, rotated_key], -1)
    return jnp.einsum("btnh,nhd->btd", product(query, key, value), weights["o"])


def _rotate(x, positions):
    """RoPE; features 2 i and 2 i + 1 are one complex number."""
    angle = positions[:, None, None] * THETA ** (-2 * np.arange(ROPE // 2) / ROPE)
    cos, sin = (f(angle).astype(x.dtype) for f in (np.cos, np.sin))
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def dense_product(query, key, value):
    """Causal softmax attention, in the precision of its arguments."""
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(NOPE + ROPE)
    logits = jnp.where(np.tril(np.ones((T, T), bool)), logits, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, -1), value)


def test_module_and_gradients_are_those_of_dense_attention_in_float64():
    rng, ring, layout = np.random.default_rng(0), 4, "zigzag"
    weights = {name: rng.normal(size=s) * s[0] ** -0.5 for name, s in SHAPES.items()}
    x, cotangent = rng.normal(size=(2, B, T, D))
    positions = np.arange(T)

    def gradients(product, positions, weights, x, cotangent):
        run = functools.partial(latent_attention, positions=positions, product=product)
        out, vjp = jax.vjp(run, weights, x)
        return out, *vjp(cotangent)

    with jax.enable_x64(True):
        arguments = jax.tree.map(jnp.asarray, (weights, x, cotangent))
        truth = jax.device_get(
            quick_jit(functools.partial(gradients, dense_product, positions))(*arguments)
        )

    mesh = mesh_of(seq=ring)
    attention = functools.partial(
        burst_jax.burst_attention, mesh=mesh, layout=layout, is_causal=True
    )
    weights, x, cotangent = jax.tree.map(lambda a: a.astype(np.float32), (weights, x, cotangent))
    x, cotangent = (
        jax.device_put(
            burst_jax.to_layout(a, layout, ring), jax.NamedSharding(mesh, P(None, "seq"))
        )
        for a in (x, cotangent)
    )
    in_layout = burst_jax.positions(layout, T, ring)
    out, of_weights, of_x = quick_jit(functools.partial(gradients, attention, in_layout))(
        weights, x, cotangent
    )
    out, of_x = (burst_jax.from_layout(np.asarray(a), layout, ring) for a in (out, of_x))
    assert relative_rms(out, truth[0]) < 1e-5
    assert_close(of_weights, truth[1], 1e-5)
    assert relative_rms(of_x, truth[2]) < 1e-5
