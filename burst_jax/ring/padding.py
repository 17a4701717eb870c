"""Zeros in padding tokens.

Masks give padding the weight 0, but 0 times infinity or NaN is NaN. So the caller's values in
padding are replaced before they are multiplied with anything: by kernels, or here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import AttentionInputs


def without_padding(x: jax.Array, segment_ids: jax.Array | None, *, tokens: int = 1) -> jax.Array:
    """``x`` with zeros in padding tokens; ``tokens`` is the index of the token axis."""
    if segment_ids is None:
        return x
    others = [axis for axis in range(1, x.ndim) if axis != tokens]
    live = lax.expand_dims(segment_ids != 0, others)
    return jnp.where(live, x, jnp.zeros((), x.dtype))


def with_zeros(inputs: AttentionInputs) -> AttentionInputs:
    """Inputs with zeros in the padding of queries, dO, keys and values."""
    query, kv = inputs.query, inputs.kv
    k, v = (without_padding(x, kv.segment_ids) for x in (kv.k, kv.v))
    q = without_padding(query.q, query.segment_ids)
    do = None if query.do is None else without_padding(query.do, query.segment_ids)
    return inputs._replace(query=query._replace(q=q, do=do), kv=kv._replace(k=k, v=v))
