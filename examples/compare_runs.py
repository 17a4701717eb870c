"""Compares the loss curves of two runs of train_lm.py.

python examples/compare_runs.py out/ring out/one_gpu
"""

from pathlib import Path

import numpy as np
from run_log import METRICS, read_metrics

from burst_jax.command_line import Parser


def losses(folder: Path) -> dict[int, float]:
    """The training loss of a run, by step."""
    read = read_metrics(folder / METRICS).items()
    found = {step: record["loss"] for step, record in read if record.get("loss") is not None}
    if not found:
        raise ValueError(f"{folder / METRICS}: no steps of a run; name the --out folder of one")
    return found


def main(argv: list[str] | None = None) -> None:
    """Prints RMS, largest and mean difference over the steps that both runs have."""
    parser = Parser(description="Compare the loss curves of two runs.")
    parser.add_argument("runs", nargs=2, type=Path, help="--out folders of train_lm.py")
    folders = parser.parse_args(argv).runs
    try:
        runs = [losses(folder) for folder in folders]
        steps = sorted(runs[0].keys() & runs[1].keys())
        if not steps:
            raise ValueError(f"{folders[0]} and {folders[1]} have no step in common")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    first, second = (np.array([run[step] for step in steps]) for run in runs)
    gap = first - second
    print(
        f"{len(steps)} steps, from {first[0]:.4f} to {first[-1]:.4f} and {second[-1]:.4f} "
        f"nats; difference: RMS {np.sqrt(np.mean(gap**2)):.2e}, largest {np.abs(gap).max():.2e} "
        f"at step {steps[int(np.abs(gap).argmax())]}, mean {gap.mean():+.2e}"
    )


if __name__ == "__main__":
    main()
