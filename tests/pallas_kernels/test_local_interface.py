"""What every implementation of local attention guarantees, apart from its precision."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import local
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, QUICK, SMALL
from jax.experimental import pallas as pl
from jaxprs import equations

from pallas_kernels import (
    REFERENCE,
    XLA,
    AttentionInputs,
    AttentionSpec,
    Dropout,
    KVSide,
    QuerySide,
    Tiles,
    softmax,
    triton,
    xla,
)

# The sm90 kernels do not support float32: test_local_sm90.py tests the same of it.
every_implementation = pytest.mark.parametrize(
    "name", [name for name in IMPLEMENTATIONS if name != "mosaic_sm90"]
)
SPEC = AttentionSpec.of(scale=0.25, right=0)


def small(seed=0, t=40, s=50, heads=4, kv_heads=2, dim=16, batch=2):
    """``(q, kv, stats, carry, dq, dkv)`` of random float32."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, kv = normal(batch, t, heads, dim), normal(2, batch, s, kv_heads, dim)
    o, lse = normal(batch, t, heads, dim), normal(batch, heads, t)
    return q, kv, (lse, normal(batch, heads, t)), (o, lse), normal(*q.shape), normal(*kv.shape)


def tokens_at(at, segment_ids=None):
    return local.tokens(jnp.asarray(at, jnp.int32), segment_ids)


