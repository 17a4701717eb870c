"""The work report: pairs by device and step, against a count of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from burst_jax.layouts import RingCosts, balance, work_report
from burst_jax.layouts.balanced import search_batch
from burst_jax.layouts.documents import packed_runs, place_documents, placed_runs, runs_of
from burst_jax.layouts.permutation import positions

RNG = np.random.default_rng(0)


def counted(ids, order, n):
    """Causal pairs by the shard of the query and of the key, one token at a time."""
    shard = np.full(len(ids), -1)
    shard[order[order >= 0]] = np.flatnonzero(order >= 0) // (len(order) // n)
    q, k = np.meshgrid(np.arange(len(ids)), np.arange(len(ids)), indexing="ij")
    attends = (ids[q] == ids[k]) & (k <= q) & (ids[q] != 0)
    pairs = np.zeros((n, n), int)
    np.add.at(pairs, (shard[q[attends]], shard[k[attends]]), 1)
    return pairs


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "striped:4", "balanced"])
def test_pairs_are_those_of_the_tokens(layout, n):
    """With padding inside of documents, ids that come again, and single tokens."""
    length = 24 * n
    ids = np.repeat(RNG.integers(0, 5, (2, length)), RNG.integers(1, 9, length), 1)[:, :length]
    ids[1] = 0 if n == 3 else 1
    if layout == "balanced":
        layout = "balanced:24"
        orders, placed = place_documents(ids, n, 24)
        in_places = np.stack([one.segment_ids for one in placed])
        report = work_report(in_places, layout, n, positions=np.maximum(orders, 0))
    else:
        orders = [positions(layout, length, n)] * 2
        report = work_report(ids, layout, n)
    want = np.sum([counted(own, order, n) for own, order in zip(ids, orders, strict=True)], 0)
    np.testing.assert_array_equal(report.pairs, want)
    np.testing.assert_array_equal(work_report(ids, layout, n).pairs, want)
    by_device, others = want.sum(1), want[~np.eye(n, dtype=bool)]
    assert report.balance == pytest.approx(by_device.max() / by_device.mean())
    assert report.empty_steps == pytest.approx((others == 0).mean() if n > 1 else 0)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_runs_without_arrays_are_those_of_the_arrays(n):
    """Of documents in natural order, and of placements, also split and full ones."""
    c = 24
    for draw in range(60):
        rng = np.random.default_rng(draw)
        lengths = rng.integers(1, rng.integers(2, n * c), rng.integers(1, 40))
        lengths = lengths[lengths.cumsum() <= n * c].tolist()
        ids = np.zeros(n * c, np.int32)
        ids[: sum(lengths)] = np.arange(1, len(lengths) + 1).repeat(lengths)
        (one,) = search_batch([lengths], num_shards=n, tokens_per_shard=c)
        placed = balance(lengths, num_shards=n, tokens_per_shard=c)
        for got, want in (
            (packed_runs(lengths), runs_of(ids)),
            (placed_runs(*one, n, c), runs_of(placed.segment_ids, placed.positions, n)),
        ):
            for name in ("start", "size", "document"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name), f"{draw}")


def test_shares_of_ideal():
    """Zigzag is near ideal for one document, far from it for short ones; balanced for neither."""
    n, c = 8, 16384
    one, each = np.ones((1, n * c), np.int32), np.arange(1, 4 * n + 1).repeat(c // 4)[None]
    reports = {
        (name, layout): work_report(ids, layout, n)
        for name, ids in (("one", one), ("each", each))
        for layout in ("zigzag", "striped", "contiguous", "balanced:0", f"balanced:{c}")
        if (name, layout) != ("one", "balanced:0")
    }
    shares = {key: report.share_of_ideal for key, report in reports.items()}
    for layout in ("zigzag", "striped", f"balanced:{c}"):
        assert 0.9 < shares["one", layout] < 1
    assert 0.4 < shares["one", "contiguous"] < 0.6
    assert shares["each", "balanced:0"] == 1
    assert reports["each", "balanced:0"].bytes_sent == 0
    assert reports["each", "balanced:0"].empty_steps == 0  # There are none.
    assert shares["each", "zigzag"] < 0.4
    # Half-blocks of whole documents: no ring step has anything to do.
    assert (reports["each", "zigzag"].empty_steps, reports["each", "zigzag"].balance) == (1, 1)
    assert reports["each", "zigzag"].bytes_sent == 1

    # As the placement's own model, which counts every ring step as one with work.
    lengths = RNG.integers(1000, 16000, 12)
    placed = balance(lengths, num_shards=n, tokens_per_shard=c)
    ids = np.zeros((1, n * c), np.int32)
    ids[0, : lengths.sum()] = np.arange(1, 13).repeat(lengths)
    report = work_report(ids, placed.layout, n)
    assert report.share_of_ideal == pytest.approx(placed.share_of_ideal, rel=0.05)
    assert report.balance == pytest.approx(placed.balance)
    nothing = work_report(0 * ids, "zigzag", n)
    assert (nothing.balance, nothing.share_of_ideal, nothing.empty_steps) == (1, 1, 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced:24"])
def test_a_step_without_pairs_takes_less_time(layout):
    """The slowest device's time by hand, of costs that only steps have."""
    n, c = 4, 24
    costs = RingCosts(zone=0, zone_token=0, gathered_token=0, send=0, step=5, step_token=7, tile=0)
    ids = np.repeat([1, 2, 3], [40, 24, 32])[None].astype(np.int32)
    report = work_report(ids, layout, n, costs=costs)
    order = positions(layout, n * c, n) if not layout.startswith("balanced") else None
    if order is None:
        assert report.share_of_ideal == pytest.approx(1 / report.balance)
        return
    want = counted(ids[0], order, n)
    busy = ((want > 0) & ~np.eye(n, dtype=bool)).sum(1)
    assert 0 < busy.sum() < n * (n - 1)
    slowest = max(want.sum(1) + (n - 1) * 5 + busy * 7 * c)
    assert report.share_of_ideal == pytest.approx(want.sum() / (n * slowest))


def test_mistakes_raise():
    ids = np.ones((2, 24), np.int32)
    for given, message in (
        (
            (ids[0], "zigzag", 4),
            r"segment_ids has shape \(24,\) and dtype int32: it needs integers",
        ),
        ((ids, "zigzag", 5), "the length of segment_ids is 24: the zigzag layout over 5 shards"),
        (
            (ids, "balanced:0", 4),
            "layout is 'balanced:0', whose gathered zone is too small .* use 'balanced:6'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            work_report(*given)
    with pytest.raises(ValueError, match="positions are given with layout 'zigzag', which defines"):
        work_report(ids, "zigzag", 4, positions=ids)
    with pytest.raises(ValueError, match=r"positions has shape \(24,\), segment_ids \(2, 24\)"):
        work_report(ids, "balanced:6", 4, positions=ids[0])
