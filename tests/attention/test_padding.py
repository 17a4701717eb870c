"""NaN and infinity in padding change no bit of other tokens' results."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from implementations import IMPLEMENTATIONS
from ring_cases import a_case, make_inputs, ring_results

RESULTS = ("out", "lse", "dq", "dk", "dv")

odd_case = functools.partial(a_case, shard="63")

# One device, rings of both rotations, two levels and Ulysses, each implementation.
CASES = {
    "triton-1": odd_case("1", "contiguous", "packed_causal", "rotate_kv", "triton"),
    "xla-3-query": odd_case("3", "striped", "packed_window_cap", "rotate_query", "xla"),
    "triton-2-query": odd_case("2", "striped", "packed", "rotate_query", "triton"),
    "reference-2-kv": odd_case("2", "zigzag", "packed_causal", "rotate_kv", "reference"),
    "xla-2x2+h2": odd_case("2x2+h2", "zigzag", "packed_causal", "rotate_kv", "xla"),
}


def poisoned(x, segment_ids, rng):
    """``x`` ``[B, T, ...]`` with NaN, infinity and the largest number in its padding."""
    bad = np.array([np.nan, np.inf, -np.inf, np.finfo(x.dtype).max], x.dtype)
    noise = bad[rng.integers(0, len(bad), x.shape)]
    padding = (segment_ids == 0).reshape(*segment_ids.shape, *[1] * (x.ndim - 2))
    assert padding.any()
    return np.where(padding, noise, x)


QUICK = ("triton-1", "xla-3-query")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_values_in_padding_change_no_bit(name):
    """Packed sequences with padding before, between and after documents; GQA."""
    case = CASES[name]
    (q, k, v), (do, dlse), segments = make_inputs(case)
    rng = np.random.default_rng(1)
    dirty = [
        poisoned(x, ids, rng)
        for x, ids in zip(
            (q, k, v, do, dlse), (*segments, segments[1], *segments[:1] * 2), strict=True
        )
    ]
    run = IMPLEMENTATIONS[case["implementation"]]
    clean = ring_results(case, (q, k, v), (do, dlse), segments, implementation=run)
    got = ring_results(case, tuple(dirty[:3]), tuple(dirty[3:]), segments, implementation=run)
    for result, g, c in zip(RESULTS, got, clean, strict=True):
        np.testing.assert_array_equal(g, c, err_msg=result)
        padding = segments[1 if result in ("dk", "dv") else 0] == 0
        assert (g[padding] == (-np.inf if result == "lse" else 0)).all(), result


@pytest.mark.parametrize("name", ["xla-3-query", "triton-1"])
def test_queries_that_attend_to_nothing_drop_the_cotangent_of_lse(name):
    """Their lse is -inf, so a loss of it often has a NaN cotangent."""
    case = CASES[name]
    arrays, (do, dlse), (ids, _) = make_inputs(case)
    assert ids is not None
    # A document of its own that no key belongs to: its queries are live and see nothing.
    lonely = np.where((np.arange(ids.shape[1]) % 5 == 3) & (ids != 0), 999, ids).astype(np.int32)
    segments = lonely, ids
    bad = np.where((lonely == 999)[..., None], np.float32(np.nan), dlse)
    run = IMPLEMENTATIONS[case["implementation"]]
    clean = ring_results(case, arrays, (do, dlse), segments, implementation=run)
    got = ring_results(case, arrays, (do, bad), segments, implementation=run)
    for result, g, c in zip(RESULTS, got, clean, strict=True):
        np.testing.assert_array_equal(g, c, err_msg=result)
    assert (got[1][lonely == 999] == -np.inf).all()
    assert (got[2][lonely == 999] == 0).all()
