"""``make test`` skips no whole file except those that compile for GPUs, and lists what it skips."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_quick_tier_touches_every_file_and_says_what_it_leaves_out():
    quick = re.search(r"^test:.*\n.* -m '(.+?)'", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert quick is not None
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", quick.group(1)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    collected = set(re.findall(r"^tests/\w+/(test_\w+)\.py::", done.stdout, re.MULTILINE))
    files = {path.stem for path in (ROOT / "tests").glob("*/test_*.py")}
    assert files - collected == {name for name in files if name.startswith("test_compiled")}
    for marker in ("slow", "cuda_compiler"):
        assert re.search(rf"\b\d+ tests marked {marker} \(.+\): make test-all", done.stdout)
    assert re.search(r"\b\d+ tests marked replay \(.+\): make replay runs them", done.stdout)
