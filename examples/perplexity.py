"""Perplexity of texts or chats under a Hugging Face checkpoint, with context parallelism.

    python examples/perplexity.py --model folder --data book.txt --seq-len 32768
    python examples/perplexity.py --model folder --data notes/ --seq-len 4096 --packed
    python examples/perplexity.py --model folder --data book.txt --seq-len 8192 --stride 4096
    python examples/perplexity.py --model folder --data chats.jsonl --chat --packed

Documents are cut into windows of ``--seq-len`` tokens. With ``--stride``, windows overlap and each
counts only tokens that no earlier window counted, so later tokens have a context of at least
``seq_len - stride``. ``--packed`` packs several documents into one sequence, separated by segment
ids. With ``--chat`` documents are conversations, and what the assistant writes counts, as in
``train_lm.py --chat``. Without GPUs it uses 8 CPU devices. ``--check`` repeats the computation on
one device and fails if the results differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

import extras  # noqa: F401 - ends the script if libraries are missing
import jax
import numpy as np
from flax import nnx
from hf_checkpoints import add_inference_options, load_for_inference
from jax.sharding import Mesh
from run_chats import add_chat_options, chat_tokens, check_conversations
from run_log import replace_file
from run_options import tokenizer_of

from burst_jax import ShardingRules
from burst_jax.command_line import Parser, file_or_folder, integer, use_cpu_devices
from burst_jax.data import ChatTokens, Corpus, TokenizerFile, open_corpus
from burst_jax.data.chunks import Chunks
from burst_jax.layouts.permutation import to_layout
from burst_jax.models import check_trained_length, load_config, trained_length
from burst_jax.parallel.mesh_option import batch_of_option, mesh_of_option, one_device
from burst_jax.parallel.xla_options import set_compiler_options
from burst_jax.training import Batch, Evaluation, evaluate, make_batch, make_eval_step, place_batch

# Largest relative difference between the perplexities on the mesh and on one device.
TOLERANCE = 1e-5


class Window(NamedTuple):
    """A part of a document.

    Attributes:
      tokens: integers ``[n]``.
      weights: float32 ``[n - 1]``, the weight of each target: 1 if it counts, else 0.
    """

    tokens: np.ndarray
    weights: np.ndarray


def documents(corpus: Corpus, tokenizer: TokenizerFile | None) -> Iterator[np.ndarray]:
    """Token ids of each document, with the special tokens that the tokenizer adds to a text."""
    start, end = ((), ()) if tokenizer is None else (tokenizer.prefix_ids, tokenizer.suffix_ids)
    spans = zip(corpus.documents, corpus.starts, corpus.stops, strict=True)
    for document, first, last in spans:
        read = corpus.reader.read(int(document), int(first), int(last))
        ids = np.asarray(read) if tokenizer is None else tokenizer.encode(bytes(read))
        yield np.concatenate([np.array(start, ids.dtype), ids, np.array(end, ids.dtype)])


def chats_of(args: argparse.Namespace) -> tuple[Corpus, ChatTokens]:
    """The conversations of ``--data``, and their tokenizer; long ones are cut into windows."""
    tokens = chat_tokens(args, tokenizer_of(args), day=args.chat_date, too_long="cut")
    return open_corpus(args.data, chats=True), tokens


def conversations(
    corpus: Corpus, tokens: ChatTokens, vocab_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids of each conversation, or of its part up to an answer, and which of them count."""
    chunks = Chunks(corpus, tokens, vocab_size, length=1, stride=1)
    for index in range(len(chunks)):
        found = chunks[index]
        ends = np.cumsum(found["lengths"])[:-1]
        tokens_and_weights = (np.split(found[name], ends) for name in ("tokens", "weights"))
        yield from zip(*tokens_and_weights, strict=True)


def windows(
    ids: np.ndarray, seq_len: int, stride: int, weights: np.ndarray | None = None
) -> Iterator[Window]:
    """Windows of at most ``seq_len`` targets; each target counts in one of them, or in none.

    ``weights``, float32 like ``ids``, are 1 for tokens that count; None is all.
    """
    of_targets = np.ones(max(len(ids) - 1, 0), np.float32) if weights is None else weights[1:]
    counted = 0
    for start in range(0, len(of_targets), stride):
        window = ids[start : start + seq_len + 1]
        end = start + len(window) - 1
        new = of_targets[start:end].copy()
        new[: counted - start] = 0
        if new.any():
            yield Window(window, new)
        counted = end
        if end == len(of_targets):
            return


