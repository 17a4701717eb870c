"""Evaluation and serving at 8K tokens per device, traced for both GPU families.

What JAX rejects, it rejects while it traces; only decoding, which is cheap, is lowered, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lowered_programs import GPUS, a_shape, abstract_mesh, compiling_for, for_gpu
from meshes import mesh_of

from burst_jax import ShardingRules
from burst_jax.models import DecoderConfig, DeltaNet, LayerKind, abstract_decoder
from burst_jax.serving import Generator
from burst_jax.serving.cache import PromptPosition
from burst_jax.training import make_eval_step

pytestmark = pytest.mark.every_jax

TOKENS, DEVICES = 8192, 2
CONFIG = DecoderConfig(
    vocab_size=512, num_layers=1, embed_dim=256, num_heads=8, num_kv_heads=2, head_dim=128,
    mlp_dim=512, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
)  # fmt: skip
HYBRID = dataclasses.replace(
    CONFIG, num_layers=2, layer_pattern=(LayerKind(mixer="delta_net"), LayerKind()),
    delta_net=DeltaNet(num_heads=4, num_key_heads=2, head_dim=128, value_head_dim=128),
)  # fmt: skip
RULES = ShardingRules(data=None, fsdp=None, seq="seq", tensor=None)


@pytest.mark.parametrize("gpu", GPUS)
def test_an_evaluation_of_packed_documents(gpu):
    mesh = abstract_mesh(gpu, {"seq": DEVICES})
    graphdef, params = abstract_decoder(CONFIG, mesh=mesh, rules=RULES, layout="zigzag")
    names = ("inputs", "targets", "positions", "segment_ids")
    batch = {
        name: a_shape(mesh, (1, DEVICES * TOKENS), dtype, None, "seq")
        for name, dtype in (dict.fromkeys(names, jnp.int32) | {"weights": jnp.float32}).items()
    }
    for_gpu(gpu, mesh, make_eval_step(graphdef), params, batch, lowers=False)


@pytest.fixture(scope="module", params=[CONFIG, HYBRID], ids=["attention", "hybrid"])
def served(request):
    """The programs of a generator, and the shape of its cache."""
    mesh = mesh_of(seq=DEVICES)
    graphdef, shapes = abstract_decoder(request.param, mesh=mesh, rules=RULES, layout="zigzag")
    place = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)  # noqa: E731
    model = nnx.merge(graphdef, jax.tree.map(place, shapes))
    server: Any = Generator(model, max_length=DEVICES * TOKENS)
    return server._steps, server._cache


@pytest.mark.parametrize("program", ["prefill", "decode"])
@pytest.mark.parametrize("gpu", GPUS)
def test_serving(gpu, program, served, monkeypatch):
    """The programs of a cache on devices that are here, on a mesh of GPUs that are not."""
    steps, cache = served
    mesh = abstract_mesh(gpu, {"seq": DEVICES})
    monkeypatch.setattr(steps, "mesh", mesh)

    def array(*shape, spec=()):
        return a_shape(mesh, shape, jnp.int32, *spec)

    def placed(x):
        return a_shape(mesh, x.shape, x.dtype, *x.sharding.spec)

    weights, cache = jax.tree.map(placed, (steps.model.leaves, cache))
    if program == "prefill":
        length, reach = TOKENS // 2 * DEVICES, TOKENS  # After an earlier chunk.
        rows = (array(1, length, spec=(None, "seq")),) * 2
        position = PromptPosition(*[array()] * 3)
        given = reach, weights, cache, *rows, array(length, spec=("seq",)), position
    else:
        given = weights, cache, array(1), array(5)
    with jax.sharding.use_abstract_mesh(mesh), compiling_for(gpu):
        traced = getattr(steps, program).trace(*given)
        if program == "decode":
            assert "burst_decode" in traced.lower(lowering_platforms=("cuda",)).as_text()
