"""Random combinations of masks, scores, layouts and rings, each against dense float64 attention.

Each argument is tested alone elsewhere. Here any of them meet, by fixed draws.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import pytest
from combinations import CONFLICTS, LAYOUTS, MODIFIERS, RINGS, draw
from implementations import IMPLEMENTATIONS
from ring_cases import assert_exact

import burst_jax

SEEDS = range(40)
QUICK = (0, 3, 11, 17, 20)


def with_scaled_query(query, *arrays, scale, **options: Any):
    """What the documentation says of a scale that a program computes."""
    query = query * jnp.asarray(scale, query.dtype)
    return burst_jax.burst_attention(query, *arrays, scale=1.0, **options)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(
            seed, id=f"{seed}-{draw(seed).name}", marks=() if seed in QUICK else pytest.mark.slow
        )
        for seed in SEEDS
    ],
)
def test_a_combination_is_as_exact_as_one_device(seed):
    """Gradients too, of all that has one, by random cotangents."""
    drawn, attention = draw(seed), burst_jax.burst_attention
    if "traced_scale" in drawn.modifiers:
        attention = with_scaled_query
    implementation = IMPLEMENTATIONS[drawn.case["implementation"]]
    assert_exact(
        drawn.case,
        hiding=drawn.hiding,
        attention=attention,
        implementation=implementation,
        **drawn.options,
    )


def test_the_draws_meet():
    """Every argument more than once, and nearly every two that may be together."""
    drawn = [draw(seed) for seed in SEEDS]
    for name in MODIFIERS:
        assert sum(name in x.modifiers for x in drawn) >= 2, name
    legal = {frozenset(pair) for pair in itertools.combinations(MODIFIERS, 2)} - CONFLICTS
    met = {
        frozenset(pair) for x in drawn for pair in itertools.combinations(sorted(x.modifiers), 2)
    }
    assert not met & CONFLICTS
    assert len(met & legal) > 0.85 * len(legal)
    assert {x.case["ring"] for x in drawn} == set(RINGS)
    assert {x.case["layout"] for x in drawn} == set(LAYOUTS)
    assert {x.case["implementation"] for x in drawn} == {"xla", "reference", "triton"}
