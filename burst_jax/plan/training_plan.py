"""Compares the ways to train a decoder on a cluster: memory and seconds of a whole step."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from burst_jax.layouts.permutation import LAYOUTS, check_length
from burst_jax.plan.machines import Gpu
from burst_jax.plan.model import Cluster, Estimate, check_sizes, cluster_of
from burst_jax.plan.sizes import Sizes, sizes_of
from burst_jax.plan.step_memory import StepMemory, step_memory
from burst_jax.plan.step_time import StepSeconds, attention_of, step_seconds
from burst_jax.plan.training_table import table
from burst_jax.plan.way import Way, Weights

if TYPE_CHECKING:
    from burst_jax.models.config import DecoderConfig
    from burst_jax.training.adam import Moments

# The share of a GPU's memory that a step may take: the rest is for CUDA, NCCL, and what the model
# does not know.
USABLE = 0.94
# Ways of which the slower takes at most so many times as long are alike: what is kept or moved
# differs by less than the model knows.
AS_FAST = 1.01
_CHUNKS = (1, 2, 4, 8, 16, 32, 64)
# The default of make_train_step.
_CHUNK_SIZE = 4096
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """One way to train, and what a step costs each device.

    Attributes:
      way: how the step is split, and what its layers keep.
      memory: bytes.
      seconds: of a step.
      ring_host_bytes: what the rings of a step send to another host, of the device that sends most
        there.
      tokens_per_second: of each GPU.
      mfu: the share of the GPU's peak that the model's own operations take; None if the peak is
        not known.
    """

    way: Way
    memory: StepMemory
    seconds: StepSeconds
    ring_host_bytes: int
    tokens_per_second: float
    mfu: float | None

    def record(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        way = self.way
        return {
            **dataclasses.asdict(way),
            "mesh": way.mesh,
            "arguments": way.arguments,
            "num_shards": way.seq,
            "flags": way.flags,
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total},
            "seconds": dataclasses.asdict(self.seconds) | {"total": self.seconds.total},
            "ring_host_bytes": self.ring_host_bytes,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }


def fits(memory: StepMemory, cluster: Cluster) -> bool:
    """Whether a GPU has the memory: a part of it is left for what is not the step's."""
    return memory.total <= USABLE * cluster.gpu.memory * _GIB


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What :func:`training` found; ``print`` it for a table.

    Attributes:
      config: the decoder.
      length: tokens of a row.
      batch: rows of a step.
      moment_dtype: of the optimizer's moments.
      cluster: the GPUs.
      estimates: of every way that is possible: those that fit into memory first, the fastest of
        them before the others.
      left_out: ``(way, reason)`` for every mesh and layout that is not possible.
    """

    config: DecoderConfig
    length: int
    batch: int
    moment_dtype: str
    cluster: Cluster
    estimates: tuple[StepEstimate, ...]
    left_out: tuple[tuple[str, str], ...]

    def fits(self, estimate: StepEstimate) -> bool:
        """Whether a GPU has the memory: a part of it is left for what is not the step's."""
        return fits(estimate.memory, self.cluster)

    @property
    def best(self) -> StepEstimate | None:
        """The recommended way, or None if none fits.

        Of the ways that take at most :data:`AS_FAST` longer than the fastest that fits, it is one
        that needs no memory of the host, if there is one; of those one that sends the fewest bytes
        to other hosts; of those the one that needs the least memory.
        """
        fit = list(filter(self.fits, self.estimates))
        as_fast = [each for each in fit if each.seconds.total <= AS_FAST * fit[0].seconds.total]

        def cost(each: StepEstimate) -> tuple[bool, int, int]:
            return each.memory.host > 0, each.ring_host_bytes, each.memory.total

        return min(as_fast, key=cost, default=None)

    def record(self) -> dict[str, Any]:
        """The whole plan as plain values, for JSON."""
        config = dataclasses.asdict(self.config)
        names = ("dtype", "param_dtype")
        config |= {name: jnp.dtype(config[name]).name for name in names}
        config["feed_forward"] = self.config.feed_forward.__name__
        del config["hf_config"]
        return {
            "config": config,
            "length": self.length,
            "batch": self.batch,
            "moment_dtype": self.moment_dtype,
            "cluster": dataclasses.asdict(self.cluster),
            "recommended": None if self.best is None else self.best.record(),
            "estimates": [each.record() | {"fits": self.fits(each)} for each in self.estimates],
            "left_out": dict(self.left_out),
        }

    def __str__(self) -> str:
        return table(self)


