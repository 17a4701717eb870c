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
from pallas_kernels.mosaic.sm80.decode import partial_attention

# With JAX 0.12 the assembler compiles kernels for linking.
LINKED = jax.__version_info__ >= (0, 12)

pytestmark = pytest.mark.cuda_compiler


@pytest.mark.parametrize(
    ("gpu", "queries", "heads", "head_dim", "options", "spilled"),
    [
        ("a100", 1, 32, 64, {}, 0),
        ("a100", 1, 32, 128, {}, 0),
        ("h100", 1, 32, 128, {}, 0),
        ("a100", 16, 32, 128, {"window": 4096, "logits_soft_cap": 50.0}, 32 if LINKED else 0),
        ("a100", 1, 16, 256, {"window": 1024}, 1616 if LINKED else 0),
    ],
)
def test_decoding_spills_no_registers(
    monkeypatch, capfd, gpu, queries, heads, head_dim, options, spilled
):
    """``spilled``: bytes that are stored or loaded."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    if gpu == "a100":
        compiled.mosaic_as_on_an_a100(monkeypatch)
    mesh, capacity = compiled.gpu_mesh(gpu, 1), 8192

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    keys = array(1, capacity, 8, head_dim)
    numbers = array(capacity, dtype=jnp.int32), array(1, capacity, dtype=jnp.int32)
    last = array(dtype=jnp.int32)
    # A kernel that was compiled before in the same process is not reported again.
    scale = 0.1 + head_dim / 4096 + queries / 64 + (gpu == "h100") / 1024

    def run(query, keys, values, places, present, last, used):
        return partial_attention(
            query, keys, values, places, present, last, used, scale=scale, splits=33, **options
        )

    query = array(1, queries, heads, head_dim)
    capfd.readouterr()
    with jax.set_mesh(mesh):
        compiled.compile_for(run, query, keys, keys, *numbers, last, last)
    seen = compiled.ptxas("".join(capfd.readouterr()))
    assert seen.kernels == {"burst_decode"}
    assert seen.spills <= spilled, seen


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_keys_and_values_weights_are_read_by_the_product_that_reads_the_queries(monkeypatch, gpu):
    """Of Llama 3 8B's attention: by themselves they are too few for a matrix product."""
    if gpu == "a100":
        compiled.mosaic_as_on_an_a100(monkeypatch)
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
    assert "burst_decode" in compiled.text_of(program)
    # The products of queries alone, and of keys or values alone, are not there.
    assert sizes.count(4096 * 32 * 128) == 1  # out
    assert 4096 * 8 * 128 not in sizes
