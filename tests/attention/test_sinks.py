"""Attention sinks and prefixes in the layers and in the decoder.

gpt-oss has sinks: the attention module of transformers (``GptOssAttention`` with its eager
attention) stands below by its formulas, in float64. transformers 5.23 itself gives the same output
and gradients to 2e-6; it rounds cosines and sines to float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from meshes import assert_close, make_mesh, mesh_of, random_like, relative_rms
from split_runs import rules_of

import burst_jax
from burst_jax.models import (
    Decoder,
    DecoderConfig,
    DynamicRope,
    LayerKind,
    YarnRope,
    abstract_decoder,
    add_lora,
    merge_lora,
    save,
)

# What config.json of gpt-oss says of its RoPE.
YARN = YarnRope(150000.0, factor=32.0, old_positions=4096, truncate=False)
B, T, D, N, K, H = 2, 320, 48, 8, 2, 16
WINDOW = 128


def gpt_oss_attention(params, x, window):
    """One layer's attention; ``window`` is the number of keys that a sliding layer's query sees."""
    q, k, v = (
        jnp.einsum("btd,dnh->btnh", x, params[name]["kernel"]) + params[name]["bias"]
        for name in ("query", "key", "value")
    )
    q, k = _rotate(q), _rotate(k)
    k, v = (jnp.repeat(y, N // K, axis=2) for y in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    place = np.arange(T)
    hidden = place[None, :] > place[:, None]
    if window is not None:
        hidden |= place[None, :] <= place[:, None] - window
    logits = jnp.where(hidden, -jnp.inf, logits)
    # One more column, whose weight goes to no value.
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


def out_and_gradients(attention, params, x, cotangent):
    out, vjp = jax.vjp(attention, params, x)
    return out, *vjp(cotangent)


@functools.cache
def gpt_oss(window):
    """Weights, input, cotangent, and the module's output and gradients in float64."""
    layer = burst_jax.BurstAttention(
        D, N, num_kv_heads=K, head_dim=H, use_bias=True, sinks=True, rope_theta=YARN,
        mesh=make_mesh(), rngs=nnx.Rngs(0),
    )  # fmt: skip
    state = nnx.state(layer, nnx.Param)
    # Biases and sinks as large as what they are added to.
    state = jax.tree.map(lambda w: random_like(w, 5) if w.ndim < 3 else w, state)
    x, cotangent = (random_like(jax.ShapeDtypeStruct((B, T, D), jnp.float32), s) for s in (1, 2))
    with jax.enable_x64(True):
        arguments = (
            plain_model.float64(nnx.to_pure_dict(state)),
            np.float64(x),
            np.float64(cotangent),
        )
        run = functools.partial(
            out_and_gradients, functools.partial(gpt_oss_attention, window=window)
        )
        truth = jax.device_get(quick_jit(run)(*jax.tree.map(jnp.asarray, arguments)))
    return state, x, cotangent, truth


@pytest.mark.parametrize("window", [WINDOW, None], ids=["sliding", "full"])
@pytest.mark.parametrize(("devices", "layout"), [(1, "contiguous"), (8, "zigzag")])
def test_the_layer_is_the_attention_of_gpt_oss(window, devices, layout):
    state, x, cotangent, truth = gpt_oss(window)
    mesh = make_mesh(seq=devices)
    layer = burst_jax.BurstAttention(
        D, N, num_kv_heads=K, head_dim=H, use_bias=True, sinks=True, rope_theta=YARN, mesh=mesh,
        layout=layout, is_causal=True, rngs=nnx.Rngs(0),
        local_window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
    graphdef, at = nnx.graphdef(layer), burst_jax.positions(layout, T, devices)
    x, cotangent = burst_jax.to_layout((x, cotangent), layout, devices)

    def attention(state, x):
        return nnx.merge(graphdef, state)(x, at)

    out, of_state, of_x = quick_jit(functools.partial(out_and_gradients, attention))(
        state, x, cotangent
    )
    out, of_x = burst_jax.from_layout((out, of_x), layout, devices)
    assert_close((out, nnx.to_pure_dict(of_state), of_x), truth, 1e-5)
    assert np.abs(np.asarray(out) - truth[0]).max() < 1e-4


CONFIG = DecoderConfig(
    vocab_size=40, num_layers=4, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
    attention_sinks=True, layer_pattern=(LayerKind(window=12), LayerKind()),
)  # fmt: skip
ROWS = np.random.default_rng(0).integers(0, 40, (4, 32), np.int32)
SEGMENTS = np.ones((4, 32), np.int32)
SEGMENTS[0, 20:], SEGMENTS[3, 27:] = 2, 0
PREFIXES = np.array([7, 0, 32, 12], np.int32)


@functools.cache
def weights():
    state = nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh()))
    state["layers"]["attention"]["sinks"][...] += random_like(
        jax.ShapeDtypeStruct((4, 4), jnp.float32), 1
    )
    return state


