"""What a layer keeps for its backward pass, and what it recomputes there.

What a device keeps of a layer, in activations per token; D is the width, N H the query heads'
features, M the hidden features of the feed-forward::

    remat        kept                                        recomputed
    none         all that the gradient reads                 nothing
    selective    2 D + N H (out) + 2 M, and 2 D with norms   norms, projections of q, k and v
                 after attention and feed-forward
    attention    D + N H (out)                               all but attention
    half         D + N H / 2 (out, second half of each row)  all but three quarters of attention
    full         D                                           all, the ring included
    offload      nothing; D + N H (out) in the host's memory as "attention"

With ``remat_layers`` the last layers of "selective" alone keep what it says, those before them what
"attention" says. The last ones, because the backward pass begins with them: what they have kept is
gone when it comes to the layers that make more again, for which it needs more memory.

Out stands with its float32 log-sum-exp, one number a head. The D that every line has is the
layer's input. "half" is :mod:`burst_jax.ring.half_remat`. With windows it recomputes more of
attention,
up to a half of it, because the first tokens of a row then see as many keys as the last ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from burst_jax.attention.api import ring_call
from burst_jax.models.stack import Layer
from burst_jax.ring.half_remat import SecondHalf, attend_again, attend_keeping_half
from burst_jax.ring.vjp import CHECKPOINT_NAMES

Remat = Literal["none", "selective", "attention", "half", "full", "offload"]
# What a layer is given in place of ``ring_attention``; the arguments are the same.
AttentionFn = Callable[..., jax.Array]

# The names of what a layer makes. A policy keeps some of them.
LAYER_INPUT = "layer_input"
ATTENTION_SUM = "attention_sum"
BEFORE_POST_NORM = "before_post_norm"
MLP_PRODUCTS = "mlp_products"


def keeps_mlp_products(remat: Remat) -> bool:
    """Whether the backward pass reads the products of gate and up from the forward pass."""
    return remat in ("none", "selective")


def remat_of_layers(remat: Remat, remat_layers: int | None, layers: int) -> tuple[Remat, ...]:
    """What each of ``layers`` layers keeps.

    Args:
      remat: what the last ``remat_layers`` layers keep; the others are "attention".
      remat_layers: a number of layers, at most ``layers``; None is all of them.
      layers: number of layers.
    """
    count = layers if remat_layers is None else remat_layers
    return ("attention",) * (layers - count) + (remat,) * count


def rematerialised(layer: Callable[..., jax.Array], remat: Remat) -> Layer:
    """A layer whose backward pass recomputes what ``remat`` says.

    Args:
      layer: ``(x, weights, frozen, sides, attention_fn=None) -> x``; ``attention_fn`` takes the
        place of ``ring_attention``, and None is that.
      remat: what is kept.

    Returns:
      ``(x, weights, frozen, sides) -> x``, for :func:`burst_jax.models.stack.run_ahead`.
    """
    if remat == "none":
        return layer
    if remat == "half":
        return _keeping_half(layer)
    if remat == "full":
        return _recomputed(layer)
    # prevent_cse puts barriers against merging the recomputation with the forward pass. A scan
    # keeps the two apart anyway, so barriers would only cost time.
    return jax.checkpoint(layer, policy=_POLICIES[remat], prevent_cse=False)


def _keeping_half(layer: Callable[..., jax.Array]) -> Layer:
    """``layer`` with a gradient of its own, which calls it again with half of its attention.

    ``jax.checkpoint`` recomputes parts of the forward pass as they are. Here the backward pass
    computes what the forward pass does not: a ring over the first half of the sequence.
    """

    @jax.custom_vjp
    def run(x: jax.Array, weights: Any, frozen: Any, sides: Any) -> jax.Array:
        return layer(x, weights, frozen, sides)

    def forward(x: jax.Array, weights: Any, frozen: Any, sides: Any) -> tuple[jax.Array, Any]:
        kept: list[SecondHalf] = []

        def attend(*arrays: Any, **options: Any) -> jax.Array:
            out, _, half = attend_keeping_half(*ring_call(*arrays, **options))
            kept.append(half)
            return out

        out = layer(x, weights, frozen, sides, attend)
        return out, (x, weights, frozen, sides, kept)

    def backward(residuals: Any, gradient: jax.Array) -> tuple[jax.Array, Any, None, None]:
        x, weights, frozen, sides, kept = residuals

        def again(x: jax.Array, weights: Any) -> jax.Array:
            halves = iter(kept)

            def attend(*arrays: Any, **options: Any) -> jax.Array:
                return attend_again(*ring_call(*arrays, **options), next(halves))[0]

            return layer(x, weights, frozen, sides, attend)

        return *jax.vjp(again, x, weights)[1](gradient), None, None

    run.defvjp(forward, backward)
    return run


def _recomputed(layer: Callable[..., jax.Array]) -> Layer:
    """``layer`` with a gradient that keeps nothing but its arguments, and calls it again.

    ``jax.checkpoint`` would keep the results of a kernel that writes into an array, as Hopper's do.
    """

    @jax.custom_vjp
    def run(x: jax.Array, weights: Any, frozen: Any, sides: Any) -> jax.Array:
        return layer(x, weights, frozen, sides)

    def forward(x: jax.Array, weights: Any, frozen: Any, sides: Any) -> tuple[jax.Array, Any]:
        return layer(x, weights, frozen, sides), (x, weights, frozen, sides)

    def backward(arguments: Any, gradient: jax.Array) -> tuple[jax.Array, Any, None, None]:
        x, weights, frozen, sides = arguments
        _, vjp = jax.vjp(lambda x, weights: layer(x, weights, frozen, sides), x, weights)
        return *vjp(gradient), None, None

    run.defvjp(forward, backward)
    return run


_policies = jax.checkpoint_policies
_POLICIES = {
    "selective": _policies.save_only_these_names(
        *CHECKPOINT_NAMES, ATTENTION_SUM, BEFORE_POST_NORM, MLP_PRODUCTS
    ),
    "attention": _policies.save_only_these_names(*CHECKPOINT_NAMES),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT, *CHECKPOINT_NAMES],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
