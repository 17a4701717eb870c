"""``verify.compare``: right models pass, mistakes of a user's model are found and named."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own_model
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from own_model import make_loss_of, packed, packed_rows, parameters

import burst_jax
from burst_jax import to_layout, verify
from burst_jax.layouts import Zigzag
from burst_jax.layouts.documents import place_documents
from burst_jax.training import make_batch
from burst_jax.verify import batch as batches

LINE = r"own_model\.py:\d+"
CALL, MAP = rf"attention call \d of 2 \({LINE}\)", f"the shard_map at {LINE} .*"
# What a report says of each mistake.
NAMED = {
    "layout forgotten": f"^{CALL} has layout='contiguous', but its tokens are in the zigzag layout"
    ": pass layout='zigzag' there$",
    "batch axis forgotten": f"^the batch is replicated over mesh axis 'data': in {CALL} all 2 "
    "devices along it compute the same; pass batch_axis='data'",
    "arange positions": rf"^an array made at {LINE} counts tokens by index \(an arange\) and is "
    f"combined at {LINE} with tokens in the zigzag layout",
    "positions per shard": f"^{MAP}: it counts tokens from 0 on every device",
    "segments forgotten": f"^{CALL} has no segment ids, other calls have",
    "documents by index": f"^cumsum at {LINE} runs over the tokens by index",
    "other mask": f"^{CALL} is another one than on one device: is_causal is False on the mesh, ",
    "other scale": f"^{CALL} is another one than on one device: scale is 0.5 on the mesh, 1.0 on",
    "sequence axis forgotten": f"^{CALL} has seq_axis=None, so it attends as if its tokens were in "
    "natural order, but they are in the zigzag layout",
    "local attention": f"^{MAP}: {CALL} is local_attention, which attends to the keys of its own",
    "shift": f"^slice at {LINE} reads other tokens by index",
    "convolution": f"^a convolution at {LINE} mixes neighbouring tokens by index",
    "last token": f"^slice at {LINE} reads other tokens by index",
    "running mean": f"^cumsum at {LINE} runs over the tokens by index",
    "dropout": f"^random numbers at {LINE} are drawn by the index of a token",
    "noise per device": f"^{MAP}: it draws random numbers on each device",
    "norm over tokens": f"^{MAP}: it computes from one device's tokens what needs those of all",
    "wrong gradient": f"^mul at {LINE} uses the number 0.5 on the mesh and 1.0 on one device",
    "table by index": f"^add at {LINE} combines tokens in the zigzag layout with position_table, "
    "which is in natural order",
    "late shift of targets": f"^slice at {LINE} shifts or picks token ids by index, "
    "after the permutation to the zigzag layout",
    "mean of means": f"^{MAP}: it averages each device's own mean",
    "mean for sum": f"^{MAP}: 1/4 of the right value, the number of devices along all axes; it "
    "averages over devices what must be summed",
}
# Each run has several mistakes; each of them is named.
TOGETHER = (
    ("batch axis forgotten", "layout forgotten", "documents by index", "segments forgotten",
     "arange positions", "convolution", "shift", "table by index", "mean of means"),
    ("local attention", "sequence axis forgotten", "positions per shard", "last token",
     "noise per device", "norm over tokens", "mean for sum"),
    ("other mask", "other scale", "dropout", "running mean", "late shift of targets"),
)  # fmt: skip
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_in_a_program_of_a_user():
    with jax.numpy_dtype_promotion("standard"):
        yield


def mesh_4(kind=AxisType.Auto):
    return mesh_of(kind, data=2, seq=2)


def assert_named(report, mistakes):
    """Each mistake has its sentence, and no sentence is left over."""
    assert not report.passed
    left = list(report.problems)
    for mistake in mistakes:
        found = [problem for problem in left if re.search(NAMED[mistake], problem)]
        assert len(found) == 1, (mistake, report.problems)
        left = [problem for problem in left if problem not in found]
    # Without a ring the sequence is replicated; the last token, and a norm over all, are padding.
    others = "^the sequence is replicated over mesh axis 'seq'|and the loss depends on them"
    assert all(re.search(others, problem) for problem in left), left


def test_every_mistake_is_in_a_run():
    every = {mistake for run in TOGETHER for mistake in run}
    assert every | {"wrong gradient"} == set(NAMED) == set(own_model.MISTAKES) - {"own shard_map"}


@SLOW
@pytest.mark.parametrize("mistakes", TOGETHER, ids=", ".join)
def test_mistakes_are_found_and_named(mistakes):
    report = verify.compare(
        make_loss_of("nnx", mistakes=mistakes), parameters("nnx"), packed(),
        mesh=mesh_4(), layout="zigzag", gradients=False,
    )  # fmt: skip
    assert_named(report, mistakes)


@SLOW
def test_a_wrong_gradient_is_found_where_the_loss_is_right():
    report = verify.compare(
        make_loss_of("nnx", mistakes=["wrong gradient"], layers=1), parameters("nnx", 1), packed(),
        mesh=mesh_4(), layout="zigzag",
    )  # fmt: skip
    assert report.loss.passed
    # What is computed from hidden states after the mistake.
    assert [group.name for group in report.gradients if group.passed] == ["head", "mlp.0"]
    assert_named(report, ["wrong gradient"])


@pytest.mark.parametrize(
    ("kind", "dtype", "mistakes"),
    [("nnx", "float32", ["own shard_map"]), pytest.param("linen", "bfloat16", (), marks=SLOW)],
)
def test_a_right_model_passes(kind, dtype, mistakes):
    make_loss, params = make_loss_of(kind, jnp.dtype(dtype), mistakes, 1), parameters(kind, 1)
    report = verify.compare(make_loss, params, packed(), mesh=mesh_4(), layout="zigzag")
    assert report.passed, report
    assert (report.dtype, report.reference) == (
        (dtype, "float64") if dtype == "float32" else (dtype, "float32")
    )
    # The noise of one device is measured, not assumed.
    low, high = (1e-8, 1e-6) if dtype == "float32" else (5e-4, 5e-2)
    assert all(low < (group.one_device or 0) < high for group in report.gradients)
    assert all(low < group.mesh < high for group in report.gradients)
    assert report.segments is not None
    assert report.segments.tokens == pytest.approx(4 / 64)
    assert report.segments.loss == 0
    assert set(report.cost.seconds) == {"one device", "mesh", "reference"}
    assert 0 < report.cost.bytes["mesh"] < report.cost.bytes["one device"]
    assert "whose devices all compute the same attention: none\n" in str(report)
    assert str(report).endswith("PASSED")
    assert json.loads(json.dumps(report.record(), allow_nan=False))["passed"] is True


def embedding_loss(mesh, layout):
    """A loss without attention, which is quick."""

    def loss(params, batch):
        x = params["layer0/embed"][batch["inputs"]] * (1 + batch["positions"][..., None])
        return jnp.mean(jnp.sum(x, -1) * batch["weights"]) * params["scales"][0]

    return loss


TABLE = np.linspace(-1, 1, 48 * 8, dtype=np.float32).reshape(48, 8)
EMBED = {"layer0/embed": TABLE, "scales": [np.ones((), np.float32)]}


def quick(batch, make_loss=embedding_loss, params=EMBED, **options):
    options: Any = {"mesh": mesh_4(), "layout": "zigzag", "batch_axis": "data"} | options
    return verify.compare(make_loss, params, batch, **options)


def test_documents_counted_from_zero_are_found():
    (problem,) = quick(packed(0)).problems
    assert re.match(r"50.0 % of the tokens are in segment 0 of segment_ids, at the start", problem)


@pytest.mark.parametrize("padding_id", [-1, 7])
def test_padding_of_another_id(padding_id):
    """It counts as padding, and documents may count from 0."""
    batch: Any = packed()
    ids = batch["segment_ids"]
    batch["segment_ids"] = np.where(ids == 0, padding_id, ids - 1)

    def make_loss(mesh, layout):
        def loss(params, batch):
            x = params["layer0/embed"][batch["inputs"]][:, :, None]
            out = burst_jax.burst_attention(
                x, x, x, mesh=mesh, layout=layout, batch_axis="data", is_causal=True,
                segment_ids=batch["segment_ids"], padding_id=padding_id,
            )  # fmt: skip
            return jnp.mean(jnp.sum(out, (2, 3)) * batch["weights"])

        return loss

    # Gradients of padding are the same with any id.
    report = quick(batch, make_loss, gradients=padding_id < 0)
    assert report.passed
    assert not report.problems
    assert f"in segment {padding_id}: 6.2 % of the tokens" in str(report)
    with pytest.raises(NotImplementedError, match=f"got padding_id {padding_id}: mark padding by"):
        quick(batch, make_loss, layout="balanced:0")


def test_a_loader_that_permutes():
    def load(layout, num_shards):
        return to_layout(packed(), layout, num_shards)

    report = quick(load)
    assert report.passed
    # By module, or by array.
    assert [group.name for group in report.gradients] == ["layer0", "scales.0"]

    def shifted_late(layout, num_shards):
        batch = load(layout, num_shards)
        return batch | {"targets": np.roll(batch["inputs"], -1, 1)}

    (problem,) = quick(shifted_late, gradients=False).problems
    assert re.match(r"batch\('zigzag', 2\) has targets in another order than the layout", problem)

    # All arrays in another order are one mistake.
    def for_four(layout, num_shards):
        return load(layout, 4 if num_shards > 1 else 1)

    (problem,) = quick(for_four, gradients=False).problems
    remedy = "pass layout='zigzag' and num_shards=2, its arguments, to make_batch or to_layout"
    where = "batch('zigzag', 2) returns arrays in"
    assert problem == f"{where} the zigzag layout over 4 shards: {remedy}"
    sizes = batches.sizes_of(packed(), 2, Zigzag())
    batch, index = batches.ordered(packed(), sizes, Zigzag(), 2, {})
    wanted = batches.in_layout(batch, sizes, index)
    (problem,) = batches.wrong_order(packed(), wanted, packed(), sizes, Zigzag(), 2, {})
    assert problem == f"{where} natural order: {remedy}"


def test_arrays_that_depend_on_the_index_alone_are_no_shift():
    """Although ``linspace`` concatenates."""

    def make_loss(mesh, layout):
        def loss(params, batch):
            weights = batch["weights"] * jnp.linspace(0, 1, batch["inputs"].shape[1])
            return embedding_loss(mesh, layout)(params, batch | {"weights": weights})

        return loss

    (problem,) = quick(packed(), make_loss, gradients=False).problems
    line = r"test_compare\.py:\d+"
    assert re.match(
        f"an array made at {line} depends on the index of a token alone .* combined at {line} with",
        problem,
    )


def test_padding_that_counts_in_the_loss_is_found():
    batch: Any = packed()
    batch["weights"] = np.ones_like(batch["weights"])
    (problem,) = quick(batch).problems
    assert re.search(r"^6.2 % of the tokens .* have 6.2 % of the loss weight", problem)
    # Also where the batch has no weights.
    batch["importance"] = batch.pop("weights")

    def make_loss(mesh, layout):
        loss = embedding_loss(mesh, layout)
        return lambda params, batch: loss(params, batch | {"weights": batch["importance"]})

    (problem,) = quick(batch, make_loss).problems
    assert re.search("^6.2 % of the tokens .*, and the loss depends on them: it is", problem)


def test_explicit_axes_and_weights_that_are_sharded():
    mesh = mesh_4(AxisType.Explicit)
    sharded = {"embed": jax.device_put(TABLE, NamedSharding(mesh, P(None, "seq")))}
    tokens = P("data", "seq")

    def make_loss(mesh, layout):
        def loss(params, batch):
            table = jax.reshard(params["embed"], P())
            x = table.at[batch["inputs"]].get(out_sharding=P("data", "seq", None))
            return jnp.mean(jnp.sum(x, -1) * batch["weights"])

        return loss

    report = quick(packed(), make_loss, sharded, mesh=mesh)
    assert report.passed, report
    assert tokens == P("data", "seq")
    # Less than the replicated table alone.
    assert report.cost.bytes["mesh"] < report.cost.bytes["one device"]


def tuple_loss(mesh, layout):
    return lambda params, batch: (jnp.float32(1), jnp.float32(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": {}}, r"batch has no array of shape \[B, T, \.\.\.\]"),
        (
            {"batch": lambda layout, num_shards: {"x": np.zeros((2, 64 * num_shards), int)}},
            r"x has shape \(2, 64\) in batch\('contiguous', 1\) and \(2, 128\) in batch\('zigzag'",
        ),
        ({"batch": {"x": 3}}, "batch has x, of type int: it must be a pytree of arrays"),
        (
            {"batch": {"x": np.zeros((2, 65), int)}},
            "batch has length 65, one more than the zigzag layout over 2 shards can split: shift",
        ),
        ({"batch": {"x": np.zeros((2, 66), int)}}, "the length of batch is 66: the zigzag layout"),
        (
            {"batch": {name: np.asarray(x)[:1] for name, x in packed().items()}},
            "batch has 1 sequences, which the 2 devices of the mesh axes data do not divide",
        ),
        (
            {"batch": to_layout(packed(), "zigzag", 2)},
            "batch has positions in the zigzag order over 2 shards: pass the batch in natural",
        ),
        ({"make_loss": 3}, "make_loss is a int: it must be a function"),
        ({"make_loss": lambda mesh: None}, r"make_loss\(mesh\) cannot be called as make_loss"),
        ({"make_loss": lambda mesh, layout: 3.0}, "make_loss returned a float: it must return"),
        ({"make_loss": tuple_loss}, r"loss returns float32 \(\), float32 \(\) in a tuple"),
        ({"params": {"n": 3}}, "params has n, of type int: it must hold arrays only"),
        (
            {"params": jax.tree.map(lambda x: x.astype(np.int32), EMBED)},
            "params has no floating array: there is no gradient to compare",
        ),
        ({"layout": "zig"}, "layout is 'zig'"),
        (
            {"layout": "balanced:0", "batch": packed() | {"segment_ids": None}},
            "layout is 'balanced:0', which places documents, and batch has no segment ids: add int",
        ),
        (
            {"layout": "balanced:0", "batch": packed() | {"segment_ids": np.ones((2, 64), int)}},
            "layout is 'balanced:0', whose gathered zone is too small for these documents: use ",
        ),
        (
            {"layout": "balanced:0", "batch": packed() | {"table": np.ones(64)}},
            r"batch has table of shape \(64,\), and layout is 'balanced:0', .*: make it \(2, 64\)",
        ),
        ({"seq_axis": "ring"}, "seq_axis is 'ring'"),
    ],
)
def test_wrong_arguments_raise(options, message):
    with pytest.raises(ValueError, match=message):
        quick(options.pop("batch", packed()), **options)


def balanced_of(batch):
    """The balanced layout over two shards."""
    return place_documents(np.asarray(batch["segment_ids"]), 2)[1][0].layout


def placed_model(mistakes=()):
    """``make_loss`` with attention and RoPE by the batch's positions, for any layout."""

    def make_loss(mesh, layout):
        def loss(params, batch):
            x = params["layer0/embed"][batch["inputs"]]
            x = x + jnp.sin(0.1 * batch["positions"][..., None])
            if "arange" in mistakes:
                x = x + jnp.cos(jnp.arange(x.shape[1], dtype=jnp.float32))[:, None]
            if "shift" in mistakes:
                x = x + jnp.roll(x, 1, 1)
            heads = x.reshape(*x.shape[:2], 2, 4)
            ids, options = batch["segment_ids"], {}
            if layout.startswith("balanced"):
                positions = batch["positions"]
                options = {"query_positions": positions, "key_value_positions": positions}
            out = burst_jax.burst_attention(
                heads, heads, heads, mesh=mesh, batch_axis="data", layout=layout, is_causal=True,
                query_segment_ids=ids, key_value_segment_ids=ids, **options,
            ).reshape(x.shape)  # fmt: skip
            return jnp.sum(jnp.sum(out**2, -1) * batch["weights"]) * params["scales"][0]

        return loss

    return make_loss


