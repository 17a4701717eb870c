"""Local attention on one device: every implementation against dense float64 attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import compare
import dense
import jax
import jax.numpy as jnp
import local
import numpy as np
import pytest
from cases import all_pairs, few_of, packed_segments
from conftest import IMPLEMENTATION, ON_GPU
from implementations import IMPLEMENTATIONS, QUICK

from burst_jax import positions
from pallas_kernels import REFERENCE, AttentionSpec, Mask, Score, Tokens
from pallas_kernels.score import start_gradients

MASKS = {
    "full": dense.Mask(),
    "causal": dense.Mask(is_causal=True),
    "window20": dense.Mask(is_causal=True, window=20),
    "window31_14": dense.Mask(window=(31, 14)),
    "packed": dense.Mask(segments=True),
    "packed_causal": dense.Mask(is_causal=True, segments=True),
    "packed_window_cap": dense.Mask(is_causal=True, window=50, segments=True, soft_cap=4.0),
    "cap": dense.Mask(soft_cap=2.0),
}
FACTORS: dict[str, tuple] = {
    "mask": tuple(MASKS),
    "order": ("contiguous", "zigzag", "striped"),
    "blocks": (1, 2),
    "heads": ((4, 4), (8, 2), (8, 1)),
    "lengths": ((48, 48), (63, 45), (20, 57), (9, 7)),
    "head_dim": (16, 40, 33),
    "dtype": ("float32", "bfloat16", "float16"),
    "numbers": ("none", "sinks", "slopes", "both"),
}
if ON_GPU:
    # Many shipped tiles, whole and ragged.
    FACTORS["lengths"] += ((300, 530), (1000, 1000), (512, 1024))
    FACTORS["head_dim"] += (64, 128)
if IMPLEMENTATION == "mosaic_gpu":
    # What this kernel takes, with and without parts of tiles.
    FACTORS["lengths"] = ((48, 48), (24, 56), (8, 8), (304, 528), (1000, 1000), (512, 1024))
    FACTORS["head_dim"] = (32, 64, 96, 128)
    FACTORS["dtype"] = ("bfloat16", "float16")
CASES = all_pairs(FACTORS)
SHARDS, Q_SHARD, BATCH = 4, 1, 2
# Interpreted kernels compile slowly: every other case, which still meets every level.
CASES_BY_NAME = {"xla": range(len(CASES)), "triton": range(0, len(CASES), 2)}
if ON_GPU:
    KERNELS = {"triton": ("triton", "triton_shipped"), "mosaic_gpu": ("mosaic_gpu",)}
    CASES_BY_NAME = dict.fromkeys(KERNELS[IMPLEMENTATION], range(len(CASES)))
# In the quick tier every level is met, in all tests every pair of levels (on a GPU: all are quick).
QUICK_BY_NAME = {
    name: indices if ON_GPU else [CASES.index(case) for case in few_of([CASES[i] for i in indices])]
    for name, indices in CASES_BY_NAME.items()
}
# Factor on one device's error. Triton's softmax in base 2 rounds logits once more, which shows in
# the worst element of a float32 result.
ERROR_FACTOR = {"xla": 1.5, "triton": 2.0}
if ON_GPU:
    # Thousands of float32 products summed one after the other, where dense matmuls sum in blocks.
    ERROR_FACTOR = dict.fromkeys(CASES_BY_NAME, 6.0)


def case_id(case):
    (heads, kv_heads), (t, s) = case["heads"], case["lengths"]
    return (
        f"{case['mask']}-{case['order']}-{case['blocks']}block"
        f"-h{heads}gqa{heads // kv_heads}-{t}x{s}-dim{case['head_dim']}-{case['dtype']}"
        f"-{case['numbers']}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """One shard's queries, the key shards it meets one after the other, and the mask between."""

    q: np.ndarray
    kvs: list  # of (k, v)
    q_tokens: Tokens
    kv_tokens: list
    cotangents: tuple  # of out [B, T, N, H] and lse [B, T, N]
    keep: np.ndarray  # bool [B or 1, T, all keys]
    spec: AttentionSpec
    soft_cap: float | None
    numbers: dict[str, np.ndarray]  # of each head
    distance: np.ndarray  # [T, all keys]

    def all_keys(self):
        """K and V of all shards."""
        return tuple(np.concatenate(x, axis=1) for x in zip(*self.kvs, strict=True))


