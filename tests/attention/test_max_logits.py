"""The largest logit of each head, against float64 logits of all queries and keys."""

from __future__ import annotations

from typing import Any

import dense
import functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import quick_jit
from meshes import assert_close, mesh_of

import burst_jax
from burst_jax import MaxLogits, max_logits, ring_max_logits
from burst_jax.layouts.parse import parse_layout

B, T, N, K, H, ROWS = 2, 48, 4, 2, 8, 5
RNG = np.random.default_rng(0)
QUERY, KEY = (RNG.normal(size=(B, T, heads, H)).astype(np.float32) for heads in (N, K))
# Heads of different sharpness: the largest logits of flat ones are in rows of small lse.
QUERY *= np.array([0.2, 1, 3, 30], np.float32)[:, None]
SEGMENTS = np.repeat([[1, 2, 0, 3], [4, 4, 4, 0]], [20, 13, 3, 12], axis=1)
TABLE = RNG.random((N, 6, 12)) < 0.5
TABLE[:, np.arange(6), 2 * np.arange(6)] = True

CASES: dict[str, dict[str, Any]] = {
    "contiguous-lengths-cap": {
        "logits_soft_cap": 2.0, "scale": -0.5, "query_seq_lengths": np.array([T, 30], np.int32),
        "key_value_seq_lengths": np.array([40, 11], np.int32),
    },
    "zigzag-window-sinks": {
        "layout": "zigzag", "is_causal": True, "local_window_size": 9,
        "sink_logits": np.array([1, 2, -3, 0], np.float32),
    },
    "striped:2-segments": {
        "layout": "striped:2", "is_causal": True, "query_segment_ids": SEGMENTS,
        "key_value_segment_ids": SEGMENTS,
    },
    "striped-chunks-alibi-blocks": {
        "layout": "striped", "attention_chunk_size": 20, "block_mask": TABLE,
        "alibi_slopes": np.array([0.1, 0.5, 1, 0.2], np.float32),
    },
    "balanced": {
        "layout": "balanced", "is_causal": True, "query_segment_ids": SEGMENTS,
        "key_value_segment_ids": SEGMENTS,
    },
    "zigzag-score_mod": {
        "layout": "zigzag", "is_causal": True, "score_mod": functions.score_mod,
    },
}  # fmt: skip


