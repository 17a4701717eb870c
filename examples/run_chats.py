"""Conversations as the data of ``train_lm.py``: options, tokenizer, and a check of all lines."""

from __future__ import annotations

import argparse
import contextlib
import datetime
from collections.abc import Callable
from typing import Any

from burst_jax.data import ChatTokens, Corpus, TokenizerFile, check_chats
from burst_jax.data.chats import TooLong
from burst_jax.errors import shown
from burst_jax.parallel.processes import by_first_process

# Defaults of --sample-tokens: a sample continues a text, a conversation is for generate.py --chat.
SAMPLE_TOKENS = 200


def add_chat_options(add: Callable[..., Any], *, long_chats: bool = True) -> None:
    """Adds the options of conversations to a command line; ``long_chats``: that option, too."""
    add(
        "--chat", action="store_true",
        help='--data is JSON lines with "messages", or "prompt" and "completion"; only what the '
        "assistant writes counts",
    )  # fmt: skip
    if long_chats:
        add(
            "--long-chats", choices=("error", "cut"),
            help="conversations longer than --seq-len (default: error)",
        )  # fmt: skip
    add("--chat-date", type=date, help="for templates that write it (default: today)")


def date(text: str) -> datetime.date:
    """A ``type`` of ``add_argument``: a date like 2026-03-01."""
    with contextlib.suppress(ValueError):
        return datetime.date.fromisoformat(text)
    raise argparse.ArgumentTypeError(f"{shown(text)}: it must be a date like 2026-03-01")


def check_chat_options(args: argparse.Namespace) -> None:
    """Fills in defaults of options that conversations have.

    Raises:
      ValueError: options of conversations without ``--chat``, or others that conversations lack.
    """
    if args.sample_tokens is None:
        args.sample_tokens = 0 if args.chat else SAMPLE_TOKENS
    if not args.chat:
        for name in ("long_chats", "chat_date"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --chat")
        return
    if args.data is None:
        raise ValueError("--chat needs --data: JSON lines of conversations")
    if args.tokenizer is None and args.model is None:
        raise ValueError(
            "--chat needs a chat template: give --model, or --tokenizer with a tokenizer.json that "
            "has chat_template.jinja next to it"
        )
    if args.packing != "first_fit":
        raise ValueError(
            f"--packing is {args.packing}, which cuts conversations anywhere: leave it out"
        )
    if args.sample_tokens > 0:
        raise ValueError(
            f"--sample-tokens is {args.sample_tokens}: a sample continues a text; for answers run "
            "generate.py --chat with the trained model"
        )


def chat_tokens(
    args: argparse.Namespace,
    tokens: TokenizerFile,
    *,
    day: datetime.date | None = None,
    too_long: TooLong = "error",
) -> ChatTokens:
    """A tokenizer with the chat template next to ``--tokenizer``, or in ``--model``."""
    now = datetime.datetime.now()
    if day is not None:
        now = datetime.datetime.combine(day, datetime.time(12))
    folder = args.model if args.tokenizer is None else args.tokenizer.parent
    return ChatTokens.of(folder, tokens=tokens, now=now, too_long=too_long)


def check_conversations(
    args: argparse.Namespace,
    corpus: Corpus,
    tokens: ChatTokens,
    vocab_size: int,
    *,
    trained: float | None = None,
) -> str:
    """Reads all conversations on the first process, and describes them; "" on the others.

    ``trained``: the number of tokens that training reads, also of padding.

    Raises:
      ValueError: some cannot be used, see :func:`burst_jax.data.check_chats`.
    """
    found = []

    def check() -> None:
        found.append(check_chats(corpus, tokens, seq_len=args.seq_len, vocab_size=vocab_size))

    by_first_process(check)
    if not found:
        return ""
    (counts,) = found
    text = (
        f"{counts.conversations:,} conversations of {counts.tokens:,} tokens, of which the "
        f"assistant writes {counts.counted:,}; the longest has {counts.longest:,}"
    )
    more = counts.sequences - counts.conversations
    if more:
        text += (
            f"; the chat template changes earlier answers, which are in {more:,} further sequences"
        )
    if trained is not None:
        text += f"; training reads each about {trained / counts.tokens:,.1f} times"
    return text
