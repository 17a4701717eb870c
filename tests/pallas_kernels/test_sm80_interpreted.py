"""The sm80 kernels on a CPU, interpreted, held to dense attention."""

from __future__ import annotations

import functools
from typing import Any

import compare
import interpreted_callbacks
import interpreted_sm80
import local
import local_cases
import numpy as np
import pytest
from local_cases import attend, case_id

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
        ("causal", "contiguous", 1, (2, 1), (64, 136), 256, "bfloat16", "slopes"),
        ("packed_causal", "zigzag", 2, (2, 2), (100, 62), 48, "bfloat16", "both", 0.1),
        ("packed_window_ranges", "striped", 1, (2, 1), (136, 72), 32, "bfloat16", "slopes"),
        ("ranges", "contiguous", 1, (2, 1), (72, 136), 64, "bfloat16", "none"),
        ("causal", "striped", 1, (2, 1), (136, 72), 32, "bfloat16", "none", 0.3),
        ("full", "contiguous", 1, (2, 1), (136, 264), 32, "bfloat16", "none"),
    )
]
CASES[1] |= {"value_dim": 32}
CASES[2] |= {"value_dim": 40}  # Heads are padded to 32 and 48.
CASES[4] |= {"value_dim": 96}
CASES[6] |= {"functions": "functions"}
CASES[8] |= {"functions": "tile_mask"}
CASES[7] |= {"lengths": (128, 192), "order": "contiguous", "table": (64, 64, True)}
# The others are run with the slow tests.
QUICK = 0, 5


def run(inputs, kernels, **options):
    """Results of interpreted kernels; ``options`` of :func:`interpreted_sm80.interpreted`."""
    call = functools.partial(attend, kernels, inputs.spec)
    with interpreted_sm80.interpreted(**options):
        return interpreted_callbacks.run(call, *inputs.arrays)


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


def test_tiles_without_work_leave_running_sums_as_they_are():
    """Adding zero to -0 would make 0."""
    inputs = local_cases.make_inputs(CASES[0], seed=7, batch=1)
    q, (kv, *_), q_tokens, (kv_tokens, *_), (do, _), *_ = inputs.arrays
    later = kv_tokens._replace(positions=kv_tokens.positions + 10**6)
    stats = np.zeros((2, *q.shape[:1], *q.shape[2:0:-1]), np.float32)
    o, dkv = (-np.zeros(x.shape, np.float32) for x in (do, np.stack(kv)))

    def call(o, dkv):
        arrays = q, kv, q_tokens, later, (o, stats[0])
        out, lse = local.forward(SMALL, *arrays, spec=inputs.spec)
        given = (q, do), kv, stats, q_tokens, later, None, dkv
        return out, lse, *local.backward(SMALL, *given, spec=inputs.spec)

    with interpreted_sm80.interpreted():
        out, lse, dq, sums = interpreted_callbacks.run(call, o, dkv)
    assert np.signbit(out).all()
    assert np.signbit(sums).all()
    for x in (out, lse, dq, sums):
        assert not x.any()


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize("barrier", [0, 1, 2])
def test_a_missing_barrier_is_a_race(barrier):
    """Of a step of the backward pass with one stage: before, between and after its products."""
    inputs = local_cases.make_inputs(CASES[0], seed=7, batch=1)
    with pytest.raises(Exception, match="RACE DETECTED"):
        run(inputs, ONE, without_barrier=barrier)
