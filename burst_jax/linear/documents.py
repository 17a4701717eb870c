"""Where documents begin in this device's tokens, and which tokens are padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.linear.runs import DeviceRuns
from pallas_kernels.linear.chunks import Tokens


def tokens_of(runs: DeviceRuns, segment_ids: jax.Array, padding_id: int) -> Tokens:
    """Of runs in the batch, ``[B * count, T / count]``.

    A document is what has one id, whatever padding is in it. It begins where the id of the last
    token that is no padding differs; the first document of a sequence continues its first state.

    Args:
      runs: of all devices.
      segment_ids: int32 ``[B, T]``, this device's.
      padding_id: the id of padding.
    """
    ids = runs.split(segment_ids)
    valid = ids != padding_id
    # Before the first token that is no padding, the padding's own id stands for none.
    latest = _filled(ids, valid, _ids_before(runs, _last(ids, valid), padding_id))
    before, here = latest[:, :-1], latest[:, 1:]
    return Tokens(valid & (before != padding_id) & (before != here), valid)


def _filled(ids: jax.Array, valid: jax.Array, before: jax.Array) -> jax.Array:
    """The id of the last token up to each one that is no padding, that before all in front."""
    index = jnp.arange(1, ids.shape[1] + 1, dtype=jnp.int32)
    last = lax.cummax(jnp.where(valid, index, 0), axis=1)
    with_before = jnp.concatenate([before[:, None], ids], 1)
    return jnp.concatenate([before[:, None], jnp.take_along_axis(with_before, last, 1)], 1)


def _last(ids: jax.Array, valid: jax.Array) -> jax.Array:
    """The id of the last token of each run that is no padding; one of padding without any."""
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)
    at = jnp.max(jnp.where(valid, index, 0), axis=1, keepdims=True)
    return jnp.take_along_axis(ids, at, axis=1)[:, 0]


def _ids_before(runs: DeviceRuns, own: jax.Array, padding_id: int) -> jax.Array:
    """The id of the last token before each run that is no padding, ``[B * count]``."""
    own = runs.per_run(own)
    every = lax.all_gather(own, runs.axes) if runs.size > 1 else own[None]
    place = np.argsort(np.array(runs.order).ravel())
    ordered = every.reshape(runs.total, -1)[place]
    # In front of the first run there is none.
    ordered = jnp.concatenate([jnp.full_like(ordered[:1], padding_id), ordered[:-1]])
    index = jnp.arange(runs.total, dtype=jnp.int32)[:, None]
    last = lax.cummax(jnp.where(ordered != padding_id, index, 0), axis=0)
    return runs.in_batch(jnp.take_along_axis(ordered, last, 0)[runs.here()])
