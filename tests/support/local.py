"""Calls of local attention as tests write them: bounds made, all gradients in one call."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import Operands
from pallas_kernels.elementwise import Numbering


def forward(
    implementation,
    q,
    kv,
    q_tokens,
    kv_tokens,
    carry=None,
    *,
    spec,
    numbers=None,
    seeds=None,
    blocks=None,
    **options,
):
    """``(o, lse)``; ``kv`` is K and V, ``numbers`` are those of each head, ``seeds`` dropout's.

    ``blocks``: the mask by blocks.
    """
    operands = Operands(q, kv[0], kv[1], q_tokens, kv_tokens, numbers or {}, seeds, blocks)
    operands = operands.replace(numbering=Numbering.of(q) if spec.calls_functions else None)
    bounds = implementation.forward_bounds(operands, spec=spec)
    return implementation.forward(operands.replace(bounds=bounds), carry, spec=spec, **options)


def gradients(
    implementation, qdo, kv, stats, q_tokens, kv_tokens, dq=None, dkv=None, *, spec, part=None,
    numbers=None, seeds=None, blocks=None, out_dtype=None,
):  # fmt: skip
    """``(dq, (dk, dv), those of the numbers)``; dK and dV may be given stacked.

    ``part`` of the work is 0 or 1, None for all of it; ``out_dtype`` is the implementation's.
    """
    operands = Operands(qdo[0], kv[0], kv[1], q_tokens, kv_tokens, numbers or {}, seeds, blocks)
    operands = operands.replace(numbering=Numbering.of(qdo[0]) if spec.calls_functions else None)
    bounds = implementation.backward_bounds(operands, spec=spec)
    if part is not None:
        bounds = implementation.split_backward(bounds)[part]
    operands = operands.replace(bounds=bounds, do=qdo[1], stats=jnp.stack(stats))
    sums = dq, None if dkv is None else tuple(dkv)
    return implementation.backward(operands, *sums, spec=spec, out_dtype=out_dtype)


def backward(*args, **options):
    """``(dq, dkv)`` of :func:`gradients`, dK and dV stacked, without numbers of each head."""
    dq, dkv, of_numbers = gradients(*args, **options)
    assert of_numbers == {}
    return dq, jnp.stack(dkv)
