"""Cases that other projects test their own ring attention with, in shapes that a CPU manages.

Two more live elsewhere: flash_attn_jax's, that nothing is gathered and every permute lies beside a
kernel, in tests/test_compiled.py; Flax's layers with ``attention_fn`` replaced in
tests/test_flax_adapters.py.
"""

from __future__ import annotations

from typing import Any

import compare
import dense
import jax.numpy as jnp
import numpy as np
import pytest
from cases import packed_segments
from rings import forward_and_gradients, make_mesh

import burst_jax


def assert_as_good_as_dense(mesh, shapes, mask, layout, dtype, **options):
    """Out, lse and gradients as exact as dense attention on one device in the same dtype."""
    rng = np.random.default_rng(0)
    n, kind = mesh.shape["seq"], jnp.dtype(dtype)
    q, k, v, do = (rng.normal(size=x).astype(kind) for x in (*shapes, shapes[1], shapes[0]))
    dlse = rng.normal(size=q.shape[:3]).astype(np.float32)
    segments = (None, None)
    if mask.segments:
        segments = (packed_segments(rng, *q.shape[:2]),) * 2
    ids: dict[str, Any] = dict(
        zip(("query_segment_ids", "key_value_segment_ids"), segments, strict=True)
    )

    def run(*arrays):
        given, permuted = burst_jax.to_layout((arrays, ids), layout, n)
        results = burst_jax.burst_attention(
            *given,
            mesh=mesh,
            layout=layout,
            return_residual=True,
            batch_axis="data",
            head_axis="model",
            **permuted,
            **mask.options,
            **options,
        )
        return burst_jax.from_layout(results, layout, n)

    keep = mask.dense(*segments, q.shape[1], k.shape[1])
    got = forward_and_gradients(run)((q, k, v), (do, dlse))
    truth = dense.truth(q, k, v, keep, do, dlse)
    one = dense.one_device(q, k, v, keep, do, dlse)
    compare.assert_as_good_as(got, one, truth, dtype)
    if mask.segments:
        out, _, dq, dk, dv = (np.asarray(x, np.float32) for x in got)
        padding = np.asarray(segments[0]) == 0
        assert padding.any()
        assert not any(x[padding].any() for x in (out, dq, dk, dv))


PACKED, WINDOW = {"segments": True}, {"window": (20, 0)}
CAUSAL = {"is_causal": True}
# (data, seq, model), layout, groups, mask.
TRANSFORMER_ENGINE = [
    ((1, 2, 1), "zigzag", 1, CAUSAL),
    ((1, 4, 1), "contiguous", 8, {}),
    ((1, 2, 2), "zigzag", 8, CAUSAL | PACKED),
    ((2, 2, 1), "striped", 1, CAUSAL | PACKED),
    ((1, 4, 2), "zigzag", 8, CAUSAL | WINDOW),
    ((2, 4, 1), "striped", 8, CAUSAL | WINDOW | PACKED),
    ((2, 2, 2), "contiguous", 1, PACKED),
    ((1, 8, 1), "zigzag", 8, CAUSAL),
]


@pytest.mark.parametrize(
    ("mesh", "layout", "groups", "mask"),
    [
        pytest.param(*case, marks=() if case is TRANSFORMER_ENGINE[2] else pytest.mark.slow)
        for case in TRANSFORMER_ENGINE
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_transformer_engine_s_distributed_matrix(mesh, layout, groups, mask):
    """TransformerEngine's tests/jax/test_distributed_fused_attn.py: data x context x tensor.

    Rows packed with padding inside every segment's slot and at the end, groups of 1 and of 8 query
    heads, bfloat16, windows of (20, 0); held to this project's error bounds, not to that test's
    0.039. Padded tokens get exactly zero gradients.
    """
    length, heads = 32 * mesh[1], 16
    shapes = (2, length, heads, 16), (2, length, heads // groups, 16)
    assert_as_good_as_dense(make_mesh(*mesh), shapes, dense.Mask(**mask), layout, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "head_dim"),
    [(24, 16, 2), (128, 64, 64), (64, 512, 16), (128, 2048, 128), (2048, 128, 128)],
)
def test_jondeaton_s_lengths(q_length, kv_length, head_dim, is_causal):
    """Lengths of query and key of jondeaton/ring-attention-jax-pallas' tests, on four devices."""
    shapes = (1, q_length, 2, head_dim), (1, kv_length, 2, head_dim)
    mask = dense.Mask(is_causal=is_causal)
    assert_as_good_as_dense(make_mesh(1, 4, 1), shapes, mask, "striped", "float32")
