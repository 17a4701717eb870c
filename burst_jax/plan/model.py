"""What one attention costs a device on a given route: bytes, seconds, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from burst_jax.attention.arguments import AttentionOptions, RingArguments
from burst_jax.attention.call import make_request
from burst_jax.layouts.permutation import Layout
from burst_jax.plan.machines import Gpu, find_gpu
from burst_jax.plan.memory import temp_bytes
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.request import Request
from burst_jax.ring.rotation import (
    Rotation,
    ShardShape,
    backward_bytes,
    forward_bytes,
    hop_bytes,
)
from burst_jax.ring.schedule import Send, Step, backward_schedule, count_hops, forward_schedule
from burst_jax.ring.work import scores_by_stop

_GIB = 2**30
# The share of the work at home that is left for its second part, beside the gradient sum's last
# hop: half of the keys, which under a causal mask have a quarter of the scores.
_HELD, _HELD_CAUSAL = 1 / 2, 1 / 4
# Multiplications and additions per score and lane of H, and per score and lane of Hv. Forward there
# is a product of each kind, backward there are three over H and two over Hv.
_FORWARD, _BACKWARD = (2, 2), (6, 4)
# Two backward kernels make three and four products, of the seven that they make together.
_SHARES = {"stays": 3 / 7, "travels": 4 / 7, "both": 1.0}


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention over the whole sequence.

    Attributes:
      length: tokens, of queries and keys.
      batch: rows.
      heads: N.
      kv_heads: K.
      head_dim: H, of queries and keys.
      is_causal: as burst_attention's.
      local_window_size: as burst_attention's.
      itemsize: bytes per element of q, k and v.
      value_head_dim: Hv, of values; None is H.
      blocks: of burst_attention's block_mask; None without one.
    """

    length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    itemsize: int = 2
    value_head_dim: int | None = None
    blocks: Blocks | None = None

    @property
    def value_dim(self) -> int:
        """Hv."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices and links.

    Attributes:
      gpu: of which kind.
      hosts: how many.
      gpus: on each.
      host_link: GB/s that one GPU sends to another host.
    """

    gpu: Gpu
    hosts: int
    gpus: int
    host_link: float

    @property
    def size(self) -> int:
        """Devices."""
        return self.hosts * self.gpus

    @property
    def link(self) -> float:
        """GB/s of a permute inside a host: several hosts are several processes."""
        gpu = self.gpu
        return gpu.link if self.hosts > 1 or gpu.peer_link is None else gpu.peer_link

    @property
    def exchange_link(self) -> float:
        """GB/s inside a host of an all-to-all, a gather or a sum."""
        gpu = self.gpu
        return gpu.link if gpu.exchange_link is None else gpu.exchange_link


