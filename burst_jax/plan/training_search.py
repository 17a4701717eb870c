"""The planner for training: every mesh, layout, remat and offload on a cluster, compared."""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, get_args

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.typing import DTypeLike

from burst_jax.errors import check_integer
from burst_jax.layouts.parse import LAYOUTS, parse_layout
from burst_jax.models.config import DecoderConfig, LayerKind
from burst_jax.models.decoder import abstract_decoder
from burst_jax.models.remat import Remat
from burst_jax.parallel.mesh import flat_names
from burst_jax.plan.cost_model import Estimate
from burst_jax.plan.delta_net import obstacle
from burst_jax.plan.device_sizes import DeviceSizes, device_sizes
from burst_jax.plan.hardware import Cluster, Gpu, cluster_of
from burst_jax.plan.step_memory import StepMemory, step_memory
from burst_jax.plan.step_time import MixerEstimate, evaluation_seconds, mixer_of, step_seconds
from burst_jax.plan.training_plan import StepEstimate, TrainingPlan, fits, surely_fits
from burst_jax.plan.training_strategy import TrainingStrategy, Weights
from burst_jax.training.adam import Moments

_MLP_CHUNKS = (1, 2, 4, 8, 16, 32, 64)


def training(
    config: DecoderConfig,
    *,
    length: int,
    batch: int = 1,
    gpu: str | Gpu = "h200",
    hosts: int = 1,
    gpus_per_host: int = 8,
    host_link: float | None = None,
    moment_dtype: DTypeLike = jnp.float32,
    moments: Moments | None = None,
) -> TrainingPlan:
    """Compares strategies to train a decoder: which fit in memory, and which is the fastest.

    A strategy is a mesh, weights that are sharded over it or replicated, experts that are gathered
    or that tokens are sent to (``ShardingRules.expert``), a layout, what layers save
    for the backward pass (``remat``, and ``remat_layers`` where only some layers can be
    "selective"), the chunks of the feed-forward, and where the optimizer's moments are. All
    combinations are compared. The optimizer is AdamW, and the loss has its default ``chunk_size``.
    Memory is within 10 % of the compiled program's (:mod:`burst_jax.plan.step_memory`), for which
    the recommendation leaves room; seconds follow from measured rates
    (:mod:`burst_jax.plan.step_time`).

    Args:
      config: the decoder, like ``burst_jax.models.load_config(folder)``. Its ``remat``,
        ``remat_layers`` and ``mlp_chunks`` are ignored: they are what is planned.
      length: sequence length.
      batch: batch size, over all devices.
      gpu: a name in :data:`burst_jax.plan.GPUS`, or a :class:`burst_jax.plan.Gpu`.
      hosts: number of hosts.
      gpus_per_host: number of GPUs per host.
      host_link: GB/s that one GPU sends to another host; None is the GPU's (``Gpu.host_link``).
      moment_dtype: float32 or bfloat16, of AdamW's moments.
      moments: "device" or "host", the memory that they are in; None compares both.

    Returns:
      A :class:`burst_jax.plan.TrainingPlan`: estimates, and the fastest that fits, ``best``, with
      its mesh and its arguments for ``init_train_state``.

    Raises:
      NotImplementedError: the decoder has LoRA adapters, which are trained without the weights; or
        linear attention with key head dims above 128, which has no kernels; or Kimi Delta
        Attention on a GPU that is not Hopper's.
      ValueError: a size that is not a positive integer, an unknown GPU, moment_dtype or moments,
        not a ``DecoderConfig``, or no possible strategy.
    """
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"config is a {type(config).__name__}: it must be a DecoderConfig, like "
            "burst_jax.models.load_config(folder)"
        )
    if config.lora is not None:
        raise NotImplementedError(
            f"config.lora is {config.lora}: the planner assumes that all weights are trained; pass "
            "dataclasses.replace(config, lora=None) to plan that"
        )
    length, batch = check_integer("length", length, 1), check_integer("batch", batch, 1)
    cluster = cluster_of(gpu, hosts, gpus_per_host, host_link)
    try:
        dtype = jnp.dtype(moment_dtype)
    except TypeError:  # Not the name of a dtype.
        dtype = None
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"moment_dtype is {moment_dtype!r}: use float32 or bfloat16")
    if moments not in (None, *get_args(Moments)):
        raise ValueError(f"moments is {moments!r}: use 'device', 'host', or None to compare both")
    places = get_args(Moments) if moments is None else (moments,)

    shapes = _shapes_of(config, next(_meshes(cluster, 1)).abstract_mesh)
    estimates, left_out = [], []
    # Of an attention or Gated DeltaNet, which do not depend on what else a mesh shards.
    attentions: dict[Any, MixerEstimate] = {}
    for mesh in _with_expert_axes(config, _meshes(cluster, batch)):
        if config.delta_net is not None and (found := obstacle(mesh)) is not None:
            left_out += [] if found in left_out else [found]
            continue
        try:
            sizes = device_sizes(config, shapes, mesh, length=length, batch=batch)
            search = _Search(
                config, cluster, length, batch, dtype.itemsize, mesh, sizes, attentions
            )
            estimates += search.estimates(places)
        except ValueError as error:
            left_out.append((f"{mesh.name}, {mesh.layout}", str(error)))
    if not estimates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out)
        raise ValueError(
            f"length is {length}, batch {batch}: no strategy can shard a step over {cluster.size} "
            f"devices: {reasons}"
        )

    def order(each: StepEstimate) -> tuple[bool, float, float]:
        seconds, size = each.seconds.total, each.memory.total
        fit = fits(each.memory, cluster)
        return (False, seconds, size) if fit else (True, size, seconds)

    estimates.sort(key=order)
    return TrainingPlan(
        config, length, batch, dtype.name, cluster, tuple(estimates), tuple(left_out), shapes
    )


