"""User ``score_mod`` and ``mask_mod``: tracing them, and running them on tiles of scores.

    score_mod(score, batch, head, q_position, kv_position) -> score
    mask_mod(batch, head, q_position, kv_position) -> bool

They are traced with scalars. Plain JAX then runs any such function on every score of a tile by
``jnp.vectorize``. A kernel runs the traced operations one by one on whole tiles, so it supports
elementwise operations only, and not all of them
(:func:`pallas_kernels.spec.unsupported_functions`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Operations that are the identity on scalars.
_NOTHING = (
    *("broadcast_in_dim", "copy", "copy_p", "reshape", "reshard", "squeeze", "stop_gradient"),
)
# Parameters that hold the jaxpr which an operation calls.
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CONTROL_FLOW = ("cond", "scan", "while")
_TO_FLOAT32 = "convert_element_type", np.dtype(np.float32)


class Variable:
    """A value of a traced function.

    Attributes:
      dtype: its dtype.
      shape: (), except within operations that only plain JAX can run.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, aval: Any):
        self.dtype, self.shape = aval.dtype, aval.shape


class Operation(NamedTuple):
    """One operation of a traced function.

    Attributes:
      primitive: the JAX primitive.
      params: its parameters.
      inputs: variables, constants and captured arrays.
      outputs: variables.
    """

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Variable, ...]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.primitive.name


class Traced(NamedTuple):
    """A function as a list of operations, without those that its results do not depend on.

    Attributes:
      arguments: variables.
      operations: in order.
      results: variables, constants or captured arrays.
    """

    arguments: tuple[Variable, ...]
    operations: tuple[Operation, ...]
    results: tuple[Any, ...]

    @property
    def _atoms(self) -> list[Any]:
        return [*self.results, *(atom for each in self.operations for atom in each.inputs)]

    @property
    def captured(self) -> list[Any]:
        """Arrays and tracers that the function captures."""
        return [x for x in self._atoms if not isinstance(x, (Variable, np.generic))]

    def reads(self, argument: int) -> bool:
        """Whether the results depend on the argument at this index."""
        return any(atom is self.arguments[argument] for atom in self._atoms)


