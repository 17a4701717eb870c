"""Checks of prompts and stop tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np


def check_prompts(prompts: Any, batch: int, vocab_size: int) -> list[np.ndarray]:
    """The prompts as int32 arrays.

    Raises:
      ValueError: not one prompt per sequence, one that is empty or not a list of token ids, or ids
        outside of the vocabulary.
    """
    if isinstance(prompts, (str, bytes)) or not hasattr(prompts, "__iter__"):
        raise ValueError(
            f"prompts is a {type(prompts).__name__}: pass a list with the token ids of each prompt"
        )
    rows = list(prompts)
    if rows and all(_is_number(row) for row in rows):
        raise ValueError("prompts holds single numbers: pass a list of prompts, like [ids] for one")
    if len(rows) != batch:
        raise ValueError(f"{len(rows)} prompts for a batch of {batch}: pass one per sequence")
    return [_check_prompt(row, prompt, vocab_size) for row, prompt in enumerate(rows)]


def _is_number(row: Any) -> bool:
    return isinstance(row, (int, float)) or getattr(row, "ndim", None) == 0


def _check_prompt(row: int, prompt: Any, vocab_size: int) -> np.ndarray:
    if isinstance(prompt, (str, bytes)):
        raise ValueError(
            f"prompt {row} is a {type(prompt).__name__}: pass the token ids from the model's "
            "tokenizer"
        )
    try:
        ids = np.asarray(prompt)
    except ValueError as error:
        raise ValueError(f"prompt {row} is not a list of token ids ({error})") from error
    if ids.ndim != 1 or not ids.size:
        raise ValueError(
            f"prompt {row} has shape {ids.shape}: it must be one token id or more; start an empty "
            "text with the tokenizer's BOS token"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompt {row} has dtype {ids.dtype}: token ids are integers")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(
            f"prompt {row} has the ids {ids.min()} to {ids.max()}: the vocabulary has 0 to "
            f"{vocab_size - 1}"
        )
    return ids.astype(np.int32)


def check_stops(stop_tokens: Collection[int], vocab_size: int) -> list[int]:
    """The stop tokens as Python ints.

    Raises:
      ValueError: an id outside of the vocabulary.
    """
    if not hasattr(stop_tokens, "__iter__"):
        raise ValueError(f"stop_tokens is {stop_tokens!r}: pass a list of token ids, or ()")
    stops = []
    for token in stop_tokens:
        ids = np.asarray(token)
        if ids.ndim or not np.issubdtype(ids.dtype, np.integer) or not 0 <= ids < vocab_size:
            raise ValueError(
                f"stop_tokens has {token!r}: the vocabulary has the ids 0 to {vocab_size - 1}"
            )
        stops.append(int(ids))
    return stops
