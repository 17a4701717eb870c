"""The interface that every implementation of the gated delta rule has, on one device.

Nothing here depends on a mesh or a layout. An implementation can also compute what other devices
need of a run of tokens: the affine map of the state, and the gradient of the first state alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.linear.chunks import Tokens


class Inputs(NamedTuple):
    """The arrays, with zeros in padding.

    Attributes:
      q: ``[B, T, K, H]``.
      k: the same; rows have norm 1.
      v: ``[B, T, N, Hv]``; N is a multiple of K.
      log_decay: ``[B, T, N]``, at most 0; or one per key channel, ``[B, T, N, H]``.
      beta: ``[B, T, N]``, between 0 and 2.
      tokens: documents and padding; None without them.
    """

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    tokens: Tokens | None = None


class Gradients(NamedTuple):
    """Gradients of the inputs and of the first state; those of log_decay and beta in float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    start: jax.Array


def _anywhere(platform: str, compute_capability: float | None) -> None:
    """For implementations that run on every platform."""
    del platform, compute_capability


def _all_inputs(inputs: Inputs) -> None:
    """For implementations that support all shapes and dtypes."""
    del inputs


def _whole(inputs: Inputs, has_maps: bool) -> int:
    """For implementations that gain nothing from sequences in parts."""
    del inputs, has_maps
    return 1


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation. Hashable, so that it can be part of a jit cache key.

    States are ``[B, N, H, Hv]`` float32. ``prepared`` is what the passes share that does not depend
    on a state, in a form of the implementation's own.

    Attributes:
      name: the public name.
      prepare: ``inputs -> prepared``.
      forward: ``(inputs, prepared, start, scale) -> (o, last, kept)``: the output
        ``[B, T, N, Hv]``, zeros in padding, the state after the last token, and what is saved for
        the backward pass; ``start`` is the state before the first token.
      mapped: ``(inputs, start) -> (prepared, rows)``, where a state arrives later: what prepare
        returns, and float32 ``[B, N, Hv + H, H]``, the rows of ``last`` and below them those of M,
        both transposed. With the state ``start + S`` before the first token, that after the last
        one is ``M S + last``.
      restore: ``(inputs, kept) -> prepared``, for the next two.
      first_gradient: ``(inputs, prepared, do, last, scale)``: the gradient of ``start``, given
        those of o and of the last state. The first of them is zero in padding.
      backward: ``(inputs, prepared, start, do, last, scale)``: all :class:`Gradients`.
      multiple: lengths must be multiples of it.
      parts: ``(inputs, has_maps) -> parts``: in how many parts of equal length each sequence is
        scanned faster, with a map of each. ``has_maps``: whether a sequence needs its map anyway,
        as devices exchange them.
      compose: ``(rows, order, wanted, start) -> states``, what arrives at runs from the maps of
        all of them (:func:`pallas_kernels.linear.sm90.composition.composed`); None
        without such a kernel.
      meanwhile: a field of ``prepared`` that is computed while maps are sent, if it has an array;
        None without such a field.
      unsupported: ``inputs -> reason``: why it does not support these shapes and dtypes, or None
        if it does.
      unavailable: ``(platform, compute_capability) -> reason``: why it cannot run there, or None.
    """

    name: str
    prepare: Callable[[Inputs], Any]
    forward: Callable[..., tuple[jax.Array, jax.Array, Any]]
    mapped: Callable[..., tuple[Any, jax.Array]]
    restore: Callable[[Inputs, Any], Any]
    first_gradient: Callable[..., jax.Array]
    backward: Callable[..., Gradients]
    multiple: int = 1
    parts: Callable[[Inputs, bool], int] = _whole
    compose: Callable[..., jax.Array] | None = None
    meanwhile: str | None = None
    unsupported: Callable[[Inputs], str | None] = _all_inputs
    unavailable: Callable[[str, float | None], str | None] = _anywhere
