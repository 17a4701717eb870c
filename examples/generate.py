"""Generates text with a Hugging Face checkpoint and a context-parallel KV cache.

    python examples/generate.py --model folder --prompt "Once upon a time" --max-new-tokens 64
    python examples/generate.py --model folder --prompt-file book.txt --prompt "What happens?"
    python examples/generate.py --model folder --prompt-file a.txt b.txt --temperature 0.8
    python examples/generate.py --model folder --chat --prompt "What is a ring?"

``--prompt`` is appended to the text of each ``--prompt-file``. Several files form one batch. A
single answer is streamed; those of a batch are printed at the end. Without GPUs it uses 8 CPU
devices.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import extras  # noqa: F401 - ends the script if libraries are missing
import numpy as np
from hf_checkpoints import add_inference_options, load_for_inference
from jax.sharding import Mesh
from run_chats import chat_tokens
from run_options import tokenizer_of

from burst_jax.command_line import Parser, file_or_folder, integer, number, use_cpu_devices
from burst_jax.data import TokenizerFile
from burst_jax.errors import check_integer, printable
from burst_jax.json_files import read_bounded, read_object
from burst_jax.parallel.mesh_option import batch_shards, mesh_of_option
from burst_jax.parallel.xla_options import set_compiler_options
from burst_jax.serving import Generator
from burst_jax.serving.cache import MAX_LENGTH
from burst_jax.serving.sampling import Sampling


def prompts_of(
    args: argparse.Namespace,
) -> tuple[list[np.ndarray], TokenizerFile, list[int]]:
    """Token ids of each prompt, the tokenizer, and tokens that end an answer.

    Prompts have the special tokens that texts start with. With ``--chat`` each is a message of the
    user, after that of ``--system``.
    """
    try:
        texts = [text_of(path) for path in args.prompt_file] or [""]
    except (ValueError, OSError) as error:
        raise ValueError(f"--prompt-file: {error}") from None
    tokenizer = tokenizer_of(args)
    texts = [text + args.prompt for text in texts]
    if args.chat:
        chats = chat_tokens(args, tokenizer)
        end = chats.end_of_turn()
        prompts = [chats.prompt(messages_of(args, text)) for text in texts]
        return prompts, tokenizer, [] if end is None else [end]
    start = np.array(tokenizer.prefix_ids, np.int32)
    prompts = [np.concatenate([start, tokenizer.encode(text.encode())]) for text in texts]
    return prompts, tokenizer, []


def messages_of(args: argparse.Namespace, text: str) -> list[dict[str, str]]:
    """A conversation up to the assistant's answer to a text."""
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def text_of(path: Path) -> str:
    """The text in a file of at most 256 MiB."""
    try:
        return read_bounded(path, 1 << 28).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{printable(path)} is not UTF-8 at byte {error.start}") from None


def stop_tokens(folder: Path, vocab_size: int) -> list[int]:
    """End-of-text ids of ``generation_config.json`` or ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        given = read_object(path) if path.exists() else {}
        found = given.get("eos_token_id")
        # A model of text and images may have those of its language model alone.
        text = given.get("text_config")
        if found is None and isinstance(text, dict):
            found = text.get("eos_token_id")
        if found is not None:
            key, ids = (
                f"{printable(path)}: eos_token_id",
                found if isinstance(found, list) else [found],
            )
            # -1 is a common value for none.
            return [x for x in ids if 0 <= check_integer(key, x, -1) < vocab_size]
    return []


class Printer:
    """Streams a text token by token, in whole characters."""

    def __init__(self, tokenizer: TokenizerFile) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def add(self, token: int) -> None:
        """Adds a token and prints the new text."""
        self.keep(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[self._shown :], end="", flush=True)
            self._shown = len(text)

    def keep(self, token: int) -> None:
        """Adds a token without printing it."""
        self._ids.append(token)

    def text(self) -> str:
        """The whole text."""
        return self._tokenizer.decode(self._ids)


def generate(args: argparse.Namespace, mesh: Mesh) -> None:
    """Loads the model and prints what it generates."""
    prompts, tokenizer, ends = prompts_of(args)
    shards = batch_shards(mesh)
    if len(prompts) % shards:
        raise ValueError(
            f"--mesh shards the batch over {shards} devices, and the number of prompts is "
            f"{len(prompts)}: pass a multiple of {shards} text files as --prompt-file, or a --mesh "
            "with data, fsdp and stage of size 1"
        )
    model = load_for_inference(args, mesh)
    longest = max(map(len, prompts))
    server = Generator(
        model,
        max_length=longest + args.max_new_tokens,
        batch=len(prompts),
        prefill_chunk=args.prefill_chunk,
        split_weights=args.split_weights,
    )
    stops = sorted({*stop_tokens(args.model, model.config.vocab_size), *ends})
    del model
    print(
        f"prompts of {', '.join(f'{len(ids):,}' for ids in prompts)} tokens; the KV cache takes "
        f"{server.cache_bytes / 2**30:.3f} GiB per device",
        file=sys.stderr,
    )
    printers = [Printer(tokenizer) for _ in prompts]
    first = count = 0
    for tokens in server.generate(
        prompts,
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop_tokens=stops,
        seed=args.seed,
    ):
        first, count = first or time.perf_counter(), count + 1
        for printer, token in zip(printers, tokens, strict=True):
            if token >= 0 and token not in stops:
                if len(printers) == 1:
                    printer.add(int(token))
                else:
                    printer.keep(int(token))
    seconds = time.perf_counter() - first
    print("" if len(printers) == 1 else "\n---\n".join(printer.text() for printer in printers))
    rate = (
        f"{(count - 1) / seconds:.1f} tokens/s per sequence after it" if count > 1 else "one token"
    )
    print(
        f"first token after {server.seconds_to_first_token:.2f} s, compilation included; {rate}",
        file=sys.stderr,
    )


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, Parser]:
    """The arguments and their parser."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_inference_options(parser)
    add = parser.add_argument
    add("--prompt", default="", help="text, appended to that of --prompt-file")
    add(
        "--prompt-file",
        type=file_or_folder,
        nargs="+",
        default=[],
        help="text files, one per sequence of the batch",
    )
    add("--chat", action="store_true", help="the text is a message of a chat, by its template")
    add("--system", help="system prompt of --chat")
    add("--max-new-tokens", type=integer(1, MAX_LENGTH), default=128, help="default: 128")
    add("--temperature", type=number(0), default=0.0, help="0 is greedy (default: 0)")
    add("--top-k", type=integer(1), help="sample only from the K most probable tokens")
    add("--top-p", type=number(0, 1), help="nucleus sampling: total probability of the candidates")
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="random seed (default: 0)")
    add("--prefill-chunk", type=integer(1, MAX_LENGTH), help="prompt tokens per prefill step")
    add("--split-weights", action="store_true", help="shard the weights over the seq axis too")
    return parser.parse_args(argv), parser


def main(argv: list[str] | None = None) -> int:
    """Generates text and prints it.

    Returns:
      The exit code.
    """
    args, parser = parse_args(argv)
    use_cpu_devices()
    set_compiler_options()
    try:
        if not args.prompt and not args.prompt_file:
            raise ValueError("there is no prompt: pass --prompt, --prompt-file or both")
        if args.system is not None and not args.chat:
            raise ValueError("--system needs --chat")
        Sampling(args.temperature, args.top_k, args.top_p)  # Raises before the model is loaded.
        generate(args, mesh_of_option(args.mesh))
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
