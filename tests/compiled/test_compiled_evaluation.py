"""An evaluation compiled for one H100: the memory that it takes besides the weights."""

from __future__ import annotations

import dataclasses

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks import train as bench_train
from burst_jax.models import Experts, MixtureOfExperts, abstract_decoder
from burst_jax.training import evaluation_memory, next_token_loss

pytestmark = pytest.mark.cuda_compiler

LLAMA = dataclasses.replace(bench_train.SHAPES["llama-3-8b"], num_layers=2)
MIXTURE = dataclasses.replace(
    LLAMA, embed_dim=2048, num_heads=16, num_kv_heads=16, mlp_dim=1408,
    feed_forward=MixtureOfExperts, experts=Experts(64, 6, shared_dim=2816),
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (LLAMA, 65536),  # Gate and up projections.
        (dataclasses.replace(LLAMA, mlp_chunks=8), 65536),  # Query, key, value and output.
        (dataclasses.replace(LLAMA, mlp_chunks=8), 8192),  # The head, and logits.
        (MIXTURE, 32768),  # Six copies of each token.
    ],
    ids=["mlp", "attention", "head", "experts"],
)
def test_the_estimate_is_what_the_compiler_takes(config, tokens):
    mesh = compiled.named_mesh("h100", seq=1)
    graphdef, params = abstract_decoder(config, mesh=mesh, layout="zigzag")
    sharding = jax.NamedSharding(mesh, P(None, "seq"))

    def array(dtype):
        return jax.ShapeDtypeStruct((1, tokens), dtype, sharding=sharding)

    batch = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), array(jnp.int32))
    batch["weights"] = array(jnp.float32)

    def evaluation(batch, params):
        return next_token_loss(nnx.merge(graphdef, params), batch)

    program = compiled.compile_for(evaluation, batch, params, has_kernels=False)
    assert evaluation_memory(config, tokens) == pytest.approx(
        compiled.temp_bytes(program), rel=0.13
    )
