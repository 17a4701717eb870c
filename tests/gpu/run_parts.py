"""``make gpu``: whether what people run on GPUs is right, on this machine's GPUs, in minutes.

    python tests/gpu/run_parts.py            # every part, concurrently
    python tests/gpu/run_parts.py rings      # the parts whose names contain a word
    python tests/gpu/run_parts.py --small    # small sizes on 4 CPU devices, to test this script

It prints a line for each part: its name, what became of it, seconds, and the figures that matter. A
part that fails does not stop the others; the end of its output follows its line. All output is kept
in ``--out``. It installs nothing: parts that need a missing package are not run.

Exit status: 0 if every part passed, 1 if one failed, 3 if none failed but some were not run, 2 for
a machine without a GPU or a mistake in the command line.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PASSED, FAILED, MISUSED, NOT_RUN = 0, 1, 2, 3
# Seconds that the longest drawn program takes, and the least for which a process is worth starting.
_LONGEST, _SHORTEST = 150, 45
# Lines of a failed process that are shown.
_SHOWN = 40
_FIGURE = re.compile(r"^figure: (\{.*\})$", re.MULTILINE)
# What the training script prints: the two perplexities are compared by itself.
_DIFFERENCE = re.compile(r"^ +relative difference (\S+)$", re.MULTILINE)
# What the script of drawn local calls prints at the end.
_LOCAL = re.compile(r"^drawn calls: (\d+) right .*?(\d+) wrong", re.MULTILINE)
_DEVICES = """
import json, jax
d = jax.devices()
print(json.dumps({"count": len(d), "platform": d[0].platform, "kind": d[0].device_kind,
                  "capability": str(getattr(d[0], "compute_capability", "")),
                  "jax": jax.__version__}))
"""


@dataclasses.dataclass(frozen=True)
class Part:
    """Processes that together show one thing.

    Attributes:
      name: printed.
      commands: arguments of Python, one process each.
      limit: seconds that a process may run.
      memory: share of a GPU's memory that a process may allocate.
      needs: importable packages.
      least: of these figures, counts of all processes together.
      draws: whether the processes run drawn programs as long as there is time; they get the option
        ``--minutes``.
    """

    name: str
    commands: Sequence[Sequence[str]]
    limit: float = float("inf")
    memory: float = 0.05
    needs: tuple[str, ...] = ()
    least: dict[str, int] = dataclasses.field(default_factory=dict)
    draws: bool = False


@dataclasses.dataclass(frozen=True)
class Times:
    """Of a run, by ``time.monotonic``: when no drawn program starts any more, and its end."""

    last_start: float
    end: float

    @classmethod
    def within(cls, limit: float) -> Times:
        """From now on."""
        now = time.monotonic()
        return cls(now + max(limit - _LONGEST, limit / 2), now + limit)


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended: why it failed, or None; its output, and the seconds it ran."""

    failure: str | None
    output: str
    began: float
    ended: float


def parts_of(devices: dict[str, Any], out: Path, small: bool, workers: int) -> list[Part]:
    """The parts: what users run, then what is drawn, in ``workers`` processes each."""
    script = {path.stem: str(path) for path in HERE.glob("*.py")}
    size = ["--small"] if small else []
    peer = ("torch", "transformers", "safetensors", "tokenizers")
    train = [str(ROOT / "examples" / "train_lm.py"), "--out", str(out / "training")]
    steps = "--steps 20"
    if small:
        steps = (
            "--steps 2 --seq-len 128 --layers 1 --embed-dim 32 --heads 2 --kv-heads 1 "
            "--head-dim 16 --eval-batches 1 --sample-tokens 0"
        )
    train += steps.split()
    # The script leaves one device out where it lacks the memory: that is no comparison.
    least = {"comparisons": 1}
    needs = "grain", "tokenizers"
    parts = [Part("training", [train], 400, memory=0.3, needs=needs, least=least)]
    for name, text in (("fine_tuning", "fine-tuning with LoRA"), ("generation", "generation")):
        command = [script[name], "--out", str(out / name), *size]
        needs = (*peer, "grain", "qwix") if name == "fine_tuning" else peer
        parts.append(Part(text, [command], 400, memory=0.1, needs=needs))
    if "mosaic_sm80" in families(devices):
        parts.append(Part("decoding kernels", [[script["decoding_steps"]]], 200))
    for family in families(devices):
        rings = [
            script["drawn_rings"],
            "--implementation",
            family,
            "--next",
            str(out / f"next_{family}"),
        ]
        rings += ("--count 3 --tokens 128 160" if small else "--count 90").split()
        commands = [[*rings, "--worker", str(i)] for i in range(workers)]
        # Every layout and every mask; of the small ones, a mesh of each kind but Ulysses.
        least = {"rings": 3 if small else 9}
        parts.append(Part(f"rings, {family}", commands, memory=0.08, least=least, draws=True))
    for family in families(devices):
        if family != "xla":
            parts.append(local_calls(family, workers))
        parts.append(linear_attention(family, script["drawn_linear"], workers, small))
    return parts


