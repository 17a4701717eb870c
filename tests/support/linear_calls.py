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
def _program(call, n, layout):
    """Results and gradients by name, of arguments in natural order; one for each ``call``."""

    @quick_jit
    def run(q, k, v, log_decay, beta, start, ids, do, dlast):
        placed = functools.partial(burst_jax.to_layout, layout=layout, num_shards=n)
        arrays = placed((q, k, v, log_decay, beta))
        ids, do = placed((ids, do))
        found, vjp = jax.vjp(lambda *given: call(*given, ids), *arrays, start)
        (o, last), (*gradients, first) = found, vjp((do, dlast))
        o, *gradients = burst_jax.from_layout((o, *gradients), layout, n)
        return dict(zip(NAMES, (o, last, *gradients, first), strict=True))

    return run


def results(call, case, n, layout, dtype=jnp.float32):
    """Results and gradients of a case, whose padding may hold anything."""
    q, k, v, do = (jnp.asarray(getattr(case, name), dtype) for name in ("q", "k", "v", "do"))
    gates = [jnp.asarray(x) for x in (case.log_decay, case.beta)]
    ids = None if case.ids is None else jnp.asarray(case.ids)
    start, dlast = jnp.asarray(case.start), jnp.asarray(case.dlast)
    return jax.device_get(_program(call, n, layout)(q, k, v, *gates, start, ids, do, dlast))


def with_nan(case):
    """The case with NaN in padding."""
    names = ("q", "k", "v", "log_decay", "beta", "do")
    arrays = {name: np.array(getattr(case, name)) for name in names}
    for x in arrays.values():
        x[~case.valid] = np.nan
    return case._replace(**arrays)
