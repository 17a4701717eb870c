"""Batches in a balanced layout, and a decoder's loss and gradients on them."""

from __future__ import annotations

import functools
from typing import Any, cast

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from meshes import mesh_of

from burst_jax import ShardingRules
from burst_jax.layouts import balanced
from burst_jax.models import DecoderConfig, LayerKind
from burst_jax.training import (
    batches,
    make_batch,
    make_train_step,
    next_token_loss,
    place_batch,
)

RNG = np.random.default_rng(0)
LENGTH = 60
ROWS = RNG.integers(1, 97, (4, LENGTH + 1))
# A long document with padding inside, single tokens, and an id that comes twice; padding alone;
# short documents; a long one among short ones.
SEGMENTS = np.zeros((4, LENGTH + 1), np.int64)
SEGMENTS[0, :20], SEGMENTS[0, 25:35], SEGMENTS[0, [36, 40, 60]] = 7, 7, [2, 9, 4]
SEGMENTS[0, 45:50], SEGMENTS[0, 50:55], SEGMENTS[0, 55:58] = 3, 5, 3
SEGMENTS[2] = np.repeat(np.arange(1, 16), RNG.multinomial(LENGTH - 14, np.full(15, 1 / 15)) + 1)
SEGMENTS[3] = np.repeat(np.arange(1, 11), [2, 40, 3, 3, 3, 3, 3, 1, 1, 2])


