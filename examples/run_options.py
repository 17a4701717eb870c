"""The command line of a training run: its flags, their defaults, and the mesh, model and text.

The flags are those of ``train_lm.py``; what they say is checked before anything is computed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any, NoReturn, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from burst_jax import ShardingRules
from burst_jax.data import ByteTokens, Corpus, Packing, TokenizerFile, open_corpus
from burst_jax.errors import did_you_mean
from burst_jax.layouts.permutation import LAYOUTS, padded_length
from burst_jax.models import DecoderConfig, Lora, load_config
from burst_jax.models.config import Remat
from burst_jax.models.hf.peft import check_base
from burst_jax.training.adam import Moments

AXES = ("data", "fsdp", "stage", "seq", "tensor")
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
AT_LEAST_1 = (
    "seq_len", "batch", "steps", "eval_batches", "keep", "accumulate", "microbatches", "vocab_size",
    "mlp_chunks", "lora_rank",
    "layers", "embed_dim", "heads", "kv_heads", "head_dim", "mlp_dim",
)  # fmt: skip
AT_LEAST_0 = ("sample_tokens", "seed", "checkpoint_every", "profile")
POSITIVE = ("lr", "stall_timeout", "lora_alpha")
HELD_OUT = 0.05
# Tokens of held-out text that the sample starts from.
SAMPLE_CONTEXT = 256
# What a model folder says.
OF_A_MODEL = ("vocab_size", "layers", "embed_dim", "heads", "kv_heads", "head_dim", "mlp_dim")
# Peak learning rate of a model that is fine-tuned, and of adapters beside it.
FINE_TUNING_LR = 2e-5
LORA_LR = 2e-4
# What is said of adapters.
OF_LORA = ("lora_alpha", "lora_targets", "lora_export")


class Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message without the usage and exits with 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, Parser]:
    """Reads the command line; a default that depends on the devices stays None."""

    def default(name: str) -> str:
        cpu, gpu = DEFAULTS["cpu"][name], DEFAULTS["gpu"][name]
        return f"(default: {cpu} on CPU, {gpu} on GPUs)"

    # An abbreviation that is unambiguous today may mean another flag tomorrow.
    parser = Parser(description="Train a language model on a mesh of devices.", allow_abbrev=False)
    group = parser.add_argument_group
    add = group("text").add_argument
    add("--data", type=Path, help="text files, JSON lines or arrays (default: Python's source)")
    add("--tokenizer", type=Path, help="a tokenizer.json (default: bytes)")
    add("--packing", choices=get_args(Packing), default="first_fit", help="of documents into rows")
    add("--seq-len", type=int, help=f"tokens per row {default('seq_len')}")
    add("--batch", type=int, help=f"rows per step, on all devices {default('batch')}")
    add = group("devices").add_argument
    add("--mesh", help="axes and sizes, like fsdp=2,seq=4 (default: all devices on seq)")
    add("--layout", choices=LAYOUTS, default="zigzag", help="order of the tokens")
    add("--microbatches", type=int, help="of a pipeline (default: as many as stages)")
    add("--implementation", choices=("xla", "triton", "mosaic_sm90"), help="local attention")
    add("--coordinator", help="host:port of process 0, for several processes")
    add("--num-processes", type=int, help="number of processes (default: the cluster's)")
    add("--process-id", type=int, help="number of this process (default: the cluster's)")
    add("--heartbeat-timeout", type=int, default=30, help="seconds that a process may be silent")
    add = group("model").add_argument
    add("--model", type=Path, help="folder of transformers to fine-tune, instead of random weights")
    add(
        "--vocab-size",
        type=int,
        help="of .npy tokens without --model (default: the tokenizer's)",
    )
    add("--layers", type=int, help=f"number of layers {default('layers')}")
    add("--embed-dim", type=int, help=f"width {default('embed_dim')}")
    add("--heads", type=int, help=f"query heads {default('heads')}")
    add("--kv-heads", type=int, help=f"key/value heads {default('kv_heads')}")
    add("--head-dim", type=int, help=f"features per head {default('head_dim')}")
    add("--mlp-dim", type=int, help="hidden features (default: 8/3 of the width, rounded up)")
    add("--remat", choices=get_args(Remat), default="attention", help="what is recomputed")
    add("--remat-layers", type=int, help="layers that are selective, the others are attention")
    add("--mlp-chunks", type=int, default=1, help="chunks of tokens of the feed-forward")
    add = group("low-rank adapters of --model").add_argument
    add("--lora-rank", type=int, help="train adapters of this rank, and no other weights")
    add("--lora-alpha", type=float, help="their factor is alpha / rank (default: the rank)")
    add("--lora-targets", metavar="REGEX", help="projections with adapters (default: all seven)")
    add("--lora-export", choices=("merged", "adapter"), help="what is written (default: merged)")
    add = group("training").add_argument
    add("--steps", type=int, help=f"optimizer steps {default('steps')}")
    add("--lr", type=float, help=f"peak {default('lr')}, 2e-5 with --model, 2e-4 of adapters")
    add("--accumulate", type=int, default=1, help="parts of a batch, one after the other")
    add("--dtype", choices=("float32", "bfloat16"), help=f"of the training {default('dtype')}")
    add("--moment-dtype", choices=("float32", "bfloat16"), default="float32", help="of AdamW's two")
    add("--moments", choices=get_args(Moments), default="device", help="where AdamW keeps them")
    add("--seed", type=int, default=0, help="of weights, data and sample (default: 0)")
    add = group("end").add_argument
    add("--eval-dtype", choices=("float32", "bfloat16"), default="float32", help="of the end")
    add("--eval-batches", type=int, help=f"held-out batches {default('eval_batches')}")
    add("--sample-tokens", type=int, default=200, help="length of the sample (default: 200)")
    add = group("files").add_argument
    add("--out", type=Path, default=Path("out/train_lm"), help="folder (default: out/train_lm)")
    add("--checkpoint-dir", type=Path, help="folder of checkpoints (default: OUT/checkpoints)")
    add("--checkpoint-every", type=int, help="steps; 0 for none (default: a fifth of the steps)")
    add("--keep", type=int, default=2, help="number of checkpoints that stay (default: 2)")
    add("--resume", choices=("auto", "never"), default="auto", help="go on from a checkpoint")
    add("--stall-timeout", type=float, default=1800, help="seconds without a step that end it")
    add("--tensorboard", action="store_true", help="write curves for TensorBoard")
    add("--profile", type=int, default=0, metavar="N", help="trace N steps")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = ["--" + name.replace("_", "-") for name in vars(args)]
        hint = did_you_mean(unknown[0].partition("=")[0], known)
        parser.error(f"unknown arguments: {' '.join(unknown)}{hint}")
    return args, parser


@dataclasses.dataclass(frozen=True)
class Run:
    """What a command line asks for.

    Attributes:
      mesh: the devices, with all of AXES.
      rules: what the axes split.
      config: the model.
      tokens: makes token ids of text; None if the text is arrays of them.
      text: the documents to train on.
      held_out: the documents to evaluate on.
    """

    mesh: Mesh
    rules: ShardingRules
    config: DecoderConfig
    tokens: ByteTokens | TokenizerFile | None
    text: Corpus
    held_out: Corpus


def prepare(args: argparse.Namespace) -> Run:
    """Fills in the defaults that depend on the devices, and checks the arguments.

    Raises:
      ValueError: the arguments do not fit each other, the devices or the text.
    """
    if args.model is not None:
        check_model(args.model)
        if args.model.resolve() == (args.out / "model").resolve():
            raise ValueError(
                f"--model is {args.model}, where the result goes: use another --out than {args.out}"
            )
        for name in OF_A_MODEL:
            if getattr(args, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is given beside --model, which says it: leave it out")
        if args.lr is None:
            args.lr = FINE_TUNING_LR if args.lora_rank is None else LORA_LR
    check_lora(args)
    for name, value in DEFAULTS["cpu" if jax.default_backend() == "cpu" else "gpu"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.checkpoint_dir is None:
        args.checkpoint_dir = args.out / "checkpoints"
    for names, least in ((AT_LEAST_1, 1), (AT_LEAST_0, 0)):
        for name in names:
            value = getattr(args, name)
            if value is not None and value < least:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is {value}: it must be at least {least}")
    for name in POSITIVE:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {value}: it must be positive, and finite")
    if args.checkpoint_every is None:
        args.checkpoint_every = -(-args.steps // 5)
    mesh = make_mesh(args.mesh)
    rules = ShardingRules.of(mesh)
    seq, rows = mesh.shape["seq"], mesh.shape["data"] * mesh.shape["fsdp"]
    fit = padded_length(args.layout, args.seq_len, seq)
    if fit != args.seq_len:
        raise ValueError(
            f"--seq-len is {args.seq_len}: the {args.layout} layout over {seq} devices cannot "
            f"split it; use {fit}"
        )
    if args.seq_len // seq % args.mlp_chunks:
        raise ValueError(
            f"--mlp-chunks is {args.mlp_chunks}: it must divide the {args.seq_len // seq} tokens "
            "of a row that each device has, --seq-len over the mesh's seq axis"
        )
    stages = mesh.shape["stage"]
    if args.microbatches is not None and stages == 1:
        raise ValueError(
            f"--microbatches is {args.microbatches}: they are a pipeline's; give --mesh a stage"
        )
    microbatches = math.lcm(stages, args.microbatches or stages)
    multiple = rows * args.accumulate * microbatches
    if args.batch % multiple:
        raise ValueError(
            f"--batch is {args.batch}: use a multiple of {multiple}, like "
            f"{-(-args.batch // multiple) * multiple}; the factors are {rows} (the data and fsdp "
            f"axes of --mesh), {args.accumulate} (--accumulate) and {microbatches} "
            "(--microbatches, and the stage axis of --mesh)"
        )
    corpus = open_corpus(args.data)
    text, held_out = corpus.split(HELD_OUT)
    shortest = min(text.size, held_out.size)
    if shortest < max(args.seq_len, SAMPLE_CONTEXT) + 1:
        raise ValueError(
            f"--seq-len is {args.seq_len}: the text's shorter part (training, held out) has "
            f"{shortest} bytes or tokens, and needs {max(args.seq_len, SAMPLE_CONTEXT) + 1}, for a "
            "row and for the sample; use a shorter length or more --data"
        )
    tokens = make_tokens(args, corpus)
    config = make_config(args, tokens)
    check_split(args, config, mesh)
    return Run(mesh, rules, config, tokens, text, held_out)


def check_model(folder: Path) -> None:
    """Raises ValueError if there is no folder of ``--model``."""
    if not folder.is_dir():
        raise ValueError(f"--model is {folder}: there is no such folder")


def check_lora(args: argparse.Namespace) -> None:
    """Raises ValueError for adapters without a model, and for what is said of no adapters."""
    if args.lora_rank is None:
        for name in OF_LORA:
            if getattr(args, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is of low-rank adapters: give --lora-rank, too")
    elif args.model is None:
        raise ValueError(
            f"--lora-rank is {args.lora_rank}: adapters are trained beside a model; give --model"
        )


def check_split(args: argparse.Namespace, config: DecoderConfig, mesh: Mesh) -> None:
    """Raises ValueError if the mesh cannot split the model, in terms of the command line.

    The library would name the first weight that cannot be split.
    """
    for option, what, size, axes in (
        ("--layers", "layers", config.num_layers, ("stage",)),
        ("--heads", "query heads", config.num_heads, ("tensor",)),
        ("--mlp-dim", "hidden features", config.mlp_dim, ("tensor",)),
        # Without --model it is a multiple of 128, whatever --vocab-size says.
        (None, "token ids", config.vocab_size, ("tensor",)),
        ("--embed-dim", "features", config.embed_dim, ("fsdp", "seq", "stage")),
    ):
        count = math.prod(mesh.shape[axis] for axis in axes)
        if size % count:
            split = " x ".join(
                f"{axis}={mesh.shape[axis]}" for axis in axes if mesh.shape[axis] > 1
            )
            remedy = "use another --mesh"
            if option is not None and args.model is None:
                remedy += f", or {option} {-(-size // count) * count}"
            raise ValueError(
                f"{_size(args, option, size, what)}: --mesh splits them over {split}, {count} "
                f"parts, which do not divide {size}; {remedy}"
            )
    heads, tensor = config.num_kv_heads, mesh.shape["tensor"]
    if heads % tensor and tensor % heads:
        raise ValueError(
            f"{_size(args, '--kv-heads', heads, 'key/value heads')}: --mesh has tensor={tensor}, "
            "and one of the two numbers must divide the other; use another --mesh"
            + ", or other --kv-heads"
            * (args.model is None)
        )


def _size(args: argparse.Namespace, option: str | None, size: int, what: str) -> str:
    """A size of the model, and what on the command line says it."""
    if args.model is not None:
        return f"--model has {size} {what}"
    return f"the model has {size} {what}" if option is None else f"{option} is {size}"


def make_mesh(text: str | None) -> Mesh:
    """The mesh that ``--mesh`` describes, over as many of the devices as it needs."""
    devices = jax.devices()
    sizes = dict.fromkeys(AXES, 1)
    if text is None:
        sizes["seq"] = len(devices)
    else:
        try:
            pairs = [
                (name, int(size)) for name, size in (axis.split("=") for axis in text.split(","))
            ]
        except ValueError:
            raise ValueError(f"--mesh is {text!r}: write it like fsdp=2,seq=4") from None
        given = dict(pairs)
        if len(given) != len(pairs):
            raise ValueError(f"--mesh is {text!r}: it names an axis twice; give each one size")
        if not set(given) <= set(sizes) or min(given.values()) < 1:
            raise ValueError(
                f"--mesh is {text!r}: its axes are {', '.join(AXES)}, of size 1 or more"
            )
        sizes |= given
    count = math.prod(sizes.values())
    if count > len(devices):
        raise ValueError(
            f"--mesh is {text!r}: it needs {count} devices, there are {len(devices)}; "
            f"use for example seq={len(devices)}"
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"--mesh is {text!r}: {count} devices, and the processes have {len(devices)}: with "
            "several processes use all of them (on CPUs each has JAX_NUM_CPU_DEVICES, 8 by default)"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:count],
    )


def one_device(mesh: Mesh) -> Mesh:
    """A mesh of the first device, with the same axes."""
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh((1,) * len(AXES), AXES, axis_types=kinds, devices=[mesh.devices.flat[0]])


def make_tokens(args: argparse.Namespace, corpus: Corpus) -> ByteTokens | TokenizerFile | None:
    """What makes token ids of the text.

    Raises:
      ValueError: a tokenizer for arrays of tokens, or no tokenizer.
    """
    if not corpus.reader.is_text:
        if args.tokenizer is not None:
            raise ValueError(f"--tokenizer is {args.tokenizer}, but --data holds tokens already")
        return None
    if args.tokenizer is None and args.model is None:
        # A byte that no text has, so that a model sees where a document ends.
        return ByteTokens(separator=0)
    return TokenizerFile(args.tokenizer or args.model / "tokenizer.json")


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """How a model folder is loaded: computed in ``--dtype``.

    Its weights are trained in float32; beside adapters they stay, in ``--dtype``.
    """
    return {
        "dtype": jnp.dtype(args.dtype),
        "param_dtype": jnp.dtype("float32" if args.lora_rank is None else args.dtype),
        "remat": args.remat,
        "remat_layers": args.remat_layers,
        "mlp_chunks": args.mlp_chunks,
    }


def make_lora(args: argparse.Namespace) -> Lora | None:
    """The adapters that are trained beside a model, or None."""
    if args.lora_rank is None:
        return None
    return Lora(args.lora_rank, args.lora_alpha, args.lora_targets or ".*")


def make_config(
    args: argparse.Namespace, tokens: ByteTokens | TokenizerFile | None
) -> DecoderConfig:
    """The model's sizes and dtype.

    Raises:
      ValueError: nothing says the vocabulary's size, or sizes do not fit together.
    """
    if args.model is not None:
        config = load_config(args.model, **model_options(args))
        if args.lora_export == "adapter":
            check_base(config, args.model)
        return dataclasses.replace(config, lora=make_lora(args))
    mlp_dim = args.mlp_dim
    if mlp_dim is None:
        mlp_dim = -(-args.embed_dim * 8 // (3 * 64)) * 64
    vocabulary = args.vocab_size
    if vocabulary is None:
        if tokens is None:
            raise ValueError("--vocab-size is missing: --data holds tokens, and says no vocabulary")
        vocabulary = tokens.vocab_size
    if args.heads % args.kv_heads:
        raise ValueError(
            f"--heads is {args.heads}, --kv-heads {args.kv_heads}: use a multiple of --kv-heads"
        )
    if args.head_dim % 2:
        raise ValueError(
            f"--head-dim is {args.head_dim}: RoPE rotates pairs of features, so it must be even"
        )
    return DecoderConfig(
        # A multiple of 128, which every tensor axis in use divides.
        vocab_size=-(-vocabulary // 128) * 128,
        num_layers=args.layers,
        embed_dim=args.embed_dim,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        mlp_dim=mlp_dim,
        dtype=jnp.dtype(args.dtype),
        remat=args.remat,
        remat_layers=args.remat_layers,
        mlp_chunks=args.mlp_chunks,
    )
