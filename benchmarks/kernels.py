"""Benchmark of local attention on one GPU against other attention for JAX.

Every result is compared with float64 first, and wrong implementations are not timed. FLOPs are
counted as in :mod:`benchmarks.kernel_cases`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import burst_jax
from benchmarks import plot
from benchmarks.command_line import add_cases, add_outputs, require_gpus, require_outputs
from benchmarks.kernel_cases import CASES, Case
from benchmarks.results import Results, Row
from benchmarks.truth import attention_and_gradients
from burst_jax.command_line import Unusable
from pallas_kernels import (
    MOSAIC_SM80,
    MOSAIC_SM90,
    AttentionInputs,
    KVSide,
    QuerySide,
    SharedInputs,
    resolve,
)
from pallas_kernels.device import compute_capability
from pallas_kernels.timing import median_time, relative_error

OURS = MOSAIC_SM90, MOSAIC_SM80
# Accepted relative error: twice what rounding to the dtype explains.
TOLERANCE = {"bfloat16": 1.2e-2, "float16": 1.5e-3, "float32": 2e-5}


Attention = Callable[..., jax.Array]


def with_gradients(attend: Attention) -> Callable[..., tuple[jax.Array, ...]]:
    """``(q, k, v, dO, *others) -> (out, dQ, dK, dV)`` of ``attend(q, k, v, *others)``, compiled."""

    @jax.jit
    def both(
        q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, *others: Any
    ) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, *others), q, k, v)
        return out, *vjp(do)

    return both


# ``make(gradient)`` returns the attention to time, for the forward pass only or with its gradient.
Maker = Callable[[bool], Attention]


def ours(case: Case, implementation: str) -> Attention:
    """burst_attention on a mesh of one GPU."""
    mesh = jax.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
    return functools.partial(
        burst_jax.burst_attention, mesh=mesh, implementation=implementation, **case.arguments()
    )


def cudnn(case: Case) -> Attention:
    """cuDNN through ``jax.nn.dot_product_attention``.

    Raises:
      NotImplementedError: the function has no argument for a feature of the case.
    """
    if case.documents > 1:
        raise NotImplementedError("no segment ids")
    if case.per_head():
        raise NotImplementedError("no sinks, no ALiBi slopes")
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **case.options)


def pallas_example(case: Case, gradient: bool) -> Attention:
    """JAX's Pallas Triton example, with the tiles that were fastest on an H200.

    The tiles depend on whether the gradient is timed.

    Raises:
      NotImplementedError: the case has a window, grouped heads, sinks or slopes.
    """
    if case.per_head():
        raise NotImplementedError("no sinks, no ALiBi slopes")
    if case.window is not None or case.heads != case.kv_heads:
        raise NotImplementedError("no windows, no grouped heads")
    from jax.experimental.pallas.ops.gpu import attention

    # Both passes share warps and stages; with the gradient the longer backward pass decides.
    warps, stages = (4, 2) if gradient else (8, 3)
    sizes = attention.BlockSizes(128, 64, 64, 64, 64, 64)

    def attend(q, k, v):
        return attention.mha(
            q, k, v, case.segment_ids(), case.head_dim**-0.5, case.is_causal, sizes,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    return attend


def peers(case: Case, implementations: list[str]) -> dict[str, Maker]:
    """The measured attention functions by name: other attention, then ``implementations``."""
    return {
        "cuDNN": lambda _: cudnn(case),
        "Pallas example": functools.partial(pallas_example, case),
        **{name: lambda _, name=name: ours(case, name) for name in implementations},
    }


def matmul_ceiling(dtype: DTypeLike) -> float:
    """TFLOP/s of a large matmul on random data, the upper bound of all kernels."""
    size = 12288
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
    matmul = jax.jit(functools.partial(jnp.matmul, preferred_element_type=dtype))
    return 2e-12 * size**3 / median_time(lambda: matmul(a, b), seconds=0.2)


class KernelInputs:
    """A case's arrays, and float64 results of the first and the last key head."""

    def __init__(self, case: Case, dtype: DTypeLike):
        self.case = case
        keys = jax.random.split(jax.random.key(1), 4)
        wide = (case.batch, case.length, case.heads, case.head_dim)
        narrow = (case.batch, case.length, case.kv_heads, case.head_dim)
        self.q, self.do = (jax.random.normal(key, wide, dtype) for key in keys[:2])
        self.k, self.v = (jax.random.normal(key, narrow, dtype) for key in keys[2:])
        self.spec = case.request().spec
        ids = case.segment_ids()
        self.positions = jnp.arange(case.length, dtype=jnp.int32)
        self.segment_ids = None if ids is None else jnp.asarray(ids)
        self._samples = sorted({(0, 0), (case.batch - 1, case.kv_heads - 1)})
        self._truth = [
            attention_and_gradients(
                self.spec,
                self.positions,
                self.segment_ids,
                *(
                    self._sample(name, getattr(self, name), sample)
                    for name in ("q", "k", "v", "do")
                ),
                per_head={name: self._heads(x, sample) for name, x in case.per_head().items()},
            )
            for sample in self._samples
        ]

    def _sample(self, name: str, x: jax.Array, sample: tuple[int, int]) -> jax.Array:
        """One key head of one sequence, or its query heads; ``sample`` is ``(sequence, head)``."""
        row, head = sample
        if name in ("k", "v", "dk", "dv"):
            return x[row, :, head]
        return self._heads(x[row].swapaxes(0, 1), sample).swapaxes(0, 1)

    def _heads(self, x: jax.Array, sample: tuple[int, int]) -> jax.Array:
        """The query heads (first dimension) of the sample's key head."""
        groups = self.case.heads // self.case.kv_heads
        return x[sample[1] * groups : (sample[1] + 1) * groups]

    def errors(self, **results: jax.Array) -> dict[str, float]:
        """The relative error of each result, named out, dq, dk or dv."""
        errors = {}
        for name, array in results.items():
            error = 0.0
            for sample, truth in zip(self._samples, self._truth, strict=True):
                part = self._sample(name, array, sample)
                with jax.enable_x64(True):
                    error = max(error, relative_error(part, truth[name]))
            errors[name] = error
        return errors


