"""A decoding step and its kernel, compiled for GPUs that are not there."""

from __future__ import annotations

import dataclasses
import math
import re

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from meshes import mesh_of
from served_models import CONFIG

from burst_jax.models import Decoder
from burst_jax.serving import Generator
from burst_jax.serving.cache import TokenPosition
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


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_keys_and_values_weights_are_read_by_the_product_that_reads_the_queries(gpu):
    """Of Llama 3 8B's attention: by themselves they are too few for a matrix product."""
    config = dataclasses.replace(
        CONFIG, num_layers=1, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
    )  # fmt: skip
    model = Decoder(config, rngs=nnx.Rngs(0), mesh=mesh_of(seq=1))
    server = Generator(model, max_length=1024)
    steps, mesh = server._steps, compiled.gpu_mesh(gpu, 1)
    steps.mesh = mesh

    def shapes(tree):
        place = jax.NamedSharding(mesh, jax.P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    one, row = shapes((jnp.int32(0), jnp.zeros(1, jnp.int32)))
    arguments = (
        shapes(steps.model.weights),
        shapes(server._cache),
        row,
        row,
        TokenPosition(*[one] * 4),
    )
    with jax.set_mesh(mesh):
        program = steps._decode.lower(steps, *arguments).compile()
    factors = [factor for *both, _ in compiled.matrix_products(program) for factor in both]
    sizes = [math.prod(map(int, re.findall(r"\d+", text.split("[")[1]))) for text in factors]
    assert sizes.count(4096 * (32 + 2 * 8) * 128) == 1
    # The products of queries alone, and of keys or values alone, are not there.
    assert sizes.count(4096 * 32 * 128) == 1  # out
    assert 4096 * 8 * 128 not in sizes