def cluster_of(gpu: str | Gpu, hosts: int, gpus_per_host: int, host_link: float) -> Cluster:
    """The cluster that these arguments of a plan say.

    Raises:
      ValueError: an unknown GPU, a number that is not positive.
    """
    check_sizes(hosts=hosts, gpus_per_host=gpus_per_host)
    if not isinstance(host_link, int | float) or not 0 < host_link < math.inf:
        raise ValueError(f"host_link is {host_link!r}: it must be a positive number of GB/s")
    found = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return Cluster(found, hosts, gpus_per_host, float(host_link))


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size that is not a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}: it must be a positive integer")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A way to split the sequence.

    Attributes:
      name: "one device", "ring", "two-level ring", "ulysses", "ring of 2, heads by 4".
      sizes: of the ring's axes, outermost first.
      exchange: devices that exchange heads inside each of the ring's shards.
    """

    name: str
    sizes: tuple[int, ...]
    exchange: int

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh axes that the sequence is split over, outermost first, and their sizes."""
        ring = ("outer", "inner") if len(self.sizes) == 2 else ("seq",)[: len(self.sizes)]
        axes = dict(zip(ring, self.sizes, strict=True))
        return axes | ({"heads": self.exchange} if self.exchange > 1 else {})

    @property
    def arguments(self) -> AttentionOptions:
        """The arguments of burst_attention for that mesh, without layout and backward."""
        ring = tuple(axis for axis in self.mesh if axis != "heads")
        seq_axis = ring if len(ring) == 2 else ring[0] if ring else None
        arguments: AttentionOptions = {"seq_axis": seq_axis}
        if self.exchange > 1:
            arguments["ulysses_axis"] = "heads"
        return arguments

    def request(self, attention: Attention, layout: Layout) -> Request:
        """What burst_attention is asked for on that mesh; the rotation is left open.

        Raises:
          ValueError: a mask of the attention is wrong.
        """
        arguments, mesh = self.arguments, self.mesh
        request = make_request(
            RingArguments(
                ulysses_axis=arguments.get("ulysses_axis"),
                layout=layout,
                is_causal=attention.is_causal,
                local_window_size=attention.local_window_size,
            ),
            axis_argument="seq_axis",
            axes=arguments.get("seq_axis"),
            size_of=lambda _, axis: mesh[axis],
            head_dim=attention.head_dim,
        )
        return dataclasses.replace(request, blocks=attention.blocks)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One row of a plan, per device and for one attention.

    Attributes:
      scheme: how the sequence is split.
      layout: the order of the tokens.
      backward: the rotation.
      memory: GiB of q, k, v, out, their gradients, and what lies between.
      forward_bytes: sent in the forward pass, by permutes and all-to-alls.
      backward_bytes: sent in the backward pass, by permutes and all-to-alls.
      host_bytes: sent to another host in both passes, by the device that sends most there.
      forward_seconds: of the forward pass.
      backward_seconds: of the backward pass.
      hidden: the share of the sending that lies behind kernels.
      tflops: TFLOP/s of forward and backward together, scores that count only.
    """

    scheme: Scheme
    layout: Layout
    backward: Rotation
    memory: float
    forward_bytes: int
    backward_bytes: int
    host_bytes: int
    forward_seconds: float
    backward_seconds: float
    hidden: float
    tflops: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def arguments(self) -> AttentionOptions:
        """The arguments of burst_attention, without the mesh and the masks."""
        return {**self.scheme.arguments, "layout": self.layout, "backward": self.backward}

    def record(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        figures = {name: value for name, value in vars(self).items() if name not in self.arguments}
        return figures | {
            "scheme": self.scheme.name,
            "mesh": self.scheme.mesh,
            "arguments": self.arguments,
            "num_shards": math.prod(self.scheme.sizes),
            "seconds": self.seconds,
        }


@dataclasses.dataclass
class _Seconds:
    """The time of a pass, summed over its steps.

    Attributes:
      total: seconds of all steps.
      sent: seconds for which links work.
      bare: of ``sent``, the seconds with no kernel beside them.
    """

    total: float = 0.0
    sent: float = 0.0
    bare: float = 0.0

    def add(self, work: float, sending: tuple[float, ...]) -> None:
        """Adds a kernel's seconds, and those of the sends beside it over each kind of links."""
        longest = max(sending)
        self.total += max(work, longest)
        self.sent += longest
        self.bare += max(0.0, longest - work)


def _phases(step: Step) -> list[tuple[float, list[Send]]]:
    """The parts of a backward step that follow each other: shares of its work, and their own sends.

    Two kernels are two phases if either has a send of its own, which must land before the other
    kernel, or the next step, begins. A kernel without a send is one phase with the other kernel.
    """
    if all(launch.sends for launch in step.launches):
        return [(_SHARES[launch.kernel], list(launch.sends)) for launch in step.launches]
    return [(1.0, [send for launch in step.launches for send in launch.sends])]


