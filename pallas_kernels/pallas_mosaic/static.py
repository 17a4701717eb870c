"""What is static about a call of a Mosaic GPU kernel: sizes, mask, score, tiles, items of work."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.mask import Mask
from pallas_kernels.pallas_mosaic.configs import (
    BACKWARD_WARPGROUPS,
    WARPGROUP_ROWS,
    MosaicConfig,
    backward_loops,
    float32_lanes,
    forward_loops,
    result_lanes,
)
from pallas_kernels.pallas_mosaic.items import Items
from pallas_kernels.pallas_mosaic.memory import BackwardMemory, ForwardMemory
from pallas_kernels.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class MosaicStatic:
    """What is static about a call, for both kernels.

    Attributes:
      spec: the mask and the score.
      mask: the mask that scores are tested by, :meth:`.inputs.AttentionInputs.folded`.
      config: the kernel's tiles.
      batch: B, rows of the batch.
      q_length: T, queries.
      kv_length: S, keys.
      heads: N, heads of queries.
      kv_heads: K, heads of keys.
      dim: H, the head dim of queries and keys.
      value_dim: Hv, that of values, of o and of dO.
      dtype: of queries, keys, values and dO.
      has_segments: whether tokens have segment ids.
      has_key_ranges: whether queries say where the keys that they see start or end.
      has_bias: whether something is added to the logits because of where the tokens are.
      has_blocks: whether there is a mask by blocks.
    """

    spec: AttentionSpec
    mask: Mask
    config: MosaicConfig
    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: np.dtype
    has_segments: bool
    has_key_ranges: bool
    has_bias: bool
    has_blocks: bool

    @classmethod
    def of(
        cls, inputs: AttentionInputs, spec: AttentionSpec, config: MosaicConfig, **own: Any
    ) -> Self:
        """Read off the inputs; ``own`` are the fields of the one kernel."""
        batch, q_length, heads, dim = inputs.query.q.shape
        mask, _ = inputs.folded(spec.mask)
        return cls(
            spec=spec,
            mask=mask,
            config=config,
            batch=batch,
            q_length=q_length,
            kv_length=inputs.kv_length,
            heads=heads,
            kv_heads=inputs.kv.k.shape[2],
            dim=dim,
            value_dim=inputs.value_dim,
            dtype=inputs.query.q.dtype,
            has_segments=inputs.has_segments,
            has_key_ranges=inputs.has_kv_bounds,
            has_bias=inputs.has_bias,
            has_blocks=inputs.shared.block_mask is not None,
            **own,
        )

    @property
    def groups(self) -> int:
        """How many query heads share a key head."""
        return self.heads // self.kv_heads

    @property
    def q_tiles(self) -> int:
        """Tiles of queries."""
        return -(-self.q_length // self.config.block_q)

    @property
    def kv_tiles(self) -> int:
        """Tiles of keys."""
        return -(-self.kv_length // self.config.block_kv)

    @property
    def keys_are_cut_off(self) -> bool:
        """Whether the last tile of keys goes beyond the last key."""
        return self.kv_length % self.config.block_kv != 0

    @property
    def needs_tokens(self) -> bool:
        """Whether tokens decide which scores count, or how much."""
        return self.tokens_hide_some or self.has_bias or self.spec.calls_functions

    @property
    def tokens_hide_some(self) -> bool:
        """Whether some scores may not count because of their tokens, apart from blocks."""
        by_window, by_function = self.spec.mask.reads_positions, self.spec.mask.mask_mod is not None
        return by_window or by_function or self.has_segments or self.has_key_ranges

    @property
    def hides_some(self) -> bool:
        """Whether some scores may not count."""
        return self.tokens_hide_some or self.has_blocks

    @property
    def reads_more(self) -> bool:
        """Whether masks read more than positions, which takes registers."""
        return self.has_segments or self.has_key_ranges or self.has_blocks

    @property
    def needs_registers(self) -> bool:
        """Whether there is a soft cap, a bias, dropout or a function: all take registers."""
        has_cap, drops = self.spec.score.logits_soft_cap is not None, self.spec.dropout is not None
        return self.has_bias or has_cap or drops or self.spec.calls_functions

    @property
    def bias_in_products(self) -> bool:
        """Whether the products of queries and keys start from the bias instead of from zero."""
        return False

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is added to scores after their products have been computed."""
        return self.has_bias and not self.bias_in_products

    @property
    def bias_is_line(self) -> bool:
        """Whether the bias is made as a line over the keys' positions, and not from distances."""
        return False

    @property
    def base_2_factor(self) -> float:
        """What takes a tile's scores to logits in base 2, inside the softmax's exponent.

        With a bias that is added later, and is no line, the scores are in base 2 already: it had to
        be added to them there.
        """
        in_base_2 = self.adds_bias and not self.bias_is_line
        return 1.0 if in_base_2 else self.spec.score.base_2_factor


