"""The layers by their formulas, on one device and in the precision of what they are given.

No code shared with the library: complex numbers for RoPE, one softmax over all keys. Parameters are
the library's, as nested dicts of arrays.
"""

from __future__ import annotations

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_jaxprs


def float64(params):
    """A dict of nnx's parameters as NumPy float64."""
    return jax.tree.map(lambda x: np.asarray(x[...], np.float64), params)


def gradients(function, cotangent, *arguments):
    """``(out, gradients of the arguments)`` of a function, in float64, computed by NumPy."""
    return traced_gradients(function, cotangent, *arguments)(cotangent, *arguments)


def traced_gradients(function, cotangent, *arguments):
    """:func:`gradients` of a function for any arguments of these shapes: it is traced once."""

    def wide(*trees):
        return jax.tree.map(lambda x: np.asarray(x, np.float64), trees)

    def run(cotangent, *arguments):
        out, vjp = jax.vjp(function, *arguments)
        return out, vjp(cotangent)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        traced = numpy_jaxprs.traced(run, *wide(cotangent, *arguments))

    def evaluated(*given):
        with jax.enable_x64(True):  # For what NumPy has no rule for.
            return traced(*wide(*given))

    return evaluated


def causal(segments):
    """Whether a query attends to a key, ``[B, T, T]``: causal, within segments; 0 is padding."""
    keep = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] != 0)
    return keep & np.tril(np.ones((segments.shape[1],) * 2, bool))


def rms_norm(x, scale, epsilon=1e-6):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * scale


def joint_rms_norm(x, scales, epsilon=1e-6):
    """Of the features of all heads ``[B, T, heads, H]`` of a token."""
    flat = x.reshape(*x.shape[:2], -1)
    return rms_norm(flat, scales.reshape(-1), epsilon).reshape(x.shape)


def rotate(x, positions, theta, fraction=1.0):
    """RoPE of ``[B, T, heads, H]``: feature i and feature R / 2 + i are one complex number.

    R is the number of features that are rotated, the others follow them.
    """
    half = int(x.shape[-1] * fraction) // 2
    angle = positions[:, :, None, None] * theta ** (-np.arange(half) / half)
    pairs = jax.lax.complex(x[..., :half], x[..., half : 2 * half]) * jnp.exp(1j * angle)
    return jnp.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], -1)


def attention_layer(params, x, positions, keep, theta, soft_cap=None, fraction=1.0):
    """Projections, norms of query and key if there are parameters for them, RoPE, softmax, output.

    ``keep``: bool ``[B, T, T]``; theta None is no RoPE. The output has a gate if there are
    parameters for it.
    """
    kernel = {name: params[name]["kernel"] for name in ("query", "key", "value", "out")}
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, kernel[name]) for name in ("query", "key", "value"))
    if "scales" in params.get("query_norm", ()):
        q = joint_rms_norm(q, params["query_norm"]["scales"])
        k = joint_rms_norm(k, params["key_norm"]["scales"])
    elif "query_norm" in params:
        q = rms_norm(q, params["query_norm"]["scale"])
        k = rms_norm(k, params["key_norm"]["scale"])
    if theta is not None:
        q, k = (rotate(y, positions, theta, fraction) for y in (q, k))
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    weights = jax.nn.softmax(jnp.where(keep[:, None], logits, -1e30), -1)
    weights = jnp.where(keep[:, None], weights, 0.0)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v)
    if "output_gate" in params:
        out = out / (1 + jnp.exp(-jnp.tensordot(x, params["output_gate"]["kernel"], 1)))
    return jnp.einsum("btnh,nhd->btd", out, kernel["out"])


