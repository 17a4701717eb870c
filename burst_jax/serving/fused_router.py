"""The matrices of a mixture's router and of its shared expert's gate as one, with rows of inputs.

A decoding step of one sequence computes the product of one row with each. XLA sums along the rows
of a matrix in one kernel. Along columns it writes all products first, in some versions.

::

    router [D, E], shared_gate [D, 1]   ->   [E + 1, D]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.models.experts.mixture import MixtureOfExperts

NAMES = ("router", "shared_gate")


def fuse(kernels: tuple[jax.Array, ...], mesh: Mesh, specs: tuple[P, ...]) -> tuple[jax.Array, ...]:
    """One layer's kernels with the rows of all in the first, and no columns in the other.

    Args:
      kernels: of the router, and of the gate if there is one.
      mesh: the devices, all of which have both.
      specs: the spec of each of them, and of the results.
    """
    return _fuse(mesh, specs)(*kernels)


@functools.cache
def _fuse(mesh: Mesh, specs: tuple[P, ...]) -> Any:
    def fused(*kernels: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.concatenate(kernels, 1).T, *(x[:, :0] for x in kernels[1:])

    return jax.jit(fused, out_shardings=tuple(jax.NamedSharding(mesh, spec) for spec in specs))


def with_fused_router(mlp: MixtureOfExperts, *, at_once: bool) -> MixtureOfExperts:
    """Experts whose router and gate are views of the fused matrix, inside a ``shard_map``.

    Args:
      mlp: the router's kernel is the fused matrix.
      at_once: whether both are slices of one product, for a step of few tokens.
    """
    block: Any = nnx.merge(*nnx.split(mlp))
    count = mlp.config.experts.count
    block.router = _Rows(mlp.router, mlp.router.kernel[...], slice(0, count), at_once)
    if mlp.shared_gate is not None:
        gate = _Rows(mlp.shared_gate, mlp.router.kernel[...], slice(count, count + 1), at_once)
        block.shared_gate = nnx.data(gate)
    return block


class _Rows(nnx.Module):
    """A product with some rows of the fused matrix, in float32.

    With ``at_once`` each computes the product with all, and XLA deduplicates them.
    """

    def __init__(self, linear: nnx.Linear, whole: jax.Array, own: slice, at_once: bool) -> None:
        self.whole, self.bias = nnx.Param(whole), linear.bias
        self.own, self.at_once = (own.start, own.stop), at_once

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., outputs]``."""
        own, rows = slice(*self.own), self.whole[...].astype(jnp.float32)
        if self.at_once:
            out = jnp.einsum("...d,ed->...e", x, rows)[..., own]
        else:
            out = jnp.einsum("...d,ed->...e", x, rows[own])
        return out if self.bias is None else out + self.bias[...].astype(jnp.float32)
