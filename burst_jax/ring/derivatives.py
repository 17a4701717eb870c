"""Which derivatives a ring has, and clear errors for those that it does not have.

A ring has a gradient of its own (a ``custom_vjp``), so reverse mode works and forward mode does
not. JAX's own words for that speak of custom_vjp functions, loops or kernels, which a caller never
wrote. The marks below are primitives that return their operands, so they change no program; they
only say what happens when JAX differentiates them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels import Implementation

FORWARD_MODE = (
    "forward-mode differentiation (jax.jvp, jax.jacfwd, the function that jax.linearize returns) "
    "of burst_attention, ring_attention or local_attention is not implemented: use reverse mode "
    "(jax.vjp, jax.grad, jax.jacrev)"
)


def reverse_mode_only(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays. Pushing tangents through raises; cotangents are pulled back unchanged."""
    return _arrays.bind(*arrays)


def into_kernels[Tree](implementation: Implementation, tree: Tree) -> Tree:
    """What an implementation computes with: differentiating that raises if it is a kernel."""
    if implementation.second_derivatives != "none":
        return tree
    return jax.tree.map(lambda x: _operand.bind(x, name=implementation.name)[0], tree)


def out_of_loops[Tree](implementation: Implementation, tree: Tree) -> Tree:
    """What an implementation computed: tangents pass, pulling back a cotangent of it raises."""
    if implementation.second_derivatives != "forward":
        return tree
    return jax.tree.map(lambda x: _result.bind(x, name=implementation.name)[0], tree)


def _identity(name: str) -> Primitive:
    """A primitive of any number of arrays, which is its operands at run time."""
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


# Of reverse_mode_only. A tangent becomes an operand of a primitive of its own. Reverse mode only
# transposes that primitive. Forward mode runs it, and running it raises.
_arrays = _identity("burst_arrays")
_tangents = _identity("burst_tangents")


def _refuse_forward_mode(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(FORWARD_MODE)


def _push_into(primals: Any, tangents: Any) -> Any:
    # The primals come out unmarked: what differentiates this gradient again must not stop here.
    nonzero = [t for t in tangents if not isinstance(t, ad.Zero)]
    pushed = iter(_tangents.bind(*nonzero) if nonzero else ())
    return list(primals), [t if isinstance(t, ad.Zero) else next(pushed) for t in tangents]


ad.primitive_jvps[_arrays] = _push_into
ad.primitive_transposes[_tangents] = lambda cotangents, *_: list(cotangents)
_tangents.def_impl(_refuse_forward_mode)
mlir.register_lowering(_tangents, _refuse_forward_mode)
batching.primitive_batchers[_tangents] = _refuse_forward_mode

# Of into_kernels.
_operand = _identity("burst_operand")


def _refuse_kernel(primals: Any, tangents: Any, *, name: str) -> NoReturn:
    raise NotImplementedError(
        f"second derivatives through implementation {name!r} are not implemented, its kernels have "
        "none: pass implementation='xla' and take forward over reverse mode, as jax.hessian does "
        "and jax.jvp of jax.grad"
    )


ad.primitive_jvps[_operand] = _refuse_kernel

# Of out_of_loops.
_result = _identity("burst_result")
_result_tangent = _identity("burst_result_tangent")


def _push_out(primals: Any, tangents: Any, *, name: str) -> Any:
    (tangent,) = tangents
    if not isinstance(tangent, ad.Zero):
        (tangent,) = _result_tangent.bind(tangent, name=name)
    return list(primals), [tangent]


def _refuse_double_reverse(cotangents: Any, *_: Any, name: str) -> NoReturn:
    raise NotImplementedError(
        f"the gradient of a gradient through implementation {name!r} is not implemented, its loops "
        "have no reverse mode: take forward over reverse mode, as jax.hessian does and jax.jvp of "
        "jax.grad"
    )


def _push_again(primals: Any, tangents: Any, *, name: str) -> Any:
    return _result_tangent.bind(*primals, name=name), [
        t if isinstance(t, ad.Zero) else _result_tangent.bind(t, name=name)[0] for t in tangents
    ]


ad.primitive_jvps[_result] = _push_out
ad.primitive_jvps[_result_tangent] = _push_again
ad.primitive_transposes[_result_tangent] = _refuse_double_reverse
