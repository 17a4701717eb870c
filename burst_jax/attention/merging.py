"""``merge``: combines attention over disjoint keys by log-sum-exp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from burst_jax.attention.validation import FLOAT_DTYPES, check_is_array
from pallas_kernels.merge import merge as merge_two


def merge(*parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    r"""Attention over all keys, from the attention over each part of them.

    .. math::
        lse = log \sum_i exp(lse_i)    out = \sum_i exp(lse_i - lse) \cdot out_i

    Each part is what :func:`burst_jax.local_attention`, ``ring_attention`` or ``burst_attention``
    return with ``return_residual=True`` for the same queries. The parts' keys must be disjoint;
    their order matters for rounding only. A ring merges its steps like this. Use it for your own
    schemes: decoding with a sharded KV cache, prefill in chunks, a prefix that sequences share.

    A sink is part of lse: pass ``sink_logits`` to the call of one part only. Dropout is not: all
    parts may have it, with one key and global positions.

    Letters: B batch, T query length, N query heads, Hv head dim of values.

    Args:
      *parts: pairs ``(out, lse)``, one or more: out ``[B, T, N, Hv]`` bfloat16, float16 or float32,
        and lse float32 ``[B, T, N]``, the natural log of the softmax's denominator; all parts with
        the same shapes and dtypes. B, T and N may be any other axes. A query that attends to no key
        of a part has lse -inf there.

    Returns:
      ``(out, lse)`` with the parts' shapes and dtypes, computed in float32; out is rounded once.
      Both are differentiable with respect to out and lse of every part. A query that attends to no
      key in any part has out 0, lse -inf, and exactly zero gradients.

    Raises:
      ValueError: a part is not such a pair, or parts differ in shape or dtype; the message names
        part, value and remedy.
    """
    if not parts:
        raise ValueError("merge got no parts: pass one pair (out, lse) or more")
    for i, part in enumerate(parts):
        _check_part(i, part, parts[0])
    out, lse = parts[0]
    if len(parts) == 1:
        return jnp.asarray(out), jnp.asarray(lse)
    merged = out.astype(jnp.float32), lse
    for more, more_lse in parts[1:]:
        merged = merge_two(*merged, more.astype(jnp.float32), more_lse)
    return merged[0].astype(out.dtype), merged[1]


def _check_part(index: int, part: Any, first: Any) -> None:
    """Raises ValueError unless the part is a pair of arrays, of the first part's shapes."""
    name = f"part {index} of merge"
    if not (isinstance(part, tuple) and len(part) == 2):
        raise ValueError(
            f"{name} is a {type(part).__name__}: it must be a pair (out, lse), what "
            "local_attention returns with return_residual=True"
        )
    out, lse = part
    check_is_array(f"out of {name}", out, "an array")
    check_is_array(f"lse of {name}", lse, "a float32 array")
    if str(out.dtype) not in FLOAT_DTYPES:
        raise ValueError(
            f"out of {name} has dtype {out.dtype}: cast it to one of {', '.join(FLOAT_DTYPES)}"
        )
    if lse.dtype != jnp.float32:
        raise ValueError(
            f"lse of {name} has dtype {lse.dtype}: it must be float32, the natural log of the "
            "softmax's denominator, as return_residual=True returns it"
        )
    if tuple(lse.shape) != tuple(out.shape[:-1]) or not out.ndim:
        raise ValueError(
            f"out of {name} has shape {out.shape}, lse {lse.shape}: they must be [B, T, N, Hv] and "
            "[B, T, N]"
        )
    if index and (out.shape, out.dtype) != (first[0].shape, first[0].dtype):
        raise ValueError(
            f"out of {name} is {out.dtype}{list(out.shape)}, that of part 0 "
            f"{first[0].dtype}{list(first[0].shape)}: all parts must be of the same queries and "
            "dtype; cast them to one dtype, float32 to round only once"
        )
