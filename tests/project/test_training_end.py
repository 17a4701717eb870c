"""What train_lm.py does around its steps: programs, checks of the weights, the last evaluation."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import run_batches
import run_evaluation
import run_options
import train_lm
from data_files import write_words
from flax import nnx
from implementations import QUICK
from meshes import mesh_of
from run_log import NonFinite
from run_mesh import TRAINING_AXES
from split_runs import SMALL
from train_lm_runs import arguments, error_of

from burst_jax.models import abstract_decoder
from burst_jax.training import (
    Checkpoints,
    Evaluation,
    init_train_state,
    make_batch,
    make_train_step,
    place_batch,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("corpus"))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """The loss of the last step, which is finite, is that of the weights before it."""
    good, *bad = (nnx.State({"w": nnx.Param(jnp.array([1.0, x]))}) for x in (0.0, jnp.nan, jnp.inf))
    with Checkpoints(tmp_path) as checkpoints:
        train_lm.check_weights(3, good, checkpoints)
        checkpoints.save(3, {"w": jnp.ones(2)})
        for params, norm in zip(bad, ("nan", "inf"), strict=True):
            message = f"step 4: the norm of the weights is {norm}. The last checkpoint is step 3 in"
            with pytest.raises(NonFinite, match=message):
                train_lm.check_weights(4, params, checkpoints)


@pytest.mark.slow
def test_a_run_whose_last_step_breaks_the_weights_ends_in_an_error(corpus, tmp_path, capsys):
    for more in ("--checkpoint-every=1", "--checkpoint-every=0"):
        given = arguments(corpus, tmp_path / more, "--steps=1", "--mesh=seq=1", "--lr=1e38", more)
        assert "step 1: the norm of the weights is inf" in error_of(given, capsys)
        assert not list((tmp_path / more).glob("checkpoints/[0-9]*"))


@pytest.mark.parametrize(
    ("options", "perplexities", "free", "code", "printed", "evaluated"),
    [
        (
            "",
            (2.0, 2.0001),
            None,
            0,
            r"one device .*\n  relative difference 5.0e-05\nsampled$",
            "21",
        ),
        ("", (2.0, 2.001), None, 1, "error: the perplexities differ by more than 0.0001$", "21"),
        (
            "--dtype=bfloat16",
            (2.0, 2.001),
            None,
            0,
            r"10 tokens, in bfloat16:\n.*\n.*one dev",
            "21",
        ),
        (
            "",
            (math.nan, math.nan),
            None,
            1,
            "error: the held-out loss is nan, though the weights are finite: train with a lower",
            "21",
        ),
        (
            "--dtype=bfloat16",
            (math.inf, math.inf),
            None,
            1,
            "loss is inf, .* finite: --eval-dtype is bfloat16, try float32, or train with a lower",
            "21",
        ),
        ("--eval-batches=0", (2.0, 2.0), None, 0, "^sampled$", ""),
        ("--one-device=never", (2.0, 2.0), None, 0, r"^held-out .*\n  ring of 2 .*\nsampled$", "2"),
        (
            "",
            (2.0, 2.0),
            1 << 28,
            0,
            r"left out: it needs about 0.6 GiB, and 0.2 .*\nsampled$",
            "2",
        ),
        (
            "",
            (2.0, 2.0),
            1 << 20,
            0,
            r"  one device         left out: it needs about 0.6 GiB, and 0.0 are free\n"
            r"  sample             left out: it needs about 0.0 GiB, and 0.0 are free$",
            "2",
        ),
        (
            "--eval-batches=0",
            (2.0, 2.0),
            1 << 20,
            0,
            "^  sample             left out: it needs",
            "",
        ),
        ("--one-device=never", (2.0, 2.0), 1 << 20, 0, r"ring of 2 .*\n  sample .* left out", "2"),
        ("--eval-batches=0 --sample-tokens=0", (2.0, 2.0), 1 << 20, 0, "^$", ""),
    ],
    ids=[
        "equal",
        "differ",
        "bfloat16",
        "nan",
        "inf",
        "none",
        "never",
        "no-memory",
        "no-weights",
        "none-no-weights",
        "never-no-weights",
        "nothing",
    ],
)
def test_the_last_evaluation_is_optional_and_fits(
    corpus, tmp_path, monkeypatch, capsys, options, perplexities, free, code, printed, evaluated
):
    """In the training dtype, and on one device only if that has the memory."""
    args, _ = run_options.parse_args(arguments(corpus, tmp_path, "--mesh=seq=2", *options.split()))
    run = run_options.prepare(args)
    args.seq_len, dtype = 2**20, args.dtype
    stats = None if free is None else {"bytes_limit": free + 100, "bytes_in_use": 100}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    mesh: Any = types.SimpleNamespace(size=2, shape=run.mesh.shape, devices=np.array([device]))
    run = dataclasses.replace(run, mesh=mesh)
    seen = []

    def held_out(args, run, params, mesh):
        seen.append(str(mesh.size))
        assert run.config.dtype == jnp.dtype(dtype)
        found = perplexities[len(seen) - 1]
        return Evaluation(math.log(found), found, 10)

    monkeypatch.setattr(train_lm, "held_out", held_out)
    monkeypatch.setattr(train_lm, "one_device", lambda _: mesh_of(seq=1))
    monkeypatch.setattr(train_lm, "show_sample", lambda *_: "sampled")
    log: Any = types.SimpleNamespace(history=[])
    params: Any = {"w": np.zeros(2**20, np.float32)}
    assert train_lm.finish(args, run, params, log) == code
    found = capsys.readouterr()
    assert re.search(printed, (found.out + found.err).rstrip())
    assert "".join(seen) == evaluated
    text = (tmp_path / "summary.json").read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert not evaluated or (summary["ring"]["nll"] is None) == (not math.isfinite(perplexities[0]))
    present = {name for name in ("ring", "one_device") if summary[name] is not None}
    assert present == {"": set(), "2": {"ring"}, "21": {"ring", "one_device"}}[evaluated]


def test_a_remedy_fits_weights_that_are_not_finite():
    message = "the held-out loss is nan, and the norm of the weights inf: train with a lower --lr"
    assert train_lm.not_finite(math.nan, "bfloat16", math.inf) == message


def test_perplexities_are_compared_by_their_losses():
    """Perplexities beyond the largest float are infinite."""
    for first, second, expected in (
        (1.25, 1.25, 0.0),
        (800.0, 800.0, 0.0),
        (math.log(2.0), math.log(4.0), 0.5),
        (math.log(4.0), math.log(2.0), 1.0),
        (math.nan, 1.0, math.nan),
        (1.0, math.nan, math.nan),
    ):
        a, b = (Evaluation(nll, math.exp(min(nll, 709)), 10) for nll in (first, second))
        a, b = (x._replace(perplexity=math.inf) if x.nll > 709 else x for x in (a, b))
        assert train_lm.difference(a, b) == pytest.approx(expected, abs=1e-15, nan_ok=True)
    enormous, small = Evaluation(5000.0, math.inf, 10), Evaluation(1.0, math.e, 10)
    assert train_lm.difference(enormous, small) > 1e300


def test_a_mesh_of_one_device_has_the_weights_already():
    stats = {"bytes_limit": 2**20, "bytes_in_use": 0}
    devices = np.array([types.SimpleNamespace(memory_stats=lambda: stats)])
    args: Any = types.SimpleNamespace(batch=1, seq_len=64)
    params: Any = {"w": np.zeros(2**20, np.float32)}
    # The batch still needs memory.
    for size, seq_len, lacks in (
        (1, 64, [False, False]),
        (2, 64, [True, True]),
        (1, 2**20, [False, True]),
    ):
        mesh, args.seq_len = types.SimpleNamespace(size=size, devices=devices), seq_len
        run: Any = types.SimpleNamespace(mesh=mesh, config=SMALL)
        assert list(map(bool, run_evaluation.lacking_memory(args, run, params))) == lacks


@pytest.mark.parametrize("option", ["--eval-batches=0", "--one-device=never"])
def test_the_rehearsal_samples_on_one_device_that_evaluates_nothing(
    corpus, tmp_path, monkeypatch, option
):
    given = arguments(corpus, tmp_path, "--mesh=fsdp=2", option)
    args, _ = run_options.parse_args([*given, "--implementation=mosaic_sm90"])
    with pytest.raises(NotImplementedError, match="so evaluation and sampling after"):
        run_evaluation.rehearse(args, run_options.prepare(args))
    args, _ = run_options.parse_args([*given, "--implementation=xla"])
    run, trace, traced = run_options.prepare(args), jax.eval_shape, []

    def recorded(function, *arrays):
        traced.append(arrays)
        return trace(function, *arrays)

    monkeypatch.setattr(jax, "eval_shape", recorded)
    run_evaluation.rehearse(args, run)
    params, prompt = traced[-1]
    # One device's, not those of the run's mesh.
    assert {x.sharding for x in jax.tree.leaves(params)} == {None}
    assert prompt.shape == (args.seq_len,)  # Shorter than the longest prompt.


def test_the_steps_of_a_balanced_run_are_compiled_ahead():
    """A call finds what a thread has compiled, for the layouts that batches may have."""
    args: Any = types.SimpleNamespace(layout="balanced", seq_len=256)
    ones: dict[str, Any] = dict.fromkeys(TRAINING_AXES, 1)
    mesh = mesh_of(**ones | {"seq": 2})
    layouts = run_batches.layouts(args, mesh)
    assert layouts == ("balanced:0", "balanced:128")
    optimizer, options = optax.sgd(1e-3), {"mesh": mesh, "seq_axis": "seq"}
    _, params, opt_state = init_train_state(SMALL, optimizer, seed=0, layout="zigzag", **options)

    def make_step(layout):
        graphdef, _ = abstract_decoder(SMALL, layout=layout, **options)
        return make_train_step(graphdef, optimizer, compiler_options=QUICK)

    rows = np.random.default_rng(0).integers(0, 48, (1, 257))
    ids = np.repeat([[1, 2]], [100, 157], axis=1)
    layout, batch = make_batch(rows, layout="balanced", num_shards=2, segment_ids=ids)
    arrays = params, opt_state, place_batch(batch, mesh)
    steps = run_batches.compiled_steps(make_step, layouts, arrays, SMALL)
    compiled = []

    def listen(event, duration_secs, **_):
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        metrics = steps[layout](*arrays)[2]
        seen = list(compiled)
        jax.jit(lambda x: x + 1.5)(np.zeros(7, np.float32))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in seen if "backend_compile" in event]
    assert [event for event in compiled if "backend_compile" in event]
    assert math.isfinite(float(metrics["loss"]))
    # With one layout, the first call compiles.
    args.layout = "zigzag"
    assert run_batches.layouts(args, mesh) == ("zigzag",)
    args.layout = "balanced"
    assert run_batches.layouts(args, mesh_of(**ones)) == ("contiguous",)
