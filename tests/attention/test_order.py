"""Positions that contradict the layout raise, or make the result NaN, and no others do."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType
from meshes import mesh_of

import burst_jax
from burst_jax.attention.order import reject_other_layout, reject_wrong_order
from burst_jax.layers.nnx_layer import BurstAttention
from burst_jax.layouts.balanced import balance_batch
from burst_jax.layouts.permutation import positions, to_layout
from burst_jax.models import DecoderConfig
from burst_jax.training import (
    init_train_state,
    make_batch,
    make_eval_step,
    make_train_step,
    place_batch,
)

B, T = 3, 48
LAYOUTS = [("zigzag", 4), ("striped", 4), ("zigzag", 3), ("striped:4", 2)]
ALL_LAYOUTS = [*LAYOUTS, ("contiguous", 4)]


def natural_rows(rng):
    """Segment ids ``[B, T]`` in natural order, and positions that ascend within every segment."""
    ids, places = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    for row in range(B):
        ends = np.sort(rng.choice(np.arange(1, T), rng.integers(0, 5), replace=False))
        for index, part in enumerate(np.split(np.arange(T), ends)):
            ids[row, part] = index % 4  # 0 is padding.
            steps = rng.integers(0, 3, part.size) if index % 2 else np.ones(part.size, int)
            places[row, part] = rng.integers(0, 9) + np.cumsum(steps)
    return ids, places


X = jnp.ones((B, T, 2))


def options_of(layout, n):
    return {"mesh": mesh_of(seq=n), "layout": layout, "is_causal": True}


def nan_rows(places, ids, **options):
    """Which sequences are NaN when only the devices know the values."""

    @quick_jit
    def run(x, places, ids):
        return reject_wrong_order(x, places, ids, {"is_causal": True, **options})

    out = np.isnan(np.asarray(run(X.astype(jnp.bfloat16), places, ids), np.float32))
    assert (out == out[:, :1, :1]).all()
    return out[:, 0, 0]


@pytest.mark.parametrize(("layout", "n"), ALL_LAYOUTS)
def test_positions_in_the_layouts_order_pass(layout, n):
    rng, options = np.random.default_rng(n), options_of(layout, n)
    batches = [[to_layout(rows, layout, n) for rows in natural_rows(rng)] for _ in range(60)]
    for ids, places in batches:
        assert reject_wrong_order(X, places, ids, options) is X
    ids, places = map(np.concatenate, zip(*batches, strict=True))
    check = quick_jit(functools.partial(reject_wrong_order, options=options))
    assert not np.isnan(check(jnp.ones((len(ids), T, 1)), places, ids)).any()
    plain = positions(layout, T, n)
    assert reject_wrong_order(X, plain, None, options) is X
    # Without segment ids positions may still restart: documents that see each other.
    assert reject_wrong_order(X, plain % 20, None, options) is X


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_positions_in_natural_order_raise(layout, n):
    message = (
        rf"positions of row 0 are in another order .* burst_jax.positions\('{layout}', {T}, {n}\)"
    )
    ids = np.ones((B, T), np.int32)
    ids[0, 27:], ids[1, 30:] = 2, 0
    restart = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    restart[0, 27:] -= 27
    cases = (np.arange(T, dtype=np.int32), None), (7 + 2 * np.arange(T, dtype=np.int32), None)
    for places, segments in (*cases, (restart, ids)):
        for given in (places, jnp.asarray(places)):
            with pytest.raises(ValueError, match=message):
                reject_wrong_order(X, given, segments, options_of(layout, n))


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_packed_documents_counted_along_the_array_raise(layout, n):
    """Tokens and segment ids are in the layout's order; documents end anywhere."""
    places = jnp.asarray(np.tile(np.arange(T), (B, 1)), jnp.int32)
    ids = np.ones((B, T), np.int32)
    ids[0, 21:], ids[1, 19:], ids[2, :7], ids[2, 20:] = 2, 2, 0, 2
    ids = jnp.asarray(to_layout(ids, layout, n))
    with pytest.raises(ValueError, match="positions of row 0 are in another order"):
        reject_wrong_order(X, places, ids, options_of(layout, n))
    assert nan_rows(places, ids, **options_of(layout, n)).all()