def logits_of(call):
    """float64 ``[B, N, T, T]`` in natural order, -inf where masked."""
    options = {name: x for name, x in call.items() if name not in ("layout", "scale")}
    cap, slopes, mod, _ = (
        options.pop(name, None)
        for name in ("logits_soft_cap", "alibi_slopes", "score_mod", "sink_logits")
    )
    key = np.float64(KEY).repeat(N // K, 2)
    logits = call.get("scale", H**-0.5) * np.einsum("bqnh,bknh->bnqk", np.float64(QUERY), key)
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    at = np.arange(T)
    if mod is not None:
        logits = np.float64(mod(np.float32(logits), *functions.grid(B, N, at, at)))
    if slopes is not None:
        logits = logits - slopes[:, None, None] * np.abs(at[:, None] - at)
    return np.where(dense.kept(T, T, batch=B, heads=N, **options), logits, -np.inf)


def wanted(logits, sinks, rows, order=None, devices=1) -> tuple[Any, np.ndarray]:
    """The bounds by their definition, and lse, float64 ``[B, T, N]``.

    ``order``: the token at each place of the devices, ``[B, T]``, -1 for none; None is 0 ... T - 1.
    """
    lse = np.logaddexp.reduce(logits, -1)
    if sinks is not None:
        lse = np.logaddexp(lse, sinks[:, None])
    order = np.tile(np.arange(T), (B, 1)) if order is None else order
    length = order.shape[1] // devices
    size = max(1, length * devices // rows)
    lower, rest = np.full((2, N), -np.inf)
    for row, places in enumerate(order):
        for start in range(0, len(places), length):
            for first in range(0, length, size):
                block = places[start + first : start + min(first + size, length)]
                for head in range(N):
                    tokens = sorted(block[block >= 0], key=lambda t: -lse[row, head, t])
                    if not tokens:
                        continue
                    lower[head] = max(lower[head], logits[row, head, tokens[0]].max())
                    rest[head] = max([rest[head], *lse[row, head, tokens[1:]]])
    bounds: Any = MaxLogits(lower, np.maximum(lower, rest))  # pyrefly: ignore
    return bounds, lse.swapaxes(1, 2)


def order_of(call):
    """The layout's order of the call's tokens over two devices."""
    layout = parse_layout(call.get("layout", "contiguous"))
    return layout.order_of(call.get("query_segment_ids", np.ones((B, T), np.int32)), 2)


def on_mesh(call, lse, rows, **axes):
    """``max_logits`` over 2 x 2 devices, tokens in the order of the call's layout."""
    options = dict(call)
    options.pop("layout", None)
    found = order_of(call)
    order = np.maximum(found.order, 0)
    pick = lambda x: x[np.arange(B)[:, None], order]  # noqa: E731
    lse = np.where((found.order >= 0)[..., None], pick(np.float32(lse)), -np.inf)
    for name in ("query_segment_ids", "key_value_segment_ids"):
        if name in options:
            options[name] = np.int32(found.segment_ids)
    if not found.layout.is_fixed:
        options |= dict.fromkeys(("query_positions", "key_value_positions"), np.int32(order))
    options |= {"layout": found.layout, "rows": rows, **axes}
    # An array of NumPy inside a jit would be a constant.
    static = ("layout", "rows", "mesh", "score_mod", "block_mask", *axes)
    arrays = {
        name: options.pop(name)
        for name in tuple(options)
        if name not in static and isinstance(options[name], np.ndarray)
    }
    run = quick_jit(lambda q, k, lse, arrays: max_logits(q, k, lse, **arrays, **options))
    return run(pick(QUERY), pick(KEY), np.float32(lse), arrays)


@pytest.mark.parametrize("name", CASES)
def test_the_bounds_are_those_of_the_queries_with_the_largest_lse_of_a_block(name, monkeypatch):
    # 3, 7 or 14 keys at a time: the last ones of a device overlap others.
    monkeypatch.setattr("burst_jax.ring.max_logits._LOGITS", 7 * N * ROWS)
    call = CASES[name]
    logits = logits_of(call)
    ulysses = name.startswith("striped:2")
    axes: Any = {"ulysses_axis" if ulysses else "batch_axis": "other"}
    order, devices = order_of(call).order, 4 if ulysses else 2
    want, lse = wanted(logits, call.get("sink_logits"), ROWS, order, devices)
    mesh = mesh_of(seq=2, other=2)
    got = on_mesh(call, lse, ROWS, mesh=mesh, **axes)
    for x, y in zip(got, want, strict=True):
        assert x.shape == (N,)
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=5e-6, atol=5e-6)
    largest = logits.max((0, 2, 3))
    assert (want.lower <= largest).all()
    assert (want.upper >= largest).all()


def test_some_cases_are_exact_and_some_are_not():
    """Otherwise the comparison above would not see a mistake in either bound."""
    bounds = [wanted(logits_of(call), call.get("sink_logits"), ROWS)[0] for call in CASES.values()]
    exact = np.array([x.lower == x.upper for x in bounds])
    assert 0.2 < exact.mean() < 0.8
    assert exact[1:-1, 3].all()


def test_all_rows_are_exact_over_heads_with_a_sharp_query_in_padding():
    """More rows than tokens; NaN and large numbers in padding are not seen; no keys give -inf."""
    mesh = mesh_of(seq=2, model=2)
    query, key, segments = QUERY.copy(), KEY.copy(), np.ones((B, T), np.int32)
    query[:, -1], key[:, -1], segments[:, -1] = np.nan, 1e30, 0
    call = {"is_causal": True, "query_segment_ids": segments, "key_value_segment_ids": segments}
    logits = logits_of(call)
    _, lse = wanted(logits, None, 1)
    axes: Any = {"mesh": mesh, "tensor_axis": "model"}
    options = axes | {"is_causal": True, "pad": True, "rows": T + 1}

    @quick_jit
    def run(query, key, lse, segments):
        own = {"query_segment_ids": segments, "key_value_segment_ids": segments}
        return [
            max_logits(query, key, lse, **options, **own),
            max_logits(query[:, :47], key[:, :47], lse[:, :47], **options),
            max_logits(query, key, lse, **options, **jax.tree.map(jnp.zeros_like, own)),
        ]

    whole, padded, none = run(query, key, np.float32(lse), segments)
    for found in (*whole, *padded):
        np.testing.assert_allclose(found, logits.max((0, 2, 3)), rtol=2e-6)
    assert np.isneginf(none.lower).all()


def test_it_follows_attention_inside_a_shard_map_without_a_gradient():
    """lse of the ring, its own bounds, and the gradient of a loss that has them as well."""
    mesh, options = mesh_of(seq=2), {"is_causal": True, "layout": "zigzag"}
    tokens = burst_jax.to_layout((QUERY, KEY), "zigzag", 2)
    order = order_of({"layout": "zigzag"}).order
    want, _ = wanted(logits_of({"is_causal": True}), None, 3, order, 2)

    def loss(query, key):
        out, lse = burst_jax.ring_attention(query, key, key, "seq", return_residual=True, **options)
        found = ring_max_logits(query, key, lse, "seq", rows=3, **options)
        return jax.lax.psum(out.sum(), "seq") + sum(x.sum() for x in found), found

    run = jax.shard_map(loss, mesh=mesh, in_specs=jax.P(None, "seq"), out_specs=jax.P())
    gradient = quick_jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))
    (_, found), slopes = gradient(*tokens)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=5e-6)
    ones = np.ones_like(QUERY)
    call = {"query": QUERY, "key": KEY, "value": KEY, "is_causal": True}
    *_, dq, dk, dv = dense.reference(ones, 0 * ones[..., 0], **call).truth
    assert_close(burst_jax.from_layout(slopes, "zigzag", 2), (dq, dk + dv))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "rows is 0: it must be an integer, at least 1"),
        ({"lse": np.zeros((B, N, T), np.float32)},
         r"lse is float32 \[2, 4, 48\]: for a query \[2, 48, 4, 8\] it must be float32 "
         r"\[2, 48, 4\], what the call of attention returns with return_residual=True"),
        ({"lse": np.zeros((B, T, N), np.float16)}, r"lse is float16 \[2, 48, 4\]"),
        ({"lse": None}, "lse is a NoneType: it must be a float32 array"),
        ({"is_causal": 1}, "is_causal is 1"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(change, message):
    given: Any = {"lse": np.zeros((B, T, N), np.float32), "mesh": mesh_of(seq=2)} | change
    arrays: Any = QUERY, KEY
    with pytest.raises(ValueError, match=message):
        max_logits(*arrays, **given)
