"""The gated delta rule traced and lowered for GPUs that are not here, as users call it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import lowered_programs as programs
import pytest
from jax.sharding import AxisType
from jaxprs import count, equations

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


def shapes(
    mesh, *, vmapped: int | None = None, channels: bool = False, dims: tuple[int, int] = (128, 128)
):
    """Of the arrays, with another dimension in front under ``vmap``, or decays per channel."""
    front = () if vmapped is None else (vmapped,)
    length = TOKENS * mesh.shape["seq"]

    def array(*shape: int, dtype: Any = jnp.bfloat16, split: bool = True) -> Any:
        spec = (*[None] * len(front), None, "seq") if split else ()
        return programs.a_shape(mesh, (*front, 1, *shape), dtype, *spec)

    head_dim, value_dim = dims
    keys, values = array(length, KEY_HEADS, head_dim), array(length, HEADS, value_dim)
    gates = array(length, HEADS, dtype=jnp.float32)
    state = array(HEADS, *dims, dtype=jnp.float32, split=False)
    decays = array(length, HEADS, head_dim, dtype=jnp.float32) if channels else gates
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


@pytest.mark.parametrize(
    ("gpu", "n", "layout", "channels", "dims", "lowers"),
    [
        ("h100", 2, "zigzag", False, (96, 192), False),
        pytest.param("h100", 3, "contiguous", True, (61, 130), True, marks=SLOW),
        pytest.param("a100", 3, "zigzag", False, (64, 300), False, marks=SLOW),
    ],
)
def test_other_head_dims(gpu, n, layout, channels, dims, lowers):
    """On the kernels; devices send maps and states without padding."""
    mesh = programs.abstract_mesh(gpu, {"seq": n})
    given = shapes(mesh, channels=channels, dims=dims)
    traced = programs.for_gpu(gpu, mesh, program(mesh, layout, True), *given, lowers=lowers)
    keys, values = dims
    sent = [
        x.aval.shape[-2:]
        for equation, _ in equations(traced.jaxpr.jaxpr)
        for x in equation.invars
        if equation.primitive.name in ("all_gather", "all_to_all", "ppermute")
        and x.aval.dtype == jnp.float32
    ]
    # Maps, states (of a gather U and M), gradients.
    assert {(values + keys, keys)} < set(sent) <= {(n, keys) for n in (values + keys, values, keys)}
    assert count(traced.jaxpr.jaxpr, "mpmd_map") > 0