@functools.lru_cache(maxsize=8)
def _shapes_of(config: DecoderConfig, mesh: AbstractMesh) -> Any:
    """The decoder's state as shapes. Its trace takes a quarter of the time of a plan."""
    return abstract_decoder(config, mesh=mesh)[1]


def _meshes(cluster: Cluster, batch: int) -> Iterator[TrainingStrategy]:
    """Every mesh of the cluster, with sharded and replicated weights, in every layout."""
    n, gpus = cluster.size, cluster.gpus
    for tensor in _divisors(gpus):
        for rows in _divisors(n // tensor):
            seq = n // tensor // rows
            inside = min(seq, gpus // tensor)
            if batch % rows or seq % inside:
                continue
            rings: list[tuple[tuple[int, ...], int]] = [
                ((seq // ulysses,), ulysses) for ulysses in _divisors(inside)
            ]
            if 1 < inside < seq:
                rings.append(((seq // inside, inside), 1))
            for ring, ulysses in rings:
                for weights in get_args(Weights) if rows * seq > 1 else ("replicated",):
                    for layout in LAYOUTS if math.prod(ring) > 1 else LAYOUTS[:1]:
                        yield TrainingStrategy(
                            weights, rows, ring, tensor, layout, "attention", ulysses=ulysses
                        )


def _with_expert_axes(
    config: DecoderConfig, meshes: Iterator[TrainingStrategy]
) -> Iterator[TrainingStrategy]:
    """Each mesh with gathered experts, and with experts over all axes that it can exchange over.

    Meshes with two such axes also have experts over each of them.
    """
    for mesh in meshes:
        yield mesh
        if config.experts is None or mesh.weights == "replicated":
            continue
        ring = mesh.attention.arguments["seq_axis"]
        axes = [name for name in flat_names("fsdp", ring) if mesh.mesh.get(name, 1) > 1]
        wanted = [tuple(axes), *((name,) for name in axes)] if axes else []
        for expert in dict.fromkeys(wanted):
            yield dataclasses.replace(mesh, expert=expert)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@dataclasses.dataclass(frozen=True)
class _Search:
    """The strategies of one mesh and layout: every remat, place of the moments, and chunking.

    Attributes:
      config, cluster, length, batch: as in :func:`training`.
      moment_size: bytes of one optimizer moment of a weight.
      mesh: the mesh and the layout.
      sizes: one device's share of the step.
      attentions: estimates of one layer's attention or Gated DeltaNet, shared with other meshes.
    """

    config: DecoderConfig
    cluster: Cluster
    length: int
    batch: int
    moment_size: int
    mesh: TrainingStrategy
    sizes: DeviceSizes
    attentions: dict[Any, MixerEstimate]

    def estimates(self, places: tuple[Moments, ...]) -> list[StepEstimate]:
        """An estimate for each remat and place of the moments."""
        found = []
        for remat in get_args(Remat):
            layout = parse_layout(self.mesh.layout)
            # Half-sequence remat is that of softmax attention.
            half = self.config.delta_net is None and layout.lacks_first_half(self.mesh.seq) is None
            if remat == "half" and not half:
                continue
            for moments in places:
                strategy = dataclasses.replace(self.mesh, remat=remat, moments=moments)
                found.append(self._in_chunks(strategy))
                if remat == "selective" and not surely_fits(found[-1].memory, self.cluster):
                    found += self._some_selective(strategy)
        return found

    @functools.cached_property
    def _attention(self) -> dict[LayerKind, MixerEstimate]:
        """One layer's attention or Gated DeltaNet, by the kind of the layer."""
        mesh, rows, found = self.mesh, self.sizes.rows, {}
        for kind in dict.fromkeys(self.config.layer_kinds):
            key = kind, rows, mesh.attention, mesh.layout, mesh.tensor
            if key not in self.attentions:
                self.attentions[key] = mixer_of(
                    self.config, kind, self.cluster, mesh, self.sizes, length=self.length
                )
            found[kind] = self.attentions[key]
        return found

    def _some_selective(self, strategy: TrainingStrategy) -> list[StepEstimate]:
        """The strategy with as many "selective" layers as surely fit; empty if not even one."""

        def too_large(count: int) -> bool:
            some = dataclasses.replace(strategy, remat_layers=count)
            return not any(surely_fits(memory, self.cluster) for _, memory in self._chunked(some))

        # Memory grows with the number of layers.
        count = bisect_left(range(1, self.sizes.layers), True, key=too_large)
        if count == 0:
            return []
        return [self._in_chunks(dataclasses.replace(strategy, remat_layers=count))]

    def _in_chunks(self, strategy: TrainingStrategy) -> StepEstimate:
        """The strategy with the fewest feed-forward chunks that fit.

        Chunks that fit with a margin for the model's error are preferred, as one more costs little
        time. If none fit, it is the strategy with the least memory.
        """
        options = []
        for option in self._chunked(strategy):
            if surely_fits(option[1], self.cluster):
                best, memory = option
                break
            options.append(option)
        else:
            fitting = [option for option in options if fits(option[1], self.cluster)]
            best, memory = fitting[0] if fitting else min(options, key=lambda each: each[1].total)
        attentions = [self._attention[kind] for kind in self.config.layer_kinds]
        seconds = step_seconds(
            self.sizes,
            best,
            self.cluster,
            attentions,
            # Without a window the first half of the queries attends to a quarter of the keys.
            first_half=sum(
                self._attention[kind].forward_seconds / (4 if kind.window is None else 2)
                for kind in self.config.layer_kinds
            ),
            moment_size=self.moment_size,
        )
        rate = self.batch * self.length / seconds.total / self.cluster.size
        peak = self.cluster.gpu.peak
        flops = 1e-12 * self.config.train_flops_per_token(self.length) * rate
        return StepEstimate(
            strategy=best,
            memory=memory,
            seconds=seconds,
            evaluation_seconds=evaluation_seconds(self.sizes, self.cluster, attentions),
            ring_host_bytes=sum(each.host_bytes for each in attentions),
            tokens_per_second=rate,
            mfu=None if peak is None else flops / peak,
        )

    def _chunked(self, strategy: TrainingStrategy) -> Iterator[tuple[TrainingStrategy, StepMemory]]:
        """Every possible number of chunks of the feed-forward, fewest first, and its memory."""
        tokens = self.length // strategy.token_devices
        found = [each for each in self._attention.values() if isinstance(each, Estimate)]
        rotation = found[0].backward if found else "rotate_kv"  # Of no ring.
        kernels = self.cluster.gpu.kernels
        chunks = _MLP_CHUNKS if self.config.feed_forward.chunks_tokens else (1,)
        if self.config.experts is not None and strategy.remat in ("none", "selective"):
            chunks = (1,)  # Chunks of experts save no products.
        for count in [count for count in chunks if tokens % count == 0]:
            each = dataclasses.replace(strategy, mlp_chunks=count)
            yield (
                each,
                step_memory(
                    self.sizes, each, rotation, kernels=kernels, moment_size=self.moment_size
                ),
            )
