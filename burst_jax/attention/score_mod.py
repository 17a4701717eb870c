"""The arguments ``score_mod`` and ``mask_mod``: user functions of one score."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.elementwise import Traced, trace

Scalar = jax.Array
# (score, batch, head, q_position, kv_position) -> the modified score.
ScoreMod = Callable[[Scalar, Scalar, Scalar, Scalar, Scalar], Any]
# (batch, head, q_position, kv_position) -> whether the query attends to the key.
MaskMod = Callable[[Scalar, Scalar, Scalar, Scalar], Any]
_SIGNATURES = {
    "score_mod": "score_mod(score, batch, head, q_position, kv_position) -> score",
    "mask_mod": "mask_mod(batch, head, q_position, kv_position) -> bool",
}
# What JAX raises where Python or NumPy ask for the value of a traced number.
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# Names of operations that reduce over several scores begin with these.
_REDUCTIONS = ("reduce", "arg", "cum", "sort")


def check_functions(score_mod: Any, mask_mod: Any) -> None:
    """Raises unless both are None or functions of one score.

    Raises:
      ValueError: not a function of these arguments, not hashable, or its result is not one scalar
        of the right kind.
      NotImplementedError: it captures a tracer of an outer ``jax.jit``, gradient or ``jax.vmap``.
    """
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            check_function(name, function)


def check_function(name: str, function: Any) -> Traced:
    """:func:`check_functions` of one; returns what it does."""
    if not callable(function):
        raise ValueError(f"{name} is {function!r}: it must be a function, {_SIGNATURES[name]}")
    if not isinstance(function, Hashable):
        raise ValueError(
            f"{name} is {function!r}, which cannot be hashed: programs are kept by their "
            "functions; pass a plain function, or a functools.partial of one"
        )
    _check_signature(name, function)
    try:
        traced = trace(function, takes_score=name == "score_mod")
    except _NEEDS_A_VALUE as error:
        raise ValueError(
            f"{name} is {function!r} and needs the value of a traced number (a Python if, and, or, "
            "not, int() or a NumPy function): write it with jax.numpy, like jnp.where(condition, "
            f"this, that), & for and, | for or, ~ for not, {_SIGNATURES[name]}"
        ) from error
    except Exception as error:
        error.add_note(f"It was called as {_SIGNATURES[name]}, with a traced number for each.")
        raise
    for captured in traced.captured:
        if isinstance(captured, jax.core.Tracer):
            raise NotImplementedError(
                f"{name} is {function!r} and captures {captured.aval.str_short()}, which an outer "
                "jax.jit, gradient or jax.vmap traces: user functions are compiled in, and what "
                "they capture has no gradient; capture Python numbers or concrete arrays, or use "
                "an argument (alibi_slopes, block_mask, key_starts, a factor on the query)"
            )
    _check_result(name, function, traced)
    return traced


def reject_batch_and_head_indices(axes: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Raises if user functions read batch or head indices that a ``shard_map`` splits.

    Args:
      axes: mesh axes that the batch and the heads are sharded over.
      options: keyword arguments of ``ring_attention``.

    Raises:
      NotImplementedError: a function reads the batch or head index, and it is sharded.
    """
    for name in _SIGNATURES if axes else ():
        function = options.get(name)
        if function is None:
            continue
        traced, first = check_function(name, function), int(name == "score_mod")
        if traced.reads(first) or traced.reads(first + 1):
            raise NotImplementedError(
                f"{name} is {function!r} and reads the batch row or the head, which batch_axis and "
                f"tensor_axis split over {axes}: inside a shard_map each device counts its own "
                "from 0; call the layer outside of a shard_map, or read positions alone"
            )


def _check_signature(name: str, function: Any) -> None:
    """Raises ValueError unless a function accepts the arguments that it will be called with."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # A function of C without one.
        return
    count = 5 if name == "score_mod" else 4
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise ValueError(
            f"{name} is {function!r} with the arguments {signature}, and it is called with {count} "
            f"by position ({error}): write it as {_SIGNATURES[name]}"
        ) from None


def _check_result(name: str, function: Any, traced: Traced) -> None:
    """Raises ValueError unless a function returns one scalar of the right kind, elementwise."""
    for operation in traced.operations:
        scalar = all(np.shape(x) == () for x in operation.inputs)
        if scalar and operation.name.startswith(_REDUCTIONS):
            raise ValueError(
                f"{name} is {function!r} and does {operation.name!r}: it sees one score at a time, "
                f"and must not bring several together, {_SIGNATURES[name]}"
            )
    kind, what = (jnp.floating, "float") if name == "score_mod" else (jnp.bool, "bool")
    kinds = [f"{x.dtype}{list(np.shape(x))}" for x in traced.results]
    if (
        len(kinds) != 1
        or np.shape(traced.results[0]) != ()
        or not jnp.issubdtype(traced.results[0].dtype, kind)
    ):
        raise ValueError(
            f"{name} is {function!r} and returns {', '.join(kinds) or 'nothing'} for one score: it "
            f"must return one {what}, made by elementwise operations, {_SIGNATURES[name]}"
        )
