"""Head dims that kernels of 128 are padded and split for, against the recurrence in float64.

Plain JAX is in the place of the kernels, so that all errors but float32's rounding are the
adapter's. ``test_linear_interpreted.py`` has the kernels themselves.
"""

from __future__ import annotations

import dataclasses
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


def compose(rows, order, wanted, start=None):
    """Composes maps of heads of 128 alone."""
    assert rows.shape[-2:] == (256, 128)
    return calls.compose(rows, order, wanted, start)


def parts(inputs, has_maps):
    """Two, which leaves devices runs of whole numbers of tokens."""
    return 2 - inputs.v.shape[1] % 2


_of_128: Any = {name: of_128_alone(getattr(XLA, name)) for name in PASSES}
_of_128 |= {"parts": of_128_alone(parts), "compose": compose}
KERNELS = with_head_dims(dataclasses.replace(XLA, **_of_128))


@pytest.fixture(autouse=True)
def kernels_of_128(monkeypatch):
    monkeypatch.setattr(delta_rule, "resolve", lambda *_, **__: KERNELS)


# Key and value head dims: padded keys and one, two or three heads of values, not of multiples of 8;
# values that are split alone.
DIMS = ((96, 192), (61, 300), (64, 64), (1, 7), (128, 256))


def drawn(seed):
    """``(case, n, layout)``; value heads share key heads."""
    rng = np.random.default_rng((seed, 4))
    n, layout = (2, 3, 1)[seed % 3], ("zigzag", "contiguous")[seed % 2]
    key_heads, (head_dim, value_dim) = int(rng.integers(1, 3)), DIMS[seed % len(DIMS)]
    case = linear_cases.draw(
        rng,
        n * 2 * int(rng.integers(20, 90)),
        batch=int(rng.integers(1, 3)),
        heads=2 * key_heads,
        key_heads=key_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        decay=float(rng.choice([1e-3, 0.1, 3.0])),
        documents=int(rng.choice([0, 3])),
        edges=bool(rng.integers(2)),
        channels=seed % 4 in (1, 2),
    )
    return case, n, layout


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 0 else SLOW) for seed in range(len(DIMS))]
)
def test_drawn_calls(seed, program):
    """Outputs, states and all gradients, of one device and several."""
    case, n, layout = drawn(seed)
    got = calls.results(calls.on_mesh(n, layout), case, n, layout, program=program)
    for name, want in linear_cases.truth(case).items():
        assert got[name].shape == want.shape, name
        assert linear_cases.error(got[name], want) < TOLERANCE, name


def passes(kernels, dims, channels):
    """Traces all passes: the program, and the shapes of what is no form of the kernels' own."""

    def run(inputs, start, do, last):
        prepared, rows = kernels.mapped(inputs, start)
        o, end, kept = kernels.forward(inputs, kernels.prepare(inputs), start, 0.5)
        again = kernels.restore(inputs, kept)
        alone = kernels.first_gradient(inputs, prepared, do, last, 0.5)
        return rows, o, end, alone, kernels.backward(inputs, again, start, do, last, 0.5)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct((2, *shape), dtype)

    head_dim, value_dim = dims
    keys, values = array(64, 2, head_dim), array(64, 4, value_dim)
    gates, state = (array(*x, dtype=jnp.float32) for x in ((64, 4), (4, head_dim, value_dim)))
    decays = array(64, 4, head_dim, dtype=jnp.float32) if channels else gates
    inputs = Inputs(keys, keys, values, decays, gates)
    return jax.make_jaxpr(run, return_shape=True)(inputs, state, values, state)


@pytest.mark.parametrize("channels", [False, pytest.param(True, marks=SLOW)])
def test_no_padding_is_seen_outside(channels):
    """Maps, too, have the true head dims: devices send no padding."""
    for dims in DIMS[:2]:
        (_, got), (_, want) = (passes(x, dims, channels) for x in (KERNELS, XLA))
        assert got == want, dims


def test_heads_of_128_are_given_as_they_are():
    counts = {len(list(equations(passes(x, (128, 128), False)[0].jaxpr))) for x in (KERNELS, XLA)}
    assert len(counts) == 1
