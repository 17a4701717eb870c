"""What a layer keeps for its backward pass, and what it recomputes there.

What a device keeps of a layer, in activations per token; D is the width, N H the query heads'
features, M the hidden features of the feed-forward::

    remat        kept                                        recomputed
    none         all that the gradient reads                 nothing
    selective    2 D + N H (out) + 2 M, and 2 D with norms   norms, projections of q, k and v
                 after attention and feed-forward
    attention    D + N H (out)                               all but attention
    full         D                                           all, the ring included
    offload      nothing; D + N H (out) in the host's memory as "attention"

Out stands with its float32 log-sum-exp, one number a head. The D that every line has is the
layer's input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax

from burst_jax.ring.vjp import CHECKPOINT_NAMES

Remat = Literal["none", "selective", "attention", "full", "offload"]

# The names of what a layer makes. A policy keeps some of them.
LAYER_INPUT = "layer_input"
ATTENTION_SUM = "attention_sum"
BEFORE_POST_NORM = "before_post_norm"
MLP_PRODUCTS = "mlp_products"


def keeps_mlp_products(remat: Remat) -> bool:
    """Whether the backward pass reads the products of gate and up from the forward pass."""
    return remat in ("none", "selective")


def rematerialised[**P, R](layer: Callable[P, R], remat: Remat) -> Callable[P, R]:
    """``layer``, whose backward pass recomputes what ``remat`` says."""
    if remat == "none":
        return layer
    # prevent_cse puts barriers against merging the recomputation with the forward pass. A scan
    # keeps the two apart anyway, so barriers would only cost time.
    return jax.checkpoint(layer, policy=_POLICIES[remat], prevent_cse=False)


_policies = jax.checkpoint_policies
_POLICIES = {
    "selective": _policies.save_only_these_names(
        *CHECKPOINT_NAMES, ATTENTION_SUM, BEFORE_POST_NORM, MLP_PRODUCTS
    ),
    "attention": _policies.save_only_these_names(*CHECKPOINT_NAMES),
    "full": None,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT, *CHECKPOINT_NAMES],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
