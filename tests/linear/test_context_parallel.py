"""The gated delta rule over devices against its recurrence in float64, token by token."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import linear_calls as calls
import linear_cases
import numpy as np
import pytest
from implementations import quick_jit
from jax.sharding import AxisType
from meshes import mesh_of

from burst_jax import linear
from burst_jax.linear import runs
from pallas_kernels.linear import choice
from pallas_kernels.linear.xla import XLA

# Divisible by twice 1, 2, 3, 5, 7 and 8; runs of 105 to 1,680 tokens.
LENGTH = 1680
LAYOUTS = ("contiguous", "zigzag")
# With maps that are gathered, and in steps whose number is the logarithm of the devices'. The drawn
# calls gather with every number of devices.
GATHERED = (1, "zigzag"), (2, "contiguous"), (3, "zigzag"), (8, "zigzag")
IN_STEPS = (3, "zigzag"), (7, "contiguous")
QUICK = {(2, "contiguous"), (3, "zigzag")}
# Documents with padding in them, some longer than a shard; gates of 0, 1 and 2 and near them.
KINDS: dict[str, Any] = {
    "documents": {"documents": 5, "edges": True},
    # 8 heads: 8 devices exchange its maps by heads, those of 2 heads by a gather.
    "one document": {"decay": 1e-3, "heads": 8, "key_heads": 4},
    "strong decay": {"documents": 40, "decay": 3.0},
    "decay per channel": {"documents": 5, "edges": True, "decay": 3.0, "channels": True},
}
SLOW = pytest.mark.slow


@functools.cache
def case_of(kind, length=LENGTH):
    rng = np.random.default_rng(len(kind))
    sizes = {"batch": 2, "heads": 2, "key_heads": 1, "head_dim": 8, "value_dim": 16}
    return linear_cases.draw(rng, length, **(sizes | KINDS[kind]))


@functools.cache
def errors_of(kind, n, layout, program, gathered=runs.GATHERED):
    """Relative errors by result."""
    case = case_of(kind)
    call = calls.on_mesh(n, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "GATHERED", gathered)
        got = calls.results(call, case, n, layout, program=program)
    want = truth_of(kind)
    return {name: linear_cases.error(got[name], want[name]) for name in got}


@functools.cache
def truth_of(kind, length=LENGTH):
    return linear_cases.truth(case_of(kind, length))


def assert_as_exact_as_alone(kind, n, layout, program, **options):
    """Within float32's rounding, and no worse than one device."""
    alone = errors_of(kind, 1, "contiguous", program)
    for name, error in errors_of(kind, n, layout, program, **options).items():
        assert error < 1.5 * alone[name] + 2e-7, name
        assert alone[name] < 3e-6, name


@pytest.mark.parametrize(
    ("n", "layout"),
    [pytest.param(n, layout, marks=() if (n, layout) in QUICK else SLOW) for n, layout in GATHERED],
)
def test_documents_and_edges(n, layout, program):
    assert_as_exact_as_alone("documents", n, layout, program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "n", "layout"),
    [
        ("one document", 8, "contiguous"),
        ("strong decay", 8, "zigzag"),
        ("decay per channel", 5, "contiguous"),
    ],
)
def test_error_does_not_grow_with_devices(kind, n, layout, program):
    assert_as_exact_as_alone(kind, n, layout, program)


@SLOW
@pytest.mark.parametrize(("n", "layout"), IN_STEPS)
def test_log_steps(n, layout, program):
    """What more than 8 devices do; of the quick tests the one of two axes takes such steps."""
    assert_as_exact_as_alone("documents", n, layout, program, gathered=0)


def test_a_decay_per_channel(program):
    assert_as_exact_as_alone("decay per channel", 3, "zigzag", program)


@pytest.mark.parametrize(
    ("n", "layout", "parts"),
    [
        (1, "contiguous", 4), pytest.param(2, "contiguous", 2, marks=SLOW),
        pytest.param(3, "zigzag", 4, marks=SLOW),
    ],
)  # fmt: skip
def test_runs_in_parts(monkeypatch, n, layout, parts, program):
    """As kernels of few heads scan them; documents and the initial state lead through the parts."""
    asked = []
    in_parts = dataclasses.replace(XLA, parts=lambda _, has_maps: asked.append(has_maps) or parts)
    monkeypatch.setattr(choice, "XLA", in_parts)
    case, want = case_of("documents", 240), truth_of("documents", 240)
    got = calls.results(calls.on_mesh(n, layout), case, n, layout, program=program)
    for name, result in got.items():
        assert linear_cases.error(result, want[name]) < 3e-5, name
    # No program of another test was taken.
    assert asked
    assert set(asked) == {n > 1}


def drawn(seed):
    """``(case, n, layout)`` of drawn sizes, at most 2,000 tokens."""
    rng = np.random.default_rng((seed, 1))
    n, layout = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8])), LAYOUTS[rng.integers(2)]
    runs = n * (2 if layout == "zigzag" else 1)
    key_heads = int(rng.integers(1, 3))
    case = linear_cases.draw(
        rng,
        runs * int(rng.integers(1, max(2, 2000 // runs) if seed % 2 else 6)),
        batch=int(rng.integers(1, 3)),
        heads=key_heads * int(rng.integers(1, 4)),
        key_heads=key_heads,
        head_dim=int(rng.choice([4, 8, 24])),
        value_dim=int(rng.choice([4, 12])),
        decay=float(rng.choice([1e-3, 0.1, 3.0])),
        documents=int(rng.choice([0, 1, 3, 30])),
        edges=bool(rng.integers(2)),
        channels=seed > 6,
    )
    return case, n, layout


# Every number of devices, both layouts with each kind of decay, runs of 3 to 600 tokens, one
# document and many, edges or not: without the seeds of 13 whose sizes are like another's.
SEEDS = (0, 1, 3, 4, 5, 7, 8, 11, 12)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 1 else SLOW) for seed in SEEDS]
)
def test_drawn_calls(seed, program):
    case, n, layout = drawn(seed)
    got = calls.results(calls.on_mesh(n, layout), case, n, layout, program=program)
    for name, want in linear_cases.truth(case).items():
        # A short sequence may have one valid token: a norm of nothing has no relative error.
        size = max(np.linalg.norm(want), 1e-3)
        assert np.linalg.norm(got[name] - want) < 5e-5 * size, name


