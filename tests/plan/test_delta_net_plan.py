"""The planner's Gated DeltaNet layers against measured kernels, programs and training states."""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxprs import equations
from meshes import mesh_of
from training_plans import TINY, one, plan_of

import burst_jax
from burst_jax import linear
from burst_jax.linear import runs
from burst_jax.models import DeltaNet, KimiDelta, LayerKind, abstract_decoder
from burst_jax.plan import GPUS, delta_net
from burst_jax.plan.__main__ import main
from burst_jax.plan.delta_net import DeltaNetSizes, estimate
from burst_jax.plan.device_sizes import device_sizes
from burst_jax.plan.hardware import Cluster
from burst_jax.plan.presets import config_of
from burst_jax.plan.training_strategy import TrainingStrategy
from burst_jax.training import abstract_train_state, make_optimizer

LINEAR, FULL = LayerKind(mixer="delta_net"), LayerKind()
SIZES = DeltaNet(num_heads=4, num_key_heads=2, head_dim=128, value_head_dim=128)
HYBRID = dataclasses.replace(
    TINY, num_layers=4, layer_pattern=(LINEAR, LINEAR, LINEAR, FULL), delta_net=SIZES
)
PURE = dataclasses.replace(
    TINY, delta_net=SIZES, num_heads=4, num_kv_heads=2, head_dim=64, qkv_bias=False
)
QWEN, KIMI = DeltaNet(32, 32, 128, 128), KimiDelta(32, 32, 128, 128)


def strategy_of(n, layout="zigzag", **fields):
    return TrainingStrategy("sharded", 1, (n,), 1, layout, "attention", **fields)


@pytest.mark.parametrize(
    ("gpu", "rows", "length", "forward", "both"),
    [
        ("h200", 1, 32768, 0.724, 2.630),
        ("h200", 1, 8192, 0.195, 0.698),
        ("h200", 2, 16384, 0.583, 2.431),
        ("h100", 2, 16384, 0.620, 2.646),
        ("a100", 1, 32768, 1.6, 5.1),  # By count.
    ],
)
def test_kernels_take_what_was_measured(monkeypatch, gpu, rows, length, forward, both):
    monkeypatch.setattr(delta_net, "_AROUND", {"forward": 0, "backward": 0})
    strategy, tokens = strategy_of(1, "contiguous"), rows * length
    sizes = DeltaNetSizes.of(QWEN, strategy)
    found = estimate(sizes, Cluster(GPUS[gpu], 1, 1, 50.0), strategy, tokens=tokens, rows=rows)
    assert 1e3 * found.forward_seconds == pytest.approx(forward, rel=0.03)
    assert 1e3 * (found.forward_seconds + found.backward_seconds) == pytest.approx(both, rel=0.04)
    assert found.forward_bytes == found.host_bytes == 0


@pytest.mark.parametrize(
    ("rows", "length", "forward", "both"),
    [
        (1, 65536, 3.132, 11.880),
        (1, 32768, 1.601, 5.976),
        (1, 16384, 0.820, 3.041),
    ],
)
def test_kernels_of_decays_per_channel(monkeypatch, rows, length, forward, both):
    monkeypatch.setattr(delta_net, "_AROUND", {"forward": 0, "backward": 0})
    strategy, tokens = strategy_of(1, "contiguous"), rows * length
    sizes = DeltaNetSizes.of(KIMI, strategy)
    found = estimate(sizes, Cluster(GPUS["h200"], 1, 1, 50.0), strategy, tokens=tokens, rows=rows)
    assert 1e3 * found.forward_seconds == pytest.approx(forward, rel=0.03)
    assert 1e3 * (found.forward_seconds + found.backward_seconds) == pytest.approx(both, rel=0.03)
    assert sizes.kept_bytes("fused") == 32 * 128 * 2
    a100 = Cluster(GPUS["a100"], 1, 1, 50.0)
    with pytest.raises(NotImplementedError, match="gpu is a100, and delta_net is a KimiDelta: the"):
        estimate(sizes, a100, strategy, tokens=tokens, rows=rows)


