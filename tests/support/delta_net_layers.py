"""Layers of the gated delta rule with drawn weights, and what the formula makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
from flax import nnx
from implementations import quick_jit
from meshes import random_like

from burst_jax import from_layout, positions, to_layout

B, T, D, N, H, HV = 2, 32, 24, 4, 6, 10
# NumPy's: each index into an array of JAX would be a program.
X = np.asarray(random_like(jax.ShapeDtypeStruct((B, T, D), jnp.float32), 1))
COTANGENT = np.random.default_rng(2).standard_normal((B, T, D))
# Two documents, the first of which ends inside of a shard, and padding inside and at the end.
SEGMENTS = np.ones((B, T), np.int32)
SEGMENTS[0, 11:], SEGMENTS[0, 20:23], SEGMENTS[0, 5], SEGMENTS[1, 29:] = 2, 0, 0, 0


class Layers:
    """Layers with the same weights, in any layout and on any mesh.

    Args:
      created: makes one, of ``D`` features, ``N`` heads, and head dims ``H`` and ``HV``.
    """

    def __init__(self, created: Callable[..., nnx.Module]):
        self._created = created

    @functools.cached_property
    def weights(self) -> nnx.State:
        """By one program."""
        state: Any = quick_jit(lambda: nnx.state(self._created()))()
        # A scale of 1 would hide a missing product.
        state["norm"]["scale"] = state["norm"]["scale"].replace(jnp.linspace(0.5, 2.0, HV))
        return state

    def make(self, **options: Any) -> Any:
        """A layer with other options, but for those that change its weights."""
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: self._created(**options)))
        return nnx.merge(graphdef, self.weights)

    @functools.cached_property
    def truth(self) -> tuple[Any, ...]:
        """Output and gradients, token by token in float64."""
        out, gradients = plain_model.gradients(
            lambda params, x: plain_model.gated_delta_net(params, x, SEGMENTS),
            COTANGENT, nnx.to_pure_dict(self.weights), X,
        )  # fmt: skip
        return out, *gradients


def with_weights(created: Callable[[], Any], given: dict[str, np.ndarray]) -> Any:
    """A layer that is made by ``created``, with weights by their paths; all must be there."""
    graphdef, state = nnx.split(nnx.eval_shape(created))
    given = dict(given)
    for path, leaf in nnx.to_flat_state(state):
        weight, shape = given.pop(".".join(map(str, path))), leaf.get_value().shape
        leaf.set_value(jax.device_put(np.asarray(weight, np.float32).reshape(shape)))
    assert not given
    return nnx.merge(graphdef, state)


def results(layer, layout="contiguous", shards=1, x=X, ids=SEGMENTS):
    """Output and gradients in natural order, of a call that checks its positions."""
    graphdef, params = nnx.split(layer)

    @quick_jit
    def run(params, x):
        def f(params, x):
            x, segments = to_layout((x, jnp.asarray(ids)), layout, shards)
            order = jnp.asarray(positions(layout, T, shards))
            return from_layout(nnx.merge(graphdef, params)(x, order, segments), layout, shards)

        out, vjp = jax.vjp(f, params, x)
        cotangent = jnp.asarray(COTANGENT, jnp.float32)
        if jax.sharding.get_abstract_mesh().explicit_axes:
            cotangent = jax.reshard(cotangent, jax.typeof(out).sharding)
        return out, *vjp(cotangent)

    out, d_params, d_x = jax.device_get(run(params, x))
    return out, nnx.to_pure_dict(d_params), d_x
