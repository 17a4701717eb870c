"""Programs lowered for GPUs that are not here, in files.

Lowering is Python on one core, up to minutes for a benchmark; a host with GPUs costs more than one
without. A folder has a file for each program, :func:`jax.export.export`'s, compressed, and
``programs.json``, which says how each is called. Both sides need the same version of JAX, and the
package ``flatbuffers``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import burst_jax
from pallas_kernels.device import listed_capability

TABLE = "programs.json"
# What export refuses by default: its calling conventions may change with JAX's version.
_UNSTABLE = ("mosaic_gpu", "mosaic_gpu_v2", "LayoutConstraint")


class Values(NamedTuple):
    """What an argument holds: draws of a normal or uniform distribution, or an array's values.

    Attributes:
      kind: "normal", times ``high``; "uniform", from ``low`` to ``high`` (integers below
        ``high``); or "array".
      low: as above.
      high: as above.
      array: of kind "array".
    """

    kind: str = "normal"
    low: float = 0.0
    high: float = 1.0
    array: np.ndarray | None = None


class Argument(NamedTuple):
    """Shape, dtype and sharding of an argument, on devices that may not be here, and its values."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    values: Values = Values()

    def on(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """For lowering."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=NamedSharding(mesh, self.spec))

    def put(self, mesh: Mesh, seed: int) -> jax.Array:
        """Its values on a mesh of devices that are here."""
        sharding = NamedSharding(mesh, self.spec)
        if self.values.kind == "array":
            return jax.device_put(self.values.array, sharding)
        return _drawn(self.shape, jnp.dtype(self.dtype), sharding, *self.values[:3], seed)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _drawn(
    shape: tuple[int, ...],
    dtype: Any,
    sharding: NamedSharding,
    kind: str,
    low: float,
    high: float,
    seed: jax.Array | int,
) -> jax.Array:
    key = jax.random.key(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        x = jax.random.randint(key, shape, int(low), int(high), dtype)
    elif kind == "uniform":
        x = jax.random.uniform(key, shape, jnp.float32, low, high).astype(dtype)
    else:
        x = high * jax.random.normal(key, shape, dtype)
    return lax.with_sharding_constraint(x, sharding)


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A program that is lowered here, and how it is timed elsewhere.

    Attributes:
      group: programs of a group are timed in turns, and compared with the group's first one.
      name: in the table.
      mesh: its devices, described ones.
      function: of flat arrays.
      arguments: these.
      flops: of one call, by each device; 0 if not counted.
      tokens: of one call, over all devices; 0 if not counted.
      carried: number of arguments, the first ones, that a call replaces by its first results.
      overlaps: whether it is compiled with :func:`burst_jax.compiler_options`.
    """

    group: str
    name: str
    mesh: Mesh
    function: Callable[..., Any]
    arguments: Sequence[Argument]
    flops: float = 0.0
    tokens: int = 0
    carried: int = 0
    overlaps: bool = True


class Ready(NamedTuple):
    """A program of a folder on this machine's devices.

    Attributes:
      row: its entry in the table: "group", "name", "flops", "tokens", "devices" and more.
      lowered: to be compiled, with ``options``.
      options: compiler options.
      arguments: makes the arrays.
    """

    row: dict[str, Any]
    lowered: Any
    options: Any
    arguments: Callable[[], list[jax.Array]]


def described_mesh(
    target: str, shape: tuple[int, ...], names: tuple[str, ...], *, hosts: int = 1
) -> Mesh:
    """A mesh of GPUs that are not here.

    Args:
      target: "a100", "h100" or "h200".
      shape: sizes of the axes.
      names: names of the axes.
      hosts: of as many GPUs each.
    """
    description = resources.files(burst_jax) / "gpu_targets" / f"{target}.txtpb"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description.read_text(),
        topology=f"1x{hosts}x{math.prod(shape) // hosts}",
    )  # fmt: skip
    return topologies.make_mesh(topology, shape, names)


