"""What one attention costs a device on a given route: bytes, seconds, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from burst_jax.checks import make_spec
from burst_jax.plan.machines import Gpu
from burst_jax.plan.memory import temp_bytes
from burst_jax.plan.work import scores_by_stop
from burst_jax.rotation import backward_bytes, forward_bytes
from burst_jax.route import make_route

_GIB = 2**30
# The share of the work at home that is held back until the gradient's last hop: of a causal mask's
# triangle half of the keys have a quarter.
_HELD, _HELD_CAUSAL = 1 / 2, 1 / 4
# Products per score: two forward; five backward, of which two kernels make three and four.
_FORWARD, _BACKWARD = 4, 10
_STAYS, _TRAVELS = 3 / 7, 4 / 7


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention over the whole sequence.

    Attributes:
      length: tokens, of queries and keys.
      batch: rows.
      heads: N.
      kv_heads: K.
      head_dim: H.
      is_causal: as burst_attention's.
      local_window_size: as burst_attention's.
      itemsize: bytes per element of q, k and v.
    """

    length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    itemsize: int = 2


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


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A way to split the sequence.

    Attributes:
      name: "one device", "ring", "two-level ring", "head parallel", or as "ring of 2, heads by 4".
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
    def arguments(self) -> dict[str, Any]:
        """burst_attention's for that mesh, beside layout and backward."""
        ring = tuple(axis for axis in self.mesh if axis != "heads")
        arguments: dict[str, Any] = {"seq_axis": ring if len(ring) == 2 else (*ring, None)[0]}
        return arguments | ({"head_parallel_axis": "heads"} if self.exchange > 1 else {})


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One row of a plan, per device and for one attention.

    Attributes:
      scheme: how the sequence is split.
      layout: the order of the tokens.
      backward: the rotation.
      memory: GiB of q, k, v, out, their gradients, and what lies between.
      forward_bytes: sent, by permutes and all-to-alls.
      backward_bytes: likewise.
      host_bytes: of both, those sent to another host by the device that sends most of them.
      forward_seconds: of the forward pass.
      backward_seconds: of the backward pass.
      hidden: the share of the sending that lies behind kernels.
      tflops: TFLOP/s of forward and backward together, scores that count only.
    """

    scheme: Scheme
    layout: str
    backward: str
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
    def arguments(self) -> dict[str, Any]:
        """burst_attention's, beside the mesh and the masks."""
        return self.scheme.arguments | {"layout": self.layout, "backward": self.backward}

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


class _Step(NamedTuple):
    """One step of a route: its busiest device's scores, and what is sent beside them.

    ``data`` and ``gradient``: whether a block and a gradient are, inside the turn; ``outer_data``
    and ``outer_gradient``: which shares of one are, to the next turn.
    """

    scores: float
    data: bool
    gradient: bool
    outer_data: float
    outer_gradient: float


@dataclasses.dataclass
class _Seconds:
    """Of all steps, of what is sent, and of what of that lies behind no kernel."""

    total: float = 0.0
    sent: float = 0.0
    bare: float = 0.0

    def add(self, work: float, sending: tuple[float, ...]) -> None:
        """A kernel, and what is sent beside it over different links."""
        longest = max(sending)
        self.total += max(work, longest)
        self.sent += longest
        self.bare += max(0.0, longest - work)


