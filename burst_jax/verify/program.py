"""Traced programs as a flat list of steps, and in wider precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from burst_jax.attention.watch import Place, is_attention_program, is_library
from burst_jax.jax_compat import (
    bind_equation,
    function_file,
    function_of_equation,
    scan_inputs,
    source_lines,
)

_PACKAGE = str(Path(__file__).parents[1]) + "/"
# The parameters of calls that hold the called program.
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
_CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "remat_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "eval_jaxpr"),
    "custom_vmap_call",
)
# They hold their update function as a program of the narrow dtype, so they are called again.
_SCATTERS: dict[str, Callable[..., jax.Array]] = {
    "scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter_add": lax.scatter_add,
    "scatter-mul": lax.scatter_mul, "scatter_mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min, "scatter_min": lax.scatter_min,
    "scatter-max": lax.scatter_max, "scatter_max": lax.scatter_max,
}  # fmt: skip
_NARROW = {"float32": ("bfloat16", "float16"), "float64": ("bfloat16", "float16", "float32")}


@dataclasses.dataclass(frozen=True)
class Known:
    """A constant of a program."""

    value: Any


# A value of a program: its number, or a constant.
Value = int | Known


@dataclasses.dataclass
class Step:
    """One operation of a flat program.

    Attributes:
      name: the primitive's name; a jitted function's for the library's own functions.
      run: the operation, from values to a list of values.
      inputs: its inputs.
      outputs: the numbers of its outputs.
      place: the line of user code that it comes from.
      file: the innermost file.
      equation: its equation; None for the steps of an unrolled scan.
      of_inputs: whether it depends on the program's inputs or on arrays that the function captured.
    """

    name: str
    run: Callable[..., list[Any]]
    inputs: list[Value]
    outputs: list[int]
    place: Place | None
    file: str = ""
    equation: Any = None
    of_inputs: bool = True

    @property
    def is_attention(self) -> bool:
        """Whether it is a call of this library's attention."""
        return is_attention_program(self.name, self.file)


@dataclasses.dataclass
class Program:
    """A flat program.

    Attributes:
      steps: in order.
      inputs: numbers of the inputs.
      constants: numbers and values of the arrays that the traced function captured.
      results: what it returns.
    """

    steps: list[Step]
    inputs: list[int]
    constants: list[tuple[int, Any]]
    results: list[Value]


def flat_program(closed: ClosedJaxpr, unroll: bool = True) -> Program:
    """A traced program without nested calls; with ``unroll`` scans with attention are unrolled.

    The library's own jitted functions stay single steps, and so do loops and ``shard_map``.
    """
    flat = _Flattener(unroll)
    constants = [(flat.number(), value) for value in closed.consts]
    inputs = [flat.number() for _ in closed.jaxpr.invars]
    names = [number for number, _ in constants]
    results = flat.inline(closed.jaxpr, names, inputs, None)
    dependent = {*names, *inputs}
    for step in flat.steps:
        step.of_inputs = any(x in dependent for x in step.inputs if isinstance(x, int))
        dependent |= set(step.outputs) if step.of_inputs else set()
    return Program(flat.steps, inputs, constants, results)


