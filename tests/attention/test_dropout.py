"""Dropout: which weights are dropped, the same on a ring as on one device."""

from __future__ import annotations

import functools
import re
from typing import Any

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from implementations import quick_jit
from meshes import mesh_of
from ring_cases import a_case, assert_exact, case_id, make_inputs

import burst_jax
from burst_jax import LinenBurstAttention
from pallas_kernels.dropout import Dropout, column_hashes, row_hashes


def kept(rate, seeds, length):
    """Which weights of rows of this length are kept, ``[seeds, length, length]``."""
    positions = jnp.arange(length, dtype=jnp.int32)
    rows = row_hashes(seeds[:, None], positions[None])[..., None]
    return np.asarray(Dropout(rate).kept(rows, column_hashes(positions)))


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.9])
def test_weights_are_dropped_as_if_independently(rate):
    """Each sum below is normal around 0 with deviation 1 if all weights are independent."""
    seeds = jax.random.bits(jax.random.key(1), (4,), jnp.uint32).view(jnp.int32)
    z = (kept(rate, seeds, 512) - (1 - rate)) / np.sqrt(rate * (1 - rate))
    products = {"mean": z, "heads": z[1:] * z[:-1]}
    for lag in (1, 2, 8, 64):
        products[f"keys {lag} apart"] = z[:, :, lag:] * z[:, :, :-lag]
        products[f"queries {lag} apart"] = z[:, lag:] * z[:, :-lag]
    products["three keys"] = z[:, :, 2:] * z[:, :, 1:-1] * z[:, :, :-2]
    products["rectangles"] = z[:, 1:, 1:] * z[:, :-1, :-1] * z[:, 1:, :-1] * z[:, :-1, 1:]
    for name, product in products.items():
        assert abs(product.mean()) * np.sqrt(product.size) < 4.5, name
    # Neither rows, nor columns, nor tiles hold more or fewer kept weights than chance would have.
    for counts in (z.sum(2), z.sum(1), z.reshape(4, 16, 32, 16, 32).sum((2, 4))):
        spread = counts.var() / (z.size / counts.size)
        assert abs(spread - 1) < 5 * np.sqrt(2 / counts.size)
    # No structure: the largest singular value is that of random numbers, near 2 sqrt(n).
    assert np.linalg.norm(z[0], 2) < 2.15 * np.sqrt(512)


