"""All-gather, reduce-scatter and all-to-all by permutes, compared with JAX's own collectives."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from burst_jax.parallel import collectives

NAMES = [("a",), ("b",), ("a", "b"), ("b", "a")]


def test_permutes_equal_collectives(monkeypatch):
    """Over one axis and two, in the mesh's order and the other one, along both dimensions."""
    monkeypatch.setattr(collectives, "has_peer_copies", lambda: True)
    cases = list(itertools.product(NAMES, (0, 1)))

    def local(x):
        results = []
        for names, dim in cases:
            parts = x.reshape(lax.axis_size(names), -1)
            by_permutes = (
                collectives.gather_by_permutes(x, names, dim),
                collectives.scatter_by_permutes(x, names, dim),
                collectives.exchange(parts, names),
            )
            by_jax = (
                lax.all_gather(x, names, axis=dim, tiled=True),
                lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True),
                lax.all_to_all(parts, names, 0, 0, tiled=True),
            )
            results.append((by_permutes, by_jax))
        return jax.tree.map(lambda x: x[None], results)

    x = np.random.default_rng(0).normal(size=(12, 18, 2)).astype(np.float32)
    mesh = mesh_of(a=2, b=3)
    run = jax.shard_map(local, mesh=mesh, in_specs=P("a", "b"), out_specs=P(("a", "b")))
    for case, (got, want) in zip(cases, jax.jit(run)(x), strict=True):
        np.testing.assert_array_equal(got[0], want[0], err_msg=str(case))
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=1e-6, err_msg=str(case))
        np.testing.assert_array_equal(got[2], want[2], err_msg=str(case))


@pytest.mark.parametrize("peer_copies", [False, True])
def test_gradients_are_summed_over_all_devices(peer_copies, monkeypatch):
    monkeypatch.setattr(collectives, "has_peer_copies", lambda: peer_copies)
    mesh, spec, replicated = mesh_of(a=2, b=3), P(("a", "b")), P("a")
    matrix, other = jax.random.normal(jax.random.key(0), (2, 6, 4))
    inputs = jax.random.normal(jax.random.key(1), (6, 5, 6))

    def local(weights, inputs):
        whole = collectives.gather_weights(
            weights, (spec, replicated), over=("a", "b"), dtype=jnp.bfloat16, widen=True
        )
        return lax.psum(sum(jnp.sum(jnp.sin(inputs[0] @ each)) for each in whole), ("a", "b"))

    def loss(weights):
        specs = ((spec, replicated), spec)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(weights, inputs)

    weights = matrix, other
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(weights))
    assert ("ppermute" in jaxpr) == peer_copies
    assert ("all_gather" in jaxpr) != peer_copies
    assert ("reduce_scatter" in jaxpr) != peer_copies
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), weights)
    want = jax.grad(lambda w: sum(jnp.sum(jnp.sin(inputs.reshape(-1, 6) @ m)) for m in w))(rounded)
    got = jax.jit(jax.grad(loss))(weights)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_gathered_weights_have_the_asked_dtype_and_keep_axes():
    """Without ``widen`` a sharded weight has ``dtype``; axes in ``keep`` stay sharded."""
    mesh, specs = mesh_of(a=2, b=3), (P("a", "b"), P())
    weights = jnp.arange(36.0).reshape(6, 6), jnp.ones(3)

    def local(weights):
        return collectives.gather_weights(
            weights, specs, over=("a",), keep=("b",), dtype=jnp.bfloat16
        )

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(specs,), out_specs=(P(None, "b"), P()), check_vma=False
    )
    matrix, vector = run(weights)
    assert (matrix.dtype, vector.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(matrix.astype(jnp.float32), weights[0])
