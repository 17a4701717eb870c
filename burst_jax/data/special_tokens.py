"""Special tokens of a tokenizer: their names, and those that every text starts and ends with.

The post-processor of ``tokenizer.json`` defines what a text starts and ends with, as in
transformers since version 5, which ignores ``add_bos_token`` and ``add_eos_token`` of
``tokenizer_config.json`` next to that file.
"""

from __future__ import annotations

import warnings
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
    path = folder / CONFIG
    if not path.is_symlink() and not path.exists():
        return {}
    return read_object(path, _MAX_CONFIG)


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
        token = value.get("content", value) if isinstance(value, dict) else value
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

    Warns if the config's ``add_bos_token`` or ``add_eos_token`` is not what happens.

    Args:
      tokenizer: a ``tokenizers.Tokenizer``.
      config: contents of ``tokenizer_config.json``.
      name: its path, for messages.
    """
    found = tokenizer.encode("a", add_special_tokens=True)
    text = [index for index, special in enumerate(found.special_tokens_mask) if not special]
    first, last = (text[0], text[-1] + 1) if text else (len(found.ids), len(found.ids))
    added = tuple(found.ids[:first]), tuple(found.ids[last:])
    for key, ids in zip(_ADDED, added, strict=True):
        if config.get(key) not in (None, bool(ids)):
            warnings.warn(
                f"{printable(name)} has {key} {shown(config[key])}, and the post-processor of "
                f"tokenizer.json adds {'one' if ids else 'none'}, which is what texts have, as in "
                "transformers 5: make the two files agree",
                stacklevel=3,
            )
    return added
