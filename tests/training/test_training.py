"""Batches, the chunked loss, the optimizer and the training step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_model
import pytest
from flax import nnx
from implementations import QUICK, quick_jit
from jaxprs import equations
from meshes import assert_close, make_mesh, mesh_of
from trainings import CONFIG, ROWS, B, D, T, V, dense_results, loss_inputs, trained

from burst_jax import ShardingRules
from burst_jax.layouts.permutation import from_layout, positions
from burst_jax.models import Decoder
from burst_jax.training import (
    chunked_cross_entropy,
    evaluate,
    evaluation,
    init_train_state,
    make_batch,
    make_optimizer,
    make_train_step,
    place_batch,
    rows_here,
)
from burst_jax.training.optimizer import decay_mask

RNG = np.random.default_rng(0)


# Batches.


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_targets_survive_the_permutation(layout, num_shards):
    rows = RNG.integers(0, 1000, (2, 25))
    batch = make_batch(rows, layout=layout, num_shards=num_shards)
    place = batch["positions"][0]
    np.testing.assert_array_equal(place, positions(layout, 24, num_shards))
    np.testing.assert_array_equal(batch["inputs"], rows[:, place])
    np.testing.assert_array_equal(batch["targets"], rows[:, place + 1])
    assert batch["segment_ids"] is None
    assert batch["weights"].all()
    assert {batch[k].dtype for k in ("inputs", "targets", "positions")} == {np.dtype(np.int32)}


def test_padding_and_documents_weigh_nothing():
    rows = RNG.integers(0, 1000, (2, 14))
    segments = np.ones((2, 14), np.int32)
    segments[0, 5:], segments[1, 9:] = 2, 0
    batch = make_batch(rows, layout="zigzag", num_shards=4, segment_ids=segments)
    natural = from_layout(batch, "zigzag", 4)
    assert natural["segment_ids"] is not None
    assert natural["inputs"].shape == (2, 16)
    np.testing.assert_array_equal(natural["inputs"][:, :13], rows[:, :-1])
    np.testing.assert_array_equal(natural["targets"][:, :13], rows[:, 1:])
    np.testing.assert_array_equal(natural["segment_ids"][:, :13], segments[:, :13])
    assert not natural["segment_ids"][:, 13:].any()
    weights = np.ones((2, 16), np.float32)
    weights[:, 13:], weights[0, 4], weights[1, 8:] = 0, 0, 0
    np.testing.assert_array_equal(natural["weights"], weights)


def test_padding_alone_makes_segments():
    batch = make_batch(RNG.integers(0, 9, (1, 6)), layout="striped", num_shards=4)
    natural = from_layout(batch, "striped", 4)
    np.testing.assert_array_equal(natural["segment_ids"], [[1] * 5 + [0] * 3])
    np.testing.assert_array_equal(natural["weights"], natural["segment_ids"])


def test_every_device_gets_its_own_tokens():
    mesh = make_mesh(data=2, seq=4)
    batch = make_batch(RNG.integers(0, 9, (4, 17)), layout="zigzag", num_shards=4)
    placed = place_batch(batch, mesh, batch_axis="data")
    assert placed["segment_ids"] is None
    for name in ("inputs", "targets", "positions", "weights"):
        np.testing.assert_array_equal(placed[name], batch[name])
        shards = placed[name].addressable_shards
        assert {shard.data.shape for shard in shards} == {(2, 4)}
        assert len({str(shard.index) for shard in shards}) == 8


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (np.zeros(5, int), {}, r"rows has shape \(5,\): it needs \[B, T \+ 1\]"),
        (np.zeros((2, 1), int), {}, r"rows has shape \(2, 1\)"),
        (np.zeros((2, 5)), {}, "rows has dtype float64: token ids are integers"),
        (np.zeros((2, 5), int), {"segment_ids": np.ones((2, 4), np.int32)}, r"\(2, 4\), rows \(2"),
        (np.zeros((2, 5), int), {"segment_ids": np.ones((2, 5))}, "float64: convert it to int32"),
        (np.zeros((2, 5), int), {"layout": "spiral"}, "layout is 'spiral'"),
    ],
    ids=["rank", "short", "dtype", "segments-shape", "segments-dtype", "layout"],
)
def test_wrong_batches_raise(rows, options, message):
    with pytest.raises(ValueError, match=message):
        make_batch(rows, **options)


def test_one_process_has_all_rows():
    mesh = make_mesh(data=2, seq=4)
    batch = make_batch(RNG.integers(0, 9, (4, 17)), layout="zigzag", num_shards=4)
    placed = place_batch(batch, mesh, batch_axis="data", process_local=True)
    np.testing.assert_array_equal(placed["inputs"], batch["inputs"])
    assert (
        placed["inputs"].sharding == place_batch(batch, mesh, batch_axis="data")["inputs"].sharding
    )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([(3, 16)], r"batch has 3 rows: they must be a multiple of 2, .*\('data',\) that they are"),
        ([(2, 18)], r"batch has length T 18: it must be a multiple of 4, .*\('seq',\); make_batch"),
        ([(2, 16), (2, 17)], r"batch has arrays of shapes \[\(2, 16\), \(2, 17\)\]: .* one shape"),
        ([(2, 16, 3)], r"batch has arrays of shapes \[\(2, 16, 3\)\]"),
    ],
    ids=["rows", "length", "shapes", "rank"],
)
def test_batches_that_do_not_fit_the_mesh_raise(arrays, message):
    batch = {str(index): np.zeros(shape, np.int32) for index, shape in enumerate(arrays)}
    with pytest.raises(ValueError, match=message):
        place_batch(batch, make_mesh(data=2, seq=4), batch_axis="data")


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "seq": 2}])
def test_rules_say_how_a_batch_is_split(sizes):
    mesh = mesh_of(**sizes)
    rules, seq = ShardingRules.of(mesh), sizes.get("seq", 1)
    batch = make_batch(RNG.integers(0, 9, (4, 17)), layout="zigzag", num_shards=seq)
    placed = place_batch(batch, mesh, rules=rules)
    np.testing.assert_array_equal(placed["inputs"], batch["inputs"])
    rows = 4 // (sizes["fsdp"] * sizes.get("data", 1))
    assert {x.data.shape for x in placed["inputs"].addressable_shards} == {(rows, 16 // seq)}
    assert rows_here(mesh, 4, rules=rules) == [0, 1, 2, 3]


def test_axes_beside_rules_or_axes_that_are_not_there_are_refused():
    mesh = mesh_of(fsdp=2, tensor=2)
    rules, batch = ShardingRules.of(mesh), make_batch(RNG.integers(0, 9, (4, 17)))
    with pytest.raises(ValueError, match=r"seq_axis is 'seq': the mesh's axes .*, or pass seq_axi"):
        place_batch(batch, mesh, batch_axis="fsdp")
    with pytest.raises(ValueError, match=r"seq_axis is None beside rules: the rules say it; leave"):
        place_batch(batch, mesh, rules=rules, seq_axis=None)
    with pytest.raises(ValueError, match=r"batch_axis is 'fsdp' beside rules: the rules say it"):
        place_batch(batch, mesh, rules=rules, batch_axis="fsdp")
    with pytest.raises(ValueError, match=r"batch_axis is 'fsdp' beside rules: the rules say it"):
        rows_here(mesh, 4, rules=rules, batch_axis="fsdp")
    for call in (lambda rules: place_batch(batch, mesh, rules=rules), lambda rules: rows_here(
        mesh, 4, rules=rules
    )):  # fmt: skip
        with pytest.raises(ValueError, match=r"ShardingRules' data is 'data': the mesh's axes are"):
            call(ShardingRules())


# The loss.


@pytest.mark.parametrize(
    ("data", "seq", "chunk_size"),
    [(1, 1, 1000), (1, 1, 7), (1, 8, 2), (2, 4, 6), (2, 4, 5), (1, 3, 1)],
    ids=lambda n: str(n),
)
def test_chunked_loss_equals_dense(data, seq, chunk_size):
    inputs = loss_inputs()
    want, want_grads = dense_results(*inputs, 0.37)
    mesh = make_mesh(data, seq)

    @quick_jit
    def run(hidden, kernel, targets, weights):
        def loss(hidden, kernel):
            options = {"mesh": mesh, "batch_axis": "data", "chunk_size": chunk_size}
            return chunked_cross_entropy(hidden, kernel, targets, weights, **options)

        total, vjp, count = jax.vjp(loss, hidden, kernel, has_aux=True)
        return total, count, vjp(jnp.float32(0.37))

    total, count, grads = run(*inputs)
    np.testing.assert_allclose(count, np.sum(inputs[3]), rtol=1e-6)
    np.testing.assert_allclose(total, want, rtol=1e-6)
    assert_close(grads, want_grads, 1e-6)
    assert not np.asarray(grads[0])[np.asarray(inputs[3]) == 0].any()


def test_loss_without_weights_counts_every_token():
    hidden, kernel, targets, _ = loss_inputs()
    targets = jnp.maximum(targets, 0)
    ones = jnp.ones((B, T), jnp.float32)
    total, count = chunked_cross_entropy(hidden, kernel, targets, mesh=make_mesh(seq=4))
    assert count == B * T
    np.testing.assert_allclose(total, dense_results(hidden, kernel, targets, ones, 1)[0], rtol=1e-6)


def test_what_is_no_array_of_numbers_is_refused():
    for leaf in ([[1, 2]], np.array([["a", "b"]]), np.array([[None, 1]])):
        with pytest.raises(ValueError, match=r"batch holds a leaf of .*: it must hold arrays"):
            place_batch({"inputs": leaf}, make_mesh(seq=2))


def test_segment_ids_of_any_integers_make_a_batch():
    batch = make_batch(np.zeros((1, 9), int), segment_ids=np.ones((1, 9), np.int64))
    assert batch["segment_ids"] is not None
    assert batch["segment_ids"].dtype == np.int32


def test_bfloat16_loss_accumulates_in_float32():
    inputs = loss_inputs(jnp.bfloat16)
    want, want_grads = dense_results(*inputs, 1.0)

    def loss(hidden, kernel):
        return chunked_cross_entropy(
            hidden, kernel, *inputs[2:], mesh=make_mesh(seq=4), chunk_size=4
        )[0]

    total, grads = jax.value_and_grad(loss, (0, 1))(*inputs[:2])
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(total, want, rtol=2e-3)
    assert_close(grads, want_grads, 5e-3)
    # Rounding that errors of this size would hide: of every product, to the activations' dtype.
    products = [
        equation
        for equation, _ in equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*inputs[:2]).jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    assert len(products) >= 3
    for product in products:
        assert {x.aval.dtype for x in product.invars} == {jnp.dtype(jnp.bfloat16)}
        assert product.outvars[0].aval.dtype == jnp.float32


def test_no_chunk_too_many_logits_and_no_sum_per_chunk():
    seq, chunk = 4, 3
    inputs = loss_inputs()

    def loss(hidden, kernel):
        return chunked_cross_entropy(
            hidden, kernel, *inputs[2:], mesh=make_mesh(seq=seq), chunk_size=chunk
        )[0]

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*inputs[:2]).jaxpr
    logits, sums = 0, []
    for equation, around in equations(jaxpr):
        for var in equation.outvars:
            shape = getattr(var.aval, "shape", ())
            # Shapes of one device; (D, V) is the kernel or its gradient.
            if "shard_map" in around and shape[-1:] == (V,) and shape != (D, V):
                logits = max(logits, int(np.prod(shape[:-1])))
        if equation.primitive.name.startswith("psum"):
            sums.append("scan" in around)
    assert logits == chunk
    assert sums
    assert not any(sums)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0: it must be at least 1"),
        ({"hidden": jnp.zeros((T, D))}, r"hidden has shape \(24, 8\): it needs \[B, T, D\]"),
        ({"kernel": jnp.zeros((V, D))}, r"kernel has shape \(30, 8\): .*it needs \[8, V\]"),
        ({"targets": jnp.zeros((B, 5), jnp.int32)}, r"targets has shape \(2, 5\): hidden's"),
        ({"targets": jnp.zeros((B, T))}, "targets has dtype float32: convert it to int32"),
        ({"weights": jnp.zeros((B, T), jnp.int32)}, "weights has dtype int32: convert it to float"),
        ({"mesh": None}, "mesh is None and no mesh is set: pass mesh=, or enter"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_loss_arguments_raise(change, message):
    arguments = dict(zip(("hidden", "kernel", "targets", "weights"), loss_inputs(), strict=True))
    arguments |= {"mesh": make_mesh()} | change
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**arguments)


# The optimizer.


def test_schedule():
    schedule: Any = make_optimizer(2.0, 100, warmup_steps=9, final_fraction=0.1).schedule
    rates = [float(schedule(jnp.int32(step))) for step in (0, 4, 9, 100, 500)]
    np.testing.assert_allclose(rates, [0.2, 1.0, 2.0, 0.2, 0.2], rtol=1e-5)
    # Half-way down the cosine: between peak and end.
    half = make_optimizer(2.0, 100, warmup_steps=10, final_fraction=0.1).schedule(jnp.int32(55))
    np.testing.assert_allclose(half, 1.1, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0: it must be positive"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0: it must be positive"),
        ({"steps": 0}, "steps is 0: it must be an integer, at least 1"),
        ({"warmup_steps": 10}, r"warmup_steps is 10: it must be in 0 ... steps - 1 \(9\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_optimizer_arguments_raise(options, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(**{"learning_rate": 1.0, "steps": 10} | options)


def test_only_matrices_decay_and_the_norm_is_clipped():
    params = {
        "layers": {"norm": {"scale": jnp.ones((2, 4))}, "up": {"kernel": jnp.ones((2, 4, 4))}},
        "embedding": jnp.ones((5, 4)),
    }
    mask = decay_mask(params)
    assert jax.tree.leaves(mask["layers"]) == [False, True]
    assert not mask["embedding"]
    # Any: to optax's types an update is a tree of anything.
    transform: Any = make_optimizer(1.0, 10, warmup_steps=0, weight_decay=0.5).transform
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = transform.update(zeros, transform.init(params), params)
        np.testing.assert_allclose(updates["layers"]["up"]["kernel"], -0.5)
        assert not updates["layers"]["norm"]["scale"].any()
        assert not updates["embedding"].any()
        large = jax.tree.map(lambda x: 1e3 * x, params)
        _, state = transform.update(large, transform.init(params), params)
    moments = jax.tree.leaves(state[1].mu)
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(m))) for m in moments)) / 0.1
    assert norm == pytest.approx(1.0, rel=1e-5)


# The step.


@pytest.mark.slow
def test_steps_reduce_the_loss():
    _, _, _, before, history, after = trained(2, 2)
    assert history[0]["loss"] == pytest.approx(before.nll, rel=1e-6)
    assert before.nll == pytest.approx(np.log(20), abs=0.2)
    assert after.nll < before.nll - 0.5
    assert after.perplexity == pytest.approx(np.exp(after.nll))
    assert (before.tokens, after.tokens) == (60, 120)
    schedule: Any = make_optimizer(1e-2, 12, warmup_steps=2).schedule
    rates = [float(schedule(jnp.int32(step))) for step in range(12)]
    assert [m["learning_rate"] for m in history] == pytest.approx(rates)


def test_the_first_step_is_of_the_mean_loss():
    """Its loss, the norm of its gradients, and where Adam goes at first: against the gradients."""
    mesh, optimizer = make_mesh(), make_optimizer(1e-2, 10, warmup_steps=0, weight_decay=0.5)
    graphdef, params, opt_state = init_train_state(CONFIG, optimizer, mesh, 0)
    rows = ROWS[:, :-1], ROWS[:, 1:]
    segments = np.ones_like(ROWS, dtype=np.int32)
    segments[0, 20:] = 0
    batch = make_batch(ROWS, segment_ids=segments)
    weights = batch["weights"].astype(np.float64)
    keep = np.tril(np.ones((2, 30, 30), bool))
    keep &= (segments[:, :-1, None] != 0) & (segments[:, None, :-1] != 0)
    assert weights.sum() == 19 + 30
    before = plain_model.float64(nnx.to_pure_dict(params))

    def mean_loss(params):
        pos = np.tile(np.arange(30), (2, 1))
        hidden = plain_model.decoder(params, rows[0], pos, keep, CONFIG.rope_theta)
        logits = hidden @ params["head"]["kernel"]
        return plain_model.cross_entropy(logits, rows[1], weights) / weights.sum()

    with jax.enable_x64(True):
        value_and_grad = quick_jit(jax.value_and_grad(mean_loss))
        loss, grads = jax.device_get(value_and_grad(jax.tree.map(jnp.asarray, before)))
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grads)))
    step = make_train_step(graphdef, optimizer, chunk_size=7, compiler_options=QUICK)
    params, opt_state, metrics = step(params, opt_state, place_batch(batch, mesh))
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    # Adam's first step is the sign of the gradient, where that is well above Adam's epsilon;
    # matrices decay beside it by the learning rate times a half.
    clipped = jax.tree.map(lambda g: g / max(norm, 1.0), grads)
    after = plain_model.float64(nnx.to_pure_dict(params))
    old, new, slopes = (dict(jax.tree.leaves_with_path(x)) for x in (before, after, clipped))
    for path, slope in slopes.items():
        sure = np.abs(slope) > 1e-5
        assert sure.any(), path
        decay = 0.5 * old[path] if path[-1].key == "kernel" else 0
        want = -1e-2 * (np.sign(slope) + decay)
        np.testing.assert_allclose((new[path] - old[path])[sure], want[sure], rtol=5e-3)


@pytest.mark.slow
def test_steps_on_a_ring_equal_steps_on_one_device():
    ring, single = trained(2, 2), trained(1, 1)
    assert_close(jax.device_get(ring[1]), jax.device_get(single[1]), 2e-3)
    for name in ("loss", "grad_norm"):
        got, want = ([m[name] for m in run[4]] for run in (ring, single))
        np.testing.assert_allclose(got, want, rtol=2e-4)
        np.testing.assert_allclose(got[0], want[0], rtol=2e-6)


def test_states_are_donated_and_stay_replicated():
    first, params, opt_state, *_ = trained(2, 2)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    for leaf in jax.tree.leaves((params, opt_state)):
        assert leaf.sharding.is_fully_replicated
        assert leaf.sharding.mesh.shape == {"data": 2, "seq": 2, "model": 1}
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_bfloat16_step_follows_float32():
    half, full = trained(2, 2, "bfloat16"), trained(2, 2)
    assert {leaf.dtype for leaf in jax.tree.leaves(half[1])} == {jnp.dtype(jnp.float32)}
    got, want = ([m["loss"] for m in run[4]] for run in (half, full))
    np.testing.assert_allclose(got, want, rtol=2e-2)
    assert got != want


def test_evaluation_counts_every_target_once():
    """The mean is over targets, not over batches, which may have different numbers of them."""
    sums = iter(((6.0, 4.0), (30.0, 8.0), (0.0, 0.0)))
    eval_step: Any = lambda params, batch: next(sums)  # noqa: E731 - to be called once a batch
    params: Any = None
    batches: Any = [{}] * 3
    result = evaluate(eval_step, params, batches)
    assert (result.nll, result.tokens) == (3.0, 12)
    assert result.perplexity == pytest.approx(np.exp(3.0))


def test_an_evaluation_looks_at_the_first_call_alone(monkeypatch):
    """Every look takes the model apart; a mistake that was found is found again."""
    looks = []

    def look(_):
        looks.append("look")
        if len(looks) == 1:
            raise ValueError("split")

    monkeypatch.setattr(Decoder, "refuse_split_weights", look)
    monkeypatch.setattr(
        evaluation,
        "next_token_loss",
        lambda model, batch, chunk_size: (batch["weights"].sum(),) * 2,
    )
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=make_mesh(), layout="zigzag")
    eval_step = evaluation.make_eval_step(nnx.graphdef(model))
    batch = place_batch(make_batch(ROWS, layout="zigzag"), make_mesh())
    with pytest.raises(ValueError, match="split"):
        eval_step(nnx.state(model), batch)
    results = [eval_step(nnx.state(model), batch) for _ in range(3)]
    assert len(looks) == 2
    assert {float(total) for total, _ in results} == {float(batch["weights"].sum())}


def test_nothing_to_evaluate_raises():
    params: Any = None
    with pytest.raises(ValueError, match="batches hold no targets"):
        evaluate(lambda params, batch: (jnp.zeros(()), jnp.zeros(())), params, [])
