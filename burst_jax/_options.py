"""Checks the attention options that Flax adapters and layers pass on to ``burst_attention``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from burst_jax.attention import burst_attention

OPTIONS: tuple[str, ...] = tuple(
    name
    for name, parameter in inspect.signature(burst_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


def check_options(owner: str, options: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raises unless every option is one that ``owner`` can pass on to ``burst_attention``.

    Args:
      owner: what the user called, for the message.
      options: the keyword arguments that the user gave.
      refused: options of ``burst_attention`` that ``owner`` does not take, with the reason and the
        remedy.

    Raises:
      TypeError: an unknown option (as Python raises for an unknown keyword argument).
      ValueError: a refused one.
    """
    allowed = [name for name in OPTIONS if name not in refused]
    for name in options:
        if name in refused:
            raise ValueError(f"{owner} does not take {name}: {refused[name]}")
        if name not in allowed:
            raise TypeError(f"{owner} got an unknown option {name!r}: use {', '.join(allowed)}")
