"""Prints the command of train_lm.py for the recommended strategy of a plan.

python -m burst_jax.plan --model DIR --length 128K --json plan.json
python examples/plan_command.py plan.json --model DIR
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burst_jax.command_line import Parser, file_or_folder
from burst_jax.json_files import MAX_INDEX_BYTES, parse, read_bounded

# Of a plan's record.
_NEEDED = {
    "batch", "cluster", "environment", "evaluation", "length", "moment_dtype", "recommended",
}  # fmt: skip


def flags(estimate: dict[str, Any]) -> list[str]:
    """The flags of train_lm.py for the strategy of an estimate, as a plan's record has it."""
    mesh = estimate["mesh"]
    found = ["--mesh", ",".join(f"{name}={size}" for name, size in mesh.items())]
    split = math.prod(size for name, size in mesh.items() if name != "tensor")
    if estimate["weights"] == "replicated" and split > 1:
        found += ["--weights", "replicated"]
    found += ["--layout", estimate["layout"], "--remat", estimate["remat"]]
    if estimate["expert"]:
        found += ["--expert-axes", ",".join(estimate["expert"])]
    if estimate["remat_layers"] is not None:
        found += ["--remat-layers", str(estimate["remat_layers"])]
    found += ["--mlp-chunks", str(estimate["mlp_chunks"])]
    return found + (["--moments", "host"] if estimate["moments"] == "host" else [])


def command(plan: dict[str, Any], model: str = "DIR", ignore: Sequence[str] = ()) -> str:
    """The command for a plan's recommended strategy.

    Args:
      plan: ``burst_jax.plan.TrainingPlan.record()``.
      model: the checkpoint's folder.
      ignore: the keys of its config.json to ignore.
    """
    cluster, environment = plan["cluster"], plan["environment"]
    hosts, gpus = cluster["hosts"], cluster["gpus"]
    words = [f"{name}={value}" for name, value in environment.items()]
    if hosts > 1:
        words.append(f"srun --nodes={hosts} --ntasks-per-node={gpus} --gpus-per-node={gpus}")
    words += ["python examples/train_lm.py --model", shlex.quote(model)]
    words += [f"--ignore {shlex.join(ignore)}"] if ignore else []
    words += ["--data DATA", *flags(plan["recommended"])]
    words += ["--seq-len", str(plan["length"]), "--batch", str(plan["batch"])]
    if plan["moment_dtype"] != "float32":
        words += ["--moment-dtype", plan["moment_dtype"]]
    # On several hosts the script compares with no device, and one GPU is the mesh itself.
    if hosts == 1 and gpus > 1 and not plan["evaluation"]["device_fits"]:
        words += ["--one-device", "never"]
    return " ".join(words)


def main(argv: list[str] | None = None) -> None:
    """Prints the command."""
    parser = Parser(description="Print the command of train_lm.py for a plan.")
    parser.add_argument("plan", type=file_or_folder, help="of python -m burst_jax.plan --json")
    parser.add_argument("--model", default="DIR", help="folder of the checkpoint")
    parser.add_argument("--ignore", nargs="+", default=(), metavar="KEY", help="of its config.json")
    args = parser.parse_args(argv)
    try:
        plan = parse(read_bounded(Path(args.plan), MAX_INDEX_BYTES), str(args.plan))
        if (
            not isinstance(plan, dict)
            or not plan.keys() >= _NEEDED
            or (plan["evaluation"] is not None and "device_fits" not in plan["evaluation"])
        ):
            raise ValueError(
                f"{args.plan} is no plan of a training step, or one of another version: write one "
                "by --json"
            )
        if plan["recommended"] is None:
            raise ValueError(f"{args.plan} recommends no strategy: none fits")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(command(plan, args.model, args.ignore))


if __name__ == "__main__":
    main()
