"""Positions that contradict the layout raise, or make the result NaN, and no others do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from implementations import quick_jit
from jax.sharding import AxisType

from burst_jax.attention.arguments import AttentionOptions
from burst_jax.attention.order import reject_other_layout, reject_wrong_order
from burst_jax.layers.nnx_layer import BurstAttention
from burst_jax.layouts.permutation import positions, to_layout
from burst_jax.models import Decoder, DecoderConfig
from burst_jax.training import (
    init_train_state,
    make_batch,
    make_eval_step,
    make_train_step,
    place_batch,
)

B, T = 3, 48
LAYOUTS = [("zigzag", 4), ("striped", 4), ("zigzag", 3), ("striped:4", 2)]


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


def mesh_of(n, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("seq",), axis_types=(kind,), devices=jax.devices()[:n])


def nan_rows(places, ids, **options):
    """Which sequences are NaN when only the devices know the values."""
    x = jnp.ones((B, T, 2), jnp.bfloat16)

    @quick_jit
    def run(x, places, ids):
        return reject_wrong_order(x, places, ids, {"is_causal": True, **options})

    out = np.isnan(np.asarray(run(x, places, ids), np.float32))
    assert (out == out[:, :1, :1]).all()
    return out[:, 0, 0]


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_positions_in_the_layouts_order_pass(layout, n):
    rng = np.random.default_rng(n)
    x, options = jnp.ones((B, T, 2)), {"mesh": mesh_of(n), "layout": layout, "is_causal": True}
    for _ in range(60):
        ids, places = (to_layout(rows, layout, n) for rows in natural_rows(rng))
        assert reject_wrong_order(x, places, ids, options) is x
    plain = positions(layout, T, n)
    assert reject_wrong_order(x, plain, None, options) is x
    # Without segment ids positions may still restart: documents that see each other.
    assert reject_wrong_order(x, plain % 20, None, options) is x


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_positions_in_natural_order_raise(layout, n):
    x, options = jnp.ones((B, T, 2)), {"mesh": mesh_of(n), "layout": layout, "is_causal": True}
    message = (
        rf"positions of row 0 are in another order .* burst_jax.positions\('{layout}', {T}, {n}\)"
    )
    ids = np.ones((B, T), np.int32)
    ids[0, 27:], ids[1, 30:] = 2, 0
    restart = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    restart[0, 27:] -= 27
    cases = (np.arange(T, dtype=np.int32), None), (7 + 2 * np.arange(T, dtype=np.int32), None)
    for places, segments in (*cases, (restart, ids)):
        with pytest.raises(ValueError, match=message):
            reject_wrong_order(x, places, segments, options)
        with pytest.raises(ValueError, match=message):
            reject_wrong_order(x, jnp.asarray(places), segments, options)


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_packed_documents_counted_along_the_array_raise(layout, n):
    """Tokens and segment ids are in the layout's order; documents end anywhere."""
    places = jnp.asarray(np.tile(np.arange(T), (B, 1)), jnp.int32)
    ids = np.ones((B, T), np.int32)
    ids[0, 21:], ids[1, 19:], ids[2, :7], ids[2, 20:] = 2, 2, 0, 2
    ids = jnp.asarray(to_layout(ids, layout, n))
    options = {"mesh": mesh_of(n), "layout": layout, "is_causal": True}
    with pytest.raises(ValueError, match="positions of row 0 are in another order"):
        reject_wrong_order(jnp.ones((B, T, 2)), places, ids, options)
    assert nan_rows(places, ids, mesh=mesh_of(n), layout=layout).all()


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
@pytest.mark.parametrize("start", [0, 1, 500])
@pytest.mark.parametrize("size", [6, 8, 24])
def test_positions_may_restart_inside_a_segment(layout, n, start, size):
    """As after pad_to_layout alone: one segment, documents that restart."""
    places = to_layout(start + np.arange(T, dtype=np.int32) % size, layout, n, axis=0)
    ids, x = np.ones((1, T), np.int32), jnp.ones((B, T, 2))
    options = {"mesh": mesh_of(n), "layout": layout}
    assert reject_wrong_order(x, places, ids, options | {"is_causal": True}) is x
    assert not nan_rows(jnp.asarray(places), jnp.asarray(ids), **options).any()


@pytest.mark.parametrize(("layout", "n"), LAYOUTS)
def test_positions_of_padding_do_not_matter(layout, n):
    """They may be an arange along the array, like a few tokens that are padded after to_layout."""
    natural = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    ids = to_layout((natural < 2).astype(np.int32), layout, n)
    places = np.where(ids != 0, to_layout(natural, layout, n), 100 + natural)
    x, options = jnp.ones((B, T, 2)), {"mesh": mesh_of(n), "layout": layout}
    assert reject_wrong_order(x, places, ids, options | {"is_causal": True}) is x
    if n == 4:
        assert not nan_rows(jnp.asarray(places), jnp.asarray(ids), **options).any()


