"""Compares strategies for attention, training, packed documents: ``python -m burst_jax.plan``."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp

from burst_jax.array_files import map_array
from burst_jax.command_line import Parser, check_output, file, in_flags, integer, number
from burst_jax.errors import printable, shown
from burst_jax.json_files import MAX_INDEX_BYTES, parse, read_bounded
from burst_jax.models import DecoderConfig, check_trained_length, load_config
from burst_jax.models.hf.trained_length import warn_beyond
from burst_jax.plan import (
    GPUS,
    AttentionPlan,
    DocumentsPlan,
    TrainingPlan,
    attention,
    documents,
    training,
)
from burst_jax.plan.presets import SHAPES, config_of
from burst_jax.training.adam import Moments

_UNITS = {"": 1, "K": 2**10, "M": 2**20}


def tokens(text: str) -> int:
    """A number of tokens from the command line, from 1 to 1024M: 65536, 64K, 1M."""
    found = re.fullmatch(r"([0-9]{1,10})([KM]?)", text.upper())
    count = int(found.group(1)) * _UNITS[found.group(2)] if found else 0
    if not 1 <= count <= 2**30:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number of tokens: 65536, 64K, 1M")
    return count


class _Options(NamedTuple):
    """The options that only some plans have."""

    general: list[argparse.Action]
    of_attention: list[argparse.Action]
    of_training: list[argparse.Action]


def _parser() -> tuple[Parser, _Options]:
    """The parser, and its options for one attention or training, one attention, and training."""
    parser = Parser(
        prog="python -m burst_jax.plan",
        description="Compares strategies to shard one attention, or with --model to train, or "
        "layouts of the packed --documents.",
    )
    parser.add_argument("--length", type=tokens, required=True, help="tokens: 65536, 64K, 1M")
    add = parser.add_argument
    general = [
        add("--batch", type=integer(1), help="batch size (default: 1)"),
        add("--gpu", type=str.lower, choices=sorted(GPUS), help="default: h200"),
        add(
            "--host-link", type=number(1e-3),
            help="GB/s of one GPU to another host (default: that of --gpu, 25 for A100, otherwise "
            "50)",
        ),
    ]  # fmt: skip
    parser.add_argument("--hosts", type=integer(1, 1024), default=1)
    parser.add_argument("--gpus-per-host", type=integer(1, 72), default=8)
    parser.add_argument(
        "--json", type=file, metavar="FILE",
        help="also write the plan here, with the recommended mesh and arguments; - is stdout",
    )  # fmt: skip
    add = parser.add_argument_group("one attention").add_argument
    of_attention = [
        add("--heads", type=integer(1), dest="num_heads", help="query heads (default: 32)"),
        add(
            "--kv-heads", type=integer(1), dest="num_kv_heads",
            help="key/value heads (default: as many as heads)",
        ),
        add("--head-dim", type=integer(1), help="head dim of queries and keys (default: 128)"),
        add("--value-head-dim", type=integer(1), help="head dim of values (default: that of keys)"),
        add("--full", action="store_false", default=None, dest="is_causal", help="no causal mask"),
        add("--window", type=tokens, help="local_window_size, to the left"),
        add("--chunk", type=tokens, dest="attention_chunk_size", help="attention_chunk_size"),
        add(
            "--block-mask", type=file, metavar="FILE.npy",
            help="block-sparse mask, by numpy.save",
        ),
    ]  # fmt: skip
    parser.add_argument("--model", help=f"a checkpoint folder, or {', '.join(SHAPES)}")
    add = parser.add_argument_group("a training step, of --model").add_argument
    of_training = [
        add(
            "--moments", choices=get_args(Moments), help="memory of AdamW's moments (default: both)"
        ),
        add(
            "--moment-dtype", choices=("float32", "bfloat16"), help="their dtype (default: float32)"
        ),
        add("--all", action="store_true", default=None, help="print every strategy"),
        add(
            "--ignore", nargs="+", metavar="KEY",
            help="keys of the folder's config.json and tensors that do not change the computation",
        ),
    ]  # fmt: skip
    parser.add_argument(
        "--documents", type=file, metavar="FILE.json",
        help="the document lengths of every sequence on one ring, [[900, 300], [1200]]: compares "
        "layouts and ring sizes",
    )  # fmt: skip
    return parser, _Options(general, of_attention, of_training)


def main(arguments: list[str] | None = None) -> None:
    """Prints the plan."""
    parser, options = _parser()
    args = parser.parse_args(arguments)
    if args.documents is not None:
        wrong, why = [x for each in options for x in each], "is not for --documents: leave it out"
        if args.model is not None:
            parser.error("--model is given with --documents: plan them one after the other")
    elif args.model is None:
        wrong, why = options.of_training, "needs --model"
    else:
        wrong = options.of_attention
        why = "is for one attention, and --model has its own: leave it out"
    for action in wrong:
        if getattr(args, action.dest) is not None:
            parser.error(f"{action.option_strings[0]} {why}")
    cluster = {"hosts": args.hosts, "gpus_per_host": args.gpus_per_host}
    general = {action.dest: getattr(args, action.dest) for action in options.general}
    if args.json not in (None, Path("-")):
        try:
            check_output(args.json)
        except OSError as error:
            parser.error(f"--json: {error}")
    try:
        if args.documents is not None:
            found = _documents(args.documents, args.length, cluster)
        else:
            cluster |= {"length": args.length} | _given(general)
            if args.model is None:
                names = (action.dest for action in options.of_attention)
                found = _attention(cluster, _given({name: getattr(args, name) for name in names}))
            else:
                found = training(
                    _config(args.model, args.length, args.ignore or ()), **cluster,
                    moments=args.moments,
                    moment_dtype=args.moment_dtype or "float32",
                )  # fmt: skip
    except (ValueError, NotImplementedError, OSError) as error:
        of_plan = options.of_attention if args.model is None else options.of_training
        # A single word, like length, may mean something else; is_causal is the opposite of --full.
        names = [x for x in of_plan if "_" in x.dest and x.dest != "is_causal"]
        flags = {"local_window_size": "--window", "gpus_per_host": "--gpus-per-host"}
        flags |= {x.dest: x.option_strings[0] for x in names}
        parser.error(in_flags(error, **flags))
    text = json.dumps(found.record(), indent=1, allow_nan=False)
    if args.json == Path("-"):
        print(text)
        return
    if isinstance(found, TrainingPlan):
        folder = str(args.model) if Path(str(args.model)).is_dir() else "DIR"
        print(found.table(show_all=bool(args.all), model=folder, ignore=args.ignore or ()))
    else:
        print(found)
    if args.json is not None:
        try:
            args.json.write_text(text + "\n")
        except OSError as error:
            parser.error(f"--json: {error}")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _documents(path: Path, length: int, cluster: dict[str, int]) -> DocumentsPlan:
    try:
        return documents(_lengths(path), length=length, **cluster)
    except (ValueError, OSError) as error:
        # The library calls the content of the file batch.
        named = re.sub(r"^batch\b", lambda _: printable(path), str(error))
        raise ValueError(f"--documents: {named}") from error


def _lengths(path: Path) -> list[list[int]]:
    """The document lengths of every sequence in a JSON file."""
    content = parse(read_bounded(path, MAX_INDEX_BYTES), str(path))
    if not isinstance(content, list) or not all(isinstance(each, list) for each in content):
        raise ValueError(
            f"{path} is {shown(content)}: it must be a list of lists, the document "
            "lengths of every sequence"
        )
    return content


def _attention(cluster: dict[str, Any], given: dict[str, Any]) -> AttentionPlan:
    if "window" in given:
        given["local_window_size"] = given.pop("window"), 0
    if "block_mask" in given:
        try:
            given["block_mask"] = map_array(given["block_mask"])
        except (ValueError, OSError) as error:
            raise ValueError(f"--block-mask: {error}") from error
    return attention(**cluster | {"num_heads": 32} | given)


def _config(model: str, length: int, ignore: Sequence[str]) -> DecoderConfig:
    """The decoder of ``--model``; warns of a ``length`` beyond what it was trained on."""
    if not model or not Path(model).is_dir():
        config = config_of(model)
        if ignore:
            raise ValueError(f"--ignore is {shlex.join(ignore)}: it needs a folder as --model")
        warn_beyond(SHAPES[model][1], "--length", length)
        return config
    config = load_config(model, dtype=jnp.bfloat16, param_dtype=jnp.float32, ignore=ignore)
    check_trained_length(config, "--length", length)
    return config


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # End silently in "| head".
    # Without the line of source that warns.
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
    main()
