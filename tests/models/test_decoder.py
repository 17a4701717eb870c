"""The decoder over a ring against the same weights on one device."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from compiled_programs import text_of
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from jaxprs import equations
from meshes import assert_close, make_mesh, mesh_of, random_like, relative_rms

from burst_jax import ShardingRules
from burst_jax.layouts.permutation import from_layout, to_layout
from burst_jax.layouts.permutation import positions as burst_positions
from burst_jax.models import (
    Decoder,
    DecoderConfig,
    LayerKind,
    LinearRope,
    Llama3Rope,
    Rope,
    abstract_decoder,
)
from burst_jax.models.remat import Remat
from burst_jax.parallel.mesh import axes_size, flat_names, sequence_axes
from burst_jax.training import make_batch, place_batch

CONFIG = DecoderConfig(
    vocab_size=40, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
    logits_soft_cap=5.0, rope_theta=300.0,
)  # fmt: skip
B, T = 2, 32
ROWS = np.random.default_rng(0).integers(0, 40, (B, T + 1))
SEGMENTS = np.ones((B, T + 1), np.int32)
SEGMENTS[0, 10:], SEGMENTS[1, 27:] = 2, 0
COTANGENT = random_like(jax.ShapeDtypeStruct((B, T, CONFIG.embed_dim), jnp.float32), 3)


@functools.cache
def params():
    """Weights whose norms have scales other than 1, which would hide a swap."""
    state = nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh()))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x * rng.uniform(0.5, 2.0, x.shape).astype(np.float32), state)


def hidden_and_grads(mesh, layout, config=CONFIG, **axes):
    """Hidden states in natural order, and all weights' gradients for :data:`COTANGENT`.

    ``axes``: seq_axis and ulysses_axis, if they are not the defaults.
    """
    n = axes_size(mesh, flat_names(axes.get("seq_axis", "seq")))
    graphdef, _ = abstract_decoder(config, mesh=mesh, batch_axis="data", layout=layout, **axes)
    batch = make_batch(ROWS, layout=layout, num_shards=n, segment_ids=SEGMENTS)
    with jax.set_mesh(mesh):
        placed = place_batch(batch, mesh, batch_axis="data", seq_axis=sequence_axes(axes))

        @quick_jit
        def run(params, batch, cotangent):
            def f(params):
                model = nnx.merge(graphdef, params)
                return model(batch["inputs"], batch["positions"], batch["segment_ids"])

            hidden, vjp = jax.vjp(f, params)
            return hidden, vjp(cotangent)[0]

        spec = jax.P(*placed["inputs"].sharding.spec, None)
        cotangent = jax.device_put(to_layout(COTANGENT, layout, n), jax.NamedSharding(mesh, spec))
        replicated = jax.device_put(params(), jax.NamedSharding(mesh, jax.P()))
        hidden, grads = jax.device_get(run(replicated, placed, cotangent))
    return from_layout(hidden, layout, n), without_head(grads)


def without_head(grads):
    """Hidden states do not depend on the output projection."""
    grads = dict(grads) if isinstance(grads, dict) else nnx.to_pure_dict(grads)
    assert not grads.pop("head")["kernel"].any()
    return grads


@functools.cache
def formula():
    """By the formulas in float64, on one device."""
    tokens, segments = ROWS[:, :-1], SEGMENTS[:, :-1]
    keep = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
    keep &= np.tril(np.ones((T, T), bool))
    pos = np.tile(np.arange(T), (B, 1))

    def hidden(params):
        return plain_model.decoder(params, tokens, pos, keep, 300.0, CONFIG.logits_soft_cap)

    with jax.enable_x64(True):
        params64 = jax.tree.map(jnp.asarray, plain_model.float64(nnx.to_pure_dict(params())))

        @quick_jit
        def run(params, cotangent):
            out, vjp = jax.vjp(hidden, params)
            return out, vjp(cotangent)[0]

        out, grads = jax.device_get(run(params64, jnp.asarray(COTANGENT, jnp.float64)))
    return out, without_head(grads)


SLOW = pytest.mark.slow
TWO_LEVELS = {"data": 2, "outer": 2, "inner": 2}, {"seq_axis": ("outer", "inner")}
ULYSSES = {"data": 2, "seq": 2, "heads": 2}, {"ulysses_axis": "heads"}


@pytest.mark.parametrize(
    ("sizes", "axes", "layout", "kind", "remat"),
    [
        pytest.param({"data": 2, "seq": 4}, {}, "zigzag", AxisType.Explicit, "half", id="half"),
        pytest.param(*ULYSSES, "zigzag", AxisType.Auto, "attention", id="ulysses"),
        pytest.param(
            {"data": 1, "seq": 8}, {}, "striped", AxisType.Auto, "attention", id="n8", marks=SLOW
        ),
        pytest.param(
            {"data": 2, "seq": 1}, {}, "contiguous", AxisType.Auto, "half", id="1", marks=SLOW
        ),
        pytest.param(
            *TWO_LEVELS, "zigzag", AxisType.Explicit, "attention", id="two_levels", marks=SLOW
        ),
    ],
)
def test_rings_equal_the_formula(sizes, axes, layout, kind, remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    got = hidden_and_grads(mesh_of(kind, **sizes), layout, config, **axes)
    assert_close(got, formula(), 1e-5)


def test_causal_and_segments_hide_what_they_should():
    options: Any = {"mesh": make_mesh(seq=4), "layout": "zigzag", "batch_axis": "data"}
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), **options)

    def hidden(rows):
        batch = make_batch(rows, layout="zigzag", num_shards=4, segment_ids=SEGMENTS)
        out = model(*(jnp.asarray(batch[k]) for k in ("inputs", "positions", "segment_ids")))
        return np.asarray(from_layout(out, "zigzag", 4))

    changed = ROWS.copy()
    changed[0, 5], changed[1, 20] = (changed[0, 5] + 1) % 40, (changed[1, 20] + 1) % 40
    same = (hidden(changed) == hidden(ROWS)).all(-1)
    assert same[0, :5].all()
    assert not same[0, 5:10].any()
    assert same[0, 10:].all()  # Another segment.
    assert same[1, :20].all()
    assert not same[1, 20:27].any()


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_no_second_stack_of_gathered_weights_is_stored(remat):
    config = dataclasses.replace(CONFIG, remat=remat)
    graphdef, shapes = abstract_decoder(config, mesh=make_mesh(seq=4), layout="zigzag")
    positions = burst_positions("zigzag", T, 4)

    def gradient(params, tokens):
        return jax.grad(lambda params: nnx.merge(graphdef, params)(tokens, positions).sum())(params)

    jaxpr = jax.make_jaxpr(gradient)(shapes, jax.ShapeDtypeStruct((B, T), jnp.int32)).jaxpr
    stacks = [
        out
        for equation, _ in equations(jaxpr)
        if equation.primitive.name == "scan"
        for out in equation.outvars
        if out.aval.shape == (config.num_layers, config.embed_dim, config.mlp_dim)
    ]
    assert len(stacks) == 2  # The gradients of gate and up.


@pytest.mark.slow
def test_what_each_remat_recomputes_and_sends():
    """In programs that are optimized as they ship."""
    mesh = make_mesh(seq=4)
    placed = place_batch(make_batch(ROWS, layout="zigzag", num_shards=4), mesh)
    cotangent = jax.device_put(COTANGENT, jax.NamedSharding(mesh, jax.P(None, "seq", None)))
    replicated = jax.device_put(params(), jax.NamedSharding(mesh, jax.P()))

    def compiled(remat, remat_layers=None):
        config = dataclasses.replace(CONFIG, remat=remat, remat_layers=remat_layers)
        graphdef, _ = abstract_decoder(config, mesh=mesh, layout="zigzag")

        def gradient(params, batch, cotangent):
            def hidden(params):
                return nnx.merge(graphdef, params)(batch["inputs"], batch["positions"])

            return jax.vjp(hidden, params)[1](cotangent)[0]

        program = jax.jit(gradient).lower(replicated, placed, cotangent).compile()
        return text_of(program), without_head(program(replicated, placed, cotangent))

    found = {remat: compiled(remat) for remat in get_args(Remat)}
    found["some"] = compiled("selective", 1)
    grads = {remat: gradients for remat, (_, gradients) in found.items()}
    texts = {remat: text for remat, (text, _) in found.items()}
    for remat in found:
        assert_close(grads[remat], grads["none"], 1e-6)
        assert not re.search("all-gather|all-to-all", texts[remat])

    pattern = re.compile(r"= .* collective-permute(?:-start)?\(")
    permutes = {remat: len(pattern.findall(text)) for remat, text in texts.items()}
    # One scan forward and one backward over all layers, so each ring is in the program once.
    for remat in ("selective", "attention", "offload"):
        assert permutes[remat] == permutes["none"]
    # K and V make three hops each; in the backward pass so do they and their gradient.
    assert permutes["full"] == permutes["none"] + 2 * 3
    # The first half's ring, and q, k, v, out and lse redistributed before and after it.
    assert permutes["half"] == permutes["none"] + 2 * 3 + 2 * 5
    assert permutes["none"] >= 2 * 3 + 2 * 3 + 3
    # A scan over the layers of "attention", and one over those of "selective".
    assert permutes["some"] == 2 * permutes["none"]

    # Products with weights in the backward pass: gradients and what is recomputed.
    name = re.compile(r' dot\(.*op_name="[^"]*checkpoint/(?:rematted_computation/)?dot_general"')
    products = {remat: len(name.findall(text)) for remat, text in texts.items()}
    assert products["attention"] == products["selective"] + 3  # Out, gate and up.
    # XLA merges nothing with the forward pass, although it unrolls scans over a single layer.
    assert products["some"] == products["attention"] + products["selective"]


def test_other_attention_over_the_same_weights():
    ring = Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh(seq=8), layout="zigzag")
    half = dataclasses.replace(CONFIG, dtype=jnp.bfloat16, remat="none")
    single = ring.with_attention(half, mesh=make_mesh())
    assert dict(single.options) == {"mesh": make_mesh()}
    assert single.config.remat == "none"
    assert single.embedding[...] is ring.embedding[...]
    tokens, pos = jnp.asarray(ROWS[:, :-1], jnp.int32), jnp.arange(T, dtype=jnp.int32)
    out = single(tokens, pos)
    assert out.dtype == jnp.bfloat16
    assert ring.layers.mlp.up.kernel.dtype == jnp.float32
    want = ring.with_attention(mesh=make_mesh())(tokens, pos)
    assert 1e-4 < relative_rms(out, want) < 5e-2
    # All arguments of a pipeline are those of the new decoder.
    mesh = mesh_of(stage=2, seq=2)
    staged = ring.with_attention(mesh=mesh, rules=ShardingRules.of(mesh), microbatches=4)
    assert staged.microbatches == staged.shardings().microbatches == 4
    assert staged.arguments["microbatches"] == 4
    assert staged.with_attention(mesh=mesh, rules=ShardingRules.of(mesh)).microbatches is None


def test_options_set_here_or_unknown_raise():
    scaled = dataclasses.replace(CONFIG, attention_scale=0.5)
    windowed = dataclasses.replace(CONFIG, layer_pattern=(LayerKind(3),))
    for config, option, message in (
        (CONFIG, "is_causal", "Decoder sets is_causal itself"),
        (CONFIG, "logits_soft_cap", "Decoder sets logits_soft_cap itself"),
        (scaled, "scale", "scale is given, and DecoderConfig's attention_scale sets it"),
        (windowed, "local_window_size", r"local_window_size is given, and .* layer_pattern sets"),
        (CONFIG, "axis", "unknown option 'axis'"),
    ):
        options: Any = {option: True}
        with pytest.raises(TypeError, match=message):
            Decoder(config, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0: it must be a positive integer"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"mlp_dim": 2.5}, "mlp_dim is 2.5"),
        ({"num_kv_heads": 3}, "num_heads is 4, num_kv_heads 3: .*multiple of num_kv_heads"),
        ({"head_dim": 7}, "head_dim is 7: .*even"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0: it must be positive"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
        ({"final_soft_cap": 0.0}, "final_soft_cap is 0.0: it must be positive, or None"),
        ({"attention_scale": -1.0}, "attention_scale is -1.0"),
        ({"norm_epsilon": 0.0}, "norm_epsilon is 0.0"),
        ({"layer_pattern": ()}, r"layer_pattern is \(\): it must have at least one LayerKind"),
        ({"activation": "relu"}, "activation is 'relu': use one of 'silu', 'gelu', 'gelu_tanh'"),
        ({"rope": Rope(), "rope_theta": 2.0}, "rope_theta 2.0: rope has its own theta"),
        ({"dtype": jnp.int32}, "dtype is .*int32.*: use a floating point dtype"),
        ({"remat": "some"}, "remat is 'some': use one of 'none', 'selective'"),
        ({"remat_layers": 1}, "remat_layers is 1, remat 'attention': .* use that remat, or leave"),
        ({"lora": 8}, "lora is 8: use a Lora, or None"),
        (
            {"remat": "selective", "remat_layers": 3},
            "remat_layers is 3, num_layers 2: it must be an integer from 1 to num_layers, or None",
        ),
        ({"remat": "selective", "remat_layers": 0}, "remat_layers is 0, .* use remat='attention'"),
        ({"remat": "selective", "remat_layers": True}, "remat_layers is True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_checks_itself(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_kinds_check_themselves_and_repeat():
    for make, message in (
        (lambda: LayerKind(window=0), "window is 0: it must be a positive integer, or None"),
        (lambda: LinearRope(factor=0.0), r"LinearRope's factor is 0.0: it must be positive"),
        (lambda: Llama3Rope(high_freq_factor=1.0), "high_freq_factor is 1.0, low_freq_factor 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    pattern = (LayerKind(3), LayerKind(None, Rope(7.0)))
    config = dataclasses.replace(CONFIG, num_layers=3, layer_pattern=pattern, rope_theta=5.0)
    assert [kind.window for kind in config.layer_kinds] == [3, None, 3]
    assert config.layer_ropes == (Rope(5.0), Rope(7.0), Rope(5.0))


def test_flops_count_weights_and_the_keys_in_windows():
    length, window = 2048, 300
    base, windowed = (
        dataclasses.replace(CONFIG, num_layers=1, layer_pattern=(LayerKind(size),))
        for size in (None, window)
    )
    saved = base.train_flops_per_token(length) - windowed.train_flops_per_token(length)
    ages = np.arange(length)
    keys = np.mean(ages + 1 - np.minimum(ages + 1, window))
    want = 12 * CONFIG.num_heads * CONFIG.head_dim * keys
    assert saved == pytest.approx(want, rel=2e-3)
    kernels = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params()))
        if path[-1].key == "kernel"
    ]
    assert sum(kernels) == CONFIG.num_matmul_params
    attention = 6 * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim * 100
    assert CONFIG.train_flops_per_token(100) == 6 * sum(kernels) + attention


def test_initial_weights_of_layers_differ():
    layers = nnx.to_pure_dict(params())["layers"]
    for kernel in (layers["mlp"]["up"]["kernel"], layers["attention"]["query"]["kernel"]):
        assert kernel.shape[0] == CONFIG.num_layers
        assert relative_rms(kernel[0], kernel[1]) > 0.5


def test_unembed_is_float32_and_a_token_outside_the_vocabulary_shows():
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh())
    pos = jnp.arange(4, dtype=jnp.int32)
    hidden = model(jnp.array([[1, 2, 3, 4]], jnp.int32), pos)
    logits = model.unembed(hidden)
    assert logits.dtype == jnp.float32
    want = np.asarray(hidden, np.float64) @ np.asarray(model.head_kernel(), np.float64)
    assert relative_rms(logits, want) < 1e-6
    assert model.unembed(hidden.astype(jnp.bfloat16)).dtype == jnp.float32
    assert np.isnan(model(jnp.array([[1, 2, 3, 40]], jnp.int32), pos)[0, 3]).all()
