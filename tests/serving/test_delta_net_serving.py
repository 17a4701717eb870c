"""Generation by decoders with Gated DeltaNet layers, compared with whole sequences by formulas."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import decoders
import delta_step_cases
import jax
import jax.numpy as jnp
import numpy as np
import numpy_jaxprs
import plain_model
import pytest
from cases import in_tiers
from flax import nnx
from meshes import mesh_of
from served_models import CONFIG, Watched, models, prompts_of

from burst_jax import GatedDeltaNet
from burst_jax.models import DeltaNet, KimiDelta, LayerKind, Lora, merge_lora
from burst_jax.serving import Generator, delta_net_step, fused_delta_net
from pallas_kernels.linear.sm80 import step

SIZES = DeltaNet(num_heads=4, num_key_heads=2, head_dim=8, value_head_dim=6)
LINEAR, FULL = LayerKind(mixer="delta_net"), LayerKind()
HYBRID = dataclasses.replace(
    CONFIG, num_layers=3, layer_pattern=(LINEAR, FULL, LINEAR), delta_net=SIZES
)
SHORT = dataclasses.replace(HYBRID, num_layers=2)
KIMI = dataclasses.replace(SHORT, delta_net=KimiDelta(4, 2, 8, 6))
PURE = dataclasses.replace(
    CONFIG, num_layers=2, delta_net=SIZES, num_heads=4, num_kv_heads=2, head_dim=64
)
WINDOWED = dataclasses.replace(
    SHORT, layer_pattern=(LINEAR, LayerKind(window=20)), delta_net=DeltaNet(2, 2, 6, 4, 2)
)


def case(config, sizes, layout, lengths, new, chunk=None, extend=None, split=False):
    return locals()


# A program per length of a chunk and number of slots that it reads: sizes with few of them.
CASES = [
    # A first chunk in which one sequence has no token, and new prompts shorter than the taps.
    case(HYBRID, {"seq": 3}, "zigzag", [57, 13], 6, chunk=30, extend=[2, 27]),
    case(PURE, {"data": 2, "seq": 2, "tensor": 2}, "contiguous", [1, 60], 6, extend=[9, 1]),
    case(SHORT, {"seq": 2, "tensor": 2}, "zigzag", [30], 5, chunk=16, split=True),
    case(KIMI, {"seq": 2, "tensor": 2}, "zigzag", [29], 4, chunk=16, split=True),
    # Prompts of fewer tokens than devices.
    case(PURE, {"seq": 8}, "zigzag", [120, 2, 17], 9, chunk=64, extend=[60, 3, 1]),
    case(PURE, {"seq": 1}, "contiguous", [90, 4], 5, extend=[1, 2]),
    case(WINDOWED, {"seq": 2}, "zigzag", [57, 57], 6, chunk=23, extend=[30, 30]),
]


def case_id(case):
    mesh, lengths = (f"{name}{size}" for name, size in case["sizes"].items()), case["lengths"]
    return f"{'x'.join(mesh)}-{case['layout']}-{'_'.join(map(str, lengths))}"


def by_formulas(model, sequences):
    """Logits after each token, ``[B, T, V]``, of whole sequences in float64."""
    config, length = model.config, max(map(len, sequences))
    tokens = np.zeros((len(sequences), length), np.int32)
    segments = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], segments[row, : len(sequence)] = sequence, 1
    positions, keep = np.tile(np.arange(length), (len(tokens), 1)), plain_model.causal(segments)
    for at, kind in enumerate(config.layer_kinds):
        if kind.window is not None:
            assert at % 2
            near = np.subtract.outer(np.arange(length), np.arange(length)) < kind.window
            keep &= near
    stacks = [
        "layers" if kind.mixer == "attention" else "delta_net_layers" for kind in config.layer_kinds
    ]
    theta = config.layer_ropes[0].theta if config.layer_ropes else None
    weights = plain_model.float64(nnx.to_pure_dict(nnx.state(model)))

    def logits(weights):
        options = tokens, positions, keep, theta, None, segments, stacks
        return plain_model.decoder(weights, *options) @ weights["head"]["kernel"]

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return numpy_jaxprs.traced(logits, weights)(weights)


@pytest.mark.parametrize("case", in_tiers(CASES, case_id, CASES[:1]))
def test_each_step_equals_whole_sequences(case, program):
    one, model = models(case["config"], case["sizes"], case["layout"])
    batch, new, extend = len(case["lengths"]), case["new"], case["extend"]
    max_length = max(case["lengths"]) + 2 * new + (max(extend) + 32 if extend else 0)
    server = Watched(
        model, max_length=max_length, batch=batch, prefill_chunk=case["chunk"],
        split_weights=case["split"], program=program,
    )  # fmt: skip
    prompts = prompts_of(case["lengths"])
    sequences: list[list[int]] = [list(prompt) for prompt in prompts]
    ends: list[list[int | None]] = []

    def generate(prompts, **options):
        for tokens in server.generate(prompts, new, **options):
            running = tokens >= 0
            ends.append([len(s) if on else None for s, on in zip(sequences, running, strict=True)])
            for sequence, token in zip(sequences, tokens, strict=True):
                if token >= 0:
                    sequence.append(int(token))

    stops: Any = ()
    if extend:
        # The last sequence ends after two tokens: the others' next ones leave its state.
        answer = np.stack(list(server.generate(prompts, new)))[:, -1]
        stops = [int(answer[1])]
        server.logits.clear()
    generate(prompts, stop_tokens=stops)
    if extend:
        assert batch == 1 or len(sequences[-1]) - case["lengths"][-1] < new
        more = prompts_of(extend, seed=1)
        if case["config"] is not WINDOWED:
            for sequence, prompt in zip(sequences, more, strict=True):
                sequence.extend(prompt)
            generate(more, extend=True)
    expected = by_formulas(one, sequences)
    for ends_of_step, logits in zip(ends, server.logits, strict=True):
        for row, (end, got) in enumerate(zip(ends_of_step, logits, strict=True)):
            if end is not None:
                want = expected[row, end - 1]
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * np.abs(want).max())
                assert sequences[row][end] == want.argmax()


def test_a_step_sends_nothing_and_the_state_has_one_size():
    config = dataclasses.replace(PURE, num_layers=1)
    _, model = models(config, {"data": 2, "seq": 2}, "zigzag")
    found = []
    for max_length in (64, 4096):
        server: Any = Generator(model, max_length=max_length, batch=4)
        found.append(server.cache_bytes)
    steps = server._steps
    tokens, numbers = jnp.zeros(4, jnp.int32), jnp.array([1] * 4 + [3, 0, 3, 4], jnp.int32)
    program = steps.decode.lower(steps.model.leaves, server._cache, tokens, numbers).compile()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    sent = re.findall(rf"= (.+?) (?:{kinds})(?:-start)?\(", str(program.as_text()))
    assert len(sent) == 1, sent  # The logits of the whole batch.
    # Two sequences on a device: N H Hv float32, and three tokens of K H twice and of N Hv.
    sizes = 2 * 4 * (4 * 8 * 6 + 3 * (2 * 8 + 2 * 8 + 4 * 6))
    assert found == [sizes, sizes]


def test_a_striped_layout_raises():
    _, model = models(PURE, {"seq": 2}, "striped:4")
    message = "layout is 'striped:4', in which neighboring tokens are on different devices: Gener"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        Generator(model, max_length=8)


def test_a_convolution_of_one_tap_raises():
    config = dataclasses.replace(PURE, delta_net=dataclasses.replace(SIZES, conv_taps=1))
    with pytest.raises(NotImplementedError, match="conv_taps 1, and the cache has the inputs of"):
        Generator(models(config, {"seq": 2}, "zigzag")[1], max_length=8)


def test_merged_adapters():
    """An adapted model raises; a merged one is a model of the sums, which the cases above serve."""
    config = dataclasses.replace(SHORT, lora=Lora(2))
    adapted = decoders.with_drawn_weights(config, mesh=mesh_of(seq=2), layout="zigzag")
    with pytest.raises(ValueError, match="the model has LoRA adapters: merge them first, by"):
        Generator(adapted, max_length=8)
    model = merge_lora(adapted)
    assert model.config == SHORT
    weights, merged = (
        nnx.to_pure_dict(nnx.state(each))["delta_net_layers"]["attention"]
        for each in (adapted, model)
    )
    names = [
        name for name, part in weights.items() if isinstance(part, dict) and "kernel_lora_a" in part
    ]
    assert set(names) == set(adapted.config.adapted) & set(weights)
    assert {"decay", "output_gate"} <= set(names)
    for name in names:
        kernel, a, b = (
            np.asarray(weights[name][key], np.float64)
            for key in ("kernel", "kernel_lora_a", "kernel_lora_b")
        )
        product = (a @ b).reshape(kernel.shape)
        assert np.abs(product).max() > 0
        np.testing.assert_allclose(merged[name]["kernel"], kernel + product, atol=1e-5)


@pytest.mark.parametrize("negative_eigenvalues", [False, True])
def test_the_kernel_of_a_step_is_given_what_the_layer_computes(monkeypatch, negative_eigenvalues):
    """Instead of it runs the formula, in float64, with what it is given."""
    rngs, features, heads, batch = nnx.Rngs(0), 24, (2, 4), 3
    layer = GatedDeltaNet(
        features, heads[1], num_key_heads=heads[0], head_dim=delta_step_cases.DIM,
        norm_epsilon=1e-2, negative_eigenvalues=negative_eigenvalues, rngs=rngs,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    for weight in (layer.A_log, layer.dt_bias, layer.norm.scale):
        weight[...] = normal(*weight.shape)
    x = normal(batch, features)
    before = jax.tree.map(lambda like: normal(*like.shape), layer.initial_state(batch, jnp.float32))
    present = jnp.array([1, 0, 1], jnp.int32)
    out, after = layer.step(x, before)
    fused: Any = nnx.merge(*nnx.split(layer))
    kernels = tuple(getattr(layer, name).kernel[...] for name in fused_delta_net.NAMES)
    specs = (jax.P(),) * len(kernels)
    matrices = fused_delta_net.fuse(kernels, mesh_of(seq=1), specs)
    fused.query.kernel = nnx.Param(matrices[0])
    fused = fused_delta_net.with_fused_projections(fused, at_once=True)
    asked = []

    def formula(projected, weights, state, present, **options):
        asked.append(options["most_beta"])
        epsilons = options["unit_epsilon"], options["norm_epsilon"]
        given = (jax.tree.map(lambda x: np.asarray(x, float), x) for x in (weights, state))
        weights, state = given
        found = delta_step_cases.by_formula(
            np.asarray(projected, float), weights, state, np.asarray(present), asked[-1], *epsilons
        )
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), found)

    monkeypatch.setattr(step, "step", formula)
    monkeypatch.setattr(delta_net_step, "supports_step", lambda *_: True)
    got, states = delta_net_step.delta_net_step(fused, x, before, present)
    assert asked == [2.0 if negative_eigenvalues else 1.0]
    np.testing.assert_allclose(got[::2], out[::2], rtol=1e-4, atol=1e-5)
    for new, want, old in zip(states, after, before, strict=True):
        np.testing.assert_allclose(new[::2], want[::2], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(new[1], old[1])
