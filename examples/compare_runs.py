"""Compares the loss curves of two runs of train_lm.py.

python examples/compare_runs.py out/ring out/one_gpu
"""

import argparse
import json
from pathlib import Path

import numpy as np


def losses(folder: Path) -> np.ndarray:
    """The training loss of every step of a run."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    if not lines:
        raise SystemExit(f"{file}: no steps of a run; name the --out folder of one")
    return np.array([json.loads(line)["loss"] for line in lines])


def main() -> None:
    """Prints RMS, largest and mean difference over the steps that both runs have."""
    parser = argparse.ArgumentParser(description="Compare the loss curves of two runs.")
    parser.add_argument("runs", nargs=2, type=Path, help="--out folders of train_lm.py")
    first, second = (losses(folder) for folder in parser.parse_args().runs)
    steps = min(len(first), len(second))
    gap = first[:steps] - second[:steps]
    print(
        f"{steps} steps, from {first[0]:.4f} to {first[steps - 1]:.4f} and {second[steps - 1]:.4f} "
        f"nats; difference: RMS {np.sqrt(np.mean(gap**2)):.2e}, largest {np.abs(gap).max():.2e} "
        f"at step {1 + int(np.abs(gap).argmax())}, mean {gap.mean():+.2e}"
    )


if __name__ == "__main__":
    main()
