"""Batches: shifted, padded and permuted on the host, sharded onto a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import mesh_of

from burst_jax import ShardingRules
from burst_jax.layouts.permutation import from_layout, positions
from burst_jax.models import Decoder, DecoderConfig
from burst_jax.training import (
    make_batch,
    next_token_log_probs,
    next_token_loss,
    place_batch,
    rows_here,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_targets_are_shifted_before_the_permutation(layout, num_shards):
    rows = RNG.integers(0, 1000, (2, 25))
    batch = make_batch(rows, layout=layout, num_shards=num_shards)
    order = batch["positions"][0]
    np.testing.assert_array_equal(order, positions(layout, 24, num_shards))
    np.testing.assert_array_equal(batch["inputs"], rows[:, order])
    np.testing.assert_array_equal(batch["targets"], rows[:, order + 1])
    assert batch["segment_ids"] is None
    assert batch["weights"].all()
    assert {batch[k].dtype for k in ("inputs", "targets", "positions")} == {np.dtype(np.int32)}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_padding_and_ends_of_documents_have_weight_0(dtype):
    rows = RNG.integers(0, 1000, (2, 14))
    segments = np.ones((2, 14), dtype)
    segments[0, 5:], segments[1, 9:] = 2, 0
    batch = make_batch(rows, layout="zigzag", num_shards=4, segment_ids=segments)
    natural = from_layout(batch, "zigzag", 4)
    assert natural["segment_ids"] is not None
    assert natural["segment_ids"].dtype == np.int32
    assert natural["inputs"].shape == (2, 16)
    np.testing.assert_array_equal(natural["inputs"][:, :13], rows[:, :-1])
    np.testing.assert_array_equal(natural["targets"][:, :13], rows[:, 1:])
    np.testing.assert_array_equal(natural["segment_ids"][:, :13], segments[:, :13])
    assert not natural["segment_ids"][:, 13:].any()
    weights = np.ones((2, 16), np.float32)
    weights[:, 13:], weights[0, 4], weights[1, 8:] = 0, 0, 0
    np.testing.assert_array_equal(natural["weights"], weights)


def test_padding_alone_makes_segment_ids():
    batch = make_batch(RNG.integers(0, 9, (1, 6)), layout="striped", num_shards=4)
    natural = from_layout(batch, "striped", 4)
    np.testing.assert_array_equal(natural["segment_ids"], [[1] * 5 + [0] * 3])
    np.testing.assert_array_equal(natural["weights"], natural["segment_ids"])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_weights_by_target(layout):
    """Each from its definition, token by token, for prefixes, documents and given weights."""
    rng = np.random.default_rng(3)
    rows, given = rng.integers(0, 9, (6, 13)), rng.uniform(1, 2, (6, 13)).astype(np.float32)
    prefixes = np.array([0, 1, 2, 7, 12, 13])
    ids = np.sort(rng.integers(1, 4, (6, 13)), 1)
    ids[2, 10:] = 0
    want = np.zeros((6, 12), np.float32)
    for row, column in np.ndindex(6, 12):
        target = column + 1
        in_document = ids[row, column] == ids[row, target] != 0
        if in_document and target >= prefixes[row]:  # Not one of the first tokens.
            want[row, column] = given[row, target]
    batch = make_batch(
        rows, layout=layout, num_shards=2, weights=given, prefix_lengths=prefixes, segment_ids=ids
    )
    np.testing.assert_array_equal(from_layout(batch["weights"], layout, 2), want)


@pytest.mark.slow
def test_prefixes_and_weights():
    """A target in the prefix has no weight, because its input attends to it."""
    rows, given = RNG.integers(0, 9, (2, 9)), RNG.uniform(1, 2, (2, 9))
    batch = make_batch(
        rows, layout="zigzag", num_shards=2, weights=given, prefix_lengths=np.array([4, 0])
    )
    want = given[:, 1:].astype(np.float32)
    want[0, :3] = 0
    np.testing.assert_array_equal(from_layout(batch["weights"], "zigzag", 2), want)
    np.testing.assert_array_equal(batch["prefix_lengths"], [4, 0])
    mesh = mesh_of(data=2, seq=2)
    placed = place_batch(batch, mesh, batch_axis="data")
    assert {s.data.shape for s in placed["prefix_lengths"].addressable_shards} == {(1,)}
    config = DecoderConfig(
        vocab_size=9, num_layers=2, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=8
    )

    def loss(mesh, batch, **options):
        model = Decoder(config, mesh=mesh, rngs=nnx.Rngs(0), **options)
        # Large weights: the second layer then depends on what the first attends to.
        nnx.update(model, jax.tree.map(lambda x: 10 * x, nnx.state(model)))

        @nnx.jit
        def both(model, batch):
            log_probs, _ = next_token_log_probs(model, batch)
            return next_token_loss(model, batch)[0], -jnp.sum(batch["weights"] * log_probs)

        total, of_tokens = both(model, batch)
        np.testing.assert_allclose(of_tokens, total, rtol=1e-6)
        return float(total)

    natural = from_layout({k: v for k, v in batch.items() if k != "prefix_lengths"}, "zigzag", 2)
    one = [natural | {"prefix_lengths": x} for x in (batch["prefix_lengths"], None)]
    got = loss(mesh, placed, batch_axis="data", layout="zigzag")
    want, causal = (loss(mesh_of(seq=1), x) for x in one)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert abs(got - causal) > 1e-2
    mistakes: list[tuple[Any, str]] = [
        ({"weights": given[:, 1:]}, r"weights has shape \(2, 8\) .*: it needs one number per tok"),
        ({"weights": -given}, "weights holds a number that is negative or not finite"),
        ({"prefix_lengths": np.array([-5, 1])}, "prefix_lengths holds -5: a prefix has 0 tokens"),
        ({"prefix_lengths": rows}, r"prefix_lengths has shape \(2, 9\): it must be \[B\], \(2,\)"),
    ]
    for wrong, message in mistakes:
        with pytest.raises(ValueError, match=message):
            make_batch(rows, **wrong)
    with pytest.raises(ValueError, match=r"rows has shape \(0, 9\): .* with B and T at least 1"):
        make_batch(rows[:0])
    with pytest.raises(ValueError, match=r"shapes \[\(2, 8\), \(3,\)\]: they must all have one"):
        place_batch(batch | {"prefix_lengths": np.zeros(3, np.int32)}, mesh)


@pytest.mark.parametrize(
    ("sizes", "options", "shard"),
    [
        ({"data": 2, "seq": 4}, {"batch_axis": "data"}, (2, 4)),
        ({"data": 2, "seq": 4}, {"batch_axis": "data", "process_local": True}, (2, 4)),
        ({"fsdp": 2, "tensor": 2}, {"rules": True}, (2, 16)),
        ({"data": 2, "fsdp": 2, "seq": 2}, {"rules": True}, (1, 8)),
    ],
    ids=["axes", "process-local", "rules-without-seq", "rules"],
)
def test_each_device_gets_only_its_own_tokens(sizes, options, shard):
    mesh = mesh_of(**sizes)
    if "rules" in options:
        options = {"rules": ShardingRules.of(mesh)}
        assert rows_here(mesh, 4, **options) == [0, 1, 2, 3]
    rows, seq = RNG.integers(0, 9, (4, 17)), sizes.get("seq", 1)
    batch = make_batch(rows, layout="zigzag", num_shards=seq)
    placed = place_batch(batch, mesh, **options)
    assert placed["segment_ids"] is None
    for name in ("inputs", "targets", "positions", "weights"):
        np.testing.assert_array_equal(placed[name], batch[name])
        shards = placed[name].addressable_shards
        assert {each.data.shape for each in shards} == {shard}
        assert len({str(each.index) for each in shards}) == 64 // shard[0] // shard[1]
