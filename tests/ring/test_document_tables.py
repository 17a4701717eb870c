"""Attention with a balanced batch's tables: bitwise what the search on the devices gives."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from implementations import quick_jit
from meshes import mesh_of

import burst_jax
from burst_jax.layouts import document_tables
from burst_jax.layouts.tables import checksums
from burst_jax.training import make_batch

HEADS, KV, DIM, SHARD = 2, 1, 8, 24


@functools.cache
def batch_of(n, zone, seed) -> Any:
    """Two sequences of drawn documents: a long one, short ones, and padding inside and between."""
    rng, total = np.random.default_rng(seed), SHARD * n
    ids = np.zeros((2, total + 1), np.int64)
    for row in ids:
        long = rng.integers(12 * n, 16 * n)
        row[:] = 1 + np.searchsorted(np.arange(long, total, 5), np.arange(total + 1), "right")
        row[rng.random(total + 1) < 0.1] = 0
    rows = rng.integers(1, 50, ids.shape)
    return make_batch(rows, layout=f"balanced:{zone}", num_shards=n, segment_ids=ids)


@functools.partial(quick_jit, static_argnums=0)
def attended(static, arrays, call):
    """Out, lse and all gradients."""
    q, k, v, do = arrays
    options: Any = {"return_residual": True, "implementation": "reference", **dict(static), **call}
    (out, lse), vjp = jax.vjp(functools.partial(burst_jax.burst_attention, **options), q, k, v)
    return out, lse, *vjp((do, jnp.where(jnp.isfinite(lse), do[..., 0], 0)))


def run(batch, tables, sizes, **options):
    """What :func:`attended` returns of a batch."""
    static = {"mesh": mesh_of(**sizes), **options}
    call = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), batch["segment_ids"])
    call |= dict.fromkeys(("query_positions", "key_value_positions"), batch["positions"])
    rng, shape = np.random.default_rng(0), batch["segment_ids"].shape
    heads = HEADS, KV, KV, HEADS
    arrays = [rng.normal(size=(*shape, n, DIM)).astype(np.float32) for n in heads]
    call |= {"document_tables": tables}
    return [np.asarray(x) for x in attended(tuple(sorted(static.items())), arrays, call)]


@pytest.mark.parametrize(
    ("sizes", "zone", "options"),
    [
        pytest.param({"seq": 2}, 18, {}, marks=pytest.mark.slow),
        ({"seq": 3}, 20, {"local_window_size": 7}),
        ({"seq": 4}, 24, {}),
        pytest.param(
            {"seq": 4}, 20, {"local_window_size": (3, 4), "is_causal": False},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"seq": 2, "heads": 2}, 18, {"local_window_size": 7, "ulysses_axis": "heads"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["n2", "n3-window", "n4", "n4-both-sides", "n2-ulysses"],
)  # fmt: skip
def test_no_bit_differs_from_a_search_on_the_devices(sizes, zone, options):
    options, layout, n = {"is_causal": True, **options}, f"balanced:{zone}", sizes["seq"]
    for seed in range(2):
        batch = batch_of(n, zone, seed)
        own = batch["segment_ids"], batch["positions"], n
        windows = (None, options.get("local_window_size"))
        masks: Any = {"is_causal": options["is_causal"], "local_window_sizes": windows}
        tables = document_tables(layout, *own, **masks)
        assert tables.is_split.any(1).all()
        got, want = (run(batch, x, sizes, layout=layout, **options) for x in (tables, None))
        for with_tables, searched in zip(got, want, strict=True):
            np.testing.assert_array_equal(with_tables, searched)
        assert np.isfinite(want[0]).all()


def test_tables_of_other_documents_give_nan():
    """In the sequences whose tables they are not, and in their gradients."""
    options, batch, other = {"local_window_size": 7}, batch_of(3, 20, 0), batch_of(3, 20, 1)
    own, others = (
        document_tables(
            "balanced:20", x["segment_ids"], x["positions"], 3, local_window_sizes=(None, 7)
        )
        for x in (batch, other)
    )
    mixed = jax.tree.map(lambda x, y: np.stack([x[0], y[1]]), own, others)
    for tables, wrong in ((own, [False, False]), (mixed, [False, True]), (others, [True, True])):
        out, _, *gradients = run(
            batch, tables, {"seq": 3}, layout="balanced:20", is_causal=True, **options
        )
        for x in (out, *gradients[:1]):
            assert np.isnan(x).any((1, 2, 3)).tolist() == wrong


def test_checksums_tell_orders_apart():
    """One token moved, an id or a position changed, two exchanged."""
    ids, places = np.repeat(np.array([1, 2, 0], np.int32), 8), np.arange(24, dtype=np.int32)
    seen = {int(checksums(ids, places, np))}
    assert seen == {int(checksums(jnp.asarray(ids), jnp.asarray(places), jnp))}
    exchanged = np.r_[1, 0, 2:24]
    assert int(checksums(ids[exchanged], places[exchanged], np)) not in seen
    rng = np.random.default_rng(0)
    for count in range(2, 200):
        i, j = rng.choice(24, 2, replace=False)
        changed_ids, changed = ids.copy(), places.copy()
        if count % 2:
            changed[[i, j]] = changed[[j, i]]
            changed[i] += count
        else:
            changed_ids[i] += count
        seen.add(int(checksums(changed_ids, changed, np)))
        assert len(seen) == count


def test_mistakes_raise():
    batch = batch_of(3, 20, 0)
    ids, places = batch["segment_ids"], batch["positions"]
    tables = batch["document_tables"]

    def call(match, tables=tables, layout="balanced:20", sizes=3, **options):
        with pytest.raises(ValueError, match=match):
            run(batch, tables, {"seq": sizes}, layout=layout, **{"is_causal": True} | options)

    call("of layout 'balanced:20' over 3 shards, .* 'balanced:21' over 3", layout="balanced:21")
    call("those of layout 'balanced:20' over 3 .* call has layout 'balanced:20' over 4", sizes=4)
    call(r"lack those of the mask \(left, right\) = \(7, 0\): name the w", local_window_size=7)
    call(r"lack those of the mask \(left, right\) = \(None, None\)", is_causal=False)
    call("document_tables is a dict: it must be what make_batch returned", tables={"a": ids})
    call(
        r"document_tables.checksums has shape \(1, 3\), and the queries are \(2, 72\)",
        tables=jax.tree.map(lambda x: x[:1], tables),
    )
    layer = functools.partial(burst_jax.BurstAttention, 16, 2, rngs=nnx.Rngs(0), rope_theta=None)
    fixed = layer(mesh=mesh_of(seq=3), layout="zigzag")
    with pytest.raises(ValueError, match="over 3 shards, and the call has layout 'zigzag' over 3"):
        fixed(jnp.ones((2, 72, 16)), None, jnp.asarray(ids), document_tables=tables)
    with pytest.raises(ValueError, match="not accept document_tables: pass it to the call, next"):
        layer(mesh=mesh_of(seq=3), document_tables=tables)
    bad: Any = (
        (("zigzag", ids, places), "layout is 'zigzag': only a balanced layout has document tables"),
        (("balanced", ids, places), "layout is 'balanced', without the size of its gathered zone"),
        (("balanced:20", ids[0], places[0]), r"segment_ids has shape \(72,\), positions \(72,\)"),
        (("balanced:20", ids[:, :71], places[:, :71]), "length of segment_ids is 71: the balanced"),
        (("balanced:20", ids, places[:, ::-1]), "row 0 are in another order than that of layout"),
        (
            ("balanced:1", ids, places),
            "row 0 are in another order than that of layout 'balanced:1'",
        ),
    )
    for given, message in bad:
        with pytest.raises(ValueError, match=message):
            document_tables(*given, num_shards=3)
    for windows, message in (
        ([2.5], "holds 2.5: each must be None, an int"),
        (7, "is 7: it must b"),
    ):
        with pytest.raises(ValueError, match=f"local_window_sizes {message}"):
            document_tables("balanced:20", ids, places, 3, local_window_sizes=cast("Any", windows))
