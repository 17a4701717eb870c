"""Arguments that are refused: those that functions do not take, and what to use instead."""

from __future__ import annotations

import difflib
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_NO_DENSE_MASK = (
    "there are no dense bias and mask, the fourth and fifth argument of "
    "jax.nn.dot_product_attention; say a mask by is_causal, local_window_size or "
    "query_segment_ids and key_value_segment_ids or key_starts and key_ends or block_mask or "
    "mask_mod, a bias by alibi_slopes or score_mod, and leave them out if they are None"
)
# What to use instead of arguments of jax.nn.dot_product_attention that are not taken.
_REMEDIES = {
    "bias": _NO_DENSE_MASK,
    "mask": _NO_DENSE_MASK,
}


def without_catch_all[F: Callable[..., Any]](function: F) -> F:
    """The function itself, whose signature is shown without ``*args`` and ``**kwargs``.

    Those take arguments that the function does not have, so that it can refuse them with a remedy.
    """
    signature = inspect.signature(function)
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    shown = [each for each in signature.parameters.values() if each.kind not in kinds]
    setattr(function, "__signature__", signature.replace(parameters=shown))  # noqa: B010
    return function


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: which of ``names`` is spelled like it."""
    close = difflib.get_close_matches(name, names, n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


def check_integer(name: str, value: Any, least: int) -> int:
    """``value`` as a Python int.

    Raises:
      ValueError: it is no integer, or smaller than ``least``.
    """
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not integer or value < least:
        raise ValueError(f"{name} is {value!r}: it must be an integer, at least {least}")
    return int(value)


def check_seed(seed: Any) -> int:
    """``seed`` as a Python int.

    Raises:
      ValueError: it is not in 0 ... 2**32 - 1. JAX would take its last 32 bits, and so 0 for 2**32.
    """
    if check_integer("seed", seed, 0) >= 2**32:
        raise ValueError(f"seed is {seed}: it must be below 2**32")
    return int(seed)


def refuse_other_arguments(
    function: Callable[..., object], positional: tuple[object, ...], others: Mapping[str, object]
) -> None:
    """Raises TypeError if a call has arguments that the function does not have.

    For those of ``jax.nn.dot_product_attention`` the message says what to use instead.

    Args:
      function: the public function, :func:`without_catch_all`.
      positional: the arguments by position that came beside those it has.
      others: the arguments by keyword that came beside those it has.
    """
    called = function.__name__
    if positional:
        raise TypeError(
            f"{called} takes query, key and value by position, and {len(positional)} more "
            f"came: {_REMEDIES['mask']}"
        )
    for name in others:
        if name in _REMEDIES:
            raise TypeError(f"{called} has no argument {name!r}: {_REMEDIES[name]}")
        hint = did_you_mean(name, inspect.signature(function).parameters)
        raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")
