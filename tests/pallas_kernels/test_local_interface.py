"""What every implementation of local attention guarantees, apart from its precision.

On a GPU, with ``--implementation``, of the kernels named there, in a dtype that they support.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import compare
import jax
import jax.numpy as jnp
import local
import numpy as np
import pytest
from conftest import IMPLEMENTATION, ON_GPU
from implementations import IMPLEMENTATIONS, QUICK, UNDER_TEST, dtype_of, each_of
from jaxprs import equations

from pallas_kernels import (
    XLA,
    AttentionInputs,
    AttentionSpec,
    Dropout,
    KVSide,
    Mask,
    QuerySide,
    Score,
    Tiles,
    softmax,
    xla,
)
from pallas_kernels.backend import HalfDkv
from pallas_kernels.score import sink_gradient

every_implementation = each_of(UNDER_TEST)
# Interpreted kernels have one tile of keys here.
COMPILED = [name for name in UNDER_TEST if ON_GPU or not name.startswith("mosaic")]
DTYPE = dtype_of(IMPLEMENTATION or "xla")
# Several tiles, of which the last ones are partial; queries are the last tokens.
T, S = (200, 328) if ON_GPU else (40, 56)
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 32
NO_MASK, CAUSAL = AttentionSpec.of(0.25), AttentionSpec.of(0.25, right=0)


def tokens_at(at, segment_ids=None):
    return local.tokens(jnp.asarray(at, jnp.int32), segment_ids)


TOKENS = tokens_at(np.arange(S - T, S)), tokens_at(np.arange(S))


def problem(seed=0, t=T, s=S):
    """``(q, do), (k, v), (lse, delta)`` and float32 ``(o, lse), dq, (dk, dv)`` to start from."""
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q_shape, kv_shape = (BATCH, t, HEADS, DIM), (BATCH, s, KV_HEADS, DIM)
    qdo, kv = (tuple(normal(*x, dtype=DTYPE) for _ in range(2)) for x in (q_shape, kv_shape))
    stats = normal(BATCH, HEADS, t) + 4, normal(BATCH, HEADS, t)
    carry = normal(*q_shape), normal(BATCH, HEADS, t)
    return qdo, kv, stats, (carry, normal(*q_shape), (normal(*kv_shape), normal(*kv_shape)))


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _forward(implementation, spec, q, kv, tokens, carry):
    return local.forward(implementation, q, kv, *tokens, carry=carry, spec=spec)


def forward(name, spec, q, kv, tokens=TOKENS, carry=None):
    """``(o, lse)``."""
    q, kv = supported(name, (q, kv))
    return [np.asarray(x) for x in _forward(IMPLEMENTATIONS[name], spec, q, kv, tokens, carry)]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _backward(implementation, spec, qdo, kv, stats, tokens, dq, dkv):
    return local.backward(implementation, qdo, kv, stats, *tokens, dq=dq, dkv=dkv, spec=spec)


def backward(name, spec, qdo, kv, stats, tokens=TOKENS, dq=None, dkv=None):
    """``(dq, dkv)``."""
    qdo, kv = supported(name, (qdo, kv))
    results = _backward(IMPLEMENTATIONS[name], spec, qdo, kv, stats, tokens, dq, dkv)
    return [np.asarray(x) for x in results]


def supported(name, arrays):
    """The arrays in a dtype that the implementation supports."""
    return jax.tree.map(lambda x: x.astype(min(DTYPE, dtype_of(name), key=by_size)), arrays)


def by_size(dtype):
    return dtype.itemsize


def assert_close(got, want):
    """As close as float32 sums in another order are."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5 * max(1, np.abs(y).max()))


