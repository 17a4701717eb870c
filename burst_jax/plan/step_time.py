"""Seconds of a training step: attention, matrix products, passes over memory, and transfers.

A step is the sum of its parts. A transfer counts as far as nothing hides it: a ring's hops lie
beside its kernels, a layer's weights are gathered beside the layer before, sums over the tensor
axis lie beside nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from burst_jax.plan.model import Attention, Cluster, Estimate, Model
from burst_jax.plan.sizes import Sizes
from burst_jax.plan.step_memory import kept_bytes
from burst_jax.plan.way import Way

if TYPE_CHECKING:
    from burst_jax.models.config import DecoderConfig, LayerKind
    from burst_jax.models.remat import Remat

# Bytes that the operations between a layer's matrix products and kernels read and write, for each
# token and feature of the residual stream: norms, RoPE, the gate, sums, casts. Forward, backward,
# and of what the backward pass does again.
_PASSES = {"forward": 45, "backward": 90}
# Bytes for each logit: float32 logits are written and read twice, slopes written and read once.
_LOGIT_BYTES = 16
# Bytes for each weight that a device keeps: AdamW reads gradient, weight and moments, writes weight
# and moments; before that the gradient is divided and its norm taken.
_UPDATE_BYTES = 24
# The share of a layer's work, forward or backward, beside which its weights' transfers lie.
_BESIDE = 0.5


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step on the busiest device; ``total`` is their sum.

    Attributes:
      attention: forward and backward pass of all layers.
      products: matrix products of all layers.
      recomputed: what the backward pass does again, attention included.
      loss: the head's three products, and the passes over logits.
      memory: other passes over memory, the optimizer's included.
      links: transfers between GPUs that nothing hides, beside the ring's.
      host: transfers to and from the host's memory that nothing hides.
    """

    attention: float
    products: float
    recomputed: float
    loss: float
    memory: float
    links: float
    host: float

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


