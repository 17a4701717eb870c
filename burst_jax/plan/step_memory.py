"""Memory of a training step on each device.

XLA lets arrays share memory that do not live at the same time, so a step needs what is there
throughout, and beside it what the largest of its phases needs. Which arrays are alive in a phase
was read off programs compiled for one to eight GPUs (burst_jax/EXPERIMENTS.md); tests compare the
sums with other programs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from burst_jax.plan.memory import temp_bytes
from burst_jax.plan.sizes import Sizes
from burst_jax.plan.way import Way

if TYPE_CHECKING:
    from burst_jax.models.remat import Remat

# Tokens whose logits and slopes the loss has at a time, and the part of them whose logits are
# float32.
_FLOAT32_PART = 1 / 4


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on one device; ``total`` is what a GPU must have.

    Attributes:
      weights: its parts of the weights.
      moments: of the optimizer, on the device.
      batch: tokens, targets, positions and weights.
      activations: what layers keep for the backward pass, on the device.
      gradients: of its parts of the layers' weights and of the head's.
      work: the phase that needs most beside these.
      phase: which one: "attention", "feed-forward", "loss" or "optimizer".
      host: in the host's memory: activations and moments.
    """

    weights: int
    moments: int
    batch: int
    activations: int
    gradients: int
    work: int
    phase: str
    host: int

    @property
    def total(self) -> int:
        """All that is on the device when it has most."""
        arguments = self.weights + self.moments + self.batch
        return arguments + self.activations + self.gradients + self.work


def kept_bytes(sizes: Sizes, remat: Remat) -> int:
    """Bytes that one layer keeps for its backward pass, on the device or on the host."""
    s = sizes
    lse = 4 * s.heads
    lanes = {
        "full": s.width,
        "attention": s.width + s.query,
        "offload": s.width + s.query,
        "half": s.width + s.query / 2,
        "selective": 2 * s.width + s.post_normed + s.query + 2 * s.hidden,
        # Norms keep three float32 arrays each; then the inputs of attention and feed-forward, q, k,
        # v, out, and the products of the feed-forward.
        "none": 3 * 4 / s.itemsize * s.normed + 2 * (s.width + s.query + s.kv + s.hidden),
    }[remat]
    rows = {"full": 0, "half": lse / 2}.get(remat, lse)
    return int(s.tokens * (lanes * s.itemsize + rows))


def step_memory(
    sizes: Sizes,
    way: Way,
    rotation: str,
    *,
    fused: bool,
    chunk_size: int,
    moment_size: int,
) -> StepMemory:
    """The memory of one step.

    Args:
      sizes: what one device has.
      way: how the step is split.
      rotation: what travels in the ring's backward pass.
      fused: whether one kernel makes all gradients of attention.
      chunk_size: number of tokens that the loss takes at a time.
      moment_size: bytes of one of the optimizer's moments of a weight.
    """
    s, p = sizes, sizes.param
    remats = way.remats(s.layers)
    kept = {remat: count * kept_bytes(s, remat) for remat, count in remats.items()}
    offloaded = kept.pop("offload", 0)
    moments = 2 * moment_size * s.parts
    # The whole backward pass has the gradients of all layers: a scan writes each into its place.
    gradients = p * (s.layers * s.layer.part + s.head.part)
    on_device, phases = 0, {}
    for remat in remats:
        # The backward pass begins with the last layers. What they have kept is gone before it comes
        # to those that keep something else.
        on_device += kept.get(remat, 0)
        for name, work in _backward(sizes, way, remat, rotation, fused).items():
            phases[name] = max(phases.get(name, 0), work + on_device + gradients)
    phases["loss"] = on_device + _loss(sizes, way, chunk_size)
    phases["optimizer"] = gradients + _optimizer(sizes)
    phase = max(phases, key=phases.__getitem__)
    on_host = offloaded + (moments if way.moments == "host" else 0)
    return StepMemory(
        weights=p * s.parts,
        moments=moments if way.moments == "device" else 0,
        batch=16 * s.tokens,
        activations=on_device,
        gradients=gradients,
        work=int(phases[phase]) - on_device - gradients,
        phase=phase,
        host=on_host,
    )


def _backward(s: Sizes, way: Way, remat: Remat, rotation: str, fused: bool) -> dict[str, float]:
    """Bytes of one layer's backward pass, by its two halves."""
    features = s.tokens * s.itemsize
    one, query, kv = features * s.width, features * s.query, features * 2 * s.kv
    split = way.weights == "split" and way.rows * way.seq > 1
    # The layer's weights, or the next layer's: they come one by one as the others go.
    gathered = s.itemsize * s.layer.whole
    # The gradients of the feed-forward wait for the end of the layer to be summed.
    summed = 4 * s.mlp.whole if split else 0
    ring = temp_bytes(
        "fused" if fused else "apart",
        rotation,
        turns=way.ring[0] if len(way.ring) == 2 else 1,
        stops=way.seq,
        exchange=False,
        q=query,
        kv=kv,
    )
    # What is fetched from the host lies there as it came.
    fetched = one if remat == "offload" else 0
    # The gradient of the residual stream, the normed input; q, out and its gradient; k, v.
    attention = 2 * one + 3 * query + 2 * kv + ring
    hidden = features * s.hidden / way.mlp_chunks
    # Gate, up, and the gradients of the hidden features and of gate or up. Products that were kept
    # are read where they are, and what they were made of is not there again.
    kept = remat in ("none", "selective")
    products = max((3 if kept else 4) * hidden, 3 * hidden + 2 / 3 * summed)
    states = (3 if kept else 5) * one
    if way.mlp_chunks > 1:
        # Chunks of inputs and results; they add to the weights' gradients.
        states += 3 * one / way.mlp_chunks + kv
        products += 4 * s.mlp.whole * 4 / 3
    return {
        "attention": fetched + attention + gathered + summed,
        "feed-forward": fetched + states + query + products + gathered,
    }


def _loss(s: Sizes, way: Way, chunk_size: int) -> float:
    """Bytes of the loss: the head and its gradient, hidden states and theirs, a chunk's logits."""
    chunk = min(chunk_size, s.tokens)
    logits = chunk * s.vocab * (s.itemsize + 4 * _FLOAT32_PART)
    states = 3 * s.tokens * s.width * s.itemsize
    return s.head.whole * (4 + s.itemsize) + logits + states + s.itemsize * s.layer.whole


def _optimizer(s: Sizes) -> float:
    """Bytes beside the layers' gradients: the embedding's gradient, in two orders of dimensions."""
    return 2 * 4 * s.embedding.whole + s.tokens * s.width * s.itemsize