class _Flattener:
    def __init__(self, unroll: bool) -> None:
        self.unrolls = unroll
        self.steps: list[Step] = []
        self.count = 0
        # Copies of a loop's body share its compiled operations.
        self.compiled: dict[int, Callable[..., list[Any]]] = {}

    def number(self) -> int:
        self.count += 1
        return self.count - 1

    def inline(
        self, jaxpr: Any, consts: Sequence[Value], inputs: Sequence[Value], caller: Place | None
    ) -> list[Value]:
        """Appends the steps of ``jaxpr``; ``caller`` is the location of JAX's own functions."""
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return Known(atom.val) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            values |= zip(
                equation.outvars, self.equation(jaxpr, equation, given, caller), strict=True
            )
        return [read(atom) for atom in jaxpr.outvars]

    def equation(
        self, jaxpr: Any, equation: Any, given: list[Value], caller: Place | None
    ) -> list[Value]:
        name, body = equation.primitive.name, _body(equation)
        place, file = _place(equation, caller)
        if name in _CALLS and body is not None:
            inner = getattr(body, "jaxpr", body)
            source = function_file(inner)
            name = equation.params.get("name") or name
            if not (source.startswith(_PACKAGE) and equation.primitive.name in ("jit", "pjit")):
                known = [Known(value) for value in getattr(body, "consts", ())]
                return self.inline(inner, known, given, place if is_library(source) else caller)
            file = source
        elif self.unrolls and name == "scan" and body is not None and _has_unit(body):
            return self.unroll(equation, given, caller)
        outputs = [self.number() for _ in equation.outvars]
        self.steps.append(
            Step(name, self.operation(jaxpr, equation), given, outputs, place, file, equation)
        )
        return list(outputs)

    def operation(self, jaxpr: Any, equation: Any) -> Callable[..., list[Any]]:
        if _body(equation) is None and "branches" not in equation.params:
            # JAX caches the compiled operation by its parameters and the arrays' types.
            return lambda *values: bind_equation(equation, values)
        if id(equation) not in self.compiled:
            variables = [x for x in equation.invars if not isinstance(x, Literal)]
            places = [variables.index(x) for x in dict.fromkeys(variables)]
            function = jax.jit(function_of_equation(jaxpr, equation))
            which = [i for i, x in enumerate(equation.invars) if not isinstance(x, Literal)]

            def run(*values: Any) -> list[Any]:
                arrays = [values[i] for i in which]
                return list(function(*(arrays[i] for i in places)))

            self.compiled[id(equation)] = run
        return self.compiled[id(equation)]

    def unroll(self, equation: Any, given: list[Value], caller: Place | None) -> list[Value]:
        params = equation.params
        body, length = params["jaxpr"], params["length"]
        consts, carry, stacked = scan_inputs(params, given)
        n_carry, order = len(carry), range(length)
        known = [Known(value) for value in body.consts]
        columns: list[list[Value]] = [[] for _ in body.jaxpr.outvars[n_carry:]]
        for i in reversed(order) if params["reverse"] else order:
            rows = [self.added("index", lambda x, i=i: [x[i]], [xs]) for xs in stacked]
            out = self.inline(body.jaxpr, known, [*consts, *carry, *rows], caller)
            carry = out[:n_carry]
            for column, value in zip(columns, out[n_carry:], strict=True):
                column.append(value)
        if params["reverse"]:
            columns = [column[::-1] for column in columns]
        return [
            *carry,
            *(self.added("stack", lambda *xs: [jnp.stack(xs)], column) for column in columns),
        ]

    def added(self, name: str, run: Callable[..., list[Any]], inputs: list[Value]) -> int:
        number = self.number()
        self.steps.append(Step(name, run, inputs, [number], None))
        return number


def _body(equation: Any) -> Any:
    """The program that an equation calls, or None."""
    found = (equation.params.get(name) for name in _BODIES)
    return next((body for body in found if body is not None), None)


def _place(equation: Any, caller: Place | None) -> tuple[Place | None, str]:
    """The caller's line and the innermost file of an equation."""
    lines = list(source_lines(equation))
    own = next((Place(*line) for line in lines if not is_library(line[0])), None)
    return (caller if caller is not None else own), lines[0][0] if lines else ""


def _has_unit(jaxpr: Any) -> bool:
    """Whether a program contains attention or a ``shard_map``: those are kept as single steps."""
    return any(
        equation.primitive.name == "shard_map" or _calls_attention(equation)
        for equation in equations(jaxpr)
    )


def _calls_attention(equation: Any) -> bool:
    """Whether an equation calls this library's attention."""
    body = _body(equation)
    if body is None or "name" not in equation.params:
        return False
    file = function_file(getattr(body, "jaxpr", body))
    return is_attention_program(equation.params["name"], file)


def calls_of_attention(closed: ClosedJaxpr) -> list[tuple[Any, Place | None]]:
    """The equations that call this library's attention, and the line of each."""
    return [
        (equation, _place(equation, None)[0])
        for equation in equations(closed.jaxpr)
        if _calls_attention(equation)
    ]


def equations(jaxpr: Any) -> list[Any]:
    """All equations of a jaxpr, with those of nested programs."""
    found = []
    for equation in jaxpr.eqns:
        found.append(equation)
        for value in equation.params.values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    found += equations(inner)
    return found


