"""Forward local attention as a Pallas kernel, lowered by Mosaic GPU (Hopper).

An item of work is a (batch row, query head, query tile), 64 queries a warpgroup. One more warpgroup
draws the items' tickets, and copies queries and key tiles into shared memory as room comes free
(``forward_copy.py``). What a computing warpgroup does for an item is in ``forward_compute.py``, one
step of its main loop in ``forward_step.py`` (scores and softmax in files of these names), and the
end of an item in ``forward_finish.py``: o is merged with the incoming (o, lse) and written, in
place if it can be.

Where ``MosaicConfig.cluster`` is 2, an item is two neighbouring query tiles, one for each program
of a cluster. The two visit the same key tiles, and each copies one half of every tile into both.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.arrays import pad_axis
from pallas_kernels.bounds import query_bounds
from pallas_kernels.inputs import AttentionInputs, Carry
from pallas_kernels.pallas_mosaic.blocks import BlockEntries
from pallas_kernels.pallas_mosaic.configs import (
    REGISTERS,
    MosaicConfig,
    forward_cluster,
    forward_config,
)
from pallas_kernels.pallas_mosaic.dropout import DropoutNumbers
from pallas_kernels.pallas_mosaic.forward_compute import compute_items
from pallas_kernels.pallas_mosaic.forward_copy import copy_items
from pallas_kernels.pallas_mosaic.items import each_item
from pallas_kernels.pallas_mosaic.launch import call, split_warpgroups
from pallas_kernels.pallas_mosaic.operands import (
    ForwardOperands,
    ForwardRefs,
    ForwardResults,
    token_operands,
)
from pallas_kernels.pallas_mosaic.static import ForwardStatic
from pallas_kernels.pallas_mosaic.tickets import TicketCounter
from pallas_kernels.pallas_mosaic.walk import Walk
from pallas_kernels.spec import AttentionSpec


def forward(
    inputs: AttentionInputs,
    bounds: jax.Array,
    carry: Carry | None = None,
    *,
    spec: AttentionSpec,
    out_dtype: DTypeLike | None = None,
    config: MosaicConfig | None = None,
) -> Carry:
    """See :class:`pallas_kernels.backend.ForwardFunction`; ``config``: None is the table's."""
    config = config or _shipped_config(inputs, spec)
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    carried = carry is not None
    static = ForwardStatic.of(inputs, spec, config, out_dtype=out_dtype, carried=carried)
    if static.warpgroups not in REGISTERS:
        raise ValueError(f"block_q is {config.block_q}: the forward kernel takes 128 or 192")
    q_tokens, kv_tokens = token_operands(static, inputs)
    k_positions = kv_tokens.positions.astype(jnp.float32) if static.bias_in_products else None
    operands = ForwardOperands(
        bounds, inputs.query.q, inputs.kv.k, inputs.kv.v, q_tokens, kv_tokens, k_positions,
        per_head=inputs.shared.score_parameters,
        sink=None if carried else inputs.shared.sink_logits, carry=None,
        dropout=DropoutNumbers.padded(inputs, config), blocks=BlockEntries.of(inputs, config),
        numbering=inputs.shared.indices,
    )  # fmt: skip
    # The copy engine writes lse of a whole tile, also of one that is cut off at the last query.
    # Without padding it would overwrite the lse of the next head.
    padded = static.items.tiles * config.tiles.block_q
    results = ForwardResults(
        o=jax.ShapeDtypeStruct(inputs.out_shape, out_dtype),
        lse=jax.ShapeDtypeStruct((static.batch, static.heads, padded), jnp.dtype(jnp.float32)),
    )
    if carry is not None:
        given = ForwardResults(carry[0], pad_axis(carry[1], 2, padded))
        if static.in_place:
            results = given
        else:
            operands = operands._replace(carry=given)
    o, lse = call(
        functools.partial(_kernel, static), "burst_forward", items=static.items,
        warpgroups=static.warpgroups, operands=operands, results=results, memory=static.memory,
    )  # fmt: skip
    return o, lse[..., : static.q_length]


def forward_bounds(
    inputs: AttentionInputs, *, spec: AttentionSpec, config: MosaicConfig | None = None
) -> jax.Array:
    """The tables that :func:`forward` reads with the same config."""
    tiles = (config or _shipped_config(inputs, spec)).tiles
    return query_bounds(spec.mask, inputs.query, inputs.kv, tiles, inputs.shared.block_mask)


def _shipped_config(inputs: AttentionInputs, spec: AttentionSpec) -> MosaicConfig:
    score = spec.score
    # A bias that the products start from takes too many registers only beside segment ids or a
    # window.
    other_tests = inputs.has_segments or spec.mask.left is not None
    bias_counts = inputs.has_bias and (other_tests or not score.starts_products)
    others_count = score.logits_soft_cap is not None or spec.dropout is not None
    others_count = others_count or spec.calls_functions
    # Ranges of keys are two more numbers of each query.
    others_count = others_count or inputs.has_kv_bounds or inputs.shared.block_mask is not None
    head_dim = max(inputs.head_dim, inputs.value_dim)
    config = forward_config(head_dim, bias_counts or others_count)
    if other_tests or inputs.has_bias or others_count:
        return config
    length = min(inputs.query.q.shape[1], inputs.kv.k.shape[1])
    cluster = forward_cluster(head_dim, spec.mask.right is not None, length)
    return dataclasses.replace(config, cluster=cluster)


def _kernel(static: ForwardStatic, operands, results, memory, count) -> None:
    """One program, which does one item after the other."""
    refs = ForwardRefs(operands, results, memory)
    counter = TicketCounter(
        count, memory.ticket_arrived, memory.ticket_free, memory.ticket_slots,
        cluster=static.config.cluster,
    )  # fmt: skip

    def walk_of(batch_row, head, tile):
        return Walk(operands.bounds, batch_row, head, tile, last=static.kv_tiles - 1)

    run = functools.partial(each_item, static.items, counter, walk_of, leave_empty=static.in_place)
    split_warpgroups(
        static.warpgroups,
        compute=functools.partial(compute_items, static, refs, run),
        copy=functools.partial(copy_items, static, refs, run),
    )