@pytest.mark.parametrize("multiple_of", [1, 8])
@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_a_batch_has_each_token_of_a_document_once_with_its_target(num_shards, multiple_of):
    options = {"num_shards": num_shards, "multiple_of": multiple_of}
    weights = RNG.uniform(1, 2, ROWS.shape)
    given: Any = {"segment_ids": SEGMENTS, "weights": weights, **options}
    layout, batch = cast("Any", make_batch(ROWS, layout="balanced", **given))
    natural: Any = make_batch(ROWS, layout="contiguous", **given)
    length = -(-LENGTH // np.lcm(num_shards, multiple_of)) * np.lcm(num_shards, multiple_of)
    batch.pop("document_tables")
    assert {x.shape for x in batch.values()} == {(4, length)}
    for row, ids in enumerate(batch["segment_ids"]):
        places = np.flatnonzero(ids)
        order = batch["positions"][row, places]
        np.testing.assert_array_equal(np.sort(order), np.flatnonzero(SEGMENTS[row, :-1]))
        for name in ("inputs", "targets", "weights"):
            assert batch[name].dtype == natural[name].dtype
            np.testing.assert_array_equal(batch[name][row, places], natural[name][row, order])
            assert not batch[name][row, ids == 0].any()
        # The same tokens are in one document.
        of_document = {(ids[i], SEGMENTS[row, at]) for i, at in zip(places, order, strict=True)}
        assert len({a for a, _ in of_document}) == len({b for _, b in of_document})
        assert len(of_document) == len({a for a, _ in of_document})
        for shard in np.split(ids, num_shards):
            used = shard[shard != 0]
            assert (np.diff(used) >= 0).all()
            assert not shard[len(used) :].any()
    of_zone: Any = make_batch(ROWS, layout=layout, **given)
    for name, x in batch.items():
        np.testing.assert_array_equal(x, of_zone[name])
    whole = make_batch(ROWS, layout=f"balanced:{length // num_shards}", **options)
    assert (
        np.sort(whole["positions"], 1).tolist() == [[0] * (length - LENGTH) + [*range(LENGTH)]] * 4
    )


def test_documents_are_searched_once(monkeypatch):
    """But those of a sequence for which another one, or another process, has a larger zone."""
    searched, search = [], balanced.search

    def count(lengths, n, c, allowed, costs, zone):
        searched.append((sum(lengths), zone))
        return search(lengths, n, c, allowed, costs, zone)

    monkeypatch.setattr(balanced, "search", count)
    options: Any = {"layout": "balanced", "num_shards": 3, "segment_ids": SEGMENTS[2:3]}
    (layout, _), (first,) = make_batch(ROWS[2:3], **options), searched
    assert (layout, first) == ("balanced:0", (60, None))
    asked = []
    monkeypatch.setattr(batches, "gather_json", lambda own: asked.append(own) or [own, 18])
    searched.clear()
    layout, batch = make_batch(ROWS[2:3], process_local=True, **options)
    assert (layout, asked, searched) == ("balanced:18", [0], [(60, None), (60, 18)])
    own: Any = make_batch(ROWS[2:3], **options | {"layout": "balanced:18"}, process_local=True)
    assert asked == [0]
    np.testing.assert_array_equal(own["positions"], batch["positions"])


def decoder(mesh, layout, **options):
    """A decoder with fixed weights, and a batch of these sequences for it on its mesh."""
    config = DecoderConfig(
        vocab_size=97, num_layers=2, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=16,
        layer_pattern=(LayerKind(window=9),),
    )  # fmt: skip
    model = decoders.with_drawn_weights(config, mesh=mesh, layout=layout, **options)
    # Large weights: the second layer then depends on what the first attends to.
    nnx.update(model, jax.tree.map(lambda x: 2 * x, nnx.state(model)))
    given: Any = {"segment_ids": SEGMENTS, "local_window_sizes": config.local_window_sizes}
    batch = make_batch(ROWS, layout=layout, num_shards=mesh.shape["seq"], **given)
    return nnx.split(model), place_batch(batch, mesh, **options)


def loss_and_gradients(mesh, layout, **options):
    """The sum of losses, the number of targets, and the gradients of a decoder."""
    (graphdef, params), batch = decoder(mesh, layout, **options)

    def loss(params, batch):
        return next_token_loss(nnx.merge(graphdef, params), batch)

    of_batch = quick_jit(jax.value_and_grad(loss, has_aux=True))
    return [np.asarray(x) for x in jax.tree.leaves(of_batch(params, batch))]


@functools.cache
def on_one_device():
    """:func:`loss_and_gradients` in natural order."""
    return loss_and_gradients(mesh_of(seq=1), "contiguous")


def test_a_decoder_computes_what_one_device_does():
    """Loss and gradients, with other documents in each sequence and each data-parallel group."""
    got = loss_and_gradients(mesh_of(data=2, seq=3), "balanced:18", batch_axis="data")
    for own, of_one in zip(got, on_one_device(), strict=True):
        assert np.linalg.norm(own - of_one) < 1e-5 * np.linalg.norm(of_one)


@pytest.mark.slow
def test_a_pipeline_that_accumulates_passes_tables_on(program):
    """To every layer of each stage, with each slice of the batch."""
    mesh, optimizer = mesh_of(AxisType.Explicit, stage=2, seq=2), optax.sgd(0.0)
    rules = ShardingRules.of(mesh)
    (graphdef, params), batch = decoder(mesh, "balanced:30", rules=rules)
    step = program(make_train_step(graphdef, optimizer, accumulate=2))
    params, state, metrics = step(params, optimizer.init(params), batch)
    loss, count, *gradients = on_one_device()
    norm = np.sqrt(sum(np.sum(x.astype(float) ** 2) for x in gradients)) / count
    for name, expected in (("loss", loss / count), ("grad_norm", norm)):
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-5)
    tables = jax.tree.map(lambda x: jnp.roll(x, 1, 0), batch["document_tables"])
    metrics = step(params, state, {**batch, "document_tables": tables})[2]
    assert np.isnan(metrics["loss"])


def test_mistakes_raise():
    def make(**options):
        return make_batch(ROWS, num_shards=4, segment_ids=SEGMENTS, **options)

    with pytest.raises(
        ValueError,
        match=r"layout is .balanced:0., whose gathered zone is too small .* use .balanced:15., "
        r"or better layout='balanced', with which make_batch returns",
    ):
        make(layout="balanced:0")
    with pytest.raises(ValueError, match="layout is 'balanced:99', and a shard has 15 tokens"):
        make(layout="balanced:99")
    with pytest.raises(NotImplementedError, match="prefix_lengths is given with layout 'balanced"):
        make(layout="balanced:15", prefix_lengths=np.zeros(4, np.int32))
    with pytest.raises(ValueError, match=r"segment_ids has shape \(2, 61\), rows \(4, 61\)"):
        make_batch(ROWS, layout="balanced", num_shards=4, segment_ids=SEGMENTS[:2])
