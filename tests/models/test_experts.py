"""Mixtures of experts against each expert on all tokens, masked, in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import decoders
import interpreted_sm80
import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_model
import pytest
from flax import nnx
from implementations import QUICK, quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import count, equations
from meshes import assert_close, make_mesh, mesh_of, random_like
from split_runs import CONFIG as TRAINED
from split_runs import ONE, losses

from burst_jax import ShardingRules
from burst_jax.layers.lora import set_adapter
from burst_jax.models import (
    DecoderConfig,
    Experts,
    Lora,
    MixtureOfExperts,
    abstract_decoder,
    save_adapter,
)
from burst_jax.models.experts import decoding, exchange
from burst_jax.models.experts import mixture as moe
from burst_jax.models.experts import rows as expert_rows
from burst_jax.models.experts.mixture import Sums
from burst_jax.models.feed_forward import GatedMLP
from burst_jax.models.weights import flat_weights, with_weights
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.mesh import flat_names
from burst_jax.training import init_train_state, make_batch, make_train_step, place_batch
from pallas_kernels.mosaic.sm80 import few_rows
from pallas_kernels.timing import relative_error

B, T, D, M = 2, 13, 16, 24
CONFIG = DecoderConfig(
    embed_dim=D, mlp_dim=M, feed_forward=MixtureOfExperts, experts=Experts(5, 2), remat="none"
)
X, COTANGENT = np.random.default_rng(7).standard_normal((2, B, T, D))
PRESENT = np.ones((B, T), np.int32)
PRESENT[0, 9:], PRESENT[1, 4] = 0, 0


def made(config):
    """A layer with weights that are not 0: drawn by NumPy, without a program for each."""

    def make():
        init = nnx.initializers.lecun_normal()
        layer = MixtureOfExperts(config, out_init=init, rngs=nnx.Rngs(0))
        if config.lora is not None:
            a, b = jnp.zeros((D, 2)), jnp.zeros((2, config.experts.count))
            set_adapter(layer.router, a, b, config.lora.scale)
        return layer

    graphdef, shapes = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, random_like(shapes, 0, scale=1 / 4))


def formula(weights, x, config, present):
    """The output, and the sums over tokens, from each expert on all tokens."""
    experts, xs = config.experts, x.reshape(-1, x.shape[-1])
    keep = present.reshape(-1, 1) != 0
    router = weights["router"]
    logits = xs @ router["kernel"] + router.get("bias", 0)
    if config.lora is not None:
        logits = logits + config.lora.scale * xs @ router["kernel_lora_a"] @ router["kernel_lora_b"]
    scores = jax.nn.softmax(logits) if experts.score == "softmax" else jax.nn.sigmoid(logits)
    chosen = jax.lax.stop_gradient(logits) >= jnp.sort(logits, -1)[:, [-experts.per_token]]
    chosen = chosen & keep
    of_experts = jnp.where(chosen, scores, 0)
    if experts.normalize:
        of_experts = of_experts / jnp.maximum(of_experts.sum(-1, keepdims=True), 1e-9)

    def mlp(part, x, clamp=None):
        """Of all experts, whose kernels are stacked, or of the shared one."""

        def linear(name, x):
            return x @ part[name]["kernel"] + part[name].get("bias", jnp.zeros(1))[..., None, :]

        gate, up = linear("gate", x), linear("up", x)
        if clamp is None:
            return linear("down", gate / (1 + jnp.exp(-gate)) * up)
        gate = jnp.where(gate > clamp, clamp, gate)
        up = jnp.where(jnp.abs(up) > clamp, clamp * jnp.sign(up), up)
        return linear("down", gate / (1 + jnp.exp(-1.702 * gate)) * (up + 1))

    out = jnp.einsum("te,etd->td", of_experts, mlp(weights, xs, experts.clamp))
    if "shared" in weights:
        shared = mlp(weights["shared"], xs)
        if "shared_gate" in weights:
            shared = shared / (1 + jnp.exp(-xs @ weights["shared_gate"]["kernel"]))
        out = out + shared
    normalized = scores / scores.sum(-1, keepdims=True)
    z = jnp.log(jnp.exp(logits).sum(-1, keepdims=True)) ** 2
    counts = chosen.sum(0).astype(x.dtype)
    sums = counts, jnp.where(keep, normalized, 0).sum(0), jnp.where(keep, z, 0).sum()
    return out.reshape(x.shape), sums


@pytest.mark.parametrize(
    ("experts", "fields"),
    [
        (Experts(5, 2, shared_dim=8, shared_gate=True), {}),
        (Experts(6, 3, score="sigmoid", normalize=False, router_bias=True), {"remat": "selective"}),
        (Experts(4, 4, clamp=0.5, router_bias=True), {"mlp_bias": True, "mlp_chunks": 13}),
        (Experts(7, 1, score="sigmoid"), {"lora": Lora(2, alpha=3.0)}),
    ],
)
def test_values_sums_and_gradients_are_the_formula(experts, fields):
    config = dataclasses.replace(CONFIG, experts=experts, **fields)
    graphdef, state = nnx.split(made(config))
    rng = np.random.default_rng(3)
    dsums = rng.standard_normal(experts.count), rng.standard_normal(experts.count), 0.3

    @quick_jit
    def run(state, x, present, cotangent):
        def feed_forward(state, x):
            layer = nnx.merge(graphdef, state)
            return layer.with_sums(x, present, keeps_products=config.remat == "selective")

        (out, sums), vjp = jax.vjp(feed_forward, state, x)
        return (out, tuple(sums)), *vjp((out * 0 + cotangent, type(sums)(*cotangents)))

    cotangents = jax.tree.map(np.float32, dsums)
    found, dweights, dx = run(state, np.float32(X), PRESENT, np.float32(COTANGENT))
    weights = nnx.to_pure_dict(state)
    want, gradients = plain_model.gradients(
        lambda weights, x: formula(weights, x, config, PRESENT),
        (COTANGENT, (0 * dsums[0], *dsums[1:])),
        weights,
        X,
    )
    assert_close((found, nnx.to_pure_dict(dweights), dx), (want, *gradients), 1e-5)


def test_gradients_hold_no_dense_arrays_and_choose_experts_once():
    """A recomputation that rounds otherwise would send tokens to other experts."""
    config = dataclasses.replace(
        CONFIG, num_layers=2, num_heads=2, head_dim=8, experts=Experts(64, 2), remat="selective"
    )
    jaxpr = decoders.traced_gradient(config, make_mesh(), 4, 32)
    sizes = [out.aval.size for each, _ in equations(jaxpr) for out in each.outvars]
    # The experts' own weights; tokens x experts x features are more.
    assert max(sizes) == 2 * 64 * D * M < 4 * 32 * 64 * D
    assert count(jaxpr, "top_k") == 1
    all_again = dataclasses.replace(config, remat="full")
    assert count(decoders.traced_gradient(all_again, make_mesh(), 4, 32), "top_k") == 2
    # In chunks, there are hidden features of one chunk only.
    chunked = decoders.traced_gradient(
        dataclasses.replace(config, mlp_chunks=8), make_mesh(), 4, 32
    )
    for traced, rows in ((jaxpr, 4 * 32 * 2), (chunked, 4 * 32 * 2 // 8)):
        shapes = [out.aval.shape for each, _ in equations(traced) for out in each.outvars]
        assert max(shape[0] for shape in shapes if shape[1:] == (M,)) == rows
    # The gradients of biases scatter no rows: the largest that is scattered are the embedding's.
    biased = decoders.traced_gradient(
        dataclasses.replace(config, mlp_bias=True), make_mesh(), 4, 32
    )
    scattered = [each for each, _ in equations(biased) if each.primitive.name == "scatter-add"]
    assert max(each.invars[2].aval.size for each in scattered) == 4 * 32 * D < 4 * 32 * 2 * M


@pytest.mark.parametrize(
    ("sizes", "expert", "factor", "popular", "chunks"),
    [
        ({"fsdp": 2, "seq": 2, "tensor": 2}, ("seq", "fsdp"), 0.5, (), 1),
        ({"seq": 2}, "seq", 0.5, (7, 9), 3),
        pytest.param({"expert": 4, "seq": 2}, "expert", 1.5, (7, 22), 1, marks=pytest.mark.slow),
        pytest.param({"data": 2, "seq": 3}, "seq", None, (), 3, marks=pytest.mark.slow),
    ],
)
def test_exchanged_tokens_give_the_formula(monkeypatch, sizes, expert, factor, popular, chunks):
    """In several rounds, with padding; two popular experts have all tokens, the others none."""
    monkeypatch.setattr(exchange, "_FEW", 0)
    together, barrier = [], jax.lax.optimization_barrier

    def recorded(x):
        together.append([leaf.dtype.name for leaf in jax.tree.leaves(x)])
        return barrier(x)

    monkeypatch.setattr(jax.lax, "optimization_barrier", recorded)
    experts = Experts(24, 2, router_bias=True, capacity_factor=factor)
    config = dataclasses.replace(CONFIG, experts=experts, mlp_bias=True, mlp_chunks=chunks)
    layer, mesh = made(config), mesh_of(**sizes)
    rules = dataclasses.replace(ShardingRules.of(mesh), expert=expert)
    layer.expert_axis, layer.hidden_axis = rules.expert, rules.tensor
    graphdef, state = nnx.split(layer)
    weights = flat_weights(state)
    if popular:
        bias = 9.0 * np.isin(np.arange(24), popular)
        weights["router", "kernel"] = np.zeros((D, 24), np.float32)
        weights["router", "bias"] = np.asarray(bias, np.float32)
    # Not gathered, unlike a decoder's.
    whole = dataclasses.replace(rules, data=None, fsdp=None, seq=None)
    specs = {path: whole.spec(config.feed_forward.weight_axes[path]) for path in weights}
    over = rules.batch_axes + flat_names(rules.seq)
    tokens = P(rules.batch_axes or None, rules.seq)
    rng = np.random.default_rng(3)
    x, cotangent = rng.standard_normal((2, 4, 18, D))
    present = np.ones((4, 18), np.int32)
    present[1, 5:] = 0
    dscores, dz = rng.standard_normal(24), 0.3

    def local(weights, x, present):
        layer = nnx.merge(graphdef, with_weights(state, weights))
        out, sums = layer.with_sums(x, present, keeps_products=True)
        return out, tuple(jax.lax.psum(sums, over))

    @quick_jit
    def run(weights, x, present, cotangent):
        specs_in = specs, tokens, tokens
        feed_forward = jax.shard_map(local, mesh=mesh, in_specs=specs_in, out_specs=(tokens, P()))
        found, vjp = jax.vjp(lambda weights, x: feed_forward(weights, x, present), weights, x)
        dsums = jnp.zeros(24), jnp.asarray(dscores, jnp.float32), jnp.float32(dz), jnp.zeros(2)
        return found, *vjp((cotangent, dsums))

    arrays = np.float32(x), present, np.float32(cotangent)
    (out, (*sums, (rounds, devices))), dweights, dx = jax.device_get(run(weights, *arrays))
    found = out, tuple(sums)
    # Tokens, weights and numbers: else XLA of JAX 0.11 sends one of them apart.
    assert ["float32", "float32", "int32"] in together
    assert devices == math.prod(mesh.shape[name] for name in over)
    assert (rounds > 0) == (factor is not None)
    want, (gradients, want_dx) = plain_model.gradients(
        lambda weights, x: formula(weights, x, config, present),
        (cotangent, (np.zeros(24), dscores, dz)),
        nnx.to_pure_dict(with_weights(state, weights)),
        x,
    )
    if popular:
        assert sorted(want[1][0]) == [0] * 22 + [59] * 2
    wanted = {path: gradients[path[0]][path[1]] for path in dweights}
    assert_close((found, dweights, dx), (want, wanted, want_dx), 1e-5)


def test_a_round_has_all_rows_or_a_part():
    sizes = exchange.round_sizes
    assert sizes(512, 8, 1.5) == (512, 0)
    assert sizes(513, 8, 1.5) == (104, 32)
    assert sizes(16384, 8, None) == sizes(16384, 2, 2.0) == (16384, 0)
    assert sizes(8208, 2, 1.9) == (7800, 408)


class OnAllTokens(MixtureOfExperts):
    """Each expert on all tokens, masked."""

    def with_sums(self, x, present, *, keeps_products):
        del keeps_products
        weights = nnx.to_pure_dict(nnx.state(self))
        out, sums = formula(weights, x, self.config, present)
        return psum_manual(out, self.hidden_axis), Sums(*sums)


# Programs of other optimizers are larger.
SGD = optax.sgd(0.3)
MIXTURE = dataclasses.replace(
    TRAINED,
    num_layers=2,
    num_heads=2,
    mlp_dim=32,
    feed_forward=MixtureOfExperts,
    experts=Experts(6, 2, shared_dim=16, balance_loss=0.5, z_loss=0.1),
)


@pytest.mark.parametrize(
    ("sizes", "kind", "fields", "expert", "steps"),
    [
        ((1, 2, 1, 2, 2), AxisType.Auto, {"remat": "selective"}, "seq", 3),
        pytest.param(
            (2, 1, 2, 1, 1),
            AxisType.Explicit,
            {"remat": "half"},
            "data",
            20,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_that_of_each_expert_on_all_tokens(
    monkeypatch, sizes, kind, fields, expert, steps
):
    monkeypatch.setattr(exchange, "_FEW", 0)
    config = dataclasses.replace(MIXTURE, **fields)
    got = losses(sizes, kind, steps=steps, config=config, optimizer=SGD, expert=expert)
    dense = dataclasses.replace(MIXTURE, feed_forward=OnAllTokens)
    want = losses(ONE, config=dense, optimizer=SGD)
    np.testing.assert_allclose(got[0], want[0][:steps], rtol=2e-5)
    np.testing.assert_allclose(got[1], want[1][:steps], rtol=2e-4)


def test_auxiliary_losses_are_means_over_tokens_and_layers():
    """Each from its definition, with every token's logits in each of three layers."""
    count, k, tokens = 5, 2, 40
    logits = 2 * np.random.default_rng(1).standard_normal((3, tokens, count))
    chosen = np.sort(np.argsort(logits, -1)[..., -k:], -1)
    counts = np.stack([np.bincount(each.ravel(), minlength=count) for each in chosen])
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    squared = np.log(np.exp(logits).sum(-1)) ** 2
    rounds = np.array([[2, 4], [0, 4], [4, 4]])
    given = Sums(*map(jnp.float32, (counts, scores.sum(1), squared.sum(1), rounds)))
    experts = Experts(count, k, balance_loss=0.25, z_loss=0.125)
    config = dataclasses.replace(CONFIG, experts=experts)
    loss, metrics = jax.device_get(MixtureOfExperts.auxiliary(config, given))
    balance = count * np.mean(np.sum(counts / (tokens * k) * scores.mean(1), -1))
    want = {
        "balance_loss": balance,
        "router_z_loss": squared.mean(),
        "max_expert_load": counts.max() / (tokens * k / count),
        "further_rounds": 2 / 4 + 4 / 4,
    }
    assert metrics == pytest.approx(want, rel=1e-5)
    assert loss == pytest.approx(0.25 * balance + 0.125 * squared.mean(), rel=1e-5)


