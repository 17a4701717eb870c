"""The online softmax of a tile's queries in registers, for the forward and the decode kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.fragments import along_rows, rescale_rows
from pallas_kernels.mosaic.sm80 import instructions
from pallas_kernels.softmax import MARGIN


class OnlineSoftmax(NamedTuple):
    """The state of the online softmax, with weights ``2^(score - m)``.

    Attributes:
      m: float32 ``[rows]``, in base 2: the maximum so far, or at most
        :data:`~pallas_kernels.softmax.MARGIN` below it.
      total: float32 ``[rows]``, each thread's partial sums of weights.
      acc: float32 ``[rows, Hv]``, sums of weights times values.
    """

    m: jax.Array
    total: jax.Array
    acc: jax.Array

    def add(
        self, scores: jax.Array, factor: float, fragments: instructions.Fragments
    ) -> tuple[jax.Array, OnlineSoftmax]:
        """``(weights, state)``: a tile's weights, and the state after this tile.

        Its ``acc`` is only rescaled: the caller adds the weights times the tile's values.

        Args:
          scores: float32 ``[rows, keys]``; -inf where masked.
          factor: from scores to logits in base 2.
          fragments: register layouts.
        """
        highest = jnp.max(scores, axis=1) * factor
        m = jnp.where(highest > self.m + MARGIN, highest, self.m)
        shrink = jnp.exp2(self.m - m)
        weights = jnp.exp2(scores * factor - along_rows(m, scores.shape))
        weights = plgpu.layout_cast(weights, fragments.tile)
        total = instructions.add_to_row_parts(self.total * shrink, weights, fragments)
        acc = rescale_rows(self.acc, shrink, tile=fragments.tile, rows=fragments.rows)
        return weights, OnlineSoftmax(m, total, acc)
