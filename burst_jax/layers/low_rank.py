"""Low-rank adapters of projections (LoRA, Hu et al. 2021).

A projection with an adapter computes ``x W + (alpha / r) (x A) B``. A ``[inputs, r]`` and
B ``[r, outputs]`` are two more parameters of the projection's module, ``kernel_lora_a`` and
``kernel_lora_b``, as the library qwix names and shapes them: heads and their features are one
dimension.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

LORA_A, LORA_B = "kernel_lora_a", "kernel_lora_b"

Linear = nnx.LinearGeneral | nnx.Linear


def set_adapter(linear: Linear, a: jax.Array, b: jax.Array, scale: float) -> None:
    """Gives a projection an adapter.

    Args:
      linear: the projection.
      a: A, ``[inputs, r]``.
      b: B, ``[r, outputs]``.
      scale: ``alpha / r``.
    """
    setattr(linear, LORA_A, nnx.LoRAParam(a))
    setattr(linear, LORA_B, nnx.LoRAParam(b))
    linear.lora_scale = scale  # pyrefly: ignore


def adapter_of(linear: Linear, dtype: DTypeLike) -> tuple[jax.Array, jax.Array] | None:
    """``(A, (alpha / r) B)`` of a projection in the dtype of its product; None if it has none."""
    if not hasattr(linear, LORA_A):
        return None
    a, b = getattr(linear, LORA_A)[...], getattr(linear, LORA_B)[...]
    return a.astype(dtype), (linear.lora_scale * b).astype(dtype)  # pyrefly: ignore


def add_adapter(linear: Linear, x: jax.Array, out: jax.Array) -> jax.Array:
    """``out + (alpha / r) (x A) B``; ``out`` itself if the projection has no adapter.

    Args:
      linear: the projection.
      x: ``[B, T, ...]``, its input.
      out: ``[B, T, ...]``, its product.
    """
    adapter = adapter_of(linear, out.dtype)
    if adapter is None:
        return out
    a, b = adapter
    features = x.reshape(*x.shape[:2], -1).astype(out.dtype)
    return out + ((features @ a) @ b).reshape(out.shape)


def cut_outputs(adapter: nnx.State, first: jax.Array, count: int) -> nnx.State:
    """The adapter of ``count`` of a projection's outputs, from ``first`` on; it may be empty."""

    def cut(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        is_b = any(getattr(key, "key", None) == LORA_B for key in path)
        return lax.dynamic_slice_in_dim(array, first, count, axis=1) if is_b else array

    return jax.tree_util.tree_map_with_path(cut, adapter)
