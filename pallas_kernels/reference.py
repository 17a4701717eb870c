"""Reference implementation of local attention: dense, in float32 or float64, with O(T S) memory.

It has the same arguments and results as the fast implementations, which are tested against it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.arrays import rounded
from pallas_kernels.backend import Dkv, Implementation, no_bounds, supports_all_inputs
from pallas_kernels.dropout import column_hashes
from pallas_kernels.elementwise import ScoreCoordinates
from pallas_kernels.inputs import AttentionInputs, Carry, PerHead
from pallas_kernels.mask import both
from pallas_kernels.merge import merge
from pallas_kernels.spec import AttentionSpec


def forward(
    inputs: AttentionInputs,
    bounds: None,
    carry: Carry | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
) -> Carry:
    """See :class:`pallas_kernels.backend.ForwardFunction`; ``bounds`` is None."""
    del bounds
    scores = _Scores(inputs, spec)
    logits = scores.masked_logits()
    m = logits.max(-1, keepdims=True)
    sink = inputs.shared.sink_logits if carry is None else None
    if sink is not None:
        sink = scores.of_heads(sink)
        m = jnp.maximum(m, sink)
    p = jnp.exp(logits - jnp.where(m == -jnp.inf, 0, m))
    total = p.sum(-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - jnp.where(m == -jnp.inf, 0, m))
    p = p / jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, m + jnp.log(jnp.where(total == 0, 1, total)))
    p = scores.dropped(p)
    o = _einsum("bkgts,bskh->btkgh", p, _wide(inputs.kv.v)).reshape(inputs.out_shape)
    batch, length, heads, _ = inputs.query.q.shape
    lse = lse.reshape(batch, heads, length)
    if carry is not None:
        old = carry[0].astype(o.dtype), carry[1].swapaxes(1, 2)
        o, lse_rows = merge(*old, o, lse.swapaxes(1, 2))
        lse = lse_rows.swapaxes(1, 2)
    return o if out_dtype is None else o.astype(out_dtype), lse


def backward(
    inputs: AttentionInputs,
    bounds: None,
    dq: jax.Array | None = None,
    dkv: Dkv | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, Dkv, PerHead]:
    """See :class:`pallas_kernels.backend.BackwardFunction`; ``bounds`` is None."""
    del bounds, out_dtype
    scores = _Scores(inputs, spec)
    do, stats = inputs.cotangents()
    q, k, v, do = (_wide(x) for x in (inputs.query.q, inputs.kv.k, inputs.kv.v, do))
    logits = scores.masked_logits()
    lse, delta = (scores.by_group(x)[..., None] for x in stats)
    p = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse))
    q, do = scores.grouped(q), scores.grouped(do)
    dv = _einsum("bkgts,btkgh->bskh", scores.dropped(p), do)
    dp = scores.dropped(_einsum("btkgh,bskh->bkgts", do, v))
    ds = jnp.where(p == 0, 0, p * (dp - delta))
    per_head = {
        name: x.sum((0, 3, 4)).reshape(-1)
        for name, x in spec.score.per_head_gradients(ds, *scores.positions).items()
    }
    ds = spec.score.to_products(scores.raw, p, ds, scores.coordinates) * spec.score.scale
    new_dq = _einsum("bkgts,bskh->btkgh", ds, k).reshape(inputs.query.q.shape)
    dk = _einsum("bkgts,btkgh->bskh", ds, q)
    if dkv is not None:
        dk, dv = dkv[0] + dk, dkv[1] + dv
    return new_dq if dq is None else dq + new_dq, (dk, dv), per_head


class _Scores:
    """All scores at once, ``[B, K, G, T, S]``."""

    def __init__(self, inputs: AttentionInputs, spec: AttentionSpec):
        self._inputs, self._spec = inputs, spec
        q, k = self.grouped(_wide(inputs.query.q)), _wide(inputs.kv.k)
        self.raw = spec.score.raw(_einsum("btkgh,bskh->bkgts", q, k))
        self.positions = (
            inputs.q_positions[None, None, None, :, None],
            inputs.kv_positions[None, None, None, None, :],
        )

    @property
    def coordinates(self) -> ScoreCoordinates | None:
        """Coordinates of the scores; None without user functions."""
        return self._inputs.coordinates(*self.positions)

    def of_heads(self, per_head: jax.Array) -> jax.Array:
        """``[N]`` to ``[1, K, G, 1, 1]``, which broadcasts against all scores."""
        return per_head.reshape(1, -1, self._inputs.groups, 1, 1)

    def grouped(self, x: jax.Array) -> jax.Array:
        """``[B, T, N, H]`` to ``[B, T, K, G, H]``."""
        return x.reshape(*x.shape[:2], -1, self._inputs.groups, x.shape[-1])

    def by_group(self, x: jax.Array) -> jax.Array:
        """``[B, N, T]`` to ``[B, K, G, T]``."""
        return x.reshape(x.shape[0], -1, self._inputs.groups, x.shape[-1])

    def dropped(self, x: jax.Array) -> jax.Array:
        """Dropout of ``x``, which has a value per score."""
        dropout = self._spec.dropout
        if dropout is None:
            return x
        rows = self.by_group(self._inputs.dropout_rows)[..., None]
        kept = dropout.kept(rows, column_hashes(self.positions[1]))
        return jnp.where(kept, x * dropout.unit, 0)

    def masked_logits(self) -> jax.Array:
        """Logits, -inf where masked."""
        query, kv, shared = self._inputs
        q_ids, kv_ids = query.segment_ids, kv.segment_ids
        mask = self._spec.mask.allowed(
            self._inputs.q_positions[:, None],
            self._inputs.kv_positions[None, :],
            None if q_ids is None else q_ids[:, None, None, :, None],
            None if kv_ids is None else kv_ids[:, None, None, None, :],
            **{name: x[:, None, None, :, None] for name, x in query.kv_bounds.items()},
            coordinates=self.coordinates,
        )
        blocks = shared.block_mask
        if blocks is not None:
            at = self._inputs.q_positions, self._inputs.kv_positions
            by_blocks = blocks.allowed(*at, self._inputs.groups)
            mask = by_blocks if mask is None else both(mask, by_blocks)
        logits = self._spec.score.modified(self.raw, self.coordinates)
        per_head = {name: self.of_heads(x) for name, x in shared.score_parameters.items()}
        bias = self._spec.score.bias(*self.positions, per_head)
        logits = rounded(logits if bias is None else logits + bias)
        return logits if mask is None else jnp.where(mask, logits, -jnp.inf)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def _einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)


REFERENCE = Implementation(
    name="reference",
    forward=forward,
    backward=backward,
    forward_bounds=no_bounds,
    backward_bounds=no_bounds,
    unsupported=supports_all_inputs,
    second_derivatives="any",
)
