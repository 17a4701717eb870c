"""The gated delta rule's kernels compiled for an H100, and what the assembler reports."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest
from compiled_calls import compile_linear

from burst_jax import linear
from pallas_kernels.linear.backend import Inputs
from pallas_kernels.linear.sm90 import operation, scan
from pallas_kernels.mosaic.sm90.configs import moves_registers

pytestmark = pytest.mark.cuda_compiler
HEADS, KEY_HEADS = 4, 2


@pytest.mark.parametrize(
    "jax_is", [pytest.param("oldest", marks=pytest.mark.hopper_kernels), "newest"]
)
def test_kernels_fit_in_the_registers(assembled, jax_is):
    """Two warpgroups have 255 registers each, with any JAX."""
    del jax_is
    seen = assembled(compile_linear, operation, "h100")
    kernels = "inverses", "output", "forward", "last", "states", "first_gradient", "gradients"
    assert seen.kernels == {f"gated_delta_rule_{name}" for name in kernels}
    assert (seen.stack, seen.spills) == (0, 0)
    assert not seen.serialized


@pytest.mark.parametrize(
    "jax_is",
    [
        pytest.param("oldest", marks=pytest.mark.hopper_kernels),
        pytest.param("newest", marks=pytest.mark.slow),
    ],
)
def test_kernels_of_decays_per_channel_fit(assembled, jax_is):
    """The gradients' kernel alone spills, once per chunk: it has 8,000 instructions for it."""
    del jax_is
    seen = assembled(compile_linear, operation, "h100", channels=True)
    kernels = "channel_operands", "output", "last", "states", "first_gradient", "channel_gradients"
    assert seen.kernels == {f"gated_delta_rule_{name}" for name in kernels}
    assert seen.stack <= 700


@pytest.mark.parametrize(
    "jax_is", [pytest.param("oldest", marks=pytest.mark.hopper_kernels), "newest"]
)
def test_maps_fit(monkeypatch, assembled, jax_is):
    """Two chains of a map in a CTA, and the composition, which spills once per map."""
    del jax_is
    monkeypatch.setattr(scan, "num_sms", lambda: 1)
    mesh = compiled.gpu_mesh("h100", 1)

    def array(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    read = functools.partial(assembled, compiled.compile_for)
    keys, gates = array(1, 448, 2, 128, dtype=jnp.bfloat16), array(1, 448, 2)
    for decays in (gates, array(1, 448, 2, 128)):
        inputs, start = Inputs(keys, keys, keys, decays, gates), array(1, 2, 128, 128)
        seen = read(lambda inputs, start: operation.mapped(inputs, start)[1], inputs, start)
        assert "gated_delta_rule_last" in seen.kernels
        assert seen.stack <= (0 if moves_registers() else 16)
        assert not seen.serialized
    every, order = array(2, 1, 2, 2, 256, 128), array(4, 4, dtype=jnp.int32)
    seen = read(lambda x, order: operation.compose(x, order, (1, 2)), every, order)
    assert seen.kernels == {"gated_delta_rule_composition"}
    assert seen.stack <= 140


def linear_ring(layout, mesh):
    """Forward and backward over the mesh; the cotangent is the output."""

    def run(*arrays):
        o, vjp = jax.vjp(lambda *x: linear.gated_delta_rule(*x, mesh=mesh, layout=layout), *arrays)
        return vjp(o)

    return run


@pytest.mark.parametrize(
    ("n", "layout", "heads", "tokens", "dims", "launches"),
    [
        (8, "zigzag", 8, 256, (128, 128), 33),
        pytest.param(8, "contiguous", 4, 256, (128, 128), 30, marks=pytest.mark.slow),
        pytest.param(2, "zigzag", 4, 256, (128, 128), 20, marks=pytest.mark.slow),
        # In two parts, which the device composes: what is sent does not grow.
        pytest.param(8, "contiguous", 4, 16384, (128, 128), 40, marks=pytest.mark.slow),
        pytest.param(2, "zigzag", 4, 256, (96, 192), 31, marks=pytest.mark.slow),
        pytest.param(8, "contiguous", 4, 16384, (96, 192), 60, marks=pytest.mark.slow),
    ],
)
def test_devices_exchange_their_maps_alone(n, layout, heads, tokens, dims, launches):
    """M and U or states, float32, in few launches; no token is sent, none is gathered."""
    mesh = compiled.gpu_mesh("h100", n)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        sharding = jax.NamedSharding(mesh, jax.P(None, "seq"))
        return jax.ShapeDtypeStruct((1, n * tokens, *shape), dtype, sharding=sharding)

    head_dim, value_dim = dims
    keys, values = array(KEY_HEADS, head_dim), array(heads, value_dim)
    gates = array(heads, dtype=jnp.float32)
    arrays = keys, keys, values, gates, gates
    program = compiled.compile_for(linear_ring(layout, mesh), *arrays, has_kernels=False)
    operations = [each for line in compiled.computations(program).values() for each in line]
    kinds = {each.opcode.removesuffix("-start") for each in operations}
    moving = {"all-to-all", "all-reduce", "reduce-scatter", "collective-permute", "all-gather"}
    by_heads = heads % n == 0 and n > 2
    kind = "all-to-all" if by_heads else "all-gather"
    assert kinds & moving == {kind}
    found = [each for each in operations if each.opcode in (kind, f"{kind}-start")]
    # Of the results alone: a started gather has its operands in front.
    sizes = [
        [
            math.prod(map(int, dims.split(",")))
            for dims in re.findall(r"f32\[([\d,]+)\]", each.result)
            if dims.startswith(f"{n},")
        ][-2:]
        for each in found
    ]
    rows = (2 if layout == "zigzag" else 1) * heads * head_dim
    states, maps = rows * value_dim, rows * (value_dim + head_dim)
    if by_heads:  # Maps and states; M remains for the gradients.
        assert [x[-1] for x in sizes] == [maps, states, states, states]
    else:  # Both arrays of a pass in one collective.
        assert sizes == [[n * maps], [n * states, n * (maps - states)]]
    assert not any("bf16[" in each.result for each in found)
    assert len(compiled.small_launches(program)) <= launches
