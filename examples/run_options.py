"""The command line of ``train_lm.py``: flags, defaults, validation, mesh, model and text."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh
from run_chats import (
    add_chat_options,
    chat_tokens,
    check_chat_options,
    check_conversations,
)
from run_mesh import TRAINING_AXES, Weights, decoder_axes, ring_size
from run_model import (
    FULL_ATTENTION_INTERVAL,
    MIXERS,
    check_hybrid,
    check_split,
    make_config,
)

from burst_jax.command_line import Parser, file_or_folder, in_flags
from burst_jax.data import (
    ByteTokens,
    ChatTokens,
    Corpus,
    Packing,
    TokenizerFile,
    open_corpus,
)
from burst_jax.errors import MAX_BATCH, check_positive, did_you_mean
from burst_jax.layouts.parse import LAYOUTS, parse_layout
from burst_jax.models import (
    DecoderConfig,
)
from burst_jax.models.config import Remat
from burst_jax.parallel.mesh_option import mesh_of_option
from burst_jax.training.adam import Moments
from pallas_kernels import NAMES

# Defaults on CPU and on GPUs.
DEFAULTS = {
    "seq_len": (512, 16384), "batch": (2, 2), "layers": (4, 6), "embed_dim": (128, 1024),
    "heads": (4, 8), "kv_heads": (2, 4), "head_dim": (32, 128), "steps": (1000, 300),
    "lr": (4e-3, 5e-4), "dtype": ("float32", "bfloat16"), "eval_batches": (32, 4),
}  # fmt: skip
AT_LEAST_1 = (
    "seq_len", "batch", "steps", "keep", "accumulate", "microbatches", "vocab_size", "mlp_chunks",
    "lora_rank",
    "layers", "embed_dim", "heads", "kv_heads", "head_dim", "mlp_dim", "full_attention_interval",
)  # fmt: skip
AT_LEAST_0 = ("sample_tokens", "seed", "checkpoint_every", "profile", "eval_batches")
# A seed has 32 bits. The others are larger than any use: a sample is one program, a batch has a
# stream of documents per sequence.
AT_MOST = {"batch": MAX_BATCH, "sample_tokens": 2**20, "seed": 2**32 - 1}
POSITIVE = ("lr", "stall_timeout", "lora_alpha")
# Arguments that may differ between the processes of a run.
OF_A_START = ("coordinator", "num_processes", "process_id", "heartbeat_timeout")
OF_A_PROCESS = (*OF_A_START, "data", "tokenizer", "model")
HELD_OUT = 0.05
# Tokens of held-out text that the sample starts from.
SAMPLE_CONTEXT = 256
# Defined by --model.
MODEL_OPTIONS = (
    "vocab_size", "layers", "mixer", "full_attention_interval", "embed_dim", "heads", "kv_heads",
    "head_dim", "mlp_dim",
)  # fmt: skip
IGNORE_HELP = "keys of its config.json and tensors that do not change the computation"
# Peak learning rates of full fine-tuning and of LoRA.
FINE_TUNING_LR = 2e-5
LORA_LR = 2e-4
REMAT_OPTIONS = ("remat", "remat_layers", "mlp_chunks")
LORA_OPTIONS = ("lora_alpha", "lora_targets", "lora_export")


def flag(name: str) -> str:
    """The flag of an argument."""
    return "--" + name.replace("_", "-")


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, Parser]:
    """Parses the command line; defaults that depend on the devices remain None."""

    parser = Parser(description="Train a language model on a mesh.")
    group = parser.add_argument_group
    add = group("text").add_argument
    add(
        "--data", type=file_or_folder,
        help='text files, JSON lines with a "text" key, or .npy arrays of token ids; a file or a '
        "folder (default: Python's source)",
    )  # fmt: skip
    add("--text-key", default="text", metavar="KEY", help="of JSON lines (default: text)")
    add_chat_options(add)
    add(
        "--tokenizer",
        type=file_or_folder,
        help="a tokenizer.json (default: that of --model, or bytes)",
    )
    add(
        "--packing",
        choices=get_args(Packing),
        default="first_fit",
        help="how documents fill sequences",
    )
    add("--seq-len", type=int, help=f"tokens per sequence {default('seq_len')}")
    add("--batch", type=int, help=f"global batch size in sequences {default('batch')}")
    add = group("devices").add_argument
    add("--mesh", help="axes and sizes, like fsdp=2,seq=4 (default: all on seq)")
    add("--weights", choices=get_args(Weights), default="sharded", help="over batch and sequence")
    add("--expert-axes", help="axes of --mesh whose devices have different experts, like fsdp,seq")
    layouts = (*LAYOUTS, "balanced")
    add(
        "--layout", choices=layouts, default="zigzag",
        help="sequence layout, balanced: by each batch's documents (default: zigzag)",
    )  # fmt: skip
    add("--microbatches", type=int, help="pipeline microbatches (default: number of stages)")
    add("--implementation", choices=NAMES, help="attention kernels")
    add("--coordinator", help="host:port of process 0")
    add("--num-processes", type=int, help="default: from the cluster")
    add("--process-id", type=int, help="index (default: from the cluster)")
    add("--heartbeat-timeout", type=int, default=30, help="seconds until a silent process is dead")
    add = group("model").add_argument
    add("--model", type=file_or_folder, help="Hugging Face checkpoint to fine-tune: a folder")
    add("--ignore", nargs="+", default=[], metavar="KEY", help=IGNORE_HELP)
    add("--vocab-size", type=int, help="vocabulary size (default: the tokenizer's)")
    add("--layers", type=int, help=f"number of layers {default('layers')}")
    add(
        "--mixer", choices=tuple(MIXERS),
        help="of tokens: softmax attention, Gated DeltaNet, Kimi Delta Attention (kda), or layers "
        "of softmax and one of the others (default: attention)",
    )  # fmt: skip
    add(
        "--full-attention-interval", type=int, metavar="N",
        help=f"of hybrids: each Nth layer is softmax (default: {FULL_ATTENTION_INTERVAL})",
    )  # fmt: skip
    add("--embed-dim", type=int, help=f"model width {default('embed_dim')}")
    add("--heads", type=int, help=f"query heads, or value heads {default('heads')}")
    add("--kv-heads", type=int, help=f"key/value heads, or key heads {default('kv_heads')}")
    add("--head-dim", type=int, help=f"features per head {default('head_dim')}")
    add("--mlp-dim", type=int, help="feed-forward width (default: 8/3 of the width)")
    add("--remat", choices=get_args(Remat), default="attention", help="rematerialization")
    add("--remat-layers", type=int, help="layers with selective remat, others attention")
    add("--mlp-chunks", type=int, default=1, help="token chunks of the feed-forward layers")
    add = group("LoRA of --model").add_argument
    add("--lora-rank", type=int, help="train only adapters of this rank")
    add("--lora-alpha", type=float, help="scale alpha / rank (default: the rank)")
    add("--lora-targets", metavar="REGEX", help="adapted projections (default: all)")
    add("--lora-export", choices=("merged", "adapter"), help="exported weights (default: merged)")
    add_run_options(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = list(map(flag, vars(args)))
        hint = did_you_mean(unknown[0].partition("=")[0], known)
        parser.error(f"unknown arguments: {' '.join(unknown)}{hint}")
    return args, parser


def default(name: str) -> str:
    """The defaults of an option that depend on the devices, for its help."""
    return "(default: {} on CPU, {} on GPUs)".format(*DEFAULTS[name])


def add_run_options(parser: Parser) -> None:
    """Adds the options of training, evaluation and files."""
    group = parser.add_argument_group
    add = group("training").add_argument
    add("--steps", type=int, help=f"optimizer steps {default('steps')}")
    add(
        "--lr",
        type=float,
        help=f"peak learning rate {default('lr')}, 2e-5 with --model, 2e-4 with LoRA",
    )
    add("--accumulate", type=int, default=1, help="gradient accumulation steps")
    add(
        "--max-logits",
        action="store_true",
        help="log the largest attention logit of each step, max_logit",
    )
    add("--dtype", choices=("float32", "bfloat16"), help=f"training dtype {default('dtype')}")
    add(
        "--moment-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of AdamW's",
    )
    add("--moments", choices=get_args(Moments), default="device", help="their memory")
    add("--seed", type=int, default=0, help="random seed (default: 0)")
    add = group("evaluation").add_argument
    add("--eval-dtype", choices=("float32", "bfloat16"), help="its dtype (default: --dtype)")
    add("--eval-batches", type=int, help=f"held-out batches; 0: none {default('eval_batches')}")
    add(
        "--one-device", choices=("auto", "never"), default="auto",
        help="also evaluate on one device, if it has the memory (default: auto)",
    )  # fmt: skip
    add("--sample-tokens", type=int, help="length of the sample (default: 200, 0 with --chat)")
    add = group("files").add_argument
    add(
        "--out",
        type=file_or_folder,
        default=Path("out/train_lm"),
        help="folder (default: out/train_lm)",
    )
    add(
        "--checkpoint-dir",
        type=file_or_folder,
        help="folder of checkpoints (default: OUT/checkpoints)",
    )
    add("--checkpoint-every", type=int, help="steps; 0: never (default: a fifth of --steps)")
    add("--keep", type=int, default=2, help="number of checkpoints to keep (default: 2)")
    add("--resume", choices=("auto", "never"), default="auto", help="from a checkpoint")
    add("--stall-timeout", type=float, default=1800, help="exit after seconds without a step")
    add("--tensorboard", action="store_true", help="write curves for TensorBoard")
    add("--profile", type=int, default=0, metavar="N", help="trace N steps")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What the command line defines.

    Attributes:
      mesh: mesh with all of TRAINING_AXES.
      axes: the decoder's arguments for this mesh.
      config: the model.
      tokens: the tokenizer; None for token arrays.
      text: training documents.
      held_out: evaluation documents.
      about: what the conversations are, or "".
    """

    mesh: Mesh
    axes: dict[str, Any]
    config: DecoderConfig
    tokens: ByteTokens | TokenizerFile | ChatTokens | None
    text: Corpus
    held_out: Corpus
    about: str = ""


