"""``burst_attention``: global arrays in, global arrays out, the ring in between."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.checks import (
    check_arrays,
    check_backward,
    check_devices,
    check_segment_ids,
    check_seq_axes,
    make_spec,
)
from burst_jax.heads import check_heads
from burst_jax.layout import Layout, check_layout, check_length
from burst_jax.platform import mapped_over_mesh_axes
from burst_jax.ring import ring_attention
from burst_jax.rotation import Backward
from burst_jax.sharding import flat_names
from pallas_kernels import Implementation, find

Axes = str | tuple[str, ...] | None
SeqAxis = str | tuple[str, ...] | None


def burst_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *positional: Any,
    mesh: Mesh | AbstractMesh | None = None,
    seq_axis: SeqAxis = "seq",
    head_parallel_axis: str | None = None,
    batch_axis: Axes = None,
    head_axis: Axes = None,
    layout: Layout = "contiguous",
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    implementation: str | Implementation | None = None,
    backward: Backward = "auto",
    return_residual: bool = False,
) -> Any:
    r"""Exact attention over sequences sharded across a device mesh.

    .. math:: out = softmax(mask(cap(scale \cdot query \cdot key^T))) \cdot value

    ``jax.nn.dot_product_attention`` for sequences too long for one device: same meaning, same
    defaults, and the sequence axis of every array split over ``seq_axis``. No device ever holds a
    tensor of global length. How it works: :func:`burst_jax.ring_attention`.

    Letters: B batch, T query length, S key length, N query heads, K key/value heads, H head dim.

    Args:
      query: ``[B, T, N, H]`` bfloat16, float16 or float32, in ``layout``'s order.
      key: ``[B, S, K, H]``, same dtype; N a multiple of K. Query head h uses key/value head
        ``h // (N // K)``.
      value: ``[B, S, K, H]``, same dtype.
      mesh: the device mesh; None is the one of ``jax.set_mesh``.
      seq_axis: the mesh axis that T and S are split over; ``(outer, inner)``: a two-level ring,
        which sends one block a turn of the inner ring over the links of the outer axis
        (:mod:`burst_jax.route`); None: no ring, with ``head_parallel_axis`` alone (Ulysses).
      head_parallel_axis: a further mesh axis that T and S are split over, whose devices exchange
        their tokens for parts of the heads by all-to-all around the ring (:mod:`burst_jax.heads`):
        inside a node, with a ring between nodes. N on a device must be a multiple of its size, K
        a multiple or a divisor (then key heads are copied). It does not count in the layout: a
        ring's shard is split over it in the order it is in.
      batch_axis: the mesh axis or axes that B is split over; None: not split.
      head_axis: the mesh axis or axes that N and K are split over; None: not split.
      layout: the order the tokens are already in: "contiguous", "zigzag" or "striped"; see
        :func:`burst_jax.to_layout`. Under a causal mask zigzag and striped balance the work.
      is_causal: a query sees keys at its own and at earlier positions only; with T != S too.
      scale: factor on the logits; None is ``1 / sqrt(H)``.
      local_window_size: ``(left, right)``: a query at position p sees keys at positions
        ``p - left .. p + right``; an int is both. None is no window.
      logits_soft_cap: c of ``c * tanh(logits / c)``, after the scale; None is no cap.
      query_segment_ids: ``[B, T]`` in the layout's order, of any integer dtype, whose values int32
        can hold; a query sees keys of its own segment only, and 0 is padding, which sees nothing
        and is seen by nothing. Give both or neither.
      key_value_segment_ids: ``[B, S]``, alike.
      implementation: the local attention: "triton", "xla", "mosaic_gpu", an
        :class:`pallas_kernels.Implementation`, or None for the fastest that can run.
      backward: what travels for the gradients: "rotate_kv" (K, V, dK, dV), "rotate_query"
        (Q, dO, dQ), or "auto" for fewer bytes.
      return_residual: also return lse.

    Returns:
      out ``[B, T, N, H]`` in the query's dtype, sharded like the query; with ``return_residual``
      ``(out, lse)``, where lse is float32 ``[B, T, N]``, the natural log of the softmax's
      denominator. Both have gradients. A row that may see nothing has out 0, lse -inf, and passes
      exactly zero gradients.

    Raises:
      ValueError: the arguments are wrong; the message names argument, value and remedy.
      TypeError: more than query, key and value by position.
      NotImplementedError: the chosen implementation cannot do this, or it is a derivative that a
        ring does not have, or a size is symbolic (``jax.export``).
    """
    if positional:
        raise TypeError(
            f"burst_attention takes query, key and value by position, and {len(positional)} more "
            "came: there are no dense bias and mask, the fourth and fifth argument of "
            "jax.nn.dot_product_attention; say a mask by is_causal, local_window_size or "
            "query_segment_ids and key_value_segment_ids, and leave them out if they are None"
        )
    check_arrays(query, key, value)
    q_segment_ids, kv_segment_ids = check_segment_ids(
        query, key, query_segment_ids, key_value_segment_ids
    )
    check_layout(layout)
    check_backward(backward)
    find(implementation)
    make_spec(query, is_causal, scale, local_window_size, logits_soft_cap)
    mesh = _mesh(mesh)
    seq_axes = check_seq_axes("seq_axis", seq_axis, head_parallel_axis)
    exchange_axes = flat_names(head_parallel_axis)
    batch_axes, head_axes = _axes("batch_axis", batch_axis), _axes("head_axis", head_axis)
    _check_axes(
        mesh,
        seq_axis=seq_axes,
        head_parallel_axis=exchange_axes,
        batch_axis=batch_axes,
        head_axis=head_axes,
    )
    n, exchange = (math.prod(mesh.shape[a] for a in axes) for axes in (seq_axes, exchange_axes))
    for name, length in (
        ("the query's length T", query.shape[1]),
        ("the key's length S", key.shape[1]),
    ):
        check_length(layout, length, n, name=name)
        if length % (n * exchange):
            raise ValueError(
                f"{name} is {length}: it must be a multiple of {n * exchange}, the devices on "
                f"seq_axis {seq_axis!r} and head_parallel_axis {head_parallel_axis!r}"
            )
    for name, size, axes in (
        ("the batch size B", query.shape[0], batch_axes),
        ("the number of query heads N", query.shape[2], head_axes),
        ("the number of key/value heads K", key.shape[2], head_axes),
    ):
        shards = math.prod(mesh.shape[axis] for axis in axes)
        if size % shards:
            raise ValueError(
                f"{name} is {size}: it must be a multiple of {shards}, the size of mesh axes {axes}"
            )
    if head_parallel_axis is not None:
        split = math.prod(mesh.shape[axis] for axis in head_axes)
        name = f"head_parallel_axis {head_parallel_axis!r}"
        check_heads(query.shape[2] // split, key.shape[2] // split, exchange, name)
    ring = _Ring(
        mesh=mesh,
        seq_axes=seq_axes,
        head_parallel_axis=head_parallel_axis,
        batch_axes=batch_axes,
        head_axes=head_axes,
        options=(
            ("layout", layout),
            ("is_causal", bool(is_causal)),
            ("scale", scale),
            ("local_window_size", local_window_size),
            ("logits_soft_cap", logits_soft_cap),
            ("implementation", implementation),
            ("backward", backward),
        ),
        check_vma=getattr(implementation, "checks_vma", True) and not mapped_over_mesh_axes(),
    )
    arrays = {"query": query, "key": key, "value": value}
    if q_segment_ids is not None:
        arrays |= {"query_segment_ids": q_segment_ids, "key_value_segment_ids": kv_segment_ids}
    check_devices(mesh, arrays)
    out, lse = _run(ring, ring.placed(arrays))
    return (out, lse) if return_residual else out


@dataclasses.dataclass(frozen=True)
class _Ring:
    """A ring on a mesh: static and hashable, so that eager calls find their compiled program."""

    mesh: Mesh | AbstractMesh
    seq_axes: tuple[str, ...]
    head_parallel_axis: str | None
    batch_axes: tuple[str, ...]
    head_axes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    # JAX's marks of what varies from device to device, which a jax.vmap with spmd_axis_name mixes
    # up: it marks its own batches of the ring's small tables as split over that axis, too.
    check_vma: bool

    def spec(self, name: str) -> P:
        """How an argument or result is split."""
        batch, heads = self.batch_axes or None, self.head_axes or None
        tokens = flat_names(self.seq_axes, self.head_parallel_axis)
        if name.endswith("segment_ids"):
            return P(batch, tokens)
        if name == "lse":
            return P(batch, tokens, heads)
        return P(batch, tokens, heads, None)

    def placed(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays as the ring's Explicit axes need them; Auto axes take any.

        An array's type says how it is split over Explicit axes. One that is on no mesh yet is split
        here; one that is on the mesh but split otherwise is the caller's to move, since it costs
        communication.
        """
        explicit = {
            axis
            for axis, kind in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
            if kind == AxisType.Explicit
        }
        if not explicit:
            return arrays
        placed = {}
        for name, array in arrays.items():
            sharding = getattr(jax.typeof(array), "sharding", None)
            if sharding is None or sharding.mesh.empty:
                here = P(*(self._explicit(entry, explicit) for entry in self.spec(name)))
                placed[name] = jax.reshard(array, jax.NamedSharding(self.mesh, here))
                continue
            has, needs = (
                [self._explicit(entry, explicit) or () for entry in spec]
                for spec in (sharding.spec, self.spec(name))
            )
            has += [()] * (len(needs) - len(has))
            if has != needs:
                raise ValueError(
                    f"{name} is split as {sharding.spec} over Explicit mesh axes, the ring "
                    f"needs {self.spec(name)}: set seq_axis, batch_axis and head_axis to how it is "
                    f"split, or split it so: jax.reshard({name}, {self.spec(name)})"
                )
            placed[name] = array
        return placed

    @staticmethod
    def _explicit(entry: Any, explicit: set[str]) -> tuple[str, ...] | None:
        """The Explicit axes that one dimension is split over, None if over none."""
        return tuple(axis for axis in flat_names(entry) if axis in explicit) or None