def hidden_and_gradients(mesh, layout, prefixes=PREFIXES, config=CONFIG, **options):
    """Hidden states in natural order, and the gradients of all weights."""
    ring = mesh.shape["seq"]
    graphdef, _ = abstract_decoder(config, mesh=mesh, layout=layout, **options)
    at = burst_jax.positions(layout, 32, ring)
    cotangent = random_like(jax.ShapeDtypeStruct((4, 32, 16), jnp.float32), 3)
    tokens, segments, cotangent = burst_jax.to_layout(
        (jnp.asarray(ROWS), jnp.asarray(SEGMENTS), cotangent), layout, ring
    )

    @quick_jit
    def run(params, tokens, segments, cotangent):
        def hidden(params):
            model = nnx.merge(graphdef, params)
            return model(tokens, at, segments, prefix_lengths=prefixes)

        out, vjp = jax.vjp(hidden, params)
        cotangent = jax.device_put(cotangent, jax.typeof(out).sharding)
        return out, vjp(cotangent)[0]

    with jax.set_mesh(mesh):
        replicated = jax.device_put(weights(), jax.NamedSharding(mesh, jax.P()))
        if "rules" in options:
            specs = nnx.merge(graphdef, replicated).shardings().weight_specs(replicated)
            replicated = jax.tree.map(
                lambda w, spec: jax.device_put(w, jax.NamedSharding(mesh, spec)), replicated, specs
            )
        out, gradients = jax.device_get(run(replicated, tokens, segments, cotangent))
    gradients = nnx.to_pure_dict(gradients)
    gradients.pop("head")
    return burst_jax.from_layout(out, layout, ring), gradients


@functools.cache
def one_device(prefixed=True):
    return hidden_and_gradients(make_mesh(), "contiguous", PREFIXES if prefixed else None)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (AxisType.Auto, {"fsdp": 2, "seq": 2, "tensor": 2}),
        pytest.param(AxisType.Explicit, {"fsdp": 2, "stage": 2, "seq": 2}, marks=pytest.mark.slow),
    ],
    ids=["fsdp-tensor", "fsdp-stage-explicit"],
)
def test_a_decoder_with_sinks_and_prefixes_equals_one_device(kind, sizes):
    mesh = mesh_of(kind, **sizes)
    got = hidden_and_gradients(mesh, "zigzag", rules=rules_of(mesh))
    assert_close(got, one_device(), 1e-5)


def test_a_decoder_reads_sinks_and_prefixes():
    (hidden, gradients), (without, _) = one_device(), one_device(prefixed=False)
    # Tokens before the last one of their row's prefix see more than without it; no prefix, no
    # change. Windows hide nothing of what comes later.
    differs = (hidden != without).any(-1)
    assert differs[0, :6].all()
    assert not differs[1].any()
    assert (np.abs(gradients["layers"]["attention"]["sinks"]) > 1e-6).all()
    assert relative_rms(hidden, without) > 1e-2


@pytest.mark.parametrize("remat", [pytest.param("full", marks=pytest.mark.slow), "half"])
def test_what_layers_keep_changes_no_gradient_of_sinks(remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    got = hidden_and_gradients(make_mesh(seq=2), "zigzag", None, config)
    assert_close(got, one_device(prefixed=False), 1e-5)


def test_sinks_of_bfloat16_weights_are_float32():
    config = dataclasses.replace(CONFIG, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    model = Decoder(config, rngs=nnx.Rngs(0), mesh=make_mesh())
    adapted = add_lora(model, rank=2)
    wanted, *others = (
        nnx.to_pure_dict(nnx.state(each))["layers"]["attention"]["sinks"]
        for each in (model, adapted, merge_lora(adapted))
    )
    assert wanted.shape == (4, 4)
    assert 0.01 < np.std(wanted) < 0.04
    for sinks in (wanted, *others):
        assert sinks.dtype == jnp.float32
        np.testing.assert_array_equal(sinks, wanted)
    tokens, at = jnp.asarray(ROWS), np.arange(32, dtype=np.int32)
    np.testing.assert_array_equal(adapted(tokens, at), model(tokens, at))


def test_what_cannot_be_is_refused(tmp_path):
    model: Any = Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh())
    at = np.arange(32, dtype=np.int32)
    with pytest.raises(ValueError, match=r"prefix_lengths has shape \(1,\), tokens \(4, 32\)"):
        model(ROWS, at, prefix_lengths=PREFIXES[:1])
    with pytest.raises(ValueError, match="prefix_lengths has dtype float32: convert it to int32"):
        model(ROWS, at, prefix_lengths=PREFIXES.astype(np.float32))
    with pytest.raises(ValueError, match="prefix_lengths is a list: it must be an int32 array"):
        model(ROWS, at, prefix_lengths=[1, 2, 3, 4])
    with pytest.raises(NotImplementedError, match=r"no family of models .*attention_sinks=True"):
        save(model, tmp_path, max_length=64)
    with pytest.raises(
        ValueError, match="does not accept sink_logits: sinks=True makes it a param"
    ):
        burst_jax.BurstAttention(D, N, rngs=nnx.Rngs(0), sink_logits=jnp.zeros(N, jnp.float32))
    with pytest.raises(NotImplementedError, match=r"rope_theta is DynamicRope.* pass it to attend"):
        burst_jax.BurstAttention(D, N, rngs=nnx.Rngs(0), rope_theta=DynamicRope())
