"""``compare``: a loss on a mesh and layout against the same loss on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from burst_jax.attention.watch import Place, WatchedCall, watched
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.parallel.mesh import (
    AxisNames,
    axes_size,
    check_axes,
    check_has_devices,
    flat_names,
)
from burst_jax.parallel.mesh_option import one_device
from burst_jax.verify import batch as batches
from burst_jax.verify import calls as watched_calls
from burst_jax.verify.batch import Sizes, named_leaves, path_name
from burst_jax.verify.cause import Sentences
from burst_jax.verify.differences import Results, differences
from burst_jax.verify.lockstep import Lockstep, Order
from burst_jax.verify.placement import CallAxes, axes_of_calls, whole_sequences
from burst_jax.verify.program import Program, flat_program, float_dtypes, widened
from burst_jax.verify.report import Cost, Difference, Report

# (mesh, layout) -> loss(params, batch), a scalar.
Loss = Callable[[Any, Any], jax.Array]
MakeLoss = Callable[[Mesh, Any], Loss]


def compare(
    make_loss: MakeLoss,
    params: Any,
    batch: Any,
    *,
    mesh: Mesh,
    layout: LayoutLike = "contiguous",
    seq_axis: AxisNames = "seq",
    batch_axis: AxisNames = None,
    gradients: bool = True,
    find_cause: bool = True,
) -> Report:
    """Compares a loss on a mesh with the same loss on one device, and names what differs.

    ::

        def make_loss(mesh, layout):
            model = Model(mesh=mesh, layout=layout)          # the model of your training script
            return lambda params, batch: model.loss(params, batch)

        report = burst_jax.verify.compare(
            make_loss, params, batch, mesh=mesh, layout="zigzag"
        )
        print(report)
        assert report.passed

    ``make_loss`` is called twice: with ``mesh`` and ``layout``, and with a mesh of one device (the
    same axes, of size 1) and "contiguous". The first loss gets the batch in ``layout``, sharded
    over the mesh, the second in natural order. Losses and the gradients of all floating parameters
    must agree up to rounding. Rounding is measured: the loss of one device is computed again in a
    wider dtype (float32 for a loss in 16 bits, float64 for float32), and the error of the mesh may
    be twice that of one device.

    If they differ, the losses are traced and run step by step, to find the lines of code that give
    other values on the mesh from the same inputs. This needs no help from the model.

    Independent of the numbers, :func:`compare` reports attention calls that differ in layout or
    segment ids, mesh axes along which devices compute the same, and tokens of padding that are
    documents or count in the loss.

    Args:
      make_loss: ``make_loss(mesh, layout) -> loss``; ``loss(params, batch)`` returns one floating
        scalar, with or without ``jax.jit``. Use the model that you train, with dropout disabled.
      params: pytree of arrays, like an ``nnx.State`` or linen's variables. Arrays that are on
        ``mesh`` keep their sharding, all others are replicated.
      batch: pytree of arrays in natural order: a dict of your own, or what
        :func:`burst_jax.training.make_batch` returns without ``layout``. Arrays ``[B, T, ...]`` and
        ``[T]`` are permuted to ``layout``; others, like ``[B]``, are not. T is the second dimension
        that most arrays have. If your loader permutes, pass a function instead, ``batch(layout,
        num_shards)``, that returns such a pytree in a layout: it is called for ``("contiguous",
        1)`` and for ``layout`` and the ring's size, with the same tokens, and arrays that are not
        in ``layout`` are reported.
      mesh: the mesh, with devices of one process.
      layout: the layout on the mesh, see :func:`burst_jax.to_layout`; a balanced one is that
        which :func:`burst_jax.training.make_batch` returns for the batch's documents.
      seq_axis: mesh axis, or axes, of the ring.
      batch_axis: mesh axis, or axes, that shard B. None is what the attention calls have as
        ``batch_axis``.
      gradients: whether to compare gradients. False compares losses alone, in less than half of the
        time and memory, and misses what only gradients show.
      find_cause: whether to search for the cause of a difference, which takes longer than the
        comparison.

    Returns:
      The report. ``report.passed`` is whether there are no problems, ``report.problems`` has a
      sentence for each, ``str(report)`` a table.

    Raises:
      ValueError: arguments that do not fit together, a batch that is permuted already, or a loss
        that is no floating scalar. Errors of the loss itself are not caught.
      NotImplementedError: several processes.
    """
    comparison = _Comparison(
        make_loss, params, batch, mesh, layout, seq_axis, batch_axis, gradients
    )
    return comparison.report(find_cause)


@dataclasses.dataclass
class _Side:
    """One of the two losses.

    Attributes:
      name: "one device" or "mesh".
      mesh: its mesh.
      loss: the user's.
      params: on the mesh.
      batch: on the mesh, in the loss's order.
      calls: attention calls.
      run: the compiled program, ``batch -> (loss, gradients)``.
      value: the loss.
      gradients: on the host, of the floating parameters.
    """

    name: str
    mesh: Mesh
    loss: Loss
    params: Any
    batch: Any
    calls: list[WatchedCall]
    run: Callable[[Any], tuple[jax.Array, list[jax.Array]]] | None = None
    value: float = 0.0
    gradients: list[np.ndarray] = dataclasses.field(default_factory=list)


class _Comparison:
    def __init__(
        self,
        make_loss: MakeLoss,
        params: Any,
        batch: Any,
        mesh: Mesh,
        layout: LayoutLike,
        seq_axis: AxisNames,
        batch_axis: AxisNames,
        gradients: bool,
    ) -> None:
        self.with_gradients = gradients
        spelled, layout = layout, parse_layout(layout)
        _check_arguments(make_loss, params, mesh, spelled, seq_axis, batch_axis)
        self.layout, self.ring, self.mesh = layout, flat_names(seq_axis), mesh
        self.shards = axes_size(mesh, seq_axis)
        batch, own = batches.of_loader(batch, spelled, self.shards)
        self.sizes: Sizes = batches.sizes_of(batch, self.shards, layout)
        self.batch = jax.tree.map(np.asarray, batch)
        self.cost = Cost({}, {})
        alone = one_device(mesh)
        natural = batches.natural_index(self.sizes)
        self.one = self._side("one device", make_loss, alone, "contiguous", params, (), natural)
        self.segment_names = names = self._segment_names(self.one)
        original = self.batch
        self.batch, self.index = batches.ordered(self.batch, self.sizes, layout, self.shards, names)
        if self.batch is not original:
            self.one.batch = batches.place(self.batch, self.sizes, alone, (), self.ring)
        # What is wrong with it is reported, and the losses get the batch in the layout.
        self.wrong_order = batches.wrong_order(
            own, batches.in_layout(self.batch, self.sizes, self.index), original, self.sizes,
            layout, self.shards, names,
        )  # fmt: skip
        self.there = self._side("mesh", make_loss, mesh, spelled, params, batch_axis, self.index)
        self.names = [path_name(path) for path, x in _leaves(self.one.params) if _is_float(x)]
        if not self.names:
            raise ValueError("params has no floating array: there is no gradient to compare")

    def _side(
        self,
        name: str,
        make_loss: MakeLoss,
        mesh: Mesh,
        layout: LayoutLike,
        params: Any,
        batch_axis: AxisNames,
        index: np.ndarray,
    ) -> _Side:
        with jax.set_mesh(mesh):
            loss = make_loss(mesh, layout)
            if not callable(loss):
                raise ValueError(
                    f"make_loss returned a {type(loss).__name__}: it must return the function "
                    "loss(params, batch)"
                )
            params = jax.tree.map(lambda x: _on_mesh(x, mesh), params)
            arrays = batches.in_layout(self.batch, self.sizes, index)
            tokens, rows = self.ring, flat_names(batch_axis)
            placed = batches.place(arrays, self.sizes, mesh, rows, tokens)
            side = _Side(name, mesh, loss, params, placed, [])
            self._trace(side)
            # What the calls name is known now.
            if batch_axis is None:
                rows = _named_by(side.calls, mesh, "batch_axis")
            exchanged = _named_by(side.calls, mesh, "ulysses_axis")
            if rows or exchanged:
                side.batch = batches.place(
                    arrays, self.sizes, mesh, rows,
                    (*tokens, *(axis for axis in exchanged if axis not in tokens)),
                )  # fmt: skip
        return side

    def _trace(self, side: _Side) -> None:
        """Traces the loss, which records its attention calls; checks what it returns."""
        with watched() as side.calls:
            out = jax.eval_shape(side.loss, side.params, side.batch)
        leaves = jax.tree.leaves(out)
        one = len(leaves) == 1 and leaves[0].shape == () and _is_float(leaves[0])
        if not one or out is not leaves[0]:
            shapes = ", ".join(f"{x.dtype} {x.shape}" for x in leaves) or "nothing"
            raise ValueError(
                f"loss returns {shapes} in a {type(out).__name__}: it must return one floating "
                "scalar, such as sum(losses * weights) / sum(weights)"
            )

    def _segment_names(self, side: _Side) -> dict[str, int]:
        """Names of the leaves of the batch that attention gets as segment ids, and its padding."""
        found: dict[str, int] = {}

        def loss(params: Any, batch: Any) -> jax.Array:
            names = {id(x): name for name, x in named_leaves(batch)}
            with watched() as calls:
                out = side.loss(params, batch)
            for call in calls:
                ids, padding = watched_calls.segment_ids_of(call), call.arguments.padding_id
                found.update({name: padding for key, name in names.items() if key == id(ids)})
            return out

        with jax.set_mesh(side.mesh):
            jax.eval_shape(loss, side.params, side.batch)
        return found

    def report(self, find_cause: bool) -> Report:
        """Runs everything."""
        dtype = self._run(self.one)
        self._run(self.there)
        reference, wide, no_reference = self._reference(dtype)
        losses = {"mesh": self.there.value, "one device": self.one.value}
        if reference is not None:
            losses["reference"] = reference[0]
        there, one = ((side.value, side.gradients) for side in (self.there, self.one))
        loss, gradients = differences(self.names, there, one, reference, dtype)
        traced, whole = self._placement()
        replicated = watched_calls.replicated_axes(self.there.calls, self.mesh, traced)
        problems = self.wrong_order + self._problems_of_batch()
        problems += watched_calls.replicated_sentences(
            replicated, self.there.calls, self.mesh, self.ring, traced
        )
        if not set(replicated) & set(self.ring):  # Else the attention has whole sequences.
            problems += whole
        problems += watched_calls.without_segments(self.there.calls)
        causes = watched_calls.wrong_layouts(self.there.calls, self.layout, self.ring)
        different = [each for each in (loss, *gradients) if not each.passed]
        if different:
            if find_cause:
                causes = self._causes(loss.passed) or causes
            problems += causes or [self._unexplained(different)]
        else:
            problems += causes
        segments = batches.segments_of(self.batch, self.sizes, self.segment_names)
        sizes = [(name, size) for name, size in self.mesh.shape.items() if size > 1]
        shape = ",".join(f"{name}={size}" for name, size in sizes) or "one device"
        return Report(
            shape, self.layout.name, dtype, wide, no_reference, losses, loss, gradients, segments,
            tuple(replicated), tuple(dict.fromkeys(problems)), self.cost,
        )  # fmt: skip

    def _run(self, side: _Side) -> str:
        """Runs loss and gradients; returns the narrowest floating dtype in the program."""
        with jax.set_mesh(side.mesh), self._timed(side.name):
            function, floats = self._program(side)
            traced = jax.jit(function).trace(floats, side.batch)
            program = traced.lower().compile()
            side.run = functools.partial(program, floats)
            value, gradients = side.run(side.batch)
            side.value, side.gradients = float(value), [np.asarray(x) for x in gradients]
        if (memory := program.memory_analysis()) is not None:
            self.cost.bytes[side.name] = int(
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                + memory.temp_size_in_bytes
            )
        found = float_dtypes(traced.jaxpr.jaxpr) | {str(x.dtype) for x in gradients}
        return next((name for name in ("bfloat16", "float16") if name in found), "float32")

    def _program(self, side: _Side) -> tuple[Callable[..., Any], list[Any]]:
        """``(loss, gradients)`` as a function of the floating leaves and the batch; the leaves."""
        function, floats = _value_and_grad(side.loss, side.params)
        if self.with_gradients:
            return function, floats
        loss = _loss_of(side.loss, side.params)
        return lambda *arguments: (loss(*arguments), []), floats

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.cost.seconds[name] = self.cost.seconds.get(name, 0.0) + time.perf_counter() - start

    def _reference(self, dtype: str) -> tuple[Results | None, str | None, str | None]:
        """Loss and gradients of one device in a wider dtype, that dtype, or why there are none."""
        wide = "float64" if dtype == "float32" else "float32"
        side = self.one
        with jax.set_mesh(side.mesh), self._timed("reference"):
            function, floats = self._program(side)
            with watched("xla"):
                closed = jax.make_jaxpr(function)(floats, side.batch)
            arguments = jax.tree.leaves((floats, side.batch))
            try:
                with jax.enable_x64(wide == "float64"):
                    value, *gradients = jax.jit(widened(closed, wide))(*arguments)
            except (NotImplementedError, TypeError, ValueError) as error:
                # An operation with one dtype only, like a kernel of the user's.
                return None, None, str(error).partition("\n")[0]
            return (float(value), [np.asarray(x) for x in gradients]), wide, None

    def _problems_of_batch(self) -> list[str]:
        segments = batches.segments_of(self.batch, self.sizes, self.segment_names)
        if segments is None or not segments.count:
            return []
        padding = f"segment {segments.padding_id}"
        share = f"{100 * segments.tokens:.1f} % of the tokens are in {padding}"
        if segments.counted_from_zero:
            return [
                f"{share} of {segments.name}, at the start of sequences and with varied ids: "
                f"{padding} is padding, which attends to nothing, so documents that are counted "
                "from 0 lose their first; count them from 1"
            ]
        if segments.loss:
            return [
                f"{share} of {segments.name} and have {100 * segments.loss:.1f} % of the loss "
                f"weight: {padding} is padding, whose outputs are undefined; give it weight 0"
            ]
        side, changed = self.one, batches.other_padding(self.batch, segments)
        assert side.run is not None
        with jax.set_mesh(side.mesh):
            placed = batches.place(changed, self.sizes, side.mesh, (), self.ring)
            before, after = side.value, float(side.run(placed)[0])
        if abs(before - after) <= 1e-6 * abs(before):
            return []
        return [
            f"{share} of {segments.name}, and the loss depends on them: it is {before:.6f}, and "
            f"{after:.6f} with other tokens there; {padding} is padding, so give its targets loss "
            "weight 0"
        ]

    def _placement(self) -> tuple[dict[Place, CallAxes], list[str]]:
        """The axes of attention calls on the mesh; a sentence about whole sequences there."""
        side = self.there
        _, floats = _value_and_grad(side.loss, side.params)
        with jax.set_mesh(side.mesh), self._timed(side.name):
            with watched():
                closed = jax.make_jaxpr(_loss_of(side.loss, side.params))(floats, side.batch)
            arguments, count = jax.tree.leaves((floats, side.batch)), len(named_leaves(side.batch))
            whole = []
            if self.shards > 1:
                whole = whole_sequences(closed, arguments, self.sizes, count, self.ring)
            return axes_of_calls(closed), whole

    def _causes(self, loss_passed: bool) -> list[str]:
        """Searches the forward program, or for equal losses the gradient's."""
        order = Order(self.sizes.batch, self.index)
        sentences = Sentences(self.mesh, self.layout, self.there.calls, self.one.calls)
        with self._timed("search"):
            # The gradient's program, which contains the loss's, is searched if that found nothing.
            searches = (False, True)[loss_passed:] if self.with_gradients else (False,)
            for gradient in searches:
                programs: list[Program] = []
                inputs: list[list[Any]] = []
                for side in (self.one, self.there):
                    function, floats = _value_and_grad(side.loss, side.params)
                    if not gradient:
                        function = _loss_of(side.loss, side.params)
                    with jax.set_mesh(side.mesh), watched():
                        programs.append(flat_program(jax.make_jaxpr(function)(floats, side.batch)))
                    inputs.append(jax.tree.leaves((floats, side.batch)))
                names = [*self.names, *(f"batch {name}" for name, _ in named_leaves(self.batch))]
                one, mesh = programs
                run = Lockstep(one, mesh, order, names, (self.one.mesh, self.mesh))
                found = sentences.all(run.causes(*inputs))
                if found:
                    return found
        return []

    def _unexplained(self, different: list[Difference]) -> str:
        names = [each.name for each in different]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"{shown} differ from one device's, by up to {max(e.mesh for e in different):.1e}: no "
            "step of the program differs by itself, so losses and gradients must lose precision "
            "over many; compare in float32, and check sums over devices in 16 bits"
        )


