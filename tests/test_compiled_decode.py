"""The kernel of a decoding step, compiled for GPUs that are not there."""

from __future__ import annotations

import compiled
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.pallas_triton.decode import partial_attention

pytestmark = pytest.mark.cuda_compiler


@pytest.mark.parametrize(
    ("queries", "heads", "head_dim", "options"),
    [
        (1, 32, 64, {}),
        (1, 32, 128, {}),
        (16, 32, 128, {}),
        (16, 32, 128, {"window": 4096, "logits_soft_cap": 50.0}),
        (1, 16, 256, {"window": 1024}),
    ],
)
@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_decoding_spills_no_registers(gpu, queries, heads, head_dim, options):
    """Eight key heads, and as many queries as a tile has rows for."""
    mesh, capacity = compiled.gpu_mesh(gpu, 1), 8192

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    keys = array(1, capacity, 8, head_dim)
    numbers = array(capacity, dtype=jnp.int32), array(1, capacity, dtype=jnp.int32)
    last = array(dtype=jnp.int32)

    def run(query, keys, values, places, present, last, used):
        return partial_attention(
            query, keys, values, places, present, last, used, scale=0.1, splits=33,
            compute_capability={"a100": 8.0, "h100": 9.0}[gpu], **options,
        )  # fmt: skip

    refuse = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    query = array(1, queries, heads, head_dim)
    with jax.set_mesh(mesh):
        program = compiled.compile_for(run, query, keys, keys, *numbers, last, last, **refuse)
    assert "burst_decode" in compiled.text_of(program)
