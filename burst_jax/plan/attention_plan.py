"""The planner for one attention: all strategies, layouts and rotations on a cluster, compared."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.attention.arguments import StaticMasks
from burst_jax.attention.block_mask import with_block_mask
from burst_jax.attention.shardings import check_lengths
from burst_jax.errors import check_integer, did_you_mean
from burst_jax.layouts.parse import LAYOUTS
from burst_jax.plan.cost_model import AttentionShape, CostModel, Estimate, Strategy
from burst_jax.plan.hardware import Cluster, Gpu, cluster_of
from burst_jax.ring.block_mask import Blocks
from burst_jax.ring.rotation import ROTATIONS
from burst_jax.ring.ulysses import check_heads

# Estimates that differ by less than this fraction are equally fast: two thirds of the measured
# rings are within it (``python -m benchmarks plan``).
ACCURACY = 0.03
_MIB = 2**20
# Time and memory of a plan grow with the number of attention chunks.
_MOST_CHUNKS = 2**18
# The printed code begins with these lines.
IMPORTS = (
    "    import burst_jax",
    "    import jax",
    "    from jax.sharding import AxisType",
    "",
)


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The result of :func:`attention`; ``print`` it for a table.

    Attributes:
      attention: the attention that is planned.
      cluster: the GPUs.
      estimates: an estimate for every possible strategy, layout and rotation, fastest first.
      left_out: ``(strategy and layout, reason)`` for every impossible one.
    """

    attention: AttentionShape
    cluster: Cluster
    estimates: tuple[Estimate, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Estimate | None:
        """The recommended estimate, or None if none fits the memory of a GPU.

        Estimates whose times differ by less than :data:`ACCURACY` count as equal. Of those equal to
        the fastest, it is the one that sends the fewest bytes to other hosts, because that
        interconnect is slow and shared.
        """
        fit = [each for each in self.estimates if each.memory <= self.cluster.gpu.memory]
        as_fast = [each for each in fit if each.seconds <= (1 + ACCURACY) * fit[0].seconds]
        return min(as_fast, key=lambda each: each.host_bytes, default=None)

    def record(self) -> dict[str, Any]:
        """The whole plan as plain values, for JSON."""
        best, blocks = self.best, self.attention.blocks
        attention = dataclasses.asdict(dataclasses.replace(self.attention, blocks=None))
        attention |= dict(attention.pop("masks"))
        if blocks is not None:
            names = ("q_block", "kv_block", "shape", "seen")
            attention["blocks"] = {name: getattr(blocks, name) for name in names}
        return {
            "attention": attention,
            "cluster": dataclasses.asdict(self.cluster),
            "recommended": None if best is None else best.record(),
            "estimates": [each.record() for each in self.estimates],
            "left_out": dict(self.left_out),
        }

    def __str__(self) -> str:
        """The estimates as a table, and the recommendation as code."""
        shape, cluster = self.attention, self.cluster
        gpu = cluster.gpu
        mask = ", ".join(["causal" if shape.is_causal else "full", *(
            f"{name} {value}" for name, value in shape.masks if name != "is_causal"
        )])  # fmt: skip
        if shape.blocks is not None:
            rows, columns = shape.blocks.shape
            mask += f", {shape.blocks.seen:.0%} of {rows} x {columns} blocks"
        head_dims = f"{shape.head_dim}"
        if shape.value_dim != shape.head_dim:
            head_dims += f"/{shape.value_dim}"
        lines = [
            f"{cluster.hosts} x {cluster.gpus} {gpu.name}, {cluster.link:g} GB/s within a host, "
            f"{cluster.host_link:g} to another host; rates: {gpu.source}",
            f"{shape.batch} x {shape.length:,} tokens, {shape.heads}/{shape.kv_heads} heads x "
            f"{head_dims}, {mask}; one attention, per device",
            "overlap: share of the communication time that kernels overlap; to hosts: MiB sent to "
            "other hosts",
            "",
            f"{'strategy':28}{'layout':12}{'backward':14}{'fwd ms':>9}{'bwd ms':>9}{'TFLOP/s':>9}"
            f"{'overlap':>9}{'GiB':>8}{'fwd MiB':>10}{'bwd MiB':>10}{'to hosts':>10}",
        ]
        lines.append("-" * len(lines[-1]))
        lines += [_line(estimate) for estimate in self.estimates]
        lines += [f"left out: {name}: {reason}" for name, reason in self.left_out]
        best = self.best
        if best is None:
            lines.append(
                f"\nNone fits {gpu.memory:g} GiB: use more devices, or a smaller batch per device."
            )
        else:
            lines += ["", *self._recommended(best)]
        return "\n".join(lines)

    def _recommended(self, best: Estimate) -> list[str]:
        """The recommended mesh and call as code."""
        fastest = next(each for each in self.estimates if each.memory <= self.cluster.gpu.memory)
        mesh = best.strategy.mesh
        arguments = as_arguments(best.arguments | dict(self.attention.masks))
        if self.attention.blocks is not None:
            arguments += ", block_mask=block_mask"
        layout = f"{as_python(best.layout)}, {math.prod(best.strategy.sizes)}"
        lines = [
            f"recommended: {best.strategy.name}, {best.layout}",
            *IMPORTS,
            f"    {mesh_code(mesh)}",
            f"    out = burst_jax.burst_attention(query, key, value, mesh=mesh, {arguments})",
            f"    # permute the tokens: burst_jax.to_layout(..., {layout})",
        ]
        if best.host_bytes < fastest.host_bytes:
            slower = best.seconds / fastest.seconds - 1
            lines.append(
                f"    # {slower:.1%} slower than the fastest that fits (within the model's error),"
                f" and {best.host_bytes / fastest.host_bytes:.0%} of its bytes to other hosts"
            )
        return lines


def _line(estimate: Estimate) -> str:
    return (
        f"{estimate.strategy.name:28}{estimate.layout:12}{estimate.backward:14}"
        f"{1e3 * estimate.forward_seconds:9.2f}{1e3 * estimate.backward_seconds:9.2f}"
        f"{estimate.tflops:9.0f}{estimate.overlapped:9.0%}{estimate.memory:8.2f}"
        f"{estimate.forward_bytes / _MIB:10.0f}{estimate.backward_bytes / _MIB:10.0f}"
        f"{estimate.host_bytes / _MIB:10.0f}"
    )


def as_python(value: object) -> str:
    """The ``repr`` of a value, with double quotes."""
    return repr(value).replace("'", '"')


def as_arguments(values: Any) -> str:
    """A mapping as keyword arguments in Python."""
    return ", ".join(f"{name}={as_python(value)}" for name, value in values.items())


def mesh_code(mesh: dict[str, int]) -> str:
    """Python code for a mesh of these axes and sizes."""
    sizes, names = tuple(mesh.values()), as_python(tuple(mesh))
    return f"mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {len(mesh)})"


def attention(
    *,
    length: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    value_head_dim: int | None = None,
    batch: int = 1,
    gpu: str | Gpu = "h200",
    hosts: int = 1,
    gpus_per_host: int = 8,
    host_link: float | None = None,
    block_mask: np.ndarray | jax.Array | None = None,
    **masks: Unpack[StaticMasks],
) -> AttentionPlan:
    """Compares all strategies to shard one attention over a cluster, by modelled time and memory.

    A ring step takes as long as the kernel on the busiest device, at its measured rate, or as the
    step's communication, the longer of the two (:mod:`burst_jax.plan.cost_model`). Rates and their
    sources are in :data:`burst_jax.plan.GPUS`. Bytes are exact, for 16-bit activations and float32
    gradients on the ring.

    Args:
      length: sequence length, T.
      num_heads: number of query heads, N.
      num_kv_heads: number of key/value heads, K, a divisor of N; None is N.
      head_dim: head dim of queries and keys, H.
      value_head_dim: head dim of values, Hv; None is H. The kernels' rates were measured with
        H = Hv.
      batch: batch size.
      gpu: a name in :data:`burst_jax.plan.GPUS`, or a :class:`burst_jax.plan.Gpu`.
      hosts: number of hosts.
      gpus_per_host: number of GPUs per host.
      host_link: GB/s that one GPU sends to another host; None is the GPU's (``Gpu.host_link``).
      block_mask: as in :func:`burst_jax.burst_attention`, where it must be a NumPy array for ring
        steps to be skipped as planned. With a mask per head, a block counts if some head attends
        to it.
      **masks: ``is_causal`` (here True by default), ``local_window_size`` and
        ``attention_chunk_size``, as in :func:`burst_jax.burst_attention`.

    Returns:
      An :class:`AttentionPlan`: estimates, fastest first, and the recommended one, ``best``, with
      its mesh and its arguments for ``burst_attention``.

    Raises:
      ValueError: a size that is not a positive integer, incompatible numbers of heads, an unknown
        GPU, a ``block_mask`` of another dtype or shape, or no possible strategy for this length.
    """
    length, num_heads, head_dim, batch, kv_heads = (
        check_integer(name, size, 1)
        for name, size in {
            "length": length, "num_heads": num_heads, "head_dim": head_dim, "batch": batch,
            "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
        }.items()
    )  # fmt: skip
    if value_head_dim is not None:
        value_head_dim = check_integer("value_head_dim", value_head_dim, 1)
    if num_heads % kv_heads:
        raise ValueError(
            f"num_kv_heads is {kv_heads}, num_heads {num_heads}: num_heads must be a multiple of it"
        )
    cluster = cluster_of(gpu, hosts, gpus_per_host, host_link)
    shape = AttentionShape(
        length, batch, num_heads, kv_heads, head_dim, _given({"is_causal": True, **masks}),
        value_head_dim=value_head_dim,
    )  # fmt: skip
    chunk = dict(shape.masks).get("attention_chunk_size")
    if isinstance(chunk, int) and length > _MOST_CHUNKS * chunk > 0:
        raise ValueError(
            f"attention_chunk_size is {chunk}, length {length}: the planner counts the scores of "
            f"up to {_MOST_CHUNKS} chunks; use chunks of {-(-length // _MOST_CHUNKS)} or more"
        )
    if block_mask is not None:
        shape = dataclasses.replace(shape, blocks=_blocks(shape, block_mask))
    estimates, left_out = [], []
    for strategy in _strategies(cluster):
        requests = [strategy.request(shape, layout) for layout in LAYOUTS]
        # Without a mask, or without a ring, the work does not depend on the layout.
        masked = bool(shape.masks) or shape.blocks is not None
        if not strategy.sizes or not masked:
            requests = requests[:1]
        for request in requests:
            try:
                # As burst_attention checks them.
                check_lengths(request, {"length": length})
                check_heads(num_heads, kv_heads, request.ulysses_size, "the Ulysses axis")
            except ValueError as error:
                left_out.append((f"{strategy.name}, {request.layout}", str(error)))
                continue
            model = CostModel(shape, cluster, strategy, request)
            rotations = ROTATIONS if request.ring_size > 1 else ROTATIONS[:1]
            estimates.extend(model.estimate(rotation) for rotation in rotations)
    if not estimates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out)
        raise ValueError(
            f"length is {length}: no strategy can shard it over {cluster.size}: {reasons}"
        )
    # Of equal times, the one that sends fewer bytes is first.
    estimates.sort(key=lambda each: (each.seconds, each.forward_bytes + each.backward_bytes))
    return AttentionPlan(shape, cluster, tuple(estimates), tuple(left_out))


