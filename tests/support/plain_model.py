"""The layers by their formulas, on one device and in the precision of what they are given.

No code shared with the library: complex numbers for RoPE, one softmax over all keys. Parameters are
the library's, as nested dicts of arrays.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from implementations import quick_jit


def float64(params):
    """A dict of nnx's parameters as NumPy float64."""
    return jax.tree.map(lambda x: np.asarray(x[...], np.float64), params)


def gradients(function, cotangent, *arguments):
    """``(out, gradients of the arguments)`` of a function, in float64, as NumPy arrays."""
    # By NumPy: JAX would compile a conversion of each shape.
    arguments, cotangent = jax.tree.map(lambda x: np.asarray(x, np.float64), (arguments, cotangent))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):

        @quick_jit
        def run(arguments, cotangent):
            out, vjp = jax.vjp(function, *arguments)
            return out, vjp(cotangent)

        return jax.device_get(run(arguments, cotangent))


def causal(segments):
    """Whether a query attends to a key, ``[B, T, T]``: causal, within segments; 0 is padding."""
    keep = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] != 0)
    return keep & np.tril(np.ones((segments.shape[1],) * 2, bool))


def rms_norm(x, scale, epsilon=1e-6):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * scale


def rotate(x, positions, theta):
    """RoPE of ``[B, T, heads, H]``: feature i and feature H / 2 + i are one complex number."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    pairs = jax.lax.complex(x[..., :half], x[..., half:]) * jnp.exp(1j * angle)
    return jnp.concatenate([pairs.real, pairs.imag], -1)


def attention_layer(params, x, positions, keep, theta, soft_cap=None):
    """Projections, norms of query and key if there are parameters for them, RoPE, softmax, output.

    ``keep``: bool ``[B, T, T]``; theta None is no RoPE.
    """
    kernel = {name: params[name]["kernel"] for name in ("query", "key", "value", "out")}
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, kernel[name]) for name in ("query", "key", "value"))
    if "query_norm" in params:
        q = rms_norm(q, params["query_norm"]["scale"])
        k = rms_norm(k, params["key_norm"]["scale"])
    if theta is not None:
        q, k = rotate(q, positions, theta), rotate(k, positions, theta)
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    weights = jax.nn.softmax(jnp.where(keep[:, None], logits, -1e30), -1)
    weights = jnp.where(keep[:, None], weights, 0.0)
    return jnp.einsum("bnts,bsnh,nhd->btd", weights, v, kernel["out"])


def decoder(params, tokens, positions, keep, theta, soft_cap=None):
    """Hidden states after the final norm; ``params["layers"]`` are stacked along a first axis."""

    def layer(x, params):
        normed = rms_norm(x, params["attention_norm"]["scale"])
        x = x + attention_layer(params["attention"], normed, positions, keep, theta, soft_cap)
        normed = rms_norm(x, params["mlp_norm"]["scale"])
        up, gate = (normed @ params["mlp"][name]["kernel"] for name in ("up", "gate"))
        return x + (gate / (1 + jnp.exp(-gate)) * up) @ params["mlp"]["down"]["kernel"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    return rms_norm(x, params["final_norm"]["scale"])


ACTIVATIONS = {
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "gelu": lambda x: x * jax.scipy.stats.norm.cdf(x),
    "gelu_tanh": lambda x: x / 2 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def cross_entropy(logits, targets, weights):
    """The weighted sum of ``logsumexp(logits) - logits[target]``, all logits at once."""
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return -jnp.sum(weights * picked)