@pytest.mark.parametrize("kind", [DeltaNet, KimiDelta])
def test_other_head_dims_are_heads_of_128(monkeypatch, kind):
    """A head of 192 values is two of 128 for the kernels; devices exchange the true ones."""
    monkeypatch.setattr(delta_net, "_AROUND", {"forward": 0, "backward": 0})
    strategy, cluster = strategy_of(1, "contiguous"), Cluster(GPUS["h200"], 1, 1, 50.0)
    sizes, same = (DeltaNetSizes.of(kind(*x), strategy) for x in ((8, 8, 96, 192), (16, 8, 128)))
    found, want = (estimate(x, cluster, strategy, tokens=2**16, rows=1) for x in (sizes, same))
    # Of each array as it is and padded: q, k, v and o; q, k, v, do and the gradients of the first.
    keys, values = 2 * 2 * 8 * (96 + 128), 2 * 8 * (192 + 256)
    if kind is KimiDelta:  # Decays of every key channel and head.
        keys += 4 * 8 * (96 + 2 * 128)
    for name, copied in (("forward", keys + 2 * values), ("backward", 2 * keys + 3 * values)):
        extra = 2**16 * copied / (1e9 * cluster.gpu.bandwidth)
        seconds = getattr(want, f"{name}_seconds") + extra
        assert getattr(found, f"{name}_seconds") == pytest.approx(seconds, rel=1e-6)
        assert same.copied_bytes(backward=name == "backward") == 0
    chunks = 0 if kind is KimiDelta else 16 * 148  # Of heads of 128.
    assert sizes.kept_bytes("fused") == 8 * 192 * 2 + chunks
    assert sizes.map_bytes == 4 * 8 * 96 * (96 + 192)
    config = dataclasses.replace(HYBRID, delta_net=kind(4, 4, 96, 192))
    assert "heads x 96/192" in str(plan_of(config, 1024))


def test_a_ring_adds_maps_and_exchanges(monkeypatch):
    monkeypatch.setattr(delta_net, "_AROUND", {"forward": 0, "backward": 0})
    one_gpu, eight = strategy_of(1), strategy_of(8)
    cluster, times = Cluster(GPUS["h200"], 1, 8, 50.0), []
    for strategy in (one_gpu, eight):
        sizes = DeltaNetSizes.of(QWEN, strategy)
        times.append(estimate(sizes, cluster, strategy, tokens=32768, rows=1))
    # The affine map and the first state's gradient of slow decays, in two runs each, and latencies.
    for name, work in (("forward", 0.45), ("backward", 0.40)):
        alone, ring = (1e3 * getattr(each, f"{name}_seconds") for each in times)
        zigzag = alone - {"forward": 0.14, "backward": 0.05}[name]
        sent = getattr(times[1], f"{name}_bytes") / (255e9) * 1e3 + 0.12
        assert ring == pytest.approx(zigzag + work + sent, rel=0.02)
    hosts = Cluster(GPUS["h200"], 2, 4, 50.0)
    far = estimate(DeltaNetSizes.of(QWEN, eight), hosts, eight, tokens=32768, rows=1)
    assert far.host_bytes == far.forward_bytes + far.backward_bytes
    assert far.forward_seconds > times[1].forward_seconds


@pytest.mark.parametrize(
    ("sizes", "layout", "tokens", "forward", "both"),
    [
        (QWEN, "contiguous", 16384, 0.419, 1.471),
        (QWEN, "zigzag", 16384, 0.441, 1.531),
        (QWEN, "contiguous", 65536, 1.276, 5.108),
        (QWEN, "zigzag", 65536, 1.311, 5.207),
        (KIMI, "contiguous", 16384, 1.044, 3.589),
        (KIMI, "zigzag", 16384, 1.067, 3.644),
        (KIMI, "contiguous", 65536, 3.881, 13.667),
        (KIMI, "zigzag", 65536, 3.902, 13.718),
    ],
)
def test_rings_of_two_take_what_was_measured(monkeypatch, sizes, layout, tokens, forward, both):
    """With decays for which maps are short: with one per head they take nothing here."""
    monkeypatch.setattr(delta_net, "_AROUND", {"forward": 0, "backward": 0})
    rates, nothing = delta_net.RATES["fused", False], delta_net.Pass(0.0, 0.0, 0)
    of_short_maps = rates._replace(affine=nothing, first_gradient=nothing)
    monkeypatch.setitem(delta_net.RATES, ("fused", False), of_short_maps)
    strategy, cluster = strategy_of(2, layout), Cluster(GPUS["h200"], 1, 2, 50.0)
    sizes = DeltaNetSizes.of(sizes, strategy)
    found = estimate(sizes, cluster, strategy, tokens=tokens, rows=1)
    assert 1e3 * found.forward_seconds == pytest.approx(forward, rel=0.06)
    assert 1e3 * (found.forward_seconds + found.backward_seconds) == pytest.approx(both, rel=0.04)