CASES = [
    a_case(3, "striped", "packed_causal", shard="63") | {"dropout": 0.3, "numbers": "both"},
    a_case("2+h4", "zigzag", "causal", backward="rotate_query") | {"dropout": 0.3},
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_ring_is_as_exact_as_one_device_with_the_same_weights_dropped(case):
    assert_exact(case)


def test_other_keys_drop_other_weights_and_the_mean_is_attention_without_dropout():
    case = a_case(2, "contiguous", "full", shard="50")
    arrays = [jnp.asarray(x) for x in make_inputs(case)[0]]
    mesh = mesh_of(jax.sharding.AxisType.Auto, seq=2)
    attend = jax.jit(
        lambda key: burst_jax.burst_attention(*arrays, mesh=mesh, dropout_rate=0.5, dropout_key=key)
    )
    outs = np.stack([attend(key) for key in jax.random.split(jax.random.key(2), 64)])
    assert len(np.unique(outs[:, 0, 0, 0, 0])) == 64
    want = burst_jax.burst_attention(*arrays, mesh=mesh)
    error = (outs.mean(0) - want) / (outs.std(0, ddof=1) / 8)
    # Student's t with 63 degrees of freedom: its variance is 63 / 61.
    assert abs(np.mean(error**2) - 63 / 61) < 0.1


def test_every_sequence_and_head_has_its_own_seed_on_a_mesh():
    """The weights that one device drops, with batch, heads and sequence sharded; gradients too."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.normal(size=(2, 32, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
    key = jax.random.key(9)
    seeds = jax.random.bits(key, (2, 4))
    factors = dense.dropout_factors(seeds, 0.4, np.arange(32), np.arange(32))
    keep = dense.Mask(is_causal=True).dense(None, None, 32, 32)
    want = dense.truth(q, k, v, keep, do, np.zeros((2, 32, 4)), factors=factors)
    for kind, axis in (("Auto", "ulysses_axis"), ("Explicit", "tensor_axis")):
        mesh = mesh_of(jax.sharding.AxisType[kind], data=2, seq=2, tensor=2)
        attend = functools.partial(
            burst_jax.burst_attention, mesh=mesh, batch_axis="data", is_causal=True,
            dropout_rate=0.4, **{axis: "tensor"},
        )  # fmt: skip

        @quick_jit
        def run(key, do, *arrays, attend=attend):
            out, vjp = jax.vjp(functools.partial(attend, dropout_key=key), *arrays)
            return out, *vjp(jax.reshard(do, jax.typeof(out).sharding))

        with jax.set_mesh(mesh):
            got = run(key, do, q, k, v)
        for x, y in zip(got, (want[0], *want[2:]), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


def test_layers_drop_weights_unless_deterministic():
    mesh = mesh_of(jax.sharding.AxisType.Auto, seq=2)
    sizes = {"num_heads": 2, "rope_theta": None, "mesh": mesh}
    x = jax.random.normal(jax.random.key(0), (1, 16, 8))
    layer = burst_jax.BurstAttention(8, **sizes, dropout_rate=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape("dropout_rate is 0.5 and rngs is None: call")):
        layer(x)
    dropped = [layer(x, rngs=nnx.Rngs(dropout=1)) for _ in range(2)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    without = burst_jax.BurstAttention(8, **sizes, rngs=nnx.Rngs(0))(x)
    np.testing.assert_array_equal(layer(x, deterministic=True), without)
    assert np.abs(dropped[0] - without).mean() > 0.01
    layer.eval()
    np.testing.assert_array_equal(layer(x), without)
    layer.train()

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(jax.P(), jax.P(None, "seq")),
        out_specs=jax.P(None, "seq"),
    )
    def inside(key, x):
        return layer(x, rngs=nnx.Rngs(dropout=key))

    np.testing.assert_allclose(inside(jax.random.key(1), x), dropped[0], rtol=1e-5, atol=1e-6)
    # Equal sequences on other devices of a batch axis drop other weights.
    split = mesh_of(jax.sharding.AxisType.Auto, data=2, seq=2)
    of_rows = burst_jax.BurstAttention(
        8, 2, rope_theta=None, mesh=split, batch_axis="data", dropout_rate=0.5, rngs=nnx.Rngs(0)
    )
    # In a jit: JAX 0.11.2 crashes where a ring runs in an eager shard_map.
    out = jax.jit(jax.shard_map(
        lambda key, x: of_rows(x, rngs=nnx.Rngs(dropout=key)),
        mesh=split, in_specs=(jax.P(), jax.P("data", "seq")), out_specs=jax.P("data", "seq"),
    ))(jax.random.key(1), jnp.concatenate([x, x]))  # fmt: skip
    assert np.abs(out[0] - out[1]).mean() > 0.01

    twin = LinenBurstAttention(**sizes, dropout_rate=0.5)
    params = {"params": nnx.to_pure_dict(nnx.state(layer, nnx.Param))}
    np.testing.assert_array_equal(twin.apply(params, x, deterministic=True), without)
    outs: list[Any] = [
        twin.apply(params, x, rngs={"dropout": jax.random.key(i)}) for i in (0, 0, 1)
    ]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert np.abs(outs[2] - outs[0]).mean() > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_rate": 0.1}, "dropout_rate is 0.1 and dropout_key is None: pass a new jax.ran"),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0: it must be a probability below 1"),
        ({"dropout_rate": -0.1}, "dropout_rate is -0.1: it must be a probability below 1"),
        ({"dropout_rate": None}, "dropout_rate is None: it must be a Python number below 1"),
        (
            {"dropout_rate": 0.1, "dropout_key": np.zeros((3, 2), np.uint32)},
            "dropout_key has shape (3, 2) and dtype uint32: it must be one key",
        ),
        (
            {"dropout_rate": 0.1, "dropout_key": 3},
            "dropout_key is a int: it must be a jax.random.key",
        ),
    ],
)
def test_errors(options, message):
    x = jnp.ones((1, 8, 2, 8))
    mesh = mesh_of(jax.sharding.AxisType.Auto, seq=1)
    with pytest.raises(ValueError, match=re.escape(message)):
        burst_jax.burst_attention(x, x, x, mesh=mesh, **options)
