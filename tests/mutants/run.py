"""Mutation testing: which realistic faults of the library do the tests on CPUs notice?

    python tests/mutants/run.py                      every mutant of the table
    python tests/mutants/run.py --only score.py      those whose file, text or tests contain this
    python tests/mutants/run.py --check              whether all mutants still apply; runs nothing

Each mutant is one replacement in a copy of the checkout; its tests run there until one fails. Exit
status: 0 if all mutants are killed, 1 if one survives, 2 if the table does not fit the code.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import MUTANTS

ROOT = Path(__file__).parents[2]
TESTS = "not cuda_compiler and not hopper_kernels and not replay"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One replacement.

    Attributes:
      file: what is changed, from the root.
      old: text that is in the file once.
      new: what replaces it.
      tests: arguments of pytest: files of tests, -k and others.
    """

    file: str
    old: str
    new: str
    tests: str

    def __str__(self):
        old, new = (" ".join(text.split())[:50] for text in (self.old, self.new))
        return f"{self.file}: {old!r} -> {new!r}"

    def problem(self) -> str | None:
        """Why the mutant does not apply, or None."""
        for path in (self.file, *re.findall(r"\S+\.py", self.tests)):
            if not (ROOT / path).exists():
                return f"there is no {path}"
        found = (ROOT / self.file).read_text().count(self.old)
        return None if found == 1 else f"its text is there {found} times"

    def run(self, checkout: Path, timeout: float) -> tuple[str, str]:
        """``(killed, survived or broken; by which test)``."""
        path = checkout / self.file
        text = path.read_text()
        path.write_text(text.replace(self.old, self.new))
        try:
            done = pytest(checkout, self.tests, timeout)
        except subprocess.TimeoutExpired:
            return "killed", f"not finished after {timeout:.0f} s"
        finally:
            path.write_text(text)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if done.returncode == 0:
            return "survived", ""
        if done.returncode in (1, 2) and failed is not None:
            return "killed", failed[1]
        return "broken", (done.stdout + done.stderr)[-500:]


def pytest(checkout: Path, tests: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """The tests that CPUs run, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--no-header", "-m", TESTS]
    # The cache of the checkout itself: most programs are those of the library as it is.
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
    settings = {
        "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }  # fmt: skip
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *shlex.split(tests)], cwd=checkout, text=True,
        env=os.environ | settings, capture_output=True, timeout=timeout, check=False,
    )  # fmt: skip


def copy_checkout(to: Path) -> None:
    """The files that git knows, with changes that are not committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a mutant's file, text or tests")
    parser.add_argument("--check", action="store_true", help="only whether every mutant applies")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds (default: 600)")
    options = parser.parse_args()
    mutants = [Mutant(*row) for row in MUTANTS if any(options.only in text for text in row)]
    problems = {mutant: mutant.problem() for mutant in mutants}
    for mutant, problem in problems.items():
        if problem is not None:
            print(f"does not apply  {mutant}: {problem}")
    mutants = [mutant for mutant in mutants if problems[mutant] is None]
    print(f"{len(mutants)} of {len(problems)} mutants apply")
    if options.check:
        return 2 * (len(mutants) < len(problems))
    counts: collections.Counter[str] = collections.Counter()
    checkouts: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def run(mutant: Mutant) -> tuple[Mutant, str, str, float]:
        checkout, start = checkouts.get(), time.monotonic()
        try:
            return mutant, *mutant.run(checkout, options.timeout), time.monotonic() - start
        finally:
            checkouts.put(checkout)

    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        for job in range(options.jobs):
            copy_checkout(Path(folder) / str(job))
            checkouts.put(Path(folder) / str(job))
        for mutant, verdict, by, seconds in pool.map(run, mutants):
            counts[verdict] += 1
            print(f"{verdict:9} {seconds:4.0f} s  {mutant}{by and '  by ' + by}", flush=True)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("killed", "survived", "broken")))
    return 2 if len(mutants) < len(problems) else int(counts["killed"] < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
