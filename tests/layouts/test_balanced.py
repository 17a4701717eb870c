"""Balanced documents: where tokens go, how even the work is, and what is rejected."""

from __future__ import annotations

import numpy as np
import pytest

import burst_jax
from burst_jax.layouts import RingCosts, balance, zone_sizes

# Splitting costs nothing, so that only even work matters.
FREE_RING = RingCosts(step=0, zone_token=0, send=0, tile=0)
LIMIT = 1.15


def pairs(lengths):
    lengths = np.asarray(lengths, np.int64)
    return lengths * (lengths + 1) // 2


def mixes(seed, n, c):
    """A random mix of documents for n shards of c tokens, with or without padding."""
    rng = np.random.default_rng(seed)
    total = n * c if seed % 2 else int(n * c * rng.uniform(0.9, 1))
    kind = seed % 5
    primes = [p for p in range(2, c) if all(p % q for q in range(2, int(p**0.5) + 1))]
    lengths: list[int] = []
    if kind == 1:  # One long document among short ones.
        lengths.append(int(total * rng.uniform(0.3, 0.9)))
    equal = int(rng.integers(1, c))
    while (left := total - sum(lengths)) > 0:
        length = (
            int(rng.lognormal(np.log(c / 8), 1.2)),
            int(rng.integers(1, 1 + c // 4)),
            equal,
            int(rng.integers(1, 1 + max(1, c // 50))),
            int(rng.choice(primes)),
        )[kind]
        lengths.append(min(max(length, 1), left))
    return [lengths[i] for i in rng.permutation(len(lengths))]


def shard_work(placed, lengths, n):
    """Causal pairs that each shard's queries attend to."""
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths) if len(lengths) else np.zeros(0, int)
    real = placed.order >= 0
    pairs_of = np.zeros(len(placed.order), np.int64)
    pairs_of[real] = placed.order[real] - starts[placed.order[real]] + 1
    return pairs_of.reshape(n, -1).sum(1)


def check(placed, lengths, n, c):
    """Every token once, the ordering rule, and split documents within the ring zone."""
    order, ids = placed.order.reshape(n, c), placed.segment_ids.reshape(n, c)
    assert {x.dtype for x in (order, ids, placed.positions)} == {np.dtype(np.int32)}
    total, real = sum(lengths), order >= 0
    np.testing.assert_array_equal(np.sort(order[real]), np.arange(total))
    np.testing.assert_array_equal(placed.positions, np.maximum(placed.order, 0))
    assert (real == (ids > 0)).all()
    document = np.repeat(np.arange(len(lengths)), lengths)[order[real]]
    # One id per document, from 1, and none twice.
    id_of = np.zeros(len(lengths), int)
    id_of[document] = ids[real]
    assert (id_of[document] == ids[real]).all()
    assert sorted(id_of) == list(range(1, len(lengths) + 1))
    # Padding is last, and tokens are sorted by id and position.
    assert (real[:, 1:] <= real[:, :-1]).all()
    keys = np.where(real, ids.astype(np.int64) * (n * c) + order, np.iinfo(np.int64).max)
    assert ((np.diff(keys, axis=1) > 0) | ~real[:, 1:]).all()
    shard, place = np.nonzero(real)
    on = np.unique(np.stack([document, shard]), axis=1)[0]
    split = np.flatnonzero(np.bincount(on, minlength=len(lengths)) > 1)
    assert placed.split == tuple(split)
    assert (place[np.isin(document, split)] >= c - placed.zone).all()
    assert placed.layout == f"balanced:{placed.zone}"
    # Split documents have the highest ids.
    assert sorted(id_of[split]) == list(range(len(lengths) - len(split) + 1, len(lengths) + 1))
    work = shard_work(placed, np.asarray(lengths, int), n)
    assert work.sum() == pairs(lengths).sum()
    assert placed.balance == pytest.approx(work.max() / max(work.mean(), 1e-9) if total else 1)
    x = np.arange(2 * total).reshape(2, total)
    np.testing.assert_array_equal(placed.restore(placed.place(x)), x)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_random_mixes(n):
    """Exact and even for 50 mixes of documents each."""
    for seed in range(50):
        c = (1024, 1100, 1531)[seed % 3]
        lengths = mixes(seed + 100 * n, n, c)
        even = balance(lengths, num_shards=n, tokens_per_shard=c, costs=FREE_RING)
        check(even, lengths, n, c)
        assert even.balance <= LIMIT
        again = balance(np.array(lengths), num_shards=n, tokens_per_shard=c, costs=FREE_RING)
        np.testing.assert_array_equal(again.order, even.order)
        np.testing.assert_array_equal(again.segment_ids, even.segment_ids)
        fast = balance(lengths, num_shards=n, tokens_per_shard=c)
        check(fast, lengths, n, c)
        assert fast.balance <= LIMIT or not fast.zone
        assert fast.zone in zone_sizes(c)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_local_and_ring_pairs_are_the_causal_pairs(n):
    """Each pair of a query and a key once: within a shard, or between ring zones."""
    for seed in range(6):
        c = 48
        lengths = mixes(seed, n, c)
        placed = balance(lengths, num_shards=n, tokens_per_shard=c, costs=FREE_RING)
        places = np.arange(n * c)
        shard, in_zone = places // c, places % c >= c - placed.zone
        ids, at = placed.segment_ids, placed.positions
        causal = (ids[:, None] == ids) & (ids > 0) & (at[:, None] >= at)
        local = causal & (shard[:, None] == shard)
        ring = causal & (shard[:, None] != shard) & in_zone[:, None] & in_zone
        attended = placed.restore(placed.restore(local + ring.astype(int), 0), 1)
        document = np.repeat(np.arange(len(lengths)), lengths)
        np.testing.assert_array_equal(
            attended, np.tril(document[:, None] == document).astype(attended.dtype)
        )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_one_document_is_zigzag(n):
    placed = balance([6 * n], num_shards=n, tokens_per_shard=6)
    if n > 1:
        np.testing.assert_array_equal(placed.order, burst_jax.positions("zigzag", 6 * n, n))
    assert placed.layout == ("balanced:6" if n > 1 else "balanced:0")
    assert placed.balance == 1
