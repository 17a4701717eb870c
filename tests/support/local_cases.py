"""Inputs of local attention as tests make them: a shard of queries, the shards of keys it meets."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import dense
import functions
import jax.numpy as jnp
import local
import numpy as np
from cases import MASKS, key_ranges, packed_segments, value_dim

from burst_jax import positions
from burst_jax.layouts.parse import parse_layout
from pallas_kernels import AttentionSpec, BlockMask, Dropout, Mask, QuerySide, Score
from pallas_kernels.score import sink_gradient

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


def lse_factor_on_gpu(case):
    """Factor on one device's error of lse.

    On a GPU thousands of float32 products are summed one after the other, where dense matmuls sum
    in blocks. With slopes a sum may start from the bias: each further 16 lanes are then cut off at
    the last bit of that, so the error grows with the head dim.
    """
    with_slopes = case["numbers"] in ("slopes", "both")
    return 6.0 * max(1.0, case["head_dim"] / 96 if with_slopes else 1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """One shard's queries, the key shards it meets one after the other, and the mask between.

    ``call``: arguments of :func:`dense.reference` besides query, key and value, of these tokens.
    """

    q: np.ndarray
    kvs: list  # of (k, v)
    q_tokens: QuerySide
    kv_tokens: list
    cotangents: tuple  # of out [B, T, N, Hv] and lse [B, T, N]
    call: dict[str, Any]
    spec: AttentionSpec
    numbers: dict[str, np.ndarray]  # per-head parameters
    seeds: np.ndarray | None  # int32 [B, N], of dropout
    blocks: BlockMask | None  # the block-sparse mask

    @functools.cached_property
    def reference(self) -> dense.Reference:
        """Of dense attention over the keys of all shards."""
        return dense.reference(*self.cotangents, **self._dense_call)

    def largest_errors(self, dq_in_fixed_point: bool = False) -> list[np.ndarray]:
        """What rounding can change in each element of the reference's truth."""
        call = self._dense_call | {"dq_in_fixed_point": dq_in_fixed_point}
        return dense.largest_errors(*self.cotangents, **call)

    @property
    def _dense_call(self) -> dict[str, Any]:
        key, value = (np.concatenate(x, axis=1) for x in zip(*self.kvs, strict=True))
        return {"query": self.q, "key": key, "value": value, **self.call, **self.numbers}

    @property
    def arrays(self):
        """What ``attend`` needs besides implementation and spec."""
        of_tokens = self.q, self.kvs, self.q_tokens, self.kv_tokens, self.cotangents
        return *of_tokens, self.numbers, self.seeds, self.blocks

    @property
    def keep(self) -> np.ndarray:
        """Which scores count, bool ``[B or 1, N or 1, T, S]``."""
        return self.reference.keep

    def number_noise(self):
        """Of each gradient of per-head parameters, the error that rounding out explains.

        Delta is computed from the rounded out, so a query's error reaches a slope's gradient times
        a distance, and a sink's times the sink's weight. It is one random sum, several times one
        device's if that happens to be small.
        """
        out, lse = self.reference.truth[:2]
        by_query = ((self.cotangents[0].astype(np.float64) * out) ** 2).sum(axis=3)
        q_at, kv_at = self.call["query_positions"], self.call["key_value_positions"]
        factors: dict[str, Any] = {
            "alibi_slopes": max(q_at.max() - kv_at.min(), kv_at.max() - q_at.min())
        }
        if "sink_logits" in self.numbers:
            factors["sink_logits"] = np.exp(self.numbers["sink_logits"] - lse)
        ulp = float(jnp.finfo(self.q.dtype).eps) / np.sqrt(12)
        return [
            ulp * np.sqrt((by_query * factors[name] ** 2).sum(axis=(0, 1)).max())
            for name in sorted(self.numbers)
        ]


def places(order, length, rng):
    """Positions of the tokens of all shards, each ``length`` long: a layout, or in any order."""
    if order == "shuffled":
        return rng.permutation(SHARDS * length).astype(np.int32)
    return positions(order, SHARDS * length, SHARDS)


