"""Layouts: permutations, positions and padding."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from burst_jax import from_layout, pad_to_layout, positions, to_layout
from burst_jax.layouts.permutation import (
    LAYOUTS,
    padded_length,
    run_in_blocks,
    shard_positions,
    shard_runs,
    shard_unit,
    stripe_size,
)

RNG = np.random.default_rng(0)
TABLE = {
    "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "zigzag": [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
    "striped": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    "striped:2": [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]],
}
every_layout = pytest.mark.parametrize("layout", TABLE)
SIZES = (1, 2, 3, 4, 5, 7, 8)


def length_of(layout, n, blocks=3):
    """An odd number of tokens per block of a shard."""
    return shard_unit(layout) * n * blocks


@every_layout
def test_four_shards_of_sixteen_tokens(layout):
    table = np.array(TABLE[layout])
    np.testing.assert_array_equal(positions(layout, 16, 4).reshape(4, 4), table)
    np.testing.assert_array_equal(to_layout(np.arange(16)[None], layout, 4)[0], table.reshape(-1))
    for shard in range(4):
        np.testing.assert_array_equal(shard_positions(layout, 4, 4, shard), table[shard])
    assert tuple(TABLE)[:-1] == LAYOUTS
    assert stripe_size(tuple(TABLE)[-1]) == 2


@every_layout
def test_permutations_of_odd_sizes(layout):
    """Inverses, ascending positions, and the same positions from a traced shard index."""
    for n in SIZES:
        length = length_of(layout, n)
        x = RNG.integers(0, 1000, (2, length, 3))
        permuted = to_layout(x, layout, n)
        np.testing.assert_array_equal(from_layout(permuted, layout, n), x)
        np.testing.assert_array_equal(to_layout(from_layout(x, layout, n), layout, n), x)
        assert (permuted == x).all() == (layout == "contiguous" or n == 1)
        at = positions(layout, length, n)
        assert isinstance(at, np.ndarray)
        assert at.dtype == np.int32
        np.testing.assert_array_equal(np.sort(at), np.arange(length))
        assert (np.diff(at.reshape(n, -1), axis=1) > 0).all()
        np.testing.assert_array_equal(permuted, x[:, at])
        shard = functools.partial(shard_positions, layout, length // n, n)
        every = jax.vmap(shard)(jnp.arange(n, dtype=jnp.int32))
        assert every.dtype == jnp.int32
        np.testing.assert_array_equal(every.reshape(-1), at)


@pytest.mark.parametrize("layout", [*TABLE, "striped:4"])
def test_runs_of_positions(layout):
    """Runs are arithmetic progressions that cover each shard, across stripes and within them."""
    for n, across in itertools.product(SIZES, (True, False)):
        shard_length = length_of(layout, n) // n
        starts, stride, count = shard_runs(layout, shard_length, n, across_stripes=across)
        runs = starts[:, :, None] + stride * np.arange(count)
        at = positions(layout, shard_length * n, n).reshape(n, -1)
        np.testing.assert_array_equal(np.sort(runs.reshape(n, -1)), at)
        if layout.startswith("striped") and not across:
            assert (stride, count) == (1, stripe_size(layout))


@pytest.mark.parametrize("layout", [*TABLE, "striped:4"])
def test_adjacent_tokens_in_one_block(layout):
    """The result divides the shard, its groups of tokens are within blocks, and it is not 1."""
    for n, block in itertools.product((1, 2, 3, 4), (4, 6, 8, 24, 48)):
        at = positions(layout, 96 * n, n).reshape(n, 96)
        run = run_in_blocks(layout, 96, n, block)
        assert 96 % run == 0
        blocks = at.reshape(n, 96 // run, run) // block
        assert (blocks == blocks[:, :, :1]).all(), (n, block, run)
    assert run_in_blocks("contiguous", 96, 4, 24) == run_in_blocks("zigzag", 96, 4, 24) == 24
    assert run_in_blocks("striped", 96, 4, 24) == 6
    assert run_in_blocks("striped:4", 96, 3, 8) == 4


@every_layout
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis(layout, axis):
    shape = [2, 3, 4]
    shape[axis] = 12
    x = RNG.normal(size=shape).astype(np.float32)
    at = positions(layout, 12, 3)
    for kind in (np.asarray, jnp.asarray):
        got = to_layout(kind(x), layout, 3, axis=axis)
        np.testing.assert_array_equal(got, np.take(x, at, axis))
        np.testing.assert_array_equal(from_layout(got, layout, 3, axis=axis), x)


@every_layout
def test_pytrees_keep_types_and_dtypes(layout):
    tree: dict[str, Any] = {
        "tokens": RNG.integers(0, 9, (2, 12)).astype(np.uint16),
        "more": [jnp.ones((1, 12, 3), jnp.bfloat16), np.zeros((2, 12), bool)],
        "absent": None,
    }
    for function in (to_layout, from_layout):
        got = function(tree, layout, 3)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        assert type(got["tokens"]) is np.ndarray
        assert isinstance(got["more"][0], jax.Array)
        assert type(got["more"][1]) is np.ndarray
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize(("layout", "n"), [("zigzag", 3), ("striped", 4), ("striped:4", 3)])
def test_under_jit_without_a_gather(layout, n):
    x = RNG.normal(size=(2, length_of(layout, n), 5)).astype(np.float32)
    permute = jax.jit(functools.partial(to_layout, layout=layout, num_shards=n))
    inverse = jax.jit(functools.partial(from_layout, layout=layout, num_shards=n))
    np.testing.assert_array_equal(permute(x), to_layout(x, layout, n))
    np.testing.assert_array_equal(inverse(permute(x)), x)
    for function in (permute, inverse):
        assert "gather" not in function.lower(x).as_text()


def test_gradients_are_permuted_back():
    weights = RNG.normal(size=(1, 12)).astype(np.float32)
    for layout in TABLE:
        gradient = jax.grad(lambda x, layout=layout: (to_layout(x, layout, 3) * weights).sum())(
            jnp.zeros((1, 12), jnp.float32)
        )
        np.testing.assert_array_equal(gradient, from_layout(weights, layout, 3))


LENGTHS = (
    ("contiguous", 16, 4, 16), ("contiguous", 17, 4, 20), ("striped", 1, 8, 8),
    ("striped", 100, 3, 102), ("striped:64", 1000, 3, 1152), ("zigzag", 16, 4, 16),
    ("zigzag", 20, 4, 24), ("zigzag", 63, 5, 70), ("zigzag", 1, 1, 2),
)  # fmt: skip


def test_padded_length():
    for layout, length, n, fit in LENGTHS:
        assert padded_length(layout, length, n) == fit
        positions(layout, fit, n)
        if length != fit:
            with pytest.raises(ValueError, match=rf"length is {length}: .*pad to {fit} "):
                positions(layout, length, n)


@every_layout
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_padding_is_at_the_end_zero_and_masked(layout, kind):
    tree = {
        "tokens": kind(RNG.integers(1, 9, (2, 13)).astype(np.int32)),
        "features": kind(RNG.normal(size=(2, 13, 3)).astype(jnp.bfloat16)),
    }
    padded, segment_ids = pad_to_layout(tree, layout, 3)
    fit = padded_length(layout, 13, 3)
    assert fit > 13
    for name, x in tree.items():
        assert padded[name].shape == (2, fit, *x.shape[2:])
        assert padded[name].dtype == x.dtype
        assert isinstance(padded[name], np.ndarray) == (kind is np.asarray)
        np.testing.assert_array_equal(padded[name][:, :13], x)
        assert not np.asarray(padded[name][:, 13:]).any()
    assert isinstance(segment_ids, np.ndarray) == (kind is np.asarray)
    assert segment_ids.dtype == np.int32
    np.testing.assert_array_equal(segment_ids, [[1] * 13 + [0] * (fit - 13)] * 2)


@every_layout
def test_padding_extends_given_segment_ids(layout):
    given = np.array([[1, 1, 0, 2, 2], [3, 3, 3, 3, 0]], np.int32)
    tokens = RNG.integers(1, 9, (2, 5))
    padded, segment_ids = pad_to_layout(tokens, layout, 4, given)
    np.testing.assert_array_equal(padded[:, :5], tokens)
    np.testing.assert_array_equal(segment_ids[:, :5], given)
    assert segment_ids.shape == (2, 8)
    assert not segment_ids[:, 5:].any()
    assert segment_ids.dtype == np.int32


def test_no_padding_is_needed():
    tokens = RNG.integers(1, 9, (2, 12))
    padded, segment_ids = pad_to_layout(tokens, "zigzag", 3)
    np.testing.assert_array_equal(padded, tokens)
    np.testing.assert_array_equal(segment_ids, np.ones((2, 12)))


def test_padding_under_jit():
    run = jax.jit(functools.partial(pad_to_layout, layout="zigzag", num_shards=2))
    tokens = jnp.arange(1, 11, dtype=jnp.int32).reshape(2, 5)
    padded, segment_ids = run(tokens)
    want, want_ids = pad_to_layout(np.asarray(tokens), "zigzag", 2)
    np.testing.assert_array_equal(padded, want)
    np.testing.assert_array_equal(segment_ids, want_ids)


# Casts, because a type checker finds these mistakes, too.
WRONG = {
    "layout": (
        lambda: to_layout(np.ones((1, 4)), cast(Any, "spiral"), 2),
        "layout is 'spiral': use one of",
    ),
    "layout-of-positions": (
        lambda: positions(cast(Any, "ring"), 4, 2),
        "layout is 'ring': .*'zigzag'",
    ),
    "layout-of-padding": (
        lambda: pad_to_layout(np.ones((1, 4)), cast(Any, "x"), 2),
        "layout is 'x'",
    ),
    **{
        name: (
            lambda name=name: positions(name, 16, 4),
            f"layout is '{name}': use one of .* 'striped:k' for st",
        )
        for name in ("striped:", "striped:0", "striped:-1", "striped:1.5", "zigzag:2")
    },
    "multiple": (
        lambda: pad_to_layout(np.ones((1, 100)), "zigzag", 4, multiple_of=0),
        "multiple_of is 0: it must be a positive integer",
    ),
    "shards-zero": (lambda: to_layout(np.ones((1, 4)), "zigzag", 0), "num_shards is 0: .*positive"),
    "shards-float": (
        lambda: positions("zigzag", 4, cast(Any, 2.0)),
        "num_shards is 2.0: .*integer",
    ),
    "shards-of-padding": (
        lambda: pad_to_layout(np.ones((1, 4)), "zigzag", -1),
        "num_shards is -1: it must be a positive integer",
    ),
    "axis": (lambda: to_layout(np.ones(4), "zigzag", 2), r"axis is 1: the array has shape \(4,\)"),
    "length": (
        lambda: from_layout(np.ones((1, 9)), "zigzag", 4),
        "length along axis 1 is 9: the zigzag layout over 4 shards needs a multiple of 8; "
        "pad to 16 .pad_to_layout",
    ),
    "length-negative-axis": (
        lambda: to_layout(np.ones((1, 9)), "striped", 4, axis=-1),
        "along axis 1 is 9: the striped layout over 4 shards needs a multiple of 4; pad to 12",
    ),
    "padding-nothing": (lambda: pad_to_layout({}, "zigzag", 2), "tree holds no arrays: pass"),
    "padding-rank": (
        lambda: pad_to_layout(np.ones(5), "zigzag", 2),
        r"an array of shape \(5,\): it needs \[B, T, \.\.\.\]",
    ),
    "padding-unequal": (
        lambda: pad_to_layout([np.ones((1, 5)), np.ones((1, 6))], "zigzag", 2),
        r"different \[B, T\]: \[\(1, 5\), \(1, 6\)\]",
    ),
    "padding-segments-shape": (
        lambda: pad_to_layout(np.ones((1, 5)), "zigzag", 2, np.ones((1, 4), np.int32)),
        r"segment_ids has shape \(1, 4\): it must be \(1, 5\), the arrays'",
    ),
    "padding-segments-dtype": (
        lambda: pad_to_layout(np.ones((1, 5)), "zigzag", 2, np.ones((1, 5))),
        "segment_ids has dtype float64: convert it to int32",
    ),
    "padding-segments-list": (
        lambda: pad_to_layout(np.ones((1, 2)), "zigzag", 2, cast(Any, [[1, 1]])),
        "segment_ids .*list: .*int32",
    ),
}


def test_wrong_arguments():
    for call, message in WRONG.values():
        with pytest.raises(ValueError, match=message):
            call()


# --- arrays on a mesh ----------------------------------------------------------------------------

SPECS = (P("data", "seq"), P(None, "seq"), P("data"), P(None, ("seq", "data")), P())
every_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


@pytest.fixture(params=["context", "no_context"])
def mesh(request):
    """Explicit axes, the default of ``jax.make_mesh``; with and without ``jax.set_mesh``."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"))
    assert set(mesh.axis_types) == {AxisType.Explicit}
    with jax.set_mesh(mesh) if request.param == "context" else contextlib.nullcontext():
        yield mesh