def _given(masks: StaticMasks) -> tuple[tuple[str, Any], ...]:
    """The masks that mask something; TypeError for other names."""
    for name in masks.keys() - StaticMasks.__annotations__:
        hint = did_you_mean(name, StaticMasks.__annotations__)
        raise TypeError(f"attention() got an unexpected keyword argument {name!r}{hint}")
    return tuple((name, value) for name, value in masks.items() if value not in (None, False))


def _blocks(shape: AttentionShape, block_mask: Any) -> Blocks | None:
    """The ring's view of a block mask; ValueError if it does not match the attention."""
    # Only the lengths and the number of query heads are read.
    sizes = shape.batch, shape.length, shape.heads, shape.head_dim
    tokens: Any = jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    request = Strategy("one device", (1,), 1).request(shape, "contiguous")
    blocks = with_block_mask(request, tokens, tokens, np.asarray(block_mask)).blocks
    if not np.asarray(block_mask).any():
        raise ValueError("block_mask is False everywhere: no query attends to a key")
    return blocks


def _strategies(cluster: Cluster) -> list[Strategy]:
    """The strategies for the cluster's shape."""
    n, hosts, gpus = cluster.size, cluster.hosts, cluster.gpus
    if n == 1:
        return [Strategy("one device", (1,), 1)]
    strategies = [Strategy("ring", (n,), 1)]
    if hosts > 1 and gpus > 1:
        strategies.append(Strategy("two-level ring", (hosts, gpus), 1))
    for ulysses in range(2, gpus + 1):
        if gpus % ulysses == 0 and ulysses < n:
            name = f"ring of {n // ulysses}, ulysses of {ulysses}"
            strategies.append(Strategy(name, (n // ulysses,), ulysses))
    return [*strategies, Strategy("ulysses", (), n)]
