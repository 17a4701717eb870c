"""GatedDeltaNet against plain JAX in float64, token by token."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen3_next_layer
from delta_net_layers import HV, SEGMENTS, B, D, H, Layers, N, T, X, results, with_weights
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of

from burst_jax import GatedDeltaNet, from_layout, positions, to_layout
from burst_jax.layers.gated_delta_net import DECAY_RATES, TIME_STEPS

K = 2


def created(**changes: Any):
    options: Any = {"num_key_heads": K, "head_dim": H, "value_head_dim": HV, "rngs": nnx.Rngs(0)}
    options |= changes
    return GatedDeltaNet(D, N, **options)


LAYERS = Layers(created)
make_layer = LAYERS.make


def test_equals_the_formula_on_one_device():
    """Padding may hold NaN."""
    got = results(make_layer())
    assert_close(got, LAYERS.truth, 2e-6)
    assert not got[0][SEGMENTS == 0].any()
    with_nan = np.where((SEGMENTS == 0)[..., None], np.float32("nan"), X)
    np.testing.assert_array_equal(results(make_layer(), x=with_nan)[0], got[0])


@pytest.mark.parametrize(
    ("layout", "sizes", "kind"),
    [
        ("zigzag", {"data": 2, "seq": 2, "model": 2}, AxisType.Auto),
        pytest.param(
            "contiguous", {"data": 2, "seq": 4}, AxisType.Explicit, marks=pytest.mark.slow
        ),
    ],
)
def test_equals_the_formula_on_a_mesh(layout, sizes, kind):
    tensor_axis = "model" if "model" in sizes else None
    with jax.set_mesh(mesh_of(kind, **sizes)):
        layer = make_layer(batch_axis="data", tensor_axis=tensor_axis, layout=layout)
        got = results(layer, layout, sizes["seq"])
    assert_close(got, LAYERS.truth, 2e-6)


def test_inside_a_shard_map():
    """A device has its own heads' weights; a padding id of others, and documents from 0 on."""
    mesh = mesh_of(seq=2, model=2)
    layer = make_layer(layout="zigzag", tensor_axis="model", padding_id=-1)
    graphdef, params = nnx.split(layer)

    def spec(path, _):
        name, heads = path[-2].key if path[-1].key == "kernel" else path[-1].key, P("model")
        if name == "scale":
            return P()
        if name in ("out", "A_log", "dt_bias"):
            return heads
        return P(None, "model")

    specs = jax.tree_util.tree_map_with_path(spec, nnx.to_pure_dict(params))
    tokens = P(None, "seq")

    @quick_jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, tokens, P("seq"), tokens), out_specs=tokens
    )
    def run(params, x, order, ids):
        state = nnx.eval_shape(lambda: nnx.state(layer))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef, state)(x, order, ids)

    x, ids = to_layout((X, SEGMENTS - 1), "zigzag", 2)
    order = positions("zigzag", T, 2)
    with jax.set_mesh(mesh):
        out = run(nnx.to_pure_dict(params), x, order, ids)
    assert_close(from_layout(out, "zigzag", 2), LAYERS.truth[0], 2e-6)


def test_prefill_and_steps_continue_the_sequence():
    """Prompts of different lengths in a permuted order, then token by token."""
    want = LAYERS.truth[0]
    mesh, lengths = mesh_of(seq=2), np.asarray([24, 16])
    ids = np.where(np.arange(T) < lengths[:, None], SEGMENTS, 0)
    layer = make_layer(mesh=mesh, layout="zigzag")
    order, kept = positions("zigzag", T, 2), ids > 0
    out, state = quick_jit(layer.prefill)(X[:, order], ids[:, order])
    assert_close(np.asarray(out)[:, np.argsort(order)][kept], want[kept], 2e-6)
    step = quick_jit(layer.step)
    for more in range(5):
        at = lengths + more
        y, state = step(X[np.arange(B), at], state)
        assert_close(y, want[np.arange(B), at], 2e-6)


