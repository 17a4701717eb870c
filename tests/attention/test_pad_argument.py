"""``burst_attention(pad=True)``: lengths that a mesh does not divide."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import quick_jit
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import assert_close, mesh_of, random_like

import burst_jax

B, T, S, N, K, H = 2, 13, 18, 4, 2, 8
RNG = np.random.default_rng(0)
OF_QUERIES = np.sort(RNG.integers(0, S + 1, (2, B, T)), 0)
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "prefix": {
        "is_causal": True,
        "prefix_lengths": np.array([5, 0]),
        "sink_logits": jnp.linspace(-1.0, 1.0, N, dtype=jnp.float32),
        "alibi_slopes": jnp.linspace(0.1, 1.0, N, dtype=jnp.float32),
    },
    "ranges": {"key_starts": OF_QUERIES[0], "key_ends": OF_QUERIES[1]},
    "ids": {
        "query_segment_ids": np.repeat([[1, 2, 0], [3, 3, 1]], [4, 6, 3], axis=1),
        "key_value_segment_ids": np.repeat([[1, 2, 0], [3, 1, 2]], [6, 8, 4], axis=1),
    },
    "positions": {
        "is_causal": True,
        "query_positions": np.arange(T)[::-1].copy(),
        "key_value_positions": np.arange(S) // 2,
        "key_value_seq_lengths": np.array([9, 4]),
    },
    "dropout": {"dropout_rate": 0.3, "dropout_key": jax.random.key(1), "local_window_size": 6},
}
MESHES: dict[str, tuple[AxisType, dict[str, int], dict[str, Any]]] = {
    "auto": (AxisType.Auto, {"data": 2, "seq": 4}, {"batch_axis": "data"}),
    "explicit": (
        AxisType.Explicit,
        {"data": 2, "seq": 2, "model": 2},
        {"batch_axis": "data", "tensor_axis": "model"},
    ),
    "two-levels": (
        AxisType.Explicit,
        {"outer": 2, "inner": 2, "x": 2},
        {"seq_axis": ("outer", "inner"), "ulysses_axis": "x"},
    ),
}


def results(mesh, options, spec):
    """Out, lse, and all gradients under random cotangents, of arrays that are split by ``spec``."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H), (B, T, N)
    *qkv, d_out, d_lse = (
        random_like(jax.ShapeDtypeStruct(shape, jnp.float32), seed)
        for seed, shape in enumerate(shapes)
    )
    numbers = {name: options[name] for name in ("sink_logits", "alibi_slopes") if name in options}

    @quick_jit
    def run(qkv, numbers):
        def attend(qkv, numbers):
            return burst_jax.burst_attention(
                *qkv, mesh=mesh, return_residual=True, **options | numbers
            )

        (out, lse), vjp = jax.vjp(attend, qkv, numbers)
        cotangents = (
            jax.reshard(d, jax.typeof(x).sharding) if mesh.explicit_axes else d
            for d, x in ((d_out, out), (jnp.where(jnp.isfinite(lse), d_lse, 0.0), lse))
        )
        return out, lse, *vjp(tuple(cotangents))

    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in qkv]
        found = run(placed, numbers)
        assert all(
            jax.typeof(x).sharding.spec == jax.typeof(given).sharding.spec
            for x, given in zip((found[0], *found[2]), (placed[0], *placed), strict=True)
        )
    return jax.device_get(found)


@pytest.mark.parametrize(
    ("mesh", "call"),
    [
        ("auto", "positions"),
        ("explicit", "prefix"),
        ("two-levels", "ids"),
        *(
            pytest.param("auto", call, marks=pytest.mark.slow)
            for call in CALLS
            if call != "positions"
        ),
        pytest.param("explicit", "positions", marks=pytest.mark.slow),
        pytest.param("two-levels", "ranges", marks=pytest.mark.slow),
    ],
)
def test_padded_calls_equal_one_device(mesh, call):
    kind, sizes, axes = MESHES[mesh]
    split = P(axes.get("batch_axis"), None, axes.get("tensor_axis"))
    got = results(mesh_of(kind, **sizes), {**CALLS[call], **axes, "pad": True}, split)
    want = results(mesh_of(seq=1), CALLS[call], P())
    blind = np.isneginf(want[1])
    np.testing.assert_array_equal(np.isneginf(got[1]), blind)
    assert not got[0][blind].any()
    got, want = ((*x[:1], np.where(blind, 0, x[1]), *x[2:]) for x in (got, want))
    assert_close(got, want, 1e-5)


def test_eager_calls_and_lengths_that_fit():
    x = random_like(jax.ShapeDtypeStruct((1, 13, 2, 8), jnp.float32), 0)
    mesh = mesh_of(seq=4)
    want = burst_jax.burst_attention(x, x, x, mesh=mesh_of(seq=1), is_causal=True)
    got = burst_jax.burst_attention(x, x, x, mesh=mesh, is_causal=True, pad=True)
    assert_close([got], [want], 1e-5)
    # What fits is left as it is: no segment ids, no slices.
    x = x[:, :12]
    jaxprs = [
        str(
            jax.make_jaxpr(
                lambda x, pad=pad: burst_jax.burst_attention(x, x, x, mesh=mesh, pad=pad)
            )(x)
        )
        for pad in (False, True)
    ]
    assert jaxprs[0] == jaxprs[1]


def test_what_cannot_be_padded_is_refused():
    x = jnp.ones((1, 12, 2, 8))
    options: Any = {"mesh": mesh_of(seq=4), "pad": True}
    for layout in ("zigzag", "striped", "striped:4"):
        with pytest.raises(ValueError, match=rf"pad is True with layout '{layout}': .*pad_to_layo"):
            burst_jax.burst_attention(x, x, x, layout=layout, **options)
    x = x[:, :9]
    with pytest.raises(ValueError, match=r"block_mask is given, and lengths 9 and 9 are padded to"):
        burst_jax.burst_attention(x, x, x, block_mask=np.ones((3, 3), bool), **options)
    with pytest.raises(ValueError, match="BurstAttention does not accept pad: pad tokens once"):
        burst_jax.BurstAttention(8, 2, rngs=None, pad=True)  # pyrefly: ignore
