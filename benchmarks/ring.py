"""Benchmark of rings of all GPUs against other strategies on the same GPUs.

Every strategy gets the same q, k, v and do, in its layout, and computes the forward pass, and the
forward pass with the gradients of q, k and v. Before a strategy is timed, its results are compared
with those of the first one that ran (one GPU with the whole sequence, where that fits). FLOPs are
counted as in ``benchmarks kernels``, per GPU; the table has each rate as a fraction of the rate of
one GPU alone with the same kernels and length.
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
from benchmarks.command_line import add_cases, add_outputs, require_gpus, require_outputs
from benchmarks.kernels import TOLERANCE, Case, matmul_ceiling
from benchmarks.results import Results, Row, gib
from burst_jax.command_line import Unusable
from burst_jax.parallel.mesh import AxisNames, axes_size, flat_names
from burst_jax.parallel.xla_options import XlaOptions
from burst_jax.ring.rotation import RotationChoice
from pallas_kernels.timing import median_time, relative_error

ALONE, ALL_ALONE, ZIGZAG = "one GPU", "every GPU alone", "zigzag"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One strategy to compute attention over a sequence on several GPUs.

    Attributes:
      mesh: the devices that it uses.
      attend: ``(q, k, v) -> out``, arrays in ``layout``.
      axes: mesh axes that shard the sequence.
      layout: the layout.
      shards: number of shards of the layout.
      copies: number of copies of the whole work that run at once, on different devices.
      options: compiler options for ``jax.jit``.
    """

    mesh: Mesh
    attend: Callable[..., jax.Array]
    axes: tuple[str, ...]
    layout: str
    shards: int
    copies: int = 1
    options: XlaOptions = dataclasses.field(default_factory=dict)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of q, k, v and all results."""
        return NamedSharding(self.mesh, P("copies" if self.copies > 1 else None, self.axes))

    @property
    def order(self) -> tuple[str, int, int, NamedSharding]:
        """The last arguments of :func:`_random`."""
        return self.layout, self.shards, self.copies, self.sharding


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def ring(
    case: Case,
    n: int,
    layout: str = "zigzag",
    *,
    shape: tuple[int, ...] = (),
    seq_axis: AxisNames = "seq",
    ulysses_axis: str | None = None,
    backward: RotationChoice = "auto",
    peer_copies: bool | None = None,
) -> Strategy:
    """burst_attention on ``n`` devices with these arguments.

    ``shape`` has the sizes of the mesh axes in ``seq_axis`` and ``ulysses_axis``; () is one axis of
    all devices.
    """
    names = flat_names(seq_axis, ulysses_axis)
    mesh = _mesh(shape or (n,), names)
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh, seq_axis=seq_axis, layout=layout,
        ulysses_axis=ulysses_axis, backward=backward, **case.options,
    )  # fmt: skip
    shards = axes_size(mesh, seq_axis)
    xla = burst_jax.compiler_options(peer_copies=peer_copies)
    return Strategy(mesh, attend, names, layout, shards, options=xla)


def cudnn(case: Case) -> Callable[..., jax.Array]:
    """cuDNN on one device's arrays."""
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **case.options)


def alone(case: Case, attend: Callable[..., jax.Array] | None = None) -> Strategy:
    """One GPU with the whole sequence, by ``attend`` or else by burst_attention."""
    strategy = ring(case, 1, "contiguous")
    return strategy if attend is None else dataclasses.replace(strategy, attend=attend)


def all_alone(case: Case, n: int) -> Strategy:
    """Every GPU computes the whole sequence on its own, all at once: the slowest one decides."""
    mesh = _mesh((n, 1), ("copies", "seq"))
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh, batch_axis="copies", **case.options
    )
    return Strategy(mesh, attend, ("seq",), "contiguous", 1, copies=n)