def test_steps_from_the_first_token_and_after_fewer_tokens_than_taps():
    layer = make_layer()
    whole, step = np.asarray(quick_jit(layer)(X)), quick_jit(layer.step)
    for first in (0, 2):
        state = layer.initial_state(B)
        if first:
            _, state = quick_jit(layer.prefill)(X[:, :first])
        for t in range(first, first + 4):
            y, state = step(X[:, t], state)
            assert_close(y, whole[:, t], 2e-6)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, layer.initial_state(B))


def test_parts_of_sequences_continue_their_states():
    """Inside a ``shard_map``, with padding in front of a part, and one that is all padding."""
    layer, whole = make_layer(layout="zigzag"), np.asarray(quick_jit(make_layer())(X))
    # Tokens of each sequence in a part of 12 or 8; the others are padding in front.
    lengths, used = [(12, 7), (8, 0), (1, 6), (2, 8)], np.zeros(B, int)
    tokens = P(None, "seq")

    @quick_jit
    @functools.partial(
        jax.shard_map, mesh=mesh_of(seq=2), in_specs=(tokens, tokens, P()), out_specs=(tokens, P())
    )
    def run(x, ids, state):
        return layer.prefill(x, ids, state)

    state = layer.initial_state(B)
    for number, new in enumerate(lengths):
        size = 8 if number else 12
        ids = (np.arange(size) >= size - np.asarray(new)[:, None]).astype(np.int32)
        x = np.full((B, size, D), np.nan, np.float32)
        for row, count in enumerate(new):
            x[row, size - count :] = X[row, used[row] : used[row] + count]
        order = positions("zigzag", size, 2)
        out, state = run(x[:, order], ids[:, order], state)
        out = np.asarray(out)[:, np.argsort(order)]
        for row, count in enumerate(new):
            if count:
                want = whole[row, used[row] : used[row] + count]
                assert_close(out[row, size - count :], want, 2e-6)
        used += new
    y, _ = quick_jit(layer.step)(X[np.arange(B), used], state)
    assert_close(y, whole[np.arange(B), used], 2e-6)


def test_a_layer_of_one_tap_continues_a_state_without_inputs():
    layer = created(conv_taps=1)
    state = layer.initial_state(B)
    assert state.value.shape == (B, 0, N, HV)
    out, after = jax.eval_shape(layer.prefill, X, None, state)
    assert out.shape == X.shape
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert jax.eval_shape(layer.step, X[:, 0], after)[0].shape == X[:, 0].shape


def test_half_precision_and_dtypes():
    out = quick_jit(make_layer(dtype=jnp.bfloat16))(X)
    want = LAYERS.truth[0]
    first = SEGMENTS[1] == 1  # Without ids the first document of a sequence is the same.
    assert out.dtype == jnp.bfloat16
    error = np.asarray(out, np.float64)[1, first] - want[1, first]
    assert 1e-4 < np.linalg.norm(error) / np.linalg.norm(want[1, first]) < 3e-2
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    layer = nnx.eval_shape(lambda: created(**options))
    state = nnx.to_flat_state(nnx.state(layer))
    wide = {path[0] for path, x in state if x.get_value().dtype == jnp.float32}
    assert wide == {"A_log", "dt_bias"}
    state = layer.initial_state(3)
    assert (state.state.dtype, state.query.dtype) == (jnp.float32, jnp.bfloat16)


def test_gates_start_as_in_the_paper():
    make = functools.partial(GatedDeltaNet, D, 512, head_dim=4)
    state = quick_jit(lambda: nnx.state(make(rngs=nnx.Rngs(0))))()
    steps, rates = np.log1p(np.exp(state["dt_bias"][...])), np.exp(state["A_log"][...])
    for found, (low, high) in ((steps, TIME_STEPS), (rates, DECAY_RATES)):
        assert low * 0.999 < found.min() < low * 1.3
        assert high * 0.9 < found.max() < high * 1.001


