"""The gated delta rule in plain JAX against its recurrence in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import linear_cases
import numpy as np
import pytest

from pallas_kernels.linear import xla
from pallas_kernels.linear.chunks import Tokens


def results(case, dtype=jnp.float32):
    """Outputs and gradients by name."""
    tokens = None
    if case.ids is not None:
        tokens = Tokens(jnp.asarray(case.begins), jnp.asarray(case.valid))
    q, k, v, do = (jnp.asarray(x, dtype) for x in (case.q, case.k, case.v, case.do))

    def rule(q, k, v, log_decay, beta, start):
        return xla.gated_delta_rule(q, k, v, log_decay, beta, start, case.scale, tokens)

    out, vjp = jax.vjp(jax.jit(rule), q, k, v, *map(jnp.asarray, case[3:6]))
    gradients = vjp((do, jnp.asarray(case.dlast)))
    return dict(zip(linear_cases.NAMES, (*out, *gradients), strict=True))


def drawn(seed):
    """A case of drawn sizes around multiples of a chunk, and its tolerance."""
    rng = np.random.default_rng(seed)
    length = int(rng.choice([1, 64, 128, 192]) + rng.integers(0, 66))
    key_heads = int(rng.integers(1, 3))
    strong = bool(rng.integers(2))
    case = linear_cases.draw(
        rng,
        length,
        batch=int(rng.integers(1, 3)),
        heads=key_heads * int(rng.integers(1, 4)),
        key_heads=key_heads,
        head_dim=int(rng.choice([8, 16, 40, 128])),
        value_dim=int(rng.choice([8, 24, 128])),
        decay=float(rng.choice([1e-3, 0.1, 3.0])),
        documents=int(rng.integers(0, 6)),
        edges=strong,
    )
    # Differences of a chunk's sums of log decays lose digits after some that are 0.
    return case, 3e-5 if strong else 2e-6


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 2 else pytest.mark.slow) for seed in range(5)]
)
def test_float32_is_as_exact_as_float64(seed):
    case, tolerance = drawn(seed)
    want = linear_cases.truth(case)
    for name, got in results(case).items():
        assert linear_cases.error(got, want[name]) < tolerance, name


def test_bfloat16():
    case = linear_cases.draw(np.random.default_rng(0), 100, heads=1, head_dim=16)
    want = linear_cases.truth(case)
    for name, got in results(case, jnp.bfloat16).items():
        assert linear_cases.error(got, want[name]) < 2e-2, name


def test_float64():
    case, _ = drawn(3)
    want, ids = linear_cases.truth(case), case.ids
    with jax.enable_x64(True):
        case = jax.tree.map(lambda x: np.asarray(x, np.float64), case._replace(ids=None))
        case = case._replace(ids=ids)
        for name, got in results(case, jnp.float64).items():
            assert got.dtype == jnp.float64
            assert linear_cases.error(got, want[name]) < 1e-11, name


def test_padding_may_hold_anything():
    rng = np.random.default_rng(0)
    case = linear_cases.draw(rng, 100, heads=1, head_dim=16, documents=3)
    padding = ~case.valid
    arrays = [np.array(x) for x in case[:5]]
    for x in arrays:
        x[padding] = np.nan
    do = np.array(case.do)
    do[padding] = np.nan
    with_nan = case._replace(**dict(zip(linear_cases.Case._fields[:5], arrays, strict=True)), do=do)
    want = results(case)
    for name, got in results(with_nan).items():
        np.testing.assert_array_equal(got, want[name], err_msg=name)


def test_zeros_are_wrong():
    """The measure of the other tests."""
    case, tolerance = drawn(0)
    for name, want in linear_cases.truth(case).items():
        assert linear_cases.error(np.zeros_like(want), want) > 1000 * tolerance, name
