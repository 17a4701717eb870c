"""Private JAX APIs that the library uses; all other modules import them from here.

Each has the JAX versions that it was seen in, and the public replacement to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax.custom_derivatives import SymbolicZero
from jax.custom_derivatives import custom_vjp_primal_tree_values as primal_values
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = [
    "backends_are_initialized",
    "bind_equation",
    "distributed_process_count",
    "function_file",
    "function_of_equation",
    "identity_primitive",
    "instantiated",
    "primal_values",
    "raises",
    "scan_inputs",
    "set_jvp",
    "set_transpose",
    "source_lines",
    "vmapped_over_mesh_axes",
]


def backends_are_initialized() -> bool:
    """Whether JAX's backends have started, without starting them.

    Seen in 0.11.2 and 0.12; no public replacement (``jax.devices()`` starts the backends).
    """
    return _xla_bridge.backends_are_initialized()


def distributed_process_count() -> int:
    """Number of processes that ``jax.distributed.initialize`` joined, without starting backends.

    Seen in 0.11.2 and 0.12; replace by ``jax.process_count()`` once it starts no backend.
    """
    initialized = jax.distributed.is_initialized()
    return (_distributed.global_state.num_processes or 1) if initialized else 1


def vmapped_over_mesh_axes() -> bool:
    """Whether a ``jax.vmap`` with ``spmd_axis_name`` is being traced around the caller.

    Seen in 0.11.2 and 0.12; replace by a public query of the axis environment.
    """
    return bool(_core.get_axis_env().spmd_axis_names)


# Programs, equation by equation. Seen in 0.11.2 and 0.12; ``jax.extend.core`` has the types, but no
# source lines, and documents no way to build a program of one equation.


def source_lines(equation: Any) -> Iterator[tuple[str, int]]:
    """File and line of the calls that made an equation, from the inner to the outer ones."""
    for frame in _source_info.user_frames(equation.source_info.traceback):
        yield frame.file_name, frame.start_line


def function_file(jaxpr: Any) -> str:
    """The file of the function that a jaxpr was traced from, "" if unknown."""
    info = getattr(jaxpr.debug_info, "func_src_info", None) or ""
    return info.partition(" at ")[2].rpartition(":")[0]


def bind_equation(equation: Any, values: Sequence[Any], **params: Any) -> list[Any]:
    """The results of an equation, with ``params`` instead of its own where given."""
    rest = equation.primitive.get_bind_params({**equation.params, **params})
    with equation.ctx.manager:
        out = equation.primitive.bind(*values, **rest)
    return list(out) if equation.primitive.multiple_results else [out]


def scan_inputs(params: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The inputs of a ``scan`` equation: those of every iteration, the first carry, the stacked."""
    constants, carry, stacked = params["ft_in"].update(list(values)).unpack()
    return list(constants), list(carry), list(stacked)


def function_of_equation(jaxpr: Any, equation: Any) -> Callable[..., list[Any]]:
    """An equation of a jaxpr as a function of its inputs that are variables."""
    inputs = list(dict.fromkeys(x for x in equation.invars if not isinstance(x, _core.Literal)))
    info = jaxpr.debug_info.with_unknown_names()
    alone = jaxpr.replace(
        constvars=[], invars=inputs, outvars=list(equation.outvars), eqns=[equation],
        effects=equation.effects, debug_info=info,
    )  # fmt: skip
    return _core.jaxpr_as_fun(alone)


# Primitives with rules of their own for derivatives. Seen in 0.11.2 and 0.12. ``jax.extend.core``
# has the primitive, but the tables of rules are in ``jax.interpreters``; replace them by whatever
# JAX makes public for custom tangents (``jax.custom_jvp`` cannot raise in one mode alone).


def identity_primitive(name: str) -> Primitive:
    """A primitive that returns its arrays at run time: any number of them, and any parameters."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, **_: list(xs))
    primitive.def_abstract_eval(lambda *xs, **_: list(xs))
    mlir.register_lowering(primitive, lambda _, *xs, **__: list(xs))
    batching.primitive_batchers[primitive] = lambda xs, axes, **params: (
        primitive.bind(*xs, **params),
        axes,
    )
    return primitive


def raises(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Lets ``rule`` raise where a primitive would run, be lowered or be batched."""
    primitive.def_impl(rule)
    mlir.register_lowering(primitive, rule)
    batching.primitive_batchers[primitive] = rule


def set_jvp(
    primitive: Primitive, rule: Callable[..., Any], tangents_of: Primitive | None = None
) -> None:
    """Sets what happens to tangents.

    Args:
      primitive: an identity primitive.
      rule: with ``tangents_of``, ``params -> bool``: whether the results are the primitive's own
        (True) or its arrays (False). Without it, a function that raises.
      tangents_of: the primitive that nonzero tangents pass through.
    """
    if tangents_of is None:
        ad.primitive_jvps[primitive] = rule
        return

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        nonzero = [t for t in tangents if not isinstance(t, ad.Zero)]
        pushed = iter(tangents_of.bind(*nonzero, **params) if nonzero else ())
        pushed = [t if isinstance(t, ad.Zero) else next(pushed) for t in tangents]
        return (primitive.bind(*primals, **params) if rule(params) else list(primals)), pushed

    ad.primitive_jvps[primitive] = jvp


def set_transpose(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Sets ``rule(cotangents, **params)``, which pulls cotangents back."""
    ad.primitive_transposes[primitive] = lambda cotangents, *_, **params: rule(cotangents, **params)


def instantiated(cotangent: Any, zeros: Callable[[Any], jax.Array]) -> jax.Array:
    """A cotangent of a ``custom_vjp`` with symbolic zeros; ``zeros(aval)`` stands for a zero.

    Seen in 0.11.2 and 0.12 (``jax.custom_derivatives`` documents no ``SymbolicZero``).
    """
    return zeros(cotangent.aval) if isinstance(cotangent, SymbolicZero) else cotangent