def test_copies_are_summed_in_float32():
    """Next to 256 bfloat16 has no 1; the gradient of copies is such a sum, rounded once."""
    copies = jnp.array([[256.0], [1.0], [2.0], [2.0], [256.0], [1.0]], jnp.bfloat16)
    np.testing.assert_array_equal(expert_rows.summed(copies, 2), [[259], [259]])
    index = jnp.arange(6)
    _, vjp = jax.vjp(lambda x: expert_rows.copied(x, index, index), jnp.zeros((2, 1), jnp.bfloat16))
    np.testing.assert_array_equal(np.float32(vjp(copies)[0]), [[260], [260]])


def test_accumulated_auxiliary_losses_weigh_slices_by_their_tokens():
    """So the z-loss is that of the whole batch; the load is balanced in each slice."""
    mesh, sgd = make_mesh(), optax.sgd(1.0)
    rows, ids = np.random.default_rng(5).integers(0, 48, (4, 17)), np.ones((4, 17), np.int32)
    # The slices' tokens are as 32 : 11, their targets as 31 : 4.
    ids[1, 4:], ids[2, 5:], ids[3, 6:], ids[3, :6] = 2, 0, 0, range(1, 7)

    # Balance is a metric, and too little of it is in the loss to be seen there.
    experts = Experts(6, 2, shared_dim=16, balance_loss=1e-9, z_loss=4.0)
    config = dataclasses.replace(MIXTURE, experts=experts)
    graphdef, shapes = abstract_decoder(config, mesh=mesh, layout="contiguous")
    params = decoders.drawn(shapes)
    _, *state = init_train_state(config, sgd, mesh, 0, layout="contiguous", params=params)
    state = jax.device_get(state)

    def step(run, part):
        """Of a part of the sequences, the others being padding: of the whole batch's shape."""
        present = np.zeros_like(ids)
        present[part] = ids[part]
        batch = place_batch(make_batch(rows, segment_ids=present), mesh)
        params, _, metrics = run(*jax.device_put(state, jax.NamedSharding(mesh, P())), batch)
        return nnx.to_pure_dict(params), {name: float(x) for name, x in metrics.items()}

    at_once, in_two = (
        make_train_step(graphdef, sgd, accumulate=count, compiler_options=QUICK) for count in (1, 2)
    )
    want, got = (step(run, slice(4)) for run in (at_once, in_two))
    assert_close(got[0], want[0], 1e-5)
    for name in ("loss", "grad_norm", "router_z_loss"):
        assert got[1][name] == pytest.approx(want[1][name], rel=1e-5)
    tokens = np.array([32, 11])
    slices = [step(at_once, part)[1] for part in (slice(2), slice(2, 4))]
    for name in ("balance_loss", "router_z_loss", "max_expert_load"):
        mean = np.dot(tokens, [each[name] for each in slices]) / tokens.sum()
        assert got[1][name] == pytest.approx(mean, rel=1e-5)
    assert abs(got[1]["balance_loss"] / want[1]["balance_loss"] - 1) > 1e-3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Experts(4, 5), ValueError, "per_token is 5: it must be .* at most 4"),
        (
            lambda: Experts(4, 2, score="max"),  # pyrefly: ignore
            ValueError,
            "score is 'max': use one of 'softmax', ",
        ),
        (lambda: Experts(4, 2, clamp=0.0), ValueError, "clamp is 0.0: it must be positive"),
        (lambda: Experts(4, 2, z_loss=-1.0), ValueError, "z_loss is -1.0: it must be 0, which is"),
        (
            lambda: DecoderConfig(experts=Experts(4, 2)),
            ValueError,
            "feed_forward is GatedMLP, experts Experts.*: use feed_forward=MixtureOfExperts",
        ),
        (
            lambda: dataclasses.replace(CONFIG, experts=None),
            ValueError,
            "feed_forward is MixtureOfExperts, experts None: use feed_forward=Mixture",
        ),
        (
            lambda: dataclasses.replace(CONFIG, lora=Lora(2, targets=("query", "up"))).adapted,
            NotImplementedError,
            r"targets \('query', 'up'\), and up have a matrix per expert: experts have no adapters",
        ),
        (
            lambda: Experts(4, 2, capacity_factor=0.0),
            ValueError,
            "capacity_factor is 0.0: it must be positive.*or None",
        ),
        (
            lambda: ShardingRules(expert=("seq", "tensor")),
            NotImplementedError,
            r"expert is \('seq', 'tensor'\), and tensor names 'tensor' too: experts can share devi",
        ),
        (
            lambda: abstract_decoder(
                dataclasses.replace(CONFIG, feed_forward=GatedMLP, experts=None),
                rules=ShardingRules(expert="seq"),
            ),
            ValueError,
            "expert is 'seq', and feed_forward GatedMLP has no weights with a dimension \"expert\"",
        ),
    ],
)
def test_what_is_not_supported_raises(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_active_weights_are_counted():
    config = dataclasses.replace(CONFIG, experts=Experts(5, 2, shared_dim=8), num_layers=1)
    dense = dataclasses.replace(config, feed_forward=GatedMLP, experts=None)
    assert config.num_matmul_params - dense.num_matmul_params == D * (5 + 3 * (2 * M + 8 - M))


def test_adapters_are_of_attention_and_the_router(tmp_path):
    config = dataclasses.replace(CONFIG, num_layers=2, lora=Lora(2))
    assert config.adapted == ("query", "key", "value", "out", "router")
    mesh = mesh_of(fsdp=2, seq=2)
    config = dataclasses.replace(config, experts=Experts(6, 2))
    rules = dataclasses.replace(ShardingRules.of(mesh), expert="seq")
    graphdef, shapes = abstract_decoder(config, mesh=mesh, rules=rules)
    adapters, _ = nnx.split_state(shapes, nnx.LoRAParam, ...)
    assert sum(x.size for x in jax.tree.leaves(adapters)) == config.num_adapter_params
    specs = nnx.merge(graphdef, shapes).shardings(shapes).weight_specs(shapes)
    assert specs["layers"]["mlp"]["router"]["kernel_lora_a"].get_value() == jax.P(None, None, None)
    up = specs["layers"]["mlp"]["up"]["kernel"].get_value()
    assert up == jax.P(None, ("seq",), ("fsdp",), None)
    with pytest.raises(NotImplementedError, match="adapter of the router, which peft does not"):
        save_adapter(nnx.merge(graphdef, random_like(shapes, 0)), tmp_path / "adapter")


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        (1, {}),
        (5, {"experts": Experts(6, 3, clamp=0.5), "mlp_bias": True}),
    ],
)
def test_few_tokens_read_each_expert_once(monkeypatch, tokens, fields):
    """The decoding path's kernels, interpreted, next to the path of many tokens."""
    config = dataclasses.replace(CONFIG, embed_dim=64, mlp_dim=64, dtype=jnp.bfloat16, **fields)
    layer = made(config)
    x = random_like(jax.ShapeDtypeStruct((tokens, 1, 64), jnp.bfloat16), 1)
    experts: Any = config.experts

    @quick_jit
    def of_many_tokens(x):
        logits = layer.router(x[:, 0].astype(jnp.float32))
        return layer(x, keeps_products=False), jax.lax.top_k(logits, experts.per_token)[1]

    wanted, chosen = of_many_tokens(x)
    layer = layer.decoding(hidden_axis=None, same_tokens_axis=None)
    monkeypatch.setattr(moe, "can_decode", lambda *_: True)

    @quick_jit
    def decode(x):
        read = []

        def product(x, weights, slots, *, summed):
            read.append((slots.matrices, slots.count))
            return few_rows.few_rows_product(x, weights, slots, summed=summed)

        monkeypatch.setattr(decoding, "few_rows_product", product)
        return layer(x, keeps_products=False), read

    monkeypatch.setattr(few_rows, "num_sms", lambda: 4)
    with interpreted_sm80.interpreted():
        found, read = jax.block_until_ready(decode(x))
    assert read
    for matrices, number in read:
        used = matrices[: number[0]].tolist()
        assert sorted(used) == sorted(set(chosen.reshape(-1).tolist()))
    assert relative_error(found, wanted) < 5e-3


