"""Memory of a training step on each device.

XLA lets arrays with disjoint lifetimes share memory, so a step needs what is live throughout, plus
the largest of its phases. Which arrays are live in a phase was read from programs compiled for one
to eight GPUs (burst_jax/EXPERIMENTS.md); tests compare the sums with other programs.
"""

from __future__ import annotations

import dataclasses

from burst_jax.models.config import Mixer
from burst_jax.models.remat import Remat
from burst_jax.plan.cost_model import temp_bytes
from burst_jax.plan.device_sizes import DeviceSizes
from burst_jax.plan.training_strategy import TrainingStrategy
from burst_jax.training.loss import CHUNK_SIZE

# Numbers of arrays of the size of v, and of q and k together, that Gated DeltaNet's layers have: at
# the peak of their backward pass, by whether it recomputes; recomputed ahead of the backward pass
# of the feed-forward (_ahead), by whether devices share a sequence; and saved without remat, next
# to what the kernels keep: the convolutions' inputs, the results of SiLU and norms, and the float32
# arrays of the gated norm.
_PEAK = {True: (15.2, 5.0), False: (9.0, 3.0)}
_AHEAD = {True: (6.9, 3.1), False: (4.5, 2.4)}
_SAVED = (23.0, 9.0)
# Of v: fewer with Hopper's kernels where layers are recomputed, and more ahead where the forward
# scan runs again.
_FUSED, _AHEAD_FULL = -2.9, 4.0
# Of v, in addition with a decay per key channel: float32 decays and their gradients, what scans
# read of every value head, and a state of every chunk. At the peak, by whether it recomputes;
# ahead, and there with remat "full"; and saved without remat.
_CHANNELS_PEAK = {True: 7.6, False: 4.4}
_CHANNELS_AHEAD, _CHANNELS_AHEAD_FULL, _CHANNELS_SAVED = 7.6, 5.0, 2.0
# Fraction of a loss chunk whose logits are float32 at a time.
_FLOAT32_PART = 1 / 4


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes on one device; ``total`` is what a GPU needs.

    Attributes:
      weights: its shards of the weights.
      moments: of the optimizer, on the device.
      batch: tokens, targets, positions and loss weights.
      activations: saved for the backward pass by all layers, on the device.
      gradients: of its shards of the layers' weights and of the head's.
      work: temporaries of the phase that needs most, in addition to these.
      phase: that phase: "attention", "delta_net", "feed-forward", "loss" or "optimizer".
      host: in host memory: activations and moments.
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
        """Peak memory on the device."""
        arguments = self.weights + self.moments + self.batch
        return arguments + self.activations + self.gradients + self.work


def saved_bytes(sizes: DeviceSizes, remat: Remat, mixer: Mixer, kernels: str) -> int:
    """Bytes that one layer saves for its backward pass, on the device or on the host.

    ``kernels`` are those of :class:`burst_jax.plan.Gpu`.
    """
    s = sizes
    # Out of softmax attention and its lse; of Gated DeltaNet out, states, and of the chunks.
    out = s.tokens * (s.itemsize * s.attended + 4 * s.heads)
    if mixer == "delta_net":
        assert s.delta_net is not None
        out = s.tokens * s.delta_net.kept_bytes(kernels) + s.delta_net.state_bytes(s.rows)
    share = {"full": 0, "half": 1 / 2}.get(remat, 1)
    features = s.width
    if remat == "selective":
        features = 2 * s.width + s.post_normed(mixer) + 2 * s.held_hidden
    if remat == "none":
        # Norms save three float32 arrays each; then the inputs of attention and feed-forward, q, k,
        # v, and the hidden features.
        features = 2 * s.width + 2 * s.held_hidden + s.assigned * s.width
        features += 3 * 4 / s.itemsize * s.normed(mixer)
        if mixer == "attention":
            features += s.query + s.kv
            # Of the output gate its sigmoid, that one's float32 slope, and the gated output.
            features += (2 + 4 / s.itemsize) * s.gate
    size = s.tokens * features * s.itemsize + share * out
    if remat == "none" and mixer == "delta_net":
        size += _of_delta_net(s, _SAVED, _CHANNELS_SAVED, padded=False)
    return int(size)


