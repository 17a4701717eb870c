"""Attention sinks and prefixes in the layers and in the decoder.

gpt-oss has sinks: the attention module of transformers (``GptOssAttention`` with its eager
attention) stands below by its formulas, in float64. transformers 5.23 itself gives the same output
and gradients to 2e-6; it rounds cosines and sines to float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import nnx
from implementations import quick_jit
from meshes import assert_close, make_mesh, mesh_of, random_like
from split_runs import rules_of

import burst_jax
from burst_jax.models import (
    DecoderConfig,
    DynamicRope,
    LayerKind,
    YarnRope,
    abstract_decoder,
    save,
)

# RoPE of gpt-oss's config.json.
YARN = YarnRope(150000.0, factor=32.0, old_positions=4096, truncate=False)
B, T, D, N, K, H = 2, 60, 48, 8, 2, 16
WINDOW = 24


def gpt_oss_attention(params, x):
    """One layer's attention; a sliding layer's query sees ``WINDOW`` keys."""
    q, k, v = (
        jnp.einsum("btd,dnh->btnh", x, params[name]["kernel"]) + params[name]["bias"]
        for name in ("query", "key", "value")
    )
    q, k = _rotate(q), _rotate(k)
    k, v = (jnp.repeat(y, N // K, axis=2) for y in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    ahead = np.subtract.outer(np.arange(T), np.arange(T))
    logits = jnp.where((ahead >= 0) & (ahead < WINDOW), logits, -jnp.inf)
    # One more logit, without a value.
    column = jnp.broadcast_to(params["sinks"][None, :, None, None], (*logits.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, column], -1), -1)[..., :-1]
    out = jnp.einsum("bnts,bsnh->btnh", weights, v)
    return jnp.einsum("btnh,nhd->btd", out, params["out"]["kernel"]) + params["out"]["bias"]


def _rotate(x):
    """YaRN as ``_compute_yarn_parameters`` has it: frequencies on a ramp, larger cos and sin."""
    exponents = np.arange(0, H, 2) / H
    plain, stretched = 150000.0**-exponents, 150000.0**-exponents / 32.0

    def dimension(turns):
        return H * np.log(4096 / (turns * 2 * np.pi)) / (2 * np.log(150000.0))

    low, high = max(dimension(32.0), 0), min(dimension(1.0), H - 1)
    ramp = np.clip((np.arange(H // 2) - low) / (high - low), 0, 1)
    angle = np.arange(T)[:, None, None] * (stretched * ramp + plain * (1 - ramp))
    cos, sin = ((0.1 * np.log(32.0) + 1.0) * f(angle) for f in (np.cos, np.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@functools.partial(quick_jit, static_argnums=0)
def out_and_gradients(attention, params, x, cotangent):
    out, vjp = jax.vjp(attention, params, x)
    return out, *vjp(cotangent)


@pytest.mark.slow
def test_the_layer_is_the_attention_of_gpt_oss():
    """A sliding layer, on a ring of two devices."""
    layer = burst_jax.BurstAttention(
        D, N, num_kv_heads=K, head_dim=H, use_bias=True, sinks=True, rope_theta=YARN,
        mesh=make_mesh(seq=2), layout="zigzag", is_causal=True, rngs=nnx.Rngs(0),
        local_window_size=(WINDOW - 1, 0),
    )  # fmt: skip
    graphdef, state = nnx.split(layer, nnx.Param)
    # Biases and sinks as large as what they are added to.
    state = jax.tree.map(lambda w: random_like(w, 5) if w.ndim < 3 else w, state)
    x, cotangent = (random_like(jax.ShapeDtypeStruct((B, T, D), jnp.float32), s) for s in (1, 2))
    with jax.enable_x64(True):
        wide = plain_model.float64(nnx.to_pure_dict(state)), np.float64(x), np.float64(cotangent)
        truth = jax.device_get(out_and_gradients(gpt_oss_attention, *wide))
    positions = burst_jax.positions("zigzag", T, 2)
    x, cotangent = burst_jax.to_layout((x, cotangent), "zigzag", 2)

    def attention(state, x):
        return nnx.merge(graphdef, state)(x, positions)

    out, of_state, of_x = out_and_gradients(attention, state, x, cotangent)
    out, of_x = burst_jax.from_layout((out, of_x), "zigzag", 2)
    assert_close((out, nnx.to_pure_dict(of_state), of_x), truth, 1e-5)
    assert np.abs(np.asarray(out) - truth[0]).max() < 1e-4


CONFIG = DecoderConfig(
    vocab_size=40, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
    attention_sinks=True, layer_pattern=(LayerKind(window=12),),
)  # fmt: skip
ROWS = np.random.default_rng(0).integers(0, 40, (4, 32), np.int32)
SEGMENTS = np.ones((4, 32), np.int32)
SEGMENTS[0, 20:], SEGMENTS[3, 27:] = 2, 0
PREFIXES = np.array([7, 0, 32, 12], np.int32)


@functools.cache
def decoder() -> Any:
    return decoders.initialized(CONFIG, mesh=make_mesh())


def on_mesh(mesh, layout, **options):
    """The decoder with these weights, whose sinks are as large as what they are added to."""
    graphdef, _ = abstract_decoder(CONFIG, mesh=mesh, layout=layout, **options)
    weights = nnx.state(decoder())
    weights = jax.tree.map(lambda w: w + random_like(w, 1) if w.ndim == 2 else w, weights)
    weights = jax.device_put(weights, jax.NamedSharding(mesh, jax.P()))
    if "rules" in options:
        specs = nnx.merge(graphdef, weights).shardings().weight_specs(weights)
        weights = jax.tree.map(
            lambda w, spec: jax.device_put(w, jax.NamedSharding(mesh, spec)), weights, specs
        )
    return nnx.merge(graphdef, weights)


@pytest.mark.slow
def test_a_decoder_with_sinks_and_prefixes_equals_one_device():
    cotangent = random_like(jax.ShapeDtypeStruct((4, 32, 16), jnp.float32), 3)
    run = functools.partial(decoders.on_its_mesh, tokens=ROWS, segments=SEGMENTS)
    run = functools.partial(run, cotangent=cotangent, prefix_lengths=PREFIXES)
    one, mesh = on_mesh(make_mesh(), "contiguous"), mesh_of(seq=2, tensor=2)
    hidden, gradients = run(one)
    assert_close(run(on_mesh(mesh, "zigzag", rules=rules_of(mesh))), (hidden, gradients), 1e-5)
    assert (np.abs(gradients["layers"]["attention"]["sinks"]) > 1e-6).all()
    # Tokens before the last one of their row's prefix see more than without it; no prefix, no
    # change. Windows hide nothing of what comes later.
    without = quick_jit(nnx.merge(*nnx.split(one)))(ROWS, np.arange(32, dtype=np.int32), SEGMENTS)
    differs = (np.abs(hidden - without) > 1e-4).any(-1)
    assert differs[0, :6].all()
    assert not differs[1].any()


def test_sinks_are_float32_whatever_the_other_weights_are():
    config = dataclasses.replace(CONFIG, param_dtype=jnp.bfloat16)
    _, params = abstract_decoder(config, mesh=make_mesh())
    attention = nnx.to_pure_dict(params)["layers"]["attention"]
    assert attention["query"]["kernel"].dtype == jnp.bfloat16
    sinks = nnx.to_pure_dict(nnx.state(decoder()))["layers"]["attention"]["sinks"]
    assert attention["sinks"].dtype == sinks.dtype == jnp.float32
    assert attention["sinks"].shape == sinks.shape == (2, 4)
    assert 0.005 < np.std(sinks) < 0.04


def test_errors(tmp_path):
    model, at = decoder(), np.arange(32, dtype=np.int32)
    with pytest.raises(ValueError, match=r"prefix_lengths has shape \(1,\), tokens \(4, 32\)"):
        model(ROWS, at, prefix_lengths=PREFIXES[:1])
    with pytest.raises(ValueError, match="prefix_lengths has dtype float32: convert it to int32"):
        model(ROWS, at, prefix_lengths=PREFIXES.astype(np.float32))
    with pytest.raises(ValueError, match="prefix_lengths is a list: it must be an int32 array"):
        model(ROWS, at, prefix_lengths=[1, 2, 3, 4])
    with pytest.raises(NotImplementedError, match=r"no model family .*attention_sinks=True"):
        save(model, tmp_path, max_length=64)
    with pytest.raises(
        ValueError, match="does not accept sink_logits: sinks=True makes it a param"
    ):
        burst_jax.BurstAttention(D, N, rngs=nnx.Rngs(0), sink_logits=jnp.zeros(N, jnp.float32))
    with pytest.raises(NotImplementedError, match=r"rope_theta is DynamicRope.* pass it to attend"):
        burst_jax.BurstAttention(D, N, rngs=nnx.Rngs(0), rope_theta=DynamicRope())
