"""Calls of the gated delta rule on meshes, with results in natural order by name."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import linear_cases
import numpy as np
from implementations import quick_jit
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

import burst_jax
from burst_jax import linear

NAMES = linear_cases.NAMES
STATES = ("last", "dstart")
TOKENS, STATE = P(None, "seq"), P()


def on_mesh(n, layout, **options: Any):
    """``(q, k, v, log_decay, beta, start, ids) -> (o, last)``, tokens in the layout's order."""
    return functools.partial(_call, **({"mesh": mesh_of(seq=n), "layout": layout} | options))


def in_shard_map(n, layout, check_vma=True, **options: Any):
    """The same inside a ``shard_map``."""
    run = functools.partial(_call, axis_name="seq", layout=layout, **options)
    return jax.shard_map(
        run, mesh=mesh_of(seq=n), in_specs=(*[TOKENS] * 5, STATE, TOKENS),
        out_specs=(TOKENS, STATE), check_vma=check_vma,
    )  # fmt: skip


def _call(q, k, v, log_decay, beta, start, ids, **options):
    return linear.gated_delta_rule(
        q, k, v, log_decay, beta, initial_state=start, segment_ids=ids, return_final_state=True,
        **options,
    )  # fmt: skip


@functools.cache
def _program(call, program):
    """Results and gradients by name, of arguments in the layout's order."""

    @program
    def run(arrays, start, ids, do, dlast):
        found, vjp = jax.vjp(lambda *given: call(*given, ids), *arrays, start)
        return dict(zip(NAMES, (*found, *vjp((do, dlast))), strict=True))

    return run


def results(call, case, n, layout, dtype=jnp.float32, program=quick_jit):
    """Results and gradients of a case in natural order; its padding may hold anything.

    NumPy permutes and casts: each eager operation of JAX would be a program, and operations in the
    call's program would make it larger.
    """
    order = burst_jax.positions(layout, case.q.shape[1], n)

    def placed(x, dtype=None):
        return None if x is None else np.asarray(x[:, order], dtype)

    q, k, v, do = (placed(getattr(case, name), dtype) for name in ("q", "k", "v", "do"))
    arrays = q, k, v, placed(case.log_decay), placed(case.beta)
    found = jax.device_get(
        _program(call, program)(arrays, case.start, placed(case.ids), do, case.dlast)
    )
    back = np.argsort(order)
    return {name: x if name in STATES else x[:, back] for name, x in found.items()}


def with_nan(case):
    """The case with NaN in padding."""
    names = ("q", "k", "v", "log_decay", "beta", "do")
    arrays = {name: np.array(getattr(case, name)) for name in names}
    for x in arrays.values():
        x[~case.valid] = np.nan
    return case._replace(**arrays)


def compose(rows, order, wanted, start=None):
    """What a kernel computes that composes maps: ``compose`` of an implementation."""
    values = rows.shape[-2] - rows.shape[-1]
    state = jnp.zeros_like(rows[0, :, 0, :, :values]) if start is None else start
    found = jnp.full((wanted[0], rows.shape[1], wanted[1], *state.shape[1:]), jnp.nan)
    for device, column, *target in jnp.asarray(order):
        put = found.at[target[0], :, target[1]].set(state)
        found = jnp.where(target[0] < 0, found, put)
        of_run = rows[device, :, column]
        state = state @ of_run[..., values:, :] + of_run[..., :values, :]
    return found
