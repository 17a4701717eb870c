"""Attention sinks and prefixes in the layers and in the decoder.

tests/models/test_hf_models.py compares gpt-oss, whose layers have sinks, YaRN and windows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from implementations import quick_jit
from meshes import assert_close, make_mesh, mesh_of, random_like
from split_runs import rules_of

import burst_jax
from burst_jax.models import (
    Decoder,
    DecoderConfig,
    DynamicRope,
    LayerKind,
    abstract_decoder,
    save,
)

D, N = 48, 8

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
    return decoders.with_drawn_weights(CONFIG, mesh=make_mesh())


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

    def initialized():
        return nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh()).layers.attention)

    sinks = nnx.to_pure_dict(quick_jit(initialized)())["sinks"]
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
