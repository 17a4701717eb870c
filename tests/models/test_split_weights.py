"""Training with split weights, on products of all mesh axes, against one device."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from implementations import QUICK
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, make_mesh, mesh_of, relative_rms
from split_runs import AXES, CONFIG, MESHES, bytes_per_device, losses, rows, sized

import burst_jax
from burst_jax import ShardingRules
from burst_jax.models import Decoder, LayerKind, abstract_decoder
from burst_jax.training import (
    Checkpoints,
    abstract_params,
    abstract_train_state,
    init_train_state,
    make_batch,
    make_optimizer,
    make_train_step,
    place_batch,
)
from pallas_kernels import REFERENCE

ONE = (1, 1, 1, 1, 1)
QUICK_CASES = {((1, 2, 1, 2, 2), AxisType.Auto), ((1, 2, 2, 2, 1), AxisType.Explicit)}
EXPLICIT = {(1, 2, 2, 2, 1), (2, 1, 1, 2, 2)}
CASES = [
    pytest.param(
        sizes, kind, id=f"{'x'.join(map(str, sizes))}-{kind.name}",
        marks=() if (sizes, kind) in QUICK_CASES else pytest.mark.slow,
    )
    for sizes in MESHES
    for kind in (AxisType.Auto, AxisType.Explicit)
    # Over Explicit axes the decoder's program is the same; these meshes have every kind of axis.
    if kind == AxisType.Auto or sizes in EXPLICIT
]  # fmt: skip


def assert_same(got, want):
    """Losses to 1e-5; norms of gradients, which rounding moves more after some steps, to 1e-4."""
    for index, limit in enumerate((1e-5, 1e-4)):
        np.testing.assert_allclose(got[index], want[index], rtol=limit)


@pytest.mark.parametrize(("sizes", "kind"), CASES)
def test_every_mesh_takes_the_same_steps(sizes, kind):
    assert_same(losses(sizes, kind), losses(ONE))


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ((None, 2, None, None, None), AxisType.Auto),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ((2, None, None, None, 2), AxisType.Explicit),
                ((None,) * 5, AxisType.Auto),
            )
        ),
    ],
    ids=str,
)
def test_any_axis_may_be_missing(sizes, kind):
    got, want = losses(sizes, kind, steps=3), losses(ONE)
    assert_same(got, [numbers[:3] for numbers in want])


@pytest.mark.slow
def test_rows_that_are_not_packed_take_the_same_steps():
    assert_same(losses((1, 2, 1, 2, 2), packed=False), losses(ONE, packed=False))


@pytest.mark.slow
def test_fewer_key_heads_than_devices_are_copied():
    config = dataclasses.replace(CONFIG, num_kv_heads=2)
    got = losses((1, 1, 1, 2, 4), steps=5, config=config)
    want = losses(ONE, steps=5, config=config)
    assert_same(got, want)


@pytest.mark.slow
def test_half_of_the_attention_made_again_takes_the_same_steps():
    """Layers with a window and without, so that their first halves go in different orders."""
    config = dataclasses.replace(CONFIG, layer_pattern=(LayerKind(9), LayerKind()))
    got = losses((1, 2, 2, 2, 1), steps=5, config=dataclasses.replace(config, remat="half"))
    want = losses(ONE, steps=5, config=config)
    assert_same(got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_parts_of_a_batch_add_up_to_its_step(kind):
    got = losses((1, 2, 1, 2, 1), kind, steps=3, accumulate=2)
    want = losses(ONE, steps=3)
    assert_same(got, want)


@pytest.mark.slow
def test_a_checkpoint_comes_back_on_a_mesh_without_a_sequence_axis(tmp_path):
    optimizer = OPTIMIZERS["adamw"]
    small = dataclasses.replace(CONFIG, num_layers=1)
    before, after = sized((1, 2, 1, 2, 1)), sized((None, 2, None, None, None))
    options = {"optimizer": optimizer, "layout": "zigzag"}
    _, *state = init_train_state(
        small, mesh=before, seed=0, rules=ShardingRules.of(before), **options
    )
    _, *wanted = abstract_train_state(small, mesh=after, rules=ShardingRules.of(after), **options)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    restored = Checkpoints(tmp_path).restore(wanted)
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, restored.state, state)
    assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(
        lambda x: x.sharding, wanted
    )


def test_shapes_of_weights_need_no_optimizer():
    mesh = sized((1, 2, 1, 2, 2))
    options: Any = {"rules": ShardingRules.of(mesh), "layout": "zigzag"}
    graphdef, params = abstract_params(CONFIG, mesh, **options)
    assert (graphdef, params) == abstract_train_state(CONFIG, OPTIMIZERS["sgd"], mesh, **options)[
        :2
    ]
    assert all(isinstance(x.sharding, jax.NamedSharding) for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_weights_alone_come_back_on_another_mesh(tmp_path):
    before, after = sized((1, 2, 1, 2, 1)), sized((None, None, None, 4, 2))
    small = dataclasses.replace(CONFIG, num_layers=1)
    _, params, opt_state = init_train_state(
        small, OPTIMIZERS["sgd"], before, 0, rules=ShardingRules.of(before), layout="zigzag"
    )
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, [params, opt_state])
    options: Any = {"rules": ShardingRules.of(after), "layout": "striped"}
    graphdef, shapes = abstract_params(small, after, **options)
    restored = Checkpoints(tmp_path).restore([shapes], partial=True)
    assert restored is not None
    (found,) = restored.state
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, shapes)
    assert nnx.merge(graphdef, found).config == small


def matrices(params):
    return jax.tree.map(lambda weight: weight.ndim > 2, params)


OPTIMIZERS: dict[str, Any] = {
    "adamw": make_optimizer(1e-3, 20),
    "multi_steps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "masked": optax.masked(optax.adam(1e-3), matrices),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "sgd": optax.sgd(1e-2, momentum=0.9),
}  # fmt: skip


@pytest.mark.parametrize(
    "sizes", [(1, 2, 1, 2, 2), (1, 1, 2, 4, 1), (None, 4, None, None, None)], ids=str
)
def test_weights_and_moments_are_really_split(sizes):
    mesh = sized(sizes)
    rules = ShardingRules.of(mesh)
    _, params, state = init_train_state(
        CONFIG, OPTIMIZERS["adamw"], mesh, 0, rules=rules, layout="zigzag"
    )
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    # Norms are whole on each device but for the stages; Adam's counter, too.
    norms = sum(
        weight.nbytes
        for path, weight in jax.tree_util.tree_leaves_with_path(params)
        if "norm" in jax.tree_util.keystr(path)
    )
    split = mesh.size
    held = (total - norms) // split
    assert held <= bytes_per_device(params) <= held + norms
    # Two moments as large as the weights, and two counters.
    assert 2 * held <= bytes_per_device(state) <= 2 * (held + norms) + 8


def test_initialisation_holds_no_whole_copy():
    config = dataclasses.replace(CONFIG, embed_dim=512, mlp_dim=1024, vocab_size=512)
    mesh = sized((1, 2, 1, 4, 1))
    options: Any = {"rules": ShardingRules.of(mesh), "layout": "zigzag"}
    optimizer = OPTIMIZERS["adamw"]
    _, params, state = abstract_train_state(config, optimizer, mesh, **options)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))

    def init():
        params = nnx.state(Decoder(config, rngs=nnx.Rngs(0), mesh=mesh, **options))
        return params, optimizer.transform.init(params)

    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    memory: Any = jax.jit(init, out_shardings=shardings).lower().compile().memory_analysis()
    assert memory.output_size_in_bytes < 3.1 * total / 8
    assert memory.temp_size_in_bytes < total / 2


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adafactor", AUTO),
        ("multi_steps", EXPLICIT),
        ("masked", EXPLICIT),
    ],
)
def test_any_optimizer_takes_steps_that_equal_one_device(name, kind):
    results = []
    config = dataclasses.replace(CONFIG, num_layers=2)
    for sizes in (ONE, (1, 2, 1, 2, 2)):
        mesh = sized(sizes, kind)
        rules = ShardingRules.of(mesh)
        graphdef, params, state = init_train_state(
            config, OPTIMIZERS[name], mesh, 0, rules=rules, layout="zigzag"
        )
        step = make_train_step(graphdef, OPTIMIZERS[name], chunk_size=16, compiler_options=QUICK)
        with jax.set_mesh(mesh):
            for index in range(3):
                batch = make_batch(rows(index), layout="zigzag", num_shards=sizes[3])
                batch = place_batch(batch, mesh, batch_axis=rules.batch_axes)
                params, state, metrics = step(params, state, batch)
        assert set(metrics) == {"loss", "grad_norm"}
        results.append(jax.device_get(params))
    assert_close(results[1], results[0], 1e-4)


def test_abstract_state_is_that_of_the_state():
    mesh = sized((1, 2, 1, 2, 2))
    options = {"rules": ShardingRules.of(mesh), "layout": "zigzag"}
    for optimizer in OPTIMIZERS.values():
        graphdef, *abstract = abstract_train_state(CONFIG, optimizer, mesh, **options)
        made_graphdef, *made = init_train_state(CONFIG, optimizer, mesh, 0, **options)
        assert graphdef == made_graphdef
        same = jax.tree.map(
            lambda a, x: (a.shape, a.dtype, a.sharding) == (x.shape, x.dtype, x.sharding),
            abstract, made,
        )  # fmt: skip
        assert all(jax.tree.leaves(same))


def test_logits_of_split_weights_are_those_of_whole_ones():
    mesh = sized((1, 2, 1, 2, 2))
    model = Decoder(
        CONFIG, rngs=nnx.Rngs(0), mesh=mesh, layout="zigzag", rules=ShardingRules.of(mesh)
    )
    batch = make_batch(rows(0), layout="zigzag", num_shards=2)
    batch = place_batch(batch, mesh, batch_axis=("data", "fsdp"))
    logits = jax.jit(lambda: model.unembed(model(batch["inputs"], batch["positions"])))()
    assert logits.sharding.spec[-1] == "tensor"
    single = model.with_attention(mesh=make_mesh())
    want = single.unembed(single(jnp.asarray(rows(0)[:, :-1]), np.arange(48)))
    got = burst_jax.from_layout(np.asarray(logits), "zigzag", 2)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


RULES = {
    "no such axis": (
        lambda: ShardingRules().check_mesh(mesh_of(seq=2)),
        r"ShardingRules' data is 'data': the mesh's axes are 'seq'; .* data=None, or take Sha",
    ),
    "an axis of another name": (
        lambda: ShardingRules.of(mesh_of(rows=2)),
        r"the mesh has an axis 'rows': ShardingRules\.of knows data, fsdp, seq, tensor, stage",
    ),
    "one axis twice": (
        lambda: ShardingRules(data="seq"),
        r"ShardingRules' seq is 'seq', and data names 'seq' too: use different mesh axes",
    ),
    "no name": (
        lambda: ShardingRules(fsdp=cast(Any, 3)),
        r"ShardingRules' fsdp is 3: it must be a mesh axis, a tuple of them, or None",
    ),
    "two stages": (
        lambda: ShardingRules(stage=cast(Any, ("a", "b"))),
        r"ShardingRules' stage is \('a', 'b'\): it must be one mesh axis",
    ),
    "an unknown dimension": (
        lambda: ShardingRules().spec(("embed", "hats")),
        r"'hats' is no logical name of a dimension: use batch, tokens, embed, layers, heads",
    ),
}


@pytest.mark.parametrize(("call", "message"), RULES.values(), ids=RULES)
def test_wrong_rules_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def init(sizes, config=CONFIG, **options):
    mesh = sized(sizes)
    rules = ShardingRules.of(mesh)
    return init_train_state(config, OPTIMIZERS["sgd"], mesh, 0, rules=rules, **options)


def call(sizes, batch, **options):
    mesh = sized(sizes)
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=mesh, rules=ShardingRules.of(mesh), **options)
    return model(jnp.zeros(batch, jnp.int32), np.arange(batch[1]))


def plain(**options):
    """A call without rules on a mesh of seq and data."""
    mesh = mesh_of(seq=2, data=2)
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=mesh, **options)
    return model(jnp.zeros((2, 8), jnp.int32), np.arange(8))


MISTAKES = {
    "no rules": (
        lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), rules=cast(Any, "fsdp")),
        r"rules is a str: it must be a ShardingRules",
    ),
    "no microbatch": (
        lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), rules=ShardingRules(stage="s"), microbatches=0),
        r"microbatches is 0: it must be an integer, at least 1",
    ),
    "an axis of seq_axis": (
        lambda: plain(seq_axis="ring"),
        r"seq_axis is 'ring': the mesh's axes are 'seq', 'data'",
    ),
    "an axis of batch_axis": (
        lambda: plain(batch_axis="rows"),
        r"batch_axis is 'rows': the mesh's axes are 'seq', 'data'",
    ),
    "an axis twice": (
        lambda: plain(batch_axis="seq"),
        r"batch_axis is 'seq', and so is one of seq_axis: use different mesh axes",
    ),
    "an axis of the rules for heads": (
        lambda: call((1, 2, 1, 2, 1), (4, 8), ulysses_axis="fsdp"),
        r"ulysses_axis is 'fsdp', and so is one of rules: use different mesh axes",
    ),
    "features": (
        lambda: init((1, 1, 1, 5, 1)),
        r"embedding has shape \(48, 48\): dimension 1, 48, is split over 5 devices \(fsdp 1 x "
        r"seq 5 x stage 1\), which do not divide it; use a size that is a multiple of 5",
    ),
    "layers": (
        lambda: init((1, 1, 3, 2, 1)),
        r"layers\..* has shape \(4, .*: dimension 0, 4, is split over 3 devices \(stage 3\)",
    ),
    "key heads": (
        lambda: init((1, 1, 1, 1, 3)),
        r"num_kv_heads is 2, and 3 devices lie along the tensor axis \('tensor',\): one of the two",
    ),
    "an axis that the rules say": (
        lambda: init((1, 1, 1, 2, 1), seq_axis="seq"),
        r"seq_axis is given beside rules: the rules say it; leave it out",
    ),
    "microbatches of no pipeline": (
        lambda: Decoder(CONFIG, rngs=nnx.Rngs(0), microbatches=2),
        r"microbatches is 2: they are a pipeline's; pass rules with a stage",
    ),
    "rows": (
        lambda: call((2, 2, 1, 1, 1), (6, 8)),
        r"tokens has shape \(6, 8\): dimension 0, 6, is split over 4 devices \(data 2 x fsdp 2\)",
    ),
    "tokens": (
        lambda: call((1, 1, 1, 4, 1), (2, 10)),
        r"tokens has shape \(2, 10\): dimension 1, 10, is split over 4 devices \(seq 4\)",
    ),
    "rows of stages": (
        lambda: call((1, 2, 2, 1, 1), (6, 8)),
        r"tokens has shape \(6, 8\), 3 rows a device, which 2 stages do not divide: .* of 4 rows",
    ),
    "rows of microbatches": (
        lambda: call((1, 1, 2, 1, 1), (4, 8), microbatches=3),
        r"4 rows a device, which 3 microbatches do not divide: .* of 3 rows",
    ),
    "accumulate": (
        lambda: make_train_step(nnx.graphdef(nnx.Dict()), OPTIMIZERS["sgd"], accumulate=0),
        r"accumulate is 0: it must be an integer, at least 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_the_mesh_cannot_split_raises(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_rows_that_cannot_be_accumulated_raise():
    with pytest.raises(ValueError, match=r"accumulate is 3, the batch has 4 sequences: use a"):
        losses((1, 1, 1, 2, 1), steps=1, accumulate=3)


def loss_and_gradients(rules, config, sizes=(1, 2, 1, 2, 1), weight=1.0, implementation=None):
    mesh = sized(sizes)
    options: Any = {"mesh": mesh, "layout": "zigzag", "implementation": implementation}
    if rules:
        options["rules"] = ShardingRules.of(mesh)
    else:
        options["batch_axis"] = ("data", "fsdp")
    params = nnx.state(Decoder(config, rngs=nnx.Rngs(0), **options))
    graphdef, _ = abstract_decoder(config, **options)
    # One token nearly everywhere, so that its embedding's gradient is a sum of many terms.
    drawn = np.where(np.random.default_rng(0).random((4, 513)) < 0.9, 3, 5)
    batch = make_batch(drawn, layout="zigzag", num_shards=sizes[3])
    batch["weights"] = batch["weights"] * np.float32(weight)
    batch = place_batch(batch, mesh, batch_axis=("data", "fsdp"))
    step = make_train_step(graphdef, optax.sgd(1.0), chunk_size=8, compiler_options=QUICK)
    before = jax.device_get(params)
    after, _, metrics = step(params, optax.sgd(1.0).init(params), batch)
    gradients = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after)
    return float(metrics["loss"]), gradients


SMALL = dataclasses.replace(CONFIG, num_layers=1, embed_dim=16, mlp_dim=32, num_heads=2)


def test_gradients_of_gathered_weights_add_up_in_float32():
    """Of the embedding over tokens, and of the head over chunks, while they travel in bfloat16."""
    half = dataclasses.replace(SMALL, dtype=jnp.bfloat16)
    _, want = loss_and_gradients(False, SMALL)
    _, got = loss_and_gradients(True, half)
    for name in ("embedding", "head"):
        for one, other in zip(*map(jax.tree.leaves, (got[name], want[name])), strict=True):
            assert relative_rms(one, other) < 0.02


@pytest.mark.slow
def test_small_weights_of_targets_change_no_mean():
    loss, gradients = loss_and_gradients(True, SMALL, weight=1e-4)
    want, want_gradients = loss_and_gradients(True, SMALL)
    assert loss == pytest.approx(want, rel=1e-5)
    assert_close(gradients, want_gradients, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2, 2), (1, 2, 1, 2, 1)], ids=str)
def test_implementations_that_cannot_be_checked_give_the_same_gradients(sizes):
    """Inside ``shard_map(check_vma=False)``, where JAX sums gradients at its border."""
    unchecked = dataclasses.replace(REFERENCE, checks_vma=False)
    loss, gradients = loss_and_gradients(True, SMALL, sizes, implementation=unchecked)
    want, want_gradients = loss_and_gradients(False, SMALL)
    assert loss == pytest.approx(want, rel=1e-5)
    assert_close(gradients, want_gradients, 1e-4)


def test_specs_of_logical_names():
    rules = ShardingRules(seq=("outer", "inner"), stage="stage")
    assert rules.spec(("batch", "tokens")) == P(("data", "fsdp"), ("outer", "inner"))
    assert rules.spec(("layers", "embed", "heads", None)) == P(
        "stage", ("fsdp", "outer", "inner"), "tensor", None
    )
    assert rules.spec(("vocab", "embed")) == P("tensor", ("fsdp", "outer", "inner", "stage"))
    assert tuple(dataclasses.asdict(rules)) == ("data", "fsdp", "seq", "tensor", "stage")
    assert set(AXES) == set(dataclasses.asdict(rules))