def test_padding_may_hold_anything_and_bits_are_the_same():
    case, n, layout = case_of("documents", 240), 2, "zigzag"
    call = calls.on_mesh(n, layout)
    want, again, got = (
        calls.results(call, each, n, layout) for each in (case, case, calls.with_nan(case))
    )
    for name, x in want.items():
        np.testing.assert_array_equal(again[name], x, err_msg=name)
        np.testing.assert_array_equal(got[name], x, err_msg=name)
    assert not want["o"][~case.valid].any()
    for name in ("dq", "dk", "dv", "dlog_decay", "dbeta"):
        assert not want[name][~case.valid].any(), name


def test_other_padding_ids():
    """Ids from 0 on, as other libraries have them, and a document of a shard that is padding."""
    case = case_of("documents", 240)
    ids = np.array(case.ids)
    ids[:, 110:200] = 0
    case = case._replace(ids=ids)
    call = calls.on_mesh(4, "contiguous", padding_id=-1)
    got = calls.results(call, case._replace(ids=ids - 1), 4, "contiguous")
    for name, want in linear_cases.truth(case).items():
        assert linear_cases.error(got[name], want) < 3e-5, name


def test_a_document_that_ends_with_its_shard_leaves_no_state():
    """The next one begins with a shard's first token, and is what it would be alone."""
    case = case_of("one document", 64)._replace(ids=np.repeat([[1, 2, 2, 3]], 16, 1))
    ids = np.broadcast_to(case.ids, (2, 64))
    o, _ = quick_jit(calls.on_mesh(4, "contiguous"))(*case[:6], ids)
    tokens = ("q", "k", "v", "log_decay", "beta", "do")
    cut = {name: getattr(case, name)[:, 16:48] for name in tokens}
    want = linear_cases.truth(case._replace(**cut, start=0 * case.start, ids=None))["o"]
    np.testing.assert_allclose(o[:, 16:48], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(jnp.bfloat16, 2e-2), pytest.param(jnp.float16, 3e-3, marks=SLOW)],
    ids=["bfloat16", "float16"],
)
def test_half_precision(dtype, limit, program):
    """As exact as one device in the same dtype."""
    case = case_of("documents", 240)
    got = calls.results(calls.on_mesh(2, "zigzag"), case, 2, "zigzag", dtype, program)
    want = truth_of("documents", 240)
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert got["last"].dtype == got["dbeta"].dtype == jnp.float32
    for name, x in got.items():
        assert linear_cases.error(x, want[name]) < limit, name


@pytest.mark.parametrize(
    ("kind", "channels"),
    [(AxisType.Explicit, False), pytest.param(AxisType.Auto, True, marks=SLOW)],
    ids=str,
)
def test_batch_and_tensor_axes(kind, channels):
    """Sequences, tokens and heads are split at once."""
    mesh = mesh_of(kind, data=2, seq=2, model=2)
    sizes: Any = {"batch": 2, "heads": 4, "key_heads": 2, "head_dim": 8, "documents": 3}
    case = linear_cases.draw(np.random.default_rng(0), 100, **sizes, channels=channels)
    arrays = [*case[:6], case.ids]
    axes = {"batch_axis": "data", "tensor_axis": "model"}

    def run(*arrays):
        *arrays, start, ids = arrays
        return linear.gated_delta_rule(
            *arrays, initial_state=start, segment_ids=ids, return_final_state=True, **axes
        )

    with jax.set_mesh(mesh):
        found, vjp = jax.vjp(lambda *x: jax.jit(run)(*x, arrays[6]), *arrays[:6])
        o, last = found
        # The cotangents have the results' types.
        do, dlast = (jax.device_put(x, y.sharding) for x, y in ((case.do, o), (case.dlast, last)))
        got = dict(zip(calls.NAMES, (o, last, *vjp((do, dlast))), strict=True))
    want = linear_cases.truth(case)
    for name, x in got.items():
        assert linear_cases.error(x, want[name]) < 2e-6, name


@pytest.mark.parametrize(
    ("layout", "gathered", "axes"),
    [
        pytest.param("zigzag", runs.GATHERED, ("b", "a"), marks=SLOW),
        ("contiguous", 0, ("b", "a")),
    ],
)
def test_two_axes_in_any_order(layout, gathered, axes, monkeypatch, program):
    """A sequence over two mesh axes: the first one named is the outer one."""
    monkeypatch.setattr(runs, "GATHERED", gathered)
    case, want = case_of("documents", 240), truth_of("documents", 240)
    call = calls.on_mesh(6, layout, mesh=mesh_of(a=2, b=3), seq_axis=axes)
    for name, result in calls.results(call, case, 6, layout, program=program).items():
        assert linear_cases.error(result, want[name]) < 3e-5, name
