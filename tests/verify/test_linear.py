"""``verify.compare`` of a model with a linear-attention layer: passes, and names its mistakes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from burst_jax import GatedDeltaNet, verify
from burst_jax.training import make_batch

B, T, D, V = 2, 32, 8, 24
SLOW = pytest.mark.slow


def packed():
    rows = np.random.default_rng(0).integers(1, V, (B, T + 1))
    ids = np.ones_like(rows)
    ids[0, 13:], ids[1, 27:] = 2, 2
    return make_batch(rows, segment_ids=ids)


class Model(nnx.Module):
    def __init__(self, rngs, segments=True, **options):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.mixer = GatedDeltaNet(D, 2, num_key_heads=1, head_dim=4, rngs=rngs, **options)
        self.segments = segments

    def __call__(self, batch):
        x, ids = self.embed(batch["inputs"]), batch["segment_ids"]
        logits = self.mix(x, ids if self.segments else None) @ self.embed.embedding[...].T
        losses = jax.nn.logsumexp(logits, -1)
        losses -= jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])

    def mix(self, x, ids):
        return x + self.mixer(x, None, ids)


class Sharded(Model):
    """Whose layer runs in a ``shard_map`` of the model."""

    def __init__(self, rngs, mesh, **options):
        super().__init__(rngs, **options)
        self.mesh = mesh

    def mix(self, x, ids):
        tokens = P("data", "seq")
        run = jax.shard_map(
            lambda mixer, x, ids: mixer(x, None, ids), mesh=self.mesh,
            in_specs=(P(), tokens, tokens), out_specs=tokens,
        )  # fmt: skip
        return x + run(self.mixer, x, ids)


def compared(model: Any = Model, gradients=False, forgets=(), **wrong):
    def make_loss(mesh, layout):
        options = {"mesh": mesh, "layout": layout, "batch_axis": "data"} | wrong
        options = {name: x for name, x in options.items() if name not in forgets}
        made = nnx.eval_shape(lambda: model(nnx.Rngs(0), **options))
        return lambda params, batch: nnx.merge(nnx.split(made)[0], params)(batch)

    params = nnx.state(jax.jit(lambda: nnx.split(Model(nnx.Rngs(0))))()[1])
    mesh = mesh_of(data=2, seq=2)
    with jax.numpy_dtype_promotion("standard"):
        return verify.compare(
            make_loss, params, packed(), mesh=mesh, layout="zigzag", gradients=gradients
        )


@SLOW
def test_a_right_model_passes_against_float64():
    report = compared(gradients=True)
    assert report.passed, report
    assert report.reference == "float64"
    assert all(group.mesh < 1e-5 for group in report.gradients)


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"forgets": ("layout", "batch_axis")},
         ["short_convolution call 1 of 3 (test_linear.py:LINE) has "
          "layout='contiguous', but its tokens are in the zigzag layout: pass layout='zigzag'",
          "the batch is replicated over mesh axis 'data': in all 4 linear attention calls all 2 "
          "devices along it compute the same; pass batch_axis='data'"]),
        pytest.param({"seq_axis": None},
         ["short_convolution call 1 of 3 (test_linear.py:LINE) has "
          "seq_axis=None, so it runs as if its tokens were in natural order"], marks=SLOW),
        pytest.param({"model": Sharded, "seq_axis": None},
         ["short_convolution call 1 of 3 (test_linear.py:LINE) has no axis_name, so it runs over "
          "the tokens of its own device only; pass axis_name"], marks=SLOW),
    ],
)  # fmt: skip
def test_mistakes_are_named(given, messages):
    report = compared(**given)
    assert not report.passed
    for message in messages:
        pattern = re.escape(message).replace("LINE", r"\d+")
        assert any(re.search(pattern, problem) for problem in report.problems), report.problems
