"""The gated delta rule traced and lowered for GPUs that are not here, as users call it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import lowered_programs as programs
import pytest
from jax.sharding import AxisType

from burst_jax import linear

HEADS, KEY_HEADS, TOKENS = 4, 2, 8000  # A run's length is no multiple of 64.
SLOW = pytest.mark.slow


def program(mesh, layout, documents):
    """Forward and backward with states; the cotangents are the results."""

    def run(q, k, v, log_decay, beta, start, ids):
        def rule(*arrays):
            *arrays, start = arrays
            return linear.gated_delta_rule(
                *arrays, mesh=mesh, layout=layout, initial_state=start, return_final_state=True,
                segment_ids=ids if documents else None,
            )  # fmt: skip

        results, vjp = jax.vjp(rule, q, k, v, log_decay, beta, start)
        return results, vjp(results)

    return run


def shapes(mesh, *, vmapped: int | None = None, channels: bool = False):
    """Of the arrays, with another dimension in front under ``vmap``, or decays per channel."""
    front = () if vmapped is None else (vmapped,)
    length = TOKENS * mesh.shape["seq"]

    def array(*shape: int, dtype: Any = jnp.bfloat16, split: bool = True) -> Any:
        spec = (*[None] * len(front), None, "seq") if split else ()
        return programs.a_shape(mesh, (*front, 1, *shape), dtype, *spec)

    keys, values = (array(length, heads, 128) for heads in (KEY_HEADS, HEADS))
    gates = array(length, HEADS, dtype=jnp.float32)
    state = array(HEADS, 128, 128, dtype=jnp.float32, split=False)
    decays = array(length, HEADS, 128, dtype=jnp.float32) if channels else gates
    return keys, keys, values, decays, gates, state, array(length, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("n", "layout", "documents", "lowers", "kind"),
    [
        (2, "zigzag", True, False, AxisType.Auto),
        pytest.param(8, "contiguous", False, False, AxisType.Auto, marks=SLOW),
        pytest.param(8, "zigzag", True, True, AxisType.Explicit, marks=SLOW),
        pytest.param(16, "zigzag", False, False, AxisType.Auto, marks=SLOW),
        pytest.param(1, "contiguous", True, False, AxisType.Auto, marks=SLOW),
    ],
)
def test_on_hopper(n, layout, documents, lowers, kind):
    """Its kernels, without a warning of slower ones."""
    mesh = programs.abstract_mesh("h100", {"seq": n}, kind)
    run = program(mesh, layout, documents)
    programs.for_gpu("h100", mesh, run, *shapes(mesh), lowers=lowers)


def test_decays_per_channel_on_hopper():
    mesh = programs.abstract_mesh("h100", {"seq": 2})
    run = program(mesh, "zigzag", True)
    programs.for_gpu("h100", mesh, run, *shapes(mesh, channels=True), lowers=False)


@pytest.mark.slow
def test_vmap_on_hopper():
    mesh = programs.abstract_mesh("h100", {"seq": 2})
    run = jax.vmap(program(mesh, "zigzag", True))
    programs.for_gpu("h100", mesh, run, *shapes(mesh, vmapped=3))


@pytest.mark.parametrize(
    ("n", "layout", "documents", "lowers"),
    [(2, "zigzag", True, False), pytest.param(8, "contiguous", False, True, marks=SLOW)],
)
def test_on_ampere(n, layout, documents, lowers):
    mesh = programs.abstract_mesh("a100", {"seq": n})
    run = program(mesh, layout, documents)
    programs.for_gpu("a100", mesh, run, *shapes(mesh), lowers=lowers)