@pytest.mark.parametrize(("layout", "n"), ALL_LAYOUTS)
def test_restarts_inside_a_segment_and_positions_of_padding_pass(layout, n):
    """As after pad_to_layout alone, and like a few tokens that are padded after to_layout."""
    options, natural = options_of(layout, n), np.tile(np.arange(T, dtype=np.int32), (B, 1))
    ids = to_layout((natural < 2).astype(np.int32), layout, n)
    padded = np.where(ids != 0, to_layout(natural, layout, n), 100 + natural)
    assert reject_wrong_order(X, padded, ids, options) is X
    restarts = [
        to_layout(start + natural[0] % size, layout, n, axis=0)
        for start, size in itertools.product((0, 1, 500), (6, 8, 24))
    ]
    # A document that starts between the positions of both neighbours, in the text and in the array.
    order = np.asarray(positions(layout, T, n))
    i = int(np.argmax(np.diff(order) > 3))
    restarted = natural[0] - order[i + 1] + order[i] + 2
    between = np.where(natural[0] < order[i + 1], natural[0], restarted)
    restarts.insert(0, to_layout(between, layout, n, axis=0))
    for places in restarts:
        assert reject_wrong_order(X, places, np.ones((1, T), np.int32), options) is X
    # Of traced ones a row each.
    places = jnp.asarray(np.stack([padded[0], *restarts[::4][:2]]))
    ids = jnp.asarray(np.stack([ids[0], *np.ones((2, T), np.int32)]))
    assert not nan_rows(places, ids, **options).any()


