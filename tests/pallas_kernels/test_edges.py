"""What masked scores, ragged tiles, carried gradients and later sequences of a batch contribute."""

from __future__ import annotations

import functools

import interpreted
import jax
import jax.numpy as jnp
import local
import local_cases
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, QUICK

from pallas_kernels import (
    REFERENCE,
    AttentionSpec,
    BlockMask,
    Dropout,
    Mask,
    Score,
    Tiles,
    mosaic_sm90,
    xla,
)
from pallas_kernels.bounds import _summary
from pallas_kernels.mosaic.sm90.configs import MosaicConfig

T, S, N, K, H = 24, 40, 4, 2, 16


def arrays_of(seed=0):
    """``(q, do), (k, v), (lse, delta)`` of two sequences; the stats are in a softmax's range."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, do, k, v = normal(2, T, N, H), normal(2, T, N, H), normal(2, S, K, H), normal(2, S, K, H)
    return (q, do), (k, v), (normal(2, N, T) + 4, normal(2, N, T))


def gradients(implementation, spec, dkv=None, **options):
    """All gradients of :func:`arrays_of`, the queries behind the first S - T keys."""
    qdo, kv, stats = arrays_of()
    tokens = (
        local.tokens(jnp.arange(S - T, S, dtype=jnp.int32)),
        local.tokens(jnp.arange(S, dtype=jnp.int32)),
    )

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(qdo, kv, stats, dkv):
        sides = qdo, kv, stats, *tokens
        return local.gradients(implementation, *sides, None, dkv, spec=spec, **options)

    return jax.tree.map(np.asarray, run(qdo, kv, stats, dkv))


def assert_close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def log_of_distance(score, batch, head, q_position, kv_position):
    """NaN, and its derivative too, where the key is after its query."""
    del batch, head
    return score * jnp.log(1.5 + q_position.astype(jnp.float32) - kv_position.astype(jnp.float32))


@pytest.mark.parametrize("name", ["xla", "triton"])
def test_a_derivative_without_a_value_where_scores_are_masked_adds_nothing(name):
    spec = AttentionSpec(Mask(right=0), Score(0.1, score_mod=log_of_distance))
    got = gradients(IMPLEMENTATIONS[name], spec)
    assert_close(got, gradients(REFERENCE, spec))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


@pytest.mark.parametrize("name", ["xla", "triton"])
def test_keys_beyond_a_ragged_tile_add_nothing_to_the_slopes(name):
    """Their products are zero, and so is what they add to dQ, but not their bias."""
    spec = AttentionSpec(Mask(), Score(0.1, differentiated=("alibi_slopes",)))
    slopes = {"alibi_slopes": jnp.linspace(0.05, 0.4, N)}
    ragged = xla.in_tiles(Tiles(16, 32)) if name == "xla" else IMPLEMENTATIONS[name]
    got = gradients(ragged, spec, numbers=slopes)
    assert_close(got, gradients(REFERENCE, spec, numbers=slopes))


@pytest.mark.parametrize("name", ["xla", "triton"])
def test_carried_gradients_of_keys_are_not_scaled_by_dropout(name):
    spec = AttentionSpec(Mask(right=3), Score(0.1), Dropout(0.4))
    seeds = jnp.arange(2 * N, dtype=jnp.int32).reshape(2, N) * 77_777
    _, kv, _ = arrays_of(seed=1)
    fresh = gradients(IMPLEMENTATIONS[name], spec, seeds=seeds)
    carried = gradients(IMPLEMENTATIONS[name], spec, kv, seeds=seeds)
    assert_close(carried[1], [x + y for x, y in zip(fresh[1], kv, strict=True)])


def test_tiles_of_a_block_mask_are_possible_and_full_as_its_scores_are():
    rng = np.random.default_rng(3)
    q, kv = (
        local.tokens(jnp.asarray(np.sort(rng.choice(64, n, False)), jnp.int32)) for n in (24, 36)
    )
    blocks, tiles = ((8, 16), (4, 4), (64, 2)), ((8, 12), (4, 6), (24, 36))
    for (q_block, kv_block), (block_q, block_kv) in zip(blocks, tiles, strict=True):
        heads = 2 if block_q == 8 else 1
        table = rng.random((heads, 64 // q_block, 64 // kv_block)) < 0.5
        mask = BlockMask(jnp.asarray(table), q_block, kv_block)
        possible, full = mask.tiles(_summary(q, block_q), _summary(kv, block_kv))
        # All blocks between those of a tile's first and last token count.
        for (h, i, j), got in np.ndenumerate(np.asarray(possible)):
            rows, columns = (
                np.asarray(side.positions)[n * size : (n + 1) * size] // block
                for side, n, size, block in ((q, i, block_q, q_block), (kv, j, block_kv, kv_block))
            )
            part = table[h, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert (got, bool(full[h, i, j])) == (part.any(), part.all())


@pytest.mark.parametrize(
    ("runs", "tile", "together", "expected"),
    [
        ((64, 64), (64, 32), 1, False),
        ((32, 64), (64, 32), 1, True),
        ((64, 16), (64, 32), 1, True),
        ((64, 64), (64, 32), 2, True),  # Heads with tables of their own visit the same tiles.
    ],
    ids=["whole", "queries", "keys", "together"],
)
def test_scores_are_tested_where_a_tile_is_not_in_one_block(runs, tile, together, expected):
    mask = BlockMask(jnp.ones((2, 1, 1), bool), 64, 64, *runs)
    assert mask.tests_scores(tile[0], tile[1], together) == expected
    assert not BlockMask(mask.table[:1], 64, 64, 64, 64).tests_scores(tile[0], tile[1], together)


@pytest.mark.mosaic_interpreter
def test_hopper_kernels_read_the_segment_ids_of_every_sequence():
    case = {
        "mask": "packed", "order": "contiguous", "blocks": 1, "heads": (1, 1), "head_dim": 32,
        "lengths": (64, 72), "dtype": "bfloat16", "numbers": "none",
    }  # fmt: skip
    inputs = local_cases.make_inputs(case, seed=5, batch=2)
    kernels = mosaic_sm90(MosaicConfig(128, 64, 2), MosaicConfig(64, 128, 2))
    arrays = inputs.q, inputs.kvs[0], inputs.q_tokens, inputs.kv_tokens[0]
    ids = np.asarray(inputs.q_tokens.segment_ids)
    assert (ids[0] != ids[1]).any()
    with interpreted.interpreted():
        run = functools.partial(local.forward, kernels, spec=inputs.spec)
        got = jax.jit(lambda *arrays: run(*arrays))(*arrays)
    want = local.forward(REFERENCE, *arrays, spec=inputs.spec)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-2, atol=1e-2)
