"""Balanced documents: where tokens go, how even the work is, and what is rejected."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import burst_jax
from burst_jax.layouts import RingCosts, balance, balance_batch, zone_sizes
from burst_jax.layouts.document_search import cut

# Splitting costs nothing, so that only even work matters.
FREE_RING = RingCosts(zone=0, zone_token=0, gathered_token=0, send=0, tile=0)
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
    """Every token once, the ordering rule, and split documents within the gathered zone."""
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
    on = np.unique(document * n + shard) // n
    split = np.flatnonzero(np.bincount(on, minlength=len(lengths)) > 1)
    assert placed.split == tuple(split)
    assert (place[np.isin(document, split)] >= c - placed.zone).all()
    assert placed.layout == f"balanced:{placed.zone}"
    # Whole documents come longest first: a GPU idles least if its last tiles are short ones.
    sizes = np.zeros(len(lengths) + 1, np.int64)
    sizes[id_of] = np.asarray(lengths, np.int64)
    for row in ids:
        (whole,) = np.nonzero((row > 0) & (row <= len(lengths) - len(split)))
        assert (np.diff(sizes[row[whole]]) <= 0).all()
    # Split documents have the highest ids.
    assert sorted(id_of[split]) == list(range(len(lengths) - len(split) + 1, len(lengths) + 1))
    work = shard_work(placed, np.asarray(lengths, int), n)
    assert work.sum() == pairs(lengths).sum()
    assert placed.balance == pytest.approx(work.max() / max(work.mean(), 1e-9) if total else 1)
    x = np.arange(2 * total).reshape(2, total)
    np.testing.assert_array_equal(placed.restore(placed.place(x)), x)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_random_mixes(n):
    """Exact for 50 mixes each, and even to 2 % where only work matters."""
    for seed in range(50):
        c = (1024, 1100, 1531)[seed % 3]
        lengths = mixes(seed + 100 * n, n, c)
        even = balance(lengths, num_shards=n, tokens_per_shard=c, costs=FREE_RING)
        check(even, lengths, n, c)
        assert even.balance <= 1.02
        fast = balance(lengths, num_shards=n, tokens_per_shard=c)
        check(fast, lengths, n, c)
        assert fast.balance <= LIMIT or not fast.zone
        assert fast.zone in zone_sizes(c)
        if seed < 5:
            again = balance(np.array(lengths), num_shards=n, tokens_per_shard=c)
            np.testing.assert_array_equal(again.order, fast.order)
            np.testing.assert_array_equal(again.segment_ids, fast.segment_ids)
            # A zone larger than needed.
            large = next(zone for zone in zone_sizes(c) if zone > fast.zone or zone == c)
            placed = balance(lengths, num_shards=n, tokens_per_shard=c, zone=large)
            check(placed, lengths, n, c)
            assert placed.zone == large


@pytest.mark.parametrize("surplus", [0, 300_000])
def test_a_cut_gives_each_shard_the_wanted_work(surplus):
    """Tokens and work of the shards differ; a surplus that nobody can have is shared."""
    length, tokens, more = 6000, (1000, 2000, 3000), (1_000_000, -1_500_000, 500_000)
    wanted = [t * (length + 1) // 2 + m for t, m in zip(tokens, more, strict=True)]
    pieces = cut(7, length, [4, 5, 6], tokens, [work + surplus for work in wanted])
    assert {piece.document for piece in pieces} == {7}
    by_shard = {piece.shard: piece for piece in pieces}
    for shard, t, work in zip((4, 5, 6), tokens, wanted, strict=True):
        assert by_shard[shard].tokens == t
        assert abs(by_shard[shard].work - work) < length


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_one_document_is_zigzag(n):
    placed = balance([6 * n], num_shards=n, tokens_per_shard=6)
    if n > 1:
        np.testing.assert_array_equal(placed.order, burst_jax.positions("zigzag", 6 * n, n))
    assert placed.layout == ("balanced:6" if n > 1 else "balanced:0")
    assert placed.balance == 1


# Document mixes of fine-tuning: the length of a document, from a random generator.
MIXES = {
    "sft": lambda rng: int(np.clip(rng.lognormal(7.6, 1.2), 64, 131072)),
    "8K each": lambda rng: 8192,
    "long mix": lambda rng: int(
        rng.choice([rng.integers(512, 8192), rng.integers(32768, 131072)], p=[0.93, 0.07])
    ),
}


@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize("mix", MIXES)
def test_fine_tuning_mixes(mix, n):
    """With the default costs: few documents are split, and work is even."""
    c = 16384
    for seed in range(1 if mix == "8K each" else 5):
        rng, lengths = np.random.default_rng(seed), []
        while (left := n * c - sum(lengths)) > 0:
            lengths.append(min(MIXES[mix](rng), left))
        placed = balance(lengths, num_shards=n, tokens_per_shard=c)
        if not seed:
            check(placed, lengths, n, c)
        too_long = sum(pairs(lengths) > LIMIT * pairs(lengths).sum() / n)
        assert placed.balance <= LIMIT
        assert len(placed.split) <= too_long + 2
        if mix == "8K each":
            assert (placed.zone, placed.balance) == (0, 1)
        # Split documents, spread over all shards, need no smaller zone than one size less.
        assert placed.zone < 4 * max(c / 16, sum(lengths[i] for i in placed.split) / n)


def test_few_zone_sizes():
    assert zone_sizes(16384) == (0, 2048, 4096, 6144, 8192, 16384)
    assert zone_sizes(2048) == (0, 256, 512, 768, 1024, 2048)
    assert zone_sizes(600) == (0, 128, 256, 384, 600)
    assert zone_sizes(1) == (0, 1)


def test_no_documents_and_single_tokens():
    empty = balance([], num_shards=2, tokens_per_shard=3)
    check(empty, [], 2, 3)
    assert (empty.layout, empty.balance) == ("balanced:0", 1)
    assert empty.place(np.zeros((2, 0), np.int32), fill=7).tolist() == [[7] * 6] * 2
    single = balance([1] * 6, num_shards=2, tokens_per_shard=3)
    check(single, [1] * 6, 2, 3)
    assert (single.layout, single.balance) == ("balanced:0", 1)
    padded = balance([1], num_shards=3, tokens_per_shard=2)
    assert padded.segment_ids.tolist() == [1, 0, 0, 0, 0, 0]


def test_place_and_restore():
    """Any axis and dtype, with ``fill`` in padding; restore drops padding."""
    placed = balance([3, 5, 2], num_shards=2, tokens_per_shard=6)
    tokens = np.arange(10, dtype=np.uint16) + 1
    at = np.flatnonzero(placed.order >= 0)
    for axis, shape in ((0, (10, 2)), (1, (2, 10)), (-2, (3, 10, 2))):
        x = np.broadcast_to(np.expand_dims(tokens, 1 if axis != 1 else 0), shape)
        out = placed.place(x, axis, fill=99)
        assert out.dtype == np.uint16
        assert out.shape[axis] == 12
        flat = np.moveaxis(out, axis, -1)
        assert (flat[..., at] == placed.order[at] + 1).all()
        assert (flat[..., placed.order < 0] == 99).all()
        np.testing.assert_array_equal(placed.restore(out, axis), x)
    # What follows the tokens is ignored.
    longer = np.concatenate([tokens, [0, 0]])
    np.testing.assert_array_equal(
        placed.place(longer, fill=-1), placed.place(tokens.astype(int), fill=-1)
    )
    assert placed.place(tokens > 3).dtype == bool
    assert np.isnan(placed.place(tokens.astype(np.float32), fill=np.nan)).sum() == 2


def test_a_batch_shares_its_zone():
    batch = [[2048] * 4, [4096, 1024, 1024, 1024], [1500] * 5, []]
    placed = balance_batch(batch, num_shards=4, tokens_per_shard=2048)
    assert len({one.layout for one in placed}) == 1
    alone = [balance(x, num_shards=4, tokens_per_shard=2048).zone for x in batch]
    assert placed[0].zone == max(alone) > min(alone) == 0
    for one, lengths in zip(placed, batch, strict=True):
        check(one, lengths, 4, 2048)
    larger = balance_batch(batch, num_shards=4, tokens_per_shard=2048, zone=2048)
    assert {one.layout for one in larger} == {"balanced:2048"}
    assert balance_batch([], num_shards=4, tokens_per_shard=2048) == []
    # Splitting is free with a ring that is there anyway.
    assert placed[2].balance < 1.01


def test_costs_decide():
    """A slow ring is avoided as long as all documents fit whole."""
    lengths = [900] + [400] * 6
    whole = balance(lengths, num_shards=4, tokens_per_shard=1024)
    assert whole.zone == 0
    assert whole.balance > LIMIT
    fast_ring = RingCosts(zone=1e3, zone_token=1, gathered_token=1, send=10, tile=1)
    split = balance(lengths, num_shards=4, tokens_per_shard=1024, costs=fast_ring)
    assert split.zone > 0
    assert split.balance <= LIMIT
    assert 0 < split.share_of_ideal < 1 / split.balance
    costs = RingCosts(zone=10, zone_token=2, gathered_token=5, send=3, step=6, step_token=4)
    assert costs.time(100, 0, 4) == 100
    assert costs.time(100, 7, 4) == 100 + 10 + 7 * (2 + 4 * 5)
    assert costs.time(50, 7, 4) == 50 + 10 + 7 * (2 + 4 * 5) + (3 * 3 * 7 - 50)
    assert costs.ring_time(100, 7, 4, 2) == 100 + 3 * 6 + 2 * 7 * 4
    assert costs.ring_time(50, 7, 4, 2) == 50 + 3 * 6 + 2 * 7 * 4 + (3 * 3 * 7 - 50)


def test_exact_fit_without_a_ring():
    """Documents that fill all shards exactly, in an order that greedy placement does not find."""
    rng, n, c = np.random.default_rng(0), 8, 16384
    lengths = np.clip(rng.lognormal(5.5, 1, 500), 1, 4000).astype(int)
    lengths = lengths[np.cumsum(lengths) <= n * c]
    lengths = [*lengths, n * c - lengths.sum()]
    placed = balance(lengths, num_shards=n, tokens_per_shard=c)
    check(placed, lengths, n, c)
    assert placed.zone == 0
    assert placed.balance <= LIMIT


@pytest.mark.parametrize("long", [0, 0.1])
@pytest.mark.parametrize("n", [8, 64])
def test_a_million_tokens_take_milliseconds(n, long):
    """The aim is 20 ms; the limit allows for slow and busy machines."""
    rng, total = np.random.default_rng(0), 2**20
    lengths = rng.lognormal(6.5, 1, 1000)
    lengths = (lengths * (0.99 - long) * total / lengths.sum()).astype(int) + 1
    lengths[0] += total - lengths.sum()
    seconds = []
    for _ in range(5):
        start = time.process_time()
        placed = balance(lengths, num_shards=n, tokens_per_shard=total // n)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.1
    assert (placed.zone > 0) == (long > 0)


# Wrong types on purpose.
untyped: Any = balance
untyped_batch: Any = balance_batch
SIZES = {"num_shards": 2, "tokens_per_shard": 8}
PLACED = balance([4], **SIZES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balance([3, 0], **SIZES), r"lengths\[1\] is 0: a document has at least 1 token"),
        (lambda: balance([-2], **SIZES), r"lengths\[0\] is -2: a document has at least 1"),
        (lambda: balance([9, 8], **SIZES), "lengths have 17 tokens in all: 2 shards of 8 tokens"),
        (lambda: untyped([1.5], **SIZES), r"lengths is \[1.5\]: it must be a sequence of integers"),
        (lambda: balance([True], **SIZES), r"lengths is \[True\]: it must be a sequence of int"),
        (lambda: balance([1, True], **SIZES), r"lengths is \[1, True\]: it must be a sequence of"),
        (lambda: untyped([[1], [2, 3]], **SIZES), r"lengths is \[\[1\], \[2, 3\]\]: it must be"),
        (lambda: balance(np.ones((1, 2), int), **SIZES), "it must be a sequence of integers"),
        (lambda: untyped(5, **SIZES), "lengths is 5: it must be a sequence of integers"),
        (lambda: balance_batch([[1], [0]], **SIZES), r"batch\[1\]\[0\] is 0: a document has"),
        (lambda: untyped_batch([5], **SIZES), r"batch\[0\] is 5: it must be a sequence"),
        (lambda: balance([1], num_shards=0, tokens_per_shard=8), "num_shards is 0: it must be"),
        (lambda: untyped([1], num_shards=2, tokens_per_shard=0.5), "tokens_per_shard is 0.5: it"),
        (lambda: balance([1], num_shards=8, tokens_per_shard=2**28), "is 2147483648: it must be"),
        (lambda: zone_sizes(0), "tokens_per_shard is 0: it must be an integer, at least 1"),
        (lambda: balance([1], **SIZES, zone=9), "zone is 9: it must be an integer, at least 0 and"),
        (lambda: balance([12], **SIZES, zone=4), "zone is 4: the pieces .* use zone=8"),
        (lambda: balance([6, 6, 4], **SIZES, zone=0), "zone is 0: .* use zone=8"),
        (lambda: untyped([1], **SIZES, costs=3), "costs is 3: it must be a RingCosts"),
        (lambda: RingCosts(step=-1), "step is -1: it must be a number, at least 0"),
        (lambda: RingCosts(limit=float("nan")), "limit is nan: it must be a number, at least 1"),
        (lambda: PLACED.place(np.ones(5)), "length along axis 0 is 5: .* 4 or 16"),
        (lambda: PLACED.restore(np.ones(4)), "axis 0 is 4: the placement needs 16"),
        (
            lambda: PLACED.place(np.ones(4), 1),
            r"axis is 1: the array has shape \(4,",
        ),
        (lambda: PLACED.place(np.ones(4, int), fill=0.5), "fill is 0.5: it must be"),
        (lambda: PLACED.place(np.ones(4), fill="x"), "fill is 'x': it must be one"),
        (
            lambda: PLACED.place(np.ones(4), fill=[1, 2]),
            r"fill is \[1, 2\]: it must",
        ),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