@pytest.mark.parametrize("fields", [{}, {"normalize": False}, {"score": "sigmoid"}])
def test_decoding_chooses_and_weighs_experts_as_other_passes_do(fields):
    config = dataclasses.replace(CONFIG, experts=Experts(7, 3, **fields))
    layer = made(config)
    decoding_layer = layer.decoding(hidden_axis=None, same_tokens_axis=None)

    @quick_jit
    def both(x):
        return [each(x, keeps_products=False) for each in (decoding_layer, layer)]

    assert relative_error(*both(np.float32(X))) < 1e-6


def test_the_largest_logits():
    """Equal ones in ascending order; indices that exist, whatever the logits are."""
    logits = np.random.default_rng(0).integers(-3, 3, (5, 12)).astype(np.float32)
    values, index = decoding.largest(jnp.asarray(logits), 7)
    wanted = jax.lax.top_k(logits, 7)
    assert (values == wanted[0]).all()
    assert (index == wanted[1]).all()
    logits[:, ::2] = np.nan
    index = decoding.largest(jnp.asarray(logits), 7)[1]
    assert (index >= 0).all()
    assert (index < 12).all()


def test_decoding_skips_experts_of_other_devices():
    slots = decoding._hit(jnp.asarray([[4, 1], [1, 5], [3, 5]], jnp.int32), 5)
    assert slots.count.tolist() == [3]
    assert slots.matrices.tolist()[:3] == [1, 3, 4]
