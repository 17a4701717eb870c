"""Static parameters of a call of an sm90 kernel: sizes, mask, score, tiles, work tiles."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from pallas_kernels.mask import Mask
from pallas_kernels.mosaic.sm90.backward_forms import NARROW, WIDEST_NARROW_HEAD_DIM, BackwardForm
from pallas_kernels.mosaic.sm90.configs import (
    BACKWARD_WARPGROUPS,
    SHARED_MEMORY,
    WARPGROUP_ROWS,
    MosaicConfig,
    backward_is_persistent,
    can_zero_padding,
    dq_widths,
    float32_lanes,
    forward_is_persistent,
    softmax_split,
    staging_lanes,
    staging_limits,
)
from pallas_kernels.mosaic.sm90.shared_memory import (
    BackwardBarriers,
    BackwardMemory,
    ForwardMemory,
)
from pallas_kernels.mosaic.static import KernelStatic
from pallas_kernels.mosaic.work_tiles import WorkTiles
from pallas_kernels.spec import AttentionSpec


def needs_registers(spec: AttentionSpec, has_bias: bool) -> bool:
    """Whether there is a soft cap, a bias, dropout or a user function: all take registers."""
    has_cap, drops = spec.score.logits_soft_cap is not None, spec.dropout is not None
    return has_bias or has_cap or drops or spec.calls_functions


def backward_needs_zeros(spec: AttentionSpec, has_bias: bool, deterministic: bool) -> bool:
    """Whether padding must hold zeros before the backward kernel starts.

    Fixed point has a bound computed from keys and values. Next to what takes registers some
    programs that write zeros themselves would spill.
    """
    return deterministic or needs_registers(spec, has_bias)


@dataclasses.dataclass(frozen=True)
class Sm90Static(KernelStatic[MosaicConfig]):
    """Static parameters of both sm90 kernels."""

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        raise NotImplementedError

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a CTA."""
        return self.consumers + self.config.producer_warpgroup

    @property
    def may_be_local(self) -> bool:
        """Whether documents may leave work tiles a small part of the other side to read."""
        return self.has_segments and not self.has_block_mask

    @property
    def masks_by_arrays(self) -> bool:
        """Whether masks read more than positions, which takes registers."""
        return self.has_segments or self.has_kv_bounds or self.has_block_mask

    @property
    def zeroes_padding(self) -> bool:
        """Whether the producer writes zeros in padding (:mod:`.padding`)."""
        return self.has_segments and can_zero_padding(self.config)

    @property
    def needs_registers(self) -> bool:
        """See :func:`needs_registers`."""
        return needs_registers(self.spec, self.has_bias)

    @property
    def bias_in_accumulator(self) -> bool:
        """Whether the accumulator of ``q k^T`` starts from the bias instead of zero."""
        return False

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is added to the scores after ``q k^T``."""
        return self.has_bias and not self.bias_in_accumulator

    @property
    def bias_is_affine(self) -> bool:
        """Whether the bias is computed as an affine function of key positions."""
        return False

    @property
    def base_2_factor(self) -> float:
        """Factor that takes a tile's scores to logits in base 2, applied in the softmax's exponent.

        With a bias that is added to the scores, and not affine, scores are in base 2 already: it
        was added in base 2.
        """
        in_base_2 = self.adds_bias and not self.bias_is_affine
        return 1.0 if in_base_2 else self.spec.score.base_2_factor


@dataclasses.dataclass(frozen=True)
class ForwardStatic(Sm90Static):
    """Static parameters of the forward kernel.

    Attributes:
      out_dtype: of o.
      carry_dtype: of the incoming o to merge with, float32 or that of o; None without one.
    """

    out_dtype: np.dtype
    carry_dtype: np.dtype | None

    @property
    def bias_in_accumulator(self) -> bool:
        """See :attr:`Sm90Static.bias_in_accumulator`; if the score allows it."""
        return self.has_bias and self.spec.score.bias_can_start_products

    @property
    def bias_is_affine(self) -> bool:
        """See :attr:`Sm90Static.bias_is_affine`; if every key that counts is before its query.

        The accumulators of masked scores then start from any finite number.
        """
        return self.bias_in_accumulator and self.spec.mask.hides_later_keys

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, each with 64 queries."""
        return self.config.block_q // WARPGROUP_ROWS

    @property
    def v_stages(self) -> int:
        """Pipeline stages of values."""
        return self.config.v_stages or self.config.stages

    def with_third_stages(self) -> Self:
        """With a third pipeline stage, and a softmax by halves, where they gain and fit.

        Without a producer warpgroup copies take longer. With one, a third stage serves a softmax by
        halves.
        """
        widest = max(self.head_dim, self.value_dim)
        changes: list[dict[str, Any]] = [{"v_stages": 3}]
        if self.config.producer_warpgroup:
            split = softmax_split(widest, self.needs_registers)
            changes = [] if split is None else [split]
        elif widest <= 64:
            # A short step's critical path is its softmax: copies should start after it.
            changes.insert(0, {"stages": 3, "v_stages": 3})
        for change in changes:
            config = dataclasses.replace(self.config, **change)
            larger = dataclasses.replace(self, config=config)
            if larger.memory.nbytes <= SHARED_MEMORY:
                return larger
        return self

    @property
    def copies_late(self) -> bool:
        """Without a producer warpgroup, whether a step starts copies after its softmax.

        Else it starts them before, while its scores are computed. Keys must then have arrived by
        the next step, which with two stages is too soon for a copy that starts late.
        """
        return self.config.stages > 2

    @property
    def in_place(self) -> bool:
        """Whether o and lse overwrite the carry."""
        return self.carry_dtype == self.out_dtype

    @property
    def has_carry(self) -> bool:
        """Whether there is an incoming (o, lse) to merge with."""
        return self.carry_dtype is not None

    @property
    def lanes(self) -> int:
        """Lanes of o that are computed at a time: one float32 tile in shared memory."""
        memory = self.memory
        if memory.carry_o is not None:
            return memory.carry_o.shape[-1]
        return min(self.out_lanes, float32_lanes(self.value_dim, staging_limits(self.value_dim)[0]))

    @property
    def out_lanes(self) -> int:
        """Lanes of o that are written at a time, a multiple of ``lanes``."""
        return self.memory.out.shape[-1]

    @property
    def work_tiles(self) -> WorkTiles:
        """One per query tile of every query head."""
        persistent = forward_is_persistent(self.config, self.masks_by_arrays)
        return WorkTiles(
            self.batch,
            self.heads,
            -(-self.q_tiles // self.config.cluster),
            last_first=True,
            shared_bytes=2 * self.kv_length * (self.head_dim + self.value_dim) // self.groups,
            equal=not self.needs_mask,
            persistent=persistent,
            cluster=self.config.cluster,
            may_be_local=self.may_be_local and persistent,
        )

    @property
    def memory(self) -> ForwardMemory:
        """Descriptions of the shared memory."""
        return ForwardMemory.of(
            self.config, self.head_dim, self.dtype, self.out_dtype, self.carry_dtype,
            self.bias_in_accumulator, self.value_dim, self.zeroes_padding,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BackwardStatic(Sm90Static):
    """Static parameters of the backward kernel.

    Attributes:
      adds_dkv: whether dK and dV are added to given arrays instead of written to new ones.
      dkv_dtype: of dK and dV; float32 if they are added, and unless :attr:`can_round_dkv`.
      deterministic: whether the result is bitwise reproducible: dQ is then accumulated in fixed
        point (:mod:`pallas_kernels.mosaic.fixed_point`).
      has_intervals: whether the kernel reads intervals of queries
        (:mod:`pallas_kernels.mosaic.sm90.row_intervals`).
      group_heads: heads per L2 swizzle group; None chooses them for work on all KV tiles.
      writes_half: whether dK and dV of the second half of the KV tiles, which have no work, are
        left unset.
      stores_half: whether they are unset in the arrays that are added to, and so stored.
    """

    adds_dkv: bool
    dkv_dtype: np.dtype
    deterministic: bool
    has_intervals: bool = False
    group_heads: int | None = None
    writes_half: bool = False
    stores_half: bool = False

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return BACKWARD_WARPGROUPS

    @property
    def form(self) -> BackwardForm:
        """How they share the work on a tile."""
        return self.config.form

    @property
    def masks_by_arrays(self) -> bool:
        """See :attr:`Sm90Static.masks_by_arrays`. With intervals few masks do."""
        return super().masks_by_arrays and not self.has_intervals

    @property
    def needs_registers(self) -> bool:
        """See :func:`needs_registers`. A ``mask_mod`` alone leaves enough for rounded gradients."""
        enough = self.rounds_dkv and self.has_few_terms
        spec = dataclasses.replace(self.spec, mask=Mask()) if enough else self.spec
        return needs_registers(spec, self.has_bias)

    @property
    def has_few_terms(self) -> bool:
        """See :attr:`KernelStatic.has_few_terms`; in kernels that have registers for them."""
        has_registers = self.form.has_spare_registers and self.config.producer_warpgroup
        return super().has_few_terms and has_registers and not self.deterministic

    @property
    def zeroes_padding(self) -> bool:
        """See :attr:`Sm90Static.zeroes_padding`."""
        given = self.spec, self.has_bias, self.deterministic
        return super().zeroes_padding and not backward_needs_zeros(*given)

    @property
    def rounds_dkv(self) -> bool:
        """Whether dK and dV are rounded before they are written."""
        return self.dkv_dtype != jnp.float32

    @property
    def can_round_dkv(self) -> bool:
        """Whether the kernel can write dK and dV in ``dkv_dtype``.

        Rounded gradients are staged in a dS buffer, 64 lanes at a time. So they must have the
        inputs' dtype and a multiple of 64 lanes. Calls with several terms lack registers for it.
        """
        if not self.rounds_dkv:
            return True
        whole = self.head_dim % WARPGROUP_ROWS == self.value_dim % WARPGROUP_ROWS == 0
        enough = self.has_few_terms or not self.needs_registers
        return self.form.can_round_dkv and self.dkv_dtype == self.dtype and whole and enough

    @property
    def written_dkv_dtype(self) -> np.dtype:
        """The dtype in which the kernel writes dK and dV.

        float32 gradients leave through dQ's staging buffer. Where that holds int32, their bits are
        written as int32.
        """
        as_bits = self.deterministic and not self.rounds_dkv
        return np.dtype(np.int32) if as_bits else self.dkv_dtype

    @property
    def may_write_half(self) -> bool:
        """Whether dK and dV of half of the KV tiles may be left unset, for a later call to store.

        With a causal mask the halves usually are calls of kernels of their own anyway.
        """
        may_write = self.form is NARROW and not (self.deterministic or self.rounds_dkv)
        return may_write and self.is_causal

    @property
    def first_half_end(self) -> int:
        """The first KV tile of the second half."""
        return (self.kv_tiles + 1) // 2

    @property
    def stages_dv_in_values(self) -> bool:
        """Whether dV leaves through the memory of the values, before the last dQ.

        It gains where work tiles are short, and takes 2 % more time with a causal mask alone.
        """
        return self.has_intervals and self.rounds_dkv

    @property
    def barrier_counts(self) -> BackwardBarriers:
        """Number of barriers of each kind."""
        return BackwardBarriers.counts(self.config, self.stages_dv_in_values, self.zeroes_padding)

    @property
    def dkv_lanes(self) -> int:
        """Lanes of dK and dV that are written at a time."""
        return WARPGROUP_ROWS if self.rounds_dkv else self.staging_lanes

    @property
    def stages(self) -> int:
        """Pipeline stages of queries."""
        return self.config.stages

    @property
    def do_stages(self) -> int:
        """Pipeline stages of dO."""
        return self.config.do_stages or self.config.stages

    @property
    def copies_early(self) -> tuple[bool, bool]:
        """Of queries and dO: whether consumers start their copies while scores are computed.

        Else the copies start while a step's last products run.
        """
        return self.form.copies_early, self.form.copies_early or self.config.dq_by_rows

    @property
    def counts_queries(self) -> bool:
        """Whether a consumer that starts copies finds their head and tile by counting.

        With several heads it would take a division. Tiles of 128 queries leave no registers for it.
        """
        return self.groups > 1 and not self.config.dq_by_rows

    @property
    def do_follows_queries(self) -> bool:
        """Whether a copy of dO reads in shared memory which queries it belongs to.

        With several heads a consumer that starts copies saves a division. The queries must have
        arrived: where their copy starts early, it starts at the same time.
        """
        late = not (self.config.producer_warpgroup or self.form.copies_early)
        return late and self.do_stages == 2 and self.groups > 1

    @property
    def visits_chunks(self) -> bool:
        """Whether full query tiles are visited by chunks (:mod:`.query_order`).

        They are for a causal mask without a window, where key heads are shared, and the queries, dO
        and dQ of one head do not fit in the L2 cache. Where they do, or where a window limits what
        CTAs read at the same time, visiting one head after the other takes less of the cache.
        Consumers that start copies find the next tile by counting. Not measured for head dims up to
        96 and above 128, nor with masks by arrays. Packed documents limit what CTAs read like a
        window.
        """
        measured = self.is_about_128 and not super().masks_by_arrays
        may_visit = measured and self.config.producer_warpgroup and self.groups > 1
        return may_visit and self.is_causal and self.work_tiles.exceeds_cache

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal without a window, so that later KV tiles have less work."""
        return self.mask.right is not None and self.mask.left is None

    @property
    def is_about_128(self) -> bool:
        """Whether the larger head dim is 128, padding included: above 96 and not wide."""
        return 96 < max(self.head_dim, self.value_dim) <= WIDEST_NARROW_HEAD_DIM

    @property
    def exchanges_late(self) -> bool:
        """Whether consumers hand dS to each other while a step's last products run.

        They then wait for the staging buffer at that time, and for the other's previous dS and the
        next queries where it delays neither exponentials nor products (:mod:`.backward_step`). It
        gains nothing for head dims up to 96. What takes registers leaves none for it.
        """
        return self.is_about_128 and not (self.needs_registers or self.masks_by_arrays)

    @property
    def half_dim(self) -> int:
        """Half the lanes of dQ."""
        return self.head_dim // 2

    @property
    def starts_dp_from_zero(self) -> bool:
        """Whether dP's accumulator gets :func:`instructions.fresh_zeros`, which takes few moves."""
        return self.form.starts_from_zero

    @property
    def starts_dq_from_zero(self) -> bool:
        """The same of dQ's accumulator. With a producer its product starts from zero anyway."""
        return self.form.starts_from_zero and not self.config.producer_warpgroup

    @property
    def stores_left_operands(self) -> bool:
        """Whether dS is stored by :func:`instructions.store_left_operand`.

        Its addresses take registers that fixed point and masks by arrays need.
        """
        _, swizzle = self.memory.ds.transforms
        return swizzle.swizzle == 128 and not (self.deterministic or self.masks_by_arrays)

    @property
    def dq_part(self) -> tuple[int, int]:
        """``(queries, lanes)`` of a query tile's dQ that each consumer warpgroup computes."""
        if self.config.dq_by_rows:
            return WARPGROUP_ROWS, self.head_dim
        return self.config.block_q, self.half_dim

    @property
    def dq_widths(self) -> tuple[int, ...]:
        """Lanes of the products that make a warpgroup's part of dQ, one after the other."""
        return dq_widths(self.config, self.head_dim)

    @property
    def staging_lanes(self) -> int:
        """Lanes of dQ, or of float32 dK and dV, that leave shared memory at a time."""
        return staging_lanes(self.config, self.head_dim, self.value_dim)

    @property
    def dkv_dims(self) -> tuple[int, int]:
        """Lanes of dK and of dV that a consumer warpgroup accumulates."""
        return self.head_dim // self.form.dkv_parts, self.value_dim // self.form.dkv_parts

    @property
    def score_queries(self) -> int:
        """Queries of a tile of scores in a consumer's registers."""
        return self.form.score_queries or self.config.block_q

    def first_key(self, warpgroup: Any) -> Any:
        """A warpgroup's first key in the work tile."""
        return 0 if self.form.same_keys else warpgroup * WARPGROUP_ROWS

    def first_lane(self, warpgroup: Any) -> Any:
        """The first lane of a warpgroup's part of dQ, where that is half of the lanes."""
        return warpgroup * self.half_dim

    @property
    def bias_is_affine(self) -> bool:
        """See :attr:`Sm90Static.bias_is_affine`; if every key that counts is before its query.

        Used in tiles that need no mask (:class:`pallas_kernels.mosaic.sm90.backward_scores
        .AffineBias`).
        """
        score = self.spec.score
        plain = score.logits_soft_cap is None and score.score_mod is None
        return self.has_bias and self.spec.mask.hides_later_keys and plain

    @property
    def scale_in_ds(self) -> bool:
        """Whether the score's scale is part of dS; delta then is given multiplied by it.

        dQ and dK need no scale at the end, and a score pays nothing: one FMA replaces one
        subtraction. Not with float16, where small dS would underflow, nor with gradients of
        per-head parameters, which need dS without the scale.
        """
        return self.dtype == jnp.bfloat16 and not self.spec.score.differentiated

    @property
    def dropout_has_scale(self) -> bool:
        """Whether dropout's factors contain the score's scale, which dS then gets from them.

        Else a score would be multiplied by both. P is multiplied by the same factors, so dV is
        divided by the scale at the end. Far from 1 the scale could make weights underflow or
        overflow.
        """
        is_usual = 2**-40 <= abs(self.spec.score.scale) <= 2**40
        return self.spec.dropout is not None and self.scale_in_ds and is_usual

    @property
    def dropout_unit(self) -> float | None:
        """Dropout's factor on the weights that are kept; None without dropout."""
        dropout = self.spec.dropout
        if dropout is None:
            return None
        return dropout.unit * (self.spec.score.scale if self.dropout_has_scale else 1.0)

    @property
    def work_tiles(self) -> WorkTiles:
        """One per KV tile of every key/value head."""
        # Float32 gradients leave no registers for intervals and a loop over work tiles.
        by_arrays = self.masks_by_arrays or (self.has_intervals and not self.rounds_dkv)
        widest = max(self.head_dim, self.value_dim)
        persistent = backward_is_persistent(self.config, widest, by_arrays, self.needs_registers)
        return WorkTiles(
            self.batch, self.kv_heads, self.kv_tiles, last_first=False,
            shared_bytes=self.q_length * (6 * self.head_dim + 2 * self.value_dim),
            persistent=persistent,
            may_be_local=self.may_be_local and (persistent or self.has_intervals),
            given_group_heads=self.group_heads,
        )  # fmt: skip

    @property
    def memory(self) -> BackwardMemory:
        """Descriptions of the shared memory."""
        return BackwardMemory.of(
            self.config, self.head_dim, self.dtype, self.value_dim, self.deterministic,
            self.stages_dv_in_values, self.zeroes_padding,
        )  # fmt: skip