def test_parts_on_one_gpu_have_maps(monkeypatch):
    """Measured with heads that forget nothing."""
    monkeypatch.setattr(delta_net, "_AROUND", {"forward": 0, "backward": 0})
    strategy, cluster = strategy_of(1, "contiguous"), Cluster(GPUS["h200"], 1, 1, 50.0)
    sizes = DeltaNetSizes.of(DeltaNet(16, 16, 128, 128), strategy)
    found = estimate(sizes, cluster, strategy, tokens=32768, rows=1)
    assert 1e3 * found.forward_seconds == pytest.approx(0.502, rel=0.08)
    assert 1e3 * (found.forward_seconds + found.backward_seconds) == pytest.approx(1.644, rel=0.03)


@pytest.mark.parametrize(("kind", "parts"), [(DeltaNet, 2), (KimiDelta, 4)])
def test_runs_of_few_heads_are_in_parts(monkeypatch, kind, parts):
    """Like runs of each device: kernels take the time of chains shorter by their number."""
    monkeypatch.setattr(delta_net, "_AROUND", {"forward": 0, "backward": 0})
    monkeypatch.setattr(delta_net, "_LATENCY", 0.0)
    cluster, found = Cluster(GPUS["h200"], 1, 2, 50.0), []
    for heads in (4, 4 * parts):  # As many chains, of parts, as of whole runs with more heads.
        strategy = strategy_of(2 if heads == 4 else 1, "contiguous")
        sizes = DeltaNetSizes.of(kind(heads, heads, 128, 128), strategy)
        tokens = 16384 if heads == 4 else 16384 // parts
        found.append(estimate(sizes, cluster, strategy, tokens=tokens, rows=1))
    rates, chunks = delta_net.RATES["fused", kind is KimiDelta], 256 // parts
    in_parts, whole = found
    sent = in_parts.forward_bytes / (1e9 * cluster.exchange_link)
    work = in_parts.forward_seconds - rates.fixed - chunks * rates.affine.chunk - sent
    assert work == pytest.approx(whole.forward_seconds)
    sent = in_parts.backward_bytes / (1e9 * cluster.exchange_link)
    work = in_parts.backward_seconds - rates.fixed - chunks * rates.first_gradient.chunk - sent
    assert work == pytest.approx(whole.backward_seconds)