MESHES = {
    "ring": ((4,), ("seq",), {}),
    "two levels": ((2, 2), ("outer", "inner"), {"seq_axis": ("outer", "inner")}),
    "ulysses": ((2, 2), ("seq", "heads"), {"ulysses_axis": "heads"}),
    "data parallel": ((3, 2), ("data", "seq"), {"batch_axis": "data"}),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_traced_positions_make_the_same_sequences_nan(mesh, kind):
    sizes, names, axes = mesh
    mesh = jax.make_mesh(
        sizes, names, axis_types=(kind,) * len(sizes), devices=jax.devices()[: np.prod(sizes)]
    )
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


def test_positions_that_no_mask_reads_pass():
    x, arange = jnp.ones((B, T, 2)), np.arange(T, dtype=np.int32)
    zigzag = {"mesh": mesh_of(4), "layout": "zigzag"}
    assert reject_wrong_order(x, arange, None, zigzag) is x
    looks = {"is_causal": True}, {"local_window_size": 8}, {"alibi_slopes": jnp.ones(2)}
    for known in (zigzag | option for option in looks):
        with pytest.raises(
            ValueError, match="positions of row 0 are in another order than its tokens"
        ):
            reject_wrong_order(x, arange, None, known)
        traced = nan_rows(jnp.asarray(arange), None, **{"is_causal": False} | known)
        assert traced.all()
    sinks = zigzag | {"sink_logits": jnp.ones(2), "alibi_slopes": None}
    assert reject_wrong_order(x, arange, None, sinks) is x
    for fine in ({"layout": "contiguous"}, {"layout": "zigzag", "mesh": mesh_of(1)}):
        assert reject_wrong_order(x, arange, None, zigzag | {"is_causal": True} | fine) is x


CONFIG = DecoderConfig(
    vocab_size=9, num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8
)


@pytest.mark.slow
def test_decoder_and_layer_check_an_arange():
    options: AttentionOptions = {"mesh": mesh_of(2), "layout": "zigzag"}
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), **options)
    layer = BurstAttention(8, 2, rngs=nnx.Rngs(0), is_causal=True, **options)
    tokens, x = jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8, 8))
    arange = jnp.arange(8, dtype=jnp.int32)
    right = jnp.asarray(positions("zigzag", 8, 2))
    for module, given in ((model, tokens), (layer, x)):
        graphdef, state = nnx.split(module)

        @quick_jit
        def run(state, given, places, graphdef=graphdef):
            return nnx.merge(graphdef, state)(given, places)

        assert jnp.isnan(run(state, given, arange)).all()
        assert jnp.isfinite(run(state, given, right)).all()
        with pytest.raises(
            ValueError, match=r"which are in the zigzag layout over 2 shards \(an arange"
        ):
            # Known while the program is traced: NumPy's arange is no traced array.
            jax.eval_shape(lambda m=module, g=given: m(g, np.arange(8, dtype=np.int32)))


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
    x, (layout, n) = jnp.ones((B, T, 2)), model
    options = {"mesh": mesh_of(n), "layout": layout, "is_causal": True}
    given = positions(made[0], T, made[1])
    message = f"those of the {made[0]} layout over {made[1]} shards, .* in the {layout} .* over {n}"
    with pytest.raises(ValueError, match=message):
        reject_other_layout(given, options)
    for order in ("contiguous", "zigzag", "striped"):
        plain = {**options, "layout": order}
        reject_other_layout(np.stack([positions(order, T, n)] * B), plain)
        # The caller may have positions that no layout has.
        reject_other_layout(np.roll(positions(order, T, n), 1), plain)
    with pytest.raises(ValueError, match=r"another order than|those of the"):
        reject_wrong_order(x, given, None, options)


def test_the_first_step_raises_for_a_batch_of_another_layout():
    """Its loss would look like any other."""
    config = DecoderConfig(
        vocab_size=16, num_layers=1, embed_dim=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_dim=8
    )
    mesh, optimizer = mesh_of(4), optax.sgd(1.0)
    graphdef, params, state = init_train_state(config, optimizer, mesh, 0, layout="zigzag")
    rows = np.random.default_rng(0).integers(0, 16, (1, T + 1))
    batch = place_batch(make_batch(rows, layout="zigzag", num_shards=2), mesh, batch_axis=None)
    message = "zigzag layout over 2 shards, and the tokens are in the zigzag layout over 4"
    with pytest.raises(ValueError, match=message):
        make_train_step(graphdef, optimizer)(params, state, batch)
    with pytest.raises(ValueError, match=message):
        make_eval_step(graphdef)(params, batch)
