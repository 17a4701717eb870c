"""What the Mosaic GPU kernels read and write.

A kernel's operands are one record, and so are its results. On the host the fields are arrays;
inside the kernel the same records hold references to them. An operand that a call does not have is
None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pallas_kernels.inputs import AttentionInputs, GlobalIndices
from pallas_kernels.pallas_mosaic.blocks import BlockEntries
from pallas_kernels.pallas_mosaic.dropout import DropoutNumbers
from pallas_kernels.pallas_mosaic.memory import BackwardBarriers, BackwardMemory, ForwardMemory
from pallas_kernels.pallas_mosaic.static import MosaicStatic
from pallas_kernels.pallas_mosaic.tokens import SideTokens


class ForwardResults(NamedTuple):
    """A (o, lse) of the queries: what the forward kernel returns, and what it merges with.

    Attributes:
      o: ``[B, T, N, Hv]``.
      lse: float32 ``[B, N, T]``, T rounded up to whole tiles.
    """

    o: Any
    lse: Any


class ForwardOperands(NamedTuple):
    """What the forward kernel reads.

    Attributes:
      bounds: int32 ``[1 or B, query tiles, 4]``, or lists (:mod:`pallas_kernels.bounds`).
      q: ``[B, T, N, H]``.
      k: ``[B, S, K, H]``.
      v: ``[B, S, K, Hv]``.
      q_tokens: of the queries.
      kv_tokens: of the keys.
      k_positions: float32 ``[S]``, S rounded up to whole tiles: positions of the keys. None unless
        the products of queries and keys start from the bias.
      per_head: float32 ``[N]`` each, by name: the per-head arrays that logits are made with.
      sink: float32 ``[N]``, what the softmax starts with; None without sinks, and with a carry.
      carry: what to merge with. None without a carry, and where the results are written over it.
      dropout: None if nothing is dropped.
      blocks: None without a mask by blocks.
      numbering: None where no function of the caller's reads it.
    """

    bounds: Any
    q: Any
    k: Any
    v: Any
    q_tokens: SideTokens
    kv_tokens: SideTokens
    k_positions: Any
    per_head: dict[str, Any]
    sink: Any
    carry: ForwardResults | None
    dropout: DropoutNumbers | None
    blocks: BlockEntries | None
    numbering: GlobalIndices | None


class ForwardRefs(NamedTuple):
    """All references that the forward kernel's functions work on."""

    operands: ForwardOperands
    results: ForwardResults
    memory: ForwardMemory


class BackwardOperands(NamedTuple):
    """What the backward kernel reads.

    Attributes:
      bounds: int32 ``[1 or B, key tiles, 4]``, or lists (:mod:`pallas_kernels.bounds`).
      q: ``[B, T, N, H]``.
      do: ``[B, T, N, Hv]``.
      k: ``[B, S, K, H]``.
      v: ``[B, S, K, Hv]``.
      lse: float32 ``[B, N, T]``, in base 2. With ``q_bases``: ``[2, B, N, T]``, first this, for
        tiles that need a mask, then for all others lse less the start of the bias's line.
      delta: float32 ``[B, N, T]``, times the scale if :attr:`BackwardStatic.scale_in_ds`.
      q_tokens: of the queries.
      kv_tokens: of the keys.
      q_bases: int32 ``[query tiles]``, the smallest position of each tile of queries. None unless
        :attr:`BackwardStatic.bias_is_line`.
      per_head: float32 ``[N]`` each, by name: the per-head arrays that logits are made with.
      dropout: None if nothing is dropped.
      blocks: None without a mask by blocks.
      numbering: None where no function of the caller's reads it.
    """

    bounds: Any
    q: Any
    do: Any
    k: Any
    v: Any
    lse: Any
    delta: Any
    q_tokens: SideTokens
    kv_tokens: SideTokens
    q_bases: Any
    per_head: dict[str, Any]
    dropout: DropoutNumbers | None
    blocks: BlockEntries | None
    numbering: GlobalIndices | None


class BackwardResults(NamedTuple):
    """What the backward kernel writes.

    Attributes:
      dq: float32 ``[B, T, N, H]``; the kernel adds to it.
      dk: float32 ``[B, S, K, H]``.
      dv: float32 ``[B, S, K, Hv]``.
      per_head_sums: float32 ``[B, N, S]`` each, by name, S rounded up to whole tiles; the kernel
        adds to them. Their sums over B and S are the gradients of the per-head arrays.
    """

    dq: Any
    dk: Any
    dv: Any
    per_head_sums: dict[str, Any]


class BackwardRefs(NamedTuple):
    """All references that the backward kernel's functions work on."""

    operands: BackwardOperands
    results: BackwardResults
    memory: BackwardMemory
    barriers: BackwardBarriers


def token_operands(static: MosaicStatic, inputs: AttentionInputs) -> tuple[SideTokens, SideTokens]:
    """What is read of the queries' and of the keys' tokens; empty if nothing is."""
    if not static.needs_tokens:
        return SideTokens(), SideTokens()
    _, ranges = inputs.folded(static.spec.mask)
    functions = static.spec.calls_functions
    q_tokens = inputs.query._replace(**ranges)
    queries = SideTokens.padded(q_tokens, static.config.tiles.block_q, functions)
    if ranges and not static.has_bias and not functions:
        # Ranges stand for the positions of their queries, but where something else reads those.
        queries = queries._replace(positions=None)
    return queries, SideTokens.padded(inputs.kv, static.config.block_kv, functions)
