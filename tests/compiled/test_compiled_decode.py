"""A decoding step and its kernel, compiled for GPUs that are not there."""

from __future__ import annotations

import dataclasses
import math
import re

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_calls import run_for_ampere
from flax import nnx
from meshes import mesh_of
from served_models import CONFIG

from burst_jax.models import (
    DecoderConfig,
    DeltaNet,
    Experts,
    MixtureOfExperts,
    abstract_decoder,
)
from burst_jax.serving import Generator
from pallas_kernels.mosaic.sm80.decode import partial_attention

pytestmark = pytest.mark.cuda_compiler


# With JAX 0.12 the assembler compiles kernels for linking.
LINKED = jax.__version_info__ >= (0, 12)
# Bytes that are stored or loaded by kernels of these queries, heads, head dim and options.
SPILLS = (
    (1, 32, 64, {}, 0),
    (1, 32, 128, {}, 0),
    (16, 32, 128, {"window": 4096, "logits_soft_cap": 50.0}, 16 * LINKED),
    (1, 16, 256, {"window": 1024}, 832 * LINKED),
)


FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
# Of two layers of linear attention with small dense feed-forwards.
LINEAR_LAUNCHES = 20
# Of a layer of gated softmax attention and of experts with a gated shared one.
MIXTURE_LAUNCHES = 26


def compile_decode(gpu, queries, heads, head_dim, options):
    """The kernel on 8,192 cached tokens."""
    mesh, capacity = compiled.gpu_mesh(gpu, 1), 8192

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    keys = array(1, capacity, 8, head_dim)
    numbers = array(capacity, dtype=jnp.int32), array(1, capacity, dtype=jnp.int32)
    last = array(dtype=jnp.int32)

    def run(query, keys, values, places, present, last, used):
        return partial_attention(
            query, keys, values, places, present, last, used, scale=0.1, splits=33, **options
        )

    query = array(1, queries, heads, head_dim)
    with jax.set_mesh(mesh):
        return compiled.compile_for(run, query, keys, keys, *numbers, last, last)


def test_decoding_spills_no_registers():
    """On an A100; one process compiles all, and separates what the assembler reports of each."""
    printed = run_for_ampere(
        f"import {__name__} as test\n"
        "for *call, _ in test.SPILLS:\n"
        "    print('====', flush=True)\n"
        "    test.compile_decode('a100', *call)\n"
    )
    reports = printed.split("====\n")[1:]
    for (*call, spilled), report in zip(SPILLS, reports, strict=True):
        assert "'sm_80'" in report
        seen = compiled.ptxas(report)
        assert seen.kernels == {"burst_decode"}
        assert seen.spills <= spilled, (call, seen)


def test_decoding_compiles_for_hopper():
    assert "burst_decode" in compiled.text_of(compile_decode("h100", 1, 32, 128, {}))


def decode_program(gpu, config):
    """The decoding step of one sequence, compiled."""
    graphdef, shapes = abstract_decoder(config, mesh=mesh_of(seq=1))
    weights = jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)
    server = Generator(nnx.merge(graphdef, weights), max_length=1024)
    steps, mesh = server._steps, compiled.gpu_mesh(gpu, 1)
    steps.mesh = mesh

    def placed(tree):
        place = jax.NamedSharding(mesh, jax.P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    arguments = steps.model.leaves, server._cache, jnp.zeros(1, jnp.int32), jnp.zeros(5, jnp.int32)
    with jax.set_mesh(mesh), compiled.mosaic_compiles_for(mesh):
        return steps.decode.lower(*placed(arguments)).compile()


def test_keys_and_values_weights_are_read_by_the_product_that_reads_the_queries():
    """Of Llama 3 8B's attention: by themselves they are too few for a matrix product."""
    config = dataclasses.replace(
        CONFIG, num_layers=1, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
    )  # fmt: skip
    program = decode_program("a100", config)
    factors = [factor for *both, _ in compiled.matrix_products(program) for factor in both]
    sizes = [math.prod(map(int, re.findall(r"\d+", text.split("[")[1]))) for text in factors]
    assert sizes.count(4096 * (32 + 2 * 8) * 128) == 1
    assert "burst_decode" in compiled.text_of(program)
    # The products of queries alone, and of keys or values alone, are not there.
    assert sizes.count(4096 * 32 * 128) == 1  # out
    assert 4096 * 8 * 128 not in sizes


def test_a_mixture_reads_the_experts_by_kernels_without_a_loop():
    config = dataclasses.replace(
        CONFIG, num_layers=1, embed_dim=256, num_heads=4, num_kv_heads=4, head_dim=64, mlp_dim=128,
        feed_forward=MixtureOfExperts, experts=Experts(16, 4, shared_dim=128, shared_gate=True),
        qk_norm=True, attention_gate=True, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
    )  # fmt: skip
    program = decode_program("h100", config)
    text = compiled.text_of(program)
    # Attention's output projection; gate and up; down.
    assert len(re.findall(r"custom-call\(.*burst_few_rows", text)) == 3
    assert " while(" not in text  # Which a search in the sorted rows is.
    assert " sort(" not in text
    launches = [x for x in compiled.computations(program)["ENTRY"] if x.opcode not in FREE]
    # Each takes a microsecond at least, as long as 3 MB of weights.
    assert len(launches) <= MIXTURE_LAUNCHES, [x.name for x in launches]


def test_linear_attention_reads_its_projections_by_one_product_and_copies_no_state():
    """Of Qwen3-Next's sizes: by itself each of the six projections is too small for one."""
    sizes = DeltaNet(32, 16, 128, 128)
    config = dataclasses.replace(
        DecoderConfig(), vocab_size=48, num_layers=2, embed_dim=2048, mlp_dim=64, delta_net=sizes,
        dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
    )  # fmt: skip
    program = decode_program("h100", config)
    factors = [factor for *both, _ in compiled.matrix_products(program) for factor in both]
    counts = [math.prod(map(int, re.findall(r"\d+", text.split("[")[1]))) for text in factors]
    columns = 2 * 16 * 128 + 2 * 32 * 128 + 128  # beta and decay in the last 128
    assert counts.count(2048 * columns) == 2
    assert 2048 * 32 * 128 not in counts
    launches = [x for x in compiled.computations(program)["ENTRY"] if x.opcode not in FREE]
    assert len(re.findall(r"custom-call\(.*gated_delta_rule_step", compiled.text_of(program))) == 2
    copied = [x.result for x in launches if x.opcode == "copy"]
    assert not [shape for shape in copied if "[1,32,128,128]" in shape or "[1,3," in shape]
    assert len(launches) <= LINEAR_LAUNCHES, [x.name for x in launches]
