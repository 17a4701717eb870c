"""Compares a Hugging Face checkpoint on a mesh with one device: ``python -m burst_jax.verify``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from burst_jax.command_line import Parser, check_output, file, folder, integer, use_cpu_devices
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import parse_layout
from burst_jax.models import abstract_decoder, load
from burst_jax.parallel.mesh_option import batch_of_option, mesh_of_option
from burst_jax.parallel.rules import ShardingRules
from burst_jax.parallel.xla_options import set_compiler_options
from burst_jax.training import Batch, make_batch, next_token_loss
from burst_jax.verify.comparison import compare
from burst_jax.verify.report import Report
from pallas_kernels import NAMES


def _layout(text: str) -> Layout:
    try:
        return parse_layout(text)
    except ValueError as error:
        remedy = "or 'balanced' for the zone that the documents need"
        raise argparse.ArgumentTypeError(f"{error}; {remedy}") from None


def _parser() -> Parser:
    parser = Parser(
        prog="python -m burst_jax.verify",
        description="Compares loss and gradients of a Hugging Face checkpoint on a mesh with those "
        "of one device, on random packed documents. Exits with 1 if they differ. The whole model, "
        "its gradients and the activations of one batch must fit on one device.",
    )
    add = parser.add_argument
    add("--model", type=folder, required=True, help="Hugging Face checkpoint: a folder")
    add("--mesh", help="axes and sizes, like fsdp=2,seq=4 (default: seq over all devices)")
    add(
        "--layout",
        type=_layout,
        default="zigzag",
        help="sequence layout (default: zigzag); balanced has the zone of the documents",
    )
    add("--seq-len", type=integer(8), default=1024, help="tokens per sequence (default: 1024)")
    add("--batch", type=integer(1), help="batch size (default: data x fsdp x stage of --mesh)")
    add(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="dtype of weights and computation (default: that of config.json)",
    )  # fmt: skip
    add("--implementation", choices=NAMES, help="attention kernels (default: the fastest)")
    add("--ignore", nargs="+", default=[], metavar="KEY", help="keys of config.json and tensors")
    add("--loss-only", action="store_true", help="compare no gradients: less time and memory")
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="of the documents (default: 0)")
    add("--json", type=file, metavar="FILE", help="also write the report here")
    return parser


def _check(args: argparse.Namespace, mesh: Mesh) -> None:
    """Fills in ``--batch``; raises ValueError for options that do not fit together."""
    if args.json is not None:
        try:
            check_output(args.json)
        except OSError as error:
            raise ValueError(f"--json: {error}") from error
    args.batch = batch_of_option(args.batch, mesh)
    seq = mesh.shape["seq"]
    fit = args.layout.padded_length(args.seq_len, seq)
    if fit != args.seq_len:
        raise ValueError(
            f"--seq-len is {args.seq_len}: the {args.layout} layout over {seq} devices does not "
            f"divide it; use {fit}"
        )


def random_batch(batch: int, length: int, vocabulary: int, seed: int) -> Batch[np.ndarray]:
    """Sequences of two random documents, with padding at the end, in natural order."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, vocabulary, (batch, length + 1))
    ids = np.ones_like(rows)
    for row in ids:
        row[rng.integers(1, length) :] = 2
    ids[:, length + 1 - length // 16 :] = 0
    return make_batch(rows, segment_ids=ids)


def _compare(args: argparse.Namespace, mesh: Mesh) -> Report:
    rules = ShardingRules.of(mesh)
    options: dict[str, Any] = {"rules": rules, "implementation": args.implementation}
    dtype = None if args.dtype is None else jnp.dtype(args.dtype)
    model = load(
        args.model, mesh=mesh, layout=args.layout, dtype=dtype, ignore=args.ignore,
        **options,
    )  # fmt: skip
    config, params = model.config, nnx.split(model)[1]
    batch = random_batch(args.batch, args.seq_len, config.vocab_size, args.seed)
    ids = batch["segment_ids"]
    assert ids is not None
    layout = args.layout.order_of(ids, mesh.shape["seq"]).layout

    def make_loss(mesh: Mesh, layout: str) -> Any:
        graphdef, _ = abstract_decoder(config, mesh=mesh, layout=layout, **options)

        def loss(params: nnx.State, batch: Batch[jax.Array]) -> jax.Array:
            total, count = next_token_loss(nnx.merge(graphdef, params), batch)
            return total / count

        return loss

    return compare(
        make_loss, params, batch, mesh=mesh, layout=layout, batch_axis=rules.batch_axes,
        gradients=not args.loss_only,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Prints the report.

    Returns:
      The exit code: 0 if the losses and gradients agree, otherwise 1.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    use_cpu_devices()
    set_compiler_options()
    try:
        mesh = mesh_of_option(args.mesh)
        _check(args, mesh)
        report = _compare(args, mesh)
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        parser.error(str(error))
    print(report)
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(report.record(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            parser.error(f"--json: {error}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
