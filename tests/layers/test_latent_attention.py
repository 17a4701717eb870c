"""Latent attention against its formula, in float64: keys and values from a small latent vector."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import nnx
from implementations import quick_jit
from meshes import assert_close, mesh_of, random_like

import burst_jax
from burst_jax import LatentAttention, from_layout, to_layout
from burst_jax.models import DecoderConfig, DeltaNet, Latent, LayerKind, Rope
from burst_jax.models.experts import Experts, MixtureOfExperts

B, T, D, N, H, HV, R, S = 2, 24, 16, 4, 10, 6, 12, 3
SEGMENTS = np.ones((B, T), np.int32)
SEGMENTS[0, 9:], SEGMENTS[1, 17:] = 2, 0
X, COTANGENT = np.random.default_rng(0).standard_normal((2, B, T, D)).astype(np.float32)
COTANGENT[SEGMENTS == 0] = 0


def formula(params, x):
    """The layer, with one softmax over all keys."""
    kernel = {name: each["kernel"] for name, each in params.items() if "kernel" in each}
    compressed = jnp.tensordot(x, kernel["latent"], 1)
    latent = plain_model.rms_norm(compressed[..., :R], params["latent_norm"]["scale"], 1e-4)
    query, own, value = (
        jnp.einsum("btr,rnh->btnh", y, kernel[name])
        for name, y in (("query", x), ("key", latent), ("value", latent))
    )
    keep = plain_model.causal(SEGMENTS)[:, None]
    logits = jnp.einsum("btnh,bsnh->bnts", query[..., : H - S], own)
    logits += jnp.einsum("btnh,bsh->bnts", query[..., H - S :], compressed[..., R:])
    weights = jax.nn.softmax(jnp.where(keep, logits / np.sqrt(H), -1e30), -1)
    out = jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights, 0), value)
    return jnp.einsum("btnh,nhd->btd", out, kernel["out"])


def test_values_and_gradients_are_the_formula():
    mesh = mesh_of(seq=2, tensor=2)
    layer = LatentAttention(
        D, N, head_dim=H, value_head_dim=HV, latent_dim=R, shared_dim=S, latent_epsilon=1e-4,
        rngs=nnx.Rngs(0), mesh=mesh, tensor_axis="tensor", layout="zigzag", is_causal=True,
        implementation="xla",
    )  # fmt: skip
    graphdef, state = nnx.split(layer)
    state = jax.tree.map(lambda x: x / 3, random_like(state, 1))
    segments = jnp.asarray(to_layout(SEGMENTS, "zigzag", 2))

    @quick_jit
    def run(state, x, cotangent):
        def natural(state, x):
            out = nnx.merge(graphdef, state)(to_layout(x, "zigzag", 2), None, segments)
            return from_layout(out, "zigzag", 2)

        out, vjp = jax.vjp(natural, state, x)
        return out, *vjp(cotangent)

    out, dstate, dx = run(state, X, COTANGENT)
    want, gradients = plain_model.gradients(formula, COTANGENT, nnx.to_pure_dict(state), X)
    valid = SEGMENTS != 0
    found = np.asarray(out)[valid], nnx.to_pure_dict(dstate), dx
    assert_close(found, (want[valid], *gradients), 1e-5)


FIELDS = {"num_kv_heads": 4, "head_dim": 12, "qk_norm": False, "latent": Latent(8, 4, 6)}
DENSE = {"layer_pattern": (LayerKind(dense=True), LayerKind())}
MIXTURE = {"feed_forward": MixtureOfExperts, "experts": Experts(4, 2)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"latent": 8}, ValueError, "latent is 8: use a Latent, or None"),
        ({"head_dim": 4}, ValueError, "shared_dim is 4, head_dim 4: a key has the shared"),
        ({"num_kv_heads": 2}, ValueError, "num_kv_heads is 2, num_heads 4, and latent is given"),
        ({"qk_norm": True}, NotImplementedError, "qk_norm is True, and latent is given"),
        ({"qkv_bias": True}, NotImplementedError, "qkv_bias is True, and latent is given"),
        ({"rope": Rope(1e4)}, NotImplementedError, "rope is Rope.*, and latent is given"),
        ({"delta_net": DeltaNet()}, ValueError, "latent is Latent.*, and no layer has softmax"),
        (DENSE | MIXTURE, ValueError, "dense_dim is None, and 2 of the 4 layers .* are dense"),
        ({"dense_dim": 8}, ValueError, "dense_dim is 8, and 0 of the 4 layers .* are dense"),
        (DENSE | {"dense_dim": 8}, ValueError, "experts is None, and 2 of the 4 layers"),
    ],
)
def test_configs_that_do_not_fit(changes, error, message):
    with pytest.raises(error, match=message):
        DecoderConfig(**FIELDS | changes)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="dim is 0"):
        Latent(0, 4, 6)
    with pytest.raises(ValueError, match="norm_epsilon is -1"):
        Latent(8, 4, 6, norm_epsilon=-1)
    with pytest.raises(ValueError, match="dense is 1: it must be True or False"):
        LayerKind(dense=1)  # pyrefly: ignore
    assert LayerKind(dense=np.True_).stack == LayerKind(dense=True).stack  # pyrefly: ignore
    with pytest.raises(ValueError, match="groups is 3, count 8: each group needs"):
        Experts(8, 2, groups=3)
    with pytest.raises(ValueError, match="per_token is 5, and 2 of 4 groups have 4 experts"):
        Experts(8, 5, groups=4, groups_per_token=2)
    with pytest.raises(ValueError, match="choice_bias is 'no': it must be True or False"):
        Experts(8, 2, choice_bias="no")  # pyrefly: ignore
    for name in ("num_kv_heads", "qk_norm", "rope_theta"):
        options: Any = {name: 1}
        with pytest.raises(TypeError, match=f"LatentAttention got an unknown option '{name}'"):
            burst_jax.LatentAttention(
                D, N, head_dim=H, value_head_dim=HV, latent_dim=R, shared_dim=S, rngs=nnx.Rngs(0),
                **options,
            )  # fmt: skip
    with pytest.raises(ValueError, match="latent_epsilon is 0"):
        burst_jax.LatentAttention(
            D, N, head_dim=H, value_head_dim=HV, latent_dim=R, shared_dim=S, latent_epsilon=0,
            rngs=nnx.Rngs(0),
        )  # fmt: skip
