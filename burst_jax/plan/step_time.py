"""Time of a training step: attention, matmuls, memory-bound operations and communication.

Attention here is what a layer has between its projections, Gated DeltaNet included.

A step is the sum of its parts. Communication counts where it is exposed: ring steps overlap with
their kernels, the gathers of a layer's weights with the layer before, and all-reduces over the
tensor axis with nothing.
"""

from __future__ import annotations

import dataclasses

from burst_jax.attention.shardings import check_lengths
from burst_jax.layouts.parse import parse_layout
from burst_jax.models.config import DecoderConfig, LayerKind, Mixer
from burst_jax.models.remat import Remat
from burst_jax.plan import delta_net
from burst_jax.plan.cost_model import AttentionShape, CostModel, Estimate
from burst_jax.plan.device_sizes import DeviceSizes
from burst_jax.plan.hardware import Cluster
from burst_jax.plan.step_memory import saved_bytes
from burst_jax.plan.training_strategy import TrainingStrategy
from burst_jax.ring.rotation import ROTATIONS
from burst_jax.training.loss import CHUNK_SIZE

# Bytes per token and feature of the residual stream that the memory-bound operations of a layer
# read and write (norms, RoPE, gates, sums, casts): forward, and backward with its recomputation.
_PASSES = {"forward": 45, "backward": 90}
# Bytes per logit: float32 logits are written and read twice, their gradients written and read once.
_LOGIT_BYTES = 16
# Bytes per weight that a device stores: AdamW reads gradient, weight and moments and writes weight
# and moments; before that the gradient is scaled and its norm computed.
_UPDATE_BYTES = 24
# Time of an experts' product over that of a dense one with as many operations; and bytes per weight
# of all experts of a device that it reads and writes besides (casts, products of few tokens,
# gradients). Fitted to steps of 128 and 512 experts.
_GROUPED, _EXPERT_BYTES = 1.25, {"forward": 8, "backward": 20}
# Fraction of a layer's work, forward or backward, that its weights' communication overlaps with.
_OVERLAP = 0.5