def float_dtypes(jaxpr: Any) -> set[str]:
    """Names of the floating dtypes of all values in a program."""
    found: set[str] = set()
    for equation in equations(jaxpr):
        for atom in equation.outvars:
            dtype = getattr(atom.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                found.add(jnp.dtype(dtype).name)
    return found


def widened(closed: ClosedJaxpr, dtype: str) -> Callable[..., list[Any]]:
    """A program as a function that computes everything in ``dtype``, "float32" or "float64".

    Every floating value that is narrower is widened, also inside of loops and ``shard_map``. What
    has no wider form, such as a GPU kernel, raises NotImplementedError when the function is traced.
    """
    wider = _Widened(dtype)
    return lambda *inputs: wider.run(closed.jaxpr, closed.consts, inputs)


class _Widened:
    def __init__(self, dtype: str) -> None:
        self.dtype, self.narrow = jnp.dtype(dtype), _NARROW[dtype]

    def is_narrow(self, dtype: Any) -> bool:
        return getattr(dtype, "name", None) in self.narrow

    def wide(self, x: Any) -> Any:
        if self.is_narrow(getattr(x, "dtype", None)):
            return lax.convert_element_type(x, self.dtype)
        return x

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(self.wide, consts), strict=True))
        values |= zip(jaxpr.invars, map(self.wide, inputs), strict=True)

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                dtype: Any = getattr(atom.aval, "dtype", None)
                return self.wide(jnp.asarray(atom.val, dtype))
            return values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            out = [self.wide(x) for x in self.equation(equation, given)]
            values |= zip(equation.outvars, out, strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, given: list[Any]) -> list[Any]:
        name, params, body = equation.primitive.name, equation.params, _body(equation)
        if name in _CALLS and body is not None:
            return self.closed(body)(*given)
        if name == "scan":
            return self.scan(params, given)
        if name == "while":
            return self.loop(params, given)
        if name == "cond":
            return lax.switch(given[0], [self.closed(b) for b in params["branches"]], *given[1:])
        if name == "shard_map":
            return jax.shard_map(
                lambda *values: self.closed(params["jaxpr"])(*values),
                mesh=params["mesh"],
                in_specs=params["in_specs"],
                out_specs=list(params["out_specs"]),
                check_vma=params["check_vma"],
                axis_names=set(params.get("newly_manual_axes") or params.get("manual_axes")),
            )(*given)
        if name in _SCATTERS:
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [_SCATTERS[name](*given, **{key: params[key] for key in names})]
        if name == "reduce":
            half, body = len(given) // 2, self.closed(body)
            operands, starts = tuple(given[:half]), tuple(given[half:])
            return list(
                lax.reduce(operands, starts, lambda x, y: tuple(body(*x, *y)), params["dimensions"])
            )
        if name == "bitcast_convert_type":
            # From integers, as of random numbers, it keeps its dtype, and its result is widened.
            if any(jnp.issubdtype(x.dtype, jnp.floating) for x in given):
                raise NotImplementedError("it reads the bits of numbers (bitcast_convert_type)")
            return bind_equation(equation, given)
        # Kernels, callbacks and foreign functions are written for their dtypes: given others they
        # would compute something else.
        if body is not None or self.is_fixed(list(params.values())):
            what = params.get("name") or params.get("target_name") or name
            raise NotImplementedError(f"{what} is written for its dtype")
        changed = {
            key: self.dtype
            for key, value in params.items()
            if isinstance(value, jnp.dtype) and self.is_narrow(value)
        }
        out = bind_equation(equation, given, **changed)
        if any(self.is_narrow(x.dtype) for x in out):
            raise NotImplementedError(f"{name} has one dtype only")
        return out

    def is_fixed(self, values: Any) -> bool:
        """Whether a parameter of an operation is a program or a type with narrow values."""
        if isinstance(values, dict):
            values = list(values.values())
        if isinstance(values, (tuple, list)):
            return any(map(self.is_fixed, values))
        program = getattr(values, "jaxpr", values)
        if hasattr(program, "eqns"):
            atoms = (*program.invars, *program.outvars)
            names = float_dtypes(program) | {
                getattr(getattr(atom.aval, "dtype", None), "name", "") for atom in atoms
            }
            return not names.isdisjoint(self.narrow)
        return hasattr(values, "shape") and self.is_narrow(getattr(values, "dtype", None))

    def closed(self, body: Any) -> Callable[..., list[Any]]:
        consts = getattr(body, "consts", ())
        return lambda *values: self.run(getattr(body, "jaxpr", body), consts, values)

    def scan(self, params: dict[str, Any], given: list[Any]) -> list[Any]:
        consts, carry, stacked = scan_inputs(params, given)
        n_carry, body = len(carry), self.closed(params["jaxpr"])

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            out = body(*consts, *carry, *xs)
            return out[:n_carry], out[n_carry:]

        carry, stacked = lax.scan(
            step, carry, stacked, length=params["length"], reverse=params["reverse"],
            unroll=params["unroll"],
        )  # fmt: skip
        return [*carry, *stacked]

    def loop(self, params: dict[str, Any], given: list[Any]) -> list[Any]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = given[:n_cond], given[n_cond : n_cond + n_body]
        test, body = self.closed(params["cond_jaxpr"]), self.closed(params["body_jaxpr"])
        return lax.while_loop(
            lambda carry: test(*of_cond, *carry)[0],
            lambda carry: body(*of_body, *carry),
            given[n_cond + n_body :],
        )
