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
from meshes import make_mesh, mesh_of, random_like
from test_nnx_layer import POSITIONS, B, D, H, K, N, T, X, make_layer

from burst_jax import BurstAttention, LinenBurstAttention, burst_attention, positions
from burst_jax.attention.arguments import AttentionOptions
from burst_jax.layers.linen_layer import LINEN_FIELDS
from burst_jax.layers.nnx_layer import REJECTED


def make_linen(mesh=None, **options: Any) -> LinenBurstAttention:
    options = {"num_kv_heads": K, "head_dim": H, **options}
    return LinenBurstAttention(num_heads=N, mesh=mesh or make_mesh(), **options)


def test_it_has_the_nnx_layers_arguments():
    """And their defaults, except for the features, which linen infers, and rngs."""
    of_nnx = inspect.signature(BurstAttention.__init__).parameters
    own = {
        name: parameter.default
        for name, parameter in of_nnx.items()
        if name not in ("self", "in_features", "rngs", "options")
    }
    optional = inspect.signature(burst_attention).parameters
    names = [name for name in AttentionOptions.__annotations__ if name not in REJECTED]
    missing = inspect.Parameter.empty
    got = {
        field.name: missing if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(LinenBurstAttention)
        if field.name not in LINEN_FIELDS
    }
    assert got == own | {name: optional[name].default for name in names}
    shown = inspect.signature(LinenBurstAttention).parameters
    assert [name for name in shown if name not in LINEN_FIELDS] == list(got)


@pytest.mark.slow
def test_outputs_and_gradients_equal_the_nnx_layers():
    mesh, layout = mesh_of(seq=2, x=2), "zigzag"
    options: Any = {"is_causal": True, "layout": layout}
    options |= {"qk_norm": True, "sinks": True, "tensor_axis": "x"}
    linen_layer = make_linen(mesh, **options)
    graphdef, state = nnx.split(make_layer(mesh, **options))
    state = random_like(state, 3)
    segments = jnp.ones((B, T), jnp.int32).at[0, 12:].set(2).at[1, 20:23].set(0)
    at = jnp.asarray(positions(layout, T, 2))

    def results(run, params):
        @quick_jit
        def both(params, x):
            out, vjp = jax.vjp(lambda params, x: run(params, x, at, segments), params, x)
            return out, vjp(random_like(out, 2))

        return both(params, X)

    want, (of_state, of_x) = results(lambda state, *rest: nnx.merge(graphdef, state)(*rest), state)
    got = results(
        lambda params, *rest: linen_layer.apply({"params": params}, *rest), nnx.to_pure_dict(state)
    )
    want = want, (nnx.to_pure_dict(of_state), of_x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_init_makes_the_nnx_layers_weights():
    options: dict[str, Any] = {"qk_norm": True, "use_bias": True, "param_dtype": jnp.bfloat16}
    options |= {"sinks": True}
    init = jax.jit(make_linen(**options).init)  # Without the attention, whose result is unused.
    got = init(jax.random.key(0), X.astype(jnp.bfloat16), POSITIONS)
    assert set(got) == {"params"}
    got = got["params"]
    layer = BurstAttention(
        D, N, num_kv_heads=K, head_dim=H, mesh=make_mesh(), rngs=nnx.Rngs(0), **options
    )
    want = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    described = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (got, want)]
    assert described[0] == described[1]
    # Each kernel is drawn independently, with the nnx layer's scale.
    key, value = (np.asarray(got[name]["kernel"], np.float32) for name in ("key", "value"))
    assert not np.array_equal(key, value)
    assert key.std() == pytest.approx(D**-0.5, rel=0.2)

    class Two(linen.Module):
        @linen.compact
        def __call__(self, x, at):
            for _ in range(2):
                x = x + LinenBurstAttention(num_heads=N, mesh=make_mesh(seq=2))(x, at)
            return x

    params = jax.jit(Two().init)(jax.random.key(0), X, POSITIONS)["params"]
    names = ["LinenBurstAttention_0", "LinenBurstAttention_1"]
    assert sorted(params) == names
    first, second = (params[name]["query"]["kernel"] for name in names)
    assert not np.array_equal(first, second)


def test_kernels_keep_their_axis_names():
    def named(*names: str):
        return linen.with_partitioning(nnx.initializers.lecun_normal(), names)

    layer = make_linen(
        kernel_init=named("embed", "heads", "dim"), out_kernel_init=named("heads", "dim", "embed")
    )
    variables = jax.jit(layer.init)(jax.random.key(0), X, POSITIONS)
    specs = linen.get_partition_spec(variables)["params"]
    assert specs["query"]["kernel"] == jax.P("embed", "heads", "dim")
    assert specs["out"]["kernel"] == jax.P("heads", "dim", "embed")
    assert jax.eval_shape(lambda: layer.apply(variables, X, POSITIONS)).shape == X.shape


def test_mistakes_raise():
    with pytest.raises(TypeError, match=r"LinenBurstAttention got .*'qk_norms': .* 'qk_norm'"):
        make_linen(qk_norms=True)
    with pytest.raises(ValueError, match="not accept sink_logits: sinks=True makes it"):
        make_linen(sink_logits=None)
    layer, key = make_linen(), jax.random.key(0)
    variables = jax.eval_shape(layer.init, key, X, POSITIONS)

    def apply(layer, variables, x):  # The positions are a constant.
        jax.eval_shape(lambda variables, x: layer.apply(variables, x, POSITIONS), variables, x)

    with pytest.raises(ValueError, match=r"num_heads is 4, num_kv_heads 3: .*multiple"):
        make_linen(num_kv_heads=3).init(key, X, POSITIONS)
    with pytest.raises(ValueError, match=r"x has shape \(32, 24\): it needs \[B, T, features\]"):
        apply(layer, variables, X[0])
    zigzag = make_linen(make_mesh(seq=4), layout="zigzag", is_causal=True)
    with pytest.raises(ValueError, match=r"pass burst_jax.positions\('zigzag', 32, 4\)"):
        apply(zigzag, variables, X)
    variables["params"]["query"]["kernel"] = jax.ShapeDtypeStruct((D + 1, N, H), jnp.float32)
    with pytest.raises(Exception, match="query"):
        apply(layer, variables, X)