class Model:
    """The costs of one attention on a cluster, per device, split as a request of a scheme says.

    It goes through the schedules that the ring runs (:mod:`burst_jax.ring.schedule`). A step waits
    for the kernel of its busiest device and for its slowest transfer, so it lasts as long as the
    longer of the two. Exchanges of heads have no kernel beside them.
    """

    def __init__(self, attention: Attention, cluster: Cluster, scheme: Scheme, request: Request):
        self._attention, self._cluster = attention, cluster
        self._scheme, self._layout = scheme, request.layout
        tokens = attention.length // request.ring_size
        # A ring's shard, with the heads that one device has after the exchange.
        self._shape = ShardShape(
            q_length=tokens,
            kv_length=tokens,
            heads=attention.heads // scheme.exchange,
            kv_heads=max(1, attention.kv_heads // scheme.exchange),
            head_dim=attention.head_dim,
            itemsize=attention.itemsize,
            batch=attention.batch,
            value_dim=attention.value_dim,
        )
        # Its elements of K and V together, of Q, and of out.
        rows = attention.batch * tokens
        self._kv = rows * self._shape.kv_heads * self._shape.key_and_value_dims
        self._q = rows * self._shape.heads * attention.head_dim
        self._out = rows * self._shape.heads * attention.value_dim
        self._routes, self._scores = {}, {}
        for queries_travel in (False, True):
            route = request.route(tokens, tokens, queries_travel=queries_travel)
            mask = request.ring_mask(tokens, tokens, queries_travel=queries_travel)
            self._routes[queries_travel] = route
            self._scores[queries_travel] = scores_by_stop(route, mask)

    def estimate(self, backward: Rotation) -> Estimate:
        """The costs with one of the two rotations."""
        forward, back = self._forward(), self._backward(backward)
        swaps = self._exchanged(backward=False), self._exchanged(backward=True)
        swap_seconds = [self._swap_seconds(size) for size in swaps]
        sent = forward.sent + back.sent + sum(swap_seconds)
        bare = forward.bare + back.bare + sum(swap_seconds)
        seconds = forward.total + swap_seconds[0], back.total + swap_seconds[1]
        scores = sum(mean for _, mean in self._scores[False].values())
        flops = (self._per_score(_FORWARD) + self._per_score(_BACKWARD)) * scores
        ring = self._ring_bytes(backward)
        return Estimate(
            scheme=self._scheme,
            layout=self._layout,
            backward=backward,
            memory=self._memory(backward) / _GIB,
            forward_bytes=ring[0] + swaps[0],
            backward_bytes=ring[1] + swaps[1],
            host_bytes=self._host_bytes(backward, sum(ring), sum(swaps)),
            forward_seconds=seconds[0],
            backward_seconds=seconds[1],
            hidden=1 - bare / sent if sent else 1.0,
            tflops=1e-12 * flops / sum(seconds),
        )

    def _per_score(self, per_lane: tuple[int, int]) -> int:
        """Multiplications and additions of a pass, of one score of every row and head."""
        lanes = self._attention.head_dim, self._attention.value_dim
        of_head = sum(count * dim for count, dim in zip(per_lane, lanes, strict=True))
        return self._attention.batch * self._shape.heads * of_head

    @property
    def _rate_share(self) -> float:
        small = max(self._attention.head_dim, self._attention.value_dim) <= 64
        return self._cluster.gpu.small_head if small else 1.0

    @property
    def _links(self) -> tuple[float, float]:
        """GB/s of a send inside a turn, and of one between turns."""
        cluster = self._cluster
        if len(self._scheme.sizes) == 2:
            return cluster.link, cluster.host_link
        # On a ring over several hosts some device sends to another host, and all wait for that one.
        crosses = cluster.hosts > 1
        return (cluster.host_link if crosses else cluster.link), cluster.host_link

    def _crossing(self, swaps: int) -> int:
        """Of the bytes of an all-to-all, those to peers on other hosts."""
        exchange, gpus = self._scheme.exchange, self._cluster.gpus
        return 0 if exchange <= gpus else swaps * (exchange - gpus) // (exchange - 1)

    def _swap_seconds(self, swaps: int) -> float:
        """Seconds of an all-to-all of so many bytes: both kinds of links work at the same time."""
        cluster, crossing = self._cluster, self._crossing(swaps)
        inside = (swaps - crossing) / cluster.exchange_link
        return 1e-9 * max(inside, crossing / cluster.host_link)

    def _forward(self) -> _Seconds:
        rate = 1e12 * self._cluster.gpu.forward * self._rate_share
        sizes = self._send_bytes("rotate_kv")
        spent = _Seconds()
        for step in forward_schedule(self._routes[False]):
            scores = self._scores[False][step.stop][0]
            work = self._per_score(_FORWARD) * scores / rate + self._cluster.gpu.launch
            spent.add(work, self._sending(step.all_sends, sizes))
        return spent

    def _backward(self, rotation: Rotation) -> _Seconds:
        gpu, queries_travel = self._cluster.gpu, rotation == "rotate_query"
        route, attention = self._routes[queries_travel], self._attention
        rate = 1e12 * gpu.backward * self._rate_share
        sizes = self._send_bytes(rotation)
        held = _HELD_CAUSAL if attention.is_causal else _HELD
        spent = _Seconds()
        for step in backward_schedule(route, fused=gpu.fused):
            scores = self._scores[queries_travel][step.stop][0]
            if step.part == "second":
                scores *= held
            elif step.part == "first":
                scores -= scores * held
            launches = gpu.launch * len(step.launches)
            work = self._per_score(_BACKWARD) * scores / rate + launches
            throughout = self._sending(step.sends, sizes)
            phases = _phases(step)
            for share, sends in phases:
                links = zip(self._sending(sends, sizes), throughout, strict=True)
                spent.add(share * work, tuple(own + rest / len(phases) for own, rest in links))
        spent.total += 1e-9 * self._passes(queries_travel, len(route.stops)) / gpu.bandwidth
        return spent

    def _passes(self, queries_travel: bool, stops: int) -> int:
        """Bytes of the passes over memory around the backward's kernels.

        delta reads dO and out; dQ begins as zeros; gradients are read in float32 and rounded. Of
        the side that travels there is a sum at home, and one or two come from the other devices.
        """
        itemsize = self._attention.itemsize
        sums = min(stops, 3 if self._cluster.gpu.fused else 2)
        q_sums, kv_sums = (sums, 1) if queries_travel else (1, sums)
        q = self._q * (8 * q_sums + itemsize) + self._out * 2 * itemsize
        return q + self._kv * (4 * kv_sums + itemsize)

    def _sending(self, sends: Iterable[Send], sizes: dict[str, int]) -> tuple[float, float]:
        """Seconds over the links inside turns and over those between turns, which work at once.

        Args:
          sends: what is sent.
          sizes: bytes of a whole "block" and of a whole "sum".
        """
        sent = [0.0, 0.0]
        for send in sends:
            sent[send.crosses] += 1 / send.pieces * sizes[send.what]
        links = self._links
        return 1e-9 * sent[0] / links[0], 1e-9 * sent[1] / links[1]

    def _send_bytes(self, rotation: Rotation) -> dict[str, int]:
        """Bytes of a block and of a gradient sum, by the names that a schedule has for them."""
        block, gradient = hop_bytes(rotation, self._shape)
        return {"block": block, "sum": gradient}

    def _ring_bytes(self, rotation: Rotation, *, between_turns: bool = False) -> tuple[int, int]:
        """Bytes of the forward's and of the backward's permutes; if asked, of the outer links."""
        forward, backward = (
            count_hops(self._routes[queries_travel])
            for queries_travel in (False, rotation == "rotate_query")
        )
        if between_turns:
            forward, backward = forward.between_turns, backward.between_turns
        sent_forward = forward_bytes(forward, self._shape)
        return sent_forward, backward_bytes(rotation, backward, self._shape)

    def _host_bytes(self, rotation: Rotation, ring: int, swaps: int) -> int:
        """Bytes to another host, of the device that sends most there."""
        if self._cluster.hosts == 1:
            return 0
        if len(self._scheme.sizes) == 2:
            ring = sum(self._ring_bytes(rotation, between_turns=True))
        return ring + self._crossing(swaps)

    def _exchanged(self, *, backward: bool) -> int:
        """Bytes that one device sends by all-to-all."""
        attention, exchange = self._attention, self._scheme.exchange
        if exchange == 1:
            return 0
        copied = attention.kv_heads % exchange != 0
        # q and out go forward; the gradients of both go backward.
        q_out, kv = ((x * attention.itemsize) for x in (self._q + self._out, self._kv))
        rows = 0
        if backward:
            kv = self._kv * 4 if copied else kv
            rows = attention.batch * self._shape.q_length * self._shape.heads * 4
        return (q_out + kv + rows) * (exchange - 1) // exchange

    def _memory(self, rotation: Rotation) -> float:
        """Bytes of q, k, v, their gradients, and all that lies between."""
        attention, exchange = self._attention, self._scheme.exchange
        rows = attention.batch * self._shape.q_length // exchange
        lanes = attention.heads * attention.head_dim
        lanes += attention.kv_heads * self._shape.key_and_value_dims
        arrays = rows * lanes * attention.itemsize
        route = self._routes[rotation == "rotate_query"]
        return 2 * arrays + temp_bytes(
            "fused" if self._cluster.gpu.fused else "apart",
            rotation,
            turns=len(route.turns),
            stops=len(route.stops),
            exchange=exchange > 1,
            # Half of what counts as Q there has the head dim of values: dO, and out.
            q=(self._q + self._out) // 2 * attention.itemsize,
            kv=self._kv * attention.itemsize,
        )
