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


def drawn(seed, channels=False):
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
        channels=channels,
    )


# With a decay per channel two, whose programs are twice as large.
CALLS = [*((seed, False) for seed in range(5)), (0, True), (4, True)]
QUICK = {(0, False), (1, False)}
BY_CHANNEL = pytest.mark.parametrize(
    "channels", [False, pytest.param(True, marks=pytest.mark.slow)]
)


@pytest.mark.parametrize(
    ("seed", "channels"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in CALLS],
)
def test_float32_is_as_exact_as_float64(seed, channels):
    case = drawn(seed, channels)
    want = linear_cases.truth(case)
    for name, got in results(case).items():
        assert linear_cases.error(got, want[name]) < TOLERANCE, name


@pytest.mark.parametrize("channels", [False, True])
def test_strong_decays_leave_the_digits_of_weak_ones(channels):
    """A sequence per strong decay; eight tokens have it, then eight have weak ones.

    In every other key channel it is the other way around.
    """
    case = linear_cases.draw(
        np.random.default_rng(0), 100, batch=3, heads=1, head_dim=16, channels=channels
    )
    strong = np.array([-20, -104, -1e4])[:, None, None, None]
    tokens = np.arange(100)[:, None, None] + 8 * np.arange(16 if channels else 1)
    weak = case.log_decay.reshape(3, 100, 1, -1)
    log_decay = np.where(tokens % 16 < 8, strong, weak).reshape(case.log_decay.shape)
    case = case._replace(log_decay=log_decay.astype(np.float32))
    want = linear_cases.truth(case)
    for name, got in results(case).items():
        assert linear_cases.error(got, want[name]) < TOLERANCE, name


@BY_CHANNEL
def test_bfloat16(channels):
    rng = np.random.default_rng(0)
    case = linear_cases.draw(rng, 100, heads=1, head_dim=16, channels=channels)
    want = linear_cases.truth(case)
    for name, got in results(case, jnp.bfloat16).items():
        assert linear_cases.error(got, want[name]) < 2e-2, name


@pytest.mark.slow
def test_a_decay_per_channel_that_is_the_same_in_all_is_one_per_head():
    case = linear_cases.draw(np.random.default_rng(0), 100, heads=2, head_dim=16, documents=2)
    want = results(case)
    repeated = np.repeat(case.log_decay[..., None], 16, -1)
    got = results(case._replace(log_decay=repeated))
    got["dlog_decay"] = got["dlog_decay"].sum(-1)
    for name, x in got.items():
        assert linear_cases.error(x, want[name]) < TOLERANCE, name


@BY_CHANNEL
def test_padding_may_hold_anything(channels):
    rng = np.random.default_rng(0)
    case = linear_cases.draw(rng, 100, heads=1, head_dim=16, documents=3, channels=channels)
    want = results(case)
    for name, got in results(linear_calls.with_nan(case)).items():
        np.testing.assert_array_equal(got, want[name], err_msg=name)


def test_zeros_are_wrong():
    """The measure of the other tests."""
    for name, want in linear_cases.truth(drawn(0)).items():
        assert linear_cases.error(np.zeros_like(want), want) > 1000 * TOLERANCE, name
