"""Decoders with Gated DeltaNet layers: by their formulas, on meshes, in training."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest
from flax import nnx
from implementations import QUICK
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from meshes import assert_close, mesh_of

from burst_jax import ShardingRules, plan
from burst_jax.models import (
    Decoder,
    DecoderConfig,
    DeltaNet,
    KimiDelta,
    LayerKind,
    Lora,
    Rope,
    abstract_decoder,
)
from burst_jax.models import save as save_model
from burst_jax.training import (
    Checkpoints,
    abstract_train_state,
    evaluation_memory,
    init_train_state,
    make_batch,
    make_train_step,
    place_batch,
)

B, T = 2, 32
SIZES = DeltaNet(num_heads=4, num_key_heads=2, head_dim=6, value_head_dim=8)
CONFIG = DecoderConfig(vocab_size=48, num_layers=2, embed_dim=16, mlp_dim=24, delta_net=SIZES)
LINEAR, FULL = LayerKind(mixer="delta_net"), LayerKind()
HYBRID = dataclasses.replace(
    CONFIG, num_layers=3, layer_pattern=(LINEAR, LINEAR, FULL), num_heads=4, head_dim=6
)
# All that Qwen3-Next and Olmo Hybrid add to it, and fewer key heads than devices of a tensor axis.
EXTENDED = dataclasses.replace(
    HYBRID, layer_pattern=(LINEAR, LINEAR, LayerKind(norms="after")), num_kv_heads=1, head_dim=8,
    attention_gate=True, qk_norm="joint", rope=Rope(100.0, fraction=0.5),
    delta_net=dataclasses.replace(SIZES, norm_epsilon=1e-2, negative_eigenvalues=True),
)  # fmt: skip
KIMI = dataclasses.replace(
    HYBRID, delta_net=KimiDelta(num_heads=4, num_key_heads=2, head_dim=6, value_head_dim=8)
)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, CONFIG.vocab_size, (B, T)).astype(np.int32)
SEGMENTS = np.ones((B, T), np.int32)
SEGMENTS[0, 13:], SEGMENTS[0, 20:22], SEGMENTS[1, 30:] = 2, 0, 0
# A balanced layout leaves out padding; the convolution of a document with padding in it is another.
PACKED = np.ones((B, T), np.int32)
PACKED[0, 20:], PACKED[0, 29:], PACKED[1, 30:] = 2, 3, 0
COTANGENT = RNG.standard_normal((B, T, 16)).astype(np.float32)
SLOW = pytest.mark.slow
# Sizes of the projections with adapters.
ADAPTED = {
    "query": (16, 12), "key": (16, 12), "value": (16, 32), "out": (32, 16),
    "output_gate": (16, 32), "beta": (16, 4), "decay": (16, 4),
}  # fmt: skip
ADAPTED_KIMI = {
    **{name: ADAPTED[name] for name in ("query", "key", "value", "out", "beta")},
    "output_gate_a": (16, 8), "output_gate_b": (8, 32), "decay_a": (16, 8), "decay_b": (8, 24),
}  # fmt: skip


def model_on(config=CONFIG, layout="zigzag", **sizes):
    mesh = mesh_of(**sizes)
    model = decoders.with_drawn_weights(
        config, mesh=mesh, rules=ShardingRules.of(mesh), layout=layout
    )
    shardings = model.shardings().weight_specs(nnx.state(model))
    # From the host: to slice one device's array for the others is a program for each shape.
    placed = jax.tree.map(lambda w, spec: jax.device_put(np.asarray(w), NamedSharding(mesh, spec)),
                          nnx.state(model), shardings)  # fmt: skip
    return nnx.merge(nnx.split(model)[0], placed)


def test_extended_equals_the_formula():
    """In a balanced layout; Kimi Delta Attention in that of adapters, zigzag in training."""
    model = model_on(EXTENDED, "balanced:16", fsdp=2, seq=2, tensor=2)
    kept = PACKED > 0
    cotangent = COTANGENT * kept[..., None]
    got = decoders.on_its_mesh(model, TOKENS, PACKED, cotangent)
    want = decoders.by_formulas(model, TOKENS, PACKED, cotangent)
    # One device has 9e-6 in float32, too.
    assert_close((got[0][kept], got[1]), (want[0][kept], want[1]), 2e-5)
    # The formula has the norms that there are weights for.
    norms = {kind: {x for x in got[1][kind] if "norm" in x} for kind in decoders.STACKS.values()}
    assert norms == {
        "layers": {"post_attention_norm", "post_mlp_norm"},
        "delta_net_layers": {"attention_norm", "mlp_norm"},
    }


def test_weights_of_kimi_delta_attention():
    """Their sizes are those that costs count; both heads and features are sharded."""
    mesh = mesh_of(fsdp=2, seq=2, tensor=2)
    config = dataclasses.replace(KIMI, lora=Lora(2))
    options: Any = {"mesh": mesh, "rules": ShardingRules.of(mesh), "layout": "zigzag"}
    model = nnx.merge(*abstract_decoder(config, **options))
    layer = model.delta_net_layers.attention
    for name, (inputs, outputs) in KIMI.mixer_sizes("delta_net").items():
        linear = getattr(layer, name)
        assert linear.kernel.size == 2 * inputs * outputs, name
        assert linear.kernel_lora_a.shape == (2, inputs, 2)
        assert linear.kernel_lora_b.shape == (2, 2, outputs)
    specs = nnx.to_pure_dict(model.shardings().weight_specs(nnx.state(model)))
    specs = specs["delta_net_layers"]["attention"]
    features = ("fsdp", "seq")
    assert specs["decay_a"]["kernel"] == P(None, features, None)
    assert specs["decay_b"]["kernel"] == P(None, None, "tensor", None)
    assert specs["output_gate_b"]["kernel_lora_b"] == P(None, None, "tensor")
    assert specs["dt_bias"] == P(None, "tensor", None)
    with pytest.raises(ValueError, match="head_dim is 0: it must be an integer, at least 1"):
        KimiDelta(head_dim=0)
    sizes = DeltaNet(head_dim=16), KimiDelta(head_dim=16), DeltaNet(value_head_dim=8), DeltaNet()
    assert [each.value_head_dim for each in sizes] == [16, 16, 8, 64]


@SLOW
@pytest.mark.parametrize(
    ("config", "adapted", "of_full"),
    [
        (EXTENDED, ADAPTED, [(16, 32), (16, 8), (16, 8), (32, 16), (16, 32)]),
        (KIMI, ADAPTED_KIMI, [(16, 24), (16, 12), (16, 12), (24, 16)]),
    ],
    ids=["gated", "kimi"],
)
def test_adapters_equal_the_formula(config, adapted, of_full, program):
    config = dataclasses.replace(config, lora=Lora(2, targets=tuple(adapted)))
    model, drawn = model_on(config, fsdp=2, seq=2, tensor=2), np.random.default_rng(2)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        # B starts at 0, where A has no gradient. Large adapters would amplify rounding.
        noise = (0.2 * drawn.standard_normal(leaf.get_value().shape)).astype(np.float32)
        module = model
        for name in path[:-1]:
            module = getattr(module, str(name))
        getattr(module, str(path[-1]))[...] = jax.device_put(noise, leaf.get_value().sharding)
    cotangent = COTANGENT * (SEGMENTS > 0)[..., None]
    got = decoders.on_its_mesh(model, TOKENS, SEGMENTS, cotangent, program)
    want = decoders.by_formulas(model, TOKENS, SEGMENTS, cotangent)
    # One device has up to 3.7e-5 in float32, in all adapters alike.
    assert_close(got[1], want[1], 4e-5)
    assert set(got[1]["delta_net_layers"]["attention"]) == set(adapted)
    features = 2 * sum(map(sum, adapted.values())) + sum(map(sum, of_full))
    assert config.num_adapter_params == 2 * features


def test_saved_states_and_outputs_are_not_computed_again():
    """One scan of the tokens forward; two more backward, none of which the forward pass repeats."""

    def scans(remat):
        config = dataclasses.replace(CONFIG, remat=remat)
        return str(decoders.traced_gradient(config, mesh_of(seq=2), B, T)).count("all_gather[")

    assert scans("attention") == scans("selective") == scans("none") < scans("full")


ROWS = np.random.default_rng(1).integers(1, CONFIG.vocab_size, (3, 4, T + 1))
IDS = np.broadcast_to(1 + (np.arange(T + 1) > 13), (4, T + 1)).astype(np.int32)


RATE, MOMENTUM = 0.1, 0.9


def losses(config, folder, **sizes):
    """The losses of three steps on packed documents; and of the last one, resumed from a folder."""
    mesh, optimizer = mesh_of(**sizes), optax.sgd(RATE, MOMENTUM)
    options: Any = {"rules": ShardingRules.of(mesh), "layout": "zigzag"}
    drawn = jax.device_get(decoders.drawn(abstract_decoder(config)[1]))
    graphdef, *made = init_train_state(config, optimizer, mesh, 0, params=drawn, **options)
    state: list[Any] = made
    step = make_train_step(graphdef, optimizer, chunk_size=16, compiler_options=QUICK)
    found: list[float] = []

    def take(rows):
        batch = make_batch(rows, layout="zigzag", num_shards=mesh.shape["seq"], segment_ids=IDS)
        placed = place_batch(batch, mesh, rules=options["rules"])
        state[0], state[1], metrics = step(state[0], state[1], placed)
        found.append(float(metrics["loss"]))

    with Checkpoints(folder) as checkpoints:
        for number, rows in enumerate(ROWS):
            if number == len(ROWS) - 1:
                checkpoints.save(number, state)
            take(rows)
        checkpoints.wait()
        _, *abstract = abstract_train_state(config, optimizer, mesh, **options)
        restored = checkpoints.restore(abstract)
    assert restored is not None
    state[:] = restored.state
    take(ROWS[-1])
    return found


def plain_losses(config):
    """The losses of three steps by the formula, in float64."""
    ids, following = IDS[:, :-1], IDS[:, 1:]
    weights, positions = np.float64(ids == following), np.tile(np.arange(T), (len(ids), 1))

    def mean_loss(params, inputs, targets):
        hidden = plain_model.decoder(
            params, inputs.astype(int), positions, plain_model.causal(ids),
            config.layer_ropes[0].theta, None, ids, decoders.stacks_of(config),
        )  # fmt: skip
        logits = hidden @ params["head"]["kernel"]
        return plain_model.cross_entropy(logits, targets.astype(int), weights) / weights.sum()

    params = jax.device_get(nnx.to_pure_dict(decoders.drawn(abstract_decoder(config)[1])))
    moments, found = jax.tree.map(np.zeros_like, params), []
    run = plain_model.traced_gradients(mean_loss, 1.0, params, ROWS[0, :, :-1], ROWS[0, :, 1:])
    for rows in ROWS:
        loss, (gradients, *_) = run(1.0, params, rows[:, :-1], rows[:, 1:])
        found.append(float(loss))
        moments = jax.tree.map(lambda m, g: MOMENTUM * m + g, moments, gradients)
        params = jax.tree.map(lambda w, m: w - RATE * m, params, moments)
    return found


@SLOW
def test_training_on_a_mesh_is_the_formula_s_and_resumes_with_the_same_bits(tmp_path):
    config = dataclasses.replace(HYBRID, remat="selective")
    *found, resumed = losses(config, tmp_path, seq=2, tensor=2)
    np.testing.assert_allclose(found, plain_losses(config), rtol=1e-5)
    assert len(set(found)) == len(ROWS)
    assert resumed == found[-1]


def test_costs_count_its_own_projections():
    width, keys, values = 16, 2 * 6, 4 * 8
    mixer = width * (2 * keys + 2 * values + 2 * 4) + values * width
    assert CONFIG.num_matmul_params == 2 * (mixer + 3 * width * 24) + width * 48
    assert CONFIG.train_flops_per_token(64) == CONFIG.train_flops_per_token(4096)
    recurrence = 2 * 18 * 4 * 6 * 8
    assert CONFIG.train_flops_per_token(64) == 6 * CONFIG.num_matmul_params + recurrence
    wide = dataclasses.replace(CONFIG, mlp_dim=1, vocab_size=1)
    outputs = 2 * keys + 2 * values + 2 * 4 + values
    assert evaluation_memory(wide, 64) == 64 * 4 * (2 * width + outputs)
    hybrid = dataclasses.replace(HYBRID, mlp_dim=1, vocab_size=1)
    assert evaluation_memory(hybrid, 64) == evaluation_memory(wide, 64)
    full = width * (24 + 12 + 12) + 24 * width + 3 * width * 24
    assert HYBRID.num_matmul_params == CONFIG.num_matmul_params + full
    keys_seen = 12 * 24 * 64 / 2
    assert HYBRID.train_flops_per_token(64) == (
        6 * HYBRID.num_matmul_params + recurrence + keys_seen
    )


def test_kinds_of_layers():
    assert CONFIG.layer_kinds == (LINEAR, LINEAR)
    assert CONFIG.layer_ropes == CONFIG.local_window_sizes == ()
    pattern = (LINEAR, LayerKind(window=5), LINEAR, FULL)
    config = dataclasses.replace(HYBRID, num_layers=7, layer_pattern=pattern)
    assert [kind.mixer == "delta_net" for kind in config.layer_kinds] == [True, False] * 3 + [True]
    assert config.mixers == {"attention": 3, "delta_net": 4}
    assert config.local_window_sizes == ((4, 0), None)
    assert len(config.layer_ropes) == 3
    with pytest.raises(ValueError, match="mixer is 'mamba': use one of 'attention', 'delta_net'"):
        LayerKind(mixer=cast("Any", "mamba"))
    with pytest.raises(ValueError, match="norms is 'pre': use one of 'before', 'after', 'both'"):
        LayerKind(norms=cast("Any", "pre"))
    kinds = LINEAR, LayerKind(norms="after"), LayerKind(8)
    message = "layers with mixer 'attention' and norms 'after' and 'before': the weights of these"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HYBRID, layer_pattern=kinds)
    both = dataclasses.replace(HYBRID, post_norms=True, layer_pattern=kinds[:2])
    assert (both.norms_of("delta_net"), both.norms_of("attention")) == ("both", "after")
    explicit = dataclasses.replace(HYBRID, layer_pattern=(LINEAR, LayerKind(norms="before")))
    assert explicit.layer_kinds[1].norms is None
    with pytest.raises(ValueError, match="window is 5, and mixer 'delta_net': only softmax"):
        LayerKind(window=5, mixer="delta_net")
    with pytest.raises(ValueError, match=r"rope is Rope.*, and mixer 'delta_net': only softmax"):
        LayerKind(rope=Rope(1e6), mixer="delta_net")


def test_a_decoder_without_softmax_attention_has_no_table_of_rope():
    def names(config):
        graphdef, shapes = abstract_decoder(config, mesh=mesh_of(seq=1))
        tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
        traced = jax.make_jaxpr(lambda params, x: nnx.merge(graphdef, params)(x, x))(shapes, tokens)
        return {equation.primitive.name for equation, _ in equations(traced.jaxpr)}

    assert "sin" in names(HYBRID)
    assert "sin" not in names(CONFIG)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"delta_net": 3}, ValueError, "delta_net is 3: use a DeltaNet, a KimiDelta, or None"),
        (
            {"num_heads": 8},
            ValueError,
            "num_heads is 8, and delta_net is given: its layers have no",
        ),
        ({"rope": Rope(1e6)}, ValueError, "rope is Rope.*, which rope is of; leave it out"),
        ({"attention_gate": True}, ValueError, "attention_gate is True, and delta_net is given"),
        ({"qk_norm": False}, ValueError, "qk_norm is False, and delta_net is given"),
        ({"layer_pattern": (LayerKind(8),)}, ValueError, "delta_net is .*, and none of the 2 laye"),
        ({"remat": "half"}, NotImplementedError, "remat is 'half', which recomputes softmax"),
        (
            {"layer_pattern": (LINEAR, FULL), "delta_net": None},
            ValueError,
            "delta_net is None, and layer_pattern has layers with mixer 'delta_net': pass their",
        ),
        ({"layer_pattern": (LINEAR, FULL), "remat": "half"}, NotImplementedError, "'half', which"),
    ],
)
def test_fields_that_it_would_ignore_raise(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **change)


def test_sizes_are_checked():
    with pytest.raises(
        ValueError, match="num_heads is 4, num_key_heads 3: num_heads must be a mul"
    ):
        DeltaNet(num_key_heads=3)
    with pytest.raises(ValueError, match="norm_epsilon is 0: it must be positive and finite in fl"):
        DeltaNet(norm_epsilon=0)
    with pytest.raises(ValueError, match="negative_eigenvalues is 2: it must be True or False"):
        DeltaNet(negative_eigenvalues=cast("Any", 2))
    with pytest.raises(ValueError, match="qk_norm is 'all': use True, False or 'joint'"):
        dataclasses.replace(HYBRID, qk_norm=cast("Any", "all"))
    with pytest.raises(ValueError, match=r"head_dim is 6, and RoPE's fraction 0.5, 3 features"):
        dataclasses.replace(HYBRID, rope=Rope(fraction=0.5))


@pytest.mark.parametrize("name", ["dropout_rate", "scale", "ulysses_axis"])
def test_options_of_attention_raise(name):
    options: Any = {name: 0.5}
    with pytest.raises(
        TypeError, match=f"{name} is given, and the decoder's layers have linear attention"
    ):
        abstract_decoder(CONFIG, **options)
    if name == "ulysses_axis":
        message = "ulysses_axis is given, and some of the decoder's layers have linear"
        with pytest.raises(TypeError, match=message):
            abstract_decoder(HYBRID, **options)


def test_what_is_for_softmax_attention_raises(tmp_path):
    mesh = mesh_of(seq=2)
    graphdef, shapes = abstract_decoder(CONFIG, mesh=mesh, layout="zigzag")
    model: Decoder = nnx.merge(graphdef, shapes)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
    with pytest.raises(
        ValueError, match=r"prefix_lengths is given, and layers have linear attention"
    ):
        jax.eval_shape(lambda x, lengths: model(x, x, None, lengths), tokens, lengths)
    assert CONFIG.delta_net is not None
    wide = dataclasses.replace(CONFIG.delta_net, head_dim=192)
    with pytest.raises(NotImplementedError, match="delta_net has head_dim 192: "):
        plan.training(dataclasses.replace(CONFIG, delta_net=wide), length=1024, batch=8)
    with pytest.raises(NotImplementedError, match=r"no model family .* has the architecture of"):
        save_model(model, tmp_path, max_length=64)
    striped = abstract_decoder(CONFIG, mesh=mesh, layout="striped")
    with pytest.raises(NotImplementedError, match="layout is 'striped'"):
        jax.eval_shape(lambda *x: nnx.merge(*striped)(*x), tokens, tokens)
    rules = ShardingRules.of(mesh_of(tensor=4))
    wrong: Any = {"mesh": mesh_of(tensor=4), "rules": rules}
    with pytest.raises(
        ValueError, match=r"delta_net_layers.attention.\w+.kernel has shape .*, 2, is shard"
    ):
        nnx.merge(*abstract_decoder(CONFIG, **wrong)).shardings()