def forward(implementation, q, kv, q_tokens, kv_tokens, carry=None, spec=SPEC):
    return [
        np.asarray(x) for x in _forward(implementation, spec, q, kv, q_tokens, kv_tokens, carry)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _forward(implementation, spec, q, kv, q_tokens, kv_tokens, carry):
    return local.forward(implementation, q, kv, q_tokens, kv_tokens, carry, spec=spec)


def backward(implementation, qdo, kv, stats, q_tokens, kv_tokens, dq=None, dkv=None, spec=SPEC):
    tokens, sums = (q_tokens, kv_tokens), (dq, dkv)
    return [np.asarray(x) for x in _backward(implementation, spec, qdo, kv, stats, tokens, sums)]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _backward(implementation, spec, qdo, kv, stats, tokens, sums):
    return local.backward(implementation, qdo, kv, stats, *tokens, *sums, spec=spec)


@every_implementation
def test_results_are_float32(name):
    q, kv, stats, carry, _, _ = small()
    half_q, half_kv = (x.astype(jnp.bfloat16) for x in (q, kv))
    tokens = tokens_at(np.arange(40)), tokens_at(np.arange(50))
    implementation = IMPLEMENTATIONS[name]
    for results in (
        forward(implementation, half_q, half_kv, *tokens),
        forward(implementation, half_q, half_kv, *tokens, carry),
        backward(implementation, (half_q, half_q), half_kv, stats, *tokens),
    ):
        assert [x.dtype for x in results] == [np.float32, np.float32]
    o, lse = forward(implementation, half_q, half_kv, *tokens)
    assert (o.shape, lse.shape) == (q.shape, (2, 4, 40))


@every_implementation
def test_gradients_that_are_rounded_are_those_that_are_cast(name):
    """A kernel that rounds as it writes loses nothing, and what is added to is not rounded."""
    q, kv, stats, _, dq, dkv = small()
    tokens = tokens_at(np.arange(40)), tokens_at(np.arange(50))
    q, kv = (x.astype(jnp.bfloat16) for x in (q, kv))
    arrays = (q, q[::-1]), tuple(kv), stats, *tokens
    run = functools.partial(local.gradients, IMPLEMENTATIONS[name], spec=SPEC)
    run = jax.jit(run, static_argnames="out_dtype", compiler_options=QUICK)
    wide, rounded = run(*arrays), run(*arrays, out_dtype=jnp.bfloat16)
    for got, want in zip(jax.tree.leaves(rounded), jax.tree.leaves(wide), strict=True):
        assert want.dtype == jnp.float32
        np.testing.assert_array_equal(got.astype(jnp.bfloat16), want.astype(jnp.bfloat16))
    sums = run(*arrays, dq, tuple(dkv), out_dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(sums)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("name", "given", "dropout"),
    [
        ("reference", (True, True), 0.0),
        ("xla", (True, False), 0.0),
        ("xla", (False, True), 0.3),
        ("triton", (True, True), 0.3),
    ],
)
def test_gradients_are_added_to_what_is_given(name, given, dropout):
    q, kv, _, _, dq, dkv = small()
    tokens = tokens_at(np.arange(40)), tokens_at(np.arange(50))
    spec = dataclasses.replace(SPEC, dropout=Dropout(dropout) if dropout else None)
    seeds = jnp.arange(8, dtype=jnp.int32).reshape(2, 4) if dropout else None
    run = functools.partial(local.backward, IMPLEMENTATIONS[name], spec=spec, seeds=seeds)
    run = jax.jit(run, compiler_options=QUICK)
    _, lse = forward(REFERENCE, q, kv, *tokens)
    arrays = (q, q[::-1]), kv, (lse, small(1)[2][1]), *tokens
    sums = (dq if given[0] else None, dkv if given[1] else None)
    for got, new, start in zip(run(*arrays, *sums), run(*arrays), sums, strict=True):
        want = new if start is None else new + start
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert np.abs(new).max() > 0.1


def growing(score, batch, head, q_position, kv_position):
    """Its value and its derivative are NaN for keys after their query."""
    del batch, head
    return score * (1 + jnp.sqrt((q_position - kv_position).astype(jnp.float32)) / 8)


@every_implementation
def test_masked_scores_have_no_gradient_whatever_their_derivative(name):
    q, kv, stats, *_ = small()
    tokens = tokens_at(np.arange(40)), tokens_at(np.arange(50))
    spec = dataclasses.replace(SPEC, score=dataclasses.replace(SPEC.score, score_mod=growing))
    _, lse = forward(REFERENCE, q, kv, *tokens, spec=spec)
    arrays = (q, q), kv, (lse, stats[1]), *tokens
    got = backward(IMPLEMENTATIONS[name], *arrays, spec=spec)
    for x, y in zip(got, backward(REFERENCE, *arrays, spec=spec), strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@every_implementation
def test_padding_of_a_partial_tile_has_no_weight(name):
    """With logits far below 0, the weight of a zero key would overflow."""
    q, kv, stats, *_ = small()
    q, kv = jnp.full_like(q, 10.0), kv.at[0].set(-10.0)
    tokens, spec = (tokens_at(np.arange(40)), tokens_at(np.arange(50))), AttentionSpec.of(0.25)
    o, lse = forward(IMPLEMENTATIONS[name], q, kv, *tokens, spec=spec)
    np.testing.assert_allclose(lse, np.log(50) - 400, rtol=1e-5)
    mean = np.asarray(kv[1]).mean(1, keepdims=True).repeat(2, 2)
    np.testing.assert_allclose(o, np.broadcast_to(mean, o.shape), rtol=1e-4, atol=1e-5)
    for x in backward(IMPLEMENTATIONS[name], (q, q), kv, (lse, stats[1]), *tokens, spec=spec):
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    "right", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param(0, id="causal")]
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "triton" else ())
        for name in IMPLEMENTATIONS
        if name not in ("reference", "mosaic_sm90")
    ],
)
def test_both_halves_of_the_work_add_up(name, right):
    implementation, spec = IMPLEMENTATIONS[name], AttentionSpec.of(scale=0.25, right=right)
    q, kv, _, _, _, _ = small(t=64, s=96)
    tokens = tokens_at(np.arange(64) + 32), tokens_at(np.arange(96))
    _, lse = forward(implementation, q, kv, *tokens, spec=spec)
    stats = jnp.asarray(lse), small(1, t=64)[2][1]
    arguments = ((q, q[::-1]), kv, stats, *tokens)
    whole = backward(implementation, *arguments, spec=spec)

    def part(which, *sums):
        return local.backward(implementation, *arguments, *sums, spec=spec, part=which)

    first, second = part(0), part(1)
    for sums in (part(1, *first), part(0, *second)):
        for got, want in zip(sums, whole, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for half in (first, second):  # Neither has all of it.
        for some, want in zip(half, whole, strict=True):
            assert 0.02 < np.abs(some).sum() / np.abs(want).sum() < 0.98


@every_implementation
@pytest.mark.parametrize("hidden", ["by_bounds", "by_mask", "by_segments"])
def test_a_carry_that_gets_nothing_new_comes_back_bit_for_bit(name, hidden):
    q, kv, _, (o, lse), _, _ = small(s=40)
    lse = (30 * lse).at[:, 1, 5].set(-jnp.inf)
    o = o.at[:, 5, 1].set(0)
    at, spec = np.arange(40), AttentionSpec.of(scale=0.25, left=50, right=0)
    q_tokens, kv_tokens = tokens_at(at), tokens_at(at + 100)
    if hidden == "by_mask":
        # Every query tile reaches from before the keys to behind them: visited in vain.
        q_tokens = tokens_at(np.where(at % 16 == 3, 1000, at))
    if hidden == "by_segments":
        # Every tile has ids from 1 to 5 or from 2 to 6, none of them the same.
        odd = jnp.asarray(1 + 4 * (at % 2), jnp.int32)
        q_tokens, kv_tokens = (tokens_at(at, jnp.tile(odd + i, (2, 1))) for i in (0, 1))
    got = forward(IMPLEMENTATIONS[name], q, kv, q_tokens, kv_tokens, (o, lse), spec)
    np.testing.assert_array_equal(got[0], o)
    np.testing.assert_array_equal(got[1], lse)


@every_implementation
def test_an_empty_carry_is_no_carry(name):
    q, kv, *_ = small()
    tokens = tokens_at(np.arange(40)), tokens_at(np.arange(50))
    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full((2, 4, 40), -jnp.inf, jnp.float32)
    fresh = forward(IMPLEMENTATIONS[name], q, kv, *tokens)
    for a, b in zip(forward(IMPLEMENTATIONS[name], q, kv, *tokens, nothing), fresh, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


@every_implementation
@pytest.mark.parametrize("carried", [False, True], ids=["fresh", "carried"])
def test_the_last_call_rounds_out_and_nothing_else(name, carried):
    q, kv, _, carry, _, _ = small()
    carry = carry if carried else None
    tokens = tokens_at(np.arange(40)), tokens_at(np.arange(50))
    implementation = IMPLEMENTATIONS[name]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def last(q, kv, carry):
        options = {"spec": SPEC, "out_dtype": jnp.bfloat16}
        return local.forward(implementation, q, kv, *tokens, carry, **options)

    o, lse = forward(implementation, q, kv, *tokens, carry)
    rounded, same_lse = last(q, kv, carry)
    assert rounded.dtype == jnp.bfloat16
    # Half a unit in the last place, and float32 rounding in another order.
    np.testing.assert_allclose(rounded.astype(np.float32), o, rtol=2**-8, atol=1e-6)
    assert (np.asarray(rounded) == o.astype(jnp.bfloat16)).mean() > 0.99
    np.testing.assert_allclose(same_lse, lse, rtol=1e-6)


def test_every_element_of_the_results_is_written():
    """Interpreted kernels find NaN in their results; most rows here have nothing to do."""

    def write_nothing(x_ref, o_ref):
        del x_ref, o_ref

    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    poison = pl.pallas_call(write_nothing, out_shape=shape, interpret=True)(jnp.zeros((16, 16)))
    assert np.isnan(poison).all()
    q, kv, stats, *_ = small(t=45, s=70)
    interpreted = triton(interpret=True, config=SMALL)
    spec = AttentionSpec.of(scale=0.25, left=3, right=0)
    tokens = tokens_at(np.arange(45) + 60), tokens_at(np.arange(70))
    o, lse = forward(interpreted, q, kv, *tokens, spec=spec)
    dq, dkv = backward(interpreted, (q, q), kv, (lse, stats[1]), *tokens, spec=spec)
    assert not np.isnan(lse).any()
    for result in (o, dq, dkv):
        assert np.isfinite(result).all()
        assert (result == 0).mean() > 0.5
        assert (result != 0).any()


@every_implementation
def test_large_logits_do_not_overflow(name):
    q, kv, *_ = small()
    tokens = tokens_at(np.arange(40)), tokens_at(np.arange(50))
    spec = AttentionSpec.of(scale=100.0)
    got = forward(IMPLEMENTATIONS[name], 10 * q, 10 * kv, *tokens, spec=spec)
    want = forward(REFERENCE, 10 * q, 10 * kv, *tokens, spec=spec)
    assert np.abs(want[1]).max() > 1e4
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    assert np.isfinite(got[0]).all()
    np.testing.assert_allclose(got[0], want[0], rtol=0.05, atol=0.05)


POISON_SPEC = AttentionSpec.of(scale=0.25, left=30, right=0)


@pytest.mark.parametrize("name", ["xla", "triton"])
def test_tiles_outside_the_bounds_are_not_read(name):
    """Key tiles that no query tile may see hold NaN; the result does not know."""
    q, kv, *_ = small(t=32, s=192)
    tokens = tokens_at(np.arange(96, 128)), tokens_at(np.arange(192))
    seen = np.arange(192)
    # Queries 96..127 see keys 66..127; tiles of 24 or 32 keys around them are 48..143 or 64..127.
    seen = (seen >= 48) & (seen < 144)
    poisoned = jnp.where(seen[:, None, None], kv, jnp.nan)
    clean = forward(IMPLEMENTATIONS[name], q, kv, *tokens, spec=POISON_SPEC)
    got = forward(IMPLEMENTATIONS[name], q, poisoned, *tokens, spec=POISON_SPEC)
    assert np.isfinite(clean[0]).all()
    for a, b in zip(got, clean, strict=True):
        np.testing.assert_array_equal(a, b)


def test_xla_backward_reads_no_tile_outside_the_bounds():
    """Neither keys that nothing sees nor queries that see nothing: one tile of each holds NaN."""
    q, kv, stats, *_ = small(t=48, s=192)
    # Query tiles of 16: the first two see keys 66..127, the last one lies before all keys.
    at = np.concatenate([np.arange(96, 128), np.arange(-16, 0)])
    tokens = tokens_at(at), tokens_at(np.arange(192))
    keys, rows = np.arange(192), np.arange(48) < 32
    seen = (keys >= 48) & (keys < 144)
    poisoned_kv = jnp.where(seen[:, None, None], kv, jnp.nan)
    poisoned_q = jnp.where(rows[:, None, None], q, jnp.nan)
    xla_small = IMPLEMENTATIONS["xla"]
    stats = (forward(REFERENCE, q, kv, *tokens, spec=POISON_SPEC)[1], stats[1])
    clean = backward(xla_small, (q, q), kv, stats, *tokens, spec=POISON_SPEC)
    got = backward(
        xla_small, (poisoned_q, poisoned_q), poisoned_kv, stats, *tokens, spec=POISON_SPEC
    )
    for a, b in zip(got, clean, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_array_equal(a, b)
    assert not got[0][:, 32:].any()
    assert not got[1][:, :, ~seen].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["xla", "triton"])
def test_float32_products_are_not_rounded_to_tf32(name, dtype):
    """As a GPU's matrix instructions would by default, where a CPU's results show nothing of it."""
    q, kv, stats, *_ = small()
    q, kv = q.astype(dtype), kv.astype(dtype)
    tokens = tokens_at(np.arange(40)), tokens_at(np.arange(50))

    def both(q, kv):
        out = local.forward(IMPLEMENTATIONS[name], q, kv, *tokens, spec=SPEC)
        arrays = (q, q), kv, stats, *tokens
        return out, local.backward(IMPLEMENTATIONS[name], *arrays, spec=SPEC)

    products = [
        equation
        for equation, _ in equations(jax.make_jaxpr(both)(q, kv).jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    assert len(products) >= 2 + 5
    for product in products:
        assert product.outvars[0].aval.dtype == jnp.float32
        if dtype == "float32":
            assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


@pytest.mark.parametrize(
    ("t", "s", "tiles"),
    [
        (1, 1, Tiles(1, 1)),
        (256, 512, Tiles(256, 512)),
        (257, 513, Tiles(129, 257)),
        (1000, 1000, Tiles(250, 500)),
        (63, 4097, Tiles(63, 456)),
    ],
    ids=str,
)
def test_xla_chooses_even_tiles(t, s, tiles):
    q, k = (jnp.zeros((1, length, 1, 8)) for length in (t, s))
    assert xla.even_tiles(AttentionInputs(QuerySide(q), KVSide(k, k))) == tiles


def test_default_tiles_agree_with_small_ones():
    q, kv, *_ = small(t=300, s=530)
    tokens = tokens_at(np.arange(230, 530)), tokens_at(np.arange(530))
    pairs = zip(
        forward(XLA, q, kv, *tokens), forward(IMPLEMENTATIONS["xla"], q, kv, *tokens), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", ["2", "e"])
def test_the_softmax_ends_with_the_log_sum_exp(base):
    scores = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32) * 30
    scaled = scores * np.float32(np.log2(np.e) if base == "2" else 1)
    m = scaled.max(1)
    total = (np.exp2 if base == "2" else np.exp)(scaled - m[:, None]).sum(1)
    divisor, lse = softmax.finish(jnp.asarray(m), jnp.asarray(total), base)
    np.testing.assert_array_equal(np.asarray(divisor), total)
    want = np.logaddexp.reduce(scores.astype(np.float64), axis=1)
    np.testing.assert_allclose(np.asarray(lse), want, rtol=1e-6)


def test_a_query_without_keys_has_no_weight_and_no_nan():
    m, total = softmax.start((3,), None)
    divisor, lse = softmax.finish(m, total)
    np.testing.assert_array_equal(np.asarray(divisor), 1)
    np.testing.assert_array_equal(np.asarray(lse), -np.inf)
    divisor, lse = softmax.finish(jnp.full((3,), -jnp.inf), total, "e")
    np.testing.assert_array_equal(np.asarray(lse), -np.inf)
    # A masked score has no weight relative to the initial m.
    assert float(jnp.exp2(-jnp.inf - m[0])) == 0
