"""The kernels of products by group, or of few rows, on a CPU, interpreted, against float64."""

from __future__ import annotations

import functools
from unittest import mock

import grouped_cases
import interpreted
import interpreted_sm80
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped
from pallas_kernels.grouped_products import GroupedProducts
from pallas_kernels.mosaic.sm80 import few_rows
from pallas_kernels.mosaic.sm80 import grouped as sm80
from pallas_kernels.mosaic.sm80.configs import GroupedConfig as Sm80Config
from pallas_kernels.mosaic.sm90 import grouped as sm90
from pallas_kernels.mosaic.sm90.configs import GroupedConfig as Sm90Config

FAMILIES = {"sm80": (sm80, interpreted_sm80), "sm90": (sm90, interpreted)}
# [names, K, N, dtype]; tiles have 128 rows and 64 columns. Two CTAs share sm90's work tiles.
CASES = [
    ("sm90", "ragged", 128, 64, "bfloat16", Sm90Config(128, 64, 2)),
    ("sm90", "one", 64, 192, "float16", Sm90Config(128, 128, 3)),
    ("sm90", "large", 64, 64, "bfloat16", Sm90Config(128, 64, 3)),
    ("sm90", "several empty", 64, 64, "bfloat16", Sm90Config(128, 64, 2)),
    ("sm80", "ragged", 128, 64, "bfloat16", Sm80Config(64, 64, 3)),
    ("sm80", "one", 64, 128, "float16", Sm80Config(64, 64, 3)),
    ("sm80", "large", 64, 64, "bfloat16", Sm80Config(64, 64, 2)),
    ("sm80", "several empty", 64, 64, "bfloat16", Sm80Config(64, 64, 2)),
]


def run(family, cases, config):
    """Results of a family's interpreted kernels, of cases of the same shapes."""
    kernels, interpreter = FAMILIES[family]
    products = GroupedProducts(
        "interpreted",
        functools.partial(kernels.product, config=config),
        functools.partial(kernels.weight_gradient, config=config),
    )
    with (
        mock.patch.object(grouped, "_choose", return_value=products),
        mock.patch.object(sm90, "num_sms", return_value=2),
        interpreter.interpreted(),
    ):
        program = grouped_cases.program()
        return [jax.tree.map(np.asarray, program(*case[:4])) for case in cases]


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize(
    ("family", "names", "k", "n", "dtype", "config"),
    [pytest.param(*c, marks=() if c[1] == "ragged" else pytest.mark.slow) for c in CASES],
)
def test_as_exact_as_float64(family, names, k, n, dtype, config):
    cases = [grouped_cases.make(name, k, n, dtype) for name in names.split()]
    for case, got in zip(cases, run(family, cases, config), strict=True):
        grouped_cases.check(case, got, 5e-3)


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize(
    ("slots", "used", "rows", "k", "n", "arrays", "summed", "has_first"),
    [
        (4, 3, 5, 128, 64, 2, False, True),
        (4, 3, 17, 256, 128, 1, True, False),
        (2, 1, 5, 704, 64, 1, False, False),  # Each slot by two CTAs.
        pytest.param(3, 3, 64, 192, 192, 1, True, True, marks=pytest.mark.slow),
    ],
)
def test_products_of_few_rows(slots, used, rows, k, n, arrays, summed, has_first):
    """Of the used slots, in any order of the matrices; rows are the same for all, or not."""
    rng, of_x = np.random.default_rng(0), slots + has_first if summed else 1
    x = jnp.asarray(rng.standard_normal((of_x, rows, k)), jnp.bfloat16)
    weights = tuple(
        jnp.asarray(rng.standard_normal((6, k, n)), jnp.bfloat16) for _ in range(arrays)
    )
    matrices = rng.permutation(6)[:slots].astype(np.int32)
    given = few_rows.Slots(jnp.asarray(matrices), jnp.asarray([used], jnp.int32))
    with mock.patch.object(few_rows, "num_sms", return_value=4), interpreted_sm80.interpreted():
        # The last matrix of each array, by itself.
        first = tuple(each[5] for each in weights) if has_first else ()
        out = few_rows.few_rows_product(x, weights, given, summed=summed, first=first)
    exact = [np.asarray(each.astype(jnp.float32), float) for each in (x, *weights)]
    chosen = np.concatenate([[5] * has_first, matrices[:used]]).astype(int)
    used = len(chosen)
    wanted = np.stack([exact[0][:used] @ each[chosen] for each in exact[1:]])
    got, wanted = (out.sum(1), wanted.sum(1)) if summed else (out[:, :used], wanted)
    assert np.linalg.norm(got - wanted) < 1e-6 * np.linalg.norm(wanted)
