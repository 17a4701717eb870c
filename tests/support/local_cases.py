"""Inputs of local attention as tests make them: a shard of queries, the shards of keys it meets."""

from __future__ import annotations

import dataclasses
from typing import Any

import dense
import functions
import jax.numpy as jnp
import local
import numpy as np
from cases import key_ranges, packed_segments, value_dim

from burst_jax import positions
from burst_jax.layouts.permutation import run_in_blocks
from pallas_kernels import AttentionSpec, BlockMask, Dropout, Mask, QuerySide, Score
from pallas_kernels.score import sink_gradient

MASKS = {
    "full": dense.Mask(),
    "causal": dense.Mask(is_causal=True),
    "window20": dense.Mask(is_causal=True, window=20),
    "window31_14": dense.Mask(window=(31, 14)),
    "packed": dense.Mask(segments=True),
    "packed_causal": dense.Mask(is_causal=True, segments=True),
    "packed_window_cap": dense.Mask(is_causal=True, window=50, segments=True, soft_cap=4.0),
    "cap": dense.Mask(soft_cap=2.0),
    "ranges": dense.Mask(ranges=True),
    "packed_window_ranges": dense.Mask(is_causal=True, window=70, segments=True, ranges=True),
}
SHARDS, Q_SHARD, BATCH = 4, 1, 2