def received(jaxpr, n):
    """Bytes that one device receives by the collectives of a traced program."""
    total = 0
    for equation, _ in equations(jaxpr):
        name = equation.primitive.name
        size = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
        if name == "all_gather":
            total += (n - 1) * size
        elif name == "all_to_all":
            total += (n - 1) * size // n
        elif name == "ppermute":
            total += size
        elif name.startswith("psum"):
            total += 2 * (n - 1) * size // n
    return total


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("exchange", ["heads", "gather", "steps"])
def test_bytes_are_those_of_the_program(monkeypatch, layout, exchange):
    n, heads, key_heads, rows = 6, 12 if exchange == "heads" else 4, 2, 3
    if exchange == "steps":
        monkeypatch.setattr(runs, "GATHERED", 4)
    strategy = strategy_of(n, layout)
    sizes = DeltaNetSizes.of(dataclasses.replace(SIZES, num_heads=heads), strategy)
    assert sizes.exchange == exchange
    shape = rows, n * 64 * (2 if layout == "zigzag" else 1)

    def array(*rest, dtype: Any = jnp.float32):
        return jax.ShapeDtypeStruct((*shape, *rest), dtype)

    keys, values, gates = array(key_heads, 128), array(heads, 128), array(heads)
    options: Any = {"mesh": mesh_of(seq=n), "layout": layout}

    def rule(*arrays: Any) -> Any:
        return linear.gated_delta_rule(*arrays, **options)

    def both(*arrays: Any) -> Any:
        o, vjp = jax.vjp(rule, *arrays)
        return vjp(o)

    arrays = keys, keys, values, gates, gates
    forward, whole = (received(jax.make_jaxpr(f)(*arrays).jaxpr, n) for f in (rule, both))
    # XLA drops the all-reduce of the final state, which nothing reads; JAX does for a gradient.
    forward -= 2 * (n - 1) * rows * heads * 128 * 128 * 4 // n
    assert forward == sizes.exchanged_bytes(rows)
    backward = sizes.exchanged_bytes(rows, backward=True)
    if exchange == "steps":  # JAX drops a last permute's M, which nothing reads.
        assert 0.7 * backward < whole - forward < backward
    else:
        assert whole - forward == backward
    features = array(sizes.convolved, dtype=jnp.bfloat16)
    taps = jax.ShapeDtypeStruct((4, sizes.convolved), jnp.bfloat16)
    convolution = jax.make_jaxpr(lambda *x: linear.short_convolution(*x, **options))
    assert received(convolution(features, taps).jaxpr, n) == sizes.halo_bytes(rows, 2)


@pytest.mark.parametrize("config", [HYBRID, PURE], ids=["hybrid", "pure"])
def test_strategies_have_the_planned_weights(config):
    plan = plan_of(config, 1024, batch=2, hosts=2, gpus_per_host=4)
    reasons = dict(plan.left_out)
    assert reasons["meshes with a Ulysses axis"] == "Gated DeltaNet layers support none"
    assert reasons["the striped layout"].startswith("Gated DeltaNet needs long runs of tokens")
    assert {each.strategy.remat for each in plan.estimates} == {
        "none", "selective", "attention", "full", "offload"
    }  # fmt: skip
    assert max(each.strategy.tensor for each in plan.estimates) == 2  # Of two key heads.
    optimizer = make_optimizer(1e-3, 10)
    meshes = {each.strategy.name: each for each in plan.estimates}
    for each in list(meshes.values())[::5]:
        axes: Any = each.strategy.mesh
        state = abstract_train_state(config, optimizer, mesh_of(**axes), **each.strategy.arguments)
        held = [
            sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                for x in jax.tree.leaves(tree))
            for tree in state[1:]
        ]  # fmt: skip
        assert held == [each.memory.weights, each.memory.moments + 8], each.strategy
    text = str(plan)
    counted = "3 with Gated DeltaNet of 4/2 heads x 128" if config is HYBRID else "2 with Gated"
    assert counted in text
    assert ("1 with 8/4 heads x 8" in text) == (config is HYBRID)
    names: Any = {}
    code = textwrap.dedent(text.split("recommended:\n")[1].split("    graphdef, params")[0])
    exec(code, names)
    chosen = plan.best.strategy if plan.best else None
    assert chosen is not None
    assert names["config"] == dataclasses.replace(
        config, remat=chosen.remat, remat_layers=chosen.remat_layers, mlp_chunks=chosen.mlp_chunks
    )


def test_what_costs_nothing_at_any_length():
    """Seconds and saved bytes of a token do not grow with the length; those of attention do."""
    fields: Any = {"rows": 1, "ring": (8,), "layout": "zigzag", "remat": "attention"}
    short, long = (one(plan_of(PURE, 2**k), **fields) for k in (18, 20))
    assert long.seconds.attention < 4.01 * short.seconds.attention
    # Of the states alone, which are as many for any length.
    state = 2 * 2 * 4 * 128 * 256 * 4
    assert long.memory.activations - state == 4 * (short.memory.activations - state)
    hybrid = [one(plan_of(HYBRID, 2**k), **fields) for k in (18, 20)]
    assert hybrid[1].seconds.attention > 5 * hybrid[0].seconds.attention