@functools.lru_cache(maxsize=4)
def make_inputs(index):
    case, rng = CASES[index], np.random.default_rng(index)
    mask, dtype = MASKS[case["mask"]], jnp.dtype(case["dtype"])
    (heads, kv_heads), dim = case["heads"], case["head_dim"]
    even = case["order"] == "zigzag"
    t, s = (length + length % 2 * even for length in case["lengths"])
    # The first key shard is near the queries in every order, so that short windows see some of it.
    shards = ((0, 1) if t < s else (1, 0))[: case["blocks"]]
    q_at, kv_at = (positions(case["order"], SHARDS * c, SHARDS).reshape(SHARDS, c) for c in (t, s))
    q_at, kv_at = q_at[Q_SHARD], [kv_at[shard] for shard in shards]
    ids = packed_segments(rng, BATCH, SHARDS * max(t, s)) if mask.segments else None

    def tokens(at):
        segment_ids: Any = None if ids is None else ids[:, at]
        return Tokens(at, segment_ids)

    def normal(*shape):
        # Rounded to the tested dtype first: the truth starts from the same numbers.
        return rng.normal(size=shape).astype(dtype)

    keep = mask.dense(ids, ids, SHARDS * max(t, s), SHARDS * max(t, s))
    return Inputs(
        q=normal(BATCH, t, heads, dim),
        kvs=[tuple(normal(BATCH, s, kv_heads, dim) for _ in "kv") for _ in shards],
        q_tokens=tokens(q_at),
        kv_tokens=[tokens(at) for at in kv_at],
        cotangents=(
            normal(BATCH, t, heads, dim),
            rng.normal(size=(BATCH, t, heads)).astype(np.float32),
        ),
        keep=keep[:, q_at][:, :, np.concatenate(kv_at)],
        spec=spec_of(mask, dim, case["numbers"]),
        soft_cap=mask.soft_cap,
        numbers=dense.per_head(case["numbers"], heads, index),
        distance=np.abs(q_at[:, None] - np.concatenate(kv_at)[None, :]),
    )


def spec_of(mask, dim, numbers):
    left, right = mask.window if isinstance(mask.window, tuple) else (mask.window,) * 2
    differentiated = ("alibi_slopes",) if numbers in ("slopes", "both") else ()
    return AttentionSpec(
        Mask(left, 0 if mask.is_causal else right),
        Score(dim**-0.5, mask.soft_cap, differentiated),
    )


@functools.lru_cache(maxsize=4)
def oracle(index):
    """``(truth, one device's results)``."""
    inputs = make_inputs(index)
    args = (inputs.q, *inputs.all_keys(), inputs.keep, *inputs.cotangents, inputs.soft_cap)
    args += inputs.numbers, inputs.distance
    return dense.truth(*args), dense.one_device(*args)


def attend(implementation, spec, q, kvs, q_tokens, kv_tokens, cotangents, numbers):
    """``(out, lse, dq, dk, dv)`` as a ring of these key shards makes them, in the inputs' dtype.

    Behind them the gradients of the numbers of each head, in the order of their names.
    """
    do, dlse = cotangents
    carry: Any = None
    dq: Any = None
    dkvs, of_numbers = [], {}
    for kv, tokens in zip(kvs, kv_tokens, strict=True):
        arrays = q, kv, q_tokens, tokens
        carry = local.forward(implementation, *arrays, carry, spec=spec, numbers=numbers)
    o, lse = carry
    out = o.astype(q.dtype)
    wide = o.dtype
    delta = (do.astype(wide) * out.astype(wide)).sum(-1).swapaxes(1, 2) - dlse.swapaxes(1, 2)
    for kv, tokens in zip(kvs, kv_tokens, strict=True):
        arrays = (q, do), kv, (lse, delta), q_tokens, tokens
        dq, dkv, parts = local.gradients(implementation, *arrays, dq, spec=spec, numbers=numbers)
        dkvs.append(dkv)
        of_numbers = {name: x + of_numbers.get(name, 0) for name, x in parts.items()}
    dk, dv = jnp.concatenate(dkvs, axis=2)
    if "sink_logits" in numbers:
        of_numbers |= start_gradients(numbers, lse, delta)
    gradients = *(x.astype(q.dtype) for x in (dq, dk, dv)), *map(of_numbers.get, sorted(numbers))
    return out, lse.swapaxes(1, 2), *gradients


_attend = jax.jit(attend, static_argnums=(0, 1), compiler_options=QUICK)


