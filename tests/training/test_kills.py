"""A killed run of examples/train_lm.py resumes as if it had not been killed.

``--kills 20`` kills it 20 times and prints when; the default is a few times.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from killed_runs import EVERY, HEARTBEAT, TRAIN, Training, draw_moments, steps_for

from burst_jax.training import Checkpoints, RunLog

sys.path.insert(0, str(TRAIN.parent))
import train_lm

MESH = "--mesh=fsdp=2,seq=2"
# Which of two processes is killed, and when. Process 0 writes the log and completes checkpoints.
PAIR_KILLS = [(1, "writing"), (0, "step"), (1, "step"), (0, "writing")]
# The other one's last message. JAX notices at once that process 0, the coordinator, is gone.
LAST_WORDS = {
    0: r"the leader task was preempted/died/restarted",
    1: r"stopped sending heartbeats\):\n1\n|Task 1 heartbeat timeout",
}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    words = np.random.default_rng(0).choice(["ring ", "burst ", "stripe\n"], 3000)
    for index, part in enumerate(np.array_split(words, 4)):
        (folder / f"{index}.txt").write_text("".join(part))
    return folder


def damage_newest(run: Training) -> tuple[Path, Path, int]:
    """Truncates a file of the newest checkpoint; returns checkpoint, file and old size."""
    newest = run.checkpoints / str(Checkpoints(run.checkpoints).latest())
    file = max((newest / "d").iterdir(), key=lambda file: file.stat().st_size)
    size = file.stat().st_size
    os.truncate(file, size - 5)
    return newest, file, size


def kill_one_of_two(run: Training, gone: int, when: str) -> None:
    """Kills one process of a resumed pair; the other one ends in time and names it."""
    with run.start_pair() as pair:
        # Two checkpoints are complete by then.
        due = pair[0].until_first_step() + 3 * EVERY
        if when == "writing":
            pair[0].until(lambda: bool(run.half(due)))
        else:
            pair[0].until(lambda: run.reached() >= due)
        pair[gone].kill()
        killed = time.monotonic()
        assert pair[1 - gone].wait() != 0
        took = time.monotonic() - killed
        print(f"process {gone} killed at {when}: the other ended after {took:.1f} s")
        # It takes HEARTBEAT seconds; the rest is for a busy machine.
        assert took < 2 * HEARTBEAT
        assert re.search(LAST_WORDS[gone], pair[1 - gone].errors), pair[1 - gone].errors


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(corpus, tmp_path, kills):
    moments = draw_moments(kills, seed=kills)
    steps, cache = steps_for(moments), tmp_path / "cache"
    whole, killed, pair = (
        Training(tmp_path / name, steps, corpus, cache, MESH) for name in ("whole", "killed", "two")
    )
    whole.finish()

    halves = 0
    for moment in moments:
        half = killed.kill_at(moment)
        halves += half
        print(f"{moment}: at step {killed.reached()}{', half a checkpoint left' if half else ''}")
    assert halves > 0
    killed.finish()
    assert killed.losses() == whole.losses()  # Bit for bit.
    first, second = ((run.out / "summary.json").read_text() for run in (whole, killed))
    assert first == second

    # The same with one of two processes, and finally one process on another mesh.
    for gone, when in PAIR_KILLS[: 1 + kills // 6]:
        kill_one_of_two(pair, gone, when)
    moved = Training(tmp_path / "moved", steps, corpus, cache, "--mesh=seq=4")
    shutil.copytree(pair.out, moved.out)
    newest, file, size = damage_newest(moved)
    with moved.start() as process:
        assert process.wait() == 0, process.errors
    before = re.findall(r"resuming from step (\d+)", process.out)[0]
    assert int(before) == int(newest.name) - EVERY
    assert (
        f"checkpoint {newest} is damaged: {file.relative_to(newest)}: has {size - 5} bytes, {size} "
        f"were written; restoring {newest.with_name(before)} instead"
    ) in process.errors
    np.testing.assert_allclose(moved.losses(), whole.losses(), rtol=1e-5)

    if len(moments) >= 20:  # Too slow for the default.
        other = Training(tmp_path / "other", steps, corpus, cache, MESH)
        for run in (pair, other):
            with run.start_pair() as processes:
                assert [process.wait() for process in processes] == [0, 0], processes[0].errors
        assert pair.losses() == other.losses()


# --- what a run resumes from ---------------------------------------------------------------------


def arguments_of(**changed):
    given = {"seq_len": 32, "batch": 2, "packing": "first_fit", "steps": 9, "seed": 0}
    given |= {"model": None, "lr": 1e-3, "dtype": "float32", "moment_dtype": "float32"}
    given |= dict.fromkeys(("lora_rank", "lora_alpha", "lora_targets"))
    here = {"resume": "auto", "checkpoint_dir": "here", "out": Path("nowhere")}
    return argparse.Namespace(**given | here | changed)


def test_a_run_resumes_only_with_the_same_data_and_schedule(tmp_path, capsys):
    state = {"x": jnp.arange(3.0)}
    # Another dtype makes another state, and the message must name the flag.
    half = {"x": state["x"].astype(jnp.bfloat16)}
    half_message = "--moment-dtype is bfloat16: the run of .* has float32"
    with Checkpoints(tmp_path) as checkpoints:
        saved = train_lm.same_arguments(arguments_of())
        checkpoints.save(3, state, {"arguments": saved, "loader": "its state"})
        checkpoints.wait()
        step, restored, extra = train_lm.restore(arguments_of(), checkpoints, state)
        assert (step, extra["loader"]) == (3, "its state")
        assert jnp.array_equal(restored["x"], state["x"])
        for changed, abstract, message in (
            (
                {"seed": 1},
                state,
                "--seed is 1: the run of the checkpoints in here has 0; use the s",
            ),
            ({"model": "there"}, state, r"--model is there: .* has None"),
            ({"lora_rank": 8}, state, r"--lora-rank is 8: .* has None"),
            ({"moment_dtype": "bfloat16"}, half, half_message),
            ({"resume": "never"}, state, r"--resume is never, and .* holds checkpoints"),
        ):
            with pytest.raises(ValueError, match=message):
                train_lm.restore(arguments_of(**changed), checkpoints, abstract)
        capsys.readouterr()
        train_lm.restore(arguments_of(lr=2e-3), checkpoints, state)
        assert "--lr changed from 0.001 to 0.002" in capsys.readouterr().out
        del saved["moment_dtype"]  # An old checkpoint.
        checkpoints.save(4, state, {"arguments": saved, "loader": "its state"})
        checkpoints.wait()
        assert train_lm.restore(arguments_of(), checkpoints, state)[0] == 4
        with pytest.raises(ValueError, match=half_message):
            train_lm.restore(arguments_of(moment_dtype="bfloat16"), checkpoints, half)


@pytest.mark.parametrize("loss", [1.5, 2.5, None])
def test_a_run_does_not_resume_in_the_metrics_of_another(tmp_path, loss):
    """``loss``: in the metrics; an old checkpoint without one fits any."""
    state, out = {"x": jnp.arange(3.0)}, tmp_path / "out"
    extra = {"arguments": train_lm.same_arguments(arguments_of()), "loader": None}
    with Checkpoints(tmp_path / "saved") as checkpoints:
        checkpoints.save(3, state, extra if loss is None else extra | {"loss": 1.5})
        checkpoints.wait()
        with RunLog(out, 9, tokens_per_step=8, flops_per_step=1.0, peak=None) as log:
            for step in range(1, 6):
                log.step(step, {"loss": loss or 9.0, "grad_norm": 1.0})
        if loss != 2.5:
            assert train_lm.restore(arguments_of(out=out), checkpoints, state)[0] == 3
            return
        message = (
            r"--out is .*out, whose metrics.jsonl belongs to another run than the checkpoints in "
            r"here: the losses at step 3 are 2.5 and 1.5; use another --out, or the one of these"
        )
        with pytest.raises(ValueError, match=message):
            train_lm.restore(arguments_of(out=out), checkpoints, state)
