"""Special tokens of a tokenizer: their names, and those that every text starts and ends with.

The rule is that of transformers, so that a text has the same tokens in training, evaluation and
generation as there: if ``tokenizer_config.json`` has ``add_bos_token`` or ``add_eos_token``, these
two decide, with its ``bos_token`` and ``eos_token``; otherwise the post-processor of
``tokenizer.json`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burst_jax.errors import printable, shown
from burst_jax.json_files import read_object

CONFIG = "tokenizer_config.json"
# Bytes of a config, which may have a chat template.
_MAX_CONFIG = 1 << 24
_ADDED = ("add_bos_token", "add_eos_token")


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json``; empty if the folder has none."""
    try:
        return read_object(folder / CONFIG, _MAX_CONFIG)
    except FileNotFoundError:
        return {}


def special_tokens_of(config: Mapping[str, Any], name: str) -> dict[str, str]:
    """The texts of special tokens by their names, like ``{"bos_token": "<s>"}``.

    Args:
      config: contents of ``tokenizer_config.json``.
      name: its path, for messages.

    Raises:
      ValueError: a token is neither a string nor an object with a string as ``content``.
    """
    extra = config.get("extra_special_tokens")
    named = {key: x for key, x in config.items() if key.endswith("_token") and key not in _ADDED}
    found = {}
    for key, value in {**named, **(extra if isinstance(extra, dict) else {})}.items():
        token = value.get("content") if isinstance(value, dict) else value
        if token is None or isinstance(token, bool):  # No such token, or an option of another name.
            continue
        if not isinstance(token, str):
            raise ValueError(
                f"{printable(name)} has {shown(value)} as {key}: it must be a string, or an object "
                "with its text as content"
            )
        found[key] = token
    return found


def added_to_texts(
    tokenizer: Any, config: Mapping[str, Any], name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids at the start and at the end of every text, each empty if there are none.

    Args:
      tokenizer: a ``tokenizers.Tokenizer``.
      config: contents of ``tokenizer_config.json``.
      name: its path, for messages.

    Raises:
      ValueError: the config adds a token that is not in the vocabulary.
    """
    if any(key in config for key in _ADDED):
        tokens = special_tokens_of(config, name)
        first, last = (
            _added(tokenizer, config, tokens, which, name) for which in ("bos_token", "eos_token")
        )
        return first, last
    found = tokenizer.encode("a", add_special_tokens=True)
    text = [index for index, special in enumerate(found.special_tokens_mask) if not special]
    first, last = (text[0], text[-1] + 1) if text else (len(found.ids), len(found.ids))
    return tuple(found.ids[:first]), tuple(found.ids[last:])


def _added(
    tokenizer: Any, config: Mapping[str, Any], tokens: Mapping[str, str], which: str, name: str
) -> tuple[int, ...]:
    adds = config.get(f"add_{which}")
    if adds not in (True, False, None):
        raise ValueError(
            f"{printable(name)} has {shown(adds)} as add_{which}: it must be true or false"
        )
    if not adds or which not in tokens:
        return ()
    index = tokenizer.token_to_id(tokens[which])
    if index is None:
        raise ValueError(
            f"{printable(name)} has the {which} {tokens[which]!r}, which tokenizer.json lacks: use "
            "the files of one tokenizer"
        )
    return (index,)