@functools.partial(jax.jit, static_argnums=0)
def _run(ring: _Ring, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    def local(arrays):
        return ring_attention(
            **arrays,
            axis_name=ring.seq_axes or None,
            head_parallel_axis=ring.head_parallel_axis,
            return_residual=True,
            **dict(ring.options),
        )

    return jax.shard_map(
        local,
        mesh=ring.mesh,
        in_specs=({name: ring.spec(name) for name in arrays},),
        out_specs=(ring.spec("out"), ring.spec("lse")),
        check_vma=ring.check_vma,
    )(arrays)


def _mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    context = jax.sharding.get_abstract_mesh()
    if context.manual_axes:
        raise ValueError(
            f"burst_attention is called inside a shard_map over {context.manual_axes}: call "
            "ring_attention there, on one device's arrays"
        )
    if mesh is not None:
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            raise ValueError(f"mesh is a {type(mesh).__name__}: it must be a jax.sharding.Mesh")
        return mesh
    if context.empty:
        raise ValueError("mesh is None and no mesh is set: pass mesh=, or enter jax.set_mesh(mesh)")
    return context


def _axes(name: str, axes: Axes) -> tuple[str, ...]:
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple) or not all(isinstance(axis, str) for axis in names):
        raise ValueError(f"{name} is {axes!r}: it must be a mesh axis, a tuple of them, or None")
    return names


def _check_axes(mesh: Any, **axes_by_name: tuple[str, ...]) -> None:
    used: dict[str, str] = {}
    for name, axes in axes_by_name.items():
        for axis in axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"{name} is {axis!r}: the mesh's axes are "
                    f"{', '.join(map(repr, mesh.axis_names))}"
                )
            if axis in used:
                raise ValueError(
                    f"{name} is {axis!r}, and so is {used[axis]}: use different mesh axes"
                )
            used[axis] = name
