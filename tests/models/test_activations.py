"""Activations on one device's tokens in a ``shard_map``, with derivatives, by their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from meshes import assert_close, mesh_of

from burst_jax.models.activations import ACTIVATIONS


def with_derivatives(function, x):
    """Values, and the first and the second derivative."""

    def first(x):
        return jax.vjp(function, x)[1](jnp.ones_like(x))[0]

    return function(x), *jax.jvp(first, (x,), (jnp.ones_like(x),))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_derivatives_on_varying_axes(name):
    """Tails, too: there ``x (1 + erf)`` would have no correct digit."""
    x = np.linspace(-6, 6, 194, dtype=np.float32)
    spec = jax.P("seq")

    @jax.jit
    def run(x):
        sharded = jax.shard_map(
            lambda x: with_derivatives(ACTIVATIONS[name], x),
            mesh=mesh_of(seq=2), in_specs=spec, out_specs=spec,
        )  # fmt: skip
        return sharded(x)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        want = jax.device_get(with_derivatives(plain_model.ACTIVATIONS[name], x.astype(np.float64)))
    found = run(x)
    assert_close(found[:2], want[:2], 1e-5)
    assert_close(found[2], want[2], 1e-4)
    if name == "gelu":
        np.testing.assert_allclose(found[0], want[0], rtol=3e-5)
    half = run(x.astype(jnp.bfloat16))[:2]
    assert {each.dtype for each in half} == {jnp.dtype(jnp.bfloat16)}
    assert_close(half, want[:2], 2e-2)
