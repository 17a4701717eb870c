"""A mixture of experts, and its formula: each expert on all tokens, masked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from meshes import random_like

from burst_jax.layers.lora import set_adapter
from burst_jax.models import (
    DecoderConfig,
    Experts,
    MixtureOfExperts,
)

B, T, D, M = 2, 13, 16, 24
CONFIG = DecoderConfig(
    embed_dim=D, mlp_dim=M, feed_forward=MixtureOfExperts, experts=Experts(5, 2), remat="none"
)
X, COTANGENT = np.random.default_rng(7).standard_normal((2, B, T, D))
PRESENT = np.ones((B, T), np.int32)
PRESENT[0, 9:], PRESENT[1, 4] = 0, 0


def layer_of(config):
    """A layer with weights that are not 0: drawn by NumPy, without a program for each."""

    def make():
        init = nnx.initializers.lecun_normal()
        layer = MixtureOfExperts(config, out_init=init, rngs=nnx.Rngs(0))
        if config.lora is not None:
            a, b = jnp.zeros((D, 2)), jnp.zeros((2, config.experts.count))
            set_adapter(layer.router, a, b, config.lora.scale)
        return layer

    graphdef, shapes = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, random_like(shapes, 0, scale=1 / 4))


def formula(weights, x, config, present):
    """The output, and the sums over tokens, from each expert on all tokens."""
    experts, xs = config.experts, x.reshape(-1, x.shape[-1])
    keep = present.reshape(-1, 1) != 0
    router = weights["router"]
    logits = xs @ router["kernel"] + router.get("bias", 0)
    if config.lora is not None:
        logits = logits + config.lora.scale * xs @ router["kernel_lora_a"] @ router["kernel_lora_b"]
    scores = jax.nn.softmax(logits) if experts.score == "softmax" else jax.nn.sigmoid(logits)
    choice = jax.lax.stop_gradient(logits)
    if experts.choice_bias or experts.groups > 1:
        biased = jax.lax.stop_gradient(scores + weights.get("choice_bias", 0))
        groups = biased.reshape(len(xs), experts.groups, -1)
        best = jnp.sort(groups, -1)[:, :, -2:].sum(-1)
        kept = best >= jnp.sort(best, -1)[:, [-experts.groups_per_token]]
        choice = jnp.where(kept[:, :, None], groups, -1e9).reshape(choice.shape)
    chosen = choice >= jnp.sort(choice, -1)[:, [-experts.per_token]]
    chosen = chosen & keep
    of_experts = jnp.where(chosen, scores, 0)
    if experts.normalize:
        of_experts = of_experts / jnp.maximum(of_experts.sum(-1, keepdims=True), 1e-9)
    of_experts = experts.scale * of_experts

    def mlp(part, x, clamp=None):
        """Of all experts, whose kernels are stacked, or of the shared one."""

        def linear(name, x):
            return x @ part[name]["kernel"] + part[name].get("bias", jnp.zeros(1))[..., None, :]

        gate, up = linear("gate", x), linear("up", x)
        if clamp is None:
            return linear("down", gate / (1 + jnp.exp(-gate)) * up)
        gate = jnp.where(gate > clamp, clamp, gate)
        up = jnp.where(jnp.abs(up) > clamp, clamp * jnp.sign(up), up)
        return linear("down", gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1))

    out = jnp.einsum("te,etd->td", of_experts, mlp(weights, xs, experts.clamp))
    if "shared" in weights:
        shared = mlp(weights["shared"], xs)
        if "shared_gate" in weights:
            shared = shared / (1 + jnp.exp(-xs @ weights["shared_gate"]["kernel"]))
        out = out + shared
    normalized = scores / scores.sum(-1, keepdims=True)
    z = jnp.log(jnp.exp(logits).sum(-1, keepdims=True)) ** 2
    counts = chosen.sum(0).astype(x.dtype)
    sums = counts, jnp.where(keep, normalized, 0).sum(0), jnp.where(keep, z, 0).sum()
    return out.reshape(x.shape), sums