def ulysses(case: Case, n: int) -> Strategy:
    """Ulysses: all-to-all to shards of the heads, cuDNN on the whole sequence, all-to-all back.

    Raises:
      NotImplementedError: the devices cannot share the key heads equally.
    """
    if case.kv_heads % n:
        raise NotImplementedError(f"{case.kv_heads} key heads for {n} devices")
    mesh = _mesh((n,), ("seq",))
    all_to_all = functools.partial(lax.all_to_all, axis_name="seq", tiled=True)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=False
    )
    def attend(q, k, v):
        q, k, v = (all_to_all(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        return all_to_all(cudnn(case)(q, k, v), split_axis=1, concat_axis=2)

    return Strategy(mesh, attend, ("seq",), "contiguous", n)


def all_gather(case: Case, n: int) -> Strategy:
    """Keys and values all-gathered on every device, and cuDNN.

    Raises:
      NotImplementedError: the case is causal.
    """
    if case.is_causal:
        raise NotImplementedError("cuDNN through JAX has no offset of the first query")
    mesh = _mesh((n,), ("seq",))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"), check_vma=False
    )
    def attend(q, k, v):
        k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        return cudnn(case)(q, k, v)

    return Strategy(mesh, attend, ("seq",), "contiguous", n)


def strategies(case: Case, n: int) -> dict[str, Callable[[], Strategy]]:
    """Constructors of the strategies by name; they raise for an unsupported case."""

    def by_two(what: str, shape: tuple[int, int], **options: Any) -> Strategy:
        if n % 2 or n < 4:
            raise NotImplementedError(f"{n} devices cannot form a {what}")
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
            "ring of two levels", (2, n // 2), seq_axis=("outer", "inner")
        ),
        "ring + Ulysses of 2": lambda: by_two(
            "ring of pairs", (n // 2, 2), ulysses_axis="heads"
        ),
        "Ulysses": lambda: ring(
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
    "Ulysses",
    "Ulysses, cuDNN",
)
_ROTATIONS = ("zigzag, rotate_kv", "zigzag, rotate_query", "zigzag, NCCL")
_LEVELS = ("two-level ring", "ring + Ulysses of 2")
# Each case, and the names of its strategies.
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
    layout: str,
    shards: int,
    copies: int,
    sharding: NamedSharding,
) -> jax.Array:
    """Random bfloat16 values, the same tokens in any layout and on any devices."""
    x = burst_jax.to_layout(jax.random.normal(key, shape, jnp.bfloat16), layout, shards)
    return lax.with_sharding_constraint(jnp.concatenate([x] * copies), sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _natural(
    x: jax.Array, layout: str, shards: int, copies: int, sharding: NamedSharding
) -> jax.Array:
    """``x`` in natural order; the last one of several copies."""
    x = x[-(x.shape[0] // copies) :]
    return lax.with_sharding_constraint(burst_jax.from_layout(x, layout, shards), sharding)


class RingInputs:
    """A case's arrays for any strategy, and the results that all must agree with."""

    def __init__(self, case: Case, n: int):
        self.case = case
        self._everywhere = NamedSharding(_mesh((n,), ("seq",)), P(None, "seq"))
        self._want: dict[str, jax.Array] = {}

    def arrays(self, strategy: Strategy) -> list[jax.Array]:
        """bfloat16 q, k, v and do ``[copies * B, T, heads, H]``, the same for every strategy."""
        case = self.case
        keys = jax.random.split(jax.random.key(1), 4)
        heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
        return [
            _random(key, (case.batch, case.length, count, case.head_dim), *strategy.order)
            for key, count in zip(keys, heads, strict=True)
        ]

    def errors(self, strategy: Strategy, results: dict[str, jax.Array]) -> dict[str, float]:
        """Relative difference of each result from the first strategy's, from the first call."""
        errors = {}
        for name, array in results.items():
            once = NamedSharding(strategy.mesh, P(None, strategy.axes))
            natural = _natural(array, strategy.layout, strategy.shards, strategy.copies, once)
            here = jax.device_put(natural, self._everywhere)
            errors[name] = relative_error(here, self._want.setdefault(name, here))
        return errors


def measure(inputs: RingInputs, name: str, make: Callable[[], Strategy]) -> Row:
    """Checks one strategy against the first one, and times it.

    Args:
      inputs: the case and its arrays.
      name: name of the strategy in the table.
      make: constructs the strategy.
    """
    case, row = inputs.case, Row(inputs.case.name, name)
    try:
        strategy = make()
        n = strategy.mesh.size

        def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> dict[str, jax.Array]:
            out, vjp = jax.vjp(strategy.attend, q, k, v)
            return dict(zip(("out", "dq", "dk", "dv"), (out, *vjp(do)), strict=True))

        arrays = inputs.arrays(strategy)
        lowered = [
            jax.jit(run, compiler_options=strategy.options).lower(*arguments)
            for run, arguments in ((strategy.attend, arrays[:3]), (both, arrays))
        ]
        with ThreadPoolExecutor() as pool:  # Compilation dominates.
            forward, gradient = pool.map(lambda each: each.compile(), lowered)
        row.memory = gib(gradient)
        alone_errors = inputs.errors(strategy, {"out": forward(*arrays[:3])})
        errors = inputs.errors(strategy, gradient(*arrays))
    except Exception as error:  # The table has the reason, and the benchmark continues.
        row.note = " ".join(f"{type(error).__name__}: {error}".split())[:70]
        return row
    if not row.agrees(TOLERANCE["bfloat16"], alone_errors, errors):
        return row
    tera = 1e-12 * case.flops() * strategy.copies / n
    rounds = 5 if tera < 500 else 1  # Seconds each at a million tokens.
    row.forward = tera / median_time(lambda: forward(*arrays[:3]), rounds)
    tera_both = tera * case.flops_with_gradients() / case.flops()
    row.both = tera_both / median_time(lambda: gradient(*arrays), rounds)
    return row


def add_command(commands: Any) -> None:
    """Adds ``ring`` to the command line."""
    parser = commands.add_parser("ring", help=__doc__.splitlines()[0])
    add_cases(parser, [case.name for case, _ in CASES])
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="default: all of the cases")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the table, saves and draws it."""
    known = {name for index in args.cases for name in CASES[index][1]}
    unknown = [name for name in args.strategies or () if name not in known]
    if unknown:
        raise Unusable(f"--strategies {unknown}: these cases have {', '.join(sorted(known))}")
    require_gpus("benchmarks ring", 2)
    require_outputs(args.json, args.png)
    n = len(jax.devices())
    results = Results(
        jax.devices()[0].device_kind, jax.__version__, "bfloat16", matmul_ceiling(jnp.bfloat16), n
    )
    print(
        f"{n} x {results.device}, jax {results.jax}, bfloat16, head dim 128, causal unless full; "
        f"a large matmul on one: {results.matmul:.0f} TFLOP/s\n"
        "TFLOP/s per GPU (share of one GPU's); GiB per GPU of forward and backward; the largest "
        "difference from the first strategy\n"
    )
    heading = f"{'case':34}{'strategy':22}{'forward':>13}{'fwd + bwd':>13}{'GiB':>7}{'error':>9}"
    print(heading + "\n" + "-" * len(heading))
    for index in args.cases:
        case, names = CASES[index]
        inputs, makers, own = RingInputs(case, n), strategies(case, n), None
        for name in names:
            if args.strategies is not None and name not in args.strategies:
                continue
            row = measure(inputs, name, makers[name])
            own = row if name == ALONE else own
            print(_line(row, own), flush=True)
            results.rows.append(row)
        del inputs
        # After every case, so that a later failure loses nothing.
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
