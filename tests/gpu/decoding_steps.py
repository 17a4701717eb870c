"""Kernels that decoding alone has, on this machine's first GPU, against float64.

    export PYTHONPATH=.:tests/support
    python tests/gpu/decoding_steps.py

The step of the gated delta rule, and the experts' products of few rows with a shared expert.
"""

from __future__ import annotations

import json
import sys
import traceback

import delta_step_cases
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_products import Slots
from pallas_kernels.mosaic.sm80.few_rows import few_rows_product

# [key heads, value heads, present, factor of beta, taps, dtype]; the first are Qwen3-Next's sizes.
STEPS = [
    (16, 32, [1], 1.0, 4, "bfloat16"),
    (16, 32, [1, 0, 1] * 11, 1.0, 4, "bfloat16"),
    (2, 2, [1], 2.0, 2, "float16"),
    (3, 9, [0, 1, 1], 1.0, 4, "bfloat16"),
    (1, 8, [1] * 5, 2.0, 5, "float16"),
]
ROWS = (1, 8, 33)


def check_step(key_heads, heads, present, beta_factor, taps, dtype):
    """One token; twice, because the kernel updates its state in place."""
    given = delta_step_cases.draw(key_heads, heads, present, taps, dtype)
    run = jax.jit(delta_step_cases.call(beta_factor))
    for _ in range(2):
        results = jax.device_get(run(*given))
        delta_step_cases.check(given, results, beta_factor)
        given = given[0], given[1], results[1], given[3]


def check_rows(rows):
    """Products with the matrices of used slots, and with one before these."""
    rng = np.random.default_rng(rows)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    used, weights, first = [3, 9, 4], normal(16, 2048, 512), normal(2048, 512)
    slots = Slots(jnp.asarray([*used, 0, 0], jnp.int32), jnp.asarray([len(used)], jnp.int32))
    x, matrices = normal(6, rows, 2048), [first, *(weights[i] for i in used)]
    exact = np.stack([
        delta_step_cases.wide(x[i]) @ delta_step_cases.wide(m) for i, m in enumerate(matrices)
    ])  # fmt: skip
    for summed in (False, True):

        @jax.jit
        def run(x, weights, first, summed=summed):
            return few_rows_product(x, (weights,), slots, summed=summed, first=(first,))

        got = np.asarray(run(x, weights, first)[0], float)
        got, want = (got.sum(0), exact.sum(0)) if summed else (got[: len(exact)], exact)
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def main() -> int:
    """Runs all; returns 1 if one is wrong."""
    wrong = 0
    calls = [(check_step, case) for case in STEPS] + [(check_rows, (rows,)) for rows in ROWS]
    for check, case in calls:
        try:
            check(*case)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            wrong += 1
            print(f"WRONG  {check.__name__}{case}")
        else:
            print(f"right  {check.__name__}{case}")
    print(f"figure: {json.dumps({'decoding kernels': len(calls), 'wrong': wrong})}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
