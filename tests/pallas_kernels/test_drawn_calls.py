"""Drawn calls of every implementation on a CPU, against float64; Mosaic kernels are interpreted.

Above all their lengths are drawn: every query that has a key must attend to it, whatever part of a
tile the last ones are. ``--draw-seed N`` draws other calls; run_drawn.py runs thousands on a GPU.
"""

from __future__ import annotations

import dataclasses

import compare
import drawn_calls
import numpy as np
import pytest
from cases import MASKS
from conftest import DRAW_SEED
from drawn_calls import FAMILIES, ON_CPU, check, describe, draw, run_of
from local_cases import make_inputs

# Of each implementation: all calls, and how many of them run quickly.
COUNTS = {"reference": (2, 1), "xla": (6, 2), "mosaic_sm80": (12, 3), "mosaic_sm90": (6, 2)}
LEVELS = dict.fromkeys(FAMILIES, ON_CPU) | {
    # Its interpreter runs one instruction after the other.
    "mosaic_sm90": dataclasses.replace(ON_CPU, most=200, shards=(1,)),
}


def drawn(name):
    """The seeds and cases of an implementation."""
    seeds = range(DRAW_SEED, DRAW_SEED + COUNTS[name][0])
    return [(seed, draw(seed, name, LEVELS[name])) for seed in seeds]


def params():
    for name, (_, quick) in COUNTS.items():
        for index, (seed, case) in enumerate(drawn(name)):
            marks = [] if index < quick else [pytest.mark.slow]
            if name == "mosaic_sm90":
                marks.append(pytest.mark.mosaic_interpreter)
            yield pytest.param(name, seed, case, id=f"{name}-{describe(case)}", marks=marks)


@pytest.mark.parametrize(("name", "seed", "case"), list(params()))
def test_drawn_calls_are_exact(name, seed, case):
    check(case, seed, run_of(case, name))


PLAIN = drawn_calls.draw(0, "mosaic_sm80", ON_CPU) | {
    "mask": "full", "order": "contiguous", "blocks": 1, "heads": (2, 1), "head_dim": 32,
    "value_dim": "same", "dtype": "bfloat16", "numbers": "none", "dropout": 0.0, "functions": None,
    "batch": 1, "deterministic": False, "padded": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.mosaic_interpreter] * (name == "mosaic_sm90"))
        for name in FAMILIES
    ],
)
@pytest.mark.parametrize("numbers", ["none", pytest.param("sinks", marks=pytest.mark.slow)])
def test_a_partial_query_tile_attends_where_nothing_is_masked(name, numbers):
    """Keys are whole tiles, so that no score of the call is masked."""
    case = PLAIN | {"lengths": (136, 128), "numbers": numbers}
    case.pop("table", None)
    inputs = make_inputs(case, 0, batch=1)
    assert inputs.keep.all()
    got = run_of(case, name)(inputs)
    assert np.isfinite(got[1]).all()
    compare.assert_within(got, inputs.reference, inputs.largest_errors())


def test_a_draw_in_which_no_score_counts():
    """As a window over keys that all come before it: zeros are right, and nothing else."""
    case = PLAIN | {"mask": "window20", "lengths": (496, 96), "numbers": "slopes"}
    assert not make_inputs(case, 0, batch=1).reference.keep.any()
    check(case, 0, run_of(case, "xla"))

    def wrong(inputs):
        results = run_of(case, "xla")(inputs)
        results[-1] = results[-1] + np.float32(0.1)
        return results

    with pytest.raises(AssertionError, match="number 0"):
        check(case, 0, wrong)


def test_draws_have_every_kind_of_length_and_mask():
    cases = [draw(seed, "mosaic_sm90") for seed in range(1000)]
    for side in range(2):
        lengths = np.array([case["lengths"][side] for case in cases])
        assert len(set(lengths)) > 300
        assert lengths.min() < 4
        assert lengths.max() > 8000
        for multiple in (16, 32, 64, 128):
            of_side = set((lengths % multiple).tolist())
            assert of_side >= {0, 1, multiple - 1}
    # What the Ampere kernels were once wrong for: whole KV tiles, a partial query tile, no mask.
    plain = [case["lengths"] for case in cases if case["mask"] == "full" and not case["functions"]]
    assert sum(t % 64 != 0 and s % 64 == 0 for t, s in plain) > 10
    assert {case["mask"] for case in cases} == set(MASKS)
    assert {case["dtype"] for case in cases} == {"bfloat16", "float16"}


@pytest.mark.parametrize("index", range(7))
def test_an_element_beyond_its_bound_fails(index):
    """The guard, of zeros in one token, or of one per-head gradient."""
    case = PLAIN | {"lengths": (40, 50), "numbers": "both"}
    inputs = make_inputs(case, 0, batch=1)
    truth = [x.copy() for x in inputs.reference.one_device]
    truth[0], truth[2:5] = truth[0].astype(np.float32), [x.astype(np.float32) for x in truth[2:5]]
    compare.assert_within(truth, inputs.reference, inputs.largest_errors())
    token = (0, 39) if index < 5 else (0,)
    truth[index][token] = 0
    with pytest.raises(AssertionError, match="rounding explains"):
        compare.assert_within(truth, inputs.reference, inputs.largest_errors())
