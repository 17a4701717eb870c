"""The attention planner against masks, byte formulas, compiled programs and measured rings."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from typing import Any

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_programs import gradient
from jax.sharding import AxisType
from ring_cases import kept_scores
from routes import hops_of_passes

import burst_jax
from benchmarks.plan import compare_rings, load_rings, ring_table, step_table
from benchmarks.results import gib
from burst_jax.plan import GPUS
from burst_jax.plan.__main__ import main
from burst_jax.plan.attention_plan import ACCURACY
from burst_jax.ring.rotation import ShardShape, backward_bytes, forward_bytes
from burst_jax.ring.route import RingMask, make_route, scores_per_step
from pallas_kernels.mask import Mask

SHAPE = {"length": 65536, "num_heads": 32, "num_kv_heads": 8}
# Free communication and kernel launches: only the balance of the work is left.
IDEAL = dataclasses.replace(
    GPUS["h200"], launch=1e-12, link=1e9, peer_link=None, exchange_link=None, bandwidth=1e9,
    source="a custom GPU",
)  # fmt: skip


def one(plan, strategy, layout="zigzag", backward="rotate_kv"):
    (found,) = (
        each
        for each in plan.estimates
        if (each.strategy.name, each.layout, each.backward) == (strategy, layout, backward)
    )
    return found


@pytest.mark.parametrize("rotates_query", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_scores_equal_the_mask(layout, rotates_query):
    counted = 0
    for sizes, window, lengths in itertools.product(
        [(4,), (2, 3)], [(None, None), (None, 0), (9, 0), (5, 3), (0, 2)], [(6, 6), (4, 8)]
    ):
        mask = RingMask(sizes, layout, *lengths, Mask(*window), rotates_query)
        route = make_route(("a", "b")[: len(sizes)], mask)
        got = scores_per_step(route, mask)
        assert tuple(got) == route.offsets
        for stop, (most, mean) in got.items():
            kept = kept_scores(sizes, layout, lengths, window, rotates_query, stop)
            assert (most, mean) == (max(kept), np.mean(kept)), (sizes, window, lengths, stop)
            counted += most
    assert counted > 0


@pytest.mark.parametrize(("n", "ratio"), [(4, 1.75), (8, 1.875)])
def test_zigzag_halves_the_contiguous_ring(n, ratio):
    """n - 1/2 blocks of work against n/2: the best possible balance."""
    plan = burst_jax.plan.attention(**SHAPE, gpu=IDEAL, gpus_per_host=n)
    contiguous, zigzag, striped = (
        one(plan, "ring", layout).seconds for layout in ("contiguous", "zigzag", "striped")
    )
    assert "rates: a custom GPU" in str(plan)
    assert contiguous / zigzag == pytest.approx(ratio, rel=1e-3)
    assert striped == pytest.approx(zigzag, rel=1e-3)
    assert one(plan, "ring").tflops == pytest.approx(
        14 / (4 / IDEAL.forward + 10 / IDEAL.backward), rel=1e-3
    )


def test_bytes_equal_the_formulas():
    plan = burst_jax.plan.attention(**SHAPE, hosts=2, gpus_per_host=8)
    c = 65536 // 16
    shape = ShardShape(c, c, 32, 8, 128, 2)
    for backward in ("rotate_kv", "rotate_query"):
        hops = hops_of_passes(16)
        flat = one(plan, "ring", backward=backward)
        assert flat.forward_bytes == forward_bytes(hops, shape)
        assert flat.backward_bytes == backward_bytes(backward, hops, shape)
        assert flat.host_bytes == flat.forward_bytes + flat.backward_bytes
        levels = one(plan, "two-level ring", backward=backward)
        assert levels.forward_bytes == flat.forward_bytes
        assert levels.backward_bytes == flat.backward_bytes
        between = hops_of_passes(8, 8).between_passes
        assert levels.host_bytes == forward_bytes(between, shape) + backward_bytes(
            backward, between, shape
        )
    assert one(plan, "two-level ring").seconds < 0.8 * one(plan, "ring").seconds


@pytest.mark.parametrize("strategy", ["ring", "two-level ring", "ring of 2, ulysses of 4"])
def test_costs_are_proportional_to_the_batch(strategy):
    plans = [
        burst_jax.plan.attention(**SHAPE, gpu=IDEAL, hosts=2, gpus_per_host=4, batch=batch)
        for batch in (1, 3)
    ]
    for backward in ("rotate_kv", "rotate_query"):
        single, triple = (one(plan, strategy, backward=backward) for plan in plans)
        for name in ("forward_bytes", "backward_bytes", "host_bytes"):
            assert getattr(triple, name) == 3 * getattr(single, name) > 0, name
        for name in ("forward_seconds", "backward_seconds", "memory"):
            assert getattr(triple, name) == pytest.approx(3 * getattr(single, name), rel=1e-6), name
        assert triple.tflops == pytest.approx(single.tflops, rel=1e-6)


def test_small_heads_have_their_own_rate():
    wide, small = (
        one(burst_jax.plan.attention(**SHAPE, gpu=IDEAL, gpus_per_host=4, head_dim=dim), "ring")
        for dim in (128, 64)
    )
    assert 0.5 < IDEAL.small_head < 0.9
    assert small.seconds == pytest.approx(wide.seconds / 2 / IDEAL.small_head, rel=1e-3)


def test_values_of_another_head_dim():
    """In the bytes of permutes and all-to-alls, and in the FLOPs."""
    narrow: Any = {"gpus_per_host": 4, "head_dim": 192, "value_head_dim": 128}
    c, n, kv = 65536 // 4, 32, 8
    shape = ShardShape(c, c, n, kv, 192, 2, value_dim=128)
    plan = burst_jax.plan.attention(**SHAPE, **narrow)
    for backward in ("rotate_kv", "rotate_query"):
        ring = one(plan, "ring", backward=backward)
        assert ring.forward_bytes == forward_bytes(hops_of_passes(4), shape)
        assert ring.backward_bytes == backward_bytes(backward, hops_of_passes(4), shape)
    assert forward_bytes(hops_of_passes(4), shape) == 3 * c * kv * (192 + 128) * 2
    # q and out, k and v; then dq and do, dk and dv, and delta.
    exchanged = c * (n + kv) * (192 + 128) * 2
    heads = one(plan, "ulysses", "contiguous")
    assert heads.forward_bytes == exchanged * 3 // 4
    assert heads.backward_bytes == (exchanged + c * n * 4) * 3 // 4
    assert "heads x 192/128" in str(plan)
    of_both, of_one = (
        one(burst_jax.plan.attention(**SHAPE, **sizes, gpu=IDEAL), "ring").tflops
        for sizes in (narrow, narrow | {"value_head_dim": 192})
    )
    features = (2 + 6) * 192 + (2 + 4) * 128
    assert of_one == pytest.approx(14 / (4 / IDEAL.forward + 10 / IDEAL.backward), rel=1e-3)
    seconds = (2 * 192 + 2 * 128) / IDEAL.forward + (6 * 192 + 4 * 128) / IDEAL.backward
    assert of_both == pytest.approx(features / seconds, rel=1e-3)


def test_bytes_of_all_to_alls():
    """Two hosts of four: q, k, v, out, and do, delta, dq, dk, dv, three quarters of each sent."""
    plan = burst_jax.plan.attention(**SHAPE, hosts=2, gpus_per_host=4)
    hybrid = one(plan, "ring of 2, ulysses of 4")
    c, ring = 65536 // 8, hops_of_passes(2)
    arrays = 2 * c * 32 * 128 * 2 + 2 * c * 8 * 128 * 2
    shape = ShardShape(4 * c, 4 * c, 8, 2, 128, 2)
    ring_forward = forward_bytes(ring, shape)
    assert hybrid.forward_bytes == ring_forward + arrays * 3 // 4
    ring_backward = backward_bytes("rotate_kv", ring, shape)
    assert hybrid.backward_bytes == ring_backward + (arrays + c * 32 * 4) * 3 // 4
    assert hybrid.host_bytes == ring_forward + ring_backward
    # Ulysses over both hosts: four of each device's seven peers are on the other one.
    over_hosts = one(plan, "ulysses", "contiguous")
    assert over_hosts.forward_bytes == arrays * 7 // 8
    assert over_hosts.host_bytes == arrays // 2 + (arrays + c * 32 * 4) // 2
    far = burst_jax.plan.attention(**SHAPE, hosts=2, gpus_per_host=4, host_link=1e-3)
    slow = one(far, "ulysses", "contiguous")
    assert slow.seconds == pytest.approx(1e-6 * over_hosts.host_bytes, rel=1e-3)


def test_hops_between_chunks_are_not_planned():
    """Chunks of a shard each need no ring in the contiguous layout, and are as fast as one GPU."""
    shape: Any = {"length": 131072, "num_heads": 32, "num_kv_heads": 8}
    plan = burst_jax.plan.attention(**shape, gpus_per_host=16, attention_chunk_size=8192)
    ring = next(each for each in plan.estimates if each.layout == "contiguous")
    assert ring.forward_bytes == ring.backward_bytes == 0
    assert "attention_chunk_size=8192" in str(plan)
    whole = burst_jax.plan.attention(**shape, gpus_per_host=16)
    assert plan.estimates[0].seconds < whole.estimates[0].seconds / 8


def test_a_window_is_cheapest_in_the_contiguous_layout():
    plan = burst_jax.plan.attention(
        length=131072, num_heads=32, num_kv_heads=8, gpus_per_host=16, local_window_size=(4096, 0)
    )
    near = one(plan, "ring", "contiguous")
    c = 131072 // 16
    shape = ShardShape(c, c, 32, 8, 128, 2)
    assert near.forward_bytes == forward_bytes(hops_of_passes(2), shape)
    assert plan.best is not None
    assert plan.best.seconds <= near.seconds
    assert near.seconds < 0.8 * one(plan, "ring", "striped").seconds


@pytest.mark.parametrize("by_head", [False, True], ids=["shared", "by_head"])
def test_scores_of_a_block_mask(by_head):
    """The scores of all devices together are those that the mask keeps, for every strategy."""
    length, heads, dim = 96, 4, 32
    table = np.random.default_rng(0).random((heads, 8, 12)) < 0.2
    if not by_head:
        table = table.any(0)
    keep = np.tri(length, dtype=bool) & table.reshape(-1, 8, 12).any(0).repeat(12, 0).repeat(8, 1)
    options: Any = {"gpu": IDEAL, "hosts": 2, "gpus_per_host": 2}
    plan = burst_jax.plan.attention(
        length=length, num_heads=heads, head_dim=dim, block_mask=table, **options
    )
    assert {each.strategy.name for each in plan.estimates} > {"ring", "two-level ring"}
    for each in plan.estimates:
        flops = 1e12 * each.tflops * each.seconds * plan.cluster.size
        assert flops == pytest.approx(14 * dim * heads * keep.sum()), each.strategy.name


def test_ring_steps_that_a_block_mask_skips(tmp_path, capsys):
    file, options = tmp_path / "table.npy", ["--length", "4K", "--gpus-per-host", "4"]
    np.save(file, np.eye(4, dtype=bool))
    main([*options, "--block-mask", str(file)])
    printed = capsys.readouterr().out
    assert "causal, 25% of 4 x 4 blocks" in printed
    assert "block_mask=block_mask)" in printed
    main([*options, "--block-mask", str(file), "--json", "-"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["attention"]["blocks"]["seen"] == 0.25
    sent = {
        each["arguments"]["layout"]: each["forward_bytes"]
        for each in plan["estimates"]
        if each["strategy"] == "ring"
    }
    assert sent["contiguous"] == 0 < sent["zigzag"]
    np.save(file, np.eye(3, dtype=bool))
    with pytest.raises(SystemExit, match=r"block_mask has shape \(3, 3\), 3 rows, .*4096 tokens"):
        main([*options, "--block-mask", str(file)])
    file.write_text("no array")
    with pytest.raises(SystemExit, match=r"table\.npy is not a file of numpy\.save"):
        main([*options, "--block-mask", str(file)])


def test_impossible_strategies_are_left_out_with_a_reason():
    plan = burst_jax.plan.attention(length=4 * 1001, num_heads=6, num_kv_heads=3, gpus_per_host=4)
    left_out = dict(plan.left_out)
    assert "needs a multiple of 8" in left_out["ring, zigzag"]
    assert "K must be a multiple or a divisor" in left_out["ring of 2, ulysses of 2, contiguous"]
    assert "N must be a multiple" in left_out["ulysses, contiguous"]
    assert "left out: ring, zigzag" in str(plan)


def test_one_device_and_too_little_memory():
    plan = burst_jax.plan.attention(**SHAPE, gpus_per_host=1)
    only = plan.estimates[0]
    assert len({each.strategy.name for each in plan.estimates}) == 1
    assert (only.strategy.name, only.strategy.mesh) == ("one device", {"seq": 1})
    assert only.forward_bytes == only.backward_bytes == 0
    assert only.overlapped == 1
    tiny = dataclasses.replace(GPUS["h200"], memory=0.5)
    plan = burst_jax.plan.attention(**SHAPE, gpu=tiny, gpus_per_host=4)
    assert plan.best is None
    assert "None fits 0.5 GiB: use more devices" in str(plan)


def test_hundreds_of_devices():
    plan = burst_jax.plan.attention(
        length=2**19, num_heads=64, num_kv_heads=8, gpu="h100", hosts=32, gpus_per_host=8
    )
    assert plan.best is not None
    # Between hosts a flat ring sends everything over the slow interconnect.
    assert plan.best.strategy.name != "ring"
    assert plan.best.tflops > 1.4 * one(plan, "ring").tflops


def test_overlap_follows_from_the_slower_of_kernel_and_transfer():
    """Free interconnect: everything is overlapped; a slow one: nearly nothing is."""
    fast, slow = (
        one(burst_jax.plan.attention(**SHAPE, gpus_per_host=4, gpu=dataclasses.replace(
            GPUS["h200"], peer_link=link)), "ring")
        for link in (1e9, 1e-3)
    )  # fmt: skip
    assert fast.overlapped == pytest.approx(1)
    assert slow.overlapped < 1e-3
    bytes_sent = slow.forward_bytes + slow.backward_bytes
    assert slow.seconds == pytest.approx(bytes_sent / 1e6, rel=1e-2)


def test_of_equal_times_the_fewest_bytes_to_other_hosts_win():
    plan = burst_jax.plan.attention(
        length=2**20, num_heads=32, num_kv_heads=8, hosts=2, gpus_per_host=8
    )
    flat, levels = one(plan, "ring"), one(plan, "two-level ring")
    assert levels.seconds == pytest.approx(flat.seconds, rel=ACCURACY)
    assert levels.host_bytes < flat.host_bytes / 7
    best = plan.best
    assert best is not None
    assert best.seconds <= (1 + ACCURACY) * plan.estimates[0].seconds
    assert best.host_bytes == min(
        each.host_bytes for each in plan.estimates if each.seconds <= (1 + ACCURACY) * flat.seconds
    )
    slow = burst_jax.plan.attention(**SHAPE, hosts=2, gpus_per_host=8, host_link=1e-2)
    assert slow.best is not None
    assert slow.best.seconds <= (1 + ACCURACY) * slow.estimates[0].seconds


def test_the_recommendation_can_be_called():
    """burst_attention accepts the mesh and arguments of every estimate."""
    q = jax.ShapeDtypeStruct((1, 64, 8, 8), jnp.bfloat16)
    for hosts in (1, 2):
        plan = burst_jax.plan.attention(
            length=64, num_heads=8, num_kv_heads=8, head_dim=8, hosts=hosts, gpus_per_host=4
        )
        for each in plan.estimates:
            axes = each.strategy.mesh
            kinds = (AxisType.Auto,) * len(axes)
            devices = jax.devices()[: plan.cluster.size]
            mesh = jax.make_mesh(
                tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices
            )
            attend = functools.partial(
                burst_jax.burst_attention, mesh=mesh, is_causal=True, **each.arguments
            )
            assert jax.eval_shape(attend, q, q, q).shape == q.shape
        best = plan.best
        assert best is not None
        text = str(plan)
        assert f"jax.make_mesh({tuple(best.strategy.mesh.values())}, (" in text
        assert "burst_attention(..., mesh=mesh, seq_axis=" in text
        assert f'layout="{best.layout}", backward="{best.backward}", is_causal=True)' in text


def test_a_plan_as_json(tmp_path, capsys):
    arguments = ["--length", "64K", "--kv-heads=8", "--hosts", "2", "--gpus-per-host", "4"]
    main([*arguments, "--json", str(tmp_path / "plan.json")])
    plan = burst_jax.plan.attention(**SHAPE, hosts=2, gpus_per_host=4)
    assert capsys.readouterr().out == f"{plan}\n"
    record = json.loads((tmp_path / "plan.json").read_text())
    main([*arguments, "--json", "-"])
    assert json.loads(capsys.readouterr().out) == record
    best = plan.best
    assert best is not None
    recommended = record["recommended"]
    assert recommended["mesh"] == best.strategy.mesh
    assert recommended["arguments"]["layout"] == best.layout
    assert recommended["num_shards"] == math.prod(best.strategy.sizes)
    assert recommended["host_bytes"] == best.host_bytes
    assert len(record["estimates"]) == len(plan.estimates)
    assert record["attention"]["length"] == 65536
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="--json: "):
        main([*arguments, "--json", str(tmp_path / "file" / "plan.json")])


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"length": 0}, "length is 0: it must be a positive integer"),
    "hosts": ({"hosts": 1.5}, "hosts is 1.5: it must be a positive integer"),
    "heads": ({"num_kv_heads": 5}, "num_kv_heads is 5, num_heads 32: .* a multiple of it"),
    "gpu": ({"gpu": "v100"}, "gpu is 'v100': use one of 'h200', 'h100', 'a100', or a Gpu"),
    "link": ({"host_link": 0.0}, "host_link is 0.0: it must be a positive number of GB/s"),
    "window": ({"local_window_size": -1}, "local_window_size is -1: it must be an int or a pair"),
    "no-strategy": (
        {"length": 1001},
        "length is 1001: no strategy can shard it over 8: ring, contig",
    ),
}


def test_bad_input():
    for change, message in ERRORS.values():
        arguments: Any = SHAPE | change
        with pytest.raises(ValueError, match=message):
            burst_jax.plan.attention(**arguments)


def test_the_command_line(capsys):
    main(["--length", "64K", "--kv-heads=8", "--window", "4K"])
    want = burst_jax.plan.attention(**SHAPE, local_window_size=(4096, 0))
    assert capsys.readouterr().out == f"{want}\n"
    with pytest.raises(SystemExit, match="length is 1001: no strategy can shard it"):
        main(["--length", "1001"])
    with pytest.raises(SystemExit):
        main(["--length", "many"])
    assert "many is not a number of tokens: 65536, 64K, 1M" in capsys.readouterr().err


def allowed_ratio(case, name, both):
    """The allowed ratio between a measured and an estimated rate."""
    if case.startswith("16K") and name == "contiguous" and both:
        # With rotate_query a device that is idle at the end of the forward pass starts its backward
        # pass while the others still work, so both together take less than their sum.
        return 1.21
    if case.startswith("window"):
        return 1.14  # Few tiles per query: the kernel is slower than on a long shard.
    if name.endswith("NCCL"):
        return 1.10  # NCCL's kernels also occupy SMs.
    return 1.045


def test_estimates_agree_with_measured_rings():
    gaps = []
    for results in load_rings():
        compared = list(compare_rings(results))
        known = {"zigzag", "zigzag, NCCL", "striped", "contiguous", "ulysses"}
        assert known <= {row.peer for row, *_ in compared}
        assert {row.case for row, *_ in compared} == {row.case for row in results.rows}
        for row, forward, both in compared:
            for name, model, seen in (("f", forward, row.forward), ("fb", both, row.both)):
                gap = abs(math.log(model / seen))
                limit = math.log(allowed_ratio(row.case, row.peer, name == "fb"))
                assert gap < limit, (results.devices, row.case, row.peer, name, gap)
                gaps.append(gap)
    assert len(gaps) > 50
    assert np.median(gaps) < math.log(1.015)
    # ACCURACY is the model's own error.
    assert np.quantile(gaps, 2 / 3) < math.log(1 + ACCURACY)


def test_estimates_are_printed_next_to_measured_rates():
    """By ``python -m benchmarks plan``."""
    rings = "\n".join(map(ring_table, load_rings()))
    assert "2 x NVIDIA H200" in rings
    assert "4 x NVIDIA H200" in rings
    assert re.search(r"64K, 32/8 heads +zigzag +\d{3} \d{3} \([01]\.\d\d\)", rings)
    steps = step_table()
    assert re.search(r"llama-3-8b +32 +sharded +zigzag +65,536 +6680 \d{4} \([01]\.\d\d\)", steps)


TWO_LEVELS = {"seq_axis": ("outer", "inner")}
HYBRID = {"seq_axis": "outer", "ulysses_axis": "inner"}
ULYSSES = {"seq_axis": None, "ulysses_axis": "seq"}
A100, H100 = ("a100", "mosaic_sm80"), ("h100", "mosaic_sm90")


@pytest.mark.cuda_compiler
@pytest.mark.parametrize(
    ("strategy", "mesh_shape", "options", "layout", "backward", "gpu"),
    [
        ("ring", (6,), {}, "zigzag", "rotate_kv", A100),
        ("ring", (6,), {}, "zigzag", "rotate_query", H100),
        ("two-level ring", (3, 2), TWO_LEVELS, "zigzag", "rotate_kv", H100),
        ("two-level ring", (3, 2), TWO_LEVELS, "striped", "rotate_query", A100),
        ("ring of 3, ulysses of 2", (3, 2), HYBRID, "zigzag", "rotate_kv", A100),
        ("ring of 3, ulysses of 2", (3, 2), HYBRID, "zigzag", "rotate_query", H100),
        ("ulysses", (2,), ULYSSES, "contiguous", "rotate_kv", A100),
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)
def test_memory_equals_the_compiled_program(strategy, mesh_shape, options, layout, backward, gpu):
    gpu, kernels = gpu
    mesh, tokens = compiled.gpu_mesh(gpu, *mesh_shape), 1536
    heads, kv_heads = (6, 6) if backward == "rotate_query" else (16, 2)
    plan = burst_jax.plan.attention(
        length=tokens * math.prod(mesh_shape), num_heads=heads, num_kv_heads=kv_heads, gpu=gpu,
        hosts=(1, *mesh_shape)[-2], gpus_per_host=mesh_shape[-1],
    )  # fmt: skip
    attention = functools.partial(
        burst_jax.burst_attention, mesh=mesh, is_causal=True, implementation=kernels,
        layout=layout, backward=backward, **options,
    )  # fmt: skip
    shapes = compiled.inputs(mesh, tokens, heads, kv_heads)
    program = compiled.compile_for(gradient(attention), *shapes)
    planned = one(plan, strategy, layout, backward).memory
    assert planned == pytest.approx(gib(program), rel=0.1)
