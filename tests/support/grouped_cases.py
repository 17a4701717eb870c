"""Cases of the grouped matrix product, and their results in float64."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped import grouped_matmul

# Sizes and rows; tiles have 64 or 128 rows.
SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    # Rows after the last group; a group of a whole tile, empty ones, one of a row.
    "ragged": ((5, 0, 128, 1, 67, 0), 209),
    "one": ((150,), 150),
    "large": ((3, 300, 0, 17), 320),
    "many": (tuple(np.random.default_rng(1).multinomial(300, np.ones(128) / 128).tolist()), 320),
    # In one tile, and none: of the same shapes.
    "several": ((3, 0, 9, 1, 14, 2, 0, 7, 4), 70),
    "empty": ((0,) * 9, 70),
}


class Case(NamedTuple):
    """Operands, the output's cotangent, and the results in float64: out, dx, dw."""

    x: Any
    w: Any
    sizes: Any
    dy: Any
    wanted: tuple[np.ndarray, ...]


def make(name, k, n, dtype, rows=None):
    """A case; rows after the last group hold NaN, which must not matter."""
    sizes, own_rows = SIZES[name]
    rows, rng = rows or own_rows, np.random.default_rng(zlib.crc32(name.encode()))
    shapes = (rows, k), (len(sizes), k, n), (rows, n)
    x, w, dy = (
        np.asarray(jnp.asarray(rng.standard_normal(s), dtype).astype(jnp.float32)) for s in shapes
    )
    out, dx, dw = (np.zeros(s) for s in ((rows, n), x.shape, w.shape))
    first = 0
    for group, size in enumerate(sizes):
        part = slice(first, first := first + size)
        out[part] = x[part].astype(float) @ w[group]
        dx[part] = dy[part].astype(float) @ w[group].T
        dw[group] = x[part].astype(float).T @ dy[part]
    x, w, dy = (jnp.asarray(a, dtype) for a in (x, w, dy))
    x, dy = (a.at[first:].set(jnp.nan) for a in (x, dy))
    return Case(x, w, jnp.asarray(sizes, jnp.int32), dy, (out, dx, dw))


def program(implementation=None):
    """``(x, w, sizes, dy) -> out, dx and dw``."""

    def run(x, w, sizes, dy):
        out, vjp = jax.vjp(
            lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation), x, w
        )
        return out, *vjp(dy)

    return jax.jit(run)


def results(case, implementation=None):
    """out, dx and dw."""
    return program(implementation)(*case[:4])


def check(case, got, tolerance):
    """All results within a relative error; zeros where the reference has them."""
    for name, a, b in zip(("out", "dx", "dw"), got, case.wanted, strict=True):
        a = np.asarray(a.astype(jnp.float32), float)
        assert a.shape == b.shape
        np.testing.assert_array_equal(a[b == 0], 0, err_msg=name)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), name
