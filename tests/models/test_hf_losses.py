"""Steps of fine-tuning hybrid models of Hugging Face folders, against transformers' losses."""

from __future__ import annotations

import dataclasses

import hf_models
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hf_models import RATE, STEPS, TRAINED, TRAINED_SPLIT
from meshes import mesh_of

from burst_jax import ShardingRules
from burst_jax.models import abstract_decoder, load
from burst_jax.training import init_train_state, make_batch, make_train_step, place_batch


def losses(folder, name, sizes, layout, program, **changes):
    """Of the steps in the model's file, by plain gradient descent."""
    mesh, row = mesh_of(**sizes), hf_models.row(name)
    rules = ShardingRules.of(mesh)
    model = load(folder, mesh=mesh, rules=rules, layout=layout, dtype=jnp.float32)
    config = dataclasses.replace(model.config, **changes)
    graphdef, _ = abstract_decoder(config, **model.arguments)
    optimizer, found = optax.sgd(RATE), []
    _, params, state = init_train_state(
        config, optimizer, mesh, 0, rules=rules, params=nnx.state(model)
    )
    step = program(make_train_step(graphdef, optimizer, chunk_size=32))
    segments = np.ones((2, TRAINED), np.int32)
    segments[1, TRAINED_SPLIT:] = 2
    for number in range(STEPS):
        batch = make_batch(
            np.tile(row[number : number + TRAINED], (2, 1)), layout=layout,
            num_shards=mesh.shape["seq"], segment_ids=segments, linear_attention=True,
        )  # fmt: skip
        placed = place_batch(batch, mesh, batch_axis=rules.batch_axes or None, seq_axis="seq")
        params, state, metrics = step(params, state, placed)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "layout", "changes"),
    [
        # The other families differ from these in what a file's tensors are, which logits show
        # (test_hf_models.py), and Olmo Hybrid in norms after the layers, which test_delta_net.py
        # has.
        ("qwen3_5_moe", {"stage": 2, "seq": 2}, "zigzag", {"remat": "selective"}),
        ("kimi_linear", {"expert": 2, "seq": 2}, "balanced:50", {}),
    ],
)
def test_losses_of_fine_tuning_are_those_of_transformers(
    tmp_path, name, sizes, layout, changes, program
):
    folder = hf_models.write_folder(name, tmp_path)
    found = losses(folder, name, sizes, layout, program, **changes)
    want = hf_models.golden(name)["losses"]
    # float32 on both sides, whose roundings steps as large as these amplify.
    np.testing.assert_allclose(found, want, rtol=5e-5)
    assert want[0] > 1.05 * want[-1]