def prepare(args: argparse.Namespace) -> RunConfig:
    """Fills in defaults and validates arguments, devices and text; raises ValueError."""
    if args.model is not None:
        check_model(args.model)
        if args.model.resolve() == (args.out / "model").resolve():
            raise ValueError(
                f"--model is {args.model}, where the result goes: use another --out than {args.out}"
            )
        for name in MODEL_OPTIONS:
            if getattr(args, name) is not None:
                raise ValueError(
                    f"{flag(name)} is given with --model, which defines it: leave it out"
                )
        if args.lr is None:
            args.lr = FINE_TUNING_LR if args.lora_rank is None else LORA_LR
    elif args.ignore:
        raise ValueError(f"--ignore is {' '.join(args.ignore)}: it needs --model")
    check_lora(args)
    check_chat_options(args)
    args.mixer = args.mixer or "attention"
    check_hybrid(args)
    for name, values in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, values[jax.default_backend() != "cpu"])
    if args.checkpoint_dir is None:
        args.checkpoint_dir = args.out / "checkpoints"
    if args.eval_dtype is None:
        args.eval_dtype = args.dtype
    for names, least in ((AT_LEAST_1, 1), (AT_LEAST_0, 0)):
        for name in names:
            value = getattr(args, name)
            most = AT_MOST.get(name, 2**31 - 1)
            if value is not None and not least <= value <= most:
                bound = f"least {least}" if value < least else f"most {most}"
                raise ValueError(f"{flag(name)} is {value}: it must be at {bound}")
    for name in POSITIVE:
        value = getattr(args, name)
        if value is not None:
            check_positive(flag(name), value)
    if args.checkpoint_every is None:
        args.checkpoint_every = -(-args.steps // 5)
    mesh = mesh_of_option(args.mesh, TRAINING_AXES)
    axes = decoder_axes(mesh, args.weights, args.expert_axes)
    ring, rows = ring_size(mesh), mesh.shape["data"] * mesh.shape["fsdp"]
    devices = ring * mesh.shape["heads"]
    multiple = math.lcm(parse_layout(args.layout).padded_length(1, ring), devices)
    fit = -(-args.seq_len // multiple) * multiple
    if fit != args.seq_len:
        raise ValueError(
            f"--seq-len is {args.seq_len}: the {args.layout} layout over {devices} devices does "
            f"not divide it; use {fit}"
        )
    if args.seq_len // devices % args.mlp_chunks:
        raise ValueError(
            f"--mlp-chunks is {args.mlp_chunks}: it must divide the {args.seq_len // devices} "
            "tokens per device of a sequence, --seq-len over the mesh's axes that shard tokens"
        )
    stages = mesh.shape["stage"]
    if args.microbatches is not None and stages == 1:
        raise ValueError(
            f"--microbatches is {args.microbatches}: they need a pipeline; give --mesh a stage"
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
    try:
        corpus = open_corpus(args.data, key=args.text_key, chats=args.chat)
    except (ValueError, OSError) as error:
        raise ValueError(in_flags(error, path="--data", chats="--chat")) from error
    text, held_out = corpus.split(HELD_OUT)
    shortest = min(text.size, held_out.size)
    if not args.chat and shortest < max(args.seq_len, SAMPLE_CONTEXT) + 1:
        raise ValueError(
            f"--seq-len is {args.seq_len}: the text's shorter part (training, held out) has "
            f"{shortest} bytes or tokens, but a sequence and the sample need "
            f"{max(args.seq_len, SAMPLE_CONTEXT) + 1}; use a shorter length or more --data"
        )
    tokens = make_tokens(args, corpus)
    try:
        config = make_config(args, tokens)
    except (ValueError, NotImplementedError) as error:
        names = {"num_layers": "--layers", "delta_net": f"--mixer {args.mixer}"}
        names |= {name: flag(name) for name in REMAT_OPTIONS}
        raise type(error)(in_flags(error, **names)) from error
    if args.expert_axes is not None and config.experts is None:
        raise ValueError(
            f"--expert-axes is {args.expert_axes}: the model has no experts; leave it out"
        )
    check_split(args, config, mesh)
    about = about_chats(args, corpus, tokens, config)
    return RunConfig(mesh, axes, config, tokens, text, held_out, about)


def about_chats(
    args: argparse.Namespace,
    corpus: Corpus,
    tokens: ByteTokens | TokenizerFile | ChatTokens | None,
    config: DecoderConfig,
) -> str:
    """What the conversations are, "" without; raises ValueError if some cannot be used."""
    if not isinstance(tokens, ChatTokens):
        return ""
    vocab_size = args.vocab_size or config.vocab_size
    # Of the part that is not held out.
    trained = args.steps * args.batch * args.seq_len / (1 - HELD_OUT)
    try:
        return check_conversations(args, corpus, tokens, vocab_size, trained=trained)
    except ValueError as error:
        names = {"too_long='cut'": "--long-chats cut", "seq_len": "--seq-len"}
        raise ValueError(in_flags(error, **names)) from error


def check_model(folder: Path) -> None:
    """Raises ValueError unless ``--model`` is a folder."""
    if not folder.is_dir():
        raise ValueError(f"--model is {folder}: there is no such folder")


def check_lora(args: argparse.Namespace) -> None:
    """Raises ValueError for LoRA without a model, or LoRA options without a rank."""
    if args.lora_rank is None:
        for name in LORA_OPTIONS:
            if getattr(args, name) is not None:
                raise ValueError(f"{flag(name)} needs --lora-rank")
    elif args.model is None:
        raise ValueError(
            f"--lora-rank is {args.lora_rank}: LoRA adapts an existing model; give --model"
        )


def make_tokens(
    args: argparse.Namespace, corpus: Corpus
) -> ByteTokens | TokenizerFile | ChatTokens | None:
    """The tokenizer of the text; raises ValueError for one with token arrays, or none."""
    if not corpus.reader.is_text:
        if args.tokenizer is not None:
            raise ValueError(f"--tokenizer is {args.tokenizer}, but --data already holds tokens")
        return None
    if args.tokenizer is None and args.model is None:
        # A byte that no text contains, so that the model learns where documents end.
        return ByteTokens(separator=0)
    tokens = tokenizer_of(args)
    if not args.chat:
        return tokens
    return chat_tokens(args, tokens, day=args.chat_date, too_long=args.long_chats or "error")


def tokenizer_of(args: argparse.Namespace) -> TokenizerFile:
    """The tokenizer of ``--tokenizer``, or of ``--model``; raises ValueError for a missing file."""
    path = args.tokenizer or args.model / "tokenizer.json"
    if args.tokenizer is None and not path.exists():
        raise ValueError(
            f"--model is {args.model}, which lacks tokenizer.json: name one with --tokenizer"
        )
    try:
        return TokenizerFile(path, special_tokens=True)
    except (ValueError, OSError) as error:
        given = "--model" if args.tokenizer is None else "--tokenizer"
        raise ValueError(in_flags(error, path=given)) from error


def attention_options(args: argparse.Namespace) -> dict[str, Any]:
    """Attention options of the decoder, without the layout, which each batch has."""
    return {"implementation": args.implementation}