def gated_delta_net(params, x, segments, largest_beta=1.0, epsilon=1e-6):
    """Gated DeltaNet, token by token; segment 0 is padding, which changes nothing.

    Kimi Delta Attention if there are parameters for it.
    """
    valid, same = segments != 0, segments[:, :, None] == segments[:, None]
    # Whether all tokens from s to t are of one document, or padding.
    gaps = np.cumsum(np.diff(_last_ids(segments), axis=1, prepend=0) != 0, axis=1)
    reaches = same & (gaps[:, :, None] == gaps[:, None]) & valid[:, :, None] & valid[:, None]

    def convolved(name):
        y, taps = x_of(name), params[f"{name}_conv"]
        total = 0
        for tap in range(len(taps)):
            back = len(taps) - 1 - tap
            moved = jnp.pad(y, [(0, 0), (back, 0), (0, 0), (0, 0)])[:, : y.shape[1]]
            reads = np.zeros(segments.shape, bool)
            reads[:, back:] = np.diagonal(reaches, -back, axis1=1, axis2=2)
            total += jnp.where(reads[..., None, None], moved, 0) * taps[tap]
        return total / (1 + jnp.exp(-total))

    def x_of(name):
        if name in params:
            return jnp.tensordot(x, params[name]["kernel"], 1)
        first, second = (params[f"{name}_{part}"]["kernel"] for part in "ab")
        return jnp.tensordot(jnp.tensordot(x, first, 1), second, 1)

    q, k, v = (convolved(name) for name in ("query", "key", "value"))
    q, k = (y / jnp.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    q, k = (jnp.repeat(y, v.shape[2] // y.shape[2], axis=2) for y in (q, k))
    beta = largest_beta / (1 + jnp.exp(-x_of("beta")))
    # One row of the state has one decay, or all rows have the same.
    steps = jnp.log1p(jnp.exp(x_of("decay") + params["dt_bias"])).reshape(*beta.shape, -1)
    decay = jnp.exp(-jnp.exp(params["A_log"])[:, None] * steps)
    begins = np.diff(gaps, axis=1, prepend=0) != 0

    def step(state, token):
        q, k, v, decay, beta, begins, valid = token
        old = jnp.where(begins[:, None, None, None], 0, decay[..., None] * state)
        delta = beta[..., None] * (v - jnp.einsum("bnk,bnkv->bnv", k, old))
        new = jnp.where(valid[:, None, None, None], old + k[..., None] * delta[..., None, :], state)
        return new, jnp.einsum("bnk,bnkv->bnv", q, new) * valid[:, None, None]

    tokens = [jnp.moveaxis(y, 1, 0) for y in (q, k, v, decay, beta, begins, valid)]
    first = jnp.zeros((*v.shape[:1], *k.shape[2:], v.shape[3]), v.dtype)
    out = jnp.moveaxis(jax.lax.scan(step, first, tokens)[1], 0, 1) / np.sqrt(k.shape[-1])
    gate = x_of("output_gate")
    gate = (gate if "output_gate" in params else 1) / (1 + jnp.exp(-gate))
    out = rms_norm(out, params["norm"]["scale"], epsilon) * gate
    return jnp.einsum("btnh,nhd->btd", out, params["out"]["kernel"])


def _last_ids(segments):
    """Ids in which padding has that of the token before it, or at the start of the first one."""
    filled = np.array(segments)
    for row in filled:
        tokens = row[row != 0]
        last = tokens[0] if len(tokens) else 0
        for t in range(len(row)):
            last = row[t] = row[t] or last
    return filled


def gated_mlp(params, x):
    up, gate = (x @ params[name]["kernel"] for name in ("up", "gate"))
    return (gate / (1 + jnp.exp(-gate)) * up) @ params["down"]["kernel"]


def decoder(
    params, tokens, positions, keep, theta, soft_cap=None, segments=None, stacks=None,
    fraction=1.0, delta_net=(), feed_forward=gated_mlp,
):  # fmt: skip
    """Hidden states after the final norm.

    A layer has the norms before and after attention and MLP that there are parameters for.

    ``stacks``: of each layer the key of ``params`` with its weights, which are stacked along a
    first axis; None: all layers are in "layers". ``fraction``: of the head features, for RoPE.
    ``delta_net``: further arguments of :func:`gated_delta_net`. ``feed_forward``: of the weights
    "mlp" and the tokens after the norm.
    """

    def layer(x, params):
        def norm(name, y):
            return rms_norm(y, params[name]["scale"]) if name in params else y

        normed, mixer = norm("attention_norm", x), params["attention"]
        if "A_log" in mixer:
            mixed = gated_delta_net(mixer, normed, segments, *delta_net)
        else:
            mixed = attention_layer(mixer, normed, positions, keep, theta, soft_cap, fraction)
        x = x + norm("post_attention_norm", mixed)
        out = feed_forward(params["mlp"], norm("mlp_norm", x))
        return x + norm("post_mlp_norm", out), None

    x, used = params["embedding"][tokens], collections.Counter()
    if stacks is None:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    for stack, group in itertools.groupby(stacks or ()):
        stop = used[stack] + len(list(group))
        weights = jax.tree.map(lambda w, start=used[stack], stop=stop: w[start:stop], params[stack])
        x, _ = jax.lax.scan(layer, x, weights)
        used[stack] = stop
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
