"""Experts in chunks of tokens, forward and backward, to hold one chunk's rows at a time.

A layer's largest arrays are k rows per token: the sorted tokens, and the experts' hidden features.
The backward pass computes each chunk again, and adds the weights' gradients up in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import vary, varying_axes

# (parameters, tokens [n, D], their experts' weights [n, k]), the experts [n, k] -> [n, D], and the
# number of further rounds, float32, or None.
Routed = Callable[[tuple[Any, jax.Array, jax.Array], jax.Array], tuple[jax.Array, jax.Array | None]]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_chunked(
    routed: Routed, chunks: int, arrays: tuple[Any, jax.Array, jax.Array], ids: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """``routed(arrays, ids)``, of one chunk of tokens at a time; ``chunks`` divides them.

    The further rounds are those of all chunks; they have no gradient.
    """
    parameters, *rest = arrays

    def chunk(part: Any) -> tuple[jax.Array, jax.Array | None]:
        tokens, weights, ids = part
        return routed((parameters, tokens, weights), ids)

    out, rounds = lax.map(chunk, _split((*rest, ids), chunks))
    return _merge(out), None if rounds is None else rounds.sum()


def _forward(routed: Routed, chunks: int, arrays: Any, ids: jax.Array) -> tuple[Any, Any]:
    return run_chunked(routed, chunks, arrays, ids), (arrays, ids)


def _backward(routed: Routed, chunks: int, residuals: Any, gradients: Any) -> tuple[Any, None]:
    (parameters, *rest), ids = residuals
    gradient, _ = gradients

    def chunk(sums: Any, part: Any) -> tuple[Any, Any]:
        tokens, weights, ids, gradient = part
        vjp = jax.vjp(lambda *arrays: routed(arrays, ids)[0], parameters, tokens, weights)[1]
        terms, *found = vjp(gradient)
        return jax.tree.map(lambda total, x: total + x.astype(jnp.float32), sums, terms), found

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), parameters)
    zeros = vary(zeros, varying_axes(residuals, gradient))
    sums, found = lax.scan(chunk, zeros, _split((*rest, ids, gradient), chunks))
    sums = jax.tree.map(lambda total, x: total.astype(x.dtype), sums, parameters)
    return (sums, *map(_merge, found)), None


run_chunked.defvjp(_forward, _backward)


def _split(arrays: Any, chunks: int) -> Any:
    """``[n, ...]`` to ``[chunks, n / chunks, ...]``."""
    return jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), arrays)


def _merge(x: jax.Array) -> jax.Array:
    """The inverse of :func:`_split`."""
    return x.reshape(-1, *x.shape[2:])
