"""The sm90 kernels interpreted on a CPU: results, data races and deadlocks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import compare
import interpreted
import interpreted_callbacks
import jax
import jax.numpy as jnp
import local
import local_cases
import numpy as np
import pytest
from implementations import quick_jit
from jax.experimental.pallas import mosaic_gpu as plgpu
from local_cases import attend
from sm90_cases import (
    CASES,
    CLUSTERS,
    DETERMINISTIC,
    KERNELS,
    LARGE,
    PLAIN,
    QUICK,
    RUNS,
    SHARED,
    SLOPES,
    SPLIT_GRADIENTS,
    SUFFIXES,
    a_case,
)

from pallas_kernels import REFERENCE, mosaic_sm90
from pallas_kernels.backend import HalfDkv
from pallas_kernels.mosaic import work_tiles
from pallas_kernels.mosaic.sm90 import forward, query_order, row_intervals, shared_memory
from pallas_kernels.mosaic.sm90.static import BackwardStatic
from pallas_kernels.mosaic.tile_scheduler import TileScheduler
from pallas_kernels.mosaic.work_tiles import WorkTiles

needs_interpreter = pytest.mark.mosaic_interpreter
slow = pytest.mark.slow


def inputs_of(case, batch=1):
    return local_cases.make_inputs(case, seed=7, batch=batch)


def interpret(run, *arrays, **options):
    """``run(*arrays)`` as NumPy arrays, its kernels interpreted."""
    with interpreted.interpreted(**options):
        return interpreted_callbacks.run(run, *arrays)


def interpret_all(inputs, kernels=KERNELS, **options):
    run = functools.partial(attend, kernels, inputs.spec)
    return interpret(run, *inputs.arrays, **options)


def first_shard(inputs):
    """What a forward reads of the queries, the first shard of keys, and the heads."""
    of_heads = {name: getattr(inputs, name) for name in ("numbers", "seeds", "blocks")}
    return inputs.q, inputs.kvs[0], inputs.q_tokens, inputs.kv_tokens[0], of_heads


def interpret_forward(inputs, carry=None, kernels=KERNELS, rounded=False):
    """``(o, lse)`` over the first shard of keys; ``rounded``: then those of a last call, too."""

    def run(q, kv, q_tokens, kv_tokens, of_heads, carry):
        arrays = q, kv, q_tokens, kv_tokens, carry
        call = functools.partial(local.forward, kernels, *arrays, spec=inputs.spec, **of_heads)
        return (*call(), *call(out_dtype=jnp.bfloat16)) if rounded else call()

    return interpret(run, *first_shard(inputs), carry)


def reference_forward(inputs, carry=None):
    *arrays, of_heads = first_shard(inputs)
    run = functools.partial(local.forward, REFERENCE, spec=inputs.spec)
    return quick_jit(run)(*arrays, carry=carry, **of_heads)


def random_carry(inputs):
    rng = np.random.default_rng(0)
    batch, length, heads, _ = inputs.q.shape
    o = rng.normal(size=(batch, length, heads, inputs.kvs[0][1].shape[-1]))
    return o.astype(np.float32), rng.normal(size=(batch, heads, length)).astype(np.float32)


def always_large(work_tiles, ranges, _, counter=WorkTiles.counter):
    """``WorkTiles.counter``, as if the other side were so long that all work tiles were local."""
    return counter(work_tiles, ranges, 2**30)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(
            name, kernels, marks=() if name in QUICK else slow,
            id=name + SUFFIXES.get(kernels, ""),
        )
        for name, kernels in RUNS
    ],
)  # fmt: skip
def test_as_exact_as_dense(monkeypatch, name, kernels):
    """Two CTAs loop over work tiles where one shard is visited; else each has one work tile."""
    case = CASES[name]
    monkeypatch.setattr(row_intervals, "LEAST_ROWS_WITH_INTERVALS", 0)
    if case["blocks"] == 1:
        monkeypatch.setattr(work_tiles, "num_sms", lambda: 2)
    if name in ("kv_bounds", "zigzag_intervals"):
        # Their few tiles are not local, but take the order of large groups, of all heads.
        for limit in "_L2_BYTES", "_L2_BYTES_MAX":
            monkeypatch.setattr(work_tiles, limit, 1)
        monkeypatch.setattr(WorkTiles, "counter", always_large)
    # Two sequences: each has its own segment ids and KV bounds.
    inputs = inputs_of(case, batch=2 if name == "kv_bounds" else 1)
    gains, gain = [], row_intervals._intervals_gain
    record = lambda *x: gains.append(gain(*x)) or gains[-1]  # noqa: E731
    monkeypatch.setattr(row_intervals, "_intervals_gain", record)
    got = interpret_all(inputs, kernels)
    compare.assert_exact(got, inputs.reference, case["dtype"])
    if "intervals" in name:  # in both passes
        assert len(gains) >= 2
        assert all(gains)


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("key_intervals", KERNELS),
        pytest.param("zigzag_intervals", KERNELS, marks=slow),
        pytest.param("documents", LARGE, marks=slow),
        pytest.param("split_tiles", SPLIT_GRADIENTS, marks=slow),
    ],
)
def test_values_in_padding_change_no_bit(monkeypatch, name, kernels):
    """Not even NaN and infinity, where the kernels write zeros themselves."""
    monkeypatch.setattr(row_intervals, "LEAST_ROWS_WITH_INTERVALS", 0)
    monkeypatch.setattr(work_tiles, "num_sms", lambda: 2)
    inputs = inputs_of({**CASES[name], "blocks": 1, "heads": (1, 1)})
    do: Any = inputs.arrays[4][0]
    q_tokens: Any = inputs.q_tokens
    kv_tokens: Any = inputs.kv_tokens[0]
    q_tokens, kv_tokens = (
        tokens._replace(segment_ids=np.where(at, 0, tokens.segment_ids).astype(np.int32))
        for tokens, at in (
            (q_tokens, np.arange(inputs.q.shape[1]) % 40 < 3),
            (kv_tokens, np.arange(inputs.kvs[0][0].shape[1]) % 50 < 4),
        )
    )
    rng, clean = np.random.default_rng(0), (inputs.q, do, *inputs.kvs[0])

    def filled(x, tokens, values):
        padding = (tokens.segment_ids == 0)[..., None, None]
        assert padding.any()
        return np.where(padding, rng.choice(np.array(values, x.dtype), x.shape), x)

    sides = q_tokens, q_tokens, kv_tokens, kv_tokens

    def run(q, do, k, v, lse, delta):
        o, new_lse = local.forward(kernels, q, (k, v), q_tokens, kv_tokens, spec=inputs.spec)
        call = (q, do), (k, v), (lse, delta), q_tokens, kv_tokens
        return o, new_lse, local.backward(kernels, *call, spec=inputs.spec)

    def filled_by(values):
        return [filled(x, at, values) for x, at in zip(clean, sides, strict=True)]

    zero = filled_by([0])
    run_reference = functools.partial(local.forward, REFERENCE, spec=inputs.spec)
    o, lse = quick_jit(run_reference)(zero[0], tuple(zero[2:]), q_tokens, kv_tokens)
    delta = np.einsum("btnh,btnh->bnt", zero[1].astype(np.float32), np.asarray(o))
    stats = np.asarray(lse), delta
    assert kernels.zeroes_padding(inputs.spec, mock.Mock(has_bias=False), backward=True)
    with interpreted.interpreted():
        traced = interpreted_callbacks.traced(run, *zero, *stats)
        got, wanted = (
            jax.tree.leaves(traced(*filled_by(values), *stats))
            for values in ([np.nan, np.inf, -np.inf], [0])
        )
    for x, y in zip(got, wanted, strict=True):
        assert not np.isnan(y).any()
        np.testing.assert_array_equal(x, y)


@needs_interpreter
def test_the_order_of_work_tiles_changes_no_bit(monkeypatch):
    """Where dQ is in fixed point. dQ, dK and dV are added to those of another call."""
    inputs = inputs_of({**PLAIN, "lengths": (136, 392)})
    work_tiles: Any = BackwardStatic.work_tiles.fget
    q, (kv, *_), q_tokens, (kv_tokens, *_), (do, _), *_ = inputs.arrays
    o, lse = reference_forward(inputs)
    delta = np.einsum("btnh,btnh->bnt", do.astype(np.float32), np.asarray(o))
    rng = np.random.default_rng(0)
    given = [rng.normal(size=x.shape).astype(np.float32) for x in (q, *kv)]
    call = (q, do), kv, (np.asarray(lse), delta), q_tokens, kv_tokens

    def run(first, call, given):
        tiles = property(lambda static: dataclasses.replace(work_tiles(static), last_first=first))
        monkeypatch.setattr(BackwardStatic, "work_tiles", tiles)
        dq, dkv = local.backward(DETERMINISTIC, *call, given[0], given[1:], spec=inputs.spec)
        return dq, *dkv

    results = [interpret(functools.partial(run, first), call, given) for first in (False, True)]
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))
    truth = quick_jit(functools.partial(local.backward, REFERENCE, spec=inputs.spec))(*call)
    for got, wanted, before in zip(results[0], (truth[0], *truth[1]), given, strict=True):
        assert compare.errors(got - before, wanted)[1] < compare.RELATIVE_RMS["bfloat16"]


@needs_interpreter
@pytest.mark.parametrize("mask", ["causal", pytest.param("packed_causal", marks=slow)])
def test_the_second_half_of_dk_and_dv_is_stored_by_the_call_after_the_first(monkeypatch, mask):
    """A ring's calls: the local block's halves, between them another block if queries rotate."""
    monkeypatch.setattr(work_tiles, "num_sms", lambda: 2)
    inputs = inputs_of({**PLAIN, "mask": mask, "lengths": (72, 136)})  # two tiles of keys
    q, (kv, *_), q_tokens, (kv_tokens, *_), (do, _), *_ = inputs.arrays
    o, lse = reference_forward(inputs)
    delta = np.einsum("btnh,btnh->bnt", do.astype(np.float32), np.asarray(o))
    local_block: Any = (q, do), kv, (np.asarray(lse), delta), q_tokens, kv_tokens
    # No query attends to keys of the other block's second tile.
    at = np.where(np.arange(136) < 128, kv_tokens.positions[0], 10**6).astype(np.int32)
    other: Any = *local_block[:4], kv_tokens._replace(positions=at)

    def run(local_block, other):
        call: Any = functools.partial(local.gradients, KERNELS, spec=inputs.spec)
        dq, half, _ = call(*local_block, part=0)
        assert isinstance(half, HalfDkv)
        half = HalfDkv(*(x.at[:, 128:].set(jnp.nan) for x in half))
        in_two = call(*local_block, dq, half, part=1)
        dq, dkv, _ = call(*other, dq, half)
        in_three = call(*local_block, dq, dkv, part=1)
        return [(dq, *dkv) for dq, dkv, _ in (in_two, in_three)]

    in_two, in_three = interpret(run, local_block, other)
    gradients = quick_jit(functools.partial(local.backward, REFERENCE, spec=inputs.spec))
    of_local, of_other = ((dq, *dkv) for dq, dkv in (gradients(*x) for x in (local_block, other)))
    assert not any(np.asarray(x)[:, 128:].any() for x in of_other[1:])
    for two, three, a, b in zip(in_two, in_three, of_local, of_other, strict=True):
        assert compare.errors(two, a)[1] < compare.RELATIVE_RMS["bfloat16"]
        assert compare.errors(three, a + b)[1] < compare.RELATIVE_RMS["bfloat16"]


@needs_interpreter
@pytest.mark.parametrize(
    ("kernels", "head_dim", "block_kv"),
    [
        pytest.param(KERNELS, 64, 64, id="kernels"),
        pytest.param(SHARED, 64, 64, marks=slow, id="without-producer"),
        # The carry and a rounded result do not fit in shared memory.
        pytest.param(SPLIT_GRADIENTS, 192, 112, marks=slow, id="wide"),
    ],
)
def test_the_last_call_rounds_out_and_nothing_else(monkeypatch, kernels, head_dim, block_kv):
    """Also where a query tile has no key: it reads none, not even one that is not finite."""
    monkeypatch.setattr(work_tiles, "num_sms", lambda: 1)
    case = SLOPES | {
        "heads": (1, 1), "lengths": (200, 136), "numbers": "both", "head_dim": head_dim,
    }  # fmt: skip
    inputs = inputs_of(case)
    (k, v), kv_tokens = inputs.kvs[0], inputs.kv_tokens[0]
    # Keys of the first tile come after all queries, those of the others after its first 128.
    at = inputs.call["query_positions"][128] + np.arange(-64, 72, dtype=np.int32)
    at[:block_kv] += 10**6
    v[:, :block_kv] = np.nan
    tokens = [kv_tokens._replace(positions=at)]
    inputs = dataclasses.replace(inputs, kvs=[(k, v)], kv_tokens=tokens)
    o, lse, rounded, same_lse = interpret_forward(inputs, random_carry(inputs), kernels, True)
    np.testing.assert_array_equal(rounded, o.astype(jnp.bfloat16))
    np.testing.assert_array_equal(same_lse, lse)
    assert np.isfinite(o).all()
    o, lse = interpret_forward(inputs, kernels=kernels)
    assert not o[:, :128].any()
    assert o[:, 128:].any()
    sinks = inputs.numbers["sink_logits"]
    np.testing.assert_allclose(lse[0, :, :128], np.tile(sinks[:, None], 128), rtol=1e-6)


@needs_interpreter
@slow
def test_a_bias_over_a_tiny_scale():
    """Over a scale of 1e-38 the bias would be infinite: it is added to the scores instead."""
    inputs = inputs_of(SLOPES)
    score = dataclasses.replace(inputs.spec.score, scale=1e-38)
    inputs = dataclasses.replace(inputs, spec=dataclasses.replace(inputs.spec, score=score))
    o, lse = interpret_forward(inputs)
    # The products count for nothing: logits are the bias.
    wide = dataclasses.replace(
        inputs,
        q=inputs.q.astype(np.float32) * 0,
        kvs=[tuple(x.astype(np.float32) for x in inputs.kvs[0])],
    )
    want_o, want_lse = reference_forward(wide)
    np.testing.assert_allclose(lse, np.asarray(want_lse), rtol=1e-5, atol=1e-5)
    assert compare.errors(o, want_o)[1] < compare.RELATIVE_RMS["bfloat16"]


@needs_interpreter
def test_padded_keys_have_finite_weights_where_one_consumer_accumulates_dv():
    """Keys past the last one have scores of 0, infinite weights where logits are near -300."""
    inputs = inputs_of(a_case("full", "contiguous", 1, (1, 1), (72, 136), 192, "bfloat16", "none"))
    q, ((k, v),) = inputs.q.copy(), inputs.kvs
    k = k.copy()
    q[..., 0], k[..., 0] = -64, 64
    inputs = dataclasses.replace(inputs, q=q, kvs=[(k, v)])
    got = interpret_all(inputs, SPLIT_GRADIENTS)
    compare.assert_exact(got, inputs.reference, "bfloat16")


@needs_interpreter
def test_block_masks_have_tiles_of_whole_blocks():
    """Else these head dims have 96 keys per tile without a producer warpgroup."""
    case = a_case(
        "packed", "contiguous", 1, (2, 1), (128, 192), 192, "float16", "slopes", value_dim=96,
        table=(64, 64, False),
    )  # fmt: skip
    inputs = inputs_of(case)
    got = interpret_forward(inputs, kernels=mosaic_sm90())
    for x, y in zip(got, map(np.asarray, reference_forward(inputs)), strict=True):
        seen = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), seen)
        assert compare.errors(x[seen], y[seen])[1] < compare.RELATIVE_RMS["float16"]


@needs_interpreter
def test_clusters_share_kv_tiles(monkeypatch):
    """Of two CTAs at a time."""
    monkeypatch.setattr(work_tiles, "num_sms", lambda: 2)
    # Three query tiles, so that the last cluster's second one is past the last query.
    inputs = inputs_of({**PLAIN, "lengths": (264, 328)})
    carry = random_carry(inputs)
    got = interpret_forward(inputs, carry, CLUSTERS)
    for x, y in zip(got, map(np.asarray, reference_forward(inputs, carry)), strict=True):
        seen = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), seen)
        assert compare.errors(x[seen], y[seen])[1] < compare.RELATIVE_RMS["bfloat16"]


@needs_interpreter
@slow
def test_queries_of_shared_heads_are_visited_by_chunks(monkeypatch):
    """As where the queries of one head do not fit in the L2 cache."""
    monkeypatch.setattr(work_tiles, "num_sms", lambda: 2)
    monkeypatch.setattr(work_tiles, "_L2_BYTES", 1)
    monkeypatch.setattr(query_order, "_CHUNK_STEPS", 6)
    visits = mock.Mock(wraps=query_order._in_chunks)
    monkeypatch.setattr(query_order, "_in_chunks", visits)
    inputs = inputs_of({**CASES["late"], "lengths": (392, 197)})
    compare.assert_exact(interpret_all(inputs), inputs.reference, "bfloat16")
    assert visits.called


@needs_interpreter
@slow
def test_slopes_at_far_positions():
    """Errors are small relative to the bias, not to the positions; lse misses no constant."""
    # The second hop merges with the lse of the first; its backward has tiles without a mask.
    case = a_case("causal", "contiguous", 2, (2, 1), (136, 128), 32, "bfloat16", "both")
    near = inputs_of(case)
    slopes = np.array([0.7, -0.3], np.float32)
    near = dataclasses.replace(near, numbers=near.numbers | {"alibi_slopes": slopes})

    def moved(tokens):
        return tokens._replace(positions=tokens.positions + np.int32(10_000_019))

    kv_tokens = [moved(tokens) for tokens in near.kv_tokens]
    far = dataclasses.replace(near, q_tokens=moved(near.q_tokens), kv_tokens=kv_tokens)
    got = interpret_all(far)
    compare.assert_exact(got, near.reference, case["dtype"], noise=near.number_noise())
    np.testing.assert_allclose(got[1], near.reference.truth[1], rtol=1e-5, atol=1e-5)


# --- guards: what the tests above do with a wrong kernel -----------------------------------------


def nothing(*args, **kwargs):
    del args, kwargs


def free_at_once():
    """Functions of the forward that free the keys of a product when it is issued, not after it."""
    issue, free, issued = forward._issue_scores, forward._free_keys, []

    def issue_and_free(consumer, scores_ref, stage):
        issue(consumer, scores_ref, stage)
        free(consumer, stage)
        issued.append(stage)

    def free_skipped(consumer, stage):
        issued.pop() if issued else free(consumer, stage)

    return {"_issue_scores": issue_and_free, "_free_keys": free_skipped}


def free_for_one(config, arrivals, count):
    del config
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


# By the case or, of forwards, by the kernels: what is replaced by what, and how that shows, in any
# order of threads. (A load that returns before its products have ended is often a race, but another
# error where its warpgroup reaches the end of the accumulator's scope before the race.)
MISTAKES: dict[str, Any] = {
    "nobody-arrives": ("plain", plgpu, {"barrier_arrive": nothing}, "deadlock: .* waited 2"),
    "a-stage-is-free-for-one": (
        CLUSTERS, shared_memory, {"_cluster_barriers": free_for_one}, "RACE|not complete",
    ),
    "keys-freed-while-multiplied": ("plain", forward, free_at_once(), "RACE"),
    "exits-while-indices-are-read": (CLUSTERS, TileScheduler, {"drain": nothing}, "may exit bef"),
}  # fmt: skip
QUICK_MISTAKES = "nobody-arrives", "a-stage-is-free-for-one"


@needs_interpreter
@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=() if m in QUICK_MISTAKES else slow) for m in MISTAKES]
)
def test_a_mistake_shows(monkeypatch, mistake):
    where, owner, replaced, message = MISTAKES[mistake]
    for name, wrong in replaced.items():
        monkeypatch.setattr(owner, name, wrong)
    if where is CLUSTERS:
        monkeypatch.setattr(work_tiles, "num_sms", lambda: 2)
        inputs = inputs_of({**PLAIN, "lengths": (264, 328)})
        run = functools.partial(interpret_forward, inputs, kernels=CLUSTERS)
    else:
        # Patience is pointless only where nobody arrives.
        patience = 2.0 if mistake == "nobody-arrives" else 120.0
        run = functools.partial(interpret_all, inputs_of(CASES[where]), patience=patience)
    with pytest.raises(Exception, match=message):
        run()