def in_plain_jax(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function`` applied to each element of arrays that broadcast against each other."""
    return jnp.vectorize(function)(*arguments)


class ScoreCoordinates(NamedTuple):
    """Coordinates of a tile's scores, and how user functions run on the tile.

    Attributes:
      batch: int32, global batch index; this and the following broadcast against the tile.
      head: int32, global query head index.
      q_position: int32.
      kv_position: int32.
      run: ``(function, *arguments) -> results``: :func:`in_plain_jax`, or a kernel's.
    """

    batch: Any
    head: Any
    q_position: Any
    kv_position: Any
    run: Callable[..., Any] = in_plain_jax

    def apply(self, function: Callable[..., Any], *score: Any) -> Any:
        """Applies a ``score_mod`` to scores, or a ``mask_mod`` to none."""
        place = self.batch, self.head, self.q_position, self.kv_position
        return self.run(function, *score, *place)


def modified(score_mod: Callable[..., Any], score: Any, *place: Any) -> Any:
    """The result of ``score_mod``, in the score's dtype."""
    return jnp.asarray(score_mod(score, *place)).astype(score.dtype)


def derivative(score_mod: Callable[..., Any], score: Any, *place: Any) -> Any:
    """The derivative of ``score_mod`` with respect to its score argument."""
    return with_derivative(score_mod, score, *place)[1]


def with_derivative(score_mod: Callable[..., Any], score: Any, *place: Any) -> tuple[Any, Any]:
    """:func:`modified` and :func:`derivative`."""
    return jax.jvp(
        lambda score: modified(score_mod, score, *place), (score,), (jnp.ones_like(score),)
    )


def derivative_is_one(score_mod: Callable[..., Any]) -> bool:
    """Whether a ``score_mod`` only adds something to the score."""
    (of_score,) = trace(functools.partial(derivative, score_mod), takes_score=True).results
    return isinstance(of_score, np.generic) and of_score == 1


def trace(function: Callable[..., Any], *, takes_score: bool) -> Traced:
    """Traces ``function`` with a float32 score, if it has one, and four int32 scalars."""
    place = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    score = [jax.ShapeDtypeStruct((), jnp.float32)] if takes_score else []
    closed = jax.make_jaxpr(function)(*score, *place)
    arguments = tuple(Variable(var.aval) for var in closed.jaxpr.invars)
    operations: list[Operation] = []
    return _needed(arguments, operations, _inlined(closed, arguments, operations))


def with_float_distances(traced: Traced) -> Traced | None:
    """The function with two more arguments, float32: positions of query and key, from some base.

    Where it converts the distance of the positions to float32, it now subtracts these. So kernels
    convert positions once per token instead of once per score. It is exact as long as float32 holds
    both positions: less than 2^24 from the base. None if the function converts no distance.
    """
    q, kv = traced.arguments[-2:]
    floats = {id(q): _float_variable(), id(kv): _float_variable()}
    # By the id of an int32 distance, and of what it is converted to.
    distances: dict[int, Variable] = {}
    converted: dict[int, Variable] = {}
    operations: list[Operation] = []
    for operation in traced.operations:
        name, places, output = operation.name, [*map(id, operation.inputs)], operation.outputs[0]
        if not places:
            operations.append(operation)
            continue
        operands = None
        if name == "sub" and places in ([id(q), id(kv)], [id(kv), id(q)]):
            operands = tuple(floats[place] for place in places)
        elif name in ("abs", "neg") and places[0] in distances:
            operands = (distances[places[0]],)
        elif places[0] in distances and (name, output.dtype) == _TO_FLOAT32:
            converted[id(output)] = distances[places[0]]
        if operands is not None:
            made = distances[id(output)] = _float_variable()
            operations.append(operation._replace(inputs=operands, outputs=(made,)))
        read = tuple(converted.get(id(x), x) for x in operation.inputs)
        operations.append(operation._replace(inputs=read))
    results = [converted.get(id(x), x) for x in traced.results]
    changed = _needed((*traced.arguments, *floats.values()), operations, results)
    return changed if changed.reads(len(changed.arguments) - 1) else None


def _float_variable() -> Variable:
    return Variable(jax.ShapeDtypeStruct((), jnp.float32))


def _needed(arguments: Any, operations: list[Operation], results: Any) -> Traced:
    """Without the operations that no result depends on."""
    needed, kept = set(map(id, results)), []
    for operation in reversed(operations):
        if needed.intersection(map(id, operation.outputs)):
            kept.append(operation)
            needed.update(map(id, operation.inputs))
    return Traced(tuple(arguments), tuple(reversed(kept)), tuple(results))


def _inlined(closed: Any, arguments: Any, operations: list[Operation]) -> list[Any]:
    """Appends the operations of a jaxpr and of those it calls; returns its results."""
    jaxpr, captured = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
    known = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= dict(zip(jaxpr.constvars, map(_compiled_in, captured), strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype)[()]
        return known[atom]

    for eqn in jaxpr.eqns:
        inputs, name = tuple(map(read, eqn.invars)), eqn.primitive.name
        called = next((eqn.params[param] for param in _CALLED if param in eqn.params), None)
        if called is not None and name not in _CONTROL_FLOW:
            outputs = _inlined(called, inputs, operations)
        elif name in _NOTHING and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape == ():
            outputs = inputs
        else:
            outputs = tuple(Variable(var.aval) for var in eqn.outvars)
            # Autodiff adds by an operation of its own, which kernels lack.
            primitive = jax.lax.add_p if name == "add_any" else eqn.primitive
            operations.append(Operation(primitive, eqn.params, inputs, outputs))
        known |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _compiled_in(captured: Any) -> Any:
    """A captured number as a NumPy constant; an array or a tracer unchanged."""
    if isinstance(captured, jax.core.Tracer) or np.shape(captured) != ():
        return captured
    return np.asarray(captured)[()]


def on_tiles(
    function: Callable[..., Any],
    *arguments: Any,
    replaced: Mapping[str, Callable[..., Any]],
    float_positions: Callable[[], tuple[Any, Any]] | None = None,
) -> Any:
    """Applies ``function`` to tiles and to what broadcasts against them, inside a kernel.

    Args:
      function: one that a kernel supports (:func:`pallas_kernels.spec.unsupported_functions`).
      *arguments: batch, head and the two positions, preceded by the scores for a ``score_mod``.
      replaced: replacements of operations by name, called with the same parameters.
      float_positions: loads the arguments that :func:`with_float_distances` adds, to a
        ``score_mod``; None adds none.
    """
    shaped, takes_score = arguments, len(arguments) == 5
    traced = trace(function, takes_score=takes_score)
    if takes_score and float_positions is not None:
        changed = with_float_distances(traced)
        if changed is not None:
            traced, arguments = changed, (*arguments, *float_positions())
    values = dict(zip(traced.arguments, arguments, strict=True))

    def read(atom: Any) -> Any:
        return values[atom] if isinstance(atom, Variable) else atom

    for operation in traced.operations:
        inputs = [read(atom) for atom in operation.inputs]
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in inputs))
        if shape:
            inputs = [jnp.broadcast_to(x, shape) for x in inputs]
        run = replaced.get(operation.name, operation.primitive.bind)
        (output,) = operation.outputs
        values[output] = run(*inputs, **operation.params)
    results = tuple(read(atom) for atom in traced.results)
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in shaped))
    results = tuple(jnp.broadcast_to(x, shape) for x in results)
    return results[0] if len(results) == 1 else results