def measure(inputs: KernelInputs, peer: str, make: Maker, limit: float) -> Row:
    """Checks and times one implementation on one case.

    Args:
      inputs: the case and its arrays.
      peer: name of the implementation in the table.
      make: returns the implementation.
      limit: accepted relative error.
    """
    row = Row(inputs.case.name, peer)
    arrays = inputs.q, inputs.k, inputs.v
    try:
        forward = jax.jit(make(False))
        both = with_gradients(make(True))
        alone = inputs.errors(out=forward(*arrays))
        names = ("out", "dq", "dk", "dv")
        gradients = dict(zip(names, both(*arrays, inputs.do), strict=True))
        errors = inputs.errors(**gradients)
        del gradients
    except Exception as error:  # The table has the reason, and the benchmark continues.
        row.note = " ".join(f"{type(error).__name__}: {error}".split())[:60]
        return row
    if not row.agrees(limit, alone, errors):
        return row
    tera = inputs.case.flops() / 1e12
    row.forward = tera / median_time(lambda: forward(*arrays))
    tera_both = inputs.case.flops_with_gradients() / 1e12
    row.both = tera_both / median_time(lambda: both(*arrays, inputs.do))
    return row


def local_times(measured: KernelInputs, name: str) -> dict[str, float]:
    """Times the kernels of an implementation, and the cost of masks and of the ring's carry.

    Returns:
      Seconds by name:

      - "forward", "backward": the kernels with the case's mask.
      - "carried": the forward kernel that merges its result into ``(o, lse)`` in place, as in a
        ring.
      - "forward, unmasked", "backward, unmasked": the kernels over the same tiles without masking
        inside them. The result is wrong; the time is that of the tiles without the mask.
    """
    tokens = {"positions": measured.positions, "segment_ids": measured.segment_ids}
    inputs = AttentionInputs(
        QuerySide(measured.q, **tokens),
        KVSide(measured.k, measured.v, **tokens),
        SharedInputs().with_per_head(measured.case.per_head()),
    )
    implementation = resolve(
        name, platform="gpu", compute_capability=compute_capability(), inputs=inputs
    )
    assert implementation.backward is not None
    bounds, tables = (
        jax.jit(functools.partial(of, spec=measured.spec))(inputs)
        for of in (implementation.forward_bounds, implementation.backward_bounds)
    )
    forward = functools.partial(implementation.forward, spec=measured.spec)
    fresh, carried = jax.jit(forward), jax.jit(forward, donate_argnums=2)
    o, lse = fresh(inputs, bounds)
    stats = jnp.stack([lse, jnp.zeros_like(lse)])
    query = inputs.query._replace(do=measured.do, stats=stats)
    backward_inputs = inputs._replace(query=query)
    backward = jax.jit(functools.partial(implementation.backward, spec=measured.spec))
    state = (o, lse + 0)

    def step():
        nonlocal state
        state = carried(inputs, bounds, state)
        return state

    times = {"carried": median_time(step)}
    for suffix, of in (("", lambda tables: tables), (", unmasked", _unmasked)):
        ahead, back = of(bounds), of(tables)
        times |= {
            "forward" + suffix: median_time(lambda b=ahead: fresh(inputs, b)),
            "backward" + suffix: median_time(lambda b=back: backward(backward_inputs, b)),
        }
    return times


