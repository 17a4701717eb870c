"""Small runs of ``examples/train_lm.py``."""

from __future__ import annotations

import pytest
import train_lm

TINY = [
    "--layers=1", "--embed-dim=16", "--heads=2", "--kv-heads=1", "--head-dim=8", "--mlp-dim=16",
    "--seq-len=32", "--batch=2", "--eval-batches=1", "--sample-tokens=5",
]  # fmt: skip


def arguments(corpus, out, *more):
    return [f"--data={corpus}", f"--out={out}", *TINY, *map(str, more)]


def error_of(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_lm.main(given)
    return capsys.readouterr().err
