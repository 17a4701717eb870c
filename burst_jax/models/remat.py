"""Rematerialization: what a layer stores for its backward pass, and what it recomputes there.

Stored per layer and device, in activations per token (D the embedding width, N H the query heads'
features, M the hidden features of the feed-forward)::

    remat        stored                                      recomputed
    none         all that the gradient reads                 nothing
    selective    2 D + N H (out) + 2 M, and 2 D with norms   norms, projections of q, k and v
                 after attention and feed-forward
    attention    D + N H (out)                               all but attention
    half         D + N H / 2 (out, second half of the        all but three quarters of attention
                 sequence)
    full         D                                           all, including the ring
    offload      D + N H (out) in host memory                as "attention"

``remat_layers=k`` makes the last k layers "selective" and all others "attention". The backward pass
starts with the last layers and frees what they stored before it reaches the other layers, whose
recomputation needs more memory.

Out is stored with its float32 log-sum-exp, one number per head; of linear attention it is stored
with the states before each run of tokens. Of a mixture of experts all but "half" and "full" store
the experts of each token, k integers. The D in each line is the layer's input. "half" is
half-sequence remat (:mod:`burst_jax.ring.half_remat`). With sliding windows it recomputes up to
half of the attention, because early tokens then have as many keys as late ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from burst_jax.attention.api import ring_call
from burst_jax.attention.max_logits import attention_with_max_logits
from burst_jax.linear import CHECKPOINT_NAMES as LINEAR_NAMES
from burst_jax.models.layer_sums import LayerSums
from burst_jax.models.stack import Layer
from burst_jax.ring.half_remat import attend_recomputing_half, attend_saving_half
from burst_jax.ring.max_logits import MaxLogits, shard_max_logits
from burst_jax.ring.vjp import CHECKPOINT_NAMES as RING_NAMES
from pallas_kernels.inputs import Carry

Remat = Literal["none", "selective", "attention", "half", "full", "offload"]
# (x, weights, frozen, shared, attention_fn) -> ((x, sums), aux), see DecoderLayer.
LayerWithAux = Callable[..., tuple[tuple[jax.Array, Any], Any]]

# Checkpoint names of the outputs of attention, and of the states that arrive at the runs of tokens.
MIXER_NAMES = (*RING_NAMES, *LINEAR_NAMES)
# Checkpoint names of a layer's other intermediates.
LAYER_INPUT = "layer_input"
ATTENTION_SUM = "attention_sum"
BEFORE_POST_NORM = "before_post_norm"
MLP_PRODUCTS = "mlp_products"
ROUTES = "routes"

_policies = jax.checkpoint_policies
_POLICIES = {
    "selective": _policies.save_only_these_names(
        *MIXER_NAMES, ATTENTION_SUM, BEFORE_POST_NORM, MLP_PRODUCTS, ROUTES
    ),
    "attention": _policies.save_only_these_names(*MIXER_NAMES, ROUTES),
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT, *MIXER_NAMES, ROUTES],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def keeps_mlp_products(remat: Remat) -> bool:
    """Whether the backward pass reads the outputs of gate and up from the forward pass."""
    return remat in ("none", "selective")


def remat_of_layers(remat: Remat, remat_layers: int | None, layers: int) -> tuple[Remat, ...]:
    """The remat of each layer: ``remat`` for the last ``remat_layers``, else "attention"."""
    count = layers if remat_layers is None else remat_layers
    return ("attention",) * (layers - count) + (remat,) * count


def rematerialized(layer: LayerWithAux, remat: Remat, no_logits: MaxLogits | None = None) -> Layer:
    """``(x, weights, frozen, shared) -> (x, sums)``, whose backward pass recomputes as specified.

    Args:
      layer: ``(x, weights, frozen, shared, attention_fn) -> ((x, sums), aux)``, with the
        ``attention_fn`` and ``aux`` of :meth:`burst_jax.BurstAttention.attend`.
      remat: what is stored.
      no_logits: the largest logits of a layer without softmax attention; None computes none.

    Returns:
      The layer, with :class:`burst_jax.models.layer_sums.LayerSums`.
    """
    attend = None if no_logits is None else attention_with_max_logits

    def with_logits(result: tuple[tuple[jax.Array, Any], Any]) -> tuple[jax.Array, LayerSums]:
        (x, sums), found = result
        if no_logits is None or found is None:
            found = no_logits
        return x, LayerSums(sums, found)

    if remat == "half":
        return _half_sequence(layer, with_logits, measures=no_logits is not None)

    def run(x: jax.Array, weights: Any, frozen: Any, shared: Any) -> tuple[jax.Array, Any]:
        return with_logits(layer(x, weights, frozen, shared, attend))

    if remat == "none":
        return run
    if remat == "full":
        return _recomputed(run)
    # prevent_cse adds barriers that keep XLA from merging recomputation and forward pass. The scan
    # over the layers already separates the two.
    return jax.checkpoint(run, policy=_POLICIES[remat], prevent_cse=False)


def _half_sequence(
    layer: LayerWithAux, with_logits: Callable[..., tuple[jax.Array, LayerSums]], *, measures: bool
) -> Layer:
    """``layer`` with a gradient that recomputes it with half of its attention stored.

    ``jax.checkpoint`` can only repeat parts of the forward pass. This backward pass instead runs a
    ring over the first half of the sequence. ``with_logits`` makes a layer's result of what
    ``layer`` returns, ``measures`` whether it has the largest logits.
    """

    def attend(*arrays: Any, **options: Any) -> tuple[jax.Array, tuple[Carry, MaxLogits | None]]:
        request, inputs = ring_call(*arrays, **options)
        out, lse, second_half = attend_saving_half(request, inputs)
        found = shard_max_logits(request, inputs, lse) if measures else None
        return out, (second_half, found)

    def forward(x: jax.Array, weights: Any, frozen: Any, shared: Any) -> tuple[Any, Any]:
        out, aux = layer(x, weights, frozen, shared, attend)
        second_half, found = (None, None) if aux is None else aux
        return with_logits((out, found)), (x, weights, frozen, shared, second_half)

    @jax.custom_vjp
    def run(x: jax.Array, weights: Any, frozen: Any, shared: Any) -> tuple[jax.Array, Any]:
        plain = attention_with_max_logits if measures else None
        return with_logits(layer(x, weights, frozen, shared, plain))

    def backward(residuals: Any, gradient: Any) -> tuple[jax.Array, Any, None, None]:
        x, weights, frozen, shared, second_half = residuals
        dx, dsums = gradient

        def attend_first_half(*arrays: Any, **options: Any) -> tuple[jax.Array, None]:
            return attend_recomputing_half(*ring_call(*arrays, **options), second_half)[0], None

        def recomputed(x: jax.Array, weights: Any) -> tuple[jax.Array, Any]:
            return layer(x, weights, frozen, shared, attend_first_half)[0]

        return *jax.vjp(recomputed, x, weights)[1]((dx, dsums.sums)), None, None

    run.defvjp(forward, backward)
    return run


def _recomputed(layer: Layer) -> Layer:
    """``layer`` with a gradient that stores only its arguments.

    ``jax.checkpoint`` would also store the results of kernels that update an array in place, as the
    Hopper kernels do.
    """

    @jax.custom_vjp
    def run(x: jax.Array, weights: Any, frozen: Any, shared: Any) -> tuple[jax.Array, Any]:
        return layer(x, weights, frozen, shared)

    def forward(x: jax.Array, weights: Any, frozen: Any, shared: Any) -> tuple[Any, Any]:
        return layer(x, weights, frozen, shared), (x, weights, frozen, shared)

    def backward(arguments: Any, gradient: Any) -> tuple[jax.Array, Any, None, None]:
        x, weights, frozen, shared = arguments
        _, vjp = jax.vjp(lambda x, weights: layer(x, weights, frozen, shared), x, weights)
        return *vjp(gradient), None, None

    run.defvjp(forward, backward)
    return run
