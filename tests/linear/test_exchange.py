"""The exchange of affine maps alone, in each of its ways, against the maps applied one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_calls import compose
from meshes import mesh_of

from burst_jax.layouts.parse import parse_layout
from burst_jax.linear import runs
from burst_jax.linear.exchange import arriving, arriving_gradients

B, N, H, HV = 2, 16, 3, 5


def exchanged(of_runs, mesh, rows, own, parts, kernel):
    """States and gradients that arrive at each part of a device's runs, devices in front."""

    def run(rows, own):
        states, kept, _ = arriving(of_runs, rows, None, parts, kernel)
        return states, arriving_gradients(of_runs, kept, own)

    P = jax.P("seq")
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P, out_specs=P))(rows, own)


@pytest.mark.parametrize(
    ("way", "n", "layout", "parts", "kernel"),
    [
        ("heads", 8, "zigzag", 1, None),
        ("heads", 4, "contiguous", 2, None),
        ("heads", 4, "zigzag", 1, compose),
        ("gather", 3, "zigzag", 1, None),
        ("gather", 3, "zigzag", 2, compose),
        ("gather", 2, "contiguous", 1, compose),
        ("gather", 2, "contiguous", 3, compose),
        ("gather", 1, "contiguous", 4, compose),
        ("gather", 1, "contiguous", 3, None),
        ("steps", 5, "zigzag", 1, None),
    ],
)
def test_what_arrives_is_all_maps_before_in_order(monkeypatch, way, n, layout, parts, kernel):
    if way == "steps":
        monkeypatch.setattr(runs, "GATHERED", 0)
    of_runs = runs.device_runs(parse_layout(layout), ("seq",), n, "a test")
    assert isinstance(of_runs, runs.DeviceRuns)
    assert of_runs.exchange(N) == way
    total, rng = of_runs.total * parts, np.random.default_rng(0)
    m = rng.standard_normal((total, B, N, H, H)) / 2
    u, own = (rng.standard_normal((total, B, N, H, HV)) for _ in range(2))
    # In the devices' order, the parts of a sequence next to each other, and transposed.
    order = np.array(of_runs.order)[..., None] * parts + np.arange(parts)
    order = order.reshape(n, -1)

    def given(x):
        x = np.moveaxis(x[order], 2, 1).reshape(-1, *x.shape[2:])
        return jnp.asarray(x.swapaxes(-1, -2), jnp.float32)

    rows = jnp.concatenate([given(u), given(m)], axis=2)
    found = exchanged(of_runs, mesh_of(seq=n), rows, given(own), parts, kernel)
    states, gradients = [np.zeros_like(u[0])], [np.zeros_like(u[0])]
    for i in range(total - 1):
        states.append(m[i] @ states[-1] + u[i])
        gradients.insert(0, m[-1 - i].swapaxes(-1, -2) @ gradients[0] + own[-1 - i])
    for got, want in zip(found, (states, gradients), strict=True):
        np.testing.assert_allclose(got, given(np.stack(want)), rtol=2e-5, atol=2e-5)
