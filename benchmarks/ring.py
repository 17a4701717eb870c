"""Times rings of all GPUs present beside other ways to use those GPUs: ``bench ring``.

Every way gets the same q, k, v and do, in the layout that it needs, and computes the forward pass
alone and with the gradients of q, k and v. Before a way is timed, its results are compared with the
results of the first way that ran (one GPU with the whole sequence, where that fits). TFLOP/s are
counted as in ``bench kernels``, per GPU; the table gives each rate as a share of the rate that one
GPU alone reaches with the same kernels and length.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import burst_jax
from benchmarks import plot
from benchmarks.kernels import Case, matmul_ceiling
from benchmarks.needs import add_outputs, need_gpus, need_outputs
from benchmarks.results import Results, Row, gib
from burst_jax.layouts.permutation import Layout
from burst_jax.parallel.mesh import AxisNames, axes_size, flat_names
from burst_jax.parallel.xla_options import XlaOptions
from burst_jax.ring.rotation import RotationChoice
from pallas_kernels.timing import median_time, relative_error

ALONE, ALL_ALONE, ZIGZAG = "one GPU", "every GPU alone", "zigzag"
# Largest relative difference between two ways in bfloat16: each way rounds its own sums.
_AGREE = 1.2e-2


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to attend over a sequence that several GPUs hold.

    Attributes:
      mesh: mesh of the devices that the way uses.
      attend: ``(q, k, v) -> out``, arrays in the order of ``layout``.
      axes: mesh axes that the sequence is split over.
      layout: order of the tokens.
      shards: number of shards of ``layout``.
      copies: how many times the whole work is done at once, on different devices.
      options: compiler options for ``jax.jit``.
    """

    mesh: Mesh
    attend: Callable[..., jax.Array]
    axes: tuple[str, ...]
    layout: Layout
    shards: int
    copies: int = 1
    options: XlaOptions = dataclasses.field(default_factory=dict)

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of q, k, v and all results."""
        return NamedSharding(self.mesh, P("copies" if self.copies > 1 else None, self.axes))

    @property
    def order(self) -> tuple[Layout, int, int, NamedSharding]:
        """Layout, its shards, copies and sharding: the last arguments of :func:`_random`."""
        return self.layout, self.shards, self.copies, self.sharding


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def ring(
    case: Case,
    n: int,
    layout: Layout = "zigzag",
    *,
    shape: tuple[int, ...] = (),
    seq_axis: AxisNames = "seq",
    ulysses_axis: str | None = None,
    backward: RotationChoice = "auto",
    peer_copies: bool | None = None,
) -> Way:
    """burst_attention on ``n`` devices, called with the arguments of these names.

    ``shape`` is the mesh's, with a size for each axis that ``seq_axis`` and ``ulysses_axis``
    name; () is one axis of all devices.
    """
    names = flat_names(seq_axis, ulysses_axis)
    mesh = _mesh(shape or (n,), names)
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh, seq_axis=seq_axis, layout=layout,
        ulysses_axis=ulysses_axis, backward=backward, **case.options,
    )  # fmt: skip
    shards = axes_size(mesh, seq_axis)
    xla = burst_jax.compiler_options(peer_copies=peer_copies)
    return Way(mesh, attend, names, layout, shards, options=xla)


def cudnn(case: Case) -> Callable[..., jax.Array]:
    """cuDNN on one device's arrays."""
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **case.options)


def alone(case: Case, attend: Callable[..., jax.Array] | None = None) -> Way:
    """One GPU with the whole sequence, with ``attend`` or, if it is None, burst_attention."""
    way = ring(case, 1, "contiguous")
    return way if attend is None else dataclasses.replace(way, attend=attend)


def all_alone(case: Case, n: int) -> Way:
    """Every GPU attends over the whole sequence alone, all at once: the slowest one decides."""
    mesh = _mesh((n, 1), ("copies", "seq"))
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh, batch_axis="copies", **case.options
    )
    return Way(mesh, attend, ("seq",), "contiguous", 1, copies=n)


def ulysses(case: Case, n: int) -> Way:
    """Ulysses: all-to-all to parts of the heads, cuDNN on the whole sequence, all-to-all back.

    Raises:
      NotImplementedError: the devices cannot share the key heads equally.
    """
    if case.kv_heads % n:
        raise NotImplementedError(f"{case.kv_heads} key heads for {n} devices")
    mesh = _mesh((n,), ("seq",))
    exchange = functools.partial(lax.all_to_all, axis_name="seq", tiled=True)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=False
    )
    def attend(q, k, v):
        q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        return exchange(cudnn(case)(q, k, v), split_axis=1, concat_axis=2)

    return Way(mesh, attend, ("seq",), "contiguous", n)


