"""Cost model of one attention on a cluster: bytes, seconds and memory per device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from burst_jax.attention.arguments import AttentionOptions, RingArguments
from burst_jax.attention.call import make_request
from burst_jax.plan.hardware import Cluster
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import (
    Rotation,
    ShardShape,
    backward_bytes,
    forward_bytes,
    hop_bytes,
)
from burst_jax.ring.route import scores_per_step
from burst_jax.ring.schedule import Send, backward_schedule, count_hops, forward_schedule

_GIB = 2**30
# Fraction of the local block's work that is deferred to the last step, to overlap the gradient's
# final transfer: half of the keys, which under a causal mask have a quarter of the scores.
_DEFERRED, _DEFERRED_CAUSAL = 1 / 2, 1 / 4
# FLOPs per score and feature of H, and per score and feature of Hv. The forward pass has one matmul
# over each; the backward pass has three over H and two over Hv.
_FORWARD, _BACKWARD = (2, 2), (6, 4)
# Temporary memory, ``(factor of Q, factor of K and V)`` by kernels and rotation, in units of the
# bytes of a ring shard of Q, or of K and V together, with the heads of one device. XLA lets buffers
# share memory, so array sizes alone do not determine it: these factors were read from programs
# compiled for eight to twelve GPUs, with one to sixteen query heads per key head. Tests compare
# them with other programs. The kernels are those of :class:`burst_jax.plan.Gpu`.
_ONE_DEVICE = (2.0, 2.0)
_RING = {
    ("fused", "rotate_kv"): (2.0, 9.0),
    ("fused", "rotate_query"): (12.6, 1.0),
    ("reordered", "rotate_kv"): (2.4, 9.0),
    ("reordered", "rotate_query"): (14.1, 1.0),
}
_TWO_LEVEL_RING = {
    ("fused", "rotate_kv"): (2.0, 14.2),
    ("fused", "rotate_query"): (16.8, 1.7),
    ("reordered", "rotate_kv"): (1.6, 14.2),
    ("reordered", "rotate_query"): (15.2, 1.7),
}
_ULYSSES = {"fused": (3.0, 2.3), "reordered": (3.7, 2.3)}
_RING_AND_ULYSSES = {
    ("fused", "rotate_kv"): (3.0, 9.0),
    ("fused", "rotate_query"): (11.2, 1.9),
    ("reordered", "rotate_kv"): (3.0, 9.0),
    ("reordered", "rotate_query"): (11.3, 1.9),
}


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Shape and mask of one attention over the whole sequence.

    Attributes:
      length: number of queries, and of keys.
      batch: batch size.
      heads: number of query heads, N.
      kv_heads: number of key/value heads, K.
      head_dim: head dim of queries and keys, H.
      masks: burst_attention's static masks, by name.
      itemsize: bytes per element of q, k and v.
      value_head_dim: head dim of values, Hv; None is H.
      blocks: burst_attention's block_mask, or None.
    """

    length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    masks: tuple[tuple[str, Any], ...] = ()
    itemsize: int = 2
    value_head_dim: int | None = None
    blocks: Blocks | None = None

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal."""
        return dict(self.masks).get("is_causal", False)

    @property
    def value_dim(self) -> int:
        """Head dim of values."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How the sequence of one attention is sharded.

    Attributes:
      name: "one device", "ring", "two-level ring", "ulysses", "ring of 2, ulysses of 4".
      sizes: sizes of the ring's mesh axes, outermost first.
      ulysses: size of the Ulysses axis; 1 without one.
    """

    name: str
    sizes: tuple[int, ...]
    ulysses: int

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh axes that shard the sequence, outermost first, and their sizes."""
        ring = ("outer", "inner") if len(self.sizes) == 2 else ("seq",)[: len(self.sizes)]
        axes = dict(zip(ring, self.sizes, strict=True))
        return axes | ({"heads": self.ulysses} if self.ulysses > 1 else {})

    @property
    def arguments(self) -> AttentionOptions:
        """burst_attention's arguments for that mesh, without layout and backward."""
        ring = tuple(axis for axis in self.mesh if axis != "heads")
        seq_axis = ring if len(ring) == 2 else ring[0] if ring else None
        arguments: AttentionOptions = {"seq_axis": seq_axis}
        if self.ulysses > 1:
            arguments["ulysses_axis"] = "heads"
        return arguments

    def request(self, shape: AttentionShape, layout: str) -> Request:
        """burst_attention's request on that mesh, without a rotation.

        Raises:
          ValueError: an invalid mask.
        """
        arguments, mesh = self.arguments, self.mesh
        request = make_request(
            RingArguments(
                ulysses_axis=arguments.get("ulysses_axis"),
                layout=layout,
                **dict(shape.masks),
            ),
            axis_argument="seq_axis",
            axes=arguments.get("seq_axis"),
            size_of=lambda _, axis: mesh[axis],
            head_dim=shape.head_dim,
        )
        return dataclasses.replace(request, blocks=shape.blocks)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated cost of one strategy, layout and rotation, per device and attention.

    Attributes:
      strategy: how the sequence is sharded.
      layout: the layout.
      backward: the rotation.
      memory: GiB of q, k, v, out, their gradients and temporaries.
      forward_bytes: sent in the forward pass, by permutes and all-to-alls.
      backward_bytes: sent in the backward pass, by permutes and all-to-alls.
      host_bytes: sent to another host in both passes, by the device that sends most.
      forward_seconds: time of the forward pass.
      backward_seconds: time of the backward pass.
      overlapped: fraction of the communication time that is overlapped with compute.
      tflops: TFLOP/s of forward and backward together, unmasked scores only.
    """

    strategy: Strategy
    layout: str
    backward: Rotation
    memory: float
    forward_bytes: int
    backward_bytes: int
    host_bytes: int
    forward_seconds: float
    backward_seconds: float
    overlapped: float
    tflops: float

    @property
    def seconds(self) -> float:
        """Time of forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def arguments(self) -> AttentionOptions:
        """burst_attention's arguments, without the mesh and the masks."""
        return {**self.strategy.arguments, "layout": self.layout, "backward": self.backward}

    def record(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        figures = {name: value for name, value in vars(self).items() if name not in self.arguments}
        return figures | {
            "strategy": self.strategy.name,
            "mesh": self.strategy.mesh,
            "arguments": self.arguments,
            "num_shards": math.prod(self.strategy.sizes),
            "seconds": self.seconds,
        }


class CostModel:
    """Costs of one attention on a cluster, per device, for one strategy and layout.

    It follows the schedules that the ring runs (:mod:`burst_jax.ring.schedule`). A step waits for
    the kernel of the busiest device and for the slowest transfer, so it takes as long as the longer
    of the two. All-to-alls are not overlapped with compute.
    """

    def __init__(
        self, shape: AttentionShape, cluster: Cluster, strategy: Strategy, request: Request
    ) -> None:
        self._attention, self._cluster = shape, cluster
        self._strategy, self._layout = strategy, request.layout.name
        tokens = shape.length // request.ring_size
        # A ring shard, with the heads that one device has after the all-to-all.
        self._shape = ShardShape(
            q_length=tokens,
            kv_length=tokens,
            heads=shape.heads // strategy.ulysses,
            kv_heads=max(1, shape.kv_heads // strategy.ulysses),
            head_dim=shape.head_dim,
            itemsize=shape.itemsize,
            batch=shape.batch,
            value_dim=shape.value_dim,
        )
        # Elements of K and V together, of Q, and of out.
        rows = shape.batch * tokens
        self._kv = rows * self._shape.kv_heads * self._shape.key_and_value_dims
        self._q = rows * self._shape.heads * shape.head_dim
        self._out = rows * self._shape.heads * shape.value_dim
        self._routes, self._scores = {}, {}
        for rotates_query in (False, True):
            route = request.route(tokens, tokens, rotates_query=rotates_query)
            mask = request.ring_mask(tokens, tokens, rotates_query=rotates_query)
            self._routes[rotates_query] = route
            self._scores[rotates_query] = scores_per_step(route, mask)

    def estimate(self, backward: Rotation) -> Estimate:
        """The costs with one of the two rotations."""
        all_to_all = self._all_to_all_bytes(backward=False), self._all_to_all_bytes(backward=True)
        # Of each pass: seconds of a kernel, and of the sends that overlap it.
        parts = (
            [*self._forward(), (0.0, self._all_to_all_seconds(all_to_all[0]))],
            [*self._backward(backward), (0.0, self._all_to_all_seconds(all_to_all[1]))],
        )
        seconds = [sum(map(max, each)) for each in parts]
        sent = sum(send for each in parts for _, send in each)
        exposed = sum(max(0.0, send - work) for each in parts for work, send in each)
        scores = sum(mean for _, mean in self._scores[False].values())
        flops = (self._per_score(_FORWARD) + self._per_score(_BACKWARD)) * scores
        ring = self._ring_bytes(backward)
        return Estimate(
            strategy=self._strategy,
            layout=self._layout,
            backward=backward,
            memory=self._memory(backward) / _GIB,
            forward_bytes=ring[0] + all_to_all[0],
            backward_bytes=ring[1] + all_to_all[1],
            host_bytes=self._host_bytes(backward, sum(ring), sum(all_to_all)),
            forward_seconds=seconds[0],
            backward_seconds=seconds[1],
            overlapped=1 - exposed / sent if sent else 1.0,
            tflops=1e-12 * flops / sum(seconds),
        )

    def _per_score(self, per_feature: tuple[int, int]) -> int:
        """FLOPs of a pass for one score of every sequence and head."""
        dims = self._attention.head_dim, self._attention.value_dim
        of_head = sum(count * dim for count, dim in zip(per_feature, dims, strict=True))
        return self._attention.batch * self._shape.heads * of_head

    @property
    def _rates(self) -> tuple[float, float]:
        """FLOP/s of the forward and of the backward kernel."""
        gpu, dim = self._cluster.gpu, max(self._attention.head_dim, self._attention.value_dim)
        large = min(1.0, max(0, dim - 128) / 128)
        small = gpu.small_head if dim <= 64 else 1.0
        forward, backward = (small * (1 + large * (share - 1)) for share in gpu.large_head)
        return 1e12 * gpu.forward * forward, 1e12 * gpu.backward * backward

    @property
    def _links(self) -> tuple[float, float]:
        """GB/s of a send within an inner-ring pass, and of one between passes."""
        cluster = self._cluster
        if len(self._strategy.sizes) == 2:
            return cluster.link, cluster.host_link
        # On a ring over several hosts some device sends to another host, and all wait for it.
        crosses = cluster.hosts > 1
        return (cluster.host_link if crosses else cluster.link), cluster.host_link

    def _crossing(self, sent: int) -> int:
        """The bytes of an all-to-all that go to other hosts."""
        ulysses, gpus = self._strategy.ulysses, self._cluster.gpus
        return 0 if ulysses <= gpus else sent * (ulysses - gpus) // (ulysses - 1)

    def _all_to_all_seconds(self, sent: int) -> float:
        """Time of all-to-alls of this size; NVLink and the host interconnect work concurrently."""
        cluster, crossing = self._cluster, self._crossing(sent)
        inside = (sent - crossing) / cluster.exchange_link
        return 1e-9 * max(inside, crossing / cluster.host_link)

    def _forward(self) -> Iterator[tuple[float, float]]:
        """Seconds of each kernel of the forward pass, and of the sends that overlap it."""
        rate, _ = self._rates
        sizes = self._send_bytes("rotate_kv")
        for step in forward_schedule(self._routes[False]):
            scores = self._scores[False][step.offset][0]
            work = self._per_score(_FORWARD) * scores / rate + self._cluster.gpu.launch
            yield work, max(self._sending(step.sends, sizes))

    def _backward(self, rotation: Rotation) -> Iterator[tuple[float, float]]:
        """The same for the backward pass, and last the operations around its kernels."""
        gpu, rotates_query = self._cluster.gpu, rotation == "rotate_query"
        route, attention = self._routes[rotates_query], self._attention
        _, rate = self._rates
        sizes = self._send_bytes(rotation)
        deferred = _DEFERRED_CAUSAL if attention.is_causal else _DEFERRED
        for step in backward_schedule(route):
            scores = self._scores[rotates_query][step.offset][0]
            if step.part == "second":
                scores *= deferred
            elif step.part == "first":
                scores -= scores * deferred
            work = self._per_score(_BACKWARD) * scores / rate + gpu.launch
            yield work, max(self._sending(step.sends, sizes))
        yield 1e-9 * self._passes(rotates_query, len(route.offsets)) / gpu.bandwidth, 0.0

    def _passes(self, rotates_query: bool, steps: int) -> int:
        """Bytes that the operations around the backward's kernels read and write.

        delta reads dO and out; dQ starts as zeros; gradients are read in float32 and rounded. For
        the rotating side, the local sum and one or two received ones are added.
        """
        itemsize = self._attention.itemsize
        sums = min(steps, 3)
        q_sums, kv_sums = (sums, 1) if rotates_query else (1, sums)
        q = self._q * (8 * q_sums + itemsize) + self._out * 2 * itemsize
        return q + self._kv * (4 * kv_sums + itemsize)

    def _sending(self, sends: Iterable[Send], sizes: dict[str, int]) -> tuple[float, float]:
        """Seconds within inner-ring passes and between passes, which are concurrent."""
        sent = [0.0, 0.0]
        for send in sends:
            sent[send.is_outer] += 1 / send.chunks * sizes[send.what]
        links = self._links
        return 1e-9 * sent[0] / links[0], 1e-9 * sent[1] / links[1]

    def _send_bytes(self, rotation: Rotation) -> dict[str, int]:
        """Bytes of a block and of a gradient sum, by their names in a schedule."""
        block, gradient = hop_bytes(rotation, self._shape)
        return {"block": block, "sum": gradient}

    def _ring_bytes(self, rotation: Rotation, *, between_passes: bool = False) -> tuple[int, int]:
        """Bytes of the forward and backward permutes; optionally those of the outer ring only."""
        forward, backward = (
            count_hops(self._routes[rotates_query])
            for rotates_query in (False, rotation == "rotate_query")
        )
        if between_passes:
            forward, backward = forward.between_passes, backward.between_passes
        sent_forward = forward_bytes(forward, self._shape)
        return sent_forward, backward_bytes(rotation, backward, self._shape)

    def _host_bytes(self, rotation: Rotation, ring: int, all_to_all: int) -> int:
        """Bytes to another host, by the device that sends most there."""
        if self._cluster.hosts == 1:
            return 0
        if len(self._strategy.sizes) == 2:
            ring = sum(self._ring_bytes(rotation, between_passes=True))
        return ring + self._crossing(all_to_all)

    def _all_to_all_bytes(self, *, backward: bool) -> int:
        """Bytes that one device sends by all-to-all."""
        attention, ulysses = self._attention, self._strategy.ulysses
        if ulysses == 1:
            return 0
        copied = attention.kv_heads % ulysses != 0
        # q and out in the forward pass, their gradients in the backward pass.
        q_out, kv = ((x * attention.itemsize) for x in (self._q + self._out, self._kv))
        rows = 0
        if backward:
            kv = self._kv * 4 if copied else kv
            rows = attention.batch * self._shape.q_length * self._shape.heads * 4
        return (q_out + kv + rows) * (ulysses - 1) // ulysses

    def _memory(self, rotation: Rotation) -> float:
        """Bytes of q, k, v, their gradients and temporaries."""
        attention, ulysses = self._attention, self._strategy.ulysses
        rows = attention.batch * self._shape.q_length // ulysses
        features = attention.heads * attention.head_dim
        features += attention.kv_heads * self._shape.key_and_value_dims
        arrays = rows * features * attention.itemsize
        route = self._routes[rotation == "rotate_query"]
        return 2 * arrays + temp_bytes(
            self._cluster.gpu.kernels,
            rotation,
            passes=len(route.passes),
            steps=len(route.offsets),
            ulysses=ulysses > 1,
            # dO and out, half of what counts as Q there, have the head dim of values.
            q=(self._q + self._out) // 2 * attention.itemsize,
            kv=self._kv * attention.itemsize,
        )


def temp_bytes(
    kernels: str, rotation: str, *, passes: int, steps: int, ulysses: bool, q: int, kv: int
) -> float:
    """Bytes per device of everything but arguments and results.

    ``passes`` and ``steps`` are the route's numbers of inner-ring passes (1 on a ring of one level)
    and of ring steps, ``q`` and ``kv`` the bytes of a ring shard of Q, and of K and V together,
    with the heads of one device.
    """
    if steps == 1:
        factors = _ULYSSES[kernels] if ulysses else _ONE_DEVICE
    elif ulysses:
        factors = _RING_AND_ULYSSES[kernels, rotation]
    else:
        factors = (_RING if passes == 1 else _TWO_LEVEL_RING)[kernels, rotation]
    return factors[0] * q + factors[1] * kv
