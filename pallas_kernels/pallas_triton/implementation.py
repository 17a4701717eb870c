"""The Triton kernels as an implementation of local attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backend import Dkv, Implementation, runs_anywhere
from pallas_kernels.bounds import key_bounds, query_bounds, split_tiles
from pallas_kernels.inputs import AttentionInputs, PerHead
from pallas_kernels.pallas_triton.configs import Build, TritonConfig, TritonConfigs
from pallas_kernels.pallas_triton.dkv import backward_dkv
from pallas_kernels.pallas_triton.dq import backward_dq
from pallas_kernels.pallas_triton.forward import forward
from pallas_kernels.spec import AttentionSpec, unsupported_functions

# Operations that JAX's Triton lowering supports for tiles, in all of _DTYPES.
_OPERATIONS = frozenset((
    *("abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt"),
    *("ceil", "clamp", "convert_element_type", "cos", "cosh", "div", "eq", "exp", "exp2", "expm1"),
    *("floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "log2", "logistic"),
    *("lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or", "pow", "rem"),
    *("rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign"),
    *("sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor"),
))  # fmt: skip
_DTYPES = ("bfloat16", "bool", "float16", "float32", "int32", "uint32")


def triton(
    interpret: bool = False,
    config: TritonConfig | None = None,
    compute_capability: float | None = None,
) -> Implementation:
    """The Pallas Triton kernels.

    Args:
      interpret: run them on any platform, slowly.
      config: for all kernels; None: each kernel's own from the table.
      compute_capability: selects the table, 8.0 for A100, 9.0 for H100; None: fits any GPU.
    """
    of_config = None if config is None else TritonConfigs(config, config, config)
    build = Build(of_config, compute_capability, interpret)
    return Implementation(
        name="triton",
        forward=functools.partial(forward, build=build),
        backward=functools.partial(_backward, build=build),
        forward_bounds=functools.partial(_forward_bounds, build=build),
        backward_bounds=functools.partial(_backward_bounds, build=build),
        split_backward=split_tiles,
        unsupported=_unsupported,
        unsupported_functions=_unsupported_functions,
        unavailable=runs_anywhere if interpret else _needs_ampere,
        checks_vma=not interpret,
    )


def _backward(
    inputs: AttentionInputs,
    bounds: tuple[jax.Array, jax.Array],
    dq: jax.Array | None = None,
    dkv: Dkv | None = None,
    *,
    spec: AttentionSpec,
    build: Build,
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, Dkv, PerHead]:
    """See :class:`pallas_kernels.backend.BackwardFunction`."""
    options: Any = {"spec": spec, "build": build, "out_dtype": out_dtype}
    dq, per_head = backward_dq(inputs, bounds, dq, **options)
    return dq, backward_dkv(inputs, bounds, dkv, **options), per_head


def _forward_bounds(inputs: AttentionInputs, *, spec: AttentionSpec, build: Build) -> jax.Array:
    tiles = build.configs(inputs, spec).forward.tiles
    return query_bounds(spec.mask, inputs.query, inputs.kv, tiles, inputs.shared.block_mask)


def _backward_bounds(
    inputs: AttentionInputs, *, spec: AttentionSpec, build: Build
) -> tuple[jax.Array, jax.Array]:
    """The tables of :func:`backward_dq` and of :func:`backward_dkv`."""
    configs = build.configs(inputs, spec)
    sides, blocks = (inputs.query, inputs.kv), inputs.shared.block_mask
    return (
        query_bounds(spec.mask, *sides, configs.dq.tiles, blocks),
        key_bounds(spec.mask, *sides, configs.dkv.tiles, blocks, inputs.groups),
    )


def _unsupported(inputs: AttentionInputs) -> str | None:
    q, k = inputs.query.q, inputs.kv.k
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or q.dtype != k.dtype:
        return f"query is {q.dtype} and key {k.dtype}; it supports bfloat16, float16 or float32"
    for what, dim in (("", inputs.head_dim), (" of values", inputs.value_dim)):
        if dim > 256:
            return f"the head dim{what} is {dim}; it supports 256 at most"
    return None


def _unsupported_functions(
    spec: AttentionSpec, inputs: AttentionInputs, *, backward: bool
) -> str | None:
    del inputs
    return unsupported_functions(spec, backward=backward, operations=_OPERATIONS, dtypes=_DTYPES)


def _needs_ampere(platform: str, compute_capability: float | None) -> str | None:
    if platform != "gpu" or compute_capability is None:
        return f"it needs an NVIDIA GPU, the arrays are on {platform!r}; use None or 'xla'"
    if compute_capability < 8.0:
        return (
            f"it needs compute capability 8.0 (Ampere) or newer, this GPU has "
            f"{compute_capability}; use None or 'xla'"
        )
    return None
