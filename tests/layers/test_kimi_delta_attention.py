"""KimiDeltaAttention against plain JAX in float64, token by token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import kimi_linear_layer
import numpy as np
import pytest
from delta_net_layers import HV, SEGMENTS, B, D, H, Layers, N, T, X, results, with_weights
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from meshes import assert_close, mesh_of

from burst_jax import KimiDeltaAttention, positions
from burst_jax.layers.gated_delta_net import DECAY_RATES, TIME_STEPS


def created(**changes: Any):
    options: Any = {"head_dim": H, "value_head_dim": HV, "rngs": nnx.Rngs(0)} | changes
    return KimiDeltaAttention(D, N, **options)


LAYERS = Layers(created)
make_layer = LAYERS.make


def but_a_log(results):
    out, weights, x = results
    return out, {name: each for name, each in weights.items() if name != "A_log"}, x


def test_equals_the_formula():
    """Over all kinds of axes; the layers of test_gated_delta_net.py run over Explicit ones, too."""
    want = LAYERS.truth  # Drawn weights, without a mesh.
    with jax.set_mesh(mesh_of(data=2, seq=2, model=2)):
        layer = make_layer(layout="zigzag", batch_axis="data", tensor_axis="model")
        got = results(layer, "zigzag", 2)
    # The terms of A_log's gradient, of both signs, are 18 times as large as their sum.
    assert_close(got[1]["A_log"], want[1]["A_log"], 18 * 6e-7)
    assert_close(but_a_log(got), but_a_log(want), 2e-6)
    assert not got[0][SEGMENTS == 0].any()


def test_prefill_and_steps_continue_the_sequence():
    """Prompts of different lengths in a permuted order, then token by token."""
    want, lengths = LAYERS.truth[0], np.asarray([24, 16])
    ids = np.where(np.arange(T) < lengths[:, None], SEGMENTS, 0)
    layer = make_layer(mesh=mesh_of(seq=2), layout="zigzag")
    order = positions("zigzag", T, 2)
    _, state = quick_jit(layer.prefill)(X[:, order], ids[:, order])
    step = quick_jit(layer.step)
    for more in range(3):
        at = lengths + more
        y, state = step(X[np.arange(B), at], state)
        assert_close(y, want[np.arange(B), at], 2e-6)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, layer.initial_state(B))


def test_weights():
    """Two matrices of rank Hv per gate, a decay per key channel; gates start as in the paper."""
    options: Any = {"head_dim": 64, "value_head_dim": 8, "param_dtype": jnp.bfloat16}
    layer = nnx.eval_shape(lambda: KimiDeltaAttention(D, 8, rngs=nnx.Rngs(0), **options))
    flat = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(layer))}
    shapes = {name: x.get_value().shape for name, x in flat.items()}
    assert {name: shape for name, shape in shapes.items() if "gate" in name or "dec" in name} == {
        "decay_a.kernel": (D, 8), "decay_b.kernel": (8, 8, 64),
        "output_gate_a.kernel": (D, 8), "output_gate_b.kernel": (8, 8, 8),
    }  # fmt: skip
    assert (shapes["A_log"], shapes["dt_bias"]) == ((8,), (8, 64))
    wide = {name for name, x in flat.items() if x.get_value().dtype == jnp.float32}
    assert wide == {"A_log", "dt_bias"}
    make = functools.partial(KimiDeltaAttention, D, 512, head_dim=2)
    state = quick_jit(lambda: nnx.state(make(rngs=nnx.Rngs(0))))()
    steps, rates = np.log1p(np.exp(state["dt_bias"][...])), np.exp(state["A_log"][...])
    for found, (low, high) in ((steps, TIME_STEPS), (rates, DECAY_RATES)):
        assert low * 0.999 < found.min() < low * 1.3
        assert high * 0.9 < found.max() < high * 1.001


def test_errors_name_the_layer():
    explicit = mesh_of(AxisType.Explicit, seq=1, model=2)
    with pytest.raises(NotImplementedError, match="an Explicit mesh axis: KimiDeltaAttention gath"):
        make_layer(mesh=explicit, tensor_axis="model")(X)
    with pytest.raises(ValueError, match="num_heads is 4, num_key_heads 3: num_heads must be a mu"):
        created(num_key_heads=3)
    layer = make_layer(mesh=mesh_of(seq=2), implementation="mosaic_sm90")
    with pytest.raises(NotImplementedError, match="'mosaic_sm90' cannot run: it needs compute"):
        layer(X)


def test_equals_the_layer_of_transformers():
    """KimiLinearDeltaAttention in float32, whose output is stored."""
    created = functools.partial(
        KimiDeltaAttention, kimi_linear_layer.FEATURES, kimi_linear_layer.HEADS,
        head_dim=kimi_linear_layer.HEAD_DIM, norm_epsilon=1e-5, mesh=mesh_of(seq=3),
        layout="zigzag",
    )  # fmt: skip
    layer = with_weights(lambda: created(rngs=nnx.Rngs(0)), kimi_linear_layer.parameters())
    x = np.asarray(kimi_linear_layer.X)
    order = positions("zigzag", x.shape[1], 3)
    out = np.asarray(quick_jit(layer)(x[:, order]))[:, np.argsort(order)]
    want = np.load(kimi_linear_layer.FILE)["out"]
    np.testing.assert_allclose(out, want, rtol=0, atol=3e-6 * np.abs(want).max())