def _unmasked(tables: Any) -> Any:
    """Bounds in which every partially masked tile is unmasked."""

    def unmask(table):
        first, _, _, end = jnp.moveaxis(table, -1, 0)
        return jnp.stack([first, first, end, end], axis=-1)

    return jax.tree.map(unmask, tables)


def gpu_implementations(compute_capability: float | None) -> list[str]:
    """Names of this project's implementations that support the GPU, fastest first.

    Raises:
      NotImplementedError: none does.
    """
    reasons = {each.name: each.unavailable("gpu", compute_capability) for each in OURS}
    if all(reasons.values()):
        raise NotImplementedError("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    return [name for name, why in reasons.items() if why is None]


def add_command(commands: Any) -> None:
    """Adds ``kernels`` to the command line."""
    parser = commands.add_parser("kernels", help=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TOLERANCE))
    parser.add_argument(
        "--implementations", nargs="+", choices=[each.name for each in OURS],
        help="default: all that support this GPU",
    )  # fmt: skip
    add_cases(parser, [case.name for case in CASES])
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the table, saves and draws it."""
    require_gpus("benchmarks kernels")
    require_outputs(args.json, args.png)
    try:
        implementations = args.implementations or gpu_implementations(compute_capability())
    except NotImplementedError as error:
        raise Unusable(str(error)) from error
    dtype = jnp.dtype(args.dtype)
    results = Results(
        jax.devices()[0].device_kind, jax.__version__, args.dtype, matmul_ceiling(dtype)
    )
    print(
        f"{results.device}, jax {results.jax}, {results.dtype}; "
        f"a large matmul: {results.matmul:.0f} TFLOP/s\n"
        "TFLOP/s (share of the matmul's); error: largest relative error of out, dq, dk, dv\n"
    )
    heading = f"{'case':32}{'':16}{'forward':>13}{'fwd + bwd':>13}{'error':>9}"
    print(heading + "\n" + "-" * len(heading))
    for index in args.cases:
        inputs = KernelInputs(CASES[index], dtype)
        timed = []
        for peer, make in peers(inputs.case, implementations).items():
            row = measure(inputs, peer, make, TOLERANCE[args.dtype])
            print(_line(row, results.matmul), flush=True)
            results.rows.append(row)
            if peer in implementations and not row.note:
                timed.append(peer)
        for name in timed:
            _print_shares(inputs, name)
        del inputs
        # After every case, so that a later failure loses nothing.
        if args.json is not None:
            results.save(args.json)
    if args.png is not None:
        plot.draw(results, args.png)


def _print_shares(inputs: KernelInputs, name: str) -> None:
    """Prints the cost of the carry and of the mask for one of this project's implementations."""
    times = local_times(inputs, name)
    notes = [f"with the carry {times['carried'] / times['forward']:.3f} times as long"]
    if inputs.case.window is not None or inputs.case.documents > 1:
        for what in ("forward", "backward"):
            share = times[what] / times[what + ", unmasked"]
            notes.append(f"{what} {share:.3f} times the same tiles unmasked")
    for note in notes:
        print(f"{'':32}{name}: {note}", flush=True)


def _line(row: Row, ceiling: float) -> str:
    if row.note:
        return f"{row.case:32}{row.peer:16}  {row.note}"
    rates = (f"{rate:5.0f} ({100 * rate / ceiling:3.0f} %)" for rate in (row.forward, row.both))
    return f"{row.case:32}{row.peer:16}{''.join(f'{rate:>13}' for rate in rates)}{row.error:9.1e}"
