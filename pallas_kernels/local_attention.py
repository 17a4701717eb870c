"""The one interface of local attention, its implementations, and the choice among them.

Letters: B batch, T query length, S key length, N query heads, K key/value heads, H head dim.
Lengths are one device's. There is no mesh here, no ring and no layout: tokens have positions.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax

from pallas_kernels import (
    mosaic_backward,
    mosaic_configs,
    mosaic_forward,
    mosaic_operands,
    reference,
    triton_dkv,
    triton_dq,
    triton_forward,
    xla,
)
from pallas_kernels.arrays import Pair, half_dtype, half_shape
from pallas_kernels.bounds import halves_of_tiles, key_bounds, query_bounds
from pallas_kernels.mosaic_configs import MosaicConfig
from pallas_kernels.spec import AttentionSpec, Tokens
from pallas_kernels.triton_configs import TritonConfig, TritonConfigs, triton_configs

Carry = tuple[jax.Array, jax.Array]


class Forward(Protocol):
    """``o = softmax(mask(scale q k^T)) v`` over the given keys, merged into ``carry``.

    Args:
      q: ``[B, T, N, H]``.
      kv: K and V ``[B, S, K, H]`` as a tuple, or packed ``[2, B, S, K, H]``. Query head h uses
        key/value head ``h // (N // K)``.
      q_tokens: positions and segment ids of the queries.
      kv_tokens: positions and segment ids of the keys.
      bounds: what :meth:`Implementation.forward_bounds` gave for these tokens.
      carry: float32 ``(o [B, T, N, H], lse [B, N, T])`` over other keys, or None to start fresh.
      spec: scale, window, soft cap.
      out_dtype: o's dtype, for the last call, whose o is no carry any more; None is the carry's.

    Returns:
      ``(o, lse)`` over the carry's keys and these: o normalised, lse float32, the natural log of
      the softmax's denominator. A row that sees no key has o = 0 and lse = -inf.
    """

    def __call__(
        self,
        q: jax.Array,
        kv: Pair,
        q_tokens: Tokens,
        kv_tokens: Tokens,
        bounds: Any,
        carry: Carry | None = None,
        *,
        spec: AttentionSpec,
        out_dtype: Any = None,
    ) -> Carry:
        """Runs it."""
        ...


class Backward(Protocol):
    """Gradients from these keys, added into ``dq`` and ``dkv``.

    With ``p = exp(logits - lse)`` (the global lse: over all keys, not only these) and
    ``ds = p * (dO v^T - delta)``: ``dQ += scale ds k``, ``dK += scale ds^T q``, ``dV += p^T dO``,
    K's and V's summed over the query heads that share them.

    Args:
      qdo: q and dO ``[B, T, N, H]`` as a tuple, or packed ``[2, B, T, N, H]``.
      kv: as in :class:`Forward`.
      stats: float32 lse and delta ``[B, N, T]`` as a tuple, or packed ``[2, B, N, T]``; delta is
        ``rowsum(dO * O) - dlse``.
      q_tokens: positions and segment ids of the queries.
      kv_tokens: positions and segment ids of the keys.
      bounds: what :meth:`Implementation.backward_bounds` gave for these tokens.
      dq: float32 ``[B, T, N, H]`` to add into, or None to start from zero.
      dkv: float32 ``[2, B, S, K, H]`` to add into, or None to start from zero.
      spec: scale, window, soft cap.

    Returns:
      ``(dq, dkv)``, float32.
    """

    def __call__(
        self,
        qdo: Pair,
        kv: Pair,
        stats: Pair,
        q_tokens: Tokens,
        kv_tokens: Tokens,
        bounds: Any,
        dq: jax.Array | None = None,
        dkv: jax.Array | None = None,
        *,
        spec: AttentionSpec,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs it."""
        ...