def step_memory(
    sizes: DeviceSizes,
    strategy: TrainingStrategy,
    rotation: str,
    *,
    kernels: str,
    moment_size: int,
) -> StepMemory:
    """The memory of one step.

    ``rotation`` is that of the ring's backward pass, ``kernels`` as in :class:`burst_jax.plan.Gpu`,
    ``moment_size`` the bytes of one optimizer moment of a weight.
    """
    s, p = sizes, sizes.param
    remats = strategy.remats(s.mixers)
    saved: dict[Remat, int] = {}
    for (remat, mixer), count in remats.items():
        each = count * saved_bytes(s, remat, mixer, kernels)
        saved[remat] = saved.get(remat, 0) + each
    offloaded = saved.get("offload", 0)
    moments = 2 * moment_size * s.parts
    # Live in the whole backward pass: the scan over layers writes each gradient into the stack.
    gradients = p * (s.all_layers.part + s.head.part)
    on_device, phases = 0, {}
    for remat, size in saved.items():
        # The backward pass starts with the last layers, and has freed what they saved before it
        # reaches those with another remat.
        on_device += 0 if remat == "offload" else size
        for mixer in dict.fromkeys(s.mixers):
            if (remat, mixer) not in remats:
                continue
            for name, work in _backward(s, strategy, remat, mixer, rotation, kernels).items():
                phases[name] = max(phases.get(name, 0), work + on_device + gradients)
    phases["loss"] = on_device + _loss(sizes)
    # The embedding's gradient, in two memory layouts.
    phases["optimizer"] = gradients + 8 * s.embedding.whole + s.tokens * s.width * s.itemsize
    phase = max(phases, key=phases.__getitem__)
    return StepMemory(
        weights=p * s.parts,
        moments=moments if strategy.moments == "device" else 0,
        batch=16 * s.tokens,
        activations=on_device,
        gradients=gradients,
        work=int(phases[phase]) - on_device - gradients,
        phase=phase,
        host=offloaded + (moments if strategy.moments == "host" else 0),
    )


def _backward(
    s: DeviceSizes,
    strategy: TrainingStrategy,
    remat: Remat,
    mixer: Mixer,
    rotation: str,
    kernels: str,
) -> dict[str, float]:
    """Bytes of one layer's backward pass, by its two halves."""
    features = s.tokens * s.itemsize
    one, out = features * s.width, features * s.out(mixer)
    sharded = strategy.weights == "sharded" and strategy.rows * strategy.token_devices > 1
    # The layer's gathered weights, or the next layer's: they replace each other one by one.
    gathered = s.itemsize * s.layer.whole
    # The feed-forward's gradients are reduced while the mixer runs.
    summed = 4 * s.mlp.whole if sharded else 0
    received = 4 * (s.mlp.whole - s.mlp.part) if sharded else 0
    # Experts' gradients come in the dtype of their products, and are held until they are reduced.
    # XLA does not place them where the layer's own weights were.
    gathers_experts = sharded and s.copies and s.mlp.whole > s.mlp.part
    gradients = 2 * s.itemsize * s.mlp.whole if gathers_experts else 0
    # The copy that was fetched from the host.
    fetched = one if remat == "offload" else 0
    # Gradient of the residual stream and the normed input, and what the mixer needs.
    if mixer == "attention":
        of_mixer = 2 * one + _of_attention(s, strategy, rotation, kernels)
        if remat != "none":
            # The output gate's sigmoid and its float32 slope, recomputed.
            of_mixer += s.tokens * (s.itemsize + 4) * s.gate
    else:
        of_mixer = 2 * one + _peak(s, remat, kernels)
    hidden = features * s.held_hidden / strategy.mlp_chunks
    # Gate, up, and the gradients of the hidden features and of gate or up. Saved products are read
    # in place, and their inputs are not recomputed.
    saved = remat in ("none", "selective")
    products = max((3 if saved else 4) * hidden, 3 * hidden + 2 / 3 * summed)
    states = (3 if saved else 5) * one
    # A token's copies, sorted by expert: the input of gate and up, and the gradients of both ends.
    states += 3 * s.assigned * one / strategy.mlp_chunks
    if strategy.expert:
        # What is sent and received on one side, next to sorted rows on the other.
        states += 3 * s.sent * one / strategy.mlp_chunks
        # Float32 sums of further rounds, in loops that XLA does not share memory with.
        states += 4 * (s.tokens * s.width + s.mlp.whole)
    if strategy.mlp_chunks > 1:
        # Chunks of inputs and results, which accumulate into the weights' gradients.
        states += 3 * one / strategy.mlp_chunks
        states += features * s.kv if mixer == "attention" else out
        products += 4 * s.mlp.whole * 4 / 3
    if mixer == "delta_net" and not saved:
        states += _ahead(s, strategy, remat, kernels)
    if mixer == "attention" and remat == "full":
        # The ring was computed again: q, k, v and the input of their projections are live.
        states += one + features * (s.query + s.kv)
    return {
        mixer: fetched + of_mixer + gathered + summed + received + gradients,
        "feed-forward": fetched + states + out + products + gathered,
    }


