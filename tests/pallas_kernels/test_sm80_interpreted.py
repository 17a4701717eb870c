"""The sm80 kernels on a CPU, interpreted, held to dense attention."""

from __future__ import annotations

import functools
from typing import Any

import compare
import interpreted_sm80
import jax
import local_cases
import numpy as np
import pytest
from local_cases import assert_zero_where_blind, attend, case_id

from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig
from pallas_kernels.mosaic.sm80.implementation import mosaic_sm80

# The smallest tiles there are, one warpgroup and two.
SMALL = mosaic_sm80(ForwardConfig(64, 32), BackwardConfig(64, 64))
TWO = mosaic_sm80(ForwardConfig(128, 64, 2), BackwardConfig(64, 64, stages=1))
DETERMINISTIC = mosaic_sm80(ForwardConfig(64, 32), BackwardConfig(64, 64), deterministic=True)
NAMES = "mask", "order", "blocks", "heads", "lengths", "head_dim", "dtype", "numbers", "dropout"
CASES: list[dict[str, Any]] = [
    dict(zip(NAMES, levels, strict=False))
    for levels in (
        ("causal", "contiguous", 1, (2, 1), (136, 200), 32, "bfloat16", "none"),
        ("full", "contiguous", 2, (1, 1), (72, 136), 64, "float16", "sinks"),
        ("packed_window_cap", "striped", 2, (2, 1), (136, 72), 32, "bfloat16", "both"),
        ("causal", "contiguous", 2, (2, 1), (64, 136), 128, "bfloat16", "slopes"),
        ("packed_causal", "zigzag", 2, (4, 2), (100, 62), 48, "bfloat16", "both"),
        ("packed_window_ranges", "striped", 2, (2, 1), (136, 72), 32, "bfloat16", "slopes"),
        ("ranges", "contiguous", 1, (2, 1), (72, 136), 64, "bfloat16", "none"),
        ("causal", "striped", 1, (2, 1), (136, 72), 32, "bfloat16", "none", 0.3),
        ("packed", "contiguous", 2, (2, 2), (136, 136), 64, "bfloat16", "both", 0.1),
    )
]
CASES[1] |= {"value_dim": 32}
CASES[4] |= {"value_dim": 96}
CASES[6] |= {"functions": "functions"}
CASES[7] |= {"lengths": (128, 192), "order": "contiguous", "table": (64, 64, True)}
# The others are run with the slow tests.
QUICK = 0, 2, 5


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        pytest.param(
            case,
            (DETERMINISTIC, SMALL, TWO, DETERMINISTIC)[index % 4],
            id=case_id(case),
            marks=() if index in QUICK else pytest.mark.slow,
        )
        for index, case in enumerate(CASES)
    ],
)
def test_as_exact_as_dense(case, kernels):
    inputs = local_cases.make_inputs(case, seed=7, batch=1)
    run = functools.partial(attend, kernels, inputs.spec)
    arrays = inputs.q, inputs.kvs, inputs.q_tokens, inputs.kv_tokens, inputs.cotangents
    with interpreted_sm80.interpreted():
        got = jax.jit(lambda *a: run(*a))(*arrays, inputs.numbers, inputs.seeds, inputs.blocks)
    got = jax.tree.map(np.asarray, got)
    truth, one_device = local_cases.oracle(inputs)
    compare.assert_as_good_as(got, one_device, truth, case["dtype"])
    assert_zero_where_blind(got, inputs)