def linear_attention(family: str, script: str, workers: int, small: bool) -> Part:
    """Drawn calls of the gated delta rule, over all devices and on one."""
    command = [script, "--implementation", family, "--step", str(workers)]
    command += ("--head-dim 16 --count 2 --threads 2" if small else "--count 100").split()
    commands = [[*command, "--first", str(i)] for i in range(workers)]
    least = {"linear calls": 2 if small else 8}
    return Part(f"linear attention, {family}", commands, least=least, draws=True)


def local_calls(family: str, workers: int) -> Part:
    """Drawn calls of local attention, on one device."""
    script = [str(ROOT / "tests" / "pallas_kernels" / "run_drawn.py"), "--workers", "1"]
    script += f"--family {family} --programs 1000".split()
    commands = [[*script, "--seed", str(1000 * i)] for i in range(workers)]
    return Part(
        f"local calls, {family}", commands, least={"programs": 10}, draws=True,
        needs=("pytest",),  # What the tests share imports it.
    )  # fmt: skip


def families(devices: dict[str, Any]) -> list[str]:
    """The kernels that run on these devices. Newer GPUs run Ampere's, too."""
    if devices["platform"] != "gpu":
        return ["xla"]
    hopper = ["mosaic_sm90"] if devices["capability"] == "9.0" else []
    return [*hopper, "mosaic_sm80"]


def find_devices(small: bool) -> dict[str, Any]:
    """What JAX finds here, in a process of its own: this one must not hold a GPU's memory.

    Raises:
      RuntimeError: JAX cannot be imported, or finds no GPU.
    """
    done = subprocess.run(
        [sys.executable, "-c", _DEVICES], capture_output=True, text=True, check=False,
        env=environment(small, 0.05), cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"JAX finds no devices:\n{done.stderr.strip()[-2000:]}")
    devices = json.loads(done.stdout.splitlines()[-1])
    if devices["platform"] != "gpu" and not small:
        raise RuntimeError(
            f"JAX finds no GPU here, but {devices['platform']}: install jax[cuda13], or try the "
            "script on CPU devices with --small"
        )
    return devices


