"""What a benchmark holds results to: attention in float64, for as many heads as are asked for."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import AttentionSpec, Tokens
from pallas_kernels.scores import allowed

_ROWS = 1024


def attention_and_gradients(
    spec: AttentionSpec, tokens: Tokens, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array
) -> dict[str, Any]:
    """float64 ``out, dq, dk, dv`` of one key head and its query heads; memory linear in T.

    Args:
      spec: scale, window.
      tokens: positions, and segment ids ``[1, T]`` or None; of queries and keys alike.
      q: ``[T, G, H]``, and ``do`` alike.
      k: ``[T, H]``, and ``v`` alike.
      do: the cotangent of out.
    """
    with jax.enable_x64(True):
        wide = (x.astype(jnp.float64) for x in (q, k, v, do))
        return _blocks(spec, tokens, *wide)


@functools.partial(jax.jit, static_argnums=0)
def _blocks(spec, tokens, q, k, v, do):
    length, groups, dim = q.shape
    rows = min(_ROWS, length)
    if length % rows:
        raise ValueError(f"the length is {length}: it must be a multiple of {rows}")
    seg = None if tokens.segment_ids is None else tokens.segment_ids[0]

    def block(sums, start):
        dk, dv = sums
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=rows)
        q_rows, do_rows = (cut(x).reshape(rows * groups, dim) for x in (q, do))
        q_pos = jnp.repeat(cut(tokens.positions), groups)[:, None]
        q_seg = None if seg is None else jnp.repeat(cut(seg), groups)[:, None]
        k_seg = None if seg is None else seg[None]
        logits = spec.scale * (q_rows @ k.T)
        ok = allowed(spec, q_pos, tokens.positions[None], q_seg, k_seg)
        logits = logits if ok is None else jnp.where(ok, logits, -jnp.inf)
        p = jax.nn.softmax(logits, axis=-1, where=ok)
        out = p @ v
        ds = p * (do_rows @ v.T - (out * do_rows).sum(-1, keepdims=True))
        dq = spec.scale * (ds @ k)
        sums = dk + spec.scale * (ds.T @ q_rows), dv + p.T @ do_rows
        return sums, tuple(x.reshape(rows, groups, dim) for x in (out, dq))

    starts = jnp.arange(0, length, rows)
    (dk, dv), (out, dq) = lax.scan(block, (jnp.zeros_like(k), jnp.zeros_like(v)), starts)
    return {"out": out.reshape(q.shape), "dq": dq.reshape(q.shape), "dk": dk, "dv": dv}