@contextlib.contextmanager
def lowering_for(mesh: Mesh) -> Iterator[None]:
    """Kernels that are traced inside are those of the mesh's GPUs."""
    capability = listed_capability(mesh.devices.flat[0].device_kind)
    assert capability is not None
    architecture = divmod(round(10 * capability), 10)
    with mock.patch.object(utils, "_infer_arch", return_value=architecture):
        yield


class Writer:
    """A folder that programs are written to.

    Args:
      folder: it is made if missing; programs of other runs stay.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._table = folder, folder / TABLE
        self._rows = json.loads(self._table.read_text()) if self._table.exists() else []

    def write(self, program: Ahead) -> int:
        """Lowers a program and writes it, in the place of one of the same group and name.

        Returns:
          Bytes of its file.
        """
        mesh = program.mesh
        file = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{program.group}--{program.name}")
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in _UNSTABLE]

        def flat(*arrays: Any) -> list[Any]:  # Export knows no classes of ours.
            return jax.tree.leaves(program.function(*arrays))

        exporting = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=checks)
        with lowering_for(mesh):
            exported = exporting(*(each.on(mesh) for each in program.arguments))
        data = zlib.compress(bytes(exported.serialize()), 9)
        (self._folder / f"{file}.z").write_bytes(data)
        arrays = {
            str(i): each.values.array
            for i, each in enumerate(program.arguments)
            if each.values.array is not None
        }
        if arrays:
            held = io.BytesIO()
            np.savez_compressed(held, allow_pickle=False, **arrays)
            (self._folder / f"{file}.npz").write_bytes(held.getvalue())
        row = {
            "group": program.group, "name": program.name, "file": file, "jax": jax.__version__,
            "devices": mesh.size, "shape": list(mesh.devices.shape), "axes": list(mesh.axis_names),
            "flops": program.flops, "tokens": program.tokens, "carried": program.carried,
            "overlaps": program.overlaps,
            "arguments": [
                [list(x.shape), jnp.dtype(x.dtype).name, [_names(each) for each in x.spec],
                 *x.values[:3]]
                for x in program.arguments
            ],
        }  # fmt: skip
        # In the old one's place: the first program of a group is what others are compared with.
        files = [each["file"] for each in self._rows]
        at = files.index(file) if file in files else len(files)
        self._rows[at : at + 1] = [row]
        self._table.write_text(json.dumps(self._rows))
        return len(data)


def _names(entry: Any) -> Any:
    return list(entry) if isinstance(entry, tuple) else entry


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder's programs."""
    rows: list[dict[str, Any]] = json.loads((folder / TABLE).read_text())
    return rows


def load(folder: Path, row: dict[str, Any]) -> Ready:
    """A folder's program, to be compiled for this machine's first GPUs."""
    devices = np.array(jax.devices()[: row["devices"]]).reshape(row["shape"])
    mesh = Mesh(devices, tuple(row["axes"]), axis_types=(AxisType.Auto,) * devices.ndim)
    file = folder / row["file"]
    stored = np.load(f"{file}.npz") if Path(f"{file}.npz").exists() else {}
    arguments = [
        Argument(
            tuple(shape), jnp.dtype(dtype),
            PartitionSpec(*(tuple(x) if isinstance(x, list) else x for x in spec)),
            Values(kind, low, high, stored[str(i)] if kind == "array" else None),
        )
        for i, (shape, dtype, spec, kind, low, high) in enumerate(row["arguments"])
    ]  # fmt: skip
    exported = export.deserialize(bytearray(zlib.decompress(Path(f"{file}.z").read_bytes())))
    carried = row["carried"]
    # Else XLA might shard a result in another way than the argument that it replaces.
    shardings: list[Any] = [NamedSharding(mesh, each.spec) for each in arguments[:carried]]
    shardings += [None] * (len(exported.out_avals) - carried)
    call = jax.jit(exported.call, donate_argnums=tuple(range(carried)), out_shardings=shardings)
    lowered = call.trace(*(each.on(mesh) for each in arguments)).lower()
    options = burst_jax.compiler_options() if row["overlaps"] else {}
    return Ready(
        row, lowered, options, lambda: [each.put(mesh, i) for i, each in enumerate(arguments)]
    )