@pytest.mark.parametrize("traced", [False, True])
def test_in_the_contiguous_layout_positions_may_go_back(traced):
    """Where they are no permutation of a range that ascends in every shard."""
    options, text = options_of("contiguous", 4), np.arange(T)
    zigzag = np.array(positions("zigzag", T, 4))
    # Number, ends and sum of these are those of a range.
    repeated = np.where(zigzag == 5, 6, np.where(zigzag == 42, 41, zigzag))
    infilled = np.concatenate([text[:10], text[30:], text[10:30]])
    chunks = np.concatenate([text[24:], 100 + text[:24]])
    # Two shards exchanged, and two tokens inside of one.
    shuffled = np.concatenate([[12, 14, 13], text[15:24], text[:12], text[24:]])
    without = [repeated, infilled, chunks, text % 12, text % 24, 2 * text % 47, np.roll(text, 20)]
    without.append(shuffled)
    ids = np.where(text // 12 % 2, 1, 2)  # Used again by later documents.
    both = [text % 12, text % 24, repeated]
    cases = (without, None), (both, np.stack([ids] * 3)), ([infilled[::-1]], 0 * ids[None])
    for rows, segments in cases:
        for first in range(0, len(rows), B):
            places = np.stack(rows[first : first + B]).astype(np.int32)
            x = jnp.ones((len(places), T, 2))
            if not traced:
                assert reject_wrong_order(x, places, segments, options) is x
                continue
            check = quick_jit(functools.partial(reject_wrong_order, options=options))
            given = None if segments is None else segments.astype(np.int32)
            assert not np.isnan(check(x, places, given)).any()


def test_a_segment_that_begins_where_the_layout_goes_back_may_restart():
    """No other segment interrupts it in the text."""
    half, block = T // 2, T // 8
    ids = np.where(np.arange(T) < half, 1, 2)
    rows = (np.stack([x] * B).astype(np.int32) for x in (np.arange(T) % block, ids))
    places, ids = (jnp.asarray(to_layout(x, "zigzag", 4)) for x in rows)
    assert not nan_rows(places, ids, **options_of("zigzag", 4)).any()


MESHES = {
    "ring": (AxisType.Explicit, {"seq": 4}, {}),
    "two-levels": (AxisType.Auto, {"outer": 2, "inner": 2}, {"seq_axis": ("outer", "inner")}),
    "ulysses": (AxisType.Auto, {"seq": 2, "heads": 2}, {"ulysses_axis": "heads"}),
    "data-parallel": (AxisType.Explicit, {"data": 3, "seq": 2}, {"batch_axis": "data"}),
}
QUICK_MESHES = "ring", "ulysses"


@pytest.mark.parametrize(
    ("kind", "sizes", "axes"),
    [
        pytest.param(*mesh, id=name, marks=() if name in QUICK_MESHES else pytest.mark.slow)
        for name, mesh in MESHES.items()
    ],
)
def test_traced_positions_make_the_same_sequences_nan(kind, sizes, axes):
    mesh, names = mesh_of(kind, **sizes), tuple(sizes)
    n = int(np.prod([mesh.shape[a] for a in names if a not in ("heads", "data")]))
    options = {"mesh": mesh, "layout": "zigzag", **axes}
    tokens = tuple(name for name in names if name != "data")
    spec = jax.P(axes.get("batch_axis"), tokens)
    put = lambda rows: jax.device_put(rows, jax.NamedSharding(mesh, spec))  # noqa: E731
    ids, places = natural_rows(np.random.default_rng(3))
    ids[0], ids[1, :30], ids[1, 30:] = 1, 1, 2
    places[0], places[1] = np.arange(T), np.arange(T) % 30
    right = to_layout(places, "zigzag", n)
    with jax.set_mesh(mesh):
        assert not nan_rows(put(right), put(to_layout(ids, "zigzag", n)), **options).any()
        mixed = np.where(np.arange(B)[:, None] < 2, places, right)
        both = np.where(np.arange(B)[:, None] < 2, ids, to_layout(ids, "zigzag", n))
        got = nan_rows(put(mixed), put(both), **options)
        np.testing.assert_array_equal(got, [True, True, False])
        assert nan_rows(jnp.arange(T, dtype=jnp.int32), None, **options).all()
        # Called with the default layout.
        contiguous = {**options, "layout": "contiguous"}
        zigzag = np.tile(positions("zigzag", T, n), (B, 1))
        for given in (zigzag, zigzag + np.int32(2**30)):
            assert nan_rows(put(given), None, **contiguous).all()
        permuted = put(to_layout(ids, "zigzag", n))
        np.testing.assert_array_equal(nan_rows(put(right), permuted, **contiguous)[:2], True)
        natural = put(np.tile(np.arange(T, dtype=np.int32), (B, 1)))
        for given, segments in ((natural, None), (natural, put(ids)), (put(places), put(ids))):
            assert not nan_rows(given, segments, **contiguous).any()


def test_positions_that_no_mask_reads_pass():
    arange = np.arange(T, dtype=np.int32)
    zigzag = {"mesh": mesh_of(seq=4), "layout": "zigzag"}
    assert reject_wrong_order(X, arange, None, zigzag) is X
    looks = {"is_causal": True}, {"local_window_size": 8}, {"alibi_slopes": jnp.ones(2)}
    for known in (zigzag | option for option in looks):
        with pytest.raises(
            ValueError, match="positions of row 0 are in another order than its tokens"
        ):
            reject_wrong_order(X, arange, None, known)
    slopes = {"is_causal": False, "alibi_slopes": jnp.ones(2)}
    assert nan_rows(jnp.asarray(arange), None, **slopes, **zigzag).all()
    sinks = zigzag | {"sink_logits": jnp.ones(2), "alibi_slopes": None}
    assert reject_wrong_order(X, arange, None, sinks) is X
    for fine in ({"layout": "contiguous"}, {"layout": "zigzag", "mesh": mesh_of(seq=1)}):
        assert reject_wrong_order(X, arange, None, zigzag | {"is_causal": True} | fine) is X


@pytest.mark.parametrize(
    ("made", "model"),
    [
        (("zigzag", 4), ("contiguous", 4)),
        (("zigzag", 2), ("zigzag", 4)),
        (("zigzag", 8), ("zigzag", 4)),
        (("striped", 4), ("zigzag", 4)),
        (("zigzag", 4), ("striped", 2)),
    ],
    ids=str,
)
def test_positions_of_another_layout_are_named(made, model):
    """With segments or without: positions of a whole sequence determine the layout."""
    (layout, n), given = model, positions(made[0], T, made[1])
    options = options_of(layout, n)
    message = f"those of the {made[0]} layout over {made[1]} shards, .* in the {layout} .* over {n}"
    with pytest.raises(ValueError, match=message):
        reject_other_layout(given, options)
    with pytest.raises(ValueError, match=r"another order than|those of the"):
        reject_wrong_order(X, given, None, options)
    # In a traced call, if the batch was made for at most as many shards.
    assert nan_rows(given, None, **options).all() == (made[1] <= n)
    for order in ("contiguous", "zigzag", "striped"):
        plain = {**options, "layout": order}
        reject_other_layout(np.stack([positions(order, T, n)] * B), plain)
        # The caller may have positions that no layout has.
        reject_other_layout(np.roll(positions(order, T, n), 1), plain)


@pytest.mark.parametrize("lengths", [[40, 15, 10], [35, 30], [65], [60, 5], [50, 15]], ids=str)
def test_split_documents_are_out_of_order_in_the_default_layout(lengths):
    rows, n = np.arange(65)[None], 4
    natural = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
    _, batch = make_batch(rows, layout="balanced", num_shards=n, segment_ids=natural)
    ids: Any = batch["segment_ids"]
    places, mesh = batch["positions"], mesh_of(seq=n)
    masks: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
    x = jnp.ones((1, 64, 2, 8))

    def check(x, places):
        return burst_jax.check_positions(x, places, mesh=mesh, is_causal=True, **masks)

    message = "positions of row 0 are (those of|in another order .* contiguous layout over 4)"
    with pytest.raises(ValueError, match=message):
        check(x, places)
    assert np.isnan(jax.jit(check)(x, jnp.asarray(places))).all()
    layer = BurstAttention(16, num_heads=2, rngs=nnx.Rngs(0), mesh=mesh, is_causal=True)
    with pytest.raises(ValueError, match=message):
        layer(x[..., 0, :].repeat(2, -1), places, ids)


def is_out_of_order(places, ids, text):
    """Whether a token of a document is before an earlier one in its text."""
    order = np.argsort(text)
    places, ids = places[order], ids[order]
    before = (ids[:, None] == ids) & (ids != 0) & np.tri(len(ids), k=-1, dtype=bool)
    return bool((before & (places[:, None] < places)).any())


@pytest.mark.parametrize(("layout", "n"), ALL_LAYOUTS)
def test_a_batch_of_a_balanced_layout(layout, n):
    """Pieces of split documents are in another order; documents that are whole are not."""
    rng, options, lengths = np.random.default_rng(5), options_of(layout, n), []
    for _ in range(40 * B):
        cuts = np.sort(rng.choice(np.arange(1, T), rng.integers(1, 8), replace=False))
        lengths.append(np.diff(cuts, prepend=0))
    placements = balance_batch(lengths, num_shards=n, tokens_per_shard=T // n)
    places, ids = (
        np.stack([getattr(each, name) for each in placements])
        for name in ("positions", "segment_ids")
    )
    text = positions(layout, T, n)
    wrong = np.array([is_out_of_order(*row, text) for row in zip(places, ids, strict=True)])
    assert 20 < wrong.sum() < len(wrong) - 5
    for row in range(0, len(wrong), 4):
        given = places[row : row + 1], ids[row : row + 1]
        if wrong[row]:
            with pytest.raises(ValueError, match="positions of row 0 are in another order"):
                reject_wrong_order(X, *given, options)
        else:
            assert reject_wrong_order(X, *given, options) is X
    # In a traced call a few tokens are compared.
    check = quick_jit(functools.partial(reject_wrong_order, options=options))
    marked = np.isnan(check(jnp.ones((len(wrong), T, 1)), places, ids)).any((1, 2))
    assert not (marked & ~wrong).any()
    assert marked[wrong].mean() > 0.5


@pytest.mark.parametrize("function", ["burst_attention", "ring_attention"])
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_models_in_plain_jax_check_their_positions(function, ndim):
    """Any array of the model, with the arguments of its attention, inside of a shard_map or not."""
    mesh, rng = mesh_of(seq=4), np.random.default_rng(0)
    ids = np.ones((B, T), np.int32)
    ids[0, 21:], ids[1, 19:] = 2, 2
    ids = jnp.asarray(to_layout(ids, "zigzag", 4))
    x = jnp.asarray(rng.normal(size=(B, T, 2, 4)[:ndim]), jnp.float32)
    options: Any = {"layout": "zigzag", "is_causal": True}

    def check(x, places, ids):
        masks: Any = dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), ids)
        more: Any = {"mesh": mesh} if function == "burst_attention" else {"seq_axis": "seq"}
        return burst_jax.check_positions(x, places, **options, **masks, **more)

    run = check
    if function == "ring_attention":
        spec = jax.P(None, "seq")
        run = jax.shard_map(check, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    right = np.tile(positions("zigzag", T, 4), (B, 1))
    arange = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    # The second row contradicts the layout by its segment ids alone.
    mixed = np.stack([arange[0], arange[1] % 24, right[2]])
    got = np.asarray(jax.jit(run)(x, mixed, ids))
    assert np.isnan(got[:2]).all()
    np.testing.assert_array_equal(got[2], x[2])
    np.testing.assert_array_equal(jax.jit(run)(x, right, ids), x)
    if function == "burst_attention":
        np.testing.assert_array_equal(check(x, right, ids), x)
        with pytest.raises(ValueError, match="positions of row 0 are in another order"):
            check(x, mixed, ids)


def test_check_positions_names_wrong_arguments():
    options: Any = options_of("zigzag", 4)
    right: Any = positions("zigzag", T, 4)
    for message, x, places, more in (
        (r"x has shape \(3,\): it must be \[B, T, ...\]", jnp.ones(3), right, {}),
        (r"positions has shape \(47,\), x \(3, 48, 2\): it must be", X, right[1:], {}),
        ("positions has dtype float32: convert it to int32", X, right.astype(np.float32), {}),
        ("positions is a list: it must be an int32 array", X, right.tolist(), {}),
        (r"query_segment_ids has shape \(48,\)", X, right, {"query_segment_ids": right}),
        ("layout is 'zig': use one of", X, right, {"layout": "zig"}),
    ):
        with pytest.raises(ValueError, match=message):
            burst_jax.check_positions(x, places, **options | more)
    with pytest.raises(TypeError, match=r"check_positions\(\) got an unexpected keyword .*layouts"):
        burst_jax.check_positions(X, right, **options | {"layouts": "zigzag"})


def test_steps_and_layers_raise_for_a_batch_of_another_layout():
    """Its loss would look like any other."""
    config = DecoderConfig(
        vocab_size=16, num_layers=1, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8
    )
    mesh, optimizer = mesh_of(seq=4), optax.sgd(1.0)
    graphdef, params, state = init_train_state(config, optimizer, mesh, 0, layout="zigzag")
    rows = np.random.default_rng(0).integers(0, 16, (1, T + 1))
    batch = place_batch(make_batch(rows, layout="zigzag", num_shards=2), mesh, batch_axis=None)
    message = "zigzag layout over 2 shards, and the tokens are in the zigzag layout over 4"
    with pytest.raises(ValueError, match=message):
        make_train_step(graphdef, optimizer)(params, state, batch)
    with pytest.raises(ValueError, match=message):
        make_eval_step(graphdef)(params, batch)
    # Known while a program is traced: NumPy's arange is no traced array.
    layer = BurstAttention(8, 2, rngs=nnx.Rngs(0), mesh=mesh, layout="zigzag", is_causal=True)
    arange, x = np.arange(T, dtype=np.int32), jnp.ones((1, T, 8))
    for module, given in ((nnx.merge(graphdef, params), batch["inputs"]), (layer, x)):
        with pytest.raises(ValueError, match=r"in the zigzag layout over 4 shards \(an arange"):
            jax.eval_shape(lambda m=module, g=given: m(g, arange))
    # A document that is split over the shards, for a decoder in the default layout.
    graphdef, params, state = init_train_state(config, optimizer, mesh, 0)
    ids = np.repeat([1, 2], [5, T - 4])[None]
    _, batch = make_batch(rows, layout="balanced", num_shards=4, segment_ids=ids)
    batch = place_batch(batch, mesh, batch_axis=None)
    message = "in another order than its tokens, which are in the contiguous layout over 4 shards"
    with pytest.raises(ValueError, match=message):
        make_train_step(graphdef, optimizer)(params, state, batch)
    with pytest.raises(ValueError, match=message):
        make_eval_step(graphdef)(params, batch)
