"""The recommended training strategy: fast, with room for the model's error, and able to end."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import plan_command
import pytest
import run_options
from training_plans import LLAMA, RING, TINY, one, plan_of

import burst_jax
from burst_jax.plan import GPUS
from burst_jax.plan.final_evaluation import EVAL_BATCHES
from burst_jax.plan.presets import config_of
from burst_jax.plan.training_plan import AS_FAST, USABLE
from burst_jax.training import evaluation_memory


def test_the_recommendation_fits_and_is_as_fast_as_any():
    plan = plan_of(length=2**20, moments=None, hosts=4)
    best = plan.best
    assert best is not None
    fit = [each for each in plan.estimates if plan.fits(each)]
    assert fit == list(plan.estimates[: len(fit)])
    fastest = min(each.seconds.total for each in fit)
    assert best.seconds.total <= AS_FAST * fastest
    # Over four hosts, a ring of hosts with Ulysses inside sends the fewest bytes between them.
    assert best.strategy.ring == (4,)
    assert best.strategy.ulysses > 1
    assert best.memory.host == 0
    assert best.mfu == pytest.approx(
        2**20 * LLAMA.train_flops_per_token(2**20) / (best.seconds.total * 32 * 989e12)
    )


def test_a_slower_recommendation_is_explained():
    two_hosts = plan_of(gpu="A100", hosts=2)
    remats = plan_of(config_of("llama-3.2-1b"), 2**15, gpu="h100", batch=8)
    for plan, of_fastest, gain in (
        (two_hosts, "mesh seq=8 heads=2", r"\d+% of the ring's bytes to other hosts"),
        (remats, "remat none", r"\d+\.\d GiB less memory per GPU"),
    ):
        why = rf"# 0\.\d% slower than the fastest that fits \({of_fastest}\), within .* but {gain}$"
        assert re.search(why, str(plan)), str(plan)
    # Of two that offload activations, the one that keeps the moments on the device.
    offloaded = plan_of(length=2**20, gpu="h100", moments=None)
    assert offloaded.best == offloaded.estimates[0]
    assert offloaded.estimates[0].strategy.moments == "device"
    assert "slower" not in str(offloaded)
    # The planner of one attention recommends the same.
    shape: Any = {"length": 2**17, "num_heads": 32, "num_kv_heads": 8}
    attention = burst_jax.plan.attention(**shape, gpu="A100", hosts=2).best
    assert attention is not None
    assert two_hosts.best is not None
    assert two_hosts.best.strategy.mesh == attention.strategy.mesh == {"seq": 2, "heads": 8}
    # One 200 Gbit/s adapter per GPU.
    assert two_hosts.cluster.host_link == 25
    assert plan_of(TINY, 64, gpu="a100", host_link=50.0).cluster.host_link == 50
    command = str(two_hosts).splitlines()[-3]
    assert command.endswith(
        "One process per GPU: srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8"
    )


def test_a_recommendation_leaves_room_for_the_error_of_memory():
    """But where that costs more than 5 % of the time, and where nothing else fits."""
    most = USABLE * GPUS["h100"].memory * 2**30
    risky = 0
    for name, exponent in itertools.product(
        ("llama-3-8b", "llama-3.2-1b", "qwen-3-8b"), range(15, 21)
    ):
        plan = plan_of(config_of(name), 2**exponent, gpu="h100", moments=None)
        best = plan.best
        assert best is not None
        fit = [each for each in plan.estimates if each.memory.total <= most]
        sure = [each for each in fit if 1.1 * each.memory.total <= most]
        fastest = min(each.seconds.total for each in fit)
        worth = all(each.seconds.total > 1.05 * fastest for each in sure)
        assert worth == (best not in sure), (name, exponent)
        risky += worth
        assert ("try it with --steps 2" in str(plan)) == worth
    assert risky < 3
    # One that fits alone, and one that is much slower.
    plan = plan_of(config_of("qwen-3-8b"), 2**20, gpu="h100", moments=None)
    quick, slow = one(plan, **RING | {"remat": "attention"}), one(plan, **RING | {"remat": "full"})
    need = quick.memory.total / 2**30 / USABLE
    assert slow.seconds.total > 1.05 * quick.seconds.total
    assert 1.1 * slow.memory.total < quick.memory.total
    for estimates in ((quick,), (quick, slow)):
        gpu = dataclasses.replace(GPUS["h100"], memory=1.05 * need)
        cluster = dataclasses.replace(plan.cluster, gpu=gpu)
        tight = dataclasses.replace(plan, estimates=estimates, cluster=cluster)
        assert tight.best == quick
        assert (
            f"# It needs {need * USABLE:.1f} of {1.05 * need * USABLE:.1f} GiB, within 10%"
            in str(tight)
        )
    later = quick.seconds.matmuls + 0.04 * quick.seconds.total
    slow = dataclasses.replace(slow, seconds=dataclasses.replace(quick.seconds, matmuls=later))
    assert dataclasses.replace(tight, estimates=(quick, slow)).best == slow


def test_the_final_evaluation_is_counted():
    """It ends: in less memory than a step, and on one GPU where that has the memory."""
    assert run_options.DEFAULTS["eval_batches"][1] == EVAL_BATCHES
    for exponent, gpu in ((17, "h200"), (19, "h200"), (19, "h100")):
        plan = plan_of(length=2**exponent, gpu=gpu, moments=None)
        found, best = plan.evaluation, plan.best
        assert found is not None
        assert best is not None
        for each in plan.estimates:
            tokens = 2**exponent // each.strategy.token_devices
            config = dataclasses.replace(plan.config, mlp_chunks=each.strategy.mlp_chunks)
            if each.strategy.tensor == 1:  # The estimate has all heads and hidden features.
                needed = each.memory.weights + evaluation_memory(config, tokens)
                assert needed < each.memory.total, each.strategy
        # A third of a step's operations, at rates that matmuls and kernels reach on such GPUs.
        operations = EVAL_BATCHES * 2**exponent * plan.config.train_flops_per_token(2**exponent) / 3
        assert 500e12 < operations / found.device_seconds < 665e12
        assert found.device_seconds == pytest.approx(8 * found.mesh_seconds, rel=0.05)
        # 8.03 billion weights in float32; residual stream, norm, gate and up in bfloat16.
        held = 8.03e9 * 4 * (1 + 1 / 8) + 2**exponent * 2 * (2 * 4096 + 2 * 14336)
        assert found.device_memory == pytest.approx(held, rel=0.01)
        text, memory = str(plan), found.device_memory / 2**30
        minutes = f"and {found.device_seconds / 60:.0f} min on one GPU"
        command = plan_command.command(plan.record())
        never = memory > 0.75 * GPUS[gpu].memory
        assert command.endswith("--batch 1 --one-device never") == never
        assert minutes in text or memory > 0.75 * GPUS[gpu].memory or found.device_seconds < 100
    assert never
    assert "on the mesh, not on one GPU, which would need 70 GiB." in text
    args, _ = run_options.parse_args(["--one-device", "never"])
    assert args.one_device == "never"
    assert "on the mesh.\n" in f"{plan_of(length=2**17, hosts=2)}\n"