def environment(small: bool, memory: float) -> dict[str, str]:
    """Environment variables of a process that shares its GPUs with others."""
    env = dict(os.environ, PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false")
    places = [str(ROOT), str(ROOT / "tests" / "support"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{memory:.3f}"
    if small:
        env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    return env


def missing(part: Part) -> list[str]:
    """The packages that a part needs and this Python lacks."""
    return [name for name in part.needs if importlib.util.find_spec(name) is None]


def run_process(
    part: Part, command: Sequence[str], env: dict[str, str], log: Path, times: Times
) -> Ended:
    """Runs a Python process, and ends it and its children when its time is over."""
    began = time.monotonic()
    limit = min(part.limit, times.end - began)
    if part.draws:
        left = times.last_start - began
        if left < _SHORTEST:  # Those that run have to do.
            return Ended(None, "", began, began)
        command = [*command, "--minutes", f"{left / 60:.3f}"]
    failure = f"the time of the whole run was over before it could start: {log.name}"
    if limit > 0:
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
                env=env, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit)
                failure = f"exit status {status}" if status else None
            except subprocess.TimeoutExpired:
                failure = f"ended after {limit:.0f} s, its limit"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace") if log.exists() else ""
    return Ended(failure, text, began, time.monotonic())


def figures(outputs: Sequence[str]) -> dict[str, Any]:
    """The figures that a part's processes printed, in one: counts are added, others the largest."""
    found: dict[str, Any] = {}
    for output in outputs:
        for line in _FIGURE.findall(output):
            for name, value in json.loads(line).items():
                old = found.get(name, 0)
                found[name] = old + value if isinstance(value, int) else max(old, value)
        if counts := _LOCAL.findall(output):
            right, wrong = map(int, counts[-1])
            for name, count in (("programs", right + wrong), ("wrong", wrong)):
                found[name] = found.get(name, 0) + count
        if differences := _DIFFERENCE.findall(output):
            found["comparisons"] = found.get("comparisons", 0) + len(differences)
            found["perplexities differ by"] = float(differences[-1])
    return found


def report(part: Part, ended: Sequence[Ended], write: Callable[[str], None]) -> bool:
    """Writes the line of a part, with the end of the output of what failed; whether it passed."""
    failed = [each for each in ended if each.failure is not None]
    seconds = max(x.ended for x in ended) - min(x.began for x in ended)
    found = figures([each.output for each in ended])
    few = {name: n for name, n in part.least.items() if found.get(name, 0) < n}
    text = ", ".join(
        f"{value} {name}" if isinstance(value, int) else f"{name} {value:g}"
        for name, value in found.items()
    )
    verdict = "failed" if failed or few else "passed"
    write(f"{part.name:28} {verdict} {seconds:6.0f} s  {text}".rstrip())
    for name, least in few.items():
        write(f"  only {found.get(name, 0)} of at least {least} {name}: set --limit for more time")
    for each in failed:
        write(f"  {each.failure}; the end of its output:")
        for line in each.output.splitlines()[-_SHOWN:] or ["(none)"]:
            write(f"  | {line}")
    return not (failed or few)


def run_parts(
    parts: Sequence[Part], *, out: Path, jobs: int, limit: float, small: bool,
    write: Callable[[str], None],
) -> int:  # fmt: skip
    """Runs the parts, at most ``jobs`` processes at once, and returns the exit status."""
    status, times = PASSED, Times.within(limit)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running: dict[str, list[concurrent.futures.Future[Ended]]] = {}
        able = []
        for part in parts:
            if absent := missing(part):
                write(f"{part.name:28} not run: needs {', '.join(absent)} (pip install them)")
                status = NOT_RUN
            else:
                able.append(part)
        # The first process of every part, then the second ones.
        for i in range(max((len(part.commands) for part in able), default=0)):
            for part in (x for x in able if i < len(x.commands)):
                log = out / f"{re.sub(r'[^a-z0-9_]+', '_', part.name)}_{i}.log"
                env = environment(small, part.memory)
                running.setdefault(part.name, []).append(
                    pool.submit(run_process, part, part.commands[i], env, log, times)
                )
        by_name = {part.name: part for part in parts}
        while running:
            concurrent.futures.wait(
                [x for each in running.values() for x in each if not x.done()],
                timeout=1, return_when=concurrent.futures.FIRST_COMPLETED,
            )  # fmt: skip
            for name in [n for n, each in running.items() if all(x.done() for x in each)]:
                ended = [x.result() for x in running.pop(name)]
                if not report(by_name[name], ended, write):
                    status = FAILED
    return status


def main(argv: list[str] | None = None) -> int:
    """Runs the parts of the command line.

    Returns:
      The exit status.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("words", nargs="*", help="run only the parts whose names contain one of these")
    add("--small", action="store_true", help="small sizes on 4 CPU devices")
    add("--out", type=Path, default=ROOT / "out" / "gpu", help="folder (default: out/gpu)")
    add("--jobs", type=int, help="processes at once (default: half of the CPU cores)")
    add("--limit", type=float, default=450, help="seconds for the whole run (default: 450)")
    args = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    # Each compiles in threads, and shares the GPUs' memory.
    jobs = max(1, min(cores // 2, 12)) if args.jobs is None else args.jobs
    if jobs < 1 or args.limit <= 0:
        parser.error(f"--jobs is {jobs}, --limit {args.limit}: both must be positive")
    start, args.out = time.monotonic(), args.out.resolve()
    try:
        devices = find_devices(args.small)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSED
    workers = max(1, min(3, jobs // (2 * len(families(devices)))))
    parts = parts_of(devices, args.out, args.small, workers)
    chosen = [p for p in parts if not args.words or any(word in p.name for word in args.words)]
    if not chosen:
        parser.error(f"no part has {args.words} in its name: {', '.join(p.name for p in parts)}")
    shutil.rmtree(args.out, ignore_errors=True)  # A run would resume from its checkpoints.
    args.out.mkdir(parents=True)
    print(
        f"{devices['count']} x {devices['kind']}, JAX {devices['jax']}, {jobs} processes at once "
        f"on {cores} cores; output in {args.out}",
        flush=True,
    )
    status = run_parts(
        chosen, out=args.out, jobs=jobs, limit=args.limit - (time.monotonic() - start),
        small=args.small, write=lambda text: print(text, flush=True),
    )  # fmt: skip
    verdict = {PASSED: "all passed", FAILED: "failed", NOT_RUN: "passed, but some were not run"}
    print(f"{verdict[status]}, {time.monotonic() - start:.0f} s in all")
    return status


if __name__ == "__main__":
    sys.exit(main())