MixerEstimate = Estimate | delta_net.DeltaNetEstimate


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on the busiest device; ``total`` is their sum.

    Attributes:
      attention: forward and backward pass of all layers, the ring's exposed communication and
        Gated DeltaNet's exchanges included.
      matmuls: of all layers, attention excluded.
      recomputed: recomputation in the backward pass, attention included.
      loss: the head's three matmuls, and the memory traffic of logits.
      memory: other memory-bound operations, the optimizer's included.
      communication: exposed communication between GPUs, other than the ring's.
      host: exposed copies to and from host memory.
    """

    attention: float
    matmuls: float
    recomputed: float
    loss: float
    memory: float
    communication: float
    host: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


def attention_of(
    config: DecoderConfig,
    kind: LayerKind,
    cluster: Cluster,
    strategy: TrainingStrategy,
    *,
    length: int,
    rows: int,
) -> Estimate:
    """One layer's attention, with the rotation of ``backward="auto"``.

    Raises:
      ValueError: the strategy cannot shard the length.
    """
    window = () if kind.window is None else (("local_window_size", kind.local_window_size),)
    shape = AttentionShape(
        length,
        rows,
        config.num_heads // strategy.tensor,
        max(1, config.num_kv_heads // strategy.tensor),
        config.head_dim,
        masks=(("is_causal", True), *window),
        value_head_dim=config.value_head_dim,
    )
    request = strategy.attention.request(shape, strategy.layout)
    check_lengths(request, {"length": length})
    model = CostModel(shape, strategy.ring_cluster(cluster), strategy.attention, request)
    found = [model.estimate(rotation) for rotation in ROTATIONS]
    return min(found, key=lambda each: each.backward_bytes)


def mixer_of(
    config: DecoderConfig,
    kind: LayerKind,
    cluster: Cluster,
    strategy: TrainingStrategy,
    sizes: DeviceSizes,
    *,
    length: int,
) -> MixerEstimate:
    """One layer's attention, or Gated DeltaNet, by the layer's kind; ``sizes`` are the device's.

    Raises:
      ValueError: the strategy cannot shard the length.
    """
    if kind.mixer == "attention":
        return attention_of(config, kind, cluster, strategy, length=length, rows=sizes.rows)
    assert sizes.delta_net is not None
    parse_layout(strategy.layout).check_length(length, strategy.seq, "length")
    return delta_net.estimate(
        sizes.delta_net, cluster, strategy, tokens=sizes.tokens, rows=sizes.rows
    )


def step_seconds(
    sizes: DeviceSizes,
    strategy: TrainingStrategy,
    cluster: Cluster,
    attentions: list[MixerEstimate],
    *,
    first_half: float,
    moment_size: int,
) -> StepSeconds:
    """The time of one step.

    ``attentions`` are those of all layers, ``first_half`` is the forward time of them all over the
    first half of each sequence, ``moment_size`` the bytes of one optimizer moment of a weight.
    """
    s, gpu, remats = sizes, cluster.gpu, strategy.remats(sizes.mixers)
    rate = 1e12 * (gpu.forward if gpu.matmul is None else gpu.matmul)
    bandwidth = 1e9 * gpu.bandwidth
    forward = sum(each.forward_seconds for each in attentions)
    backward = sum(each.backward_seconds for each in attentions)
    again = {"full": forward, "half": first_half}.get(strategy.remat, 0.0)

    matmuls = 2 * s.tokens * _weights(s) / rate
    weights_again = sum(count * _recomputed_weights(s, *each) for each, count in remats.items())
    matmuls_again = 2 * s.tokens * weights_again / rate
    head = 3 * 2 * s.tokens * s.width * s.vocab / rate
    chunks = -(-s.tokens // CHUNK_SIZE)
    logits = (s.tokens * s.vocab * _LOGIT_BYTES + chunks * 8 * s.head.whole) / bandwidth

    passes = _passes(s, bandwidth)
    # Every chunk of the feed-forward accumulates into float32 gradients.
    sums = s.layers * 8 * s.mlp.whole * (strategy.mlp_chunks - 1) / bandwidth
    moments = 4 * moment_size if strategy.moments == "device" else 0
    update = (_UPDATE_BYTES + moments) * s.parts / bandwidth

    ahead = forward + matmuls + passes["forward"]
    back = backward + 2 * matmuls + matmuls_again + again + passes["backward"]
    exposed = _exposed_weights(s, strategy, cluster, ahead, back)
    return StepSeconds(
        attention=forward + backward,
        matmuls=3 * matmuls,
        recomputed=matmuls_again + again,
        loss=head + logits,
        memory=sum(passes.values()) + sums + update,
        communication=exposed
        + _tensor_sums(s, strategy, cluster)
        + _exchanges(s, strategy, cluster),
        host=_exposed_host_copies(s, strategy, cluster, ahead, rate, moment_size),
    )


def evaluation_seconds(
    sizes: DeviceSizes, cluster: Cluster, attentions: list[MixerEstimate]
) -> float:
    """The time to evaluate a batch: a forward pass, whose communication counts as overlapped."""
    s, gpu = sizes, cluster.gpu
    rate = 1e12 * (gpu.forward if gpu.matmul is None else gpu.matmul)
    bandwidth = 1e9 * gpu.bandwidth
    products = 2 * s.tokens * (_weights(s) + s.width * s.vocab) / rate
    # Logits are written and read once.
    logits = s.tokens * s.vocab * _LOGIT_BYTES / 2 / bandwidth
    attention = sum(each.forward_seconds for each in attentions)
    return attention + products + _passes(s, bandwidth)["forward"] + logits


def _passes(s: DeviceSizes, bandwidth: float) -> dict[str, float]:
    """Seconds of the memory-bound operations of all layers, by direction."""
    features = s.layers * s.tokens * s.width * s.itemsize / 2
    # Each direction sorts a token's copies and sorts them back: a read and a write of each. With an
    # exchange the sender does the same with what it sends.
    sorts = 8 * (s.assigned + s.sent)
    experts = (s.layers - s.dense) * s.mlp.whole if s.copies else 0
    return {
        name: (features * (count + sorts) + experts * _EXPERT_BYTES[name]) / bandwidth
        for name, count in _PASSES.items()
    }


def _weights(s: DeviceSizes) -> float:
    """Weights of all layers that are multiplied with a token, each by the time that it takes."""
    return s.all_products + (s.layers - s.dense) * _slower(s)


def _slower(s: DeviceSizes) -> float:
    """What a layer's experts add to the weights of its products."""
    return (_GROUPED - 1) * 3 * s.width * s.copies * s.expert_hidden