def _of_attention(s: DeviceSizes, strategy: TrainingStrategy, rotation: str, kernels: str) -> float:
    """Bytes of q, out and its gradient, k, v, and the ring's temporaries."""
    features = s.tokens * s.itemsize
    query, out, kv = (features * each for each in (s.query, s.attended, s.kv))
    ring = temp_bytes(
        kernels,
        rotation,
        passes=strategy.ring[0] if len(strategy.ring) == 2 else 1,
        steps=strategy.seq,
        ulysses=strategy.ulysses > 1,
        q=(query + out) // 2,
        kv=features * s.attended_kv,
    )
    return query + 2 * out + 2 * kv + ring


def _of_delta_net(
    s: DeviceSizes, arrays: tuple[float, float], of_channels: float, *, padded: bool = True
) -> float:
    """Bytes of arrays: how many have the size of v, and how many that of q and k together.

    ``of_channels`` are those in addition with a decay per key channel. ``padded``: with the head
    dims that the kernels pad them to, for arrays around the kernels an upper bound.
    """
    d = s.delta_net
    assert d is not None
    of_values, of_keys = arrays
    of_values += of_channels if d.channels else 0
    values, keys = d.kernel_features if padded else d.features
    return s.tokens * s.itemsize * (of_values * values + of_keys * keys)


def _peak(s: DeviceSizes, remat: Remat, kernels: str) -> float:
    """Bytes of Gated DeltaNet at the peak of its backward pass."""
    recomputes = remat != "none"
    values, keys = _PEAK[recomputes]
    values += _FUSED if recomputes and kernels == "fused" else 0
    return _of_delta_net(s, (values, keys), _CHANNELS_PEAK[recomputes])


def _ahead(s: DeviceSizes, strategy: TrainingStrategy, remat: Remat, kernels: str) -> float:
    """Bytes of Gated DeltaNet that are recomputed before the feed-forward's backward pass."""
    values, keys = _AHEAD[strategy.seq > 1]
    values += _FUSED if kernels == "fused" else 0
    if remat != "full":
        return _of_delta_net(s, (values, keys), _CHANNELS_AHEAD)
    assert s.delta_net is not None
    kept = s.tokens * s.delta_net.kept_bytes(kernels)
    of_channels = _CHANNELS_AHEAD + _CHANNELS_AHEAD_FULL
    return kept + _of_delta_net(s, (values + _AHEAD_FULL, keys), of_channels)


def _loss(s: DeviceSizes) -> float:
    """Bytes of the loss: the head and its gradient, hidden states and theirs, logits of a chunk."""
    logits = min(CHUNK_SIZE, s.tokens) * s.vocab * (s.itemsize + 4 * _FLOAT32_PART)
    states = 3 * s.tokens * s.width * s.itemsize
    return s.head.whole * (4 + s.itemsize) + logits + states + s.itemsize * s.layer.whole