def training(
    config: DecoderConfig,
    *,
    length: int,
    batch: int = 1,
    gpu: str | Gpu = "h200",
    hosts: int = 1,
    gpus_per_host: int = 8,
    host_link: float = 50.0,
    moment_dtype: DTypeLike = jnp.float32,
    moments: Moments | None = None,
) -> TrainingPlan:
    """Compares ways to train a decoder: which fit into memory, and which is the fastest.

    A way is a mesh, weights that are split over it or whole, the layout of the tokens, what layers
    keep for the backward pass (``remat``; where not all layers can be "selective", as many as fit
    are, ``remat_layers``), the chunks of the feed-forward, and where the
    optimizer's moments are. All of them are compared. The optimizer is AdamW, the loss's
    ``chunk_size`` the default. Memory is within a tenth of the compiled program's
    (:mod:`burst_jax.plan.step_memory`), seconds come from measured rates
    (:mod:`burst_jax.plan.step_time`).

    Args:
      config: the decoder, like ``burst_jax.models.load_config(folder)``. Its ``remat``,
        ``remat_layers`` and ``mlp_chunks`` are not read: they are what is planned.
      length: number of tokens of a row.
      batch: number of rows of a step, on all devices.
      gpu: "a100", "h100", "h200", or a :class:`Gpu` of your own.
      hosts: number of machines.
      gpus_per_host: number of GPUs on each machine.
      host_link: GB/s that one GPU sends to another host (50: an adapter of 400 Gbit/s for each).
      moment_dtype: float32 or bfloat16, of AdamW's moments.
      moments: "device" or "host", the memory that they are in; None compares both.

    Returns:
      A :class:`TrainingPlan`: estimates, and the fastest that fits, ``best``, with its mesh, its
      arguments for ``init_train_state``, and its flags for ``examples/train_lm.py``.

    Raises:
      NotImplementedError: the decoder has low-rank adapters, which are trained alone.
      ValueError: a size that is not a positive integer, an unknown GPU, moment_dtype or moments, no
        ``DecoderConfig``, or no way to split the step at all.
    """
    from burst_jax.models.config import DecoderConfig
    from burst_jax.models.decoder import abstract_decoder
    from burst_jax.training.adam import Moments

    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"config is a {type(config).__name__}: it must be a DecoderConfig, like "
            "burst_jax.models.load_config(folder)"
        )
    if config.lora is not None:
        raise NotImplementedError(
            f"config.lora is {config.lora}: a plan is of a step that trains all weights; pass "
            "dataclasses.replace(config, lora=None) for what that takes"
        )
    check_sizes(length=length, batch=batch)
    cluster = cluster_of(gpu, hosts, gpus_per_host, host_link)
    try:
        dtype = jnp.dtype(moment_dtype)
    except TypeError:  # NumPy knows no dtype of this name.
        dtype = None
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"moment_dtype is {moment_dtype!r}: use float32 or bfloat16")
    if moments not in (None, *get_args(Moments)):
        raise ValueError(f"moments is {moments!r}: use 'device', 'host', or None to compare both")
    places = get_args(Moments) if moments is None else (moments,)

    first = next(_meshes(cluster, 1), None)
    assert first is not None
    _, shapes = abstract_decoder(config, mesh=first.abstract_mesh)
    planner = _Planner(config, shapes, cluster, length, batch, dtype.itemsize)
    estimates, left_out = [], []
    for way in _meshes(cluster, batch):
        try:
            estimates += planner.of_mesh(way, places)
        except ValueError as error:
            left_out.append((f"{_name(way)}, {way.layout}", str(error)))
    if not estimates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out)
        raise ValueError(
            f"length is {length}, batch {batch}: no way to split a step over {cluster.size} "
            f"devices: {reasons}"
        )
    found = TrainingPlan(config, length, batch, dtype.name, cluster, (), tuple(left_out))

    def order(each: StepEstimate) -> tuple[bool, float, float]:
        seconds, size = each.seconds.total, each.memory.total
        return (False, seconds, size) if found.fits(each) else (True, size, seconds)

    return dataclasses.replace(found, estimates=tuple(sorted(estimates, key=order)))


def _name(way: Way) -> str:
    axes = " ".join(f"{name}={size}" for name, size in way.mesh.items())
    return f"{axes}, weights {way.weights}"


