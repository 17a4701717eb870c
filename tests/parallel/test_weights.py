"""Weights gathered and gradients scattered by permutes, as by JAX's own collectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from burst_jax.parallel import collectives as weights

MESH = (2, 3)


def on_the_mesh(function, x, spec):
    """``function`` of each device's part of ``x``; the results of all devices, stacked."""
    mesh = jax.make_mesh(MESH, ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def local(x):
        return function(x)[None]

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P(("a", "b")))
    return np.asarray(jax.jit(run)(x))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("names", [("a",), ("b",), ("a", "b"), ("b", "a")], ids="-".join)
def test_permutes_gather_and_scatter_as_collectives_do(names, dim):
    x = jax.random.normal(jax.random.key(0), (12, 18, 2))
    spec = P("a", "b")
    gathered = on_the_mesh(lambda x: weights.gather_by_permutes(x, names, dim), x, spec)
    wanted = on_the_mesh(lambda x: lax.all_gather(x, names, axis=dim, tiled=True), x, spec)
    np.testing.assert_array_equal(gathered, wanted)
    scattered = on_the_mesh(lambda x: weights.scatter_by_permutes(x, names, dim), x, spec)
    wanted = on_the_mesh(
        lambda x: lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True), x, spec
    )
    np.testing.assert_allclose(scattered, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("copies", [False, True])
def test_gradients_are_sums_of_all_devices_either_way(copies, monkeypatch):
    monkeypatch.setattr(weights, "has_peer_copies", lambda: copies)
    mesh = jax.make_mesh(MESH, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    matrix = jax.random.normal(jax.random.key(0), (6, 4))
    inputs = jax.random.normal(jax.random.key(1), (6, 5, 6))
    spec = P(("a", "b"))

    def local(matrix, inputs):
        whole = weights.gather_weights(
            matrix, spec, over=("a", "b"), dtype=jnp.bfloat16, widen=True
        )
        return lax.psum(jnp.sum(jnp.sin(inputs[0] @ whole)), ("a", "b"))

    def loss(matrix):
        run = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=P())
        return run(matrix, inputs)

    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(matrix))
    assert ("ppermute" in jaxpr) == copies
    assert ("all_gather" in jaxpr) != copies
    assert ("reduce_scatter" in jaxpr) != copies
    rounded = matrix.astype(jnp.bfloat16).astype(jnp.float32)
    want = jax.grad(lambda m: jnp.sum(jnp.sin(inputs.reshape(-1, 6) @ m)))(rounded)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(matrix), want, rtol=1e-4, atol=1e-5)