@dataclasses.dataclass(frozen=True)
class ForwardStatic(MosaicStatic):
    """What is static about a call of the forward kernel.

    Attributes:
      out_dtype: of the result o.
      carried: whether there is an incoming (o, lse) to merge with.
    """

    out_dtype: np.dtype
    carried: bool

    @property
    def bias_in_products(self) -> bool:
        """See :attr:`MosaicStatic.bias_in_products`: where the score lets them."""
        return self.has_bias and self.spec.score.starts_products

    @property
    def bias_is_line(self) -> bool:
        """See :attr:`MosaicStatic.bias_is_line`: where every key that counts is before its query.

        Scores that the mask hides then start from any finite number.
        """
        return self.bias_in_products and self.spec.mask.hides_later_keys

    @property
    def warpgroups(self) -> int:
        """How many warpgroups compute, each 64 queries."""
        return self.config.block_q // WARPGROUP_ROWS

    @property
    def float32_out(self) -> bool:
        """Whether o is not rounded."""
        return self.out_dtype == jnp.float32

    @property
    def in_place(self) -> bool:
        """Whether the result is written over the carry."""
        return self.carried and self.float32_out

    @property
    def lanes(self) -> int:
        """How many lanes of the incoming o are in shared memory at a time."""
        return float32_lanes(self.value_dim)

    @property
    def out_lanes(self) -> int:
        """How many lanes of o are written at a time, a multiple of ``lanes``."""
        return result_lanes(self.value_dim, self.float32_out)

    @property
    def items(self) -> Items:
        """One for every tile of queries of every head."""
        return Items(
            self.batch,
            self.heads,
            -(-self.q_tiles // self.config.cluster),
            last_first=True,
            shared_bytes=2 * self.kv_length * (self.dim + self.value_dim) // self.groups,
            equal=not self.hides_some,
            looped=forward_loops(self.config, self.reads_more),
            cluster=self.config.cluster,
        )

    @property
    def memory(self) -> ForwardMemory:
        """Descriptions of the shared memory."""
        return ForwardMemory.of(
            self.config,
            self.dim,
            self.dtype,
            self.out_dtype,
            self.carried,
            self.bias_in_products,
            self.value_dim,
        )


@dataclasses.dataclass(frozen=True)
class BackwardStatic(MosaicStatic):
    """What is static about a call of the backward kernel.

    Attributes:
      adds_dkv: whether dK and dV are added to arrays that are given, and not written to new ones.
      dkv_dtype: of dK and dV; float32 if they are added to, and unless :attr:`can_write_dkv`.
    """

    adds_dkv: bool
    dkv_dtype: np.dtype

    @property
    def warpgroups(self) -> int:
        """How many warpgroups compute, each 64 keys."""
        return BACKWARD_WARPGROUPS

    @property
    def rounds_dkv(self) -> bool:
        """Whether dK and dV are rounded before they are written."""
        return self.dkv_dtype != jnp.float32

    @property
    def can_write_dkv(self) -> bool:
        """Whether the kernel can write dK and dV in their dtype.

        Rounded numbers wait for their copy in a buffer of dS. So they must be of the inputs' dtype
        and fill its rows, and programs with a bias, dropout, a soft cap or functions lack registers
        for it.
        """
        if not self.rounds_dkv:
            return True
        fill_rows = all(x % self.config.block_q == 0 for x in (self.dim, self.value_dim))
        return self.dkv_dtype == self.dtype and fill_rows and not self.needs_registers

    @property
    def dkv_lanes(self) -> int:
        """How many lanes of dK and dV are written at a time."""
        return self.config.block_q if self.rounds_dkv else self.half_dim

    @property
    def stages(self) -> int:
        """For how many tiles of queries there is room."""
        return self.config.stages

    @property
    def do_stages(self) -> int:
        """For how many tiles of dO there is room."""
        return self.config.do_stages or self.config.stages

    @property
    def half_dim(self) -> int:
        """How many lanes of dQ a warpgroup makes."""
        return self.dim // 2

    @property
    def bias_is_line(self) -> bool:
        """See :attr:`MosaicStatic.bias_is_line`: where every key that counts is before its query.

        Only in tiles that need no mask: ``BiasLine`` in ``backward_scores.py``.
        """
        score = self.spec.score
        plain = score.logits_soft_cap is None and score.score_mod is None
        return self.has_bias and self.spec.mask.hides_later_keys and plain

    @property
    def scale_in_ds(self) -> bool:
        """Whether the score's scale is part of dS, and delta comes multiplied by it.

        dQ and dK then need no scale at their end. A score pays nothing for that: it takes one fused
        multiply-add in place of one subtraction. float16 goes without, because small dS would
        underflow; and so do gradients of per-head arrays, which are made of dS without the scale.
        """
        return self.dtype == jnp.bfloat16 and not self.spec.score.differentiated

    @property
    def items(self) -> Items:
        """One for every tile of keys of every key head."""
        return Items(
            self.batch,
            self.kv_heads,
            self.kv_tiles,
            last_first=False,
            shared_bytes=self.q_length * (6 * self.dim + 2 * self.value_dim),
            looped=backward_loops(
                max(self.dim, self.value_dim),
                self.reads_more,
                self.needs_registers,
            ),
        )

    @property
    def memory(self) -> BackwardMemory:
        """Descriptions of the shared memory."""
        return BackwardMemory.of(self.config, self.dim, self.dtype, self.value_dim)