def results(implementation, index, dtype=None):
    """What ``attend`` makes of a case, as NumPy arrays; ``dtype`` instead of the case's own."""
    inputs = make_inputs(index)
    arrays = inputs.q, inputs.kvs, inputs.q_tokens, inputs.kv_tokens, inputs.cotangents
    arrays += (inputs.numbers,)
    if dtype is not None:
        arrays = jax.tree.map(
            lambda x: x if np.issubdtype(x.dtype, np.integer) else x.astype(dtype), arrays
        )
    return [np.asarray(x) for x in _attend(implementation, inputs.spec, *arrays)]


def assert_zero_where_blind(got, inputs):
    """Rows that see nothing and keys that nothing sees: exactly zero, lse -inf or a sink."""
    out, lse, dq, dk, dv, *_ = got
    keep, sinks = inputs.keep, inputs.numbers.get("sink_logits")
    blind = ~np.broadcast_to(keep.any(2), out.shape[:2])
    unseen = ~np.broadcast_to(keep.any(1), dk.shape[:2])
    assert (out[blind] == 0).all()
    if sinks is None:
        assert (lse[blind] == -np.inf).all()
    else:
        sinks = np.broadcast_to(sinks, lse.shape)[blind]
        np.testing.assert_allclose(lse[blind], sinks, rtol=1e-6, atol=1e-6)
    assert (dq[blind] == 0).all()
    assert (dk[unseen] == 0).all()
    assert (dv[unseen] == 0).all()


def slow_unless(quick):
    return () if quick else pytest.mark.slow


@pytest.mark.parametrize(
    ("index", "name"),
    [
        pytest.param(
            index,
            name,
            id=f"{name}-{case_id(case)}",
            marks=slow_unless(index in QUICK_BY_NAME[name]),
        )
        for index, case in enumerate(CASES)
        for name in CASES_BY_NAME
        if index in CASES_BY_NAME[name]
    ],
)
def test_as_exact_as_dense(index, name):
    got = results(IMPLEMENTATIONS[name], index)
    truth, one_device = oracle(index)
    dtype = CASES[index]["dtype"]
    factor = ERROR_FACTOR[name] if dtype == "float32" else 1.5
    compare.assert_as_good_as(got, one_device, truth, dtype, factor)
    assert_zero_where_blind(got, make_inputs(index))


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, id=case_id(case), marks=slow_unless(ON_GPU or case in few_of(CASES)))
        for index, case in enumerate(CASES)
    ],
)
def test_reference_equals_autodiff_in_float64(index):
    """The oracle of the others, itself held to the gradients of dense softmax attention."""
    truth, _ = oracle(index)
    with jax.enable_x64(True):
        got = results(REFERENCE, index, np.float64)
    for name, g, t in zip((*compare.NAMES, "number", "number"), got, truth, strict=False):
        assert g.dtype == np.float64, name
        worst, rms = compare.errors(g, t)
        assert rms < 1e-13, name
        assert worst < 1e-12 * max(1, np.abs(t[np.isfinite(t)]).max(initial=0)), name
    assert_zero_where_blind(got, make_inputs(index))


@pytest.mark.parametrize("tier", [CASES_BY_NAME, QUICK_BY_NAME], ids=["all", "quick"])
@pytest.mark.parametrize("name", CASES_BY_NAME)
def test_every_level_is_met(name, tier):
    for factor, levels in FACTORS.items():
        assert {CASES[index][factor] for index in tier[name]} == set(levels), factor


def test_cases_have_rows_and_keys_that_see_nothing():
    """The zeros asserted above are asserted of something, and the errors of something else."""
    keeps = [make_inputs(index).keep for index in range(len(CASES))]
    assert sum(bool((~keep.any(2)).any()) for keep in keeps) >= 10
    assert sum(bool((~keep.any(1)).any()) for keep in keeps) >= 10
    assert all(keep.any() for keep in keeps)


def test_zeros_fail():
    """The guard: a comparison that all-zero results pass would prove nothing."""
    cases = [(case["dtype"], case["numbers"]) for case in CASES]
    index = cases.index(("bfloat16", "both"))
    truth, one_device = oracle(index)
    names = *compare.NAMES, "number 0", "number 1"
    # In float32, as gradients of numbers are in every case.
    truth[5:] = [x.astype(np.float32) for x in truth[5:]]
    for zero in ("out", "dq", "dk", "dv", "number 0", "number 1"):
        broken = [x * 0 if n == zero else x for n, x in zip(names, truth, strict=True)]
        with pytest.raises(AssertionError, match=zero):
            compare.assert_as_good_as(broken, one_device, truth, "bfloat16")
