"""A training plan's weights, memory and seconds are what states, programs and runs say."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_options
from jax.sharding import AxisType

import burst_jax
from benchmarks import plan_steps as measured_steps
from burst_jax import ShardingRules
from burst_jax.models import DecoderConfig, LayerKind, Lora
from burst_jax.models.remat import Remat
from burst_jax.plan import GPUS
from burst_jax.plan.__main__ import main
from burst_jax.plan.shapes import SHAPES, config_of
from burst_jax.plan.training_plan import AS_FAST, USABLE
from burst_jax.training import abstract_train_state, make_optimizer

TINY = DecoderConfig(
    vocab_size=64, num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=64,
    dtype=jnp.bfloat16, qkv_bias=True, post_norms=True,
)  # fmt: skip
LLAMA = config_of("llama-3-8b")


def held(tree):
    """Bytes of one device's parts."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def one(plan, weights="split", **fields):
    """The estimate of a way, the first if the fields leave several."""
    fields["weights"] = weights
    return next(
        each
        for each in plan.estimates
        if all(getattr(each.way, name) == value for name, value in fields.items())
    )


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_every_way_can_be_made_and_holds_what_the_plan_says(tied):
    config = dataclasses.replace(TINY, tie_embeddings=tied)
    plan = burst_jax.plan.training(config, length=256, batch=4, hosts=2, gpus_per_host=4)
    meshes = {}
    for each in plan.estimates:
        if each.way.moments == "device":
            meshes.setdefault((tuple(each.way.mesh.items()), each.way.weights), each)
    assert {axis for mesh, _ in meshes for axis, _ in mesh} == {
        "data", "fsdp", "seq", "outer", "inner", "tensor"
    }  # fmt: skip
    optimizer = make_optimizer(1e-3, 10)
    for each in list(meshes.values())[:: 3 if tied else 1]:
        way, arguments = each.way, each.way.arguments
        kinds = (AxisType.Auto,) * len(way.mesh)
        mesh = jax.make_mesh(tuple(way.mesh.values()), tuple(way.mesh), axis_types=kinds)
        rules = arguments.pop("rules", None)
        arguments["rules"] = None if rules is None else ShardingRules(**rules)
        config = dataclasses.replace(
            config, remat=way.remat, remat_layers=way.remat_layers, mlp_chunks=way.mlp_chunks
        )
        _, params, state = abstract_train_state(config, optimizer, mesh, **arguments)
        assert held(params) == each.memory.weights, way
        assert held(state) == each.memory.moments + 8, way  # Two counts of the steps.


def test_what_is_kept_costs_memory_and_saves_time():
    plan = burst_jax.plan.training(LLAMA, length=2**18, moments="device")
    by_remat = {
        remat: one(plan, rows=1, ring=(8,), layout="zigzag", remat=remat, remat_layers=None)
        for remat in ("none", "selective", "attention", "full", "offload")
    }
    ordered = ("none", "selective", "attention", "full")
    kept = [by_remat[name].memory.activations for name in ordered]
    assert kept == sorted(kept, reverse=True)
    tokens, wide = 2**15, 2 * 4096
    assert by_remat["full"].memory.activations == 32 * tokens * wide
    assert by_remat["attention"].memory.activations == 32 * tokens * (2 * wide + 4 * 32)
    assert by_remat["offload"].memory.activations == 0
    assert by_remat["offload"].memory.host == by_remat["attention"].memory.activations
    times = [by_remat[name].seconds.total for name in ordered]
    assert times == sorted(times)
    assert by_remat["attention"].seconds.total < by_remat["offload"].seconds.total
    assert {each.way.remat for each in plan.estimates} == set(get_args(Remat))


def test_as_many_layers_are_selective_as_fit():
    """Of the 32 layers; each of them costs memory and saves time."""
    ways = {"rows": 1, "ring": (8,), "layout": "zigzag", "remat": "selective"}
    arguments: Any = {"length": 2**18, "moments": "device"}
    roomy = burst_jax.plan.training(LLAMA, **arguments)
    everything, nothing = one(roomy, **ways), one(roomy, **ways | {"remat": "attention"})
    assert roomy.fits(everything)
    assert everything.way.remat_layers is None
    need = (everything.memory.total + nothing.memory.total) / 2 / 2**30
    gpu = dataclasses.replace(GPUS["h200"], memory=need / USABLE)
    plan = burst_jax.plan.training(LLAMA, gpu=gpu, **arguments)
    assert not plan.fits(one(plan, **ways, remat_layers=None))
    some = next(
        each
        for each in plan.estimates
        if each.way.remat_layers and each.way.mesh == {"seq": 8} and each.way.layout == "zigzag"
        and each.way.weights == "split"
    )  # fmt: skip
    count = some.way.remat_layers
    assert plan.fits(some)
    assert plan.best == some
    kept = everything.memory.activations - nothing.memory.activations
    assert some.memory.activations == nothing.memory.activations + kept * count // 32
    # One more would be too much; chunks of the feed-forward take no work from what is kept.
    assert some.memory.total + kept // 32 > USABLE * gpu.memory * 2**30
    saved = nothing.seconds.recomputed - everything.seconds.recomputed
    assert nothing.seconds.recomputed - some.seconds.recomputed == pytest.approx(saved * count / 32)
    assert f"selective in {count}" in str(plan)
    assert f'remat="selective", remat_layers={count}, ' in str(plan)
    assert some.way.flags is not None
    assert run_options.parse_args(some.way.flags)[0].remat_layers == count