def _recomputed_weights(s: DeviceSizes, remat: Remat, mixer: Mixer) -> float:
    """Weights of a layer whose matmuls the backward pass recomputes.

    The product with Wdown is not needed again.
    """
    if remat == "none":
        return 0
    if remat == "selective":
        return s.inputs[mixer]
    return s.products(mixer) - s.width * s.hidden + 2 / 3 * _slower(s)


def _exposed_weights(
    s: DeviceSizes, strategy: TrainingStrategy, cluster: Cluster, ahead: float, back: float
) -> float:
    """Exposed seconds of the weights' communication, forward and backward."""
    group = strategy.rows * strategy.token_devices
    if group == 1:
        return 0.0
    hosts = -(-group * strategy.tensor // cluster.gpus)
    share = (group - 1) / group
    rate = 1e9 * cluster.exchange_link
    if hosts > 1:
        rate = min(rate, 1e9 * cluster.host_link * group / hosts)
    outside = s.embedding.whole + (s.head.whole if s.head != s.embedding else 0)
    if strategy.weights == "replicated":
        # An all-reduce is a reduce-scatter and an all-gather, both in float32.
        exposed = max(0.0, 8 * s.all_layers.whole * share / rate - _OVERLAP * back)
        return exposed + 8 * outside * share / rate
    gathers, scatters = (s.all_layers.whole * size * share / rate for size in (s.itemsize, 4))
    exposed = max(0.0, gathers - _OVERLAP * ahead)
    exposed += max(0.0, gathers + scatters - _OVERLAP * back)
    gather = s.layer.whole * s.itemsize * share / rate
    # The first gathers of each pass, and those of embedding and head, are exposed.
    return exposed + 2 * gather + (s.itemsize + 4) * outside * share / rate


def _tensor_sums(s: DeviceSizes, strategy: TrainingStrategy, cluster: Cluster) -> float:
    """Seconds of the all-reduces of activations over the tensor axis."""
    if strategy.tensor == 1:
        return 0.0
    # Two per direction and layer, attention's again where it is recomputed, one of the embeddings
    # and one of the head's gradient.
    remats = strategy.remats(s.mixers)
    again = sum(count for (remat, _), count in remats.items() if remat not in ("none", "selective"))
    sums = 4 * s.layers + again + 2
    size = 2 * (strategy.tensor - 1) / strategy.tensor * s.tokens * s.width * s.itemsize
    return sums * size / (1e9 * cluster.exchange_link)


def _exchanges(s: DeviceSizes, strategy: TrainingStrategy, cluster: Cluster) -> float:
    """Seconds of the all-to-alls of tokens, which nothing is assumed to overlap with."""
    n = strategy.expert_devices
    if n == 1:
        return 0.0
    # Tokens and results, their gradients, and tokens again where a layer is recomputed.
    remats = strategy.remats(s.mixers)
    count = 4 * s.layers + sum(layers for (remat, _), layers in remats.items() if remat != "none")
    size = s.sent * s.tokens * s.width * s.itemsize
    seconds = (n - 1) / n * size / (1e9 * cluster.exchange_link)
    hosts = -(-n * strategy.tensor // cluster.gpus)
    if hosts > 1:
        seconds = max(seconds, (1 - 1 / hosts) * size / (1e9 * cluster.host_link))
    return count * seconds


def _exposed_host_copies(
    s: DeviceSizes,
    strategy: TrainingStrategy,
    cluster: Cluster,
    ahead: float,
    rate: float,
    moment_size: int,
) -> float:
    """Exposed seconds of the copies to host memory and back."""
    speed, seconds = 1e9 * cluster.gpu.host_copy, 0.0
    if strategy.remat == "offload":
        saved = [saved_bytes(s, "offload", mixer, cluster.gpu.kernels) for mixer in s.mixers]
        copy = sum(saved) / speed
        # Forward, a layer's copies overlap with the next layer. Backward, XLA fetches them during
        # the last matmul of the layer before.
        overlap = 2 * s.tokens * s.width * sum(map(s.out, s.mixers)) / rate
        seconds += max(0.0, copy - ahead) + max(0.0, copy - overlap)
    if strategy.moments == "host":
        seconds += 2 * 2 * moment_size * s.parts / speed
    return seconds