def _runs_anywhere(platform: str, compute_capability: float | None) -> None:
    del platform, compute_capability


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute local attention. Frozen and hashable: part of a jit cache's key.

    Attributes:
      name: what users call it.
      forward: see :class:`Forward`.
      backward: see :class:`Backward`; None if it has none.
      backward_dq: ``(..., dq, *, spec) -> dq``, the half of ``backward`` that makes dQ, where dQ
        and dK, dV come from different kernels: a ring then moves one gradient while the kernel of
        the other one runs. None if they come from one.
      backward_dkv: ``(..., dkv, *, spec) -> dkv``, the other half.
      forward_bounds: ``(spec, q, kv, q_tokens, kv_tokens) -> bounds`` for ``forward``'s own tiles.
      backward_bounds: the same for ``backward``.
      split_backward: ``bounds -> (one, other)``, which cut ``backward``'s work in two calls, whose
        gradients add up: a ring keeps one for the travelling gradient's last hop. None if it
        cannot be cut.
      unsupported: ``(q, kv) -> reason`` why it cannot take such arrays, or None if it can.
      backward_unsupported: the same for its backward pass alone; None is as ``unsupported``.
      unavailable: ``(platform, compute_capability) -> reason`` why it cannot run there, or None.
      checks_vma: whether it can be traced inside ``shard_map(check_vma=True)``.
      second_derivatives: "any" if JAX can differentiate ``forward`` and ``backward`` themselves,
        "forward" if in forward mode only (loops over as many tiles as the bounds say), "none" if
        not at all (kernels).
    """

    name: str
    forward: Forward
    backward: Backward | None
    forward_bounds: Callable[..., Any]
    backward_bounds: Callable[..., Any]
    unsupported: Callable[[Any, Any], str | None]
    unavailable: Callable[[str, float | None], str | None] = _runs_anywhere
    backward_dq: Callable[..., jax.Array] | None = None
    backward_dkv: Callable[..., jax.Array] | None = None
    split_backward: Callable[[Any], tuple[Any, Any]] | None = None
    backward_unsupported: Callable[[Any, Any], str | None] | None = None
    checks_vma: bool = True
    second_derivatives: Literal["any", "forward", "none"] = "none"


# --- reference -----------------------------------------------------------------------------------


def _no_bounds(*_: Any) -> None:
    return None


def _takes_anything(*_: Any) -> None:
    return None


REFERENCE = Implementation(
    name="reference",
    forward=reference.forward,
    backward=reference.backward,
    forward_bounds=_no_bounds,
    backward_bounds=_no_bounds,
    unsupported=_takes_anything,
    second_derivatives="any",
)


# --- xla -----------------------------------------------------------------------------------------


def _xla_forward(q, kv, q_tokens, kv_tokens, bounds, carry=None, *, spec, out_dtype=None):
    tiles = xla.tiles(q.shape[1], half_shape(kv)[1])
    return xla.forward(
        q, kv, q_tokens, kv_tokens, bounds, carry, spec=spec, tiles=tiles, out_dtype=out_dtype
    )


def _xla_backward(qdo, kv, stats, q_tokens, kv_tokens, bounds, dq=None, dkv=None, *, spec):
    tiles = xla.tiles(half_shape(qdo)[1], half_shape(kv)[1])
    return xla.backward(
        qdo, kv, stats, q_tokens, kv_tokens, bounds, dq, dkv, spec=spec, tiles=tiles
    )


def _xla_bounds(spec, q, kv, q_tokens, kv_tokens):
    del q, kv
    tiles = xla.tiles(q_tokens.positions.shape[0], kv_tokens.positions.shape[0])
    return query_bounds(spec, q_tokens, kv_tokens, tiles)


XLA = Implementation(
    name="xla",
    forward=_xla_forward,
    backward=_xla_backward,
    forward_bounds=_xla_bounds,
    backward_bounds=_xla_bounds,
    split_backward=halves_of_tiles,
    unsupported=_takes_anything,
    second_derivatives="forward",
)


# --- triton --------------------------------------------------------------------------------------


def triton(
    interpret: bool = False,
    config: TritonConfig | None = None,
    compute_capability: float | None = None,
) -> Implementation:
    """The Pallas Triton kernels.

    Args:
      interpret: run them on any platform, slowly.
      config: tiles for all kernels; None is each kernel's own from the table.
      compute_capability: whose table, 8.0 for A100, 9.0 for H100; None is one that fits any GPU.
    """

    def configs(spec, q, kv, q_tokens):
        if config is not None:
            return TritonConfigs(config, config, config)
        q_length, kv_length = half_shape(q)[1], half_shape(kv)[1]
        dim, dtype = half_shape(q)[-1], half_dtype(q)
        packed = q_tokens.segment_ids is not None
        return triton_configs(compute_capability, dim, dtype, q_length, kv_length, spec, packed)

    def forward(q, kv, q_tokens, kv_tokens, bounds, carry=None, *, spec, out_dtype=None):
        return triton_forward.forward(
            q, kv, q_tokens, kv_tokens, bounds, carry, spec=spec, out_dtype=out_dtype,
            config=configs(spec, (q, q), kv, q_tokens).forward, interpret=interpret,
        )  # fmt: skip

    def forward_bounds(spec, q, kv, q_tokens, kv_tokens):
        tiles = configs(spec, (q, q), kv, q_tokens).forward.tiles
        return query_bounds(spec, q_tokens, kv_tokens, tiles)

    def backward_dq(qdo, kv, stats, q_tokens, kv_tokens, bounds, dq=None, *, spec):
        return triton_dq.backward_dq(
            qdo, kv, stats, q_tokens, kv_tokens, bounds[0], dq, spec=spec,
            config=configs(spec, qdo, kv, q_tokens).dq, interpret=interpret,
        )  # fmt: skip

    def backward_dkv(qdo, kv, stats, q_tokens, kv_tokens, bounds, dkv=None, *, spec):
        return triton_dkv.backward_dkv(
            qdo, kv, stats, q_tokens, kv_tokens, bounds[1], dkv, spec=spec,
            config=configs(spec, qdo, kv, q_tokens).dkv, interpret=interpret,
        )  # fmt: skip

    def backward(qdo, kv, stats, q_tokens, kv_tokens, bounds, dq=None, dkv=None, *, spec):
        arrays = (qdo, kv, stats, q_tokens, kv_tokens, bounds)
        return backward_dq(*arrays, dq, spec=spec), backward_dkv(*arrays, dkv, spec=spec)

    def backward_bounds(spec, q, kv, q_tokens, kv_tokens):
        chosen = configs(spec, (q, q), kv, q_tokens)
        return (
            query_bounds(spec, q_tokens, kv_tokens, chosen.dq.tiles),
            key_bounds(spec, q_tokens, kv_tokens, chosen.dkv.tiles),
        )

    return Implementation(
        name="triton",
        forward=forward,
        backward=backward,
        backward_dq=backward_dq,
        backward_dkv=backward_dkv,
        forward_bounds=forward_bounds,
        backward_bounds=backward_bounds,
        split_backward=halves_of_tiles,
        unsupported=triton_forward.unsupported,
        unavailable=_runs_anywhere if interpret else _needs_ampere,
        checks_vma=not interpret,
    )


def _needs_ampere(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability is None:
        return f"it needs an NVIDIA GPU, the arrays are on {platform!r}; use None or 'xla'"
    if compute_capability < 8.0:
        return (
            f"it needs compute capability 8.0 (Ampere) or newer, this GPU has "
            f"{compute_capability}; use None or 'xla'"
        )
    return None


TRITON = triton()
_tuned_triton = functools.lru_cache(lambda capability: triton(compute_capability=capability))


# --- mosaic_gpu ----------------------------------------------------------------------------------


def mosaic_gpu(
    forward_config: MosaicConfig | None = None, backward_config: MosaicConfig | None = None
) -> Implementation:
    """The Pallas Mosaic GPU kernels, for Hopper: dQ, dK and dV from one pass.

    Args:
      forward_config: tiles of the forward kernel; None is the table's.
      backward_config: tiles of the backward kernel; None is the table's.
    """

    def for_forward(q, spec):
        soft_cap = spec.logits_soft_cap is not None
        return forward_config or mosaic_configs.forward_config(q.shape[-1], soft_cap)

    def for_backward(dim):
        return backward_config or mosaic_configs.backward_config(dim)

    def forward(q, kv, q_tokens, kv_tokens, bounds, carry=None, *, spec, out_dtype=None):
        return mosaic_forward.forward(
            q, kv, q_tokens, kv_tokens, bounds, carry, spec=spec, out_dtype=out_dtype,
            config=for_forward(q, spec),
        )  # fmt: skip

    def forward_bounds(spec, q, kv, q_tokens, kv_tokens):
        del kv
        return query_bounds(spec, q_tokens, kv_tokens, for_forward(q, spec).tiles)

    def backward(qdo, kv, stats, q_tokens, kv_tokens, bounds, dq=None, dkv=None, *, spec):
        return mosaic_backward.backward(
            qdo, kv, stats, q_tokens, kv_tokens, bounds, dq, dkv, spec=spec,
            config=for_backward(half_shape(qdo)[-1]),
        )  # fmt: skip

    def backward_bounds(spec, q, kv, q_tokens, kv_tokens):
        del kv
        return key_bounds(spec, q_tokens, kv_tokens, for_backward(q.shape[-1]).tiles)

    return Implementation(
        name="mosaic_gpu",
        forward=forward,
        backward=backward,
        forward_bounds=forward_bounds,
        backward_bounds=backward_bounds,
        split_backward=halves_of_tiles,
        unsupported=mosaic_operands.forward_unsupported,
        backward_unsupported=mosaic_operands.backward_unsupported,
        unavailable=_needs_hopper,
    )


def _needs_hopper(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability != 9.0:
        has = "" if compute_capability is None else f" of compute capability {compute_capability}"
        return (
            "it needs compute capability 9.0 (Hopper), the arrays are on "
            f"{platform!r}{has}; use None, 'triton' or 'xla'"
        )
    return None


MOSAIC_GPU = mosaic_gpu()


# --- the choice ----------------------------------------------------------------------------------

# What None tries, fastest first; the last takes everything.
_CANDIDATES = (MOSAIC_GPU, TRITON, XLA)

# From 0.12.0.1 on JAX assembles Mosaic kernels with the nvJitLink library. It compiles them to be
# linked, and gives every warpgroup of a linked kernel as many registers as every other. Those that
# compute then spill, and the Triton kernels are faster. By name the Mosaic kernels still run.
LINKED_SINCE = (0, 12)


class SlowerKernelsWarning(UserWarning):
    """``implementation=None`` passes Hopper's own kernels over on a GPU that could run them."""


