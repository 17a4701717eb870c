"""Drawn calls of the Mosaic kernels on a GPU, against float64; run_drawn.py runs thousands.

They run with ``--implementation`` only; ``--draw-seed N`` draws other calls.
"""

from __future__ import annotations

import dataclasses

import compare
import jax
import local_cases
import numpy as np
import pytest
from conftest import DRAW_SEED, IMPLEMENTATION
from drawn_calls import check, describe, draw, run_of
from implementations import IMPLEMENTATIONS
from local_cases import attend, lse_factor_on_gpu

PROGRAMS = 150
HEAD_DIMS = {"mosaic_sm80": range(16, 257, 16), "mosaic_sm90": (32, 64, 96, 128, 144, 192, 256)}
SEEDS = range(DRAW_SEED, DRAW_SEED + PROGRAMS)
# Empty without --implementation.
CASES = {seed: draw(seed, IMPLEMENTATION) for seed in SEEDS if IMPLEMENTATION is not None}
_attend = jax.jit(attend, static_argnums=(0, 1))


@pytest.mark.parametrize(
    ("seed", "case"),
    [pytest.param(seed, case, id=f"{seed}-{describe(case)}") for seed, case in CASES.items()],
)
def test_drawn_calls_are_exact_and_repeat_bit_for_bit(seed, case):
    check(case, seed, run_of(case, IMPLEMENTATION, on_gpu=True), repeats=2)


@pytest.mark.parametrize("dim", HEAD_DIMS.get(IMPLEMENTATION, ()))
def test_the_largest_logit_may_change_with_every_tile(dim):
    """By less than the margin that a forward tile's maximum may exceed the last by, and by more."""
    case = {"mask": "full", "order": "contiguous", "blocks": 1, "lengths": (640, 640)}
    case |= {"heads": (4, 2), "head_dim": dim, "dtype": "bfloat16", "numbers": "none"}
    inputs = local_cases.make_inputs(case, dim, batch=1)
    steps = np.linspace(0, 1, 640)
    inputs.q[..., 0] = (520 * dim**0.5 * (steps - 0.5))[:, None]
    for of_keys in (1.5 * steps - 1, 0.5 - 1.5 * steps, steps * np.sign(np.sin(16 * steps))):
        (keys, values), *_ = inputs.kvs
        keys = keys.copy()
        keys[..., 0] = of_keys[:, None]
        changed = dataclasses.replace(inputs, kvs=[(keys, values)])
        kernels = IMPLEMENTATIONS[IMPLEMENTATION]
        got = [np.asarray(x) for x in _attend(kernels, changed.spec, *changed.arrays)]
        compare.assert_exact(got, changed.reference, "bfloat16", 1.5, lse_factor_on_gpu(case))


def test_draws_have_scores_and_queries_without_any():
    small = [(seed, case) for seed, case in CASES.items() if max(case["lengths"]) < 700]
    keeps = [local_cases.make_inputs(case, seed, batch=1).keep for seed, case in small]
    assert sum(keep.any() for keep in keeps) > 0.9 * len(small)
    assert sum(not keep.any(-1).all() for keep in keeps) > 0.2 * len(small)