def test_a_layer_can_be_pickled_and_hashed():
    layer = make_layer(mesh=mesh_of(seq=2), layout="zigzag")
    again = pickle.loads(pickle.dumps(layer))
    graphdefs = nnx.split(layer)[0], nnx.split(again)[0]
    assert graphdefs[0] == graphdefs[1]
    assert hash(graphdefs[0]) == hash(graphdefs[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_key_heads": 3}, "num_heads is 4, num_key_heads 3: num_heads must be a multiple of"),
        ({"head_dim": 0}, "head_dim is 0: it must be an integer, at least 1"),
        ({"conv_taps": 2.5}, "conv_taps is 2.5: it must be an integer"),
        ({"norm_epsilon": 0.0}, "norm_epsilon is 0.0: it must be positive and finite"),
        ({"negative_eigenvalues": 2}, "negative_eigenvalues is 2: it must be True or False"),
        ({"layout": "zigzig"}, "layout is 'zigzig': use one of"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        created(**options)


def test_wrong_calls():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"x has shape \(2, 24\): it needs \[B, T, features\]"):
        layer(X[:, 0])
    with pytest.raises(
        ValueError, match=r"x has shape \(2, 32, 24\): a step needs \[B, features\]"
    ):
        layer.step(X, layer.initial_state(B))
    wrong = r"state.state has shape \(3, 4, 6, 10\), and of x's 2 sequences it has \(2, 4, 6, 10\)"
    with pytest.raises(ValueError, match=wrong):
        layer.step(X[:, 0], layer.initial_state(3))
    with pytest.raises(ValueError, match=wrong):
        layer.prefill(X, None, layer.initial_state(3))
    shorter = layer.initial_state(B)._replace(value=jnp.zeros((B, 2, 4, 10)))
    with pytest.raises(ValueError, match=r"state.value has shape \(2, 2, 4, 10\)"):
        layer.prefill(X, None, shorter)
    with pytest.raises(ValueError, match="batch is 0: it must be an integer"):
        layer.initial_state(0)
    layer = make_layer(mesh=mesh_of(seq=2), layout="zigzag")
    with pytest.raises(ValueError, match=r"pass burst_jax.positions\('zigzag', 32, 2\)"):
        layer(X, np.arange(T))
    with pytest.raises(NotImplementedError, match="layout is 'striped', in which neighboring"):
        make_layer(mesh=mesh_of(seq=2), layout="striped")(X)
    explicit = mesh_of(AxisType.Explicit, seq=1, model=2)
    with pytest.raises(NotImplementedError, match="tensor_axis is 'model', an Explicit mesh axis"):
        make_layer(mesh=explicit, tensor_axis="model")(X)


def test_wrong_calls_inside_a_shard_map():
    mesh, layer = mesh_of(seq=2, model=2), make_layer(tensor_axis="model")
    message = "2 devices, and each has the weights of 2 of 2 key heads: inside"
    tokens = P(None, "seq")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.shard_map(layer, mesh=mesh, in_specs=tokens, out_specs=tokens), X)


def test_equals_the_layer_of_transformers():
    """Qwen3NextGatedDeltaNet in float32, whose output is stored."""
    created = functools.partial(
        GatedDeltaNet, qwen3_next_layer.FEATURES, qwen3_next_layer.HEADS,
        num_key_heads=qwen3_next_layer.KEY_HEADS, head_dim=qwen3_next_layer.HEAD_DIM,
        value_head_dim=qwen3_next_layer.VALUE_DIM, mesh=mesh_of(seq=3), layout="zigzag",
    )  # fmt: skip
    given = qwen3_next_layer.parameters()
    layer = with_weights(lambda: created(rngs=nnx.Rngs(0)), given)
    for path, weight in nnx.to_flat_state(nnx.state(layer)):
        assert weight.get_value().shape == given[".".join(map(str, path))].shape
    x = np.asarray(qwen3_next_layer.X)
    order = positions("zigzag", x.shape[1], 3)
    out = np.asarray(quick_jit(layer)(x[:, order]))[:, np.argsort(order)]
    want = np.load(qwen3_next_layer.FILE)["out"]
    # The stored output is 5.6e-7 from float64 itself.
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6 * np.abs(want).max())
