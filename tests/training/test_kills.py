"""A killed run of examples/train_lm.py resumes as if it had not been killed.

``--kills 20`` kills it 20 times and prints when; the default is once.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
import train_lm
from data_files import write_words
from local_processes import Program
from run_log import RunLog, read_metrics

from burst_jax.training import Checkpoints

EVERY = 3  # Steps between two checkpoints.
TINY = (
    "--layers=1 --embed-dim=16 --heads=2 --kv-heads=1 --head-dim=8 --mlp-dim=16 --seq-len=32 "
    f"--batch=2 --eval-batches=1 --sample-tokens=0 --checkpoint-every={EVERY} --resume=auto "
    "--layout=balanced --mesh=seq=2"
).split()
PATIENCE = 200  # Seconds, several times what a run takes on busy cores.


class Training:
    """A run in one folder, whose processes are killed and started again."""

    def __init__(self, out: Path, steps: int, corpus: Path) -> None:
        self.out, self.checkpoints, self.metrics = out, out / "checkpoints", out / "metrics.jsonl"
        self._steps = steps
        self._printed = out.with_suffix(".printed")
        self._command = [str(train_lm.__file__), *TINY]
        self._command += [f"--steps={steps}", f"--out={out}", f"--data={corpus}"]

    @property
    def printed(self) -> str:
        """The output of the last process so far."""
        return self._printed.read_text()

    def run(self, kill_when: Callable[[], bool] | None = None, delay: float = 0) -> None:
        """Runs a process to its end, or kills it some seconds after a condition holds."""
        environment = {
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.out.with_name("cache")),
            # Processes that are killed only read the cache.
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000" if kill_when else "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._printed.unlink(missing_ok=True)
        process = Program(self._command, environment, self._printed, self._printed)
        try:
            end = time.monotonic() + PATIENCE
            while process.poll() is None and not (kill_when and kill_when()):
                assert time.monotonic() < end, self.printed
                time.sleep(0.001)
            time.sleep(delay)
        finally:
            process.kill()
        assert process.wait() == (-signal.SIGKILL if kill_when else 0), self.printed

    def kill(self, draw: random.Random, delay: float, *, while_writing: bool) -> bool:
        """Kills a process some steps after its first one, or while it writes a checkpoint.

        Returns whether a partial checkpoint is left.
        """
        start = Checkpoints(self.checkpoints).latest() or 0
        # Not before two checkpoints are complete.
        due = start + (EVERY * draw.randint(3, 4) if while_writing else draw.randint(1, 9))

        def is_partial() -> bool:
            return any(self.checkpoints.glob(f"{due}.orbax-checkpoint-tmp*"))

        def is_reached() -> bool:
            started = f"step {start + 1}/" in self.printed  # The log of the last process is cut.
            return started and max(read_metrics(self.metrics), default=0) >= due

        self.run(is_partial if while_writing else is_reached, delay)
        return is_partial()

    def losses(self) -> list[float]:
        """The losses of all steps, each logged once."""
        records = read_metrics(self.metrics)
        assert list(records) == list(range(1, self._steps + 1))
        assert self.metrics.read_text().count("\n") == self._steps
        return [record["loss"] for record in records.values()]


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, kills):
    corpus = write_words(tmp_path / "corpus")
    draw, steps = random.Random(kills), 5 * EVERY * kills  # Outlasts all kills.
    whole, killed = (Training(tmp_path / name, steps, corpus) for name in ("whole", "killed"))
    whole.run()
    partial = 0
    for index in range(kills):
        delay = draw.uniform(0, 0.05) if index else 0  # The first kill leaves a partial checkpoint.
        left = killed.kill(draw, delay, while_writing=index % 2 == 0)
        partial += left
        print(f"at step {max(read_metrics(killed.metrics))}{', a partial checkpoint left' * left}")
    assert partial > 0
    killed.run()
    assert killed.losses() == whole.losses()  # Bit for bit.
    first, second = ((run.out / "summary.json").read_text() for run in (whole, killed))
    assert first == second


# --- what a run resumes from ---------------------------------------------------------------------


def arguments_of(**changed):
    given = {"seq_len": 32, "batch": 2, "packing": "first_fit", "steps": 9, "seed": 0}
    given |= {"model": None, "lr": 1e-3, "dtype": "float32", "moment_dtype": "float32"}
    given |= {"text_key": "text", "mixer": "attention", "full_attention_interval": None}
    given |= {"chat": False}
    given |= dict.fromkeys(("lora_rank", "lora_alpha", "lora_targets"))
    here = {"resume": "auto", "checkpoint_dir": "here", "out": Path("nowhere")}
    return argparse.Namespace(**given | here | changed)


def test_a_run_resumes_only_with_the_same_data_and_schedule(tmp_path, capsys):
    state = {"x": jnp.arange(3.0)}
    # Another dtype makes another state, and the message must name the flag.
    half = {"x": jnp.arange(3, dtype=jnp.bfloat16)}, "--moment-dtype is bfloat16: the run of .* has"
    other_text = state, r"--text-key is body: the run of .* has text; use the same"
    saved = train_lm.same_arguments(arguments_of())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, {"arguments": saved, "loader": "its state"})
        checkpoints.wait()
        step, restored, extra = train_lm.restore(arguments_of(), checkpoints, state)
        assert (step, extra["loader"]) == (3, "its state")
        assert jnp.array_equal(restored["x"], state["x"])
        for changed, abstract, message in (
            ({"seed": 1}, state, "--seed is 1: the run of the checkpoints in here has 0; use the"),
            ({"model": "there"}, state, r"--model is there: .* has None"),
            ({"lora_rank": 8}, state, r"--lora-rank is 8: .* has None"),
            ({"moment_dtype": "bfloat16"}, *half),
            ({"text_key": "body"}, *other_text),
            ({"chat": True}, state, r"--chat is True: the run of .* has False; use the same"),
            ({"resume": "never"}, state, r"--resume is never, and .* holds checkpoints"),
        ):
            with pytest.raises(ValueError, match=message):
                train_lm.restore(arguments_of(**changed), checkpoints, abstract)
        capsys.readouterr()
        train_lm.restore(arguments_of(lr=2e-3), checkpoints, state)
        assert "--lr changed from 0.001 to 0.002" in capsys.readouterr().out
        del saved["moment_dtype"], saved["text_key"], saved["chat"]  # An old checkpoint.
        checkpoints.save(4, state, {"arguments": saved, "loader": "its state"})
        checkpoints.wait()
        assert train_lm.restore(arguments_of(), checkpoints, state)[0] == 4
        with pytest.raises(ValueError, match=half[1]):
            train_lm.restore(arguments_of(moment_dtype="bfloat16"), checkpoints, half[0])
        with pytest.raises(ValueError, match=other_text[1]):
            train_lm.restore(arguments_of(text_key="body"), checkpoints, state)


def test_a_run_does_not_resume_in_the_metrics_of_another(tmp_path):
    state, out = {"x": jnp.arange(3.0)}, tmp_path / "out"
    extra = {"arguments": train_lm.same_arguments(arguments_of()), "loader": None}
    with RunLog(out, 9, tokens_per_step=8, flops_per_step=1.0, peak=None) as log:
        for step in range(1, 6):
            log.step(step, {"loss": 2.5, "grad_norm": 1.0})
    message = (
        r"--out is .*out, whose metrics.jsonl belongs to another run than the checkpoints "
        r"in here: the losses at step 4 are 2.5 and 1.5; use another --out, or the one of"
    )
    with Checkpoints(tmp_path / "saved") as checkpoints:
        # An old checkpoint without a loss fits any metrics.
        for step, loss in ((2, {}), (3, {"loss": 2.5}), (4, {"loss": 1.5})):
            checkpoints.save(step, state, extra | loss)
            checkpoints.wait()
            if step < 4:
                assert train_lm.restore(arguments_of(out=out), checkpoints, state)[0] == step
        with pytest.raises(ValueError, match=message):
            train_lm.restore(arguments_of(out=out), checkpoints, state)