def all_gather(case: Case, n: int) -> Way:
    """Keys and values gathered on every device, where cuDNN attends to them.

    Raises:
      NotImplementedError: the case is causal.
    """
    if case.is_causal:
        raise NotImplementedError("cuDNN through JAX masks no queries that start inside the keys")
    mesh = _mesh((n,), ("seq",))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=False
    )
    def attend(q, k, v):
        k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        return cudnn(case)(q, k, v)

    return Way(mesh, attend, ("seq",), "contiguous", n)


def ways(case: Case, n: int) -> dict[str, Callable[[], Way]]:
    """The ways by name; calling one makes it, and raises if it cannot do the case."""

    def by_two(what: str, shape: tuple[int, int], **options: Any) -> Way:
        if n % 2 or n < 4:
            raise NotImplementedError(f"{n} devices are no {what}")
        return ring(case, n, shape=shape, **options)

    return {
        ALONE: lambda: alone(case),
        ALL_ALONE: lambda: all_alone(case, n),
        "one GPU, cuDNN": lambda: alone(case, cudnn(case)),
        ZIGZAG: lambda: ring(case, n),
        "zigzag, rotate_kv": lambda: ring(case, n, backward="rotate_kv"),
        "zigzag, rotate_query": lambda: ring(case, n, backward="rotate_query"),
        "zigzag, NCCL": lambda: ring(case, n, peer_copies=False),
        "striped": lambda: ring(case, n, "striped"),
        "contiguous": lambda: ring(case, n, "contiguous"),
        "two-level ring": lambda: by_two(
            "two levels of two or more", (2, n // 2), seq_axis=("outer", "inner")
        ),
        "hybrid, ulysses of 2": lambda: by_two(
            "ring of two or more pairs", (n // 2, 2), ulysses_axis="heads"
        ),
        "ulysses": lambda: ring(
            case, n, "contiguous", seq_axis=None, ulysses_axis="heads"
        ),
        "all-gather, cuDNN": lambda: all_gather(case, n),
        "Ulysses, cuDNN": lambda: ulysses(case, n),
    }  # fmt: skip


_CORE = (
    ALONE,
    ALL_ALONE,
    "one GPU, cuDNN",
    ZIGZAG,
    "striped",
    "contiguous",
    "ulysses",
    "Ulysses, cuDNN",
)
_ROTATIONS = ("zigzag, rotate_kv", "zigzag, rotate_query", "zigzag, NCCL")
_LEVELS = ("two-level ring", "hybrid, ulysses of 2")
# Each case, and the names of the ways that are timed on it.
CASES: tuple[tuple[Case, tuple[str, ...]], ...] = (
    (Case("64K, 32/8 heads", 1, 65536, 32, 8, 128, True), _CORE + _ROTATIONS + _LEVELS),
    (Case("128K, 32/8 heads", 1, 131072, 32, 8, 128, True), _CORE),
    (Case("16K, 32/32 heads", 1, 16384, 32, 32, 128, True), _CORE + _ROTATIONS),
    (Case("64K, 32/32 heads", 1, 65536, 32, 32, 128, True), (ALONE, ZIGZAG, *_ROTATIONS)),
    (
        Case("64K full, 32/8 heads", 1, 65536, 32, 8, 128),
        (ALONE, "contiguous", "all-gather, cuDNN", "Ulysses, cuDNN"),
    ),
    (
        Case("window 4096 of 128K, 32/8 heads", 1, 131072, 32, 8, 128, True, window=4096),
        (ALONE, ALL_ALONE, "contiguous", ZIGZAG, "Ulysses, cuDNN"),
    ),
    *(
        (Case(f"64K, batch {batch}, 32/8 heads", batch, 65536, 32, 8, 128, True), (ALONE, ZIGZAG))
        for batch in (2, 4, 8)
    ),
    (Case("1M, 32/8 heads", 1, 1048576, 32, 8, 128, True), (ZIGZAG,)),
)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _random(
    key: jax.Array,
    shape: tuple[int, ...],
    layout: Layout,
    shards: int,
    copies: int,
    sharding: NamedSharding,
) -> jax.Array:
    """Random bfloat16 numbers of a shape, the same tokens in any layout and on any devices."""
    x = burst_jax.to_layout(jax.random.normal(key, shape, jnp.bfloat16), layout, shards)
    return lax.with_sharding_constraint(jnp.concatenate([x] * copies), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _natural(
    x: jax.Array, layout: Layout, shards: int, copies: int, sharding: NamedSharding
) -> jax.Array:
    """``x`` with its tokens in their natural order; of several copies the last one."""
    x = x[-(x.shape[0] // copies) :]
    return lax.with_sharding_constraint(burst_jax.from_layout(x, layout, shards), sharding)


class Problem:
    """A case's arrays for any way, and the results that all ways must agree with."""

    def __init__(self, case: Case, n: int):
        self.case = case
        self._everywhere = NamedSharding(_mesh((n,), ("seq",)), P(None, "seq"))
        self._want: dict[str, jax.Array] = {}

    def arrays(self, way: Way) -> list[jax.Array]:
        """bfloat16 q, k, v and do ``[copies * B, T, heads, H]``, the same numbers for every way."""
        case = self.case
        keys = jax.random.split(jax.random.key(1), 4)
        heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
        return [
            _random(key, (case.batch, case.length, count, case.head_dim), *way.order)
            for key, count in zip(keys, heads, strict=True)
        ]

    def errors(self, way: Way, results: dict[str, jax.Array]) -> dict[str, float]:
        """Relative difference of each result from the first way's, which the first call keeps."""
        errors = {}
        for name, array in results.items():
            once = NamedSharding(way.mesh, P(None, way.axes))
            natural = _natural(array, way.layout, way.shards, way.copies, once)
            here = jax.device_put(natural, self._everywhere)
            errors[name] = relative_error(here, self._want.setdefault(name, here))
        return errors


def measure(problem: Problem, name: str, make: Callable[[], Way]) -> Row:
    """Compares one way with the first way, and times it.

    Args:
      problem: the case and its arrays.
      name: name of the way in the table.
      make: makes the way.
    """
    case, row = problem.case, Row(problem.case.name, name)
    try:
        way = make()
        n = way.mesh.size

        def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> dict[str, jax.Array]:
            out, vjp = jax.vjp(way.attend, q, k, v)
            return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(do)), strict=True))

        arrays = problem.arrays(way)
        lowered = [
            jax.jit(run, compiler_options=way.options).lower(*arguments)
            for run, arguments in ((way.attend, arrays[:3]), (both, arrays))
        ]
        with ThreadPoolExecutor() as pool:  # Most of a benchmark's time is the compiler's.
            forward, gradient = pool.map(lambda each: each.compile(), lowered)
        row.memory = gib(gradient)
        alone_errors = problem.errors(way, {"out": forward(*arrays[:3])})
        errors = problem.errors(way, gradient(*arrays))
    except Exception as error:  # The table says what a way cannot do, and goes on.
        row.note = " ".join(f"{type(error).__name__}: {error}".split())[:70]
        return row
    if not row.agrees(_AGREE, alone_errors, errors):
        return row
    tera = 1e-12 * case.flops() * way.copies / n
    rounds = 5 if tera < 500 else 1  # A million tokens take seconds.
    row.forward = tera / median_time(lambda: forward(*arrays[:3]), rounds)
    row.both = 3.5 * tera / median_time(lambda: gradient(*arrays), rounds)
    return row


def add_command(commands: Any) -> None:
    """Adds ``ring`` to the command line."""
    parser = commands.add_parser("ring", help=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="I",
        choices=range(len(CASES)),
        help="; ".join(f"{i}: {case.name}" for i, (case, _) in enumerate(CASES)),
    )  # fmt: skip
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="of those in the table, these")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the table, keeps it and draws it."""
    known = {name for index in args.cases for name in CASES[index][1]}
    unknown = [name for name in args.ways or () if name not in known]
    if unknown:
        raise SystemExit(f"--ways {unknown}: these cases have {', '.join(sorted(known))}")
    need_gpus("bench ring", 2)
    need_outputs(args.json, args.png)
    n = len(jax.devices())
    results = Results(
        jax.devices()[0].device_kind, jax.__version__, "bfloat16", matmul_ceiling(jnp.bfloat16), n
    )
    print(
        f"{n} x {results.device}, jax {results.jax}, bfloat16, head dim 128, causal unless full; "
        f"a large matmul on one: {results.matmul:.0f} TFLOP/s\n"
        "TFLOP/s per GPU (share of one GPU's); GiB per GPU of forward and backward; the largest "
        "difference from the first way\n"
    )
    heading = f"{'case':34}{'way':22}{'forward':>13}{'fwd + bwd':>13}{'GiB':>7}{'error':>9}"
    print(heading + "\n" + "-" * len(heading))
    for index in args.cases:
        case, names = CASES[index]
        problem, makers, own = Problem(case, n), ways(case, n), None
        for name in names:
            if args.ways is not None and name not in args.ways:
                continue
            row = measure(problem, name, makers[name])
            own = row if name == ALONE else own
            print(_line(row, own), flush=True)
            results.rows.append(row)
        del problem
        # Saved after every case, so that a failure of the next one loses nothing.
        if args.json is not None:
            results.save(args.json)
    if args.png is not None:
        plot.draw(results, args.png)


def _line(row: Row, own: Row | None) -> str:
    start = f"{row.case:34}{row.peer:22}"
    if row.note:
        return f"{start}  {row.note}"
    cells = []
    for rate, alone_rate in (
        (row.forward, math.nan if own is None else own.forward),
        (row.both, math.nan if own is None else own.both),
    ):
        share = f" ({100 * rate / alone_rate:3.0f} %)" if alone_rate > 0 else " " * 8
        cells.append(f"{rate:5.0f}{share}")
    return f"{start}{''.join(f'{cell:>13}' for cell in cells)}{row.memory:7.2f}{row.error:9.1e}"
