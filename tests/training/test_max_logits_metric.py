"""The largest logits of a decoder's layers as a metric of training, against NumPy in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import decoders
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import make_mesh
from split_runs import ROWS, SEGMENTS, SMALL, rules_of, sized

from burst_jax.models import DecoderConfig, DeltaNet, LayerKind, abstract_decoder
from burst_jax.ring.max_logits import shard_max_logits
from burst_jax.training import init_train_state, make_batch, make_train_step, place_batch

# A norm of queries would undo what makes their logits large.
PLAIN = dataclasses.replace(SMALL, qk_norm=False)
HEAD_DIM, GROUPS = PLAIN.head_dim, PLAIN.num_heads // PLAIN.num_kv_heads


def weights_of(config: DecoderConfig) -> Any:
    """Drawn weights whose second head has large logits, more so in the second layer."""
    weights = jax.device_get(decoders.drawn(abstract_decoder(config)[1]))
    kernel = weights["layers"]["attention"]["query"]["kernel"]
    sharper = np.array([[1, 30], [3, 90]], np.float32)[: len(kernel[...]), None, :, None]
    kernel.set_value(sharper * kernel[...])
    return weights


def largest_logits(weights: Any) -> np.ndarray:
    """float64 ``[L, N]`` of :data:`ROWS`."""
    params = jax.tree.map(np.float64, nnx.to_pure_dict(weights))
    ids, tokens = SEGMENTS[:, :-1], ROWS[:, :-1]
    at = np.arange(ids.shape[1])
    seen = (at[:, None] >= at) & (ids[:, :, None] == ids[:, None]) & (ids[:, None] != 0)

    def normed(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale["scale"]

    def rotated(x):
        angles = at[:, None, None] / PLAIN.rope_theta ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        first, second = np.split(x, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x, found = params["embedding"][tokens], []
    for index in range(PLAIN.num_layers):
        layer: Any = jax.tree.map(lambda w, index=index: w[index], params["layers"])
        own, y = layer["attention"], normed(x, layer["attention_norm"])
        q, k, v = (
            np.einsum("btd,dnh->btnh", y, own[name]["kernel"]) for name in ("query", "key", "value")
        )
        q, k, v = rotated(q), rotated(k).repeat(GROUPS, 2), v.repeat(GROUPS, 2)
        logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(HEAD_DIM)
        logits = np.where(seen[:, None], logits, -np.inf)
        found.append(logits.max((0, 2, 3)))
        p = np.where(seen[:, None], np.exp(logits - found[-1][:, None, None]), 0)
        p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
        x = x + np.einsum("bnts,bsnh,nhd->btd", p, v, own["out"]["kernel"])
        y, mlp = normed(x, layer["mlp_norm"]), layer["mlp"]
        gate, up = y @ mlp["gate"]["kernel"], y @ mlp["up"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ mlp["down"]["kernel"]
    return np.array(found)


@pytest.fixture(autouse=True)
def all_rows(monkeypatch):
    """Of every query the logits are computed again: both bounds are the largest logit."""
    monkeypatch.setattr(shard_max_logits, "__defaults__", (ROWS.shape[1],))


def check(found: Any, want: np.ndarray) -> None:
    """Both are the largest logits."""
    assert [x.shape for x in found] == [want.shape] * 2
    np.testing.assert_allclose(found.lower, want, rtol=1e-4)
    np.testing.assert_array_equal(found.lower, found.upper)


@pytest.mark.parametrize(
    ("sizes", "accumulate", "remat"),
    [
        pytest.param((1, 1, 1, 2, 2), 2, "attention", id="accumulated-seq2-tensor2"),
        pytest.param((2, 1, 1, 2, 1), 1, "half", id="half-data2-seq2"),
        pytest.param((1, 2, 1, 2, 1), 1, "full", id="full-fsdp2-seq2"),
    ],
)
@pytest.mark.slow  # a training step to compile; the pipeline below is quick
def test_a_step_on_four_devices_returns_them(sizes, accumulate, remat, program):
    config = dataclasses.replace(PLAIN, remat=remat)
    mesh, sgd, weights = sized(sizes), optax.sgd(0.1), weights_of(config)
    rules = rules_of(mesh)
    graphdef, params, state = init_train_state(
        config, sgd, mesh, 0, rules=rules, layout="zigzag", params=weights
    )
    step = program(make_train_step(graphdef, sgd, accumulate=accumulate, max_logits=True))
    batch = make_batch(ROWS, layout="zigzag", num_shards=2, segment_ids=SEGMENTS)
    _, _, metrics = step(params, state, place_batch(batch, mesh, rules=rules))
    check(metrics["max_logits"], largest_logits(weights))


@pytest.mark.parametrize(
    "hybrid",
    [pytest.param(False, id="pipeline"), pytest.param(True, id="hybrid", marks=pytest.mark.slow)],
)
def test_a_pipeline_and_a_hybrid_have_those_of_their_softmax_layers(hybrid, program):
    config, mesh = PLAIN, make_mesh(1, 2)
    options: Any = {"mesh": mesh}
    if hybrid:
        # The first layer has softmax attention, so its logits are those of the first layer.
        kinds = LayerKind(), LayerKind(mixer="delta_net")
        config = dataclasses.replace(
            PLAIN, layer_pattern=kinds, delta_net=DeltaNet(num_heads=2, head_dim=8)
        )
    else:
        mesh = sized((1, 1, 2, 2, 1))
        options = {"mesh": mesh, "rules": rules_of(mesh)}
    graphdef, _ = abstract_decoder(config, layout="zigzag", **options)
    weights = weights_of(config)
    batch = make_batch(ROWS, layout="zigzag", num_shards=2, segment_ids=SEGMENTS)

    @program
    def run(weights):
        given = (batch[name] for name in ("inputs", "positions", "segment_ids"))
        return nnx.merge(graphdef, weights).with_auxiliary(*given, max_logits=True)[1].max_logits

    whole = weights_of(PLAIN)
    if hybrid:
        # The same first layer and embedding.
        of_first = jax.tree.map(lambda w: w[:1], whole["layers"])
        nnx.update(weights, {"layers": of_first, "embedding": whole["embedding"]})
    want = largest_logits(whole)
    check(run(weights), want[:1] if hybrid else want)


def test_another_type_raises():
    with pytest.raises(ValueError, match="max_logits is 1"):
        make_train_step(abstract_decoder(PLAIN, mesh=make_mesh())[0], optax.sgd(1), max_logits=1)  # pyrefly: ignore
