"""The interface that every implementation of local attention has.

Letters: B batch, T query length, S key length, N query heads, K key/value heads, H head dim of
queries and keys, Hv head dim of values, which may differ from H. Lengths are one device's. Nothing
here depends on a mesh, a ring or a layout: tokens have positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
from jax.typing import DTypeLike

from pallas_kernels.arrays import gradient_dtype
from pallas_kernels.inputs import AttentionInputs, Carry, PerHead
from pallas_kernels.spec import AttentionSpec

Dkv = tuple[jax.Array, jax.Array]


class HalfDkv(NamedTuple):
    """dK and dV of which the second half of the KV tiles is not set yet.

    An implementation that returns it for one part of the work stores there, instead of adding, when
    it is given it for another.
    """

    dk: jax.Array
    dv: jax.Array


class ForwardFunction(Protocol):
    """``o = softmax(mask(logits)) v`` over the given keys, merged into ``carry``.

    Args:
      inputs: the query side, the KV side, and what both share.
      bounds: tile bounds, from ``forward_bounds`` of the same inputs.
      carry: ``(o [B, T, N, Hv], lse [B, N, T])`` over other keys, or None to start fresh: o in
        float32 or in ``out_dtype``, lse in float32.
        Sink logits are applied only without a carry, which already includes them.
      spec: the mask and the score.
      out_dtype: o's dtype; None is float32.

    Returns:
      ``(o, lse)`` over the carry's keys and these: o normalized, lse float32, the natural log of
      the softmax's denominator. A query that attends to no key has o = 0, and lse = -inf or its
      head's sink.
    """

    def __call__(
        self,
        inputs: AttentionInputs,
        bounds: Any,
        carry: Carry | None = None,
        *,
        spec: AttentionSpec,
        out_dtype: DTypeLike | None = None,
    ) -> Carry:
        """Runs it."""
        ...


class BackwardFunction(Protocol):
    """Gradients from these keys, accumulated in ``dq`` and ``dkv``.

    With ``p = exp(logits - lse)`` (the global lse: over all keys, not only these) and
    ``ds = p * (dO v^T - delta)``: ``dQ += scale ds k``, ``dK += scale ds^T q``, ``dV += p^T dO``,
    those of K and V summed over the query heads that share them.

    Args:
      inputs: as for the forward pass, with ``do`` and ``stats``.
      bounds: tile bounds, from ``backward_bounds`` of the same inputs.
      dq: float32 ``[B, T, N, H]`` to add to, or None to start from zero.
      dkv: dK ``[B, S, K, H]`` and dV ``[B, S, K, Hv]``, float32, to add to, or None to start from
        zero.
      spec: the mask and the score.
      out_dtype: dtype to which the caller will cast ``dq``, ``dk`` and ``dv`` without adding to
        them first; None is float32.

    Returns:
      ``(dq, (dk, dv), per_head)``, float32, or ``out_dtype`` where a kernel rounds as it writes,
      which moves fewer bytes than a later cast. ``per_head`` holds this call's contributions to the
      gradients of the per-head parameters that ``spec.score.differentiated`` names.
    """

    def __call__(
        self,
        inputs: AttentionInputs,
        bounds: Any,
        dq: jax.Array | None = None,
        dkv: Dkv | None = None,
        *,
        spec: AttentionSpec,
        out_dtype: DTypeLike | None = None,
    ) -> tuple[jax.Array, Dkv, PerHead]:
        """Runs it."""
        ...


@dataclasses.dataclass(frozen=True)
class DqAccumulator:
    """How an implementation accumulates dQ over several calls, in a form of its own.

    A ring makes an accumulator once, adds to it in place at every step, and converts it once::

        accumulator = zeros(inputs, bounds, spec=spec)
        for inputs, bounds in steps:
            accumulator, dkv, per_head = add(inputs, bounds, accumulator, dkv, spec=spec)
        dq = finish(accumulator, inputs, spec=spec)

    Attributes:
      zeros: ``(inputs, bounds, *, spec, maximum) -> accumulator``, a pytree. ``maximum`` maps an
        array to its elementwise maximum over all calls that will add to the accumulator, which
        have other keys; the default is the identity, for one call.
      add: like a :class:`BackwardFunction`, with the accumulator as ``dq``.
      finish: ``(accumulator, inputs, *, spec) -> dq``, float32 ``[B, T, N, H]``.
      is_additive: whether the elementwise sum of two accumulators of the same queries is that of
        their sum. If so, a ring may send partial sums from device to device.
    """

    zeros: Callable[..., Any]
    add: Callable[..., tuple[Any, Dkv, PerHead]]
    finish: Callable[..., jax.Array]
    is_additive: bool = True

    def backward(
        self,
        inputs: AttentionInputs,
        bounds: Any,
        dq: jax.Array | None = None,
        dkv: Dkv | None = None,
        *,
        spec: AttentionSpec,
        out_dtype: DTypeLike | None = None,
    ) -> tuple[jax.Array, Dkv, PerHead]:
        """A :class:`BackwardFunction` that accumulates this call alone, and adds it to ``dq``."""
        accumulator: Any = self.zeros(inputs, bounds, spec=spec)
        accumulator, dkv, per_head = self.add(
            inputs, bounds, accumulator, dkv, spec=spec, out_dtype=out_dtype
        )
        made = self.finish(accumulator, inputs, spec=spec)
        if dq is not None:
            made = dq + made
        return made.astype(gradient_dtype(dq, out_dtype)), dkv, per_head


def runs_anywhere(platform: str, compute_capability: float | None) -> None:
    """``Implementation.unavailable`` for implementations that run on every platform."""
    del platform, compute_capability


def needs_gpu(what: str, platform: str, compute_capability: float | None) -> str:
    """Why an implementation that needs ``what``, a compute capability, cannot run elsewhere."""
    has = "" if compute_capability is None else f" of compute capability {compute_capability}"
    return f"it needs {what}, the arrays are on {platform!r}{has}"


def supports_all_inputs(inputs: AttentionInputs) -> None:
    """``Implementation.unsupported`` for implementations that support all shapes and dtypes."""
    del inputs


def supports_all_functions(spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool) -> None:
    """``Implementation.unsupported_functions`` for implementations that run any user function."""
    del spec, inputs, backward


def needs_zeros(spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool) -> bool:
    """``Implementation.zeroes_padding`` for implementations that do not."""
    del spec, inputs, backward
    return False


def no_bounds(inputs: AttentionInputs, *, spec: AttentionSpec) -> None:
    """``Implementation.forward_bounds`` for implementations that visit every tile."""
    del inputs, spec


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of local attention. Hashable, so that it can be part of a jit cache key.

    Attributes:
      name: the public name.
      forward: see :class:`ForwardFunction`.
      backward: see :class:`BackwardFunction`; None if it has none.
      forward_bounds: ``(inputs, *, spec) -> bounds`` for ``forward``'s own tiles: a pytree of
        tables, which depend on positions and segment ids, not on layers.
      backward_bounds: the same for ``backward``.
      split_backward: ``(bounds, inputs, *, spec) -> (one, other)``, the bounds of two calls whose
        gradients add up to those of one call with ``bounds``. A ring defers one of the calls to
        overlap the rotating gradient's final send. None if the work cannot be split.
      dq_accumulator: how ``backward`` accumulates dQ, if not in an array like dQ itself.
      unsupported: ``inputs -> reason``: why it does not support these shapes and dtypes, or None
        if it does. Values are not read, so the leaves may be ``jax.ShapeDtypeStruct``.
      backward_unsupported: the same for the backward pass; None uses ``unsupported`` for both.
      unsupported_functions: ``(spec, inputs, *, backward) -> reason``: why it cannot run the spec's
        ``score_mod`` or ``mask_mod``, or None if it can.
      unavailable: ``(platform, compute_capability) -> reason``: why it cannot run there, or None if
        it can.
      deterministic: whether ``backward`` is bitwise reproducible; False if CTAs accumulate with
        atomics in varying order. (``forward`` must be bitwise reproducible.)
      deterministic_variant: what to use instead where gradients must be bitwise reproducible; None
        if there is nothing else.
      zeroes_padding: ``(spec, inputs, *, backward) -> bool``: whether the pass replaces what
        queries, keys, values and dO hold in padding, segment 0, by zeros. Otherwise its caller
        must: masks give padding the weight 0, but 0 times infinity or NaN is NaN.
      checks_vma: whether it can be traced inside ``shard_map(check_vma=True)``.
      second_derivatives: how JAX can differentiate ``forward`` and ``backward`` themselves: "any"
        is in both modes, "forward" in forward mode only (bounds determine the lengths of their
        loops), "none" not at all (they are kernels).
    """

    name: str
    forward: ForwardFunction
    backward: BackwardFunction | None
    forward_bounds: Callable[..., Any]
    backward_bounds: Callable[..., Any]
    unsupported: Callable[[AttentionInputs], str | None]
    unsupported_functions: Callable[..., str | None] = supports_all_functions
    unavailable: Callable[[str, float | None], str | None] = runs_anywhere
    split_backward: Callable[..., tuple[Any, Any]] | None = None
    dq_accumulator: DqAccumulator | None = None
    backward_unsupported: Callable[[AttentionInputs], str | None] | None = None
    deterministic: bool = True
    deterministic_variant: Implementation | None = None
    zeroes_padding: Callable[..., bool] = needs_zeros
    checks_vma: bool = True
    second_derivatives: Literal["any", "forward", "none"] = "none"