def test_a_layer_saves_what_its_gradient_reads():
    n, tokens = 4, 256
    strategy = strategy_of(n)
    sizes = DeltaNetSizes.of(SIZES, strategy)
    saved = sizes.state_bytes(1) + tokens * sizes.kept_bytes("fused")
    # M and the state of two runs; out, and X beta and five vectors of each chunk of 64.
    states, chunks = 2 * 2 * 4 * 128 * 128 * 4, tokens // 64
    assert saved == states + 4 * (tokens * 128 * 2 + chunks * 64 * (64 * 2 + 5 * 4))
    assert sizes.kept_bytes("reordered") - sizes.kept_bytes("fused") == 4 * 64 * 2  # P.
    plan = plan_of(PURE, n * tokens, gpus_per_host=n)
    fields: Any = {"rows": 1, "ring": (n,), "layout": "zigzag"}
    attention, full = (one(plan, **fields, remat=remat) for remat in ("attention", "full"))
    assert attention.memory.activations - full.memory.activations == 2 * saved


def test_qwen_3_next(capsys):
    config = config_of("qwen-3-next-80b-a3b")
    assert config.mixers == {"attention": 12, "delta_net": 36}
    main(["--length", "128K", "--moments", "host", "--model", "qwen-3-next-80b-a3b"])
    text = capsys.readouterr().out
    weights = re.search(r"\(([\d.]+) of ([\d.]+) billion weights\)", text)
    assert weights is not None
    # With the embedding 80 billion.
    assert float(weights[2]) == pytest.approx(80, rel=0.01)
    assert float(weights[1]) < 4
    assert "36 with Gated DeltaNet of 32/16 heads x 128" in text


def test_kimi_linear():
    """The products of a device's layers are those of the decoder, but for routers."""
    config = config_of("kimi-linear-48b-a3b")
    assert config.mixers == {"attention": 7, "delta_net": 20}
    strategy = strategy_of(1)
    _, shapes = abstract_decoder(config, mesh=strategy.abstract_mesh)
    sizes = device_sizes(config, shapes, strategy, length=1024, batch=1)
    assert sizes.parts == 49_122_681_728
    routers, head = 26 * 2304 * 256, 2304 * 163840
    assert sizes.all_products == config.num_matmul_params - routers - head
    # The name's 48 and 3 billion.
    assert 1e-9 * config.num_matmul_params == pytest.approx(3.1, abs=0.1)
    halves = dataclasses.replace(strategy, tensor=2)
    half = device_sizes(config, shapes, halves, length=1024, batch=1)
    low_rank = 2 * 20 * 2304 * 128 + 7 * 2304 * 576  # On both devices.
    assert 2 * half.all_products == sizes.all_products + low_rank
    # Keys of 192 features, values of 128, of which out has as many.
    assert (half.kv, half.query, half.attended) == (16 * 320, 16 * 192, 16 * 128)
    plan = plan_of(config, 2**15, gpus_per_host=8, moments="host")
    text = str(plan)
    assert "7 with latent attention of 32 heads x 192/128, 20 with Kimi Delta Attention of" in text
    assert "1 layers of 9216 without experts, 256 experts of 1024, 8 per token" in text
    message = "gpu is a100, and delta_net is a KimiDelta: .* plan for an H100 or H200"
    with pytest.raises(NotImplementedError, match=message):
        burst_jax.plan.training(config, length=1024, gpu="a100")


def test_what_has_no_rates_raises():
    config = dataclasses.replace(PURE, delta_net=DeltaNet(4, 2, 192, 64))
    message = "delta_net has head_dim 192: the planner has rates of the kernels, which support up"
    with pytest.raises(NotImplementedError, match=message):
        burst_jax.plan.training(config, length=1024)
    wide = dataclasses.replace(PURE, num_layers=1, mlp_dim=96)
    plan = plan_of(wide, 1024, gpus_per_host=4)
    assert any(
        "delta_net has 2 key heads: 4 devices do not divide" in why for _, why in plan.left_out
    )
