"""The arrays of the public functions: their dimensions, and checks with the argument's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from burst_jax.attention.validation import FLOAT_DTYPES, check_is_array
from burst_jax.layouts.run_tables import RUN_DIMENSIONS

# Letters: B batch, T tokens, K key heads, N value heads, H and Hv head dims of keys and values, W
# taps of a convolution, F its features, P = W - 1 the tokens before one that it reads. Those of the
# tables of a balanced batch are on the mesh. log_decay may have H as one more dimension
# (:func:`dimensions_of`).
DIMENSIONS = {
    "query": "B T K H",
    "key": "B T K H",
    "value": "B T N Hv",
    "log_decay": "B T N",
    "beta": "B T N",
    "segment_ids": "B T",
    "initial_state": "B N H Hv",
    "x": "B T F",
    "weight": "W F",
    "initial_tail": "B P F",
    **RUN_DIMENSIONS,
}
# Of gated_delta_rule_step: one token of each sequence.
STEP = {
    "query": "B K H",
    "key": "B K H",
    "value": "B N Hv",
    "log_decay": "B N",
    "beta": "B N",
    "state": "B N H Hv",
}
OUT, STATE = "B T N Hv", "B N H Hv"
CONVOLVED, TAIL = "B T F", "B P F"


def dimensions_of(name: str, array: Any, dimensions: Mapping[str, str] = DIMENSIONS) -> str:
    """An argument's dimensions, by letter."""
    letters = dimensions[name]
    per_channel = name == "log_decay" and len(array.shape) == len(letters.split()) + 1
    return f"{letters} H" if per_channel else letters


def without_absent(arrays: Mapping[str, Any], *optional: str) -> dict[str, Any]:
    """The arrays but for optional ones that are None."""
    return {name: x for name, x in arrays.items() if x is not None or name not in optional}


def check_shapes(dimensions: Mapping[str, str], arrays: Mapping[str, Any]) -> dict[str, int]:
    """The sizes by letter; raises ValueError unless the arrays have these dimensions."""
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, array in arrays.items():
        check_is_array(name, array, "an array")
        letters = dimensions_of(name, array, dimensions).split()
        wanted = f"[{', '.join(letters)}]"
        # A convolution of one tap has a tail of no tokens.
        may_be_empty = {"P"}.intersection(letters)
        empty = [letter for letter, size in zip(letters, array.shape, strict=False) if not size]
        if len(array.shape) != len(letters) or not may_be_empty.issuperset(empty):
            if name == "log_decay" and letters[-1] != "H":
                wanted += f" or [{', '.join([*letters, 'H'])}]"
            raise ValueError(
                f"{name} has shape {array.shape}: it must be {wanted}, with no empty dimension"
            )
        for letter, size in zip(letters, array.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{name} has shape {array.shape}, {owner[letter]} has {letter} = "
                    f"{sizes[letter]}: {name} must be {wanted} with the same {letter}"
                )
            owner.setdefault(letter, name)
    return sizes


def check_floats(arrays: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ValueError unless each array has a dtype that is computed with."""
    for name in names:
        # Compared as text, which also rejects another byte order.
        if str(arrays[name].dtype) not in FLOAT_DTYPES:
            raise ValueError(
                f"{name} has dtype {arrays[name].dtype}: cast it to one of "
                f"{', '.join(FLOAT_DTYPES)}"
            )


def check_rule(
    dimensions: Mapping[str, str], arrays: Mapping[str, Any], state: str
) -> dict[str, int]:
    """Checks what the rule and its single step have in common; ``state`` is that argument's name.

    Raises:
      ValueError: an array has another shape or dtype.
    """
    sizes = check_shapes(dimensions, arrays)
    check_floats(arrays, ("query", "key", "value", "log_decay", "beta"))
    dtypes = {name: arrays[name].dtype for name in ("query", "key", "value")}
    if len(set(dtypes.values())) > 1:
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"dtypes are {given}: cast them to one dtype, as key.astype(query.dtype)")
    if sizes["N"] % sizes["K"]:
        raise ValueError(
            f"key has {sizes['K']} heads, value {sizes['N']}: the number of value heads must be a "
            "multiple of the number of key heads"
        )
    if state in arrays and arrays[state].dtype != jnp.float32:
        raise ValueError(f"{state} has dtype {arrays[state].dtype}: cast it to float32")
    return sizes


def check_tail(sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless a convolution's initial tail has a token for each tap but the last.

    ``sizes`` are those by letter, of :func:`check_shapes`.
    """
    if "P" in sizes and sizes["P"] != sizes["W"] - 1:
        raise ValueError(
            f"initial_tail has {sizes['P']} tokens, and weight {sizes['W']} taps: pass the "
            f"{sizes['W'] - 1} tokens before the first one, or None for zeros"
        )
