"""The kernel of a decoding step of the gated delta rule, interpreted, against float64."""

from __future__ import annotations

import delta_step_cases
import interpreted_callbacks
import interpreted_sm80
import pytest

# [key heads, value heads, present, factor of beta, taps, dtype]: one warpgroup or two, with one or
# several heads each; odd numbers of heads and sequences.
CASES = [
    (1, 2, [1, 0], 1.0, 3, "bfloat16"),
    (1, 4, [1], 1.0, 4, "bfloat16"),
    (2, 2, [1], 2.0, 2, "float16"),
    (3, 9, [0, 1, 1], 1.0, 4, "bfloat16"),
    (1, 7, [1], 2.0, 5, "float16"),
    (2, 12, [1, 1, 0, 1, 0], 1.0, 4, "bfloat16"),
]


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize(
    ("key_heads", "heads", "present", "beta_factor", "taps", "dtype"),
    [pytest.param(*case, marks=() if case is CASES[0] else pytest.mark.slow) for case in CASES],
)
def test_as_exact_as_float64(key_heads, heads, present, beta_factor, taps, dtype):
    """Also of sequences that have ended, with NaN."""
    given = delta_step_cases.draw(key_heads, heads, present, taps, dtype)
    with interpreted_sm80.interpreted():
        results = interpreted_callbacks.run(delta_step_cases.call(beta_factor), *given)
    delta_step_cases.check(given, results, beta_factor)