def packed(parts: Iterator[Window], seq_len: int) -> Iterator[list[Window]]:
    """Groups of consecutive windows that fit into ``seq_len + 1`` tokens."""
    group: list[Window] = []
    for part in parts:
        if group and sum(len(window.tokens) for window in [*group, part]) > seq_len + 1:
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def sequence(windows: list[Window], seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(tokens, segment ids)``, int32 ``[seq_len + 1]``, and which targets count."""
    tokens, segments = np.zeros((2, seq_len + 1), np.int32)
    counts = np.zeros(seq_len, np.float32)
    place = 0
    for number, window in enumerate(windows, 1):
        end = place + len(window.tokens)
        tokens[place:end], segments[place:end] = window.tokens, number
        counts[place : end - 1] = window.weights
        place = end
    return tokens, segments, counts


def batches(
    args: argparse.Namespace, packs: Iterator[list[Window]], mesh: Mesh, rules: ShardingRules
) -> Iterator[Batch[jax.Array]]:
    """Batches on the mesh, the last one padded."""
    while group := [pack for _, pack in zip(range(args.batch), packs, strict=False)]:
        group += [[]] * (args.batch - len(group))
        tokens, segments, counts = map(
            np.stack, zip(*(sequence(pack, args.seq_len) for pack in group), strict=True)
        )
        shards = mesh.shape["seq"]
        batch = make_batch(tokens, segment_ids=segments, layout=args.layout, num_shards=shards)
        padding = batch["weights"].shape[1] - args.seq_len
        counts = np.pad(counts, [(0, 0), (0, padding)])
        batch["weights"] = batch["weights"] * to_layout(counts, args.layout, shards)
        yield place_batch(batch, mesh, rules=rules)


def all_windows(args: argparse.Namespace, vocab_size: int) -> Iterator[Window]:
    """The windows of all documents or conversations."""
    if args.chat:
        found = conversations(*chats_of(args), vocab_size)
    else:
        corpus = open_corpus(args.data, key=args.text_key)
        tokenizer = tokenizer_of(args) if corpus.reader.is_text else None
        found = ((checked(ids, vocab_size), None) for ids in documents(corpus, tokenizer))
    for ids, weights in found:
        yield from windows(ids, args.seq_len, args.stride, weights)


def perplexity(args: argparse.Namespace, mesh: Mesh) -> Evaluation:
    """The perplexity of all documents, computed on a mesh."""
    rules, model = ShardingRules.of(mesh), load_for_inference(args, mesh)
    parts = all_windows(args, model.config.vocab_size)
    packs = packed(parts, args.seq_len) if args.packed else ([part] for part in parts)
    graphdef, params = nnx.split(model)
    return evaluate(make_eval_step(graphdef), params, batches(args, packs, mesh, rules))


def checked(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """The token ids; raises ValueError if one exceeds the vocabulary."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(
            f"--data has token ids from {ids.min()} to {ids.max()}, but the model's vocabulary is "
            f"{vocab_size}: use the tokenizer of this model"
        )
    return ids


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, Parser]:
    """The arguments and their parser."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_inference_options(parser)
    add = parser.add_argument
    add(
        "--data", type=file_or_folder, required=True,
        help='text, JSON lines with a "text" key, or .npy arrays of token ids; a file or a folder',
    )  # fmt: skip
    add("--text-key", default="text", metavar="KEY", help="of JSON lines (default: text)")
    add_chat_options(add, long_chats=False)
    add("--seq-len", type=integer(1), help="tokens (default: 4096, or the model's limit)")
    add("--stride", type=integer(1), help="tokens between window starts (default: --seq-len)")
    add("--packed", action="store_true", help="pack several documents into a sequence")
    add("--batch", type=integer(1), help="batch size (default: data x fsdp x stage of --mesh)")
    add("--check", action="store_true", help="also compute it on one device")
    add("--out", type=file_or_folder, help="folder for perplexity.json")
    return parser.parse_args(argv), parser


def prepare(args: argparse.Namespace) -> Mesh:
    """Fills in defaults and validates the arguments; raises ValueError."""
    if args.chat_date is not None and not args.chat:
        raise ValueError("--chat-date needs --chat")
    mesh = mesh_of_option(args.mesh)
    args.batch = batch_of_option(args.batch, mesh)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    config = load_config(args.model, dtype=args.dtype, ignore=args.ignore)
    if args.seq_len is None:
        args.seq_len = min(4096, trained_length(config) or 4096)
    check_trained_length(config, "--seq-len", args.seq_len)
    if args.stride is None:
        args.stride = args.seq_len
    if args.stride > args.seq_len:
        raise ValueError(
            f"--stride is {args.stride}: it must be at most --seq-len, {args.seq_len}, or tokens "
            "would be skipped"
        )
    if args.chat:
        print(check_conversations(args, *chats_of(args), config.vocab_size))
    return mesh


def main(argv: list[str] | None = None) -> int:
    """Computes the perplexity and prints it.

    Returns:
      The exit code.
    """
    args, parser = parse_args(argv)
    use_cpu_devices()
    set_compiler_options()
    try:
        mesh = prepare(args)
        found = {"mesh": perplexity(args, mesh)}
        if args.check:
            found["one_device"] = perplexity(args, one_device(mesh))
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        parser.error(str(error))
    for name, each in found.items():
        print(f"{name:10}  perplexity {each.perplexity:.6f}  {each.nll:.6f} nats per token, "
              f"{each.tokens:,} tokens, in {args.dtype}")  # fmt: skip
    if args.out is not None:
        results = {name: each._asdict() for name, each in found.items()}
        replace_file(args.out / "perplexity.json", json.dumps(results, indent=1) + "\n")
    values = [each.perplexity for each in found.values()]
    if not max(values) / min(values) - 1 <= TOLERANCE:  # NaN is an error, too.
        print(f"error: the perplexities differ by more than {TOLERANCE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