class Model:
    """The costs of one attention by one scheme and layout on a cluster, per device.

    Every step lasts as long as its busiest device's kernel or its slowest transfer, whichever is
    longer: the ring waits for both. Exchanges of heads lie behind nothing.
    """

    def __init__(self, attention: Attention, cluster: Cluster, scheme: Scheme, layout: str):
        self._attention, self._cluster = attention, cluster
        self._scheme, self._layout = scheme, layout
        self._tokens = attention.length // math.prod(scheme.sizes)
        self._heads = attention.heads // scheme.exchange
        self._kv_heads = max(1, attention.kv_heads // scheme.exchange)
        # K and V of a ring's shard, with the heads that one device has of it; Q alike.
        per_head = attention.batch * self._tokens * attention.head_dim
        self._kv, self._q = 2 * per_head * self._kv_heads, per_head * self._heads
        spec = make_spec(None, attention.is_causal, 1.0, attention.local_window_size, None)
        axes = ("outer", "inner")[-len(scheme.sizes) :] if scheme.sizes else ()
        self._routes, self._scores = {}, {}
        for queries_travel in (False, True):
            shape = layout, self._tokens, self._tokens, spec, queries_travel
            route = make_route(axes, scheme.sizes, *shape)
            self._routes[queries_travel] = route
            self._scores[queries_travel] = scores_by_stop(route, *shape)

    def estimate(self, backward: str) -> Estimate:
        """With the rotation "rotate_kv" or "rotate_query"."""
        forward, back = self._forward(), self._backward(backward)
        swaps = self._exchanged(backward=False), self._exchanged(backward=True)
        swap_seconds = [self._swap_seconds(size) for size in swaps]
        sent = forward.sent + back.sent + sum(swap_seconds)
        bare = forward.bare + back.bare + sum(swap_seconds)
        seconds = forward.total + swap_seconds[0], back.total + swap_seconds[1]
        scores = sum(mean for _, mean in self._scores[False].values())
        flops = (_FORWARD + _BACKWARD) * self._per_score * scores
        ring = self._ring_bytes(None), self._ring_bytes(backward)
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

    @property
    def _per_score(self) -> int:
        """Multiplications and additions of one product, of one score of every row and head."""
        return self._attention.batch * self._heads * self._attention.head_dim

    @property
    def _rate_share(self) -> float:
        return self._cluster.gpu.small_head if self._attention.head_dim <= 64 else 1.0

    @property
    def _links(self) -> tuple[float, float]:
        """GB/s of a hop inside a turn, and of one between turns."""
        cluster = self._cluster
        if len(self._scheme.sizes) == 2:
            return cluster.link, cluster.host_link
        # One of its hops crosses to another host, and all wait for that one.
        crosses = cluster.hosts > 1
        return (cluster.host_link if crosses else cluster.link), cluster.host_link

    def _crossing(self, swaps: int) -> int:
        """Bytes of an all-to-all's that go to other hosts: of n - 1 peers, all but the host's."""
        exchange, gpus = self._scheme.exchange, self._cluster.gpus
        return 0 if exchange <= gpus else swaps * (exchange - gpus) // (exchange - 1)

    def _swap_seconds(self, swaps: int) -> float:
        """Of an all-to-all of so many bytes: both kinds of links work at the same time."""
        gpu, crossing = self._cluster.gpu, self._crossing(swaps)
        link = gpu.link if gpu.exchange_link is None else gpu.exchange_link
        return 1e-9 * max((swaps - crossing) / link, crossing / self._cluster.host_link)

    def _forward(self) -> _Seconds:
        rate = 1e12 * self._cluster.gpu.forward * self._rate_share
        block = self._kv * self._attention.itemsize
        spent = _Seconds()
        for step in self._steps(False):
            work = _FORWARD * self._per_score * step.scores / rate + self._cluster.gpu.launch
            spent.add(work, self._sending(step.data * block, step.outer_data * block))
        return spent

    def _backward(self, rotation: str) -> _Seconds:
        gpu, queries_travel = self._cluster.gpu, rotation == "rotate_query"
        route, attention = self._routes[queries_travel], self._attention
        rate = 1e12 * gpu.backward * self._rate_share
        block, gradient = self._kv * attention.itemsize, self._kv * 4
        if queries_travel:
            lse = 2 * attention.batch * self._tokens * self._heads * 4
            block, gradient = 2 * self._q * attention.itemsize + lse, self._q * 4
        launches = gpu.launch * (1 if gpu.fused else 2)
        spent = _Seconds()
        first, *others = self._steps(queries_travel)
        steps = [first]
        if len(route.stops) > 1:
            # A part of the first step's work lies beside the gradient's hop home.
            held = first.scores * (_HELD_CAUSAL if attention.is_causal else _HELD)
            one_turn = len(route.turns) == 1
            home = _Step(held, False, one_turn, 0.0, 0.0 if one_turn else 1.0)
            steps = [first._replace(scores=first.scores - held), *others, home]
        for step in steps:
            work = _BACKWARD * self._per_score * step.scores / rate + launches
            data, sums = step.data * block, step.gradient * gradient
            outer = step.outer_data * block + step.outer_gradient * gradient
            phases = [(work, data + sums)]
            if not gpu.fused and step.data and step.gradient:
                phases = [(_STAYS * work, sums), (_TRAVELS * work, data)]
            for part, inner in phases:
                spent.add(part, self._sending(inner, outer / len(phases)))
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
        q = 2 * itemsize + 8 * q_sums + itemsize
        return self._q * q + self._kv * (4 * kv_sums + itemsize)

    def _steps(self, queries_travel: bool) -> Iterator[_Step]:
        """All of a route, in order."""
        turns = self._routes[queries_travel].turns
        for index, turn in enumerate(turns):
            pieces = max(1, len(turn) - 1)  # of the gradient that comes from the turn before
            # What the first stop of all makes stays there: it is at home.
            comes = index > 1 or (index == 1 and len(turns[0]) > 1)
            first = 1 if index else 2
            for place, stop in enumerate(turn):
                yield _Step(
                    scores=self._scores[queries_travel][stop][0],
                    data=place < len(turn) - 1,
                    gradient=place >= first,
                    outer_data=1 / len(turn) if index < len(turns) - 1 else 0.0,
                    outer_gradient=1 / pieces if comes and place < pieces else 0.0,
                )

    def _sending(self, inner: float, outer: float) -> tuple[float, float]:
        """Seconds of bytes over both kinds of links, which work at the same time."""
        links = self._links
        return 1e-9 * inner / links[0], 1e-9 * outer / links[1]

    def _ring_bytes(self, rotation: str | None, *, outer: bool = False) -> int:
        """Bytes of all permutes, forward for None; ``outer``: those between turns alone."""
        hops = self._routes[rotation == "rotate_query"].hops
        if outer:
            hops = hops._replace(data=hops.outer_data, gradient=hops.outer_gradient)
        attention, tokens = self._attention, self._tokens
        end = attention.head_dim, attention.itemsize
        if rotation is None:
            return forward_bytes(hops, tokens, self._kv_heads, *end, attention.batch)
        shape = rotation, hops, tokens, tokens, self._heads, self._kv_heads, *end
        return backward_bytes(*shape, batch=attention.batch)

    def _host_bytes(self, rotation: str, ring: int, swaps: int) -> int:
        """Bytes to another host, of the device that sends most there."""
        if self._cluster.hosts == 1:
            return 0
        if len(self._scheme.sizes) == 2:
            ring = self._ring_bytes(None, outer=True) + self._ring_bytes(rotation, outer=True)
        return ring + self._crossing(swaps)

    def _exchanged(self, *, backward: bool) -> int:
        """Bytes that one device sends by all-to-all."""
        attention, exchange = self._attention, self._scheme.exchange
        if exchange == 1:
            return 0
        copied = attention.kv_heads % exchange != 0
        q, kv = self._q * attention.itemsize, self._kv * attention.itemsize
        rows = 0
        if backward:
            kv = self._kv * 4 if copied else kv
            rows = attention.batch * self._tokens * self._heads * 4
        return (2 * q + kv + rows) * (exchange - 1) // exchange

    def _memory(self, rotation: str) -> float:
        """Bytes of q, k, v, their gradients, and all that lies between."""
        attention, exchange = self._attention, self._scheme.exchange
        local = attention.batch * self._tokens // exchange * attention.head_dim
        arrays = local * (attention.heads + 2 * attention.kv_heads) * attention.itemsize
        route = self._routes[rotation == "rotate_query"]
        return 2 * arrays + temp_bytes(
            "fused" if self._cluster.gpu.fused else "apart",
            rotation,
            turns=len(route.turns),
            stops=len(route.stops),
            exchange=exchange > 1,
            q=self._q * attention.itemsize,
            kv=self._kv * attention.itemsize,
        )
