"""Whether a program has the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# On GPUs a race that shows in one of 30 runs is found in 19 of 20 programs.
RUNS = {"gpu": 100}


def run_repeatedly(
    run: Callable[[], dict[str, jax.Array]],
    names: Collection[str] | None = None,
    runs: int | None = None,
) -> dict[str, np.ndarray]:
    """The results of the first of many runs.

    Args:
      run: the program, with its arguments.
      names: the results that have the same bits in every run; None is all.
      runs: how many there are; None is many on GPUs, two elsewhere.

    Raises:
      AssertionError: a result differs between two runs, or is NaN.
    """
    first, runs = run(), RUNS.get(jax.default_backend(), 2) if runs is None else runs
    names = first if names is None else names
    equal = [_equal(first, run(), tuple(names)) for _ in range(runs - 1)]
    if wrong := sorted({name for each in jax.device_get(equal) for name in each if not each[name]}):
        count = sum(not all(each.values()) for each in equal)
        raise AssertionError(
            f"{', '.join(wrong)} differs from the first run in {count} of {runs - 1}, or is NaN"
        )
    return jax.device_get(first)


@jax.jit(static_argnums=2)
def _equal(x: dict[str, Any], y: dict[str, Any], names: tuple[str, ...]) -> dict[str, jax.Array]:
    return {name: jnp.all(x[name] == y[name]) for name in names}