def assert_rounded(got, wide):
    """To bfloat16, at last by a cast; float32 sums in another order may move few elements."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wide), strict=True):
        x = x.astype(jnp.bfloat16)
        np.testing.assert_allclose(x.astype(np.float32), y, rtol=2**-7, atol=1e-5)
        assert (x == y.astype(jnp.bfloat16)).mean() > 0.99


# --- one problem, in every form that a ring calls ------------------------------------------------


@functools.cache
def calls(name):
    """Results of all forms of one call, of one compiled program, and what was given to them.

    With dropout and the gradient of slopes, which are not zero for the keys beyond a partial tile.
    """
    spec = AttentionSpec(Mask(), Score(0.25, differentiated=("alibi_slopes",)), Dropout(0.3))
    qdo, kv, stats, given = problem()
    qdo, kv = supported(name, (qdo, kv))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(qdo, kv, stats, carry, dq, dkv):
        options: Any = {
            "spec": spec,
            "numbers": {"alibi_slopes": jnp.linspace(0.05, 0.4, HEADS)},
            "seeds": 77_777 * jnp.arange(BATCH * HEADS, dtype=jnp.int32).reshape(BATCH, HEADS),
        }
        implementation = IMPLEMENTATIONS[name]
        attend = functools.partial(local.forward, implementation, qdo[0], kv, *TOKENS, **options)
        differentiate = functools.partial(
            local.gradients, implementation, qdo, kv, stats, *TOKENS, **options
        )
        nothing = jnp.zeros_like(carry[0]), jnp.full_like(carry[1], -jnp.inf)
        rounded = carry[0].astype(jnp.bfloat16), carry[1]
        results = {
            "fresh": attend(),
            "from nothing": attend(nothing),
            "fresh, rounded": attend(out_dtype=jnp.bfloat16),
            "carried": attend(carry),
            "carried, rounded": attend(carry, out_dtype=jnp.bfloat16),
            "rounded before": attend(rounded, out_dtype=jnp.bfloat16),
            "rounded values": attend(
                (rounded[0].astype(jnp.float32), rounded[1]), out_dtype=jnp.bfloat16
            ),
            "gradients": differentiate(),
            "rounded": differentiate(out_dtype=jnp.bfloat16),
            # What is added to is not rounded.
            "added": differentiate(dq, dkv, out_dtype=jnp.bfloat16),
        }
        if implementation.split_backward is not None:
            results["half"] = half = differentiate(part=0)
            results["both halves"] = differentiate(*half[:2], part=1)
        return results

    return jax.tree.map(np.asarray, (run(qdo, kv, stats, *given), given))


@every_implementation
def test_results_are_float32_and_like_the_reference_s(name):
    results, _ = calls(name)
    o, lse = results["fresh"]
    assert (o.shape, lse.shape) == ((BATCH, T, HEADS, DIM), (BATCH, HEADS, T))
    limit = 3 * compare.RELATIVE_RMS[min(DTYPE, dtype_of(name), key=by_size).name]
    want, _ = calls("reference")
    for what in ("fresh", "carried", "gradients"):
        pairs = zip(*(jax.tree.leaves(x[what]) for x in (results, want)), strict=True)
        for got, expected in pairs:
            assert got.dtype == np.float32
            assert compare.errors(got, expected)[1] < limit, what


@every_implementation
def test_an_empty_carry_is_no_carry(name):
    results, _ = calls(name)
    assert_close(results["from nothing"], results["fresh"])


@every_implementation
@pytest.mark.parametrize("what", ["fresh", "carried"])
def test_the_last_call_rounds_out_and_nothing_else(name, what):
    results, _ = calls(name)
    (o, lse), (rounded, same_lse) = results[what], results[f"{what}, rounded"]
    assert rounded.dtype == jnp.bfloat16
    assert_rounded(rounded, o)
    np.testing.assert_allclose(same_lse, lse, rtol=1e-6)


@every_implementation
def test_a_rounded_carry_counts_as_its_float32_values(name):
    results, _ = calls(name)
    (o, lse), (same_o, same_lse) = results["rounded before"], results["rounded values"]
    assert o.dtype == jnp.bfloat16
    assert not np.array_equal(o, results["carried, rounded"][0])
    np.testing.assert_array_equal(o, same_o)
    np.testing.assert_array_equal(lse, same_lse)


@every_implementation
def test_gradients_are_added_to_what_is_given_or_rounded(name):
    results, (_, *given) = calls(name)
    *new, of_slopes = results["gradients"]
    *added, same_slopes = results["added"]
    assert {x.dtype for x in jax.tree.leaves(added)} == {np.dtype(np.float32)}
    assert_close(added, jax.tree.map(np.add, given, list(new)))
    assert all(np.abs(x).max() > 0.1 for x in jax.tree.leaves(new))
    *rounded, slopes_too = results["rounded"]
    assert_rounded(rounded, new)
    for of_numbers in (same_slopes, slopes_too):
        assert_close(of_numbers, of_slopes)


@each_of([name for name in COMPILED if name != "reference"])
def test_both_halves_of_the_work_add_up(name):
    results, _ = calls(name)
    *whole, all_slopes = results["gradients"]
    *half, slopes = results["half"]
    *both, more_slopes = results["both halves"]
    assert_close(both, whole)
    assert_close(jax.tree.map(np.add, slopes, more_slopes), all_slopes)
    if isinstance(half[1], HalfDkv):  # It is not set where there is no work.
        half, whole = half[:1], whole[:1]
    for some, want in zip(*map(jax.tree.leaves, (half, whole)), strict=True):
        assert 0.02 < np.abs(some).sum() / np.abs(want).sum() < 0.98


# --- edges ---------------------------------------------------------------------------------------


def growing(score, batch, head, q_position, kv_position):
    """Its value and its derivative are NaN for keys after their query."""
    del batch, head
    return score * (1 + jnp.sqrt((q_position - kv_position).astype(jnp.float32)) / 8)


def limited(score, batch, head, q_position, kv_position):
    """The same of a tanh."""
    del batch, head
    return score + jnp.tanh(jnp.sqrt((q_position - kv_position).astype(jnp.float32)))


def raised(score, batch, head, q_position, kv_position):
    """Overflows where a query of zeros past the last one meets an lse of zero."""
    del batch, head, q_position, kv_position
    return score + 100


@each_of(COMPILED)
@pytest.mark.parametrize("score_mod", [growing, limited, raised])
def test_scores_outside_of_the_mask_and_of_the_arrays_have_no_gradient(name, score_mod):
    qdo, kv, stats, _ = problem()
    score = dataclasses.replace(CAUSAL.score, score_mod=score_mod)
    spec = dataclasses.replace(CAUSAL, score=score)
    if score_mod is raised:
        stats = stats[0] + 100, stats[1]
    got, want = (backward(n, spec, qdo, kv, stats) for n in (name, "reference"))
    for x, y in zip(got, want, strict=True):
        dtype = min(DTYPE, dtype_of(name), key=by_size)
        assert compare.errors(x, y)[1] < 3 * compare.RELATIVE_RMS[dtype.name]


@each_of(COMPILED)
def test_large_logits_do_not_overflow(name):
    """Far above 0, or far below, where the weight of a zero key beyond a partial tile would."""
    qdo, kv, stats, _ = problem()
    large = 40 * qdo[0]
    got, want = (forward(n, NO_MASK, large, kv) for n in (name, "reference"))
    assert np.abs(want[1]).max() > 100
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    np.testing.assert_allclose(got[0], want[0], rtol=0.05, atol=0.05)
    q, k = jnp.full_like(qdo[0], 10), jnp.full_like(kv[0], -10)
    o, lse = forward(name, NO_MASK, q, (k, kv[1]))
    np.testing.assert_allclose(lse, np.log(S) - 25 * DIM, rtol=1e-5)
    mean = np.asarray(kv[1], np.float32).mean(1, keepdims=True).repeat(2, 2)
    np.testing.assert_allclose(o, np.broadcast_to(mean, o.shape), rtol=1e-2, atol=1e-2)
    for x in backward(name, NO_MASK, (q, qdo[1]), (k, kv[1]), (lse, stats[1])):
        assert np.isfinite(x).all()


@each_of(COMPILED)
def test_what_gets_nothing_new_is_unchanged_bit_for_bit(name):
    """Behind the tile bounds; or in tiles that are visited, hidden by the mask or by segments."""
    qdo, kv, stats, ((o, lse), dq, dkv) = problem(s=T)
    lse = (30 * lse).at[:, 1, 5].set(-jnp.inf)
    o = o.at[:, 5, 1].set(0)
    at, spec = np.arange(T), AttentionSpec.of(scale=0.25, left=50, right=0)
    same = jnp.ones((BATCH, T), jnp.int32)
    # Every tile has ids from 1 to 5 or from 2 to 6, none of them the same.
    odd = jnp.tile(jnp.asarray(1 + 4 * (at % 2), jnp.int32), (BATCH, 1))
    for tokens in (
        (tokens_at(at, same), tokens_at(at + 1000, same)),
        # Every query tile reaches from before the keys to behind them.
        (tokens_at(np.where(at % 16 == 3, 5000, at), same), tokens_at(at + 1000, same)),
        (tokens_at(at, odd), tokens_at(at, odd + 1)),
    ):
        got = forward(name, spec, qdo[0], kv, tokens, (o, lse))
        for x, y in zip(got, (o, lse), strict=True):
            np.testing.assert_array_equal(x, y)
        got = backward(name, spec, qdo, kv, stats, tokens, dq, dkv)
        for x, y in zip(got, (dq, jnp.stack(dkv)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_tiles_outside_the_bounds_are_not_read_and_results_are_written():
    """Tiles that nothing sees, or that see nothing, hold NaN."""
    qdo, kv, stats, _ = problem(t=48, s=192)
    # Query tiles of 16: the first two see keys 66..127, the last one lies before all keys. Tiles of
    # 24 keys around them are 48..143.
    at = np.concatenate([np.arange(96, 128), np.arange(-16, 0)])
    tokens, spec = (tokens_at(at), tokens_at(np.arange(192))), AttentionSpec.of(0.25, 30, 0)
    seen, sees = (np.arange(192) >= 48) & (np.arange(192) < 144), np.arange(48) < 32

    def poisoned(arrays, kept):
        return tuple(jnp.where(kept[:, None, None], x, jnp.nan) for x in arrays)

    nan_qdo, nan_kv = poisoned(qdo, sees), poisoned(kv, seen)
    clean = forward("xla", spec, qdo[0], kv, tokens), backward("xla", spec, qdo, kv, stats, tokens)
    got = (
        forward("xla", spec, nan_qdo[0], nan_kv, tokens),
        backward("xla", spec, nan_qdo, nan_kv, stats, tokens),
    )
    for x, y in zip(*map(jax.tree.leaves, (got, clean)), strict=True):
        assert not np.isnan(y).any()
        np.testing.assert_array_equal(x, y)
    (o, lse), (dq, dkv) = got
    assert (lse[:, :, 32:] == -np.inf).all()
    for x in (o[:, 32:], dq[:, 32:], dkv[:, :, ~seen]):
        assert not x.any()


def test_float32_products_are_not_rounded_to_tf32():
    """As a GPU's matrix instructions would by default, where a CPU's results show nothing of it."""
    qdo, kv, stats, _ = problem()

    def both(qdo, kv):
        out = local.forward(IMPLEMENTATIONS["xla"], qdo[0], kv, *TOKENS, spec=CAUSAL)
        return out, local.backward(IMPLEMENTATIONS["xla"], qdo, kv, stats, *TOKENS, spec=CAUSAL)

    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), (qdo, kv))
        products = [
            equation
            for equation, _ in equations(jax.make_jaxpr(both)(*arrays).jaxpr)
            if equation.primitive.name == "dot_general"
        ]
        assert len(products) >= 2 + 5
        for product in products:
            assert product.outvars[0].aval.dtype == jnp.float32
            if dtype == jnp.float32:
                assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


# --- XLA's tiles, and the softmax ----------------------------------------------------------------


def test_xla_chooses_even_tiles():
    for t, s, tiles in (
        (1, 1, Tiles(1, 1)),
        (256, 512, Tiles(256, 512)),
        (257, 513, Tiles(129, 257)),
        (1000, 1000, Tiles(250, 500)),
        (63, 4097, Tiles(63, 456)),
    ):
        q, k = (jnp.zeros((1, length, 1, 8)) for length in (t, s))
        assert xla.even_tiles(AttentionInputs(QuerySide(q), KVSide(k, k))) == tiles


def test_xla_s_own_tiles_agree_with_small_ones():
    (q, _), kv, *_ = problem(t=300, s=530)
    # In bfloat16 weights are rounded relative to the largest score of a tile.
    q, *kv = (x.astype(jnp.float32) for x in (q, *kv))
    tokens = tokens_at(np.arange(230, 530)), tokens_at(np.arange(530))
    own = _forward(XLA, CAUSAL, q, kv, tokens, None)
    assert_close(own, _forward(IMPLEMENTATIONS["xla"], CAUSAL, q, kv, tokens, None))


@pytest.mark.parametrize("base", ["2", "e"])
def test_the_softmax_ends_with_the_log_sum_exp(base):
    """Of a query without keys: no weight, no NaN."""
    scores = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32) * 30
    scaled = scores * np.float32(np.log2(np.e) if base == "2" else 1)
    m = scaled.max(1)
    total = (np.exp2 if base == "2" else np.exp)(scaled - m[:, None]).sum(1)
    divisor, lse = softmax.finish(jnp.asarray(m), jnp.asarray(total), base)
    np.testing.assert_array_equal(np.asarray(divisor), total)
    want = np.logaddexp.reduce(scores.astype(np.float64), axis=1)
    np.testing.assert_allclose(np.asarray(lse), want, rtol=1e-6)
    for start in (None, jnp.float32(-jnp.inf)):  # A sink of -inf is no sink.
        m, total = softmax.start((3,), start, base)
        divisor, lse = softmax.finish(m, total, base)
        np.testing.assert_array_equal(np.asarray(divisor), 1)
        np.testing.assert_array_equal(np.asarray(lse), -np.inf)
        # A masked score has no weight relative to the initial m.
        assert float(jnp.exp2(-jnp.inf - m[0])) == 0


def test_a_sink_of_minus_infinity_has_no_gradient():
    """Where a query has no keys either, its lse is -inf, too."""
    lse = jnp.asarray([[[-jnp.inf, 1.0], [0.5, 2.0]]])
    delta = jnp.asarray([[[3.0, 4.0], [5.0, 6.0]]])
    got = sink_gradient(jnp.asarray([-jnp.inf, 0.5]), lse, delta)
    np.testing.assert_allclose(got, [0, -(5 + 6 * np.exp(-1.5))], rtol=1e-6)
