"""The gated delta rule's kernels compiled for an H100, and what the assembler reports."""

from __future__ import annotations

from typing import Any

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.linear.backend import Inputs
from pallas_kernels.linear.sm90 import operation

pytestmark = pytest.mark.cuda_compiler
# An odd number of chunks: scans have a step that is no pair's, which takes code and registers.
LENGTH, HEADS, KEY_HEADS = 448, 4, 2


KERNELS = "inverses", "output", "last", "states", "first_gradient", "gradients"


def every_kernel(inputs, start, do, last):
    """What a device runs forward and backward, alone or with a shard of a sequence."""
    prepared, scale = operation.prepare(inputs), 0.1
    return (
        operation.forward(inputs, prepared, start, scale),
        operation.affine(inputs, prepared, start),
        operation.first_state_gradient(inputs, prepared, do, last, scale),
        operation.backward(inputs, prepared, start, do, last, scale),
    )


@pytest.mark.parametrize(
    "jax_is", [pytest.param("oldest", marks=pytest.mark.hopper_kernels), "newest"]
)
def test_kernels_fit_in_the_registers(monkeypatch, capfd, jax_is):
    """Two warpgroups have 255 registers each, with any JAX."""
    del jax_is
    mesh = compiled.gpu_mesh("h100", 1)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        sharding = jax.NamedSharding(mesh, jax.P())
        return jax.ShapeDtypeStruct((1, *shape), dtype, sharding=sharding)

    keys, values = array(LENGTH, KEY_HEADS, 128), array(LENGTH, HEADS, 128)
    gates = array(LENGTH, HEADS, dtype=jnp.float32)
    state = array(HEADS, 128, 128, dtype=jnp.float32)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    capfd.readouterr()
    given = Inputs(keys, keys, values, gates, gates)
    compiled.compile_for(every_kernel, given, state, values, state)
    seen = compiled.ptxas("".join(capfd.readouterr()))
    assert seen.kernels == {f"gated_delta_rule_{name}" for name in KERNELS}
    assert (seen.stack, seen.spills) == (0, 0)
    assert not seen.serialized
