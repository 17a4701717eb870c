"""Local attention on one GPU, beside what else a JAX user has: ``bench kernels``.

Every result is held to float64 first; what is wrong is not timed. FLOPs: 4 B N H per score that
counts forward, 3.5 times that forward and backward, with T^2 / 2 scores for causal masks.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import burst_jax
from burst_jax.bench import plot
from burst_jax.bench.needs import add_outputs, need_gpus, need_outputs
from burst_jax.bench.results import Results, Row
from burst_jax.bench.truth import attention_and_gradients
from burst_jax.checks import make_spec
from burst_jax.platform import compute_capability
from pallas_kernels import MOSAIC_GPU, TRITON, AttentionSpec, Tokens, resolve
from pallas_kernels.timing import median_time, relative_error

# Relative errors that rounding to the dtype explains, with a factor of two for luck.
_RIGHT = {"bfloat16": 1.2e-2, "float16": 1.5e-3, "float32": 2e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention: shape and mask."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool = False
    window: int | None = None
    documents: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """What burst_attention and dot_product_attention both take."""
        window = None if self.window is None else (self.window - 1, 0)
        return {"is_causal": self.is_causal, "local_window_size": window}

    def segment_ids(self) -> np.ndarray | None:
        """int32 ``[B, T]``, documents of unequal lengths; None if there is one only."""
        if self.documents == 1:
            return None
        weights = np.random.default_rng(0).uniform(0.5, 1.5, self.documents)
        ends = np.round(np.cumsum(weights) / weights.sum() * self.length)
        row = 1 + np.searchsorted(ends, np.arange(self.length), side="right")
        return np.tile(row.astype(np.int32), (self.batch, 1))

    def scores(self) -> float:
        """Scores that count, per batch row and head."""
        ids = self.segment_ids()
        sizes = [self.length] if ids is None else np.bincount(ids[0])[1:].tolist()
        total = 0.0
        for size in sizes:
            reach = min(self.window or size, size)
            if self.window is not None:
                total += size * reach - reach * (reach - 1) / 2
            else:
                total += size * size / (2 if self.is_causal else 1)
        return total

    def flops(self) -> float:
        """Floating-point operations forward."""
        return 4 * self.batch * self.heads * self.head_dim * self.scores()


CASES = (
    Case("full", 1, 16384, 32, 32, 128),
    Case("causal", 1, 16384, 32, 32, 128, is_causal=True),
    Case("causal, 32/8 heads", 1, 16384, 32, 8, 128, is_causal=True),
    Case("causal, 32K, 32/8 heads", 1, 32768, 32, 8, 128, is_causal=True),
    Case("full, head dim 64", 4, 4096, 32, 32, 64),
    Case("causal, head dim 64", 4, 4096, 32, 32, 64, is_causal=True),
    Case("window 4096 of 64K, 32/8 heads", 1, 65536, 32, 8, 128, is_causal=True, window=4096),
    Case("8 documents, causal", 1, 16384, 32, 32, 128, is_causal=True, documents=8),
)

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# ``make(gradient)``: the attention to time, for its forward pass alone or with its gradient.
Maker = Callable[[bool], Attention]


def ours(case: Case, implementation: str) -> Attention:
    """burst_attention on a mesh of this one GPU."""
    mesh = jax.make_mesh((1,), ("seq",), devices=jax.devices()[:1])
    ids = case.segment_ids()
    segments = {} if ids is None else {"query_segment_ids": ids, "key_value_segment_ids": ids}
    options = {**case.options, **segments, "implementation": implementation}
    return functools.partial(burst_jax.burst_attention, mesh=mesh, **options)


def cudnn(case: Case) -> Attention:
    """cuDNN through ``jax.nn.dot_product_attention``."""
    if case.documents > 1:
        raise NotImplementedError("it takes no segment ids")
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **case.options)


def pallas_example(case: Case, gradient: bool) -> Attention:
    """JAX's own Pallas Triton example, in the tiles that were fastest on an H200 for either use."""
    if case.window is not None or case.heads != case.kv_heads:
        raise NotImplementedError("it takes neither windows nor grouped heads")
    from jax.experimental.pallas.ops.gpu import attention

    # One number of warps and stages serves both passes, so what suits the backward decides there.
    warps, stages = (4, 2) if gradient else (8, 3)
    sizes = attention.BlockSizes(128, 64, 64, 64, 64, 64)

    def attend(q, k, v):
        return attention.mha(
            q, k, v, case.segment_ids(), case.head_dim**-0.5, case.is_causal, sizes,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    return attend


def peers(case: Case, implementations: list[str]) -> dict[str, Maker]:
    """What is measured, by name."""
    return {
        "cuDNN": lambda _: cudnn(case),
        "Pallas example": functools.partial(pallas_example, case),
        **{name: lambda _, name=name: ours(case, name) for name in implementations},
    }


def matmul_ceiling(dtype: Any) -> float:
    """TFLOP/s of a large matmul on random data, the most that any kernel here could reach."""
    size = 12288
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), dtype)
    matmul = jax.jit(functools.partial(jnp.matmul, preferred_element_type=dtype))
    return 2e-12 * size**3 / median_time(lambda: matmul(a, b), seconds=0.2)


