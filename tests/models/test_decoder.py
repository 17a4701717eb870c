"""The decoder over a ring against the same weights on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from jaxprs import count, equations
from meshes import assert_close, make_mesh, mesh_of, random_like, relative_rms

from burst_jax import ShardingRules
from burst_jax.models import (
    Decoder,
    DecoderConfig,
    LayerKind,
    LinearRope,
    Llama3Rope,
    Rope,
    YarnRope,
    abstract_decoder,
)
from burst_jax.models.remat import Remat
from burst_jax.models.shardings import embed

CONFIG = DecoderConfig(
    vocab_size=40, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
    logits_soft_cap=5.0, rope_theta=300.0,
)  # fmt: skip
B, T = 2, 24
TOKENS = np.random.default_rng(0).integers(0, 40, (B, T)).astype(np.int32)
SEGMENTS = np.ones((B, T), np.int32)
SEGMENTS[0, 10:], SEGMENTS[1, 21:] = 2, 0
COTANGENT = random_like(jax.ShapeDtypeStruct((B, T, CONFIG.embed_dim), jnp.float32), 3)


@functools.cache
def params():
    """Weights whose norms have scales other than 1, which would hide a swap."""
    state = nnx.state(decoders.with_drawn_weights(CONFIG, mesh=make_mesh()))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x * rng.uniform(0.5, 2.0, x.shape).astype(np.float32), state)


def on_mesh(mesh, layout, config=CONFIG, **axes):
    """The decoder with these weights, replicated; ``axes``: seq_axis and ulysses_axis."""
    graphdef, _ = abstract_decoder(config, mesh=mesh, batch_axis="data", layout=layout, **axes)
    return nnx.merge(graphdef, jax.device_put(params(), jax.NamedSharding(mesh, jax.P())))


@functools.cache
def formula():
    model = on_mesh(make_mesh(), "contiguous")
    return decoders.by_formulas(model, TOKENS, SEGMENTS, COTANGENT)


SIZES = {"data": 1, "outer": 2, "inner": 2, "heads": 2}
AXES = {"seq_axis": ("outer", "inner"), "ulysses_axis": "heads"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "axes", "layout", "kind", "remat"),
    [
        pytest.param({"data": 2, "seq": 3}, {}, "zigzag", AxisType.Explicit, "half", id="half"),
        pytest.param(SIZES, AXES, "striped", AxisType.Auto, "attention", id="two_levels_ulysses"),
    ],
)
def test_rings_equal_the_formula(sizes, axes, layout, kind, remat, program):
    config = dataclasses.replace(CONFIG, remat=remat)
    model = on_mesh(mesh_of(kind, **sizes), layout, config, **axes)
    got = decoders.on_its_mesh(model, TOKENS, SEGMENTS, COTANGENT, program)
    assert_close(got, formula(), 1e-5)


def test_what_each_remat_recomputes_and_sends():
    def traced(remat, remat_layers=None):
        config = dataclasses.replace(CONFIG, remat=remat, remat_layers=remat_layers)
        return decoders.traced_gradient(config, make_mesh(seq=2), B, T)

    jaxprs = {remat: traced(remat) for remat in get_args(Remat)} | {"some": traced("selective", 1)}
    # One scan forward and one backward over all layers, so each ring is in the program once. K and
    # V make one hop each; in the backward pass so do they and their gradients.
    sent = {remat: count(jaxpr, "ppermute") for remat, jaxpr in jaxprs.items()}
    assert sent == {
        "none": 6, "selective": 6, "attention": 6, "offload": 6, "full": 6 + 2,
        # The first half's ring, and q, k, v, out and lse redistributed before and after it.
        "half": 6 + 2 + 2 * 5,
        # A scan over the layers of "attention", and one over those of "selective".
        "some": 2 * 6,
    }  # fmt: skip
    products = {remat: products_with_weights(jaxpr) for remat, jaxpr in jaxprs.items()}
    more = {remat: found - products["none"] for remat, found in products.items()}
    # "selective" recomputes q, k and v, "attention" also out, gate and up. Those of a gradient of
    # its own have the forward pass again, too: down, and gate and up for their gradients.
    assert more == {
        "none": 0, "selective": 3, "attention": 6, "offload": 6, "full": 9, "half": 9,
        "some": products["none"] + 3 + 6,
    }  # fmt: skip
    for remat in ("selective", "full"):
        # No second stack of gathered weights is stored: these are the gradients of gate and up.
        stacks = [
            out
            for equation, _ in equations(jaxprs[remat])
            if equation.primitive.name == "scan"
            for out in equation.outvars
            if out.aval.shape == (CONFIG.num_layers, CONFIG.embed_dim, CONFIG.mlp_dim)
        ]
        assert len(stacks) == 2


def products_with_weights(jaxpr):
    """Number of products with weights, and of those that are gradients of weights."""
    return sum(
        any(CONFIG.embed_dim in factor.aval.shape for factor in equation.invars)
        for equation, _ in equations(jaxpr)
        if equation.primitive.name == "dot_general"
    )


def test_other_attention_over_the_same_weights():
    ring = decoders.with_drawn_weights(CONFIG, mesh=make_mesh(seq=8), layout="zigzag")
    half = dataclasses.replace(CONFIG, dtype=jnp.bfloat16, remat="none")
    single = ring.with_attention(half, mesh=make_mesh())
    assert dict(single.options) == {"mesh": make_mesh()}
    assert single.config.remat == "none"
    assert single.embedding[...] is ring.embedding[...]
    tokens, pos = jnp.asarray(TOKENS), jnp.arange(T, dtype=jnp.int32)
    out = quick_jit(single.__call__)(tokens, pos)
    assert out.dtype == jnp.bfloat16
    assert ring.layers.mlp.up.kernel.dtype == jnp.float32
    want = quick_jit(ring.with_attention(mesh=make_mesh()).__call__)(tokens, pos)
    assert 1e-4 < relative_rms(out, want) < 5e-2
    # All arguments of a pipeline are those of the new decoder.
    mesh = mesh_of(stage=2, seq=2)
    staged = ring.with_attention(mesh=mesh, rules=ShardingRules.of(mesh), microbatches=4)
    assert staged.microbatches == staged.shardings().microbatches == 4
    assert staged.arguments["microbatches"] == 4
    assert staged.with_attention(mesh=mesh, rules=ShardingRules.of(mesh)).microbatches is None


@pytest.mark.parametrize(
    ("fields", "option", "message"),
    [
        ({}, "is_causal", "Decoder sets is_causal itself"),
        ({}, "logits_soft_cap", "Decoder sets logits_soft_cap itself"),
        ({"attention_scale": 0.5}, "scale", "scale is given, and .*'s attention_scale sets it"),
        (
            {"layer_pattern": (LayerKind(3),)},
            "local_window_size",
            "given, and .* layer_pattern set",
        ),
        ({}, "axis", "unknown option 'axis'"),
    ],
)
def test_options_set_here_or_unknown_raise(fields, option, message):
    options: Any = {option: True}
    with pytest.raises(TypeError, match=message):
        Decoder(dataclasses.replace(CONFIG, **fields), rngs=nnx.Rngs(0), **options)


WRONG = [
    ({"vocab_size": 0}, "vocab_size is 0: it must be an integer, at least 1 and at m"),
    ({"num_layers": -1}, "num_layers is -1"),
    # Layers are listed on the host.
    ({"num_layers": 10**9}, "num_layers is 1000000000: it must be .*at most 10000"),
    ({"num_layers": 10**5000}, "num_layers is a int that cannot be printed: it must"),
    ({"mlp_dim": 2.5}, "mlp_dim is 2.5"),
    ({"num_kv_heads": 3}, "num_heads is 4, num_kv_heads 3: .*multiple of num_kv_heads"),
    ({"head_dim": 7}, "head_dim is 7: .*even"),
    ({"rope_theta": 0.0}, "rope_theta is 0.0: it must be positive and finite in float32"),
    ({"rope_theta": float("inf")}, "rope_theta is inf: it must be positive and finite"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"norm_epsilon": "small"}, "norm_epsilon is 'small': it must be positive and finite"),
    ({"norm_epsilon": float("nan")}, "norm_epsilon is nan"),
    ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
    ({"final_soft_cap": 0.0}, "final_soft_cap is 0.0: it must be .* float32, or None"),
    ({"attention_scale": -1.0}, "attention_scale is -1.0"),
    ({"norm_epsilon": 0.0}, "norm_epsilon is 0.0"),
    ({"layer_pattern": ()}, r"layer_pattern is \(\): it must be a tuple of LayerKinds, not"),
    ({"layer_pattern": ("full",)}, r"layer_pattern is \('full',\): it must be a tuple of"),
    ({"qk_norm": 1}, "qk_norm is 1: use True, False or 'joint'"),
    ({"attention_gate": "yes"}, "attention_gate is 'yes': it must be True or False"),
    ({"tie_embeddings": 0}, "tie_embeddings is 0: it must be True or False"),
    ({"norm_offset": float("nan")}, "norm_offset is nan: it must be finite"),
    ({"rope": 1e6}, "rope is 1000000.0: use a Rope, or None"),
    ({"activation": "relu"}, "activation is 'relu': use one of 'silu', 'gelu', 'gelu_tanh'"),
    ({"rope": Rope(), "rope_theta": 2.0}, "rope_theta 2.0: rope has its own theta"),
    ({"dtype": jnp.int32}, "dtype is .*int32.*: use a floating point dtype"),
    ({"remat": "some"}, "remat is 'some': use one of 'none', 'selective'"),
    ({"remat_layers": 1}, "remat_layers is 1, remat 'attention': .* use that remat, or leave"),
    ({"lora": 8}, "lora is 8: use a Lora, or None"),
    ({"remat": "selective", "remat_layers": 3},
     "remat_layers is 3, num_layers 2: it must be an integer from 1 to num_layers, or None"),
    ({"remat": "selective", "remat_layers": 0}, "remat_layers is 0, .* use remat='attention'"),
    ({"remat": "selective", "remat_layers": True}, "remat_layers is True"),
]  # fmt: skip
WRONG_PARTS = [
    (lambda: LayerKind(window=0), "window is 0: it must be an integer, at least 1 and at"),
    (lambda: LayerKind(rope=1e4), "rope is 10000.0: use a Rope, or None"),  # pyrefly: ignore
    (
        lambda: CONFIG.norms_of("delta_net"),
        "mixer is 'delta_net', and no layer has it: use one of 'attention'",
    ),
    (lambda: YarnRope(truncate=1), "YarnRope's truncate is 1: it must be True or False"),  # pyrefly: ignore
    (lambda: YarnRope(theta=1.0), "theta is 1: all frequencies are equal; use a larger one"),
    (lambda: LinearRope(factor=0.0), r"LinearRope's factor is 0.0: it must be positive and"),
    (lambda: Llama3Rope(high_freq_factor=1.0), "high_freq_factor is 1.0, low_freq_factor 1.0"),
]


@pytest.mark.parametrize(
    ("make", "message"),
    [(functools.partial(dataclasses.replace, CONFIG, **fields), text) for fields, text in WRONG]
    + WRONG_PARTS,
)
def test_configs_check_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_flops_count_weights_and_the_keys_in_windows():
    length, window = 2048, 300
    flops = [
        dataclasses.replace(CONFIG, layer_pattern=(LayerKind(size),)).train_flops_per_token(length)
        for size in (None, window)
    ]
    seen = np.arange(1, length + 1)
    want = CONFIG.num_layers * np.mean(seen - np.minimum(seen, window))
    want *= 12 * CONFIG.num_heads * CONFIG.head_dim
    assert flops[0] - flops[1] == pytest.approx(want, rel=2e-3)
    weights = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(params()))
    kernels = [leaf for path, leaf in weights if path[-1].key == "kernel"]
    assert sum(kernel.size for kernel in kernels) == CONFIG.num_matmul_params
    attention = 6 * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim * 100
    assert CONFIG.train_flops_per_token(100) == 6 * CONFIG.num_matmul_params + attention


def test_logits_are_float32_and_each_layer_has_initial_weights_of_its_own():
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh())
    weights = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model.layers)))
    kernels = [np.asarray(leaf) for path, leaf in weights if path[-1].key == "kernel"]
    assert len(kernels) == 7
    assert all(relative_rms(kernel[0], kernel[1]) > 0.5 for kernel in kernels)
    hidden = jnp.asarray(COTANGENT, jnp.bfloat16)
    logits = model.unembed(hidden)
    assert logits.dtype == jnp.float32
    kernel = model.head_kernel().astype(jnp.bfloat16)
    assert relative_rms(logits, np.matmul(np.float64(hidden), np.float64(kernel))) < 1e-6


@pytest.mark.parametrize("axes", [(), ("model",)])
def test_ids_outside_of_the_vocabulary_are_nan(axes):
    table, mesh = random_like(jax.ShapeDtypeStruct((6, 2), jnp.float32), 0), make_mesh(model=2)
    run = jax.shard_map(
        lambda table, tokens: embed(table, tokens, axes),
        mesh=mesh, in_specs=(jax.P(axes or None), jax.P()), out_specs=jax.P(),
    )  # fmt: skip
    found = quick_jit(run)(table, jnp.asarray([[0, 2, 3, 5, 6, -1]], jnp.int32))
    np.testing.assert_array_equal(found[0, :4], table[np.array([0, 2, 3, 5])])
    assert np.isnan(found[0, 4:]).all()
