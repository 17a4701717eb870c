"""In how many parts Hopper's kernels scan a run of tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.linear.backend import Inputs
from pallas_kernels.linear.sm90 import operation


def inputs(batch, tokens, heads, channels):
    def array(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((batch, tokens, heads, *shape), dtype)

    rows = array(128, dtype=jnp.bfloat16)
    return Inputs(rows, rows, rows, array(*[128] * channels), array())


# A scan has two CTAs a head, and a GPU 132 SMs.
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "channels", "parts", "without_maps"),
    [
        (1, 16384, 32, False, 2, 1),  # 128 CTAs, of 128 chunks each
        (1, 16384, 33, False, 2, 1),  # 132
        (1, 16384, 34, False, 1, 1),  # 136
        (2, 16384, 32, False, 1, 1),  # zigzag's two runs
        (1, 16384 + 64, 32, False, 1, 1),  # an odd number of chunks
        (1, 16384 - 128, 32, False, 1, 1),  # shorter parts
        (1, 16384, 8, False, 2, 4),
        (1, 16384 - 256, 8, False, 1, 1),
        (1, 32768, 16, False, 4, 4),
        (2, 32768, 8, False, 4, 4),
        (1, 32768, 17, False, 2, 1),  # 136
        (1, 262144, 2, False, 4, 4),  # no more
        (1, 16384, 16, True, 4, 1),
        (1, 8192, 16, True, 2, 1),
    ],
)
def test_parts_fill_the_gpu_and_are_long(
    monkeypatch, batch, tokens, heads, channels, parts, without_maps
):
    monkeypatch.setattr(operation, "num_sms", lambda: 132)
    given = inputs(batch, tokens, heads, channels)
    for found in (operation.parts, operation.MOSAIC_SM90.parts):
        assert (found(given, True), found(given, False)) == (parts, without_maps)
