"""Linear attention in a balanced layout against its recurrence in float64, in natural order."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import linear_cases
import numpy as np
import pytest
from convolution_by_taps import truth as by_taps
from implementations import quick_jit
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from burst_jax import linear
from burst_jax.layouts import document_tables
from burst_jax.layouts.balanced_layout import Balanced
from burst_jax.layouts.parse import parse_layout

SLOW = pytest.mark.slow
TOKENS = ("q", "k", "v", "log_decay", "beta")
TAPS = 4


def ids_of(*lengths, total):
    """A sequence of documents of these lengths, with padding at the end."""
    ids = np.zeros(total, np.int32)
    ids[: sum(lengths)] = np.repeat(np.arange(1, 1 + len(lengths)), lengths)
    return ids


# [devices, documents of each sequence, gathered zone]: a document on all devices among short ones;
# two of them; runs shorter than what the convolution reads before a token; short documents alone.
CASES: dict[str, Any] = {
    "3 devices": (3, [(7, 45, 5, 2), (21, 1, 19, 17), (3, 2, 30, 1, 20)], None),
    "5 devices, whole shards": (5, [(25,), (11, 14)], 5),
    "7 devices, tiny runs": (7, [(9, 5), (14,)], 2),
    "2 devices, nothing is split": (2, [(4, 6, 5, 3), (2, 8, 9)], None),
    "2 devices, a decay per channel": (2, [(11, 45, 5, 2), (21, 1, 19, 17)], None),
}


class Batch:
    """A drawn batch, in natural order and in a balanced one."""

    def __init__(self, name):
        self.n, lengths, zone = CASES[name]
        self.shard = -(-max(map(sum, lengths)) // self.n)
        length = self.n * self.shard
        ids = np.stack([ids_of(*each, total=length) for each in lengths])
        rng = np.random.default_rng(self.n)
        sizes: Any = {"batch": len(ids), "heads": 2, "key_heads": 1, "head_dim": 4, "value_dim": 6}
        case = linear_cases.draw(rng, length, **sizes, edges=True, channels="channel" in name)
        nothing = {"start": 0 * case.start, "dlast": 0 * case.dlast, "ids": ids}
        self.case = case._replace(**nothing)
        self.x, self.dy = rng.standard_normal((2, len(ids), length, 3)).astype(np.float32)
        self.weight = rng.standard_normal((TAPS, 3)).astype(np.float32)
        found = (Balanced(zone) if zone else parse_layout("balanced")).order_of(ids, self.n)
        self.layout, self.order, self.ids = found.layout, found.order, found.segment_ids
        positions = np.maximum(self.order, 0)
        self.tables = document_tables(
            self.layout, self.ids, positions, self.n, local_window_sizes=(), linear_attention=True
        )

    def placed(self, x):
        """In the layout, with NaN in padding."""
        taken = np.take_along_axis(x, np.maximum(self.order, 0)[(..., *[None] * (x.ndim - 2))], 1)
        return np.where((self.order < 0)[(..., *[None] * (x.ndim - 2))], np.float32("nan"), taken)

    def natural(self, x):
        """In natural order; padding must be zeros."""
        assert not x[self.order < 0].any()
        out = np.zeros_like(x)
        for row, order, target in zip(x, self.order, out, strict=True):
            target[order[order >= 0]] = row[order >= 0]
        return out

    def call(self, padding_id=0, **options):
        """``(tables, ids, arrays of the rule, x, weight) -> (o, y)``."""

        def run(tables, ids, arrays, x, weight):
            given: Any = {
                "segment_ids": ids + padding_id, "padding_id": padding_id,
                "document_tables": tables, "layout": self.layout, **options,
            }  # fmt: skip
            return (
                linear.gated_delta_rule(*arrays, **given),
                linear.short_convolution(x, weight, **given),
            )

        return run

    @functools.cache  # noqa: B019
    def run(self, program):
        """Both operations and their gradients, over a mesh."""
        call = self.call(mesh=mesh_of(seq=self.n))

        @program
        def run(tables, ids, arrays, x, weight, do, dy):
            found, vjp = jax.vjp(lambda *given: call(tables, ids, *given), arrays, x, weight)
            return *found, *vjp((do, dy))

        return run

    def results(self, tables=None, program=quick_jit):
        arrays = tuple(self.placed(getattr(self.case, name)) for name in TOKENS)
        others = self.placed(self.x), self.weight, self.placed(self.case.do), self.placed(self.dy)
        return jax.device_get(
            self.run(program)(self.tables if tables is None else tables, self.ids, arrays, *others)
        )


batch_of = functools.cache(Batch)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i < 1 else SLOW) for i, name in enumerate(CASES)]
)
def test_as_exact_as_float64(name, program):
    batch = batch_of(name)
    assert (batch.tables.runs is None) == (name == "2 devices, nothing is split")
    o, y, arrays, dx, dweight = batch.results(program=program)
    want = linear_cases.truth(batch.case)
    got = dict(zip(("dq", "dk", "dv", "dlog_decay", "dbeta"), arrays, strict=True)) | {"o": o}
    for key, x in got.items():
        assert linear_cases.error(batch.natural(x), want[key]) < 2e-6, key
    of_taps = by_taps(batch.x, batch.weight, batch.case.ids, batch.dy)
    for found, truth in zip((batch.natural(y), batch.natural(dx), dweight), of_taps, strict=True):
        np.testing.assert_allclose(found, truth, rtol=0, atol=1e-5)


def test_tables_of_other_documents_give_nan():
    """In the sequences that have them, in both operations."""
    batch = batch_of("3 devices")
    swapped = jax.tree.map(lambda x: x[np.array([0, 2, 1])], batch.tables)
    (o, y, *_), (want, *_) = batch.results(swapped), batch.results()
    np.testing.assert_array_equal(o[0], want[0])
    for x in (o, y):
        assert np.isfinite(x[0][batch.ids[0] != 0]).all()
        assert np.isnan(x[1:]).any((1, 2)).all()


@SLOW
def test_inside_a_shard_map_with_another_padding_id():
    batch = batch_of("3 devices")
    tokens = P(None, "seq")
    specs = batch.tables.specs(None, "seq")
    run = jax.shard_map(
        batch.call(padding_id=-1, axis_name="seq"), mesh=mesh_of(seq=batch.n),
        in_specs=(specs, tokens, (tokens,) * 5, tokens, P()), out_specs=(tokens, tokens),
    )  # fmt: skip
    arrays = tuple(batch.placed(getattr(batch.case, name)) for name in TOKENS)
    got = jax.jit(run)(batch.tables, batch.ids, arrays, batch.placed(batch.x), batch.weight)
    for x, want in zip(got, batch.results(), strict=False):
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-6)


def test_runs_of_a_shard_are_counted_in_powers_of_two():
    """And as many on all processes, so that few programs are compiled."""
    ids = np.array([[1, 2, 3, 1, 2, 3]])
    positions = np.array([[0, 2, 4, 1, 3, 5]])
    asked = []
    tables = document_tables(
        "balanced:3", ids, positions, 2, linear_attention=True,
        agree=lambda count: asked.append(count) or 8,
    )  # fmt: skip
    assert asked == [4]
    runs = np.array(tables.runs).reshape(3, 2, 8)
    np.testing.assert_array_equal(runs[0], [[0, 1, 2, 3, 3, 3, 3, 3]] * 2)
    np.testing.assert_array_equal(runs[1], [[1, 1, 1, 0, 0, 0, 0, 0]] * 2)
    np.testing.assert_array_equal(runs[2, :, :3], [[0, 2, 4], [1, 3, 5]])
    order = np.array(tables.run_order)[0]
    np.testing.assert_array_equal(
        order[:, :6], [[0, 8, 1, 9, 2, 10], range(1, 7), [0, 0, 2, 2, 4, 4]]
    )
    np.testing.assert_array_equal(order[1:, 6:], 6)
    # A run ends with its shard, also where its document continues in the next one.
    tables = document_tables(
        "balanced:4", np.ones((1, 8), np.int32), np.arange(8)[None], 2, linear_attention=True
    )
    np.testing.assert_array_equal(np.array(tables.runs)[0, :2], [[0, 4, 0, 4], [4, 0, 4, 0]])
    whole = np.array([[1, 1, 2, 0]]), np.array([[0, 1, 2, 0]])
    tables = document_tables("balanced:0", *whole, 2, linear_attention=True)
    assert (tables.runs, tables.run_order) == (None, None)
    assert document_tables("balanced:0", *whole, 2).of_runs() is None


def test_errors():
    batch = batch_of("3 devices")
    arrays = [jnp.zeros(getattr(batch.case, name).shape) for name in TOKENS]
    options: Any = {"mesh": mesh_of(seq=3), "layout": batch.layout, "segment_ids": batch.ids}
    given = options | {"document_tables": batch.tables}
    lacking = document_tables(batch.layout, batch.ids, np.maximum(batch.order, 0), 3)
    first = jax.tree.map(lambda x: x[:1], batch.tables)
    for kind, change, message in (
        (ValueError, {"document_tables": None}, "document_tables is None: gated_delta_rule needs"),
        (ValueError, {"document_tables": lacking}, "is those of softmax attention alone: gated"),
        (ValueError, {"document_tables": first}, "document_tables are those of 1 sequences, and"),
        (
            ValueError,
            {"document_tables": 3},
            "document_tables is a int: it must be what make_batch",
        ),
        (ValueError, {"layout": "balanced:1"}, "and the call has layout 'balanced:1' over 3: make"),
        (ValueError, {"layout": "balanced"}, "layout is 'balanced', without the size of its gath"),
        (ValueError, {"layout": "zigzag"}, "and the call has layout 'zigzag' over 3: make the"),
        (ValueError, {"segment_ids": None}, "and segment_ids is None: pass the batch's, of make"),
        (NotImplementedError, {"return_final_state": True}, "return_final_state is given with lay"),
        (
            NotImplementedError,
            {"initial_state": jnp.zeros(batch.case.start.shape)},
            "initial_state is given with layout 'balanced:.*', in which the first and the last doc",
        ),
    ):
        with pytest.raises(kind, match=message):
            linear.gated_delta_rule(*arrays, **given | change)
    with pytest.raises(
        ValueError, match="document_tables is None: short_convolution needs the run"
    ):
        linear.short_convolution(arrays[3], jnp.zeros((4, 2)), **options)


@SLOW
def test_one_device_needs_no_tables():
    batch = batch_of("2 devices, nothing is split")
    found = parse_layout("balanced").order_of(batch.case.ids, 1)
    arrays = [jnp.asarray(getattr(batch.case, name)) for name in TOKENS]
    placed = [x[np.arange(len(x))[:, None], np.maximum(found.order, 0)] for x in arrays]
    given: Any = {"layout": found.layout, "segment_ids": found.segment_ids}
    o = linear.gated_delta_rule(*placed, **given)
    want = linear_cases.truth(batch.case)["o"]
    for row, order, truth in zip(o, found.order, want, strict=True):
        np.testing.assert_allclose(row[order >= 0], truth[order[order >= 0]], rtol=0, atol=2e-6)
