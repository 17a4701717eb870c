"""What an implementation of grouped matrix products is, and what their kernels read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels.backend import runs_anywhere
from pallas_kernels.device import Target

_KERNEL_DTYPES = ("bfloat16", "float16")
# Both families read operands in swizzled tiles of so many lanes.
_LANES = 64


@dataclasses.dataclass(frozen=True)
class GroupedProducts:
    """An implementation of the two products. Hashable.

    Attributes:
      name: the public name.
      product: ``(x, w, group_sizes, *, transposed) -> [M, N]``, rows of group g times ``w[g]``, or
        its transpose: ``w`` is ``[G, K, N]``, or ``[G, N, K]`` if ``transposed``. Rows after the
        last group are 0. In x's dtype, summed in float32.
      weight_gradient: ``(x, dy, group_sizes) -> [G, K, N]``, ``x_g^T dy_g`` of each group's rows, 0
        of empty groups, from ``[M, K]`` and ``[M, N]``. Rows after the last group may hold NaN.
      unavailable: ``(platform, compute_capability) -> reason``: why it cannot run there, or None if
        it can.
      is_kernel: whether it supports what kernels do: 16-bit dtypes, K and N multiples of 64.
    """

    name: str
    product: Callable[..., jax.Array]
    weight_gradient: Callable[..., jax.Array]
    unavailable: Callable[[str, float | None], str | None] = runs_anywhere
    is_kernel: bool = True

    def obstacle(self, target: Target, w: jax.Array) -> str | None:
        """Why it cannot run with ``w``, and x of its dtype, or None if it can."""
        reason = self.unavailable(*target)
        if reason is not None or not self.is_kernel:
            return reason
        return unsupported_operand("x", w)


def unsupported_operand(name: str, w: jax.Array) -> str | None:
    """Why kernels do not support ``[G, K, N]``, whose dtype is that of ``name``, or None."""
    if w.dtype not in _KERNEL_DTYPES:
        return f"{name} is {w.dtype}; it supports bfloat16 and float16: cast x and w"
    for letter, dim in zip("KN", w.shape[1:], strict=True):
        if dim % _LANES or not dim:
            return f"{letter} is {dim}; it supports multiples of {_LANES}: pad the features"
    return None


class Slots(NamedTuple):
    """The matrices that rows are multiplied by.

    Attributes:
      matrices: int32 ``[U]``, the index of each one.
      count: int32 ``[1]``, how many of these are used; the others come last.
    """

    matrices: jax.Array
    count: jax.Array
