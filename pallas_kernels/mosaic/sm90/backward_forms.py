"""The forms of the backward kernel: how two consumer warpgroups share the work on a KV tile.

dK and dV of the tile's keys stay in registers, so the head dims decide which forms there are:

| form | head dims | tile of queries and keys | a consumer accumulates |
|---|---|---|---|
| NARROW | up to 128 | 64 or 128 x 128 | dK and dV of its 64 keys |
| OWN_KEYS | (192, 128) | 64 x 128 | the same |
| SHARED_KEYS | above 128 | 64 x 64 | half of the lanes of dK and dV, of the same keys |
| SPLIT | (192, 192) | 64 x 96 | dV or dK, of the same keys |

A config has a form, which has all that follows from it. Whatever differs without a rule is a field
here, so that no other module asks which form there is, but those that run a form's steps.
"""

from __future__ import annotations

import dataclasses

# Wider heads are padded to one of WIDE_HEAD_DIMS, (H, Hv).
WIDEST_NARROW_HEAD_DIM = 128
WIDE_HEAD_DIMS = (192, 128), (192, 192), (256, 128), (256, 192), (192, 256), (256, 256)
# Queries of a tile of scores where dK and dV leave no registers for 64.
WIDE_SCORE_QUERIES = 32


@dataclasses.dataclass(frozen=True)
class BackwardForm:
    """What a form of the backward kernel determines.

    Attributes:
      name: of the constant in this module.
      block_kv: keys of a work tile.
      head_dims: the padded ``(H, Hv)`` that it supports; None is all of up to 128.
      score_queries: queries of a tile of scores in a consumer's registers; None is all of a tile.
      tiled_lanes: width of the tiles in shared memory, if some products read or write less of a row
        than the widest swizzled tile has; None is what dQ's product reads.
      same_keys: whether both consumers work on all keys of the tile; else each has 64.
      dkv_parts: number of consumers that share the lanes of dK, and those of dV.
      queries_are_rows: whether tiles of scores are ``[queries, keys]``, and dK and dV transposed.
      stores_p: whether the weights pass through shared memory.
      hands_over_p: whether one consumer computes the weights for both. Their barrier also tells
        that dS has been read, which else has a barrier if there are fewer than three buffers.
      ds_buffers: buffers for dS with tiles of 64 queries.
      staging_buffers: buffers for gradients on their way to global memory.
      most_staged_lanes: the most lanes of a gradient that a buffer holds.
      stages_half: head dims whose buffers hold half of dQ's lanes even if that is more.
      whole_dq_lanes: the most lanes of a consumer's dQ that one product computes. More of them are
        computed 64 at a time.
      fewest_do_stages: the fewest pipeline stages of dO.
      has_inline_copies: whether consumers can start the copies, without a producer warpgroup.
      copies_early: whether such copies start while scores are computed.
      is_persistent: whether a CTA has registers for a loop over work tiles.
      is_persistent_inline: the same of consumers that start copies.
      has_spare_registers: whether there are registers for terms of scores next to rounded dK and
        dV.
      starts_from_zero: whether accumulators start from :func:`.instructions.fresh_zeros`. Not
        measured for wide heads.
      can_round_dkv: whether dK and dV can be rounded on their way out, in a dS buffer of the
        consumer's own.
    """

    name: str
    block_kv: int
    head_dims: tuple[tuple[int, int], ...] | None
    score_queries: int | None = None
    tiled_lanes: int | None = WIDE_SCORE_QUERIES
    same_keys: bool = True
    dkv_parts: int = 1
    queries_are_rows: bool = False
    stores_p: bool = True
    hands_over_p: bool = False
    ds_buffers: int = 1
    staging_buffers: int = 2
    most_staged_lanes: int = 64
    stages_half: tuple[tuple[int, int], ...] = ()
    whole_dq_lanes: int = 64
    fewest_do_stages: int = 2
    has_inline_copies: bool = True
    copies_early: bool = True
    is_persistent: bool = True
    is_persistent_inline: bool = False
    has_spare_registers: bool = False
    starts_from_zero: bool = False
    can_round_dkv: bool = True

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        # A copy is the constant itself: forms are compared by identity.
        return self.name

    def supports(self, head_dim: int, value_dim: int) -> bool:
        """Whether it computes heads of these padded dims."""
        if self.head_dims is None:
            return max(head_dim, value_dim) <= WIDEST_NARROW_HEAD_DIM
        return (head_dim, value_dim) in self.head_dims


# Up to head dim 128 a consumer's registers hold dK and dV of 64 keys, and the scores of all queries
# of a tile. Weights stay in registers, as dV's left operand. A consumer may run almost a step ahead
# of the other: with three dS buffers, or two and a barrier. Step: backward_step.py. Tests: the
# cases of test_sm90_interpreted.py with head dims up to 128. Experiments: "three orders of the
# backward's step at head dim 128", "backward tiles of 128 queries at head dim 64".
NARROW = BackwardForm(
    "NARROW", 128, None, tiled_lanes=None, same_keys=False, stores_p=False, ds_buffers=3,
    copies_early=False, is_persistent_inline=True, has_spare_registers=True, starts_from_zero=True,
)  # fmt: skip
# At (192, 128) dK and dV of 64 keys take 160 registers, so P, dP and dS are computed for 32 queries
# at a time, and dQ in two parts. Step: wide_step.py. Tests: "latent" of test_sm90_interpreted.py.
# Experiments: "Hopper backward at head dims 192, 256 and (192, 128): the first kernels", "how dQ
# leaves, and scores of 64 queries at (192, 128)".
OWN_KEYS = BackwardForm(
    "OWN_KEYS", 128, ((192, 128),), score_queries=WIDE_SCORE_QUERIES, same_keys=False,
    ds_buffers=2, most_staged_lanes=32, is_persistent=False,
)  # fmt: skip
# Wider heads leave registers for dK and dV of 64 keys in both consumers together. Each computes the
# scores of half of the queries and adds to half of the lanes, so both exchange P and dS in every
# step, and a dS buffer is no consumer's own. Step: wide_step.py. Tests: "wide" and "wide_slopes" of
# test_sm90_interpreted.py. Experiments: "the first kernels", as above; at (192, 192) it serves the
# calls that SPLIT does not.
SHARED_KEYS = BackwardForm(
    "SHARED_KEYS", 64, WIDE_HEAD_DIMS, score_queries=WIDE_SCORE_QUERIES, dkv_parts=2,
    most_staged_lanes=32, stages_half=((192, 192),), whole_dq_lanes=96, can_round_dkv=False,
)  # fmt: skip
# At (192, 192) SHARED_KEYS reads more of shared memory than its products wait for. With 96 keys for
# both, one consumer computes P and dV, the other dS and dK, and neither operand but dQ's is read
# twice. It has no registers for copies nor for further terms of scores, and memory for one stage of
# dO. Step: split_step.py. Tests: "split" and "split_tiles" of test_sm90_interpreted.py. Experiment:
# "Hopper backward at head dim 192: one consumer for dV, the other for dK, tiles of 96 keys".
SPLIT = BackwardForm(
    "SPLIT", 96, ((192, 192),), queries_are_rows=True, hands_over_p=True, staging_buffers=3,
    fewest_do_stages=1, has_inline_copies=False,
)  # fmt: skip

FORMS = {form.name: form for form in (NARROW, OWN_KEYS, SHARED_KEYS, SPLIT)}