def make_inputs(case, seed, batch=BATCH):
    """The inputs of a case, which names a level for every factor."""
    rng = np.random.default_rng(seed)
    dtype, masks = jnp.dtype(case["dtype"]), dict(MASKS[case["mask"]])
    (heads, kv_heads), dim, value = case["heads"], case["head_dim"], value_dim(case)
    even = case["order"] == "zigzag"
    t, s = (length + length % 2 * even for length in case["lengths"])
    # The first key shard is near the queries in every order, so that short windows see some of it.
    shards = ((0, 1) if t < s else (1, 0))[: case["blocks"]]
    q_at, kv_at = (places(case["order"], c, rng).reshape(SHARDS, c) for c in (t, s))
    q_at, kv_at = q_at[Q_SHARD], [kv_at[shard] for shard in shards]
    all_kv_at, length = np.concatenate(kv_at), SHARDS * max(t, s)
    call: dict[str, Any] = {"query_positions": q_at, "key_value_positions": all_kv_at}
    ids: Any = None
    if masks.pop("segments", False):
        ids = packed_segments(rng, batch, length)
        if "documents" in case:  # their lengths, without padding, in each shard
            sizes = case["documents"] * SHARDS
            ids[:] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        if case.get("padded"):  # one sequence each, and padding
            ids = rng.integers(1, length + 1, (batch, 1)) > np.arange(length)
            ids = ids.astype(np.int32)
        call |= {"query_segment_ids": ids[:, q_at], "key_value_segment_ids": ids[:, all_kv_at]}
    ranges = {}
    if masks.pop("ranges", False):
        rows = key_ranges(rng, batch if dim % 2 else 1, length)
        ranges = {name: x[:, q_at] for name, x in zip(("starts", "ends"), rows, strict=True)}
        call |= {f"key_{name}": x for name, x in ranges.items()}

    def tokens(at, **kv_bounds):
        return local.tokens(at, None if ids is None else ids[:, at], **kv_bounds)

    def normal(*shape):
        # Rounded to the tested dtype first: the truth starts from the same numbers.
        return rng.normal(size=shape).astype(dtype)

    dropout, seeds, blocks = case.get("dropout", 0.0), None, None
    if dropout:
        seeds = np.random.default_rng(seed).integers(-(2**31), 2**31, (batch, heads), np.int32)
        call |= {"dropout_rate": dropout, "dropout_seeds": seeds}
    if "table" in case:
        blocks = block_mask(rng, case, t, s)
        table = blocks.table[:, q_at // blocks.q_block][:, :, all_kv_at // blocks.kv_block]
        call["block_mask"] = table if len(table) > 1 else table[0]
    call |= functions.called(case.get("functions"))
    return Inputs(
        q=normal(batch, t, heads, dim),
        kvs=[tuple(normal(batch, s, kv_heads, x) for x in (dim, value)) for _ in shards],
        q_tokens=tokens(q_at, **{f"kv_{name}": x for name, x in ranges.items()}),
        kv_tokens=[tokens(at) for at in kv_at],
        cotangents=(
            normal(batch, t, heads, value),
            rng.normal(size=(batch, t, heads)).astype(np.float32),
        ),
        call=call | masks,
        spec=spec_of(case["numbers"], dim, **call, **masks),
        numbers=dense.per_head(case["numbers"], heads, seed),
        seeds=seeds,
        blocks=blocks,
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
        parse_layout(case["order"]).run_in_blocks(length, SHARDS, size)
        for length, size in zip((t, s), sizes, strict=True)
    )
    return BlockMask(table, *sizes, *runs)


def spec_of(
    numbers, dim, *, is_causal=False, local_window_size=None, logits_soft_cap=None, score_mod=None,
    mask_mod=None, dropout_rate=0.0, **_,
):  # fmt: skip
    """The static part of these arguments of ``burst_attention``."""
    pair = isinstance(local_window_size, tuple)
    left, right = local_window_size if pair else (local_window_size,) * 2
    differentiated = ("alibi_slopes",) if numbers in ("slopes", "both") else ()
    return AttentionSpec(
        Mask(left, 0 if is_causal else right, mask_mod),
        Score(dim**-0.5, logits_soft_cap, differentiated, score_mod),
        Dropout(dropout_rate) if dropout_rate else None,
    )


def attend(
    implementation, spec, q, kvs, q_tokens, kv_tokens, cotangents, numbers, seeds=None, blocks=None
):
    """``(out, lse, dq, dk, dv)`` as a ring of these key shards makes them, in the inputs' dtype.

    Then the gradients of per-head parameters, in the order of their names.
    """
    do, dlse = cotangents
    of_heads = {"spec": spec, "numbers": numbers, "seeds": seeds, "blocks": blocks}
    carry: Any = None
    dq: Any = None
    dkvs, of_numbers = [], {}
    for left, kv, tokens in zip(reversed(range(len(kvs))), kvs, kv_tokens, strict=True):
        out_dtype = q.dtype if left < 2 else None
        options = of_heads | {"out_dtype": out_dtype}
        carry = local.forward(implementation, q, kv, q_tokens, tokens, carry, **options)
    out, lse = carry
    wide = lse.dtype
    delta = (do.astype(wide) * out.astype(wide)).sum(-1).swapaxes(1, 2) - dlse.swapaxes(1, 2)
    calls = [
        ((q, do), kv, (lse, delta), q_tokens, tokens)
        for kv, tokens in zip(kvs, kv_tokens, strict=True)
    ]
    accumulator = implementation.dq_accumulator if len(calls) > 1 else None
    if accumulator is not None:
        dq = local.dq_zeros(implementation, calls, **of_heads)
        implementation = dataclasses.replace(implementation, backward=accumulator.add)
    for i, call in enumerate(calls):
        # dQ may be rounded when the last part of it has been added.
        out_dtype = q.dtype if i + 1 == len(calls) else None
        options = of_heads | {"out_dtype": out_dtype}
        dq, dkv, parts = local.gradients(implementation, *call, dq, **options)
        dkvs.append([x.astype(q.dtype) for x in dkv])
        of_numbers = {name: x + of_numbers.get(name, 0) for name, x in parts.items()}
    if accumulator is not None:
        dq = accumulator.finish(dq, local.gradient_inputs(*calls[0], **of_heads), spec=spec)
    dk, dv = (jnp.concatenate(parts, axis=1) for parts in zip(*dkvs, strict=True))
    if "sink_logits" in numbers:
        of_numbers["sink_logits"] = sink_gradient(numbers["sink_logits"], lse, delta)
    gradients = *(x.astype(q.dtype) for x in (dq, dk, dv)), *map(of_numbers.get, sorted(numbers))
    return out, lse.swapaxes(1, 2), *gradients