class Problem:
    """A case's arrays, and its float64 truth for the first and the last key head."""

    def __init__(self, case: Case, dtype: Any):
        self.case = case
        keys = jax.random.split(jax.random.key(1), 4)
        wide = (case.batch, case.length, case.heads, case.head_dim)
        narrow = (case.batch, case.length, case.kv_heads, case.head_dim)
        self.q, self.do = (jax.random.normal(key, wide, dtype) for key in keys[:2])
        self.k, self.v = (jax.random.normal(key, narrow, dtype) for key in keys[2:])
        window = case.options["local_window_size"]
        self.spec: AttentionSpec = make_spec(self.q, case.is_causal, None, window, None)
        ids = case.segment_ids()
        self.tokens = Tokens(
            jnp.arange(case.length, dtype=jnp.int32), None if ids is None else jnp.asarray(ids)
        )
        self._samples = sorted({(0, 0), (case.batch - 1, case.kv_heads - 1)})
        self._truth = [
            attention_and_gradients(
                self.spec,
                self.tokens,
                *(self._sample(name, getattr(self, name), at) for name in ("q", "k", "v", "do")),
            )
            for at in self._samples
        ]

    def _sample(self, name: str, x: jax.Array, at: tuple[int, int]) -> jax.Array:
        """One key head, or the query heads that share it, of one batch row."""
        row, head = at
        if name in ("k", "v", "dk", "dv"):
            return x[row, :, head]
        groups = self.case.heads // self.case.kv_heads
        return x[row, :, head * groups : (head + 1) * groups]

    def errors(self, **results: jax.Array) -> dict[str, float]:
        """The relative error of every result."""
        errors = {}
        for name, array in results.items():
            error = 0.0
            for at, truth in zip(self._samples, self._truth, strict=True):
                part = self._sample(name, array, at)
                with jax.enable_x64(True):
                    error = max(error, relative_error(part, truth[name]))
            errors[name] = error
        return errors


def measure(problem: Problem, peer: str, make: Maker, limit: float) -> Row:
    """Checks and times one implementation on one case."""
    row = Row(problem.case.name, peer)
    arrays = problem.q, problem.k, problem.v
    try:
        forward = jax.jit(make(False))
        differentiated = make(True)

        @jax.jit
        def both(q, k, v, do):
            out, vjp = jax.vjp(differentiated, q, k, v)
            return out, *vjp(do)

        alone = problem.errors(out=forward(*arrays))
        names = ("out", "dq", "dk", "dv")
        gradients = dict(zip(names, both(*arrays, problem.do), strict=True))
        errors = problem.errors(**gradients)
        del gradients
    except Exception as error:  # What a peer cannot do is a line of the table, not its end.
        row.note = " ".join(f"{type(error).__name__}: {error}".split())[:60]
        return row
    if not row.agrees(limit, alone, errors):
        return row
    tera = problem.case.flops() / 1e12
    row.forward = tera / median_time(lambda: forward(*arrays))
    row.both = 3.5 * tera / median_time(lambda: both(*arrays, problem.do))
    return row


