"""The ring against dense float64 attention, over all pairs of its options."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import compare
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_pairs, few_of, in_tiers
from implementations import IMPLEMENTATIONS
from meshes import mesh_of
from ring_cases import MASKS, assert_exact, case_id, make_inputs, oracle, ring_results

import burst_jax

FACTORS = {
    "layout": ("contiguous", "zigzag", "striped", "striped:3"),
    "ring": (1, 2, 3, 5, 7, 8),
    "mask": tuple(MASKS),
    "heads": ((4, 4), (8, 2), (8, 1)),
    "backward": ("rotate_kv", "rotate_query"),
    "shard": ("even", "63", "100", "longer_keys", "longer_queries"),
    "head_dim": (16, 40, 33),
    "value_dim": ("same", 24),
    "dtype": ("float32", "bfloat16", "float16"),
    "numbers": ("none", "sinks", "slopes", "both"),
}


CASES = all_pairs(FACTORS)
# Two levels, Ulysses within a node, and both: what differs from a plain ring.
OTHER_RINGS = all_pairs(
    FACTORS
    | {
        "ring": ("2x3", "3x2", "2x4", "2+h2", "h4", "1x2+h4", "2x2+h2"),
        "layout": ("contiguous", "zigzag", "striped"),
        "mask": ("full", "causal", "window40_17", "packed_window_cap"),
        "shard": ("even", "63", "longer_keys"),
        "head_dim": (16, 33),
        "numbers": ("none", "both"),
    }
)


# The quick tier meets every level of every factor, all tests every pair of them.
QUICK_CASES = few_of(CASES) + few_of(OTHER_RINGS)


@pytest.mark.parametrize("case", in_tiers(CASES + OTHER_RINGS, case_id, QUICK_CASES))
def test_ring_is_as_exact_as_one_device(case):
    assert_exact(case)


def _halves():
    """Small tiles with the two gradients made apart, for which the ring has another schedule."""
    small = IMPLEMENTATIONS["xla"]
    both: Any = small.backward

    def dq_half(inputs, bounds, dq, **options):
        dq, _, per_head = both(inputs, bounds, dq, None, **options)
        return dq, per_head

    def dkv_half(inputs, bounds, dkv, **options):
        return both(inputs, bounds, None, dkv, **options)[1]

    return dataclasses.replace(small, name="halves", backward_dq=dq_half, backward_dkv=dkv_half)


HALVES = _halves()
# In float32, where a gradient that is added twice, late or not at all shows at once.
SPLIT_CASES = [{**case, "dtype": "float32"} for case in CASES[3::6] + OTHER_RINGS[2::5]]


QUICK_SPLIT = [
    next(case for case in SPLIT_CASES if case["backward"] == rotation and case["ring"] in rings)
    for rotation, rings in (("rotate_kv", ("2x3", "3x2", "2x4")), ("rotate_query", (3, 5, 7, 8)))
]


@pytest.mark.parametrize("case", in_tiers(SPLIT_CASES, case_id, QUICK_SPLIT))
def test_gradients_made_apart_are_as_exact(case):
    assert_exact(case, implementation=HALVES)


def test_both_rotations_of_many_rings_are_made_apart():
    met = {(case["backward"], case["ring"]) for case in SPLIT_CASES}
    for backward in ("rotate_kv", "rotate_query"):
        rings = {ring for rotation, ring in met if rotation == backward}
        assert len([ring for ring in rings if isinstance(ring, int) and ring > 2]) >= 3
        assert len([ring for ring in rings if "x" in str(ring)]) >= 2


def test_the_quick_cases_meet_every_level():
    for cases in (CASES, OTHER_RINGS):
        quick = [case for case in cases if case in QUICK_CASES]
        for factor in FACTORS:
            assert {case[factor] for case in quick} == {case[factor] for case in cases}, factor


def test_packed_cases_have_rows_that_see_nothing():
    """The zeros asserted above are asserted of something."""
    blind = 0
    for case in CASES:
        (q, k, _), _, segments = make_inputs(case)
        keep = MASKS[case["mask"]].dense(*segments, q.shape[1], k.shape[1])
        blind += int((~keep.any(2)).any())
    assert blind >= 10


def test_zero_gradients_fail():
    """The guard: a comparison that all-zero gradients pass would prove nothing."""
    case = {**CASES[0], "dtype": "bfloat16", "numbers": "none"}
    inputs = make_inputs(case)
    truth, one_device, _ = oracle(case, *inputs)
    for name in ("dq", "dk", "dv"):
        broken = [x * 0 if n == name else x for n, x in zip(compare.NAMES, truth, strict=True)]
        with pytest.raises(AssertionError, match=name):
            compare.assert_as_good_as(broken, one_device, truth, "bfloat16")


BASE = {
    "layout": "zigzag",
    "ring": 8,
    "mask": "causal",
    "heads": (4, 2),
    "backward": "auto",
    "shard": "even",
    "head_dim": 32,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(1.0, id="unit_logits", marks=pytest.mark.slow),
        pytest.param(6.0, id="large_logits"),
    ],
)
@pytest.mark.parametrize("mask", ["causal", pytest.param("full", marks=pytest.mark.slow)])
def test_error_does_not_grow_with_the_ring(mask, scale):
    case = {**BASE, "mask": mask}
    inputs = make_inputs(case, scale=scale)
    truth, _, _ = oracle(case, *inputs)
    eight = ring_results(case, *inputs)
    one = ring_results({**case, "ring": 1, "layout": "contiguous"}, *inputs)
    for name, got, single, exact in zip(compare.NAMES, eight, one, truth, strict=True):
        _, rms = compare.errors(got, exact)
        _, single_rms = compare.errors(single, exact)
        assert rms <= 1.5 * single_rms + 1e-6, name


@pytest.mark.parametrize(
    "backward", ["rotate_kv", pytest.param("rotate_query", marks=pytest.mark.slow)]
)
def test_same_bits_twice(backward):
    case = {**BASE, "backward": backward, "mask": "packed_causal"}
    inputs = make_inputs(case)
    first, second = ring_results(case, *inputs), ring_results(case, *inputs)
    for name, a, b in zip(compare.NAMES, first, second, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_reference_implementation_runs_on_the_ring():
    """`implementation=` reaches the local attention: dense and tiled agree to float32 rounding."""
    case = {**BASE, "dtype": "float32", "ring": 3}
    inputs = make_inputs(case)
    tiled = ring_results(case, *inputs, implementation="xla")
    plain = ring_results(case, *inputs, implementation="reference")
    for name, a, b in zip(compare.NAMES, tiled, plain, strict=True):
        _, rms = compare.errors(a, b)
        assert rms < 1e-6, name
    assert any((a != b).any() for a, b in zip(tiled, plain, strict=True))


def events(jaxpr, stack=""):
    """``(ring step, event)`` of a traced ring in order: p permute, k kernel, b barrier."""
    letters = {"ppermute": "p", "optimization_barrier": "b"}
    for equation in jaxpr.eqns:
        here = f"{stack}/{equation.source_info.name_stack}"
        step = "".join(re.findall(r"ring_(\w+_step_\d)", here)[-1:])
        if equation.primitive.name in letters:
            yield step, letters[equation.primitive.name]
        elif equation.params.get("name") in ("forward", "_gradients"):
            yield step, "k"
        else:
            for value in jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr):
                inner = getattr(value, "jaxpr", value)
                yield from events(inner, here) if is_jaxpr(inner) else ()


def is_jaxpr(x):
    return hasattr(x, "eqns")


# By ring step, with a barrier per result at the end of each pass. Between the passes are the
# barriers of out, of lse, of delta and of the backward ring's inputs.
SEQUENCES = {
    # Q, dO and the stats are sent, and the sum of dQ two steps later.
    ((4,), "fused", "rotate_query"): "ppkb ppkb ppkb k bbbb pppkb pppkb ppppkb pkb pkbbbb",
    # The second kernel waits (b) for the sum that was sent during the first.
    ((4,), "halves", "rotate_kv"): "ppkb ppkb ppkb k bbbb kppkb kppkb ppkbppkb ppkbk ppkbkbbbbb",
    # K and V are sent to the next step, and in chunks to the next pass.
    ((2, 3), "fused", "rotate_kv"): "ppppkb ppppkb ppkb ppkb ppkb k bbbb"
    " ppppkb ppppkb ppppkb ppppkb ppppppkb ppkb ppkbbbbb",
}


@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_every_step_ends_with_a_barrier_unless_nothing_is_sent(case):
    sizes, kernels, rotation = case
    axes = ("outer", "inner")[-len(sizes) :]
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh_of(**dict(zip(axes, sizes, strict=True))),
        seq_axis=axes, is_causal=True, layout="zigzag", backward=rotation,
        implementation={"fused": IMPLEMENTATIONS["xla"], "halves": HALVES}[kernels],
    )  # fmt: skip
    x = jnp.zeros((1, 48, 2, 8))
    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(attend, x, x, x)[1](x))(x)
    steps = itertools.groupby(events(jaxpr.jaxpr), lambda event: event[0])
    assert " ".join("".join(kind for _, kind in step) for _, step in steps) == SEQUENCES[case]