def _check_arguments(
    make_loss: Any, params: Any, mesh: Any, layout: Any, seq_axis: Any, batch_axis: Any
) -> None:
    if jax.process_count() > 1:
        raise NotImplementedError("compare runs in one process: use a mesh of its own devices")
    check_has_devices(mesh)
    check_axes(mesh, {"seq_axis": seq_axis, "batch_axis": batch_axis})
    if not callable(make_loss):
        raise ValueError(
            f"make_loss is a {type(make_loss).__name__}: it must be a function (mesh, layout) -> "
            "loss(params, batch)"
        )
    try:
        signature = inspect.signature(make_loss)
    except (ValueError, TypeError):  # Some callables have none.
        signature = inspect.Signature.from_callable(lambda mesh, layout: None)
    try:
        signature.bind(mesh, layout)
    except TypeError as error:
        raise ValueError(
            f"make_loss{signature} cannot be called as make_loss(mesh, layout) ({error}): it must "
            "build the loss for the mesh and layout that it gets"
        ) from None
    if isinstance(params, nnx.Module):
        raise ValueError(
            "params is an nnx.Module: pass its state, nnx.split(model)[1], and let make_loss merge "
            "it with the graphdef of a model on its mesh"
        )
    for name, x in named_leaves(params):
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise ValueError(
                f"params has {name or 'a leaf'}, of type {type(x).__name__}: it must hold arrays "
                "only"
            )


def _on_mesh(x: Any, mesh: Mesh) -> jax.Array:
    own = getattr(x, "sharding", None)
    if isinstance(own, NamedSharding) and own.mesh == mesh:
        return x
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def _named_by(calls: list[WatchedCall], mesh: Mesh, argument: str) -> tuple[str, ...]:
    """The mesh axes that calls on global arrays have as ``argument``, in the mesh's order."""
    named = {axis for call in calls for axis in flat_names(getattr(call.arguments, argument, None))}
    return tuple(axis for axis in mesh.axis_names if axis in named)


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _merged(params: Any, floats: list[Any]) -> Any:
    """``params`` with its floating leaves replaced."""
    leaves, tree = jax.tree.flatten(params)
    replaced = iter(floats)
    return jax.tree.unflatten(tree, [next(replaced) if _is_float(x) else x for x in leaves])


def _loss_of(loss: Loss, params: Any) -> Callable[[list[Any], Any], jax.Array]:
    return lambda floats, batch: loss(_merged(params, floats), batch)


def _value_and_grad(loss: Loss, params: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Loss and gradients as a function of the floating leaves, and these."""
    floats = [x for x in jax.tree.leaves(params) if _is_float(x)]
    return jax.value_and_grad(_loss_of(loss, params)), floats
