"""What backward kernels accumulate dQ in: float32 or integers, in the order a kernel writes them.

A kernel family makes a :class:`pallas_kernels.backend.DqAccumulator` of it. A ring keeps it over
all of its steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.inputs import AttentionInputs


class DqSum(NamedTuple):
    """A sum of parts of dQ, or of dQ / scale.

    Attributes:
      values: float32, or int32 in fixed point (:mod:`pallas_kernels.mosaic.fixed_point`), which the
        kernel adds to in place.
      bound: float32, of which the factor to integers is computed; None if the values are float32.
    """

    values: jax.Array
    bound: jax.Array | None


def zeros(
    inputs: AttentionInputs, bounds: Any, shape: tuple[int, ...], bound: jax.Array | None
) -> DqSum:
    """The sum before the first call; of integers if there is a ``bound``."""
    # They depend on an operand, so that a ring does not allocate those of all steps at once. The
    # barrier has operands that differ between steps. Otherwise XLA would create equal arrays once,
    # and copy them.
    zero, *_ = lax.optimization_barrier((jnp.int32(0), inputs.query.stats, inputs.kv.k, bounds))
    return DqSum(jnp.full(shape, zero.astype(jnp.float32) if bound is None else zero), bound)
