"""Clear errors for the derivatives that a ring does not have.

A ring is a ``custom_vjp``: it has reverse mode and no forward mode. JAX's own errors would mention
custom_vjp functions, loops or kernels that the caller did not write. The primitives below are
identities. They only define what happens when JAX differentiates them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from burst_jax import jax_compat
from pallas_kernels import Implementation

FORWARD_MODE = (
    "forward-mode differentiation (jax.jvp, jax.jacfwd, the function that jax.linearize returns) "
    "of burst_attention, ring_attention or local_attention is not implemented: use reverse mode "
    "(jax.vjp, jax.grad, jax.jacrev)"
)


def reverse_mode_only(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays. Forward mode through them raises; reverse mode leaves cotangents unchanged."""
    return _arrays.bind(*arrays)


def kernel_inputs[Tree](implementation: Implementation, tree: Tree) -> Tree:
    """What an implementation computes from. Differentiating it raises if it runs in kernels."""
    if implementation.second_derivatives != "none":
        return tree
    return jax.tree.map(lambda x: _input.bind(x, name=implementation.name)[0], tree)


def loop_results[Tree](implementation: Implementation, tree: Tree) -> Tree:
    """What an implementation computed. Reverse mode through it raises if its loops have none."""
    if implementation.second_derivatives != "forward":
        return tree
    return jax.tree.map(lambda x: _result.bind(x, name=implementation.name)[0], tree)


def _raise_forward_mode(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(FORWARD_MODE)


def _raise_kernel(*_: Any, name: str) -> NoReturn:
    raise NotImplementedError(
        f"second derivatives through implementation {name!r} are not implemented, its kernels have "
        "none: pass implementation='xla' and take forward over reverse mode, as jax.hessian does "
        "and jax.jvp of jax.grad"
    )


def _raise_double_reverse(*_: Any, name: str) -> NoReturn:
    raise NotImplementedError(
        f"the gradient of a gradient through implementation {name!r} is not implemented, its loops "
        "have no reverse mode: take forward over reverse mode, as jax.hessian does and jax.jvp of "
        "jax.grad"
    )


# A tangent becomes the operand of a primitive of its own. Reverse mode transposes that primitive;
# forward mode runs it, which raises. The primals come out unmarked: differentiating the gradient
# again must not raise here.
_arrays = jax_compat.identity_primitive("burst_arrays")
_tangents = jax_compat.identity_primitive("burst_tangents")
jax_compat.set_jvp(_arrays, lambda _: False, _tangents)
jax_compat.set_transpose(_tangents, list)
jax_compat.raises(_tangents, _raise_forward_mode)

_input = jax_compat.identity_primitive("burst_kernel_input")
jax_compat.set_jvp(_input, _raise_kernel)

_result = jax_compat.identity_primitive("burst_result")
_result_tangent = jax_compat.identity_primitive("burst_result_tangent")
jax_compat.set_jvp(_result, lambda _: False, _result_tangent)
jax_compat.set_jvp(_result_tangent, lambda _: True, _result_tangent)
jax_compat.set_transpose(_result_tangent, _raise_double_reverse)