def test_balanced_layouts():
    """Each sequence has an order of its own, with padding."""
    batch = packed()
    layout = balanced_of(batch)
    report = quick(batch, placed_model(), layout=layout)
    assert report.passed, report
    assert report.layout == layout != "balanced:0"


def test_mistakes_in_balanced_layouts():
    batch = packed()
    wrong = placed_model(("arange", "shift"))
    report = quick(batch, wrong, layout=balanced_of(batch), gradients=False)
    # The last token, which is padding, is shifted to the first.
    problems = [each for each in report.problems if "and the loss depends on them" not in each]
    assert len(problems) == 2, problems
    for sentence in (
        r"^an array made at .* counts tokens by index \(an arange\) .* balanced:\d+ lay",
        "^slice at .* and in the balanced.*: use zigzag, and",
    ):
        assert any(re.search(sentence, problem) for problem in problems), problems


def test_a_vocabulary_of_as_many_ids_as_tokens_is_no_sequence():
    """Neither of T ids nor of B T: what ``one_hot`` compares tokens with are no positions."""
    random = np.random.default_rng(0)
    batch = make_batch(random.integers(0, 64, (2, 65)))
    heads = {str(n): random.normal(size=(8, n)).astype(np.float32) for n in (64, 128)}

    def make_loss(mesh, layout):
        def loss(params, batch):
            ids, total = batch["inputs"], jnp.float32(0)
            for head in params.values():
                logits = jnp.sin(0.1 * ids[..., None] * jnp.arange(8)) @ head
                late = jax.nn.one_hot(ids[:, 1:], head.shape[1]) * logits[:, :-1]
                right = jax.nn.one_hot(batch["targets"], head.shape[1]) * jnp.cumsum(logits, 1)
                total += late.mean() + right.mean()
            return total

        return loss

    report = quick(batch, make_loss, heads, gradients=False)
    # Both slices are of one line.
    assert sorted(each.split(" at ")[0] for each in report.problems) == ["cumsum", "slice"]


