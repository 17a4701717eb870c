"""What is right and wastes devices: whole sequences, and whole batches under ``jax.vmap``."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from own_model import packed

import burst_jax
from burst_jax import verify

VOCABULARY, FEATURES = 512, 16


@pytest.fixture(autouse=True)
def as_in_a_program_of_a_user():
    with jax.numpy_dtype_promotion("standard"):
        yield


def attend(x, mesh, layout, batch_axis):
    heads = x.reshape(*x.shape[:2], 2, -1)
    return burst_jax.burst_attention(
        heads, heads, heads, mesh=mesh, batch_axis=batch_axis, layout=layout, is_causal=True
    ).reshape(x.shape)


def compared(make_loss, **shardings):
    mesh = mesh_of(AxisType.Auto, data=2, seq=2)
    table = np.random.default_rng(0).normal(size=(VOCABULARY, FEATURES)).astype(np.float32)
    params = {
        "table": jax.device_put(table, NamedSharding(mesh, shardings.get("table", P()))),
        "weight": table[:FEATURES],
    }
    return verify.compare(
        make_loss, params, packed(), mesh=mesh, layout="zigzag", batch_axis="data",
        gradients=False,
    )  # fmt: skip


def tied(constrained):
    """A model whose head is its embedding."""

    def make_loss(mesh, layout):
        def tokens(x):
            sharding = NamedSharding(mesh, P("data", "seq"))
            return jax.lax.with_sharding_constraint(x, sharding) if constrained else x

        def loss(params, batch):
            x = tokens(jnp.take(params["table"], batch["inputs"], axis=0))
            x = x + attend(x @ params["weight"], mesh, layout, "data") @ params["weight"]
            logits = tokens(x @ params["table"].T)
            return jnp.mean(jax.nn.logsumexp(logits, -1) * batch["weights"])

        return loss

    return make_loss


@pytest.mark.parametrize(
    ("table", "first"),
    [
        (P("seq"), r"dot_general at test_placement\.py:\d+, \[2, 64, 512\]"),
        (P(None, "seq"), r"gather at test_placement\.py:\d+, \[2, 64, 16\]"),
    ],
    ids=["vocabulary", "features"],
)
def test_activations_that_follow_a_weight_are_found(table, first):
    report = compared(tied(constrained=False), table=table)
    (problem,) = report.problems
    assert re.match(
        r"\d+ of \d+ activations \[B, T, ...\] have whole sequences on each device, although mesh "
        rf"axis 'seq' shards the tokens: first the result of {first}, sharded as .*'seq'\)\. XLA "
        "follows a weight .*: constrain that result",
        problem,
    ), problem
    # Nothing else is wrong.
    assert report.loss.passed


@pytest.mark.parametrize(
    ("constrained", "table"), [(True, P("seq")), (True, P(None, "seq")), (False, P())]
)
def test_tokens_that_stay_sharded_are_no_problem(constrained, table):
    report = compared(tied(constrained), table=table)
    assert report.passed, report.problems


def test_layers_of_one_line_that_differ_in_their_axes():
    def make_loss(mesh, layout):
        def loss(params, batch):
            x = params["table"][batch["inputs"]]
            for batch_axis in (None, "data"):
                x = x + attend(x, mesh, layout, batch_axis)
            return jnp.mean(jnp.sum(x**2, -1) * batch["weights"])

        return loss

    (problem,) = compared(make_loss).problems
    line = r"in attention call 1 of 2 \(test_placement\.py:\d+\) all 2 devices along it compute the"
    assert re.search(rf"{line} same; pass batch_axis='data'", problem)


@pytest.mark.parametrize("name", [None, "data"])
def test_examples_under_vmap_need_the_name_of_their_axis(name):
    def make_loss(mesh, layout):
        def one(x):
            return attend(x[None], mesh, layout, None)[0]

        def loss(params, batch):
            x = params["table"][batch["inputs"]]
            out = jax.vmap(one, spmd_axis_name=name)(x)
            return jnp.mean(jnp.sum(out**2, -1) * batch["weights"])

        return loss

    report = compared(make_loss)
    assert report.loss.passed
    if name is not None:
        assert report.passed, report.problems
        return
    (problem,) = report.problems
    assert re.fullmatch(
        r"the batch is replicated over mesh axis 'data': in attention call 1 of 1 \(test_placement"
        r"\.py:\d+\) all 2 devices along it compute the same; it is under jax\.vmap, which keeps "
        r"all examples on each device: pass spmd_axis_name='data' to that jax\.vmap",
        problem,
    )
    assert report.replicated == ("data",)
