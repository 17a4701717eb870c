"""The sm80 kernels on a CPU, interpreted, held to dense attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import compare
import interpreted_sm80
import jax
import jax.numpy as jnp
import local_cases
import numpy as np
import pytest
import ring_cases
from local_cases import attend, case_id

from pallas_kernels import AttentionInputs, AttentionSpec, Dropout, KVSide, QuerySide
from pallas_kernels.backend import runs_anywhere
from pallas_kernels.mosaic.sm80 import fixed_point
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig
from pallas_kernels.mosaic.sm80.implementation import mosaic_sm80

# The smallest tiles there are, of the backward with two stages and one.
SMALL = mosaic_sm80(ForwardConfig(64, 32), BackwardConfig(64, 64))
ONE = mosaic_sm80(ForwardConfig(128, 64), BackwardConfig(64, 64, stages=1))
DETERMINISTIC = mosaic_sm80(ForwardConfig(64, 32), BackwardConfig(64, 64), deterministic=True)
NAMES = "mask", "order", "blocks", "heads", "lengths", "head_dim", "dtype", "numbers", "dropout"
CASES: list[dict[str, Any]] = [
    dict(zip(NAMES, levels, strict=False))
    for levels in (
        ("causal", "contiguous", 1, (2, 1), (136, 200), 32, "bfloat16", "none"),
        ("full", "contiguous", 2, (1, 1), (72, 136), 64, "float16", "sinks"),
        ("packed_window_cap", "striped", 2, (2, 1), (136, 72), 24, "bfloat16", "both"),
        ("causal", "contiguous", 2, (2, 1), (64, 136), 256, "bfloat16", "slopes"),
        ("packed_causal", "zigzag", 2, (4, 2), (100, 62), 48, "bfloat16", "both"),
        ("packed_window_ranges", "striped", 2, (2, 1), (136, 72), 32, "bfloat16", "slopes"),
        ("ranges", "contiguous", 1, (2, 1), (72, 136), 64, "bfloat16", "none"),
        ("causal", "striped", 1, (2, 1), (136, 72), 32, "bfloat16", "none", 0.3),
        ("packed", "contiguous", 2, (2, 2), (136, 136), 64, "bfloat16", "both", 0.1),
    )
]
CASES[1] |= {"value_dim": 32}
CASES[2] |= {"value_dim": 40}  # Heads are padded to 32 and 48.
CASES[4] |= {"value_dim": 96}
CASES[6] |= {"functions": "functions"}
CASES[7] |= {"lengths": (128, 192), "order": "contiguous", "table": (64, 64, True)}
# The others are run with the slow tests.
QUICK = 0, 2, 5


def run(inputs, kernels, **options):
    """Results of interpreted kernels; ``options`` of :func:`interpreted_sm80.interpreted`."""
    call = functools.partial(attend, kernels, inputs.spec)
    with interpreted_sm80.interpreted(**options):
        return jax.tree.map(np.asarray, jax.jit(lambda *arrays: call(*arrays))(*inputs.arrays))


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        pytest.param(
            case,
            (DETERMINISTIC, SMALL, ONE, DETERMINISTIC)[index % 4],
            id=case_id(case),
            marks=() if index in QUICK else pytest.mark.slow,
        )
        for index, case in enumerate(CASES)
    ],
)
def test_as_exact_as_dense(case, kernels):
    inputs = local_cases.make_inputs(case, seed=7, batch=1)
    compare.assert_exact(run(inputs, kernels), inputs.reference, case["dtype"])


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize("barrier", [0, 1, 2])
def test_a_missing_barrier_is_a_race(barrier):
    """Of a step of the backward pass with one stage: before, between and after its products."""
    inputs = local_cases.make_inputs(CASES[0], seed=7, batch=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        run(inputs, ONE, without_barrier=barrier)


def test_fixed_point_holds_small_and_negative_sums():
    """To float32's accuracy; a bound that is not finite leaves no finite sum."""
    bound = jnp.asarray([3.0, 1e-20, 1e6, jnp.inf, jnp.nan])
    # -(2^-14) is the integer -(2^32), whose low half is 0.
    parts = np.asarray([1.0, -(2.0**-14), 3e-8, -2.5e-9, 0.0, 9.0])
    integers = np.broadcast_to(np.rint(parts * 2.0**46).astype(np.int64), (5, 6)).copy()
    halves = integers.view(np.int32).reshape(*integers.shape, 2)
    got = fixed_point.to_float(jnp.asarray(halves), bound[:, None])
    np.testing.assert_allclose(got[:3], bound[:3, None] * parts, rtol=1e-5)
    np.testing.assert_allclose(fixed_point.scale(bound)[:3] * bound[:3], 2.0**46)
    assert not np.isfinite(got[3:]).any()


