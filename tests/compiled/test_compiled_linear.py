"""The gated delta rule's kernels compiled for an H100, and what the assembler reports."""

from __future__ import annotations

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.linear.sm90 import operation

pytestmark = pytest.mark.cuda_compiler
# An odd number of chunks: scans have a step that is no pair's, which takes code and registers.
LENGTH, HEADS, KEY_HEADS = 448, 4, 2


def forward_and_backward(inputs, start, do, last):
    """All kernels of one device."""

    def rule(inputs, start):
        return operation.gated_delta_rule(inputs, start, 0.1)

    results, vjp = jax.vjp(rule, inputs, start)
    return results, vjp((do, last))


def of_a_shard(inputs, start, do, last):
    """The kernels that find a shard's map of states."""
    del start
    prepared = operation.prepare(inputs)
    return operation.affine(inputs, prepared), operation.first_state_gradient(
        inputs, prepared, do, last, 0.1
    )


@pytest.mark.parametrize(
    ("program", "kernels"),
    [
        (forward_and_backward, {"inverses", "output", "states", "gradients"}),
        (of_a_shard, {"inverses", "last", "first_gradient"}),
    ],
)
@pytest.mark.parametrize(
    "jax_is", [pytest.param("oldest", marks=pytest.mark.hopper_kernels), "newest"]
)
def test_kernels_fit_in_the_registers(monkeypatch, capfd, program, kernels, jax_is):
    """Two warpgroups have 255 registers each, with any JAX."""
    del jax_is
    mesh = compiled.gpu_mesh("h100", 1)

    def array(*shape, dtype=jnp.bfloat16):
        sharding = jax.NamedSharding(mesh, jax.P())
        return jax.ShapeDtypeStruct((1, *shape), dtype, sharding=sharding)

    keys, values = array(LENGTH, KEY_HEADS, 128), array(LENGTH, HEADS, 128)
    gates = array(LENGTH, HEADS, dtype=jnp.float32)
    state = array(HEADS, 128, 128, dtype=jnp.float32)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    capfd.readouterr()
    given = operation.Inputs(keys, keys, values, gates, gates)
    compiled.compile_for(program, given, state, values, state)
    seen = compiled.ptxas("".join(capfd.readouterr()))
    assert seen.kernels == {f"gated_delta_rule_{name}" for name in kernels}
    assert (seen.stack, seen.spills) == (0, 0)
    assert not seen.serialized