def _meshes(cluster: Cluster, batch: int) -> Iterator[Way]:
    """Every mesh of the cluster, with weights split and whole, in every layout."""
    n, gpus = cluster.size, cluster.gpus
    for tensor in _divisors(gpus):
        for rows in _divisors(n // tensor):
            seq = n // tensor // rows
            inside = min(seq, gpus // tensor)
            if batch % rows or seq % inside:
                continue
            rings = [(seq,)] if seq == inside or inside == 1 else [(seq,), (seq // inside, inside)]
            for ring in rings:
                for weights in get_args(Weights) if rows * seq > 1 else ("whole",):
                    for layout in LAYOUTS if seq > 1 else LAYOUTS[:1]:
                        yield Way(weights, rows, ring, tensor, layout, "attention")


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@dataclasses.dataclass(frozen=True)
class _Planner:
    """What is the same for all ways."""

    config: DecoderConfig
    shapes: Any
    cluster: Cluster
    length: int
    batch: int
    moment_size: int

    def of_mesh(self, way: Way, places: tuple[Moments, ...]) -> list[StepEstimate]:
        """The estimates of one mesh and layout, with everything else that is compared.

        Raises:
          ValueError: the mesh or the layout cannot split the step.
        """
        from burst_jax.models.remat import Remat

        config, length = self.config, self.length
        check_length(way.layout, length, way.seq)
        sizes = sizes_of(config, self.shapes, way, length=length, batch=self.batch)
        by_kind = {
            kind: attention_of(
                config, kind, self.cluster, way, length=length, rows=sizes.rows
            )
            for kind in dict.fromkeys(config.layer_kinds)
        }  # fmt: skip
        attentions = [by_kind[kind] for kind in config.layer_kinds]
        # Without a window the queries of the first half of a row see a quarter of the keys.
        first_half = sum(
            by_kind[kind].forward_seconds / (4 if kind.window is None else 2)
            for kind in config.layer_kinds
        )
        found = []
        for remat in get_args(Remat):
            if remat == "half" and way.seq > 1 and way.layout == "contiguous":
                continue  # Some devices have none of the second half.
            for moments in places:
                kind = dataclasses.replace(way, remat=remat, moments=moments)
                found.append(self._in_chunks(kind, sizes, attentions, first_half))
                if remat == "selective" and not self._fits(found[-1].memory):
                    found += self._some_selective(kind, sizes, attentions, first_half)
        return found

    def _some_selective(
        self, way: Way, sizes: Sizes, attentions: list[Estimate], first_half: float
    ) -> list[StepEstimate]:
        """The way with as many "selective" layers as fit; nothing if not one of them does."""

        def fits_not(count: int) -> bool:
            some = dataclasses.replace(way, remat_layers=count)
            return not any(
                self._fits(self._memory(each, sizes, attentions)) for each in self._chunked(some)
            )

        # The more layers, the more memory: so many counts fit.
        count = bisect_left(range(1, sizes.layers), True, key=fits_not)
        if count == 0:
            return []
        some = dataclasses.replace(way, remat_layers=count)
        return [self._in_chunks(some, sizes, attentions, first_half)]

    def _in_chunks(
        self, way: Way, sizes: Sizes, attentions: list[Estimate], first_half: float
    ) -> StepEstimate:
        """The fewest chunks of the feed-forward that fit, or those that need the least memory."""
        ways = self._chunked(way)
        memories = [self._memory(each, sizes, attentions) for each in ways]
        fitting = [i for i, memory in enumerate(memories) if self._fits(memory)]
        at = fitting[0] if fitting else min(range(len(ways)), key=lambda i: memories[i].total)
        seconds = step_seconds(
            sizes,
            ways[at],
            self.cluster,
            attentions,
            first_half=first_half,
            chunk_size=_CHUNK_SIZE,
            moment_size=self.moment_size,
        )
        rate = self.batch * self.length / seconds.total / self.cluster.size
        peak = self.cluster.gpu.peak
        flops = 1e-12 * self.config.train_flops_per_token(self.length) * rate
        return StepEstimate(
            way=ways[at],
            memory=memories[at],
            seconds=seconds,
            ring_host_bytes=sum(each.host_bytes for each in attentions),
            tokens_per_second=rate,
            mfu=None if peak is None else flops / peak,
        )

    def _chunked(self, way: Way) -> list[Way]:
        """The way with every number of chunks of the feed-forward, the fewest first."""
        counts = [count for count in _CHUNKS if self.length // way.seq % count == 0]
        return [dataclasses.replace(way, mlp_chunks=count) for count in counts]

    def _fits(self, memory: StepMemory) -> bool:
        return fits(memory, self.cluster)

    def _memory(self, way: Way, sizes: Sizes, attentions: list[Estimate]) -> StepMemory:
        return step_memory(
            sizes,
            way,
            attentions[0].backward,
            fused=self.cluster.gpu.fused,
            chunk_size=_CHUNK_SIZE,
            moment_size=self.moment_size,
        )


__all__ = ["StepEstimate", "TrainingPlan", "training"]
