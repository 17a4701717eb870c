"""The host half of the Mosaic GPU kernels: arrays as tensor copies take them, results in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arrays import Pair, half_dtype, half_shape, pad_axis, tied, unvary, varying_axes
from pallas_kernels.mosaic_configs import REGISTERS
from pallas_kernels.mosaic_items import Items
from pallas_kernels.mosaic_tiles import TokenRefs
from pallas_kernels.spec import AttentionSpec, Tokens


class Halves(NamedTuple):
    """Both arrays of a pair, ``[rows, ...]``; the second's rows start at ``offset``.

    A packed pair is one array seen twice: tensor copies have five dimensions at most, so the two
    halves lie along the batch.
    """

    first: jax.Array
    second: jax.Array
    offset: int

    @classmethod
    def of(cls, pair: Pair) -> Halves:
        """Those of a pair; nothing is copied."""
        if isinstance(pair, tuple):
            return cls(pair[0], pair[1], 0)
        batch = pair.shape[1]
        rows = pair.reshape(2 * batch, *pair.shape[2:])
        return cls(rows, rows, batch)


def token_operands(
    spec: AttentionSpec, q: tuple[Tokens, int], kv: tuple[Tokens, int]
) -> tuple[list[jax.Array], Callable[[Sequence[Any]], tuple[TokenRefs, TokenRefs]]]:
    """Positions and segment ids as operands, and what makes TokenRefs of their references.

    Each side comes with its block: the arrays are padded to whole blocks with segment 0, which
    nothing sees. Nothing is passed where no mask asks.
    """
    packed = q[0].segment_ids is not None
    if spec.left is None and spec.right is None and not packed:
        return [], lambda refs: (TokenRefs(None, None), TokenRefs(None, None))
    arrays = []
    for tokens, block in (q, kv):
        length = -(-tokens.positions.shape[0] // block) * block
        arrays.append(pad_axis(tokens.positions, 0, length))
        if packed:
            assert tokens.segment_ids is not None
            arrays.append(pad_axis(tokens.segment_ids, 1, length))

    def refs_of(refs):
        if packed:
            return TokenRefs(refs[0], refs[1]), TokenRefs(refs[2], refs[3])
        return TokenRefs(refs[0], None), TokenRefs(refs[1], None)

    return arrays, refs_of


def call(
    body: Callable[..., None],
    name: str,
    *,
    items: Items,
    warpgroups: int,
    operands: Sequence[jax.Array],
    scratch: Sequence[Any],
    results: Sequence[jax.ShapeDtypeStruct | jax.Array],
) -> list[jax.Array]:
    """Runs ``body(operand refs, result refs, scratch refs, taken)`` in every program.

    ``taken`` is the count of items taken, of :class:`pallas_kernels.mosaic_items.Line`.

    Args:
      body: the kernel; :meth:`Items.at` says what its program has to do, :func:`roles` who does it.
      name: what profiles call it.
      items: what there is to do.
      warpgroups: how many compute; one more copies.
      operands: what it reads: bounds, then queries.
      scratch: its shared memory and barriers.
      results: what it writes: a shape for a new array, an array to change in place.
    """
    kind = jax.typeof(operands[0]).manual_axis_type
    kind = kind.update(varying=varying_axes(list(operands)))
    fresh = [
        jax.ShapeDtypeStruct(r.shape, r.dtype, manual_axis_type=kind)
        for r in results
        if isinstance(r, jax.ShapeDtypeStruct)
    ]
    # References that live within this call: XLA runs the kernel in place on what they hold. None
    # may be marked as varying from device to device.
    held = {i: jax.new_ref(unvary(r)) for i, r in enumerate(results) if isinstance(r, jax.Array)}
    taken = []
    if not items.one_each:
        taken = [jax.new_ref(tied(jnp.zeros((1,), jnp.int32), operands[1]))]

    def entry(*refs):
        inputs, rest = refs[: len(operands)], refs[len(operands) :]
        counter, rest = rest[: len(taken)], rest[len(taken) :]
        in_place, new = iter(rest[: len(held)]), iter(rest[len(held) :])
        outputs = [next(in_place if i in held else new) for i in range(len(results))]

        def run(*scoped):
            body(inputs, outputs, scoped, *(counter or [None]))

        pl.run_scoped(run, *scratch, collective_axes="wg")

    made = iter(
        plgpu.kernel(
            entry,
            out_type=fresh,
            grid=(items.programs,),
            grid_names=("programs",),
            num_threads=warpgroups + 1,
            thread_name="wg",
            kernel_name=name,
            # Kernels order their accesses to shared memory by barriers of their own, and reduce
            # within warps only.
            compiler_params=plgpu.CompilerParams(
                approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
            ),
        )(*operands, *taken, *held.values())
    )
    return [held[i][...] if i in held else next(made) for i in range(len(results))]


def roles(warpgroups: int, compute: Callable[[Any], None], copy: Callable[[], None]) -> None:
    """Runs ``compute(warpgroup)`` on the first warpgroups and ``copy()`` on the last."""
    warpgroup = jax.lax.axis_index("wg")
    computing, copying = REGISTERS[warpgroups]

    @pl.when(warpgroup == warpgroups)
    def _():
        plgpu.set_max_registers(copying, action="decrease")
        copy()

    @pl.when(warpgroup < warpgroups)
    def _():
        plgpu.set_max_registers(computing, action="increase")
        compute(warpgroup)


def unsupported(q: Any, kv: Pair, *, lanes: int, head_dim: int) -> str | None:
    """Why a kernel for head dims that are multiples of ``lanes`` cannot take these, or None."""
    dtypes = q.dtype, half_dtype(kv)
    if dtypes[0] not in (jnp.bfloat16, jnp.float16) or dtypes[0] != dtypes[1]:
        return f"query is {dtypes[0]} and key {dtypes[1]}; it takes bfloat16 or float16"
    dim = q.shape[-1]
    if dim % lanes or dim > head_dim:
        return f"the head dim is {dim}; it takes multiples of {lanes} up to {head_dim}"
    for name, length in (("query", q.shape[1]), ("key", half_shape(kv)[1])):
        if length % 8:
            return f"the {name} length per device is {length}; it takes multiples of 8"
    return None


forward_unsupported = functools.partial(unsupported, lanes=16, head_dim=256)
backward_unsupported = functools.partial(unsupported, lanes=32, head_dim=128)
