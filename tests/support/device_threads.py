"""Programs for a mesh, evaluated by NumPy: a thread for each device, nothing is compiled.

Compiling a training step of a small model takes XLA ten seconds or more, evaluating its equations
on four devices two or three. The equations are those that JAX traced from the library, with their
collectives. What XLA makes of them is not shown: quick tests compile programs of the same kinds.

A collective waits for the devices of its group. Devices that run different collectives, as where
control flow differs between them, raise; on GPUs they would wait for each other forever.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy_jaxprs
from implementations import quick_jit

_SECONDS = 300  # That a device waits for the others.


def jitted(function: Any) -> Callable[..., Any]:
    """A program of ``function``; what is one already stays it."""
    return function if hasattr(function, "trace") else quick_jit(function)


def evaluated(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, for arguments of any kind; its results are NumPy's.

    Before JAX 0.12, whose programs have other parameters, it is compiled.
    """
    if jax.__version_info__ < (0, 12):
        program = jitted(function)
        return lambda *args: jax.device_get(program(*args))

    traced: dict[Any, Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        key = structure, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        if key not in traced:
            traced[key] = _traced(function, *args)
        return traced[key](*jax.device_get(args))

    return run


def _traced(function: Any, *args: Any) -> Callable[..., Any]:
    """A training step reads its arguments' shardings before it is traced."""
    if not hasattr(function, "trace"):
        return numpy_jaxprs.traced(function, *args)
    found = function.trace(*args)
    jaxpr, structure = found.jaxpr, jax.tree.structure(found.out_info)

    def run(*args: Any) -> Any:
        leaves = numpy_jaxprs.evaluate(jaxpr, jaxpr.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(structure, leaves)

    return run


class Group:
    """Devices that exchange values."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, what: Any, value: Any) -> list[Any]:
        self.values[rank] = what, value
        self.barrier.wait(_SECONDS)
        found: Any = list(self.values)
        self.barrier.wait(_SECONDS)
        names = {name for name, _ in found}
        assert len(names) == 1, f"devices of a group run different collectives: {names}"
        return [each for _, each in found]


@dataclasses.dataclass(frozen=True)
class _Device:
    """Where a thread is: its index along each axis of meshes, and what all threads share."""

    sizes: dict[str, int]
    index: dict[str, int]
    groups: dict[Any, Group]
    lock: Any

    def group(self, axes: tuple[str, ...]) -> tuple[int, Group]:
        """The own rank among the devices along these axes, the last of which varies fastest."""
        sizes = [self.sizes[axis] for axis in axes]
        rank = int(np.ravel_multi_index([self.index[axis] for axis in axes], sizes))
        others = tuple((axis, i) for axis, i in self.index.items() if axis not in axes)
        with self.lock:
            group = self.groups.setdefault((axes, others), Group(math.prod(sizes)))
        return rank, group


_here = threading.local()


def _blocks(shape: tuple[int, ...], spec: Any, device: _Device) -> tuple[slice, ...]:
    """What a device has of an array."""
    found = [slice(None)] * len(shape)
    for dim, entry in enumerate(spec):
        axes = [x for x in _names(entry) if x in device.index]
        if axes:
            sizes = [device.sizes[axis] for axis in axes]
            rank = int(np.ravel_multi_index([device.index[axis] for axis in axes], sizes))
            size, rest = divmod(shape[dim], math.prod(sizes))
            assert rest == 0
            found[dim] = slice(rank * size, (rank + 1) * size)
    return tuple(found)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _shard_map(params, avals):
    program, mesh = numpy_jaxprs.program_of(params["jaxpr"]), params["mesh"]
    manual = params.get("newly_manual_axes") or params.get("manual_axes")
    axes = [axis for axis in mesh.axis_names if axis in manual]
    sizes = {axis: mesh.shape[axis] for axis in axes}
    in_specs, out_specs = params["in_specs"], params["out_specs"]

    def run(*args):
        outer = getattr(_here, "device", None) or _Device({}, {}, {}, threading.Lock())
        devices = [
            dataclasses.replace(
                outer,
                sizes=outer.sizes | sizes,
                index=outer.index | dict(zip(axes, index, strict=True)),
            )
            for index in itertools.product(*(range(sizes[axis]) for axis in axes))
        ]
        results: list[Any] = [None] * len(devices)

        def on(number: int) -> None:
            device = _here.device = devices[number]
            given = [
                x[_blocks(np.shape(x), spec, device)]
                for x, spec in zip(args, in_specs, strict=True)
            ]
            try:
                with np.errstate(all="ignore"):
                    results[number] = program(*(x[()] for x in given))
            except BaseException as error:
                results[number] = error
                for group in list(device.groups.values()):
                    group.barrier.abort()

        threads = [threading.Thread(target=on, args=(i,)) for i in range(len(devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [x for x in results if isinstance(x, BaseException)]
        errors.sort(key=lambda x: isinstance(x, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return [
            _assembled(aval, spec, devices, [result[i] for result in results], params["check_vma"])
            for i, (aval, spec) in enumerate(zip(avals, out_specs, strict=True))
        ]

    return run


def _assembled(aval, spec, devices, parts, checked):
    """An output of all devices; those that have the same part of it must have the same values."""
    whole, written = np.empty(aval.shape, aval.dtype), {}
    for device, part in zip(devices, parts, strict=True):
        at = _blocks(aval.shape, spec, device)
        key = str(at)
        if key not in written:
            whole[at] = written[key] = part
        elif checked:
            np.testing.assert_array_equal(part, written[key])
    return whole[()]


# --- collectives -----------------------------------------------------------------------------


def _exchanged(what: str, axes: Any, value: Any) -> tuple[int, list[Any]]:
    device = _here.device
    rank, group = device.group(_names(axes))
    return rank, group.exchange(rank, (what, np.shape(value)), value)


def _reduced(function):
    """A reduction over devices, in their order; sums of narrow numbers are float32."""

    def rule(params, avals):
        assert params.get("axis_index_groups") is None

        def run(*args):
            out = []
            for x in args:
                _, parts = _exchanged(function.__name__, params["axes"], x)
                out.append(_in_order(function, parts))
            return out if len(avals) > 1 else out[0]

        return run

    return rule


def _in_order(function, parts):
    dtype = parts[0].dtype
    wide = np.float32 if dtype.itemsize < 4 and dtype.kind not in "biu" else dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = function(total, part.astype(wide))
    return total.astype(dtype)


def _all_gather(params, _):
    assert params["axis_index_groups"] is None
    join = np.concatenate if params["tiled"] else np.stack

    def run(x):
        _, parts = _exchanged("all_gather", params["axis_name"], x)
        return join(parts, params["all_gather_dimension"])

    return run


def _reduce_scatter(params, _):
    assert params["axis_index_groups"] is None
    dim = params["scatter_dimension"]

    def run(x):
        rank, parts = _exchanged("reduce_scatter", params["axis_name"], x)
        split = [np.split(part, len(parts), dim)[rank] for part in parts]
        total = _in_order(np.add, split)
        return total if params["tiled"] else total.squeeze(dim)

    return run


def _all_to_all(params, _):
    assert params["axis_index_groups"] is None
    split, concat = params["split_axis"], params["concat_axis"]

    def run(x):
        rank, parts = _exchanged("all_to_all", params["axis_name"], x)
        mine = [np.split(part, len(parts), split)[rank] for part in parts]
        return np.concatenate(mine, concat)  # Without tiles JAX adds a dimension before.

    return run


def _ppermute(params, _):
    sources = {to: source for source, to in params["perm"]}
    assert len(sources) == len(params["perm"])

    def run(x):
        # Of those that permute, XLA's devices wait for all, not for their group alone.
        _exchanged("ppermute", tuple(_here.device.index), np.zeros(()))
        rank, parts = _exchanged(f"ppermute {params['perm']}", params["axis_name"], x)
        return parts[sources[rank]] if rank in sources else np.zeros_like(x)

    return run


def _axis_index(params, _):
    def run():
        rank, _ = _here.device.group(_names(params["axis_name"]))
        return np.int32(rank)

    return run


def _unchanged(*_):
    return lambda *xs: xs[0] if len(xs) == 1 else xs


numpy_jaxprs.RULES |= {
    "shard_map": _shard_map, "all_gather": _all_gather, "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all, "ppermute": _ppermute,
    "axis_index": _axis_index, "psum": _reduced(np.add), "psum_invariant": _reduced(np.add),
    "pmax": _reduced(np.maximum), "pmin": _reduced(np.minimum),
    **dict.fromkeys(("pvary", "pcast", "reshard", "mesh_cast", "name"), _unchanged),
    **dict.fromkeys(("sharding_constraint", "layout_constraint"), _unchanged),
}  # fmt: skip