def test_moments_may_be_small_or_on_the_host():
    ways = {"rows": 1, "ring": (8,), "layout": "zigzag", "remat": "attention"}
    plan = burst_jax.plan.training(LLAMA, length=2**17)
    here, there = (one(plan, moments=moments, **ways) for moments in ("device", "host"))
    assert there.memory.host == here.memory.moments > 0
    assert there.memory.moments == 0
    assert there.memory.total == here.memory.total - here.memory.moments
    assert there.seconds.total > here.seconds.total
    small = burst_jax.plan.training(LLAMA, length=2**17, moment_dtype="bfloat16", moments="device")
    assert one(small, **ways).memory.moments == here.memory.moments // 2
    assert {each.way.moments for each in small.estimates} == {"device"}


def test_chunks_are_taken_where_memory_is_short():
    roomy = burst_jax.plan.training(LLAMA, length=2**20, moments="device")
    ways = {"rows": 1, "ring": (8,), "layout": "zigzag", "remat": "attention"}
    whole = one(roomy, **ways)
    assert whole.way.mlp_chunks == 1
    need = whole.memory.total / 2**30
    gpu = dataclasses.replace(GPUS["h200"], memory=0.99 * need / USABLE)
    short = burst_jax.plan.training(LLAMA, length=2**20, moments="device", gpu=gpu)
    cut = one(short, **ways)
    assert short.fits(cut)
    assert cut.way.mlp_chunks > 1
    assert cut.seconds.total >= whole.seconds.total


def test_the_recommendation_fits_and_is_as_fast_as_any_that_does():
    plan = burst_jax.plan.training(LLAMA, length=2**20, hosts=4)
    best = plan.best
    assert best is not None
    fit = [each for each in plan.estimates if plan.fits(each)]
    assert fit == list(plan.estimates[: len(fit)])
    fastest = min(each.seconds.total for each in fit)
    assert best.seconds.total <= AS_FAST * fastest
    # Of a ring over four hosts, two levels send least between them.
    assert len(best.way.ring) == 2
    assert best.memory.host == 0
    assert best.mfu == pytest.approx(
        2**20 * LLAMA.train_flops_per_token(2**20) / (best.seconds.total * 32 * 989e12)
    )
    tiny = dataclasses.replace(GPUS["h200"], memory=8)
    none = burst_jax.plan.training(LLAMA, length=2**20, gpu=tiny)
    assert none.best is None
    assert "None fits 8 GiB (in brackets: too much)" in str(none)


def test_the_model_is_held_to_measured_steps(capsys):
    gaps = {}
    for step in measured_steps.load():
        gaps[step] = abs(math.log(measured_steps.estimate_of(step).seconds.total / step.seconds))
    assert len(gaps) >= 18
    # What a step does beside the model's parts counts most in the shortest.
    assert max(gaps.values()) < math.log(1.06), gaps
    assert np.median(list(gaps.values())) < math.log(1.02), gaps
    main(["--measured"])
    printed = capsys.readouterr().out.split("training steps on H200s")[1]
    assert re.search(r"llama-3-8b +32 +split +zigzag +65,536 +6680 \d{4} \([01]\.\d\d\)", printed)


def test_windows_and_gpus_without_a_peak():
    local = dataclasses.replace(
        LLAMA, layer_pattern=(LayerKind(window=4096), LayerKind(window=4096), LayerKind())
    )
    gpu = dataclasses.replace(GPUS["h200"], peak=None, matmul=None)
    plans = [
        burst_jax.plan.training(config, length=2**18, moments="device", gpu=gpu)
        for config in (local, LLAMA)
    ]
    ways = {"rows": 1, "ring": (8,), "layout": "zigzag", "remat": "attention"}
    windows, everything = (one(plan, **ways) for plan in plans)
    assert windows.seconds.attention < 0.5 * everything.seconds.attention
    assert windows.mfu is None
    assert windows.seconds.products == everything.seconds.products


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes(name):
    config = config_of(name)
    assert config.num_layers >= 16
    assert burst_jax.plan.training(config, length=2**14).best is not None


