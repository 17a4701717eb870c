"""Trains a byte-level language model on sequences that are sharded over a mesh of devices.

    python examples/train_lm.py                              # Python's own source, all devices
    python examples/train_lm.py --data notes/ --seq-len 4096 --mesh data=2,seq=4

Without GPUs it makes 8 CPU devices and takes two minutes on two cores. With GPUs it takes all of
them and a bigger model. It ends with the held-out perplexity by the ring and by one device, which
must agree, and a sample. ``--out`` gets metrics.jsonl (one line a step: the same seed and batch see
the same data on any mesh, so two runs can be compared), summary.json and loss.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from reporting import Interrupt, Reporter, can_plot, check_out, plot_loss
from text_data import Text, held_out_rows, load_text, training_rows

from burst_jax.layout import Layout, padded_length
from burst_jax.models import Decoder, DecoderConfig, abstract_decoder
from burst_jax.platform import peak_flops, set_compiler_options
from burst_jax.training import (
    evaluate,
    init_train_state,
    make_batch,
    make_eval_step,
    make_optimizer,
    make_train_step,
    place_batch,
)

CPU_DEVICES = 8
DEFAULTS = {
    "cpu": {
        "seq_len": 512,
        "batch": 2,
        "layers": 4,
        "embed_dim": 128,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "steps": 1000,
        "lr": 4e-3,
        "dtype": "float32",
        "eval_batches": 32,
    },
    "gpu": {
        "seq_len": 16384,
        "batch": 2,
        "layers": 6,
        "embed_dim": 1024,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 128,
        "steps": 300,
        "lr": 5e-4,
        "dtype": "bfloat16",
        "eval_batches": 4,
    },
}
# Agreement of the two held-out perplexities to 4 digits.
TOLERANCE = 1e-4
SAMPLE_CONTEXT = 256


class Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message without the usage and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, Parser]:
    """Reads the command line; what depends on the devices stays None."""

    def default(name: str) -> str:
        cpu, gpu = DEFAULTS["cpu"][name], DEFAULTS["gpu"][name]
        return f"(default: {cpu} on CPU, {gpu} on GPUs)"

    parser = Parser(description="Train a byte-level language model on a mesh of devices.")
    add = parser.add_argument
    add("--data", type=Path, help="file or folder (default: Python's own source files)")
    add("--mesh", help="axes and sizes, like data=1,seq=8 (default: all devices on seq)")
    add("--seq-len", type=int, help=f"bytes per row {default('seq_len')}")
    add("--batch", type=int, help=f"rows per step, on all devices {default('batch')}")
    add("--layout", choices=get_args(Layout), default="zigzag", help="order of the tokens")
    add("--layers", type=int, help=f"number of layers {default('layers')}")
    add("--embed-dim", type=int, help=f"width {default('embed_dim')}")
    add("--heads", type=int, help=f"query heads {default('heads')}")
    add("--kv-heads", type=int, help=f"key/value heads {default('kv_heads')}")
    add("--head-dim", type=int, help=f"features per head {default('head_dim')}")
    add("--mlp-dim", type=int, help="hidden features (default: 8/3 of the width, rounded up)")
    add("--steps", type=int, help=f"optimizer steps {default('steps')}")
    add("--lr", type=float, help=f"peak learning rate {default('lr')}")
    add("--dtype", choices=("float32", "bfloat16"), help=f"of the training {default('dtype')}")
    add("--eval-dtype", choices=("float32", "bfloat16"), default="float32", help="of the end")
    add("--eval-batches", type=int, help=f"held-out batches {default('eval_batches')}")
    add("--sample-bytes", type=int, default=200, help="length of the sample (default: 200)")
    add("--implementation", choices=("xla", "triton", "mosaic_gpu"), help="local attention")
    add("--seed", type=int, default=0, help="of weights, data and sample (default: 0)")
    add("--out", type=Path, default=Path("out/train_lm"), help="folder (default: out/train_lm)")
    return parser.parse_args(argv), parser


def make_mesh(text: str | None) -> Mesh:
    """The mesh that ``--mesh`` describes, over the first of all devices."""
    devices = jax.devices()
    sizes = {"data": 1, "seq": len(devices)}
    if text is not None:
        try:
            given = {
                name: int(size) for name, size in (axis.split("=") for axis in text.split(","))
            }
        except ValueError:
            raise ValueError(f"--mesh is {text!r}: write it like data=1,seq=8") from None
        if not set(given) <= set(sizes) or min(given.values()) < 1:
            raise ValueError(f"--mesh is {text!r}: its axes are data and seq, of size 1 or more")
        sizes = {"data": 1, "seq": 1} | given
    count = math.prod(sizes.values())
    if count > len(devices):
        raise ValueError(
            f"--mesh is {text!r}: it needs {count} devices, there are {len(devices)}; "
            f"use for example data=1,seq={len(devices)}"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:count],
    )


def prepare(args: argparse.Namespace) -> tuple[Mesh, DecoderConfig, Text]:
    """Fills in the defaults; ValueError where the arguments do not fit each other or the data."""
    for name, value in DEFAULTS["cpu" if jax.default_backend() == "cpu" else "gpu"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    mesh, config, text = make_mesh(args.mesh), make_config(args), load_text(args.data)
    for name in ("seq_len", "batch", "steps", "eval_batches"):
        if getattr(args, name) < 1:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(args, name)}: it must be at least 1")
    data, seq = mesh.shape["data"], mesh.shape["seq"]
    fit = padded_length(args.layout, args.seq_len, seq)
    if fit != args.seq_len:
        raise ValueError(
            f"--seq-len is {args.seq_len}: the {args.layout} layout over {seq} devices cannot "
            f"split it; use {fit}"
        )
    if args.batch % data:
        raise ValueError(
            f"--batch is {args.batch}: use a multiple of {data}, the mesh's data axis, like "
            f"{-(-args.batch // data) * data}"
        )
    for name in ("sample_bytes", "seed"):
        if getattr(args, name) < 0:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(args, name)}: it must be at least 0")
    shortest = min(len(text.train), len(text.held_out))
    if shortest < max(args.seq_len, SAMPLE_CONTEXT) + 1:
        raise ValueError(
            f"--seq-len is {args.seq_len}: the text's shorter part (training, held out) has "
            f"{shortest} bytes; use a shorter length or more --data"
        )
    return mesh, config, text


def make_config(args: argparse.Namespace) -> DecoderConfig:
    """The model's sizes."""
    mlp_dim = args.mlp_dim
    if mlp_dim is None:
        mlp_dim = -(-args.embed_dim * 8 // (3 * 64)) * 64
    return DecoderConfig(
        vocab_size=256,
        num_layers=args.layers,
        embed_dim=args.embed_dim,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        mlp_dim=mlp_dim,
        dtype=jnp.dtype(args.dtype),
    )


def train(
    args: argparse.Namespace, config: DecoderConfig, mesh: Mesh, text: Text, interrupt: Interrupt
) -> tuple[Any, Reporter]:
    """Runs the steps, or those before Ctrl-C, and returns the weights and their history."""
    optimizer = make_optimizer(args.lr, args.steps)
    graphdef, params, opt_state = init_train_state(
        config, optimizer, mesh, args.seed, **attention_options(args)
    )
    train_step = make_train_step(graphdef, optimizer)

    def batch_of(step: int) -> Any:
        rows = training_rows(text.train, args.batch, args.seq_len + 1, seed=args.seed, step=step)
        return place(args, mesh, rows)

    peak = peak_flops(mesh.devices.flat[0].device_kind)
    tokens = args.batch * args.seq_len
    reporter = Reporter(
        args.out,
        args.steps,
        tokens_per_step=tokens,
        flops_per_step=tokens * config.train_flops_per_token(args.seq_len),
        peak=None if peak is None else peak * mesh.size,
    )
    batch = batch_of(0)
    with reporter:
        for step in range(1, args.steps + 1):
            if interrupt.requested:
                break
            params, opt_state, metrics = train_step(params, opt_state, batch)
            batch = batch_of(step)  # While the devices work.
            reporter.step(step, {name: float(value) for name, value in metrics.items()})
    return params, reporter


def attention_options(args: argparse.Namespace) -> dict[str, Any]:
    """How the decoder attends during training."""
    return {
        "batch_axis": "data",
        "layout": args.layout,
        "implementation": args.implementation,
    }


def place(args: argparse.Namespace, mesh: Mesh, rows: np.ndarray) -> Any:
    """Rows of bytes as a batch on the mesh."""
    batch = make_batch(rows, layout=args.layout, num_shards=mesh.shape["seq"])
    return place_batch(batch, mesh, batch_axis="data")


def held_out(
    args: argparse.Namespace, config: DecoderConfig, mesh: Mesh, params: Any, text: Text
) -> Any:
    """The evaluation of the same held-out rows with the same weights on some mesh."""
    rows = held_out_rows(text.held_out, args.batch, args.seq_len + 1, args.eval_batches)
    graphdef, _ = abstract_decoder(config, mesh=mesh, **attention_options(args))
    batches = (place(args, mesh, row) for row in rows)
    return evaluate(make_eval_step(graphdef), params, batches)


@partial(jax.jit, static_argnums=(0, 3))
def sample(
    graphdef: nnx.GraphDef, params: Any, prompt: jax.Array, length: int, key: jax.Array
) -> jax.Array:
    """``length`` bytes, each drawn after the last ``len(prompt)`` ones, at temperature 0.8."""
    model: Decoder = nnx.merge(graphdef, params)
    positions = jnp.arange(prompt.shape[0], dtype=jnp.int32)

    def next_byte(context: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.unembed(model(context[None], positions)[0, -1])
        byte = jax.random.categorical(key, logits / 0.8).astype(jnp.int32)
        return jnp.append(context[1:], byte), byte

    return jax.lax.scan(next_byte, prompt, jax.random.split(key, length))[1]


def sampler(args: argparse.Namespace, config: DecoderConfig, mesh: Mesh) -> nnx.GraphDef:
    """The decoder that :func:`sample` runs: tokens in their natural order."""
    return abstract_decoder(config, mesh=mesh, implementation=args.implementation)[0]


def show_sample(
    args: argparse.Namespace, config: DecoderConfig, mesh: Mesh, params: Any, text: Text
) -> str:
    """Continues the beginning of the held-out text on one device."""
    prompt = text.held_out[:SAMPLE_CONTEXT].astype(np.int32)
    drawn = sample(
        sampler(args, config, mesh),
        params,
        jnp.asarray(prompt),
        args.sample_bytes,
        jax.random.key(args.seed),
    )
    start, more = (bytes(np.asarray(part, np.uint8)) for part in (prompt[-80:], drawn))
    return f"...{start.decode(errors='replace')}[sample starts]{more.decode(errors='replace')}"


def one_device(mesh: Mesh) -> Mesh:
    """A mesh of the first device, with the same axes."""
    return jax.make_mesh(
        (1, 1), ("data", "seq"), axis_types=(AxisType.Auto,) * 2, devices=[mesh.devices.flat[0]]
    )


def rehearse(args: argparse.Namespace, config: DecoderConfig, mesh: Mesh, text: Text) -> None:
    """Traces what comes after the last step, so that what cannot run is known before the first.

    A named implementation may take the dtype or the lengths of the training and not those of the
    end; None takes whichever can.

    Raises:
      NotImplementedError: the implementation cannot evaluate or sample so.
    """
    if args.implementation is None:
        return
    config = dataclasses.replace(config, dtype=jnp.dtype(args.eval_dtype))
    row = held_out_rows(text.held_out, args.batch, args.seq_len + 1, 1)[0]
    one = one_device(mesh)
    try:
        for each in (mesh, one):
            graphdef, params = abstract_decoder(config, mesh=each, **attention_options(args))
            jax.eval_shape(make_eval_step(graphdef), params, place(args, each, row))
        if args.sample_bytes > 0:
            graphdef, prompt = sampler(args, config, one), np.zeros(SAMPLE_CONTEXT, np.int32)
            key = jax.random.key(0)
            jax.eval_shape(lambda *given: sample(graphdef, *given, 1, key), params, prompt)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"{error}; so the evaluation and the sample after the last step could not run: see "
            f"--implementation, --eval-dtype ({args.eval_dtype}) and --sample-bytes"
        ) from error


def finish(
    args: argparse.Namespace,
    config: DecoderConfig,
    mesh: Mesh,
    params: Any,
    text: Text,
    reporter: Reporter,
) -> int:
    """Held-out perplexity by the ring and by one device, a sample, the curve."""
    one = one_device(mesh)
    one_params = jax.device_put(params, NamedSharding(one, PartitionSpec()))
    config = dataclasses.replace(config, dtype=jnp.dtype(args.eval_dtype))
    ring = held_out(args, config, mesh, params, text)
    single = held_out(args, config, one, one_params, text)
    difference = abs(ring.perplexity / single.perplexity - 1)
    print(f"held-out perplexity of {ring.tokens:,} bytes, in {args.eval_dtype}:")
    print(f"  ring of {mesh.shape['seq']} devices  {ring.perplexity:.6f}  ({ring.nll:.6f} nats)")
    print(f"  one device         {single.perplexity:.6f}  ({single.nll:.6f} nats)")
    print(f"  relative difference {difference:.1e}")
    if args.sample_bytes > 0:
        print(show_sample(args, config, one, one_params, text))
    plot_loss(reporter.history, args.out / "loss.png", ring.nll)
    summary = {
        "steps": len(reporter.history),
        "loss": reporter.history[-1]["loss"],
        "ring": ring._asdict(),
        "one_device": single._asdict(),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if difference > TOLERANCE:
        print(f"error: the perplexities differ by more than {TOLERANCE}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    """Trains, evaluates, samples; the exit code."""
    start = time.perf_counter()
    args, parser = parse_args(argv)
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)  # Has no effect on GPUs.
    set_compiler_options()
    with Interrupt() as interrupt:
        try:
            mesh, config, text = prepare(args)
            check_out(args.out)
            rehearse(args, config, mesh, text)
            if not can_plot():
                print(
                    "matplotlib is not installed: there will be no loss.png; "
                    "pip install 'burst-jax[examples]' brings it"
                )
            print(f"{text.source}, {len(text.train) / 1e6:.1f} MB to train on")
            print(
                f"{config.num_matmul_params / 1e6:.1f} M weights in {args.dtype}, {args.batch} x "
                f"{args.seq_len} bytes a step, {args.layout} over {dict(mesh.shape)} of "
                f"{mesh.devices.flat[0].device_kind}",
                flush=True,
            )
            params, reporter = train(args, config, mesh, text, interrupt)
        except (ValueError, OSError, NotImplementedError) as error:
            parser.error(str(error))
    if interrupt.requested:
        reached = reporter.history[-1:] or [{"step": 0, "loss": math.nan}]
        print(f"interrupted after step {reached[0]['step']}, loss {reached[0]['loss']:.4f}")
        plot_loss(reporter.history, args.out / "loss.png")
        return 130
    code = finish(args, config, mesh, params, text, reporter)
    results = "curve and metrics" if can_plot() else "metrics"
    print(f"{time.perf_counter() - start:.0f} s in all; {results} in {args.out}")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
