"""Checks the options that attention functions and layers pass on to ``burst_attention``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from burst_jax.attention.api import burst_attention
from burst_jax.errors import did_you_mean

OPTIONS: tuple[str, ...] = tuple(
    name
    for name, parameter in inspect.signature(burst_attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


def check_options(
    owner: str,
    options: Mapping[str, object],
    refused: Mapping[str, str],
    own: Iterable[str] = (),
) -> None:
    """Raises unless every option is one that ``owner`` can pass on to ``burst_attention``.

    Args:
      owner: name of the function or class that the user called, for the message.
      options: the keyword arguments that the user gave.
      refused: for each option of ``burst_attention`` that ``owner`` does not take, the reason and
        the remedy.
      own: names of the arguments that ``owner`` itself has. A misspelled one arrives here, too.

    Raises:
      TypeError: an unknown option. The message names it, those that are known, and the one that is
        spelled like it.
      ValueError: an option that ``refused`` names.
    """
    allowed = [name for name in OPTIONS if name not in refused]
    for name in options:
        if name in refused:
            raise ValueError(f"{owner} does not take {name}: {refused[name]}")
        if name not in allowed:
            hint = did_you_mean(name, [*allowed, *own])
            known = ", ".join(allowed)
            raise TypeError(f"{owner} got an unknown option {name!r}: use {known}{hint}")