def local_times(problem: Problem, implementation: str) -> dict[str, float]:
    """Seconds of the local kernels alone, without and with what a mask or a ring adds to them.

    "forward" and "backward" as they are; "carried": forward with an (o, lse) carry merged in place;
    "forward, unmasked" and "backward, unmasked": the same tiles with every score counted, which
    computes something else and takes the time that the tiles alone take.
    """
    q, kv = problem.q, (problem.k, problem.v)
    local = resolve(
        implementation, platform="gpu", compute_capability=compute_capability(), q=q, kv=kv
    )
    assert local.backward is not None
    tokens = (problem.tokens, problem.tokens)
    bounds, tables = (
        jax.jit(functools.partial(of, problem.spec))(q, kv, *tokens)
        for of in (local.forward_bounds, local.backward_bounds)
    )
    forward = functools.partial(local.forward, spec=problem.spec)
    fresh, carried = jax.jit(forward), jax.jit(forward, donate_argnums=5)
    o, lse = fresh(q, kv, *tokens, bounds)
    queries = ((q, problem.do), kv, (lse, jnp.zeros_like(lse)), *tokens)
    backward = jax.jit(functools.partial(local.backward, spec=problem.spec))
    state = (o, lse + 0)

    def step():
        nonlocal state
        state = carried(q, kv, *tokens, bounds, state)
        return state

    times = {"carried": median_time(step)}
    for suffix, of in (("", lambda tables: tables), (", unmasked", _unmasked)):
        for_forward, for_backward = of(bounds), of(tables)
        times |= {
            "forward" + suffix: median_time(lambda b=for_forward: fresh(q, kv, *tokens, b)),
            "backward" + suffix: median_time(lambda b=for_backward: backward(*queries, b)),
        }
    return times


def _unmasked(tables: Any) -> Any:
    """Bounds that call every tile full which has anything to do."""

    def unmask(table):
        first, _, _, end = jnp.moveaxis(table, -1, 0)
        return jnp.stack([first, first, end, end], axis=-1)

    return jax.tree.map(unmask, tables)


def gpu_implementations(compute_capability: float | None) -> list[str]:
    """Those of ours that run on such a GPU, fastest first.

    Raises:
      NotImplementedError: none does.
    """
    ours = (MOSAIC_GPU, TRITON)
    reasons = {local.name: local.unavailable("gpu", compute_capability) for local in ours}
    if all(reasons.values()):
        raise NotImplementedError("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    return [name for name, why in reasons.items() if why is None]


def add_command(commands: Any) -> None:
    """Adds ``kernels`` to the command line."""
    parser = commands.add_parser("kernels", help=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(_RIGHT))
    parser.add_argument(
        "--implementations", nargs="+", choices=[local.name for local in (MOSAIC_GPU, TRITON)],
        help="of ours (default: all that run on this GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="+", type=int, default=list(range(len(CASES))), metavar="I",
        choices=range(len(CASES)),
        help="; ".join(f"{i}: {case.name}" for i, case in enumerate(CASES)),
    )  # fmt: skip
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the table, keeps it and draws it."""
    need_gpus("bench kernels")
    need_outputs(args.json, args.png)
    try:
        implementations = args.implementations or gpu_implementations(compute_capability())
    except NotImplementedError as error:
        raise SystemExit(str(error)) from error
    dtype = jnp.dtype(args.dtype)
    results = Results(
        jax.devices()[0].device_kind, jax.__version__, args.dtype, matmul_ceiling(dtype)
    )
    print(
        f"{results.device}, jax {results.jax}, {results.dtype}; "
        f"a large matmul: {results.matmul:.0f} TFLOP/s\n"
        "TFLOP/s (share of the matmul's); error: the largest relative one of out, dq, dk, dv\n"
    )
    heading = f"{'case':32}{'':16}{'forward':>13}{'fwd + bwd':>13}{'error':>9}"
    print(heading + "\n" + "-" * len(heading))
    for index in args.cases:
        problem = Problem(CASES[index], dtype)
        timed = []
        for peer, make in peers(problem.case, implementations).items():
            row = measure(problem, peer, make, _RIGHT[args.dtype])
            print(_line(row, results.matmul), flush=True)
            results.rows.append(row)
            if peer in implementations and not row.note:
                timed.append(peer)
        for name in timed:
            _print_shares(problem, name)
        del problem
        # After every case: what is measured is kept, whatever becomes of the next.
        if args.json is not None:
            results.save(args.json)
    if args.png is not None:
        plot.draw(results, args.png)


def _print_shares(problem: Problem, name: str) -> None:
    """What a carry and a mask cost one of ours."""
    times = local_times(problem, name)
    notes = [f"with the carry {times['carried'] / times['forward']:.3f} of the time"]
    if problem.case.window is not None or problem.case.documents > 1:
        for what in ("forward", "backward"):
            share = times[what] / times[what + ", unmasked"]
            notes.append(f"{what} {share:.3f} of the same tiles unmasked")
    for note in notes:
        print(f"{'':32}{name}: {note}", flush=True)


def _line(row: Row, ceiling: float) -> str:
    if row.note:
        return f"{row.case:32}{row.peer:16}  {row.note}"
    rates = (f"{rate:5.0f} ({100 * rate / ceiling:3.0f} %)" for rate in (row.forward, row.both))
    return f"{row.case:32}{row.peer:16}{''.join(f'{rate:>13}' for rate in rates)}{row.error:9.1e}"
