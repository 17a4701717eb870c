"""What functions of ``fragments``, ``online_softmax``, ``row_intervals`` and others compute.

A warpgroup is one thread here.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import fragments
from pallas_kernels.mosaic.fragments import constant
from pallas_kernels.mosaic.sm90 import online_softmax, row_intervals
from pallas_kernels.mosaic.sm90.instructions import TILE
from pallas_kernels.mosaic.sm90.online_softmax import THREADS_OF_ROW
from pallas_kernels.softmax import MARGIN


def _of_half(x, half):
    """True in rows 0 to 7 of every 16, or 8 to 15."""
    return jnp.arange(len(x), dtype=jnp.int32) // 8 % 2 == half


def _exp2_of_half(x, m, factor, half):
    of_half = _of_half(x, half)[:, None]
    return jnp.where(of_half, jnp.exp2(jnp.where(of_half, x, 0) * factor - m[:, None]), x)


def _drop(x, hashes, threshold, half):
    return jnp.where(_of_half(x, half)[:, None] & (hashes < threshold), 0, x)


def _raised(m, scores, factor, inverse):
    del inverse
    highest = scores.max(1) * factor
    return jnp.where(highest > m + MARGIN, highest, m)


def _between(scores, start, end):
    column = jnp.arange(scores.shape[1], dtype=jnp.int32)
    return jnp.where((column >= start[:, None]) & (column < end[:, None]), scores, -jnp.inf)


def start_product(acc, a, b):
    """A product, which may contract any number of rows here."""
    plgpu.wgmma(acc, a, b)
    return functools.partial(plgpu.wgmma_accumulator_load, acc)


def store_transposed(target, x, lane):
    """Instead of :func:`instructions.store_transposed`."""
    first, end = max(lane, 0), min(lane + x.shape[0], target.shape[1])
    target[:, first:end] = x[first - lane : end - lane].T


def store_left_operand(target, x):
    """A store, whose order of registers does not show here."""
    target[...] = x


def zero_rows(target, transforms, segment_ids):
    """Instead of :func:`padding.zero_rows`, row by row."""
    del transforms

    @pl.loop(0, target.shape[0])
    def _(row):
        @pl.when(segment_ids[row] == 0)
        def _():
            target[row] = jnp.zeros(target.shape[1:], target.dtype)


def fresh_zeros(shape):
    """Zeros, of any instruction."""
    return constant(shape, 0, TILE)


def _add_part(total, x, half):
    return jnp.where(_of_half(x, half), total + x.sum(1) / THREADS_OF_ROW, total)


MODULES = [x.__name__ for x in (fragments, online_softmax, row_intervals)]
# By the name of the function for the GPU. The threads of a row have equal parts of its sum.
RULES = {
    "_exp2_of_first": functools.partial(_exp2_of_half, half=0),
    "_exp2_of_second": functools.partial(_exp2_of_half, half=1),
    "_known_after": lambda m, acc: m,
    "_add_parts": lambda total, x: total + x.sum(1) / THREADS_OF_ROW,
    "_add_part_of_first": functools.partial(_add_part, half=0),
    "_add_part_of_second": functools.partial(_add_part, half=1),
    "_known_by_warp_after": lambda condition, total: condition,
    "_drop_in_first": functools.partial(_drop, half=0),
    "_drop_in_second": functools.partial(_drop, half=1),
    "_sum_parts": lambda total: total * THREADS_OF_ROW,
    "_raised": _raised,
    "_rescale_rows": lambda x, factors: x * factors[:, None],
    "_between": _between,
}
