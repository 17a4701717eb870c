"""LinenBurstAttention against BurstAttention on the same weights."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from implementations import quick_jit
from jax.sharding import AxisType
from meshes import assert_close, make_mesh, mesh_of, random_like
from test_flax_layer import make_layer

from burst_jax import BurstAttention, LinenBurstAttention, burst_attention, positions
from burst_jax.layers.linen_layer import _OF_LINEN
from burst_jax.layers.nnx_layer import REFUSED
from burst_jax.layers.options import OPTIONS

B, T, D, N, K, H = 2, 32, 24, 4, 2, 6
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)


def make_linen(mesh=None, **options: Any) -> LinenBurstAttention:
    given: dict[str, Any] = {"num_kv_heads": K, "head_dim": H, **options}
    return LinenBurstAttention(num_heads=N, mesh=mesh or make_mesh(), **given)


def test_it_has_the_nnx_layers_arguments():
    """And their defaults: but for the features, which linen reads off the input, and for rngs."""
    of_nnx = inspect.signature(BurstAttention.__init__).parameters
    named = {
        name: parameter.default
        for name, parameter in of_nnx.items()
        if name not in ("self", "in_features", "rngs", "options")
    }
    optional = inspect.signature(burst_attention).parameters
    passed_on = {name: optional[name].default for name in OPTIONS if name not in REFUSED}
    fields = dataclasses.fields(LinenBurstAttention)
    missing = inspect.Parameter.empty
    got = {
        field.name: missing if field.default is dataclasses.MISSING else field.default
        for field in fields
        if field.name not in _OF_LINEN
    }
    assert got == named | passed_on


@pytest.mark.parametrize(
    ("kind", "layout", "options"),
    [
        (AxisType.Auto, "zigzag", {"qk_norm": True, "sinks": True, "tensor_axis": "x"}),
        (AxisType.Explicit, "striped", {"out_features": 8, "local_window_size": 7}),
        pytest.param(
            AxisType.Auto,
            "contiguous",
            {"rope_theta": None, "dtype": jnp.bfloat16, "seq_axis": ("x", "seq")},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["auto", "explicit", "bfloat16"],
)
def test_outputs_and_gradients_equal_the_nnx_layers(kind, layout, options):
    mesh = mesh_of(kind, data=2, seq=2, x=2)
    options = {"batch_axis": "data", "is_causal": True, "layout": layout, **options}
    nnx_layer = make_layer(mesh, **options)
    linen_layer = make_linen(mesh, **options)
    graphdef, state = nnx.split(nnx_layer)
    # Biases of zero would hide one that is not added.
    state = random_like(state, 3)
    params = nnx.to_pure_dict(state)
    segments = np.ones((B, T), np.int32)
    segments[0, 12:], segments[1, 20:23] = 2, 0
    at = None
    if nnx_layer.rope_theta is not None:
        at = jnp.asarray(positions(layout, T, 2))

    def both(run):
        @quick_jit
        def results(params, x):
            ids = jax.device_put(segments, jax.typeof(x).sharding.update(spec=jax.P("data", "seq")))
            out, vjp = jax.vjp(lambda params, x: run(params, x, at, ids), params, x)
            return out, vjp(jax.device_put(random_like(out, 2), jax.typeof(out).sharding))

        return results

    x = jax.device_put(random_like(X, 1), jax.NamedSharding(mesh, jax.P("data", "seq")))
    with jax.set_mesh(mesh):
        want = both(lambda params, *rest: nnx.merge(graphdef, params)(*rest))(state, x)
        got = both(lambda params, *rest: linen_layer.apply({"params": params}, *rest))(params, x)
    assert got[0].dtype == want[0].dtype
    want = (want[0], (nnx.to_pure_dict(want[1][0]), want[1][1]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert_close(got, want)


def test_init_makes_the_nnx_layers_weights():
    options: dict[str, Any] = {"qk_norm": True, "use_bias": True, "param_dtype": jnp.bfloat16}
    options |= {"sinks": True}
    variables = make_linen(**options).init(
        jax.random.key(0), random_like(X, 1).astype(jnp.bfloat16), jnp.arange(T)
    )
    layer = BurstAttention(
        D, N, num_kv_heads=K, head_dim=H, mesh=make_mesh(), rngs=nnx.Rngs(0), **options
    )
    want = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    assert set(variables) == {"params"}
    got = variables["params"]
    described = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (got, want)]
    assert described[0] == described[1]
    # Each kernel is drawn by itself, and as large as the nnx layer draws it.
    key, value = (np.asarray(got[name]["kernel"], np.float32) for name in ("key", "value"))
    assert not np.array_equal(key, value)
    assert key.std() == pytest.approx(D**-0.5, rel=0.2)


def test_layers_in_a_model_have_weights_of_their_own():
    class Two(linen.Module):
        @linen.compact
        def __call__(self, x, at):
            for _ in range(2):
                x = x + LinenBurstAttention(num_heads=N, mesh=make_mesh(seq=2))(x, at)
            return x

    at = jnp.arange(T, dtype=jnp.int32)
    variables = jax.jit(Two().init)(jax.random.key(0), random_like(X, 1), at)
    names = ["LinenBurstAttention_0", "LinenBurstAttention_1"]
    assert sorted(variables["params"]) == names
    first, second = (variables["params"][name]["query"]["kernel"] for name in names)
    assert not np.array_equal(first, second)


def test_kernels_keep_their_axis_names():
    def named(*names: str):
        return linen.with_partitioning(nnx.initializers.lecun_normal(), names)

    layer = make_linen(
        kernel_init=named("embed", "heads", "dim"), out_kernel_init=named("heads", "dim", "embed")
    )
    x, at = random_like(X, 1), jnp.arange(T, dtype=jnp.int32)
    variables = layer.init(jax.random.key(0), x, at)
    specs = linen.get_partition_spec(variables)["params"]
    assert specs["query"]["kernel"] == jax.P("embed", "heads", "dim")
    assert specs["out"]["kernel"] == jax.P("heads", "dim", "embed")
    plain = linen.meta.unbox(variables)
    np.testing.assert_array_equal(layer.apply(variables, x, at), layer.apply(plain, x, at))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": True}, TypeError, r"LinenBurstAttention got .*'causal': use mesh, .*'is_caus"),
        ({"qk_norms": True}, TypeError, r"unknown option 'qk_norms': .* Did you mean 'qk_norm'\?"),
        ({"return_residual": True}, ValueError, "does not take return_residual: .*burst_attention"),
        ({"query_segment_ids": None}, ValueError, "query_segment_ids: pass segment_ids to the cal"),
        ({"sink_logits": None}, ValueError, "not take sink_logits: sinks=True makes it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_raise_at_once(options, error, message):
    with pytest.raises(error, match=message):
        make_linen(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads is 4, num_kv_heads 3: .*multiple"),
        ({"head_dim": 5}, "head_dim is 5: RoPE rotates pairs"),
        ({"layout": "zig-zag"}, "layout is 'zig-zag'"),
        ({"rope_theta": None}, "rope_theta is None: the layer would ignore them"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_values_raise_when_it_is_initialized(options, message):
    with pytest.raises(ValueError, match=message):
        make_linen(**options).init(jax.random.key(0), random_like(X, 1), jnp.arange(T))


def test_wrong_inputs_raise():
    layer, x = make_linen(), random_like(X, 1)
    at = jnp.arange(T, dtype=jnp.int32)
    variables = layer.init(jax.random.key(0), x, at)
    with pytest.raises(ValueError, match="positions are missing"):
        layer.apply(variables, x)
    with pytest.raises(ValueError, match=r"x has shape \(32, 24\): it needs \[B, T, features\]"):
        layer.apply(variables, x[0], at)
    with pytest.raises(ValueError, match="positions cover 1 rows of 31 tokens"):
        layer.apply(variables, x, at[1:])
    zigzag = make_linen(make_mesh(seq=4), layout="zigzag", is_causal=True)
    with pytest.raises(ValueError, match=r"pass burst_jax.positions\('zigzag', 32, 4\)"):
        zigzag.apply(variables, x, at)
    other = jax.tree.map(lambda leaf: leaf, variables["params"])
    other["query"]["kernel"] = jnp.zeros((D + 1, N, H))
    with pytest.raises(Exception, match="query"):
        layer.apply({"params": other}, x, at)