def test_a_loader_for_a_balanced_layout():
    rows, ids = packed_rows()
    natural: Any = make_batch(rows, segment_ids=ids)
    layout = balanced_of(natural)

    def load(layout, num_shards):
        return make_batch(rows, segment_ids=ids, layout=layout, num_shards=num_shards)

    assert quick(load, layout=layout, gradients=False).passed

    def shifted_late(layout, num_shards):
        batch: Any = load(layout, num_shards)
        return batch | {"targets": np.roll(batch["inputs"], -1, 1)}

    (problem,) = quick(shifted_late, layout=layout, gradients=False).problems
    assert re.match(rf"batch\('{layout}', 2\) has targets in another order than the la", problem)

    def in_zigzag(layout, num_shards):
        natural = load("contiguous", 1)
        return natural if num_shards == 1 else to_layout(natural, "zigzag", num_shards)

    (problem,) = quick(in_zigzag, layout=layout, gradients=False).problems
    assert "returns arrays in the zigzag layout over 2 shards: pass layout='balanced" in problem


def test_a_loss_that_is_reduced_right_is_not_called_a_mean_of_means():
    """In a shard_map that counts tokens by their index."""

    def make_loss(mesh, layout):
        def on_device(w, x):
            index = jnp.arange(x.shape[1]) + jax.lax.axis_index("seq") * x.shape[1]
            total, count = (jnp.cos(index.astype(jnp.float32) * w) * x).sum(), (x > 0).sum()
            return jax.lax.psum(total, "seq") / jax.lax.psum(count, "seq")

        spec = P(None, "seq")
        on_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), spec), out_specs=P())
        return lambda params, batch: on_mesh(params["w"], batch["x"].astype(jnp.float32))

    report = verify.compare(
        make_loss, {"w": jnp.float32(0.3)}, {"x": np.arange(128).reshape(2, 64) % 9},
        mesh=mesh_of(seq=2), layout="zigzag", gradients=False,
    )  # fmt: skip
    assert not report.passed
    assert "it sums over devices before it divides" in report.problems[0]