# "reference" is for tests: chosen by name, never offered.
_BY_NAME = {"mosaic_gpu": MOSAIC_GPU, "triton": TRITON, "xla": XLA, "reference": REFERENCE}
NAMES = ("mosaic_gpu", "triton", "xla")


def find(implementation: str | Implementation | None) -> Implementation | None:
    """What a user named; None if the choice is left to the library.

    Raises:
      ValueError: there is no such implementation.
    """
    if implementation is None or isinstance(implementation, Implementation):
        return implementation
    if not isinstance(implementation, str) or implementation not in _BY_NAME:
        raise ValueError(
            f"implementation is {implementation!r}: use None, an Implementation, or one of "
            f"{', '.join(map(repr, NAMES))}"
        )
    return _BY_NAME[implementation]


def resolve(
    implementation: str | Implementation | None,
    *,
    platform: str,
    compute_capability: float | None,
    q: Any,
    kv: Pair,
    backward: bool = False,
) -> Implementation:
    """The implementation to run: the named one, or for None the fastest that can.

    Decided before anything is traced for the device: kernels of a newer GPU abort when they are
    lowered for an older one. Where None passes Hopper's own kernels over although they could run, a
    :class:`SlowerKernelsWarning` says why, and what to do about it.

    Args:
      implementation: a name, an :class:`Implementation`, or None.
      platform: "gpu", "cpu", ...
      compute_capability: 8.0 for A100, 9.0 for H100; None if it is not known or not a GPU.
      q: anything with q's shape and dtype.
      kv: a pair of anything with k's.
      backward: choose for the gradient.

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: the named one cannot run here, or not on these arrays.
    """
    chosen = find(implementation)
    if chosen is None:
        reasons = [
            _reason_against(candidate, platform, compute_capability, q, kv, backward)
            for candidate in _CANDIDATES
        ]
        chosen = _CANDIDATES[reasons.index(None)]
        if _obstacle(MOSAIC_GPU, platform, compute_capability, q, kv, backward) is None and (
            chosen is not MOSAIC_GPU
        ):
            warnings.warn(
                f"implementation=None takes {chosen.name!r} here, and not this GPU's own, faster "
                f"kernels, 'mosaic_gpu': {reasons[0]}; implementation={chosen.name!r} takes the "
                "slower ones without this warning",
                SlowerKernelsWarning,
                stacklevel=2,
            )
    obstacle = _obstacle(chosen, platform, compute_capability, q, kv, backward)
    if obstacle is not None:
        raise NotImplementedError(f"implementation {chosen.name!r} cannot run: {obstacle}")
    return _tuned_triton(compute_capability) if chosen is TRITON else chosen


def _obstacle(candidate, platform, compute_capability, q, kv, backward) -> str | None:
    unavailable = candidate.unavailable(platform, compute_capability)
    if unavailable is not None:
        return unavailable
    if backward and candidate.backward is None:
        return "it has no backward pass; use None or 'xla' where gradients are taken"
    if backward and candidate.backward_unsupported is not None:
        return candidate.backward_unsupported(q, kv)
    return candidate.unsupported(q, kv)


def _reason_against(candidate, platform, compute_capability, q, kv, backward) -> str | None:
    """Why None should not take a candidate, or None: it cannot run, or another one is faster."""
    obstacle = _obstacle(candidate, platform, compute_capability, q, kv, backward)
    if obstacle is None and candidate is MOSAIC_GPU and jax.__version_info__ >= LINKED_SINCE:
        return (
            f"JAX {jax.__version__} compiles them so that they spill registers; install JAX 0.11.2 "
            "(pip install 'burst-jax[cuda13]' does)"
        )
    return obstacle