@pytest.mark.parametrize("rate", [None, 0.5])
def test_the_bound_of_dq_is_attained(rate):
    """By one key whose weight is 1, and vectors of equal elements: ``(dO V - delta) K``."""
    heads, value_dim = jnp.arange(1.0, 5.0), 32
    of_keys = jnp.asarray([10.0, -20.0])
    do = jnp.broadcast_to(heads[:, None], (1, 3, 4, value_dim))
    k = jnp.broadcast_to(of_keys[:, None], (1, 1, 2, 16))
    v = jnp.broadcast_to(of_keys[:, None], (1, 1, 2, value_dim))
    delta = -100 * heads[None, :, None] * jnp.asarray([0.5, 1.0, 0.1])
    query = QuerySide(jnp.zeros((1, 3, 4, 16)), do=do, stats=jnp.stack([delta, delta]))
    spec = AttentionSpec.of(1.0)
    spec = dataclasses.replace(spec, dropout=None if rate is None else Dropout(rate))
    inputs = AttentionInputs(query, KVSide(k, v))
    bound = fixed_point.dq_bound(inputs, spec, lambda x: x)
    largest = np.repeat(np.abs(of_keys), 2)
    dp = value_dim * np.asarray(heads) * largest * (1 if rate is None else 2)
    np.testing.assert_allclose(bound[0], (dp + 100 * np.asarray(heads)) * largest)
    # Of keys and values ten times as large, which other calls have.
    further = fixed_point.dq_bound(inputs, spec, lambda x: 10 * x)
    np.testing.assert_allclose(further[0], (10 * dp + 100 * np.asarray(heads)) * 10 * largest)
    kv = KVSide(k.at[0, 0, 0].set(jnp.nan), v)
    ignoring_nan = functools.partial(jnp.fmax, 1.0)  # As a maximum over devices may.
    bound = fixed_point.dq_bound(AttentionInputs(query, kv), spec, ignoring_nan)
    np.testing.assert_array_equal(np.isfinite(bound[0]), [False, False, True, True])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring", "layout", "shard", "backward", "kernels"),
    [
        (3, "zigzag", "even", "rotate_kv", SMALL),
        (3, "striped", "63", "rotate_kv", DETERMINISTIC),
        (5, "contiguous", "63", "rotate_query", SMALL),  # dQ is converted at every step.
        (8, "zigzag", "even", "rotate_query", SMALL),
        ("2x3", "zigzag", "even", "rotate_query", SMALL),
        ("2+h2", "zigzag", "even", "rotate_kv", DETERMINISTIC),
        (3, "zigzag", "even", "rotate_query", DETERMINISTIC),
    ],
)
def test_ring_is_as_exact_as_one_device(ring, layout, shard, backward, kernels):
    kernels = dataclasses.replace(kernels, unavailable=runs_anywhere)
    case = ring_cases.a_case(ring, layout, "causal", backward, kernels, shard)
    with interpreted_sm80.interpreted(devices=True):
        ring_cases.assert_exact(case | {"dtype": "bfloat16", "heads": (2, 2)})
