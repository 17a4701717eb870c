"""Compares the ways to split an attention, or a training step: ``python -m burst_jax.plan``."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from burst_jax.plan import GPUS, Plan, TrainingPlan, attention, training
from burst_jax.plan.shapes import SHAPES, config_of
from burst_jax.plan.training_table import table

_UNITS = {"": 1, "K": 2**10, "M": 2**20}
# What says one attention, and what says a training step. None is not given.
_ATTENTION = ("heads", "kv_heads", "head_dim", "value_head_dim", "full", "window", "block_mask")
_TRAINING = ("moments", "moment_dtype", "all")


def tokens(text: str) -> int:
    """A number of tokens: 65536, 64K, 1M."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens: 65536, 64K, 1M")
    return int(found.group(1)) * _UNITS[found.group(2)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m burst_jax.plan",
        description="Compares the ways to split one attention, or with --model those to train.",
    )
    parser.add_argument("--length", type=tokens, required=True, help="tokens: 65536, 64K, 1M")
    parser.add_argument("--batch", type=int, default=1, help="rows")
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS))
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gpus-per-host", type=int, default=8)
    parser.add_argument(
        "--host-link", type=float, default=50.0, help="GB/s of one GPU to another host"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write all of it here, too, with the recommended mesh and arguments; - is stdout",
    )  # fmt: skip
    add = parser.add_argument_group("one attention").add_argument
    add("--heads", type=int, help="query heads (default: 32)")
    add("--kv-heads", type=int, help="default: as many as heads")
    add("--head-dim", type=int, help="features of a head (default: 128)")
    add("--value-head-dim", type=int, help="features of a value (default: as of a key)")
    add("--full", action="store_true", default=None, help="no causal mask")
    add("--window", type=tokens, help="local_window_size, to the left")
    add("--block-mask", type=Path, metavar="FILE.npy", help="a table of blocks, by numpy.save")
    add = parser.add_argument_group("a training step").add_argument
    add("--model", help=f"a model folder, or {', '.join(SHAPES)}")
    add("--moments", choices=("device", "host"), help="of AdamW (default: compares both)")
    add("--moment-dtype", choices=("float32", "bfloat16"), help="of AdamW (default: float32)")
    add("--all", action="store_true", default=None, help="print every way")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Prints the plan."""
    parser = _parser()
    args = parser.parse_args(arguments)
    wrong, why = (_TRAINING, "needs --model") if args.model is None else (
        _ATTENTION, "is given beside --model, which says it: leave it out"
    )  # fmt: skip
    for name in wrong:
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} {why}")
    try:
        found = _attention(args) if args.model is None else _training(args)
    except (ValueError, NotImplementedError, OSError) as error:
        raise SystemExit(str(error)) from error
    text = json.dumps(found.record(), indent=1, allow_nan=False)
    if args.json == Path("-"):
        print(text)
        return
    if args.json is not None:
        try:
            args.json.write_text(text + "\n")
        except OSError as error:
            raise SystemExit(f"--json: {error}") from error
    if isinstance(found, TrainingPlan):
        folder = str(args.model) if Path(str(args.model)).is_dir() else "DIR"
        print(table(found, everything=bool(args.all), model=folder))
    else:
        print(found)


def _cluster(args: argparse.Namespace) -> dict[str, Any]:
    names = ("length", "batch", "gpu", "hosts", "gpus_per_host", "host_link")
    return {name: getattr(args, name) for name in names}


def _attention(args: argparse.Namespace) -> Plan:
    return attention(
        **_cluster(args),
        num_heads=32 if args.heads is None else args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=128 if args.head_dim is None else args.head_dim,
        value_head_dim=args.value_head_dim,
        is_causal=not args.full,
        local_window_size=None if args.window is None else (args.window, 0),
        block_mask=None if args.block_mask is None else _table(args.block_mask),
    )


def _table(path: Path) -> np.ndarray:
    """The array in a file of numpy.save."""
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"--block-mask: {path} is no file of numpy.save: {error}") from error
    if not isinstance(found, np.ndarray):
        raise ValueError(f"--block-mask: {path} holds several arrays: save one, by numpy.save")
    return found


def _training(args: argparse.Namespace) -> TrainingPlan:
    if Path(args.model).is_dir():
        from burst_jax.models import load_config

        # As train_lm.py loads it.
        config = load_config(args.model, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    else:
        config = config_of(args.model)
    dtype = args.moment_dtype or "float32"
    return training(config, **_cluster(args), moments=args.moments, moment_dtype=dtype)


if __name__ == "__main__":
    main()
