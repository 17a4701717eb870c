"""Head dims that kernels of 128 are padded and split for, against the recurrence in float64.

Plain JAX is in the place of the kernels, so that all errors but float32's rounding are the
adapter's. ``test_linear_interpreted.py`` has the kernels themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import linear_calls as calls
import linear_cases
import numpy as np
import pytest
from jaxprs import equations

from burst_jax.linear import delta_rule
from pallas_kernels.linear.backend import Inputs
from pallas_kernels.linear.head_dims import with_head_dims
from pallas_kernels.linear.sm90.operation import MOSAIC_SM90
from pallas_kernels.linear.xla import XLA

# Of float32, relative to the norm of a result.
TOLERANCE = 3e-6
PASSES = ("prepare", "forward", "mapped", "restore", "first_gradient", "backward")
SLOW = pytest.mark.slow


def of_128_alone(function):
    """Raises for heads of other dims."""

    def run(inputs, *rest):
        heads = inputs.v.shape[2]
        assert inputs.q.shape[-1] == inputs.k.shape[-1] == inputs.v.shape[-1] == 128
        assert inputs.log_decay.shape[2:] in ((heads,), (heads, 128))
        return function(inputs, *rest)

    return run


KERNELS = with_head_dims(
    dataclasses.replace(XLA, **{name: of_128_alone(getattr(XLA, name)) for name in PASSES})
)


@pytest.fixture(autouse=True)
def kernels_of_128(monkeypatch):
    monkeypatch.setattr(delta_rule, "resolve", lambda *_, **__: KERNELS)


def drawn(seed, channels=False):
    """``(case, n, layout)``; value heads share key heads."""
    rng = np.random.default_rng((seed, 4))
    n, layout = int(rng.integers(1, 4)), ("contiguous", "zigzag")[seed % 2]
    key_heads = int(rng.integers(1, 3))
    case = linear_cases.draw(
        rng,
        n * 2 * int(rng.integers(20, 90)),
        batch=int(rng.integers(1, 3)),
        heads=key_heads * int(rng.integers(1, 3)),
        key_heads=key_heads,
        head_dim=int(rng.choice([64, 96, 128, rng.integers(1, 129)])),
        value_dim=int(rng.choice([64, 192, 256, rng.integers(1, 400)])),
        decay=float(rng.choice([1e-3, 0.1, 3.0])),
        documents=int(rng.choice([0, 3])),
        edges=bool(rng.integers(2)),
        channels=channels,
    )
    return case, n, layout


@pytest.mark.parametrize(
    ("seed", "channels"),
    [
        pytest.param(seed, channels, marks=() if seed + channels in (1, 6) else SLOW)
        for seed in range(8)
        for channels in (False, True)
    ],
)
def test_drawn_calls(seed, channels):
    case, n, layout = drawn(seed, channels)
    print(case.q.shape, case.v.shape, n, layout)
    got = calls.results(calls.on_mesh(n, layout), case, n, layout)
    for name, want in linear_cases.truth(case).items():
        assert got[name].shape == want.shape, name
        assert linear_cases.error(got[name], want) < TOLERANCE, name
