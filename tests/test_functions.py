"""``score_mod`` and ``mask_mod``: users' own functions of single scores."""

from __future__ import annotations

import functools

import compare
import jax
import jax.numpy as jnp
import local_cases
import numpy as np
import pytest
from cases import in_tiers
from implementations import IMPLEMENTATIONS, QUICK
from meshes import mesh_of
from ring_cases import a_case, assert_exact, case_id


CASES = [
    a_case(1, "contiguous", "full"),
    a_case(2, "zigzag", "causal", backward="rotate_query"),
    a_case(3, "striped", "packed_causal", shard="63"),
    a_case(5, "contiguous", "window40_17", backward="rotate_query", shard="longer_keys"),
    a_case(8, "zigzag", "packed_window_cap"),
    a_case("2x3", "striped", "causal", backward="rotate_query"),
    a_case("2+h4", "zigzag", "causal"),
]
CASES = [case | {"functions": True} for case in CASES]
CASES[2]["numbers"] = CASES[5]["numbers"] = "both"
CASES[3]["dropout"] = CASES[4]["dropout"] = 0.3


@pytest.mark.parametrize("case", in_tiers(CASES, case_id, CASES[2:7:2]))
def test_a_ring_is_as_exact_as_one_device(case):
    assert_exact(case)


# Every kernel, in each of its forms: whole tiles and parts, ranges, a bias, a soft cap, dropout,
# and a table of blocks.
LOCAL_CASE = {
    "mask": "causal", "order": "contiguous", "blocks": 2, "heads": (4, 2), "lengths": (48, 48),
    "head_dim": 16, "dtype": "float32", "numbers": "none", "functions": True,
}  # fmt: skip
LOCAL_CASES = [
    LOCAL_CASE | changes
    for changes in (
        {},
        {"mask": "packed_window_cap", "order": "striped", "lengths": (63, 45)},
        {"mask": "packed_window_ranges", "lengths": (20, 57), "numbers": "both", "dropout": 0.3},
        {"mask": "cap", "heads": (8, 1), "dtype": "bfloat16", "table": (16, 16, True)},
    )
]


@functools.lru_cache
def local_oracle(index):
    inputs = local_cases.make_inputs(LOCAL_CASES[index], index)
    return inputs, *local_cases.oracle(inputs)


@pytest.mark.parametrize("name", ["xla", "reference", "triton"])
@pytest.mark.parametrize(
    "index", range(len(LOCAL_CASES)), ids=map(local_cases.case_id, LOCAL_CASES)
)
def test_one_device_is_as_exact_as_dense(index, name):
    inputs, truth, one_device = local_oracle(index)
    attend = jax.jit(local_cases.attend, static_argnums=(0, 1), compiler_options=QUICK)
    arrays = inputs.q, inputs.kvs, inputs.q_tokens, inputs.kv_tokens, inputs.cotangents
    arrays += inputs.numbers, inputs.seeds, inputs.blocks
    got = [np.asarray(x) for x in attend(IMPLEMENTATIONS[name], inputs.spec, *arrays)]
    dtype = LOCAL_CASES[index]["dtype"]
    compare.assert_as_good_as(got, one_device, truth, dtype, 2 if dtype == "float32" else 1.5)
    local_cases.assert_zero_where_blind(got, inputs)