def attention_of(
    config: DecoderConfig, kind: LayerKind, cluster: Cluster, way: Way, *, length: int, rows: int
) -> Estimate:
    """One layer's attention, with the rotation that ``"auto"`` takes.

    Raises:
      ValueError: the layout cannot split the length.
    """
    attention = Attention(
        length,
        rows,
        config.num_heads // way.tensor,
        max(1, config.num_kv_heads // way.tensor),
        config.head_dim,
        is_causal=True,
        local_window_size=None if kind.window is None else (kind.window - 1, 0),
    )
    model = Model(
        attention, way.ring_cluster(cluster), way.scheme, way.scheme.request(attention, way.layout)
    )
    found = [model.estimate(rotation) for rotation in ("rotate_kv", "rotate_query")]
    return min(found, key=lambda each: each.backward_bytes)


def step_seconds(
    sizes: Sizes,
    way: Way,
    cluster: Cluster,
    attentions: list[Estimate],
    *,
    first_half: float,
    chunk_size: int,
    moment_size: int,
) -> StepSeconds:
    """The time of one step.

    Args:
      sizes: what one device has.
      way: how the step is split.
      cluster: the devices.
      attentions: of each layer.
      first_half: seconds of all layers' attention for the first half of each row, forward.
      chunk_size: number of tokens that the loss takes at a time.
      moment_size: bytes of one of the optimizer's moments of a weight.
    """
    s, gpu, remats = sizes, cluster.gpu, way.remats(sizes.layers)
    rate = 1e12 * (gpu.forward if gpu.matmul is None else gpu.matmul)
    bandwidth = 1e9 * gpu.bandwidth
    forward = sum(each.forward_seconds for each in attentions)
    backward = sum(each.backward_seconds for each in attentions)
    again = {"full": forward, "half": first_half}.get(way.remat, 0.0)

    products = s.layers * 2 * s.tokens * s.products / rate
    made_again = sum(count * _products_again(s, remat) for remat, count in remats.items())
    done_again = 2 * s.tokens * made_again / rate
    head = 3 * 2 * s.tokens * s.width * s.vocab / rate
    chunks = -(-s.tokens // chunk_size)
    logits = (s.tokens * s.vocab * _LOGIT_BYTES + chunks * 8 * s.head.whole) / bandwidth

    lanes = s.layers * s.tokens * s.width * s.itemsize / 2 / bandwidth
    passes = {name: lanes * count for name, count in _PASSES.items()}
    # Every chunk of the feed-forward adds to float32 gradients.
    sums = s.layers * 8 * s.mlp.whole * (way.mlp_chunks - 1) / bandwidth
    moments = 4 * moment_size if way.moments == "device" else 0
    update = (_UPDATE_BYTES + moments) * s.parts / bandwidth

    ahead = forward + products + passes["forward"]
    back = backward + 2 * products + done_again + again + passes["backward"]
    return StepSeconds(
        attention=forward + backward,
        products=3 * products,
        recomputed=done_again + again,
        loss=head + logits,
        memory=sum(passes.values()) + sums + update,
        links=_weight_links(s, way, cluster, ahead, back) + _tensor_links(s, way, cluster),
        host=_host(s, way, cluster, ahead, rate, moment_size),
    )


def _products_again(s: Sizes, remat: Remat) -> int:
    """Weights of a layer whose products the backward pass makes again.

    Nobody reads the product with Wdown again.
    """
    if remat == "none":
        return 0
    projections = s.width * (s.query + 2 * s.kv)
    return projections if remat == "selective" else s.products - s.width * s.hidden


def _weight_links(s: Sizes, way: Way, cluster: Cluster, ahead: float, back: float) -> float:
    """Seconds of the weights' transfers that lie beside nothing, forward and backward."""
    group = way.rows * way.seq
    if group == 1:
        return 0.0
    hosts = -(-group * way.tensor // cluster.gpus)
    share = (group - 1) / group
    rate = 1e9 * cluster.exchange_link
    if hosts > 1:
        rate = min(rate, 1e9 * cluster.host_link * group / hosts)
    outside = s.embedding.whole + (s.head.whole if s.head != s.embedding else 0)
    if way.weights == "whole":
        # A sum is a reduce-scatter and a gather, both in float32.
        bare = max(0.0, s.layers * 8 * s.layer.whole * share / rate - _BESIDE * back)
        return bare + 8 * outside * share / rate
    gather, scatter = (s.layer.whole * size * share / rate for size in (s.itemsize, 4))
    bare = max(0.0, s.layers * gather - _BESIDE * ahead)
    bare += max(0.0, s.layers * (gather + scatter) - _BESIDE * back)
    # The first layer's gathers of each pass, the embedding and the head have nothing beside them.
    return bare + 2 * gather + (s.itemsize + 4) * outside * share / rate


def _tensor_links(s: Sizes, way: Way, cluster: Cluster) -> float:
    """Seconds of the sums over the tensor axis: activations of attention and feed-forward."""
    if way.tensor == 1:
        return 0.0
    # Two each way, attention's once more where the backward pass makes it again, one of the
    # embeddings and one of the head's gradient.
    remats = way.remats(s.layers)
    again = sum(count for remat, count in remats.items() if remat not in ("none", "selective"))
    sums = 4 * s.layers + again + 2
    size = 2 * (way.tensor - 1) / way.tensor * s.tokens * s.width * s.itemsize
    return sums * size / (1e9 * cluster.exchange_link)


def _host(
    s: Sizes, way: Way, cluster: Cluster, ahead: float, rate: float, moment_size: int
) -> float:
    """Seconds of the copies to the host's memory and back that lie beside nothing."""
    speed, seconds = 1e9 * cluster.gpu.host_copy, 0.0
    if way.remat == "offload":
        copy = s.layers * kept_bytes(s, "offload") / speed
        # Forward a layer's arrays leave beside all of the next one. Backward XLA fetches them
        # beside the last product of the layer before.
        beside = s.layers * 2 * s.tokens * s.width * s.query / rate
        seconds += max(0.0, copy - ahead) + max(0.0, copy - beside)
    if way.moments == "host":
        seconds += 2 * 2 * moment_size * s.parts / speed
    return seconds
