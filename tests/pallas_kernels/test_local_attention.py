"""Local attention on one device: every implementation against dense float64 attention."""

from __future__ import annotations

import functools

import compare
import jax
import local
import local_cases
import numpy as np
import pytest
from cases import MASKS, all_pairs, few_of, value_dim
from conftest import IMPLEMENTATION, ON_GPU
from implementations import IMPLEMENTATIONS, QUICK, UNDER_TEST
from local_cases import attend, case_id, lse_factor_on_gpu

from pallas_kernels import REFERENCE

FACTORS: dict[str, tuple] = {
    "mask": tuple(MASKS),
    "order": ("contiguous", "zigzag", "striped"),
    "blocks": (1, 2),
    "heads": ((4, 4), (8, 2), (8, 1)),
    "lengths": ((48, 48), (63, 45), (20, 57), (9, 7)),
    "head_dim": (16, 40, 33),
    "value_dim": ("same", 24),
    "dtype": ("float32", "bfloat16", "float16"),
    "numbers": ("none", "sinks", "slopes", "both"),
    "dropout": (0.0, 0.3),
}
if ON_GPU:
    # Many shipped tiles, whole and ragged.
    FACTORS["lengths"] += ((300, 530), (1000, 1000), (512, 1024))
    FACTORS["head_dim"] += (64, 128)
    # Elsewhere tests/attention/test_functions.py has cases of its own.
    FACTORS["functions"] = (None, "mask_mod", "tile_mask", "functions")
if IMPLEMENTATION == "mosaic_sm90":
    # What this kernel takes, with and without parts of tiles.
    FACTORS["lengths"] = ((48, 48), (24, 56), (8, 8), (304, 528), (1000, 1000), (512, 1024))
    FACTORS["head_dim"] = (32, 64, 96, 128, 160, 192, 256)
    FACTORS["dtype"] = ("bfloat16", "float16")
    FACTORS["value_dim"] = ("same", 128)
if IMPLEMENTATION == "mosaic_sm80":
    # In 7 keys a drawn mask may leave no score at all.
    FACTORS["lengths"] = tuple((24, 20) if x == (9, 7) else x for x in FACTORS["lengths"])
    FACTORS["head_dim"] = (16, 32, 64, 80, 96, 128, 192, 256)
    FACTORS["dtype"] = ("bfloat16", "float16")
    FACTORS["value_dim"] = ("same",)
CASES = all_pairs(FACTORS)
if IMPLEMENTATION == "mosaic_sm90":
    # The slopes of a score_mod spill registers in this kernel's backward above head dim 64.
    for case in CASES:
        if case["functions"] == "functions" and max(case["head_dim"], value_dim(case)) > 64:
            case["functions"] = "mask_mod"
# On a CPU every level is met: rings run XLA's attention in all pairs. On a GPU every pair is.
FEW = sorted(CASES.index(case) for case in few_of(CASES))
CASES_BY_NAME = {"xla": FEW}
if ON_GPU:
    CASES_BY_NAME = dict.fromkeys(UNDER_TEST, range(len(CASES)))


@functools.lru_cache(maxsize=4)
def make_inputs(index):
    return local_cases.make_inputs(CASES[index], index)


_attend = jax.jit(attend, static_argnums=(0, 1), compiler_options=QUICK)


def results(implementation, index, dtype=None):
    """What ``attend`` makes of a case, as NumPy arrays; ``dtype`` instead of the case's own."""
    inputs = make_inputs(index)
    arrays = inputs.arrays
    if dtype is not None:
        arrays = jax.tree.map(
            lambda x: x if np.issubdtype(x.dtype, np.integer) else x.astype(dtype), arrays
        )
    return [np.asarray(x) for x in _attend(implementation, inputs.spec, *arrays)]


if ON_GPU:

    @pytest.mark.parametrize("dim", range(16, 257, 16))
    def test_every_head_dim_forward(dim):
        """Of several tiles; the cases above have the head dims of the backward pass."""
        case = CASES[0] | {
            "mask": "causal", "blocks": 1, "heads": (4, 2), "lengths": (200, 328),
            "head_dim": dim, "value_dim": "same", "dtype": "bfloat16", "numbers": "none",
            "dropout": 0.0, "functions": None,
        }  # fmt: skip
        inputs = local_cases.make_inputs(case, dim)
        arrays = inputs.q, inputs.kvs[0], inputs.q_tokens, inputs.kv_tokens[0]
        run = functools.partial(local.forward, IMPLEMENTATIONS[IMPLEMENTATION], spec=inputs.spec)
        o, lse = jax.jit(run)(*arrays)
        truth, one_device, *_ = inputs.reference
        pairs = zip((o, lse.swapaxes(1, 2)), one_device, truth, (2**-9, 2**-20), strict=False)
        for got, one, want, slack in pairs:
            assert compare.errors(got, want)[1] < 1.5 * compare.errors(one, want)[1] + slack


@pytest.mark.parametrize(
    ("index", "name"),
    [
        pytest.param(index, name, id=f"{name}-{case_id(case)}")
        for index, case in enumerate(CASES)
        for name in CASES_BY_NAME
        if index in CASES_BY_NAME[name]
    ],
)
def test_as_exact_as_dense(index, name):
    got, inputs = results(IMPLEMENTATIONS[name], index), make_inputs(index)
    dtype = CASES[index]["dtype"]
    noise = None if dtype == "float32" else inputs.number_noise()
    lse_factor = lse_factor_on_gpu(CASES[index]) if ON_GPU else 1.5
    compare.assert_exact(got, inputs.reference, dtype, 1.5, lse_factor, noise)


@pytest.mark.parametrize("index", [pytest.param(index, id=case_id(CASES[index])) for index in FEW])
def test_reference_equals_autodiff_in_float64(index):
    """The oracle of the others, itself held to the gradients of dense softmax attention."""
    reference = make_inputs(index).reference
    truth = reference.truth
    with jax.enable_x64(True):
        got = results(REFERENCE, index, np.float64)
    for name, g, t in zip((*compare.NAMES, "number", "number"), got, truth, strict=False):
        assert g.dtype == np.float64, name
        worst, rms = compare.errors(g, t)
        assert rms < 1e-13, name
        assert worst < 1e-12 * max(1, np.abs(t[np.isfinite(t)]).max(initial=0)), name
    compare.assert_zero_where_blind(got, reference)


def test_cases_have_rows_and_keys_that_see_nothing():
    """The zeros asserted above are asserted of something, and the errors of something else."""
    keeps = [make_inputs(index).keep for index in range(len(CASES))]
    assert sum(bool((~keep.any(3)).any()) for keep in keeps) >= 10
    assert sum(bool((~keep.any(2)).any()) for keep in keeps) >= 10
    assert all(keep.any() for keep in keeps)


def test_zeros_fail():
    """The guard: a comparison that all-zero results pass would prove nothing."""
    cases = [(case["dtype"], case["numbers"]) for case in CASES]
    index = cases.index(("bfloat16", "both"))
    truth, one_device, *_ = make_inputs(index).reference
    names = *compare.NAMES, "number 0", "number 1"
    # In float32, as gradients of numbers are in every case.
    truth = [*truth[:5], *(x.astype(np.float32) for x in truth[5:])]
    for zero in ("out", "dq", "dk", "dv", "number 0", "number 1"):
        broken = [x * 0 if n == zero else x for n, x in zip(names, truth, strict=True)]
        with pytest.raises(AssertionError, match=zero):
            compare.assert_as_good_as(broken, one_device, truth, "bfloat16")