def test_the_flags_are_those_of_the_training_script():
    plan = burst_jax.plan.training(LLAMA, length=2**17, batch=2, moments="device")
    best = plan.best
    assert best is not None
    line = next(line for line in str(plan).splitlines() if "train_lm.py" in line)
    args, _ = run_options.parse_args(line.split("train_lm.py ")[1].split())
    assert args.mesh == ",".join(f"{name}={size}" for name, size in best.way.mesh.items())
    assert (args.layout, args.remat) == (best.way.layout, best.way.remat)
    assert args.model == Path("DIR")
    assert (args.seq_len, args.batch, args.mlp_chunks) == (2**17, 2, best.way.mlp_chunks)
    # The script has no flags for whole weights, nor for two levels.
    assert one(plan, weights="whole", ring=(8,)).way.flags is None


def test_a_training_plan_as_json_and_from_a_folder(tmp_path, capsys):
    arguments = ["--length", "128K", "--gpus-per-host", "4", "--moments", "device"]
    main(["--model", "llama-3-8b", *arguments, "--json", str(tmp_path / "plan.json")])
    plan = burst_jax.plan.training(LLAMA, length=2**17, gpus_per_host=4, moments="device")
    assert capsys.readouterr().out == f"{plan}\n"
    record, best = json.loads((tmp_path / "plan.json").read_text()), plan.best
    assert best is not None
    assert record["recommended"]["mesh"] == best.way.mesh
    assert record["recommended"]["memory"]["total"] == best.memory.total
    assert len(record["estimates"]) == len(plan.estimates)
    main(["--model", "llama-3-8b", *arguments, "--all"])
    assert len(capsys.readouterr().out.splitlines()) > len(plan.estimates)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 32,
                "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                "intermediate_size": 14336, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 8192, "hidden_act": "silu",
            }
        )
    )  # fmt: skip
    main(["--model", str(folder), *arguments, "--json", "-"])
    loaded = json.loads(capsys.readouterr().out)
    assert loaded["recommended"] == record["recommended"]
    main(["--model", str(folder), *arguments])
    assert f"train_lm.py --model {folder} --mesh" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"lacks config.json: name a folder"):
        main(["--model", str(tmp_path), *arguments])
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(SystemExit, match="has model_type 'mamba'"):
        main(["--model", str(folder), *arguments])


ERRORS = {
    "config": ({"config": 7}, "config is a int: it must be a DecoderConfig"),
    "length": ({"length": 0}, "length is 0: it must be a positive integer"),
    "batch": ({"batch": 1.5}, "batch is 1.5: it must be a positive integer"),
    "gpu": ({"gpu": "v100"}, "gpu is 'v100': use one of 'h200', 'h100', 'a100', or a Gpu"),
    "moments": ({"moments": "disk"}, "moments is 'disk': use 'device', 'host', or None"),
    "dtype": ({"moment_dtype": "int8"}, "moment_dtype is 'int8': use float32 or bfloat16"),
    "no-way": (
        {"length": 1001, "gpus_per_host": 16},
        "length is 1001, batch 1: no way to split a step over 16 devices: seq=16, weights split, "
        "contiguous: .* needs a multiple of 16",
    ),
}


@pytest.mark.parametrize(("change", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_input(change, message):
    arguments = {"config": TINY, "length": 256} | change
    with pytest.raises(ValueError, match=message):
        burst_jax.plan.training(arguments.pop("config"), **arguments)


def test_adapters_are_refused():
    """Their weights would be counted as trained ones, and frozen weights with moments."""
    config = dataclasses.replace(TINY, lora=Lora(4))
    with pytest.raises(NotImplementedError, match=r"config.lora is Lora\(rank=4, .*lora=None\)"):
        burst_jax.plan.training(config, length=256)


def test_the_command_line_refuses_what_it_would_ignore(capsys):
    for arguments, message in (
        (["--model", "llama-3-8b", "--heads", "8"], "--heads is given beside --model"),
        (["--moment-dtype", "bfloat16"], "--moment-dtype needs --model"),
    ):
        with pytest.raises(SystemExit):
            main(["--length", "64K", *arguments])
        assert message in capsys.readouterr().err
    with pytest.raises(
        SystemExit, match=r"model is 'gpt-5': use one of llama-3-8b, .* or a folder"
    ):
        main(["--length", "64K", "--model", "gpt-5"])
