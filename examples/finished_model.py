"""A model folder that is used as it is, not trained: the options of a command that name it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from run_options import check_model

from burst_jax import ShardingRules, models
from burst_jax.layouts.permutation import LAYOUTS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the model, and how it is computed, to a command line."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with config.json and safetensors files")
    add("--adapter", type=Path, help="folder of low-rank adapters beside --model, as peft has them")
    add("--mesh", help="like fsdp=2,seq=4 (default: seq over all devices)")
    add("--layout", choices=LAYOUTS, default="zigzag", help="order of the tokens")
    add("--implementation", help="local attention (default: the fastest that can run)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: bfloat16")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError if a folder is not there."""
    check_model(args.model)
    if args.adapter is not None and not args.adapter.is_dir():
        raise ValueError(f"--adapter is {args.adapter}: there is no such folder")


def load(args: argparse.Namespace, mesh: Mesh) -> models.Decoder:
    """The decoder on a mesh; its adapters, if it has any, are added to its weights.

    Raises:
      OSError, ValueError, NotImplementedError, ImportError: as :func:`burst_jax.models.load` and
        :func:`burst_jax.models.load_adapter`.
    """
    options: Any = {"mesh": mesh, "rules": ShardingRules.of(mesh), "layout": args.layout}
    model = models.load(
        args.model, dtype=jnp.dtype(args.dtype), implementation=args.implementation, **options
    )
    if args.adapter is None:
        return model
    return models.merge_lora(models.load_adapter(model, args.adapter))
