"""300 drawn calls of the Mosaic kernels on a GPU, of all modifiers, against float64.

They run with ``--implementation`` only. Every program is compiled once, and runs on several draws
of positions, segments, KV bounds, block-sparse tables, per-head parameters, dropout and data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import compare
import jax
import local_cases
import numpy as np
import pytest
from cases import MASKS, value_dim
from conftest import IMPLEMENTATION
from implementations import IMPLEMENTATIONS
from local_cases import attend, case_id, lse_factor_on_gpu

PROGRAMS, DRAWS = 75, 4
HEAD_DIMS = {"mosaic_sm80": range(16, 257, 16), "mosaic_sm90": (32, 64, 96, 128, 144, 192, 256)}


def drawn_case(index):
    """A drawn program, without what its draws differ in."""
    rng = np.random.default_rng(index)

    def pick(levels):
        return levels[rng.integers(len(levels))]

    dims = HEAD_DIMS[IMPLEMENTATION]
    case: dict[str, Any] = {
        "mask": tuple(MASKS)[index % len(MASKS)],
        "blocks": 1 + index % 2,
        "heads": pick(((2, 2), (4, 2), (3, 1))),
        "lengths": pick(((24, 56), (136, 200), (63, 45), (129, 257), (260, 120))),
        "head_dim": pick(dims),
        "value_dim": pick(dims) if index % 3 == 0 else "same",
        "dtype": pick(("bfloat16", "float16")),
        "numbers": pick(("none", "sinks", "slopes", "both")),
        "dropout": pick((0.0, 0.0, 0.2)),
        "functions": pick((None, None, "mask_mod", "tile_mask", "functions")),
    }
    if index % 5 == 4:
        case |= {"lengths": (128, 192), "table": (64, 64, bool(index % 2))}
    if IMPLEMENTATION == "mosaic_sm90" and case["head_dim"] <= 128 < value_dim(case):
        # Its backward supports values above 128 if keys are, too.
        case |= {"head_dim": case["value_dim"], "value_dim": case["head_dim"]}
    widest = max(case["head_dim"], value_dim(case))
    if IMPLEMENTATION == "mosaic_sm90" and widest > 64 and case["functions"] == "functions":
        # The derivative of a score_mod spills registers in its backward above head dim 64.
        case["functions"] = "mask_mod"
    return case


# Empty without --implementation.
CASES = [drawn_case(index) for index in range(PROGRAMS)] if IMPLEMENTATION in HEAD_DIMS else []


def draws(case, index):
    """``(order, seed)`` of a program's draws."""
    orders = ["contiguous", "zigzag", "striped", "shuffled"]
    if "table" in case:
        orders = orders[:1]  # The tokens of a block are neighbors on a device.
    elif any(length % 2 for length in case["lengths"]):
        orders.remove("zigzag")  # It would change the lengths.
    for draw in range(DRAWS):
        yield orders[(index + draw) % len(orders)], PROGRAMS * draw + index


_attend = jax.jit(attend, static_argnums=(0, 1))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_drawn_calls_are_exact_and_repeat_bit_for_bit(index):
    case = CASES[index]
    for order, seed in draws(case, index):
        inputs = local_cases.make_inputs(case | {"order": order}, seed, batch=1)
        kernels, repeating = IMPLEMENTATIONS[IMPLEMENTATION], 2
        if index % 4 == 3 and case["functions"] != "functions":
            kernels, repeating = kernels.deterministic_variant, 5
        got, again = (
            [np.asarray(x) for x in _attend(kernels, inputs.spec, *inputs.arrays)] for _ in range(2)
        )
        noise, lse_factor = inputs.number_noise(), lse_factor_on_gpu(case)
        try:
            compare.assert_exact(got, inputs.reference, case["dtype"], 1.5, lse_factor, noise)
            for first, second in zip(got[:repeating], again, strict=False):
                np.testing.assert_array_equal(first, second)
        except AssertionError as error:
            raise AssertionError(f"{case_id(case | {'order': order})}, seed {seed}") from error


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
    keeps = [
        (case, local_cases.make_inputs(case | {"order": order}, seed, batch=1).keep)
        for index, case in enumerate(CASES)
        for order, seed in draws(case, index)
    ]
    assert len(keeps) == 300
    assert sum(keep.any() for _, keep in keeps) > 290
    # Else their gradients would be 0.
    assert all(keep.any() for case, keep in keeps if case["numbers"] in ("slopes", "both"))
    assert sum(not keep.any(-1).all() for _, keep in keeps) > 100
