"""Where a traced loss puts its work on the mesh: axes of attention calls, whole sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from burst_jax.attention.watch import Place
from burst_jax.parallel.mesh import flat_names
from burst_jax.verify.batch import Sizes
from burst_jax.verify.program import (
    Known,
    Program,
    Step,
    calls_of_attention,
    equations,
    flat_program,
)

# Dimensions of a query, [B, T, N, H].
_QUERY_RANK = 4


@dataclasses.dataclass(frozen=True)
class CallAxes:
    """An attention call on global arrays, as it was traced.

    Attributes:
      used: the mesh axes that shard an array of the call, in all calls of its line.
      vmapped: whether a ``jax.vmap`` added a dimension to it.
    """

    used: frozenset[str]
    vmapped: bool


def axes_of_calls(closed: ClosedJaxpr) -> dict[Place, CallAxes]:
    """The mesh axes of the attention calls on global arrays, by the caller's line.

    They are those of the program, and not of the arguments: ``spmd_axis_name`` of a ``jax.vmap``
    adds one.
    """
    found: dict[Place, CallAxes] = {}
    for equation, place in calls_of_attention(closed):
        maps = [e for e in equations(equation.params["jaxpr"].jaxpr) if _is_shard_map(e)]
        if place is None or not maps:
            continue
        specs = [spec for each in maps for spec in each.params["in_specs"]]
        used = frozenset(name for spec in specs for name in flat_names(*spec))
        rank = max(len(x.aval.shape) for x in equation.invars)
        vmapped = rank > _QUERY_RANK
        if place in found:  # In a loop over layers, which may differ.
            used, vmapped = used & found[place].used, vmapped or found[place].vmapped
        found[place] = CallAxes(used, vmapped)
    return found


def _is_shard_map(equation: Any) -> bool:
    return equation.primitive.name == "shard_map"


def whole_sequences(
    closed: ClosedJaxpr, arguments: list[Any], sizes: Sizes, batch: int, axes: tuple[str, ...]
) -> list[str]:
    """A sentence about activations that have whole sequences on each device, if there are any.

    The loss is compiled with all activations as results, whose shardings XLA chooses as it does
    inside: where tokens and a weight are sharded over one axis, it may follow the weight.

    Args:
      closed: the loss, traced on the mesh.
      arguments: its arrays, of which the last ``batch`` are the batch.
      sizes: of the batch.
      batch: how many arrays the batch has.
      axes: the mesh axes that shard the tokens.
    """
    program = flat_program(closed, unroll=False)
    activations = _activations(program, sizes, batch)
    if not activations:
        return []

    def run(*inputs: Any) -> list[Any]:
        values = dict(program.constants) | dict(zip(program.inputs, inputs, strict=True))
        for step in program.steps:
            given = (x.value if isinstance(x, Known) else values[x] for x in step.inputs)
            values |= zip(step.outputs, step.run(*given), strict=True)
        return [values[number] for _, number, _ in activations]

    shardings = jax.jit(run).lower(*arguments).compile().output_shardings
    whole = [
        (step, shape, sharding)
        for (step, _, shape), sharding in zip(activations, shardings, strict=True)
        if sharding.shard_shape(shape)[1] == sizes.length
    ]
    if not whole:
        return []
    step, shape, sharding = whole[0]
    line = f"at {step.place}" if step.place is not None else "in the library's code"
    names = ", ".join(map(repr, axes))
    spec = getattr(sharding, "spec", None)
    shown = "" if spec is None else f", sharded as {spec}"
    return [
        f"{len(whole)} of {len(activations)} activations [B, T, ...] have whole sequences on each "
        f"device, although mesh axis {names} shards the tokens: first the result of {step.name} "
        f"{line}, {list(shape)}{shown}. XLA follows a weight that is sharded over {names}: "
        "constrain that result to the tokens' sharding, jax.lax.with_sharding_constraint(x, "
        "PartitionSpec(batch_axis, seq_axis)), or jax.reshard over Explicit axes"
    ]


def _activations(
    program: Program, sizes: Sizes, batch: int
) -> list[tuple[Step, int, tuple[int, ...]]]:
    """The steps whose results are ``[B, T, ...]``, floating, and depend on the batch."""
    found, dependent = [], set(program.inputs[len(program.inputs) - batch :])
    for step in program.steps:
        if not any(x in dependent for x in step.inputs if isinstance(x, int)):
            continue
        dependent |= set(step.outputs)
        if step.equation is None:
            continue
        for number, variable in zip(step.outputs, step.equation.outvars, strict=True):
            shape, dtype = variable.aval.shape, getattr(variable.aval, "dtype", None)
            if (
                len(shape) > 2
                and shape[:2] == (sizes.batch, sizes.length)
                and dtype is not None
                and jnp.issubdtype(dtype, jnp.floating)
            ):
                found.append((step, number, tuple(shape)))
    return found