def case_id(case):
    (heads, kv_heads), (t, s) = case["heads"], case["lengths"]
    return (
        f"{case['mask']}-{case['order']}-{case['blocks']}block"
        f"-h{heads}gqa{heads // kv_heads}-{t}x{s}-dim{case['head_dim']}_{value_dim(case)}"
        f"-{case['dtype']}-{case['numbers']}{'-dropout' if case.get('dropout') else ''}"
        f"{'-table{}x{}'.format(*case['table']) if 'table' in case else ''}"
        f"{'-' + case['functions'] if case.get('functions') else ''}"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """One shard's queries, the key shards it meets one after the other, and the mask between."""

    q: np.ndarray
    kvs: list  # of (k, v)
    q_tokens: QuerySide
    kv_tokens: list
    cotangents: tuple  # of out [B, T, N, Hv] and lse [B, T, N]
    keep: np.ndarray  # bool [B or 1, T, all keys], with a table for each head [B or 1, N, T, ...]
    spec: AttentionSpec
    soft_cap: float | None
    numbers: dict[str, np.ndarray]  # per-head parameters
    distance: np.ndarray  # [T, all keys]
    seeds: np.ndarray | None  # int32 [B, N], of dropout
    factors: np.ndarray | None  # what dropout multiplies weights with, [B, N, T, all keys]
    blocks: BlockMask | None  # the block-sparse mask
    score: Any = None  # what score_mod does to all logits

    def all_keys(self):
        """K and V of all shards."""
        return tuple(np.concatenate(x, axis=1) for x in zip(*self.kvs, strict=True))


def places(order, length, rng):
    """Positions of the tokens of all shards, each ``length`` long: a layout, or in any order."""
    if order == "shuffled":
        return rng.permutation(SHARDS * length).astype(np.int32)
    return positions(order, SHARDS * length, SHARDS)


def make_inputs(case, seed, batch=BATCH):
    """The inputs of a case, which names a level for every factor."""
    rng = np.random.default_rng(seed)
    mask, dtype = MASKS[case["mask"]], jnp.dtype(case["dtype"])
    (heads, kv_heads), dim, value = case["heads"], case["head_dim"], value_dim(case)
    even = case["order"] == "zigzag"
    t, s = (length + length % 2 * even for length in case["lengths"])
    # The first key shard is near the queries in every order, so that short windows see some of it.
    shards = ((0, 1) if t < s else (1, 0))[: case["blocks"]]
    q_at, kv_at = (places(case["order"], c, rng).reshape(SHARDS, c) for c in (t, s))
    q_at, kv_at = q_at[Q_SHARD], [kv_at[shard] for shard in shards]
    ids = packed_segments(rng, batch, SHARDS * max(t, s)) if mask.segments else None

    ranges = {}
    if mask.ranges:
        rows = key_ranges(rng, batch if dim % 2 else 1, SHARDS * max(t, s))
        ranges = dict(zip(("kv_starts", "kv_ends"), rows, strict=True))

    def tokens(at, **ranges):
        segment_ids: Any = None if ids is None else ids[:, at]
        return local.tokens(at, segment_ids, **{name: x[:, at] for name, x in ranges.items()})

    def normal(*shape):
        # Rounded to the tested dtype first: the truth starts from the same numbers.
        return rng.normal(size=shape).astype(dtype)

    all_kv_at, dropout = np.concatenate(kv_at), case.get("dropout", 0.0)
    seeds = factors = None
    if dropout:
        seeds = np.random.default_rng(seed).integers(-(2**31), 2**31, (batch, heads), np.int32)
        factors = dense.dropout_factors(seeds, dropout, q_at, all_kv_at)
    arrays, blocks = {f"key_{name[3:]}": x for name, x in ranges.items()}, None
    if "table" in case:
        blocks = block_mask(rng, case, t, s)
        side = max(t, s) * SHARDS
        of_side = side // blocks.q_block, side // blocks.kv_block
        table = np.zeros((*blocks.table.shape[:1], *of_side), bool)
        table[:, : blocks.table.shape[1], : blocks.table.shape[2]] = blocks.table
        arrays |= {"block_mask": table if len(table) > 1 else table[0]}
    keep = mask.dense(ids, ids, SHARDS * max(t, s), SHARDS * max(t, s), **arrays)
    keep, score = keep[..., q_at, :][..., all_kv_at], None
    if case.get("functions"):
        score, seen = functions.on_all(batch, heads, q_at, all_kv_at)
        score = score if case["functions"] == "functions" else None
        keep = functions.both(keep, seen)
    return Inputs(
        q=normal(batch, t, heads, dim),
        kvs=[tuple(normal(batch, s, kv_heads, x) for x in (dim, value)) for _ in shards],
        q_tokens=tokens(q_at, **ranges),
        kv_tokens=[tokens(at) for at in kv_at],
        cotangents=(
            normal(batch, t, heads, value),
            rng.normal(size=(batch, t, heads)).astype(np.float32),
        ),
        keep=keep,
        spec=spec_of(mask, dim, case["numbers"], dropout, case.get("functions")),
        soft_cap=mask.soft_cap,
        numbers=dense.per_head(case["numbers"], heads, seed),
        distance=np.abs(q_at[:, None] - all_kv_at[None, :]),
        seeds=seeds,
        factors=factors,
        blocks=blocks,
        score=score,
    )


def block_mask(rng, case, t, s):
    """Of a case's table: queries and keys of a block, and whether each head has one of its own.

    ``t`` and ``s`` are the tokens of a shard.
    """
    *sizes, by_head = case["table"]
    heads = case["heads"][0] if by_head else 1
    shape = (SHARDS * length // size for length, size in zip((t, s), sizes, strict=True))
    table = rng.random((heads, *shape)) < 0.5
    runs = (
        run_in_blocks(case["order"], length, SHARDS, size)
        for length, size in zip((t, s), sizes, strict=True)
    )
    return BlockMask(table, *sizes, *runs)


def spec_of(mask, dim, numbers, dropout=0.0, called=None):
    """The spec of a case; ``called`` are the "functions", the "mask_mod" alone or None."""
    left, right = mask.window if isinstance(mask.window, tuple) else (mask.window,) * 2
    differentiated = ("alibi_slopes",) if numbers in ("slopes", "both") else ()
    score_mod = functions.score_mod if called == "functions" else None
    mask_mod = functions.mask_mod if called else None
    return AttentionSpec(
        Mask(left, 0 if mask.is_causal else right, mask_mod),
        Score(dim**-0.5, mask.soft_cap, differentiated, score_mod),
        Dropout(dropout) if dropout else None,
    )


def oracle(inputs):
    """``(truth, one device's results)``."""
    args = (inputs.q, *inputs.all_keys(), inputs.keep, *inputs.cotangents, inputs.soft_cap)
    args += inputs.numbers, inputs.distance, inputs.factors, inputs.score
    return dense.truth(*args), dense.one_device(*args)


def number_noise(inputs, truth):
    """Of each gradient of per-head parameters, the error that rounding out explains.

    Delta is computed from the rounded out, so a query's error reaches a slope's gradient times a
    distance. It is one random sum, several times one device's if that happens to be small.
    """
    products = inputs.cotangents[0].astype(np.float64) * truth[0]
    by_head = np.sqrt((products**2).sum(axis=(0, 1, 3)).max())
    ulp = float(jnp.finfo(inputs.q.dtype).eps) / np.sqrt(12)
    of_slopes = ulp * by_head * inputs.distance.max()
    return [of_slopes if name == "alibi_slopes" else 0.0 for name in sorted(inputs.numbers)]


def attend(
    implementation,
    spec,
    q,
    kvs,
    q_tokens,
    kv_tokens,
    cotangents,
    numbers,
    seeds=None,
    blocks=None,
):
    """``(out, lse, dq, dk, dv)`` as a ring of these key shards makes them, in the inputs' dtype.

    Then the gradients of per-head parameters, in the order of their names.
    """
    do, dlse = cotangents
    of_heads = {"spec": spec, "numbers": numbers, "seeds": seeds, "blocks": blocks}
    carry: Any = None
    dq: Any = None
    dkvs, of_numbers = [], {}
    for kv, tokens in zip(kvs, kv_tokens, strict=True):
        arrays = q, kv, q_tokens, tokens
        carry = local.forward(implementation, *arrays, carry, **of_heads)
    o, lse = carry
    out = o.astype(q.dtype)
    wide = o.dtype
    delta = (do.astype(wide) * out.astype(wide)).sum(-1).swapaxes(1, 2) - dlse.swapaxes(1, 2)
    for i, (kv, tokens) in enumerate(zip(kvs, kv_tokens, strict=True)):
        arrays = (q, do), kv, (lse, delta), q_tokens, tokens
        # dQ may be rounded when the last part of it has been added.
        out_dtype = q.dtype if i + 1 == len(kvs) else None
        options = of_heads | {"out_dtype": out_dtype}
        dq, dkv, parts = local.gradients(implementation, *arrays, dq, **options)
        dkvs.append([x.astype(q.dtype) for x in dkv])
        of_numbers = {name: x + of_numbers.get(name, 0) for name, x in parts.items()}
    dk, dv = (jnp.concatenate(parts, axis=1) for parts in zip(*dkvs, strict=True))
    if "sink_logits" in numbers:
        of_numbers["sink_logits"] = sink_gradient(numbers["sink_logits"], lse, delta)
    gradients = *(x.astype(q.dtype) for x in (dq, dk, dv)), *map(of_numbers.get, sorted(numbers))
    return out, lse.swapaxes(1, 2), *gradients


def assert_zero_where_blind(got, inputs):
    """Rows that see nothing and keys that nothing sees: exactly zero, lse -inf or a sink."""
    out, lse, dq, dk, dv, *_ = got
    keep, sinks = inputs.keep, inputs.numbers.get("sink_logits")
    blind = ~np.broadcast_to(dense.sees(keep), lse.shape)
    unseen = ~np.broadcast_to(dense.is_seen(keep, dk.shape[2]), dk.shape[:3])
    assert (out[blind] == 0).all()
    if sinks is None:
        assert (lse[blind] == -np.inf).all()
    else:
        sinks = np.broadcast_to(sinks, lse.shape)[blind]
        # Some kernels add a bias to the sink and subtract it from lse.
        slopes = np.abs(inputs.numbers.get("alibi_slopes", np.zeros(1))).max()
        atol = 1e-6 + np.finfo(np.float32).eps * slopes * inputs.distance.max()
        np.testing.assert_allclose(lse[blind], sinks, rtol=1e-6, atol=atol)
    assert (dq[blind] == 0).all()
    assert (dk[unseen] == 0).all()
    assert (dv[unseen] == 0).all()
