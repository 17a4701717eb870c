"""Attention and its gradients in float64, the reference of the benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import AttentionSpec

# Queries per block.
_ROWS = 1024


def attention_and_gradients(
    spec: AttentionSpec,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    per_head: Mapping[str, jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """Attention of one key head and the query heads that share it; memory grows linearly with T.

    T length, G query heads per key head, H head dim. Arrays of any floating dtype are converted to
    float64.

    Args:
      spec: scale and mask.
      positions: int32 ``[T]``, of queries and keys.
      segment_ids: int32 ``[1, T]``, of queries and keys, or None.
      q: ``[T, G, H]``.
      k: ``[T, H]``.
      v: ``[T, H]``.
      do: the cotangent of out, ``[T, G, H]``.
      per_head: "sink_logits" and "alibi_slopes" of the query heads, ``[G]`` each, or None.

    Returns:
      float64 arrays by name: "out" and "dq" ``[T, G, H]``, "dk" and "dv" ``[T, H]``.
    """
    with jax.enable_x64(True):
        wide = (x.astype(jnp.float64) for x in (q, k, v, do))
        numbers = {name: x.astype(jnp.float64) for name, x in (per_head or {}).items()}
        return _blocks(spec, positions, segment_ids, *wide, numbers)


@functools.partial(jax.jit, static_argnums=0)
def _blocks(spec, positions, segment_ids, q, k, v, do, per_head):
    length, groups, dim = q.shape
    rows = min(_ROWS, length)
    if length % rows:
        raise ValueError(f"the length is {length}: it must be a multiple of {rows}")
    seg = None if segment_ids is None else segment_ids[0]

    def block(sums, start):
        """One block of queries: accumulates dk and dv, returns out and dq."""
        dk, dv = sums
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=rows)
        q_rows, do_rows = (cut(x).reshape(rows * groups, dim) for x in (q, do))
        q_pos = jnp.repeat(cut(positions), groups)[:, None]
        q_seg = None if seg is None else jnp.repeat(cut(seg), groups)[:, None]
        k_seg = None if seg is None else seg[None]
        numbers = {name: jnp.tile(x, rows)[:, None] for name, x in per_head.items()}
        logits = spec.score.scale * (q_rows @ k.T)
        bias = spec.score.bias(q_pos, positions[None], numbers)
        logits = logits if bias is None else logits + bias
        ok = spec.mask.allowed(q_pos, positions[None], q_seg, k_seg)
        logits = logits if ok is None else jnp.where(ok, logits, -jnp.inf)
        p = jax.nn.softmax(logits, axis=-1, where=ok)
        if "sink_logits" in numbers:
            lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            p *= jax.nn.sigmoid(lse - numbers["sink_logits"])
        out = p @ v
        ds = p * (do_rows @ v.T - (out * do_rows).sum(-1, keepdims=True))
        dq = spec.score.scale * (ds @ k)
        sums = dk + spec.score.scale * (ds.T @ q_rows), dv + p.T @ do_rows
        return sums, tuple(x.reshape(rows, groups, dim) for x in (out, dq))

    starts = jnp.arange(0, length, rows)
    (dk, dv), (out, dq) = lax.scan(block, (jnp.zeros_like(k), jnp.zeros_like(v)), starts)
    return {"out": out.reshape(q.shape), "dq": dq.reshape(q.shape), "dk": dk, "dv": dv}
