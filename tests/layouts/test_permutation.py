"""Layouts: permutations, positions and padding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any, cast

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from burst_jax import (
    burst_attention,
    from_layout,
    in_layout,
    pad_to_layout,
    positions,
    to_layout,
)
from burst_jax.layouts import Balanced, Contiguous, Layout, Striped, Zigzag, balance_batch
from burst_jax.layouts.parse import LAYOUTS, layout_of, parse_layout
from burst_jax.layouts.permutation import padded_length

RNG = np.random.default_rng(0)
TABLE = {
    "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "zigzag": [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]],
    "striped": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    "striped:2": [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]],
}
every_layout = pytest.mark.parametrize("layout", TABLE)
# Runs of a shard; stripes are runs, three of them in a shard of three blocks.
RUNS = {"contiguous": 1, "zigzag": 2}
SIZES = (1, 2, 3, 4, 5, 7, 8)


def length_of(layout, n, blocks=3):
    """An odd number of tokens per block of a shard."""
    return parse_layout(layout).unit * n * blocks


@every_layout
def test_four_shards_of_sixteen_tokens(layout):
    table = np.array(TABLE[layout])
    np.testing.assert_array_equal(positions(layout, 16, 4).reshape(4, 4), table)
    np.testing.assert_array_equal(to_layout(np.arange(16)[None], layout, 4)[0], table.reshape(-1))
    for shard in range(4):
        found = parse_layout(layout).shard_positions(4, 4, shard)
        np.testing.assert_array_equal(found, table[shard])
    assert tuple(TABLE)[:-1] == LAYOUTS


@every_layout
def test_permutations_of_odd_sizes(layout):
    """Inverses, ascending positions, and the same positions from a traced shard index."""
    for n in SIZES:
        length = length_of(layout, n)
        x = RNG.integers(0, 1000, (2, length, 3))
        permuted, at = to_layout(x, layout, n), positions(layout, length, n)
        np.testing.assert_array_equal(permuted, x[:, at])
        np.testing.assert_array_equal(from_layout(permuted, layout, n), x)
        assert (permuted == x).all() == (layout == "contiguous" or n == 1)
        assert isinstance(at, np.ndarray)
        assert at.dtype == np.int32
        np.testing.assert_array_equal(np.sort(at), np.arange(length))
        assert (np.diff(at.reshape(n, -1), axis=1) > 0).all()
        shard = functools.partial(parse_layout(layout).shard_positions, length // n, n)
        every = jax.vmap(shard)(jnp.arange(n, dtype=jnp.int32))
        assert every.dtype == jnp.int32
        np.testing.assert_array_equal(every.reshape(-1), at)


@pytest.mark.parametrize("layout", [*TABLE, "striped:4"])
def test_runs_of_positions(layout):
    """Runs of adjacent tokens, and arithmetic progressions along and across stripes."""
    value = parse_layout(layout)
    for n in SIZES:
        c = length_of(layout, n) // n
        at = positions(layout, c * n, n).reshape(n, c)
        runs = value.runs(c, n)
        assert runs is not None
        assert (runs.shape, runs.dtype) == ((n, RUNS.get(layout, 3)), np.int64)
        size = c // runs.shape[1]
        np.testing.assert_array_equal((runs[..., None] + np.arange(size)).reshape(n, c), at)
        for blocks in ((None, None), (1, 1), (None, 8)):
            found = value.progressions((c, 2 * c), n, blocks)
            assert found[0][1] == found[1][1]
            for (starts, stride, count), length in zip(found, (c, 2 * c), strict=True):
                tokens = starts[:, :, None] + stride * np.arange(count)
                want = positions(layout, length * n, n).reshape(n, -1)
                np.testing.assert_array_equal(np.sort(tokens.reshape(n, -1)), want)
    # A run of adjacent tokens is within a block, divides the shard, and is not 1.
    for n, block in itertools.product((1, 2, 3, 4), (4, 6, 8, 24, 48)):
        at = positions(layout, 96 * n, n).reshape(n, 96)
        run = value.run_in_blocks(96, n, block)
        assert 96 % run == 0
        blocks = at.reshape(n, 96 // run, run) // block
        assert (blocks == blocks[:, :, :1]).all(), (n, block, run)


def test_few_progressions():
    """One token of each stripe is one, unless a block has fewer stripes than a stripe tokens."""
    assert Striped(2).progressions((96, 96), 4, (None, None))[0][1:] == (8, 48)
    assert Striped(2).progressions((96, 96), 4, (8, 8))[0][1:] == (1, 2)
    assert Zigzag().progressions((96, 48), 4, (8, 8))[1][1:] == (1, 24)
    assert Contiguous().run_in_blocks(96, 4, 24) == Zigzag().run_in_blocks(96, 4, 24) == 24
    assert Striped().run_in_blocks(96, 4, 24) == 6
    assert Striped(4).run_in_blocks(96, 3, 8) == 4


@dataclasses.dataclass(frozen=True, repr=False)
class Quarters(Layout):
    """Shard r of n holds the quarter-blocks r, 2n-1-r, 2n+r and 4n-1-r."""

    @property
    def name(self):
        return "quarters"

    @property
    def unit(self):
        return 4

    def block_shards(self, shard_length, num_shards):
        shard = np.arange(num_shards)
        return shard_length // 4, np.concatenate([shard, shard[::-1]] * 2)


def test_a_new_layout_is_one_class():
    """What a layout is made of follows from the shards of its blocks, also on a ring."""
    layout = Quarters()
    table = [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]
    np.testing.assert_array_equal(positions(layout, 16, 2).reshape(2, 8), table)
    np.testing.assert_array_equal(layout.runs(8, 2), [[0, 6, 8, 14], [2, 4, 10, 12]])
    x = jnp.arange(48.0).reshape(2, 24)
    permuted = to_layout(x, layout, 3)
    np.testing.assert_array_equal(from_layout(permuted, layout, 3), x)
    shard = functools.partial(layout.shard_positions, 8, 3)
    at = jax.jit(jax.vmap(shard))(jnp.arange(3, dtype=jnp.int32)).reshape(-1)
    np.testing.assert_array_equal(permuted, x[:, at])
    np.testing.assert_array_equal(layout.shard_positions(8, 3, 1), at[8:16])
    with pytest.raises(ValueError, match="length is 20: the quarters layout over 3 shards needs"):
        positions(layout, 20, 3)
    with pytest.raises(
        ValueError, match="holds 6 tokens per shard: the quarters layout needs a mu"
    ):
        layout.check_shard(6)
    assert "layout is 'quarters', in which the first halves" in str(layout.lacks_first_half(3))
    mesh = jax.make_mesh((3,), ("seq",), devices=jax.devices()[:3])
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 1, 24, 2, 8)).astype(np.float32)
    ids = np.repeat([[1, 2, 0]], [9, 13, 2], 1).astype(np.int32)
    _, placed = layout.place({"q": q, "k": k, "v": v, "segment_ids": ids}, 3)
    out = burst_attention(
        placed["q"], placed["k"], placed["v"], mesh=mesh, layout=layout, is_causal=True,
        query_segment_ids=placed["segment_ids"], key_value_segment_ids=placed["segment_ids"],
    )  # fmt: skip
    want = dense.reference(
        np.zeros(q.shape), np.zeros(q.shape[:3]), query=q, key=k, value=v, is_causal=True,
        query_segment_ids=ids, key_value_segment_ids=ids,
    ).truth[0]  # fmt: skip
    np.testing.assert_allclose(from_layout(out, layout, 3), want, atol=1e-5)


def test_layouts_are_values():
    """Frozen, hashable, equal by what they are; their repr is the public spelling."""
    spelled = {
        "contiguous": Contiguous(), "zigzag": Zigzag(), "striped": Striped(),
        "striped:128": Striped(128), "balanced": Balanced(), "balanced:0": Balanced(0),
        "balanced:256": Balanced(256),
    }  # fmt: skip
    for name, layout in spelled.items():
        assert parse_layout(name) == parse_layout(np.str_(name)) == layout
        assert parse_layout(layout) is layout
        assert (str(layout), repr(layout)) == (name, repr(name))
    assert len(set(spelled.values())) == len(spelled)
    assert parse_layout("striped:1") == Striped()
    for wrong in (lambda: Striped(0), lambda: Striped(cast(Any, 1.5))):
        with pytest.raises(ValueError, match=r"stripe is .*: it must be an integer, at least 1"):
            wrong()
    with pytest.raises(ValueError, match="zone is -1: it must be an integer, at least 0"):
        Balanced(-1)
    with pytest.raises(ValueError, match=r"layout is \['zigzag'\]: use one of 'contiguous', 'zig"):
        parse_layout(cast(Any, ["zigzag"]))


@every_layout
def test_positions_identify_their_layout(layout):
    value = parse_layout(layout)
    assert layout_of(positions(layout, 64, 4)) == (
        (value, 4) if layout != "contiguous" else (value, 1)
    )
    assert layout_of(np.roll(np.arange(64), 5)) is None


def test_a_balanced_layout_is_fitted_to_documents():
    lengths = [[40, 3, 21], [12, 12, 12, 12]]
    ids = np.array(
        [np.repeat(np.arange(1, len(x) + 1), x).tolist() + [0] * (64 - sum(x)) for x in lengths]
    )
    fitted, order, new_ids = Balanced().order_of(ids, 4)
    placed = balance_batch(lengths, num_shards=4, tokens_per_shard=16)
    assert fitted.name == placed[0].layout
    assert fitted in Balanced().variants(16)
    assert parse_layout(fitted.name).order_of(ids, 4).layout == fitted
    assert Zigzag().order_of(ids, 4).layout == Zigzag() == Zigzag().variants(16)[0]
    for row, new, one in zip(order, new_ids, placed, strict=True):
        np.testing.assert_array_equal(row, one.order)
        np.testing.assert_array_equal(new, one.segment_ids)
    assert fitted.positions(64, 4) is fitted.runs(16, 4) is None
    with pytest.raises(
        ValueError, match="layout is 'balanced', without the size of its gathered z"
    ):
        Balanced().check_length(64, 4)
    with pytest.raises(ValueError, match="layout is 'balanced:17', and a shard has 16 tokens"):
        Balanced(17).check_length(64, 4)


@every_layout
def test_pytrees_on_any_axis_keep_types_and_dtypes(layout):
    tree: dict[str, Any] = {
        "tokens": RNG.integers(0, 9, (12, 12, 12)).astype(np.uint16),
        "more": [jnp.ones((12, 12, 12), jnp.bfloat16).at[3].set(2), np.eye(12, dtype=bool)],
        "absent": None,
    }
    at = positions(layout, 12, 3)
    for axis in (0, 1, -1):
        got = to_layout(tree, layout, 3, axis=axis)
        want = jax.tree.map(lambda x, axis=axis: np.take(np.asarray(x), at, axis), tree)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        back = from_layout(got, layout, 3, axis=axis)
        jax.tree.map(np.testing.assert_array_equal, back, tree)
        for result in (got, back):
            assert jax.tree.structure(result) == jax.tree.structure(tree)
            assert isinstance(result["more"][0], jax.Array)
            assert type(result["tokens"]) is type(result["more"][1]) is np.ndarray
            for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True):
                assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.parametrize(("layout", "n"), [("zigzag", 3), ("striped", 4), ("striped:4", 3)])
def test_under_jit_without_a_gather(layout, n):
    x = RNG.normal(size=(2, length_of(layout, n), 5)).astype(np.float32)
    permute = jax.jit(functools.partial(to_layout, layout=layout, num_shards=n))
    inverse = jax.jit(functools.partial(from_layout, layout=layout, num_shards=n))
    np.testing.assert_array_equal(permute(x), to_layout(x, layout, n))
    np.testing.assert_array_equal(inverse(permute(x)), x)
    for function in (permute, inverse):
        assert "gather" not in function.lower(x).as_text()


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
    # For a ulysses_axis, which splits the shards of the ring.
    for multiple, want in ((1, 104), (8, 104), (16, 112), (12, 120)):
        padded, ids = pad_to_layout(np.ones((1, 100)), "zigzag", 4, multiple_of=multiple)
        assert padded.shape == ids.shape == (1, want)


@every_layout
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_padding_is_at_the_end_zero_and_masked(layout, kind):
    tree = {
        "tokens": kind(RNG.integers(1, 9, (2, 13)).astype(np.int32)),
        "features": kind(RNG.normal(size=(2, 13, 3)).astype(jnp.bfloat16)),
    }
    fit = padded_length(layout, 13, 3)
    assert fit > 13
    given = RNG.integers(0, 4, (2, 13)).astype(np.int32)
    for segments in (None, given):
        padded, segment_ids = pad_to_layout(tree, layout, 3, segments)
        for name, x in tree.items():
            assert padded[name].shape == (2, fit, *x.shape[2:])
            assert padded[name].dtype == x.dtype
            assert isinstance(padded[name], np.ndarray) == (kind is np.asarray)
            np.testing.assert_array_equal(padded[name][:, :13], x)
            assert not np.asarray(padded[name][:, 13:]).any()
        assert segment_ids.dtype == np.int32
        assert segment_ids.shape == (2, fit)
        np.testing.assert_array_equal(segment_ids[:, :13], 1 if segments is None else given)
        assert not segment_ids[:, 13:].any()
        assert isinstance(segment_ids, np.ndarray) == (segments is given or kind is np.asarray)


# Casts, because a type checker finds these mistakes, too.
X = np.ones((1, 9))
WRONG: list[tuple[Any, str]] = [
    (lambda: to_layout(X, cast(Any, "spiral"), 2), "layout is 'spiral': use one of"),
    (lambda: positions(cast(Any, "ring"), 4, 2), "layout is 'ring': .*'zigzag'"),
    (lambda: pad_to_layout(X, cast(Any, "x"), 2), "layout is 'x'"),
    *(
        (lambda name=name: positions(name, 16, 4), f"layout is '{name}': use .* 'striped:k' for st")
        for name in ("striped:", "striped:0", "striped:-1", "striped:1.5", "zigzag:2")
    ),
    (lambda: pad_to_layout(X, "zigzag", 4, multiple_of=0), "multiple_of is 0: it must be a posit"),
    (lambda: to_layout(X, "zigzag", 0), "num_shards is 0: it must be a positive integer"),
    (lambda: positions("zigzag", 4, cast(Any, 2.0)), "num_shards is 2.0: it must be a positive in"),
    (lambda: pad_to_layout(X, "zigzag", -1), "num_shards is -1: it must be a positive integer"),
    (lambda: to_layout(np.ones(4), "zigzag", 2), r"axis is 1: the array has shape \(4,\)"),
    (
        lambda: from_layout(X, "zigzag", 4),
        "length along axis 1 is 9: the zigzag layout over 4 shards needs a multiple of 8; "
        "pad to 16 .pad_to_layout",
    ),
    (
        lambda: to_layout(X, "striped", 4, axis=-1),
        "along axis 1 is 9: the striped layout over 4 shards needs a multiple of 4; pad to 12",
    ),
    (lambda: pad_to_layout({}, "zigzag", 2), "tree holds no arrays: pass"),
    (
        lambda: pad_to_layout(np.ones(5), "zigzag", 2),
        r"an array of shape \(5,\): it needs \[B, T, \.\.\.\]",
    ),
    (
        lambda: pad_to_layout([X, X[:, :6]], "zigzag", 2),
        r"different \[B, T\]: \[\(1, 6\), \(1, 9\)\]",
    ),
    (
        lambda: pad_to_layout(X, "zigzag", 2, np.ones((1, 4), np.int32)),
        r"segment_ids has shape \(1, 4\): it must be \(1, 9\), the arrays'",
    ),
    (
        lambda: pad_to_layout(X, "zigzag", 2, X),
        "segment_ids has dtype float64: convert it to int32",
    ),
    (
        lambda: pad_to_layout(X[:, :2], "zigzag", 2, cast(Any, [[1, 1]])),
        r"segment_ids is a list: it must be an int32 array \[B, T\]",
    ),
]


def test_wrong_arguments():
    numbers = r"holds 1, of type int: pass an array or a pytree of arrays, np.asarray"
    lists = (
        (lambda: to_layout([1, 2, 3, 4], "zigzag", 2), "x " + numbers),
        (lambda: pad_to_layout([[1, 2]], "zigzag", 2), "tree " + numbers),
    )
    for call, message in (*WRONG, *lists):
        with pytest.raises(ValueError, match=message):
            call()


# --- arrays on a mesh ----------------------------------------------------------------------------

SPECS = (P("data", "seq"), P("data"), P(None, ("seq", "data")), P())


def assert_same_sharding(got, want, spec):
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for x in jax.tree.leaves(got):
        full = [spec[i] if i < len(spec) else None for i in range(x.ndim)]
        assert jax.typeof(x).sharding.spec == P(*full)
        assert x.sharding.is_equivalent_to(jax.NamedSharding(x.sharding.mesh, P(*full)), x.ndim)


@pytest.mark.parametrize(("spec", "in_context"), [(x, i < 2) for i, x in enumerate(SPECS)], ids=str)
def test_sharding_over_explicit_axes_is_kept(spec, in_context):
    """Several shards of the ring per device, one, and a shard over several devices."""
    mesh = jax.make_mesh((2, 4), ("data", "seq"))
    assert set(mesh.axis_types) == {AxisType.Explicit}  # The default of jax.make_mesh.
    x = RNG.normal(size=(2, 16, 3)).astype(np.float32)
    array = jax.device_put(x, jax.NamedSharding(mesh, spec))
    cases = [
        functools.partial(function, layout=layout, num_shards=n)
        for function, layout, n in (
            (to_layout, "zigzag", 8), (to_layout, "striped", 4), (from_layout, "zigzag", 4),
            (from_layout, "striped", 8), (pad_to_layout, "zigzag", 16),
        )
    ]  # fmt: skip

    def all_of(x):
        return [run(x) for run in cases]

    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        assert_same_sharding(all_of(array), all_of(x), spec)
        assert_same_sharding(jax.jit(all_of)(array), all_of(x), spec)


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


def test_a_body_works_in_the_layout_and_its_callers_do_not():
    """NumPy and traced arrays; further arguments as they are; results without tokens as well."""
    seen: dict[str, Any] = {}

    def body(hidden, at, ids, factor, *, more):
        seen.update(hidden=hidden, at=at, ids=ids, more=more)
        return {"out": hidden["a"] * factor + at[..., None].astype(np.float32), "loss": 3.0}

    order = positions("zigzag", 12, 3)
    hidden = {
        "a": RNG.integers(0, 99, (2, 12, 5)).astype(np.float32),
        "b": np.ones((2, 12), np.int8),
    }
    ids = RNG.integers(0, 3, (2, 12))
    restarting = RNG.integers(0, 12, (2, 12)).astype(np.int32)
    call = in_layout(body, "zigzag", 3)
    natural, reverse = np.arange(12), np.arange(12)[::-1]
    for at, in_natural in ((None, natural), (reverse, reverse), (restarting, restarting)):
        found = call(hidden, at, ids, 2.0, more="x")
        np.testing.assert_array_equal(found["out"], hidden["a"] * 2 + in_natural[..., None])
        assert found["loss"] == 3.0
        assert seen["more"] == "x"
        np.testing.assert_array_equal(seen["at"], in_natural[..., order])
        np.testing.assert_array_equal(seen["ids"], ids[:, order])
        np.testing.assert_array_equal(seen["hidden"]["b"], hidden["b"][:, order])
    traced = jax.jit(lambda x: in_layout(lambda x, at, ids: (x * at, ids), Zigzag(), 3)(x)[0])
    np.testing.assert_array_equal(traced(np.ones((2, 12), np.int32)), [natural] * 2)


def test_mistakes_around_a_body():
    x = np.ones((2, 12, 3), np.float32)
    identity = lambda x, at, ids: x  # noqa: E731
    for make, message in (
        (lambda: in_layout(identity, "diagonal", 3), "layout is 'diagonal'"),
        (lambda: in_layout(identity, "balanced:4", 3), "whose order differs between sequences"),
        (lambda: in_layout(identity, "zigzag", 0), "num_shards is 0"),
        (lambda: in_layout(identity, "zigzag", 5)(x), "is 12: the zigzag layout over 5 shards"),
        (lambda: in_layout(identity, "zigzag", 3)(x[0, 0]), r"hidden holds arrays whose \[B, T\]"),
        (lambda: in_layout(identity, "zigzag", 3)((x, x[:, :6])), r"\[\(2, 6\), \(2, 12\)\]: pass"),
        (
            lambda: in_layout(identity, "zigzag", 3)(x, np.arange(6)),
            r"positions has shape \(6,\): it must be \(12,\) or \(2, 12\)",
        ),
        (
            lambda: in_layout(identity, "zigzag", 3)(x, None, np.ones(12, int)),
            r"segment_ids has shape \(12,\): it must be \(2, 12\)",
        ),
        (
            lambda: in_layout(lambda x, at, ids: x[:, -1], "zigzag", 3)(x),
            r"body returned an array of shape \(2, 3\): it must start with \(2, 12\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
