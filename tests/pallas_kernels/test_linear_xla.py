"""The gated delta rule in plain JAX against its recurrence in float64."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import linear_calls
import linear_cases
import numpy as np
import pytest

# Of float32, relative to the norm of a result.
TOLERANCE = 2e-6


def results(case, dtype=jnp.float32):
    """Outputs and gradients by name, of one device."""
    call = functools.partial(linear_calls._call, implementation="xla")
    return linear_calls.results(call, case, 1, "contiguous", dtype)


def drawn(seed):
    """A case of drawn sizes around multiples of a chunk."""
    rng = np.random.default_rng(seed)
    length = int(rng.choice([1, 64, 128, 192]) + rng.integers(0, 66))
    key_heads = int(rng.integers(1, 3))
    edges = bool(rng.integers(2))
    return linear_cases.draw(
        rng,
        length,
        batch=int(rng.integers(1, 3)),
        heads=key_heads * int(rng.integers(1, 4)),
        key_heads=key_heads,
        head_dim=int(rng.choice([8, 16, 40, 128])),
        value_dim=int(rng.choice([8, 24, 128])),
        decay=float(rng.choice([1e-3, 0.1, 3.0])),
        documents=int(rng.integers(0, 6)),
        edges=edges,
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 3 else pytest.mark.slow) for seed in range(8)]
)
def test_float32_is_as_exact_as_float64(seed):
    case = drawn(seed)
    want = linear_cases.truth(case)
    for name, got in results(case).items():
        assert linear_cases.error(got, want[name]) < TOLERANCE, name


def test_strong_decays_leave_the_digits_of_weak_ones():
    """A sequence per strong decay; eight tokens have it, then eight have weak ones."""
    case = linear_cases.draw(np.random.default_rng(0), 100, batch=3, heads=1, head_dim=16)
    strong = np.array([-20, -104, -1e4])[:, None, None]
    log_decay = np.where(np.arange(100)[:, None] % 16 < 8, strong, case.log_decay)
    case = case._replace(log_decay=log_decay.astype(np.float32))
    want = linear_cases.truth(case)
    for name, got in results(case).items():
        assert linear_cases.error(got, want[name]) < TOLERANCE, name


def test_bfloat16():
    case = linear_cases.draw(np.random.default_rng(0), 100, heads=1, head_dim=16)
    want = linear_cases.truth(case)
    for name, got in results(case, jnp.bfloat16).items():
        assert linear_cases.error(got, want[name]) < 2e-2, name


def test_padding_may_hold_anything():
    rng = np.random.default_rng(0)
    case = linear_cases.draw(rng, 100, heads=1, head_dim=16, documents=3)
    want = results(case)
    for name, got in results(linear_calls.with_nan(case)).items():
        np.testing.assert_array_equal(got, want[name], err_msg=name)


def test_zeros_are_wrong():
    """The measure of the other tests."""
    for name, want in linear_cases.truth(drawn(0)).items():
        assert linear_cases.error(np.zeros_like(want), want) > 1000 * TOLERANCE, name