def assert_same_sharding(got, want, spec):
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for x in jax.tree.leaves(got):
        full = [spec[i] if i < len(spec) else None for i in range(x.ndim)]
        assert jax.typeof(x).sharding.spec == P(*full)
        assert x.sharding.is_equivalent_to(jax.NamedSharding(x.sharding.mesh, P(*full)), x.ndim)


@every_spec
def test_sharding_over_explicit_axes_is_kept(mesh, spec):
    """Several shards of the ring per device, one, and a shard over several devices."""
    x = RNG.normal(size=(2, 16, 3)).astype(np.float32)
    array = jax.device_put(x, jax.NamedSharding(mesh, spec))
    cases = [
        functools.partial(function, layout=layout, num_shards=n)
        for function, layout, n in (
            (to_layout, "zigzag", 8), (to_layout, "striped", 4), (from_layout, "zigzag", 4),
            (from_layout, "striped", 8), (pad_to_layout, "zigzag", 16),
        )
    ]  # fmt: skip
    for run in cases:
        assert_same_sharding(run(array), run(x), spec)
    together = jax.jit(lambda x: [run(x) for run in cases])
    assert_same_sharding(together(array), [run(x) for run in cases], spec)


def test_padding_to_a_length_that_the_devices_do_not_divide():
    mesh = jax.make_mesh((2, 4), ("data", "seq"))
    array = jax.device_put(np.ones((2, 16)), jax.NamedSharding(mesh, P(None, "seq")))
    message = (
        r"the padded length is 18, .* sharded over the Explicit mesh axes \('seq',\), 4 devices, "
        "which do not divide it: make num_shards a multiple of 4, or pad before the array is "
        "placed on the mesh"
    )
    with pytest.raises(ValueError, match=message):
        pad_to_layout(array, "zigzag", 3)


def test_gradients_pass_over_explicit_axes():
    mesh = jax.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
    weights = RNG.normal(size=(1, 16)).astype(np.float32)
    with jax.set_mesh(mesh):
        x, placed = jax.device_put((np.zeros_like(weights), weights), P(None, "seq"))
        gradient = jax.grad(lambda x: (to_layout(x, "striped", 4) * placed).sum())(x)
    np.testing.assert_array_equal(gradient, from_layout(weights, "striped", 4))


def test_padding_to_another_multiple():
    """For a ulysses_axis, which splits the shards of the ring."""
    for multiple, want in ((1, 104), (8, 104), (16, 112), (12, 120)):
        padded, ids = pad_to_layout(np.ones((1, 100)), "zigzag", 4, multiple_of=multiple)
        assert padded.shape == ids.shape == (1, want)
        assert (ids.sum(), ids[0, 99], padded.sum()) == (100, 1, 100)
