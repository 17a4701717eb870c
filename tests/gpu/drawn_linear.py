"""Drawn calls of the gated delta rule on this machine's devices, with gradients, against float64.

    export PYTHONPATH=.:tests/support
    python tests/gpu/drawn_linear.py --implementation mosaic_sm90 --count 20
    python tests/gpu/drawn_linear.py --implementation mosaic_sm90 --only 7

Every call is public, over all devices or one, and runs often: all results must have the same bits.
Padding holds NaN. The reference is the recurrence, token by token.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import linear_cases
import numpy as np
from ampere import compile_as_ampere
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from repeated import run_repeatedly

import burst_jax
from burst_jax import linear
from pallas_kernels.linear.sm90 import parts, scan

# Relative, Euclidean, of results in bfloat16 with products of bfloat16; or so many times the error
# of plain JAX on one device, with the same roundings. The gradients of beta and decay sum products
# of two rounded arrays: their errors are relative to these where the sum is smaller.
ALLOWED, OF_PLAIN = 1e-2, 1.5
_STATES = ("last", "dstart")
# It lacks decays per key channel.
_OF_HEADS = "mosaic_sm80"


@dataclasses.dataclass(frozen=True)
class Draw:
    """One call.

    Attributes:
      index: seed of its arrays.
      devices: on the mesh.
      layout: of the tokens.
      run: tokens of each of a device's runs.
      batch: B.
      heads: N and K.
      documents: number of documents of a sequence, 0 without segment ids.
      decay: largest decrease of a log decay.
      edges: whether some gates are 0 or very large.
      channels: whether there is a decay per key channel.
      dims: H and Hv.
      parts: whether kernels scan runs in parts as short as a chunk, as they do long runs.
      chains: whether two chains of a map have a CTA, as with more heads than these.
    """

    index: int
    devices: int
    layout: str
    run: int
    batch: int
    heads: tuple[int, int]
    documents: int
    decay: float
    edges: bool
    channels: bool
    dims: tuple[int, int]
    parts: bool
    chains: bool

    @property
    def length(self) -> int:
        """T of the whole sequences."""
        return self.run * self.devices * (2 if self.layout == "zigzag" else 1)


def _dims(rng: np.random.Generator) -> tuple[int, int]:
    """Mostly what kernels have; else what some models have, or any that are padded to it."""
    others = (64, 64), (64, 128), (96, 192), (128, 256)
    drawn = int(rng.integers(1, 129)), int(rng.integers(1, 300))
    choices = [(128, 128)] * 6 + [others[rng.integers(len(others))], drawn]
    return choices[rng.integers(len(choices))]


def draw(index: int, devices: int, head_dim: int | None = None) -> Draw:
    """Draw number ``index``; one in four is on one device, one in four has head dims unlike 128."""
    rng, alone = np.random.default_rng((index, 3)), index % 4 == 3
    return Draw(
        index=index,
        devices=1 if alone else devices,
        layout=("zigzag", "contiguous")[index % 2],
        # Runs of whole chunks, and of a part of one; in four parts on a device alone.
        run=int(64 * rng.integers(1, 8) - rng.integers(2) * rng.integers(64)) * (4 if alone else 1),
        batch=int(rng.integers(1, 3)),
        heads=((4, 2), (2, 2), (3, 1), (1, 1))[rng.integers(4)],
        documents=int(rng.choice([0, 2, 5, 12])),
        decay=float(rng.choice([1e-3, 0.1, 3.0])),
        edges=bool(rng.integers(2)),
        channels=bool(rng.integers(2)),
        dims=_dims(rng) if head_dim is None else (head_dim, head_dim),
        parts=index % 3 > 0,
        chains=index % 5 < 2,
    )


def case_of(drawn: Draw) -> linear_cases.Case:
    """Its arrays, in natural order."""
    (heads, key_heads), (head_dim, value_dim) = drawn.heads, drawn.dims
    return linear_cases.draw(
        np.random.default_rng(drawn.index), drawn.length, batch=drawn.batch, heads=heads,
        key_heads=key_heads, head_dim=head_dim, value_dim=value_dim, decay=drawn.decay,
        documents=drawn.documents, edges=drawn.edges, channels=drawn.channels,
    )  # fmt: skip


def call_of(drawn: Draw, mesh: Mesh | AbstractMesh, implementation: str | None) -> Any:
    """``f(arrays, state, cotangents, ids) -> results by name``, tokens in the layout's order."""

    def run(arrays: Any, start: Any, do: Any, dlast: Any, ids: Any) -> dict[str, Any]:
        def rule(*given: Any) -> Any:
            *arrays, start = given
            return linear.gated_delta_rule(
                *arrays, mesh=mesh, layout=drawn.layout, segment_ids=ids, initial_state=start,
                return_final_state=True, implementation=implementation,
            )  # fmt: skip

        results, vjp = jax.vjp(rule, *arrays, start)
        return dict(zip(linear_cases.NAMES, (*results, *vjp((do, dlast))), strict=True))

    return run


def arguments_of(drawn: Draw, case: linear_cases.Case, mesh: Mesh) -> tuple[Any, ...]:
    """The call's arrays on the mesh: NaN in padding, bfloat16 but for gates and states."""
    tokens = [case.q, case.k, case.v, case.log_decay, case.beta, case.do]
    if case.ids is not None:
        tokens = [np.where(case.valid[(..., *[None] * (x.ndim - 2))], x, np.nan) for x in tokens]
    kinds = [jnp.bfloat16] * 3 + [jnp.float32] * 2 + [jnp.bfloat16]

    def place(x: Any, *spec: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def shared(x: Any, dtype: Any) -> Any:
        x = burst_jax.to_layout(np.asarray(x, dtype), drawn.layout, drawn.devices)
        return place(x, None, "seq")

    *arrays, do = map(shared, tokens, kinds)
    ids = None if case.ids is None else shared(case.ids, np.int32)
    return arrays, place(case.start), do, place(case.dlast), ids


@contextlib.contextmanager
def forms_of(drawn: Draw) -> Iterator[None]:
    """Hopper's kernels have the forms of large calls."""
    with contextlib.ExitStack() as patches:
        if drawn.parts:
            least = {"LEAST_PART": 1, "LEAST_CHANNEL_PART": 1, "LEAST_MAPPED_PART": 1}
            patches.enter_context(mock.patch.multiple(parts, **least))
        if drawn.chains:
            patches.enter_context(mock.patch.object(scan, "num_sms", return_value=1))
        yield


class Check:
    """A draw whose program is being compiled."""

    def __init__(self, drawn: Draw, implementation: str | None, pool: Any) -> None:
        devices = np.array(jax.devices()[: drawn.devices])
        mesh = Mesh(devices, ("seq",), axis_types=(AxisType.Auto,))
        self.drawn, self.case, self.began = drawn, case_of(drawn), time.perf_counter()
        self._arguments = arguments_of(drawn, self.case, mesh)
        with forms_of(drawn):
            lowered = jax.jit(call_of(drawn, mesh, implementation)).lower(*self._arguments)
        options: Any = burst_jax.compiler_options()
        self._program = pool.submit(lowered.compile, compiler_options=options)

    def errors(self) -> tuple[dict[str, float], bool]:
        """Relative errors by result, and whether they are those of rounding.

        Raises:
          AssertionError: two runs differ.
        """
        program = self._program.result()
        got = run_repeatedly(lambda: program(*self._arguments))
        truth = linear_cases.truth_and_terms(self.case)
        errors = _errors(self.drawn, got, *truth)
        allowed = dict.fromkeys(errors, ALLOWED)
        if any(errors[name] > ALLOWED for name in errors):
            plain = _errors(self.drawn, self._plain(), *truth)
            allowed = {name: max(ALLOWED, OF_PLAIN * error) for name, error in plain.items()}
        return errors, all(errors[name] <= allowed[name] for name in errors)

    def _plain(self) -> dict[str, np.ndarray]:
        alone = dataclasses.replace(self.drawn, devices=1)
        mesh = Mesh(np.array(jax.devices()[:1]), ("seq",), axis_types=(AxisType.Auto,))
        # One device's order is the natural one, so results are put into the drawn one's.
        got = jax.jit(call_of(alone, mesh, "xla"))(*arguments_of(alone, self.case, mesh))
        drawn = self.drawn
        return {
            name: x
            if name in _STATES
            else burst_jax.to_layout(np.asarray(x), drawn.layout, drawn.devices)
            for name, x in jax.device_get(got).items()
        }


def _errors(
    drawn: Draw,
    got: dict[str, np.ndarray],
    want: dict[str, np.ndarray],
    terms: dict[str, np.ndarray],
) -> dict[str, float]:
    """Of results in the layout's order."""
    return {
        name: linear_cases.error(
            x if name in _STATES else burst_jax.from_layout(x, drawn.layout, drawn.devices),
            want[name],
            terms.get(name),
        )
        for name, x in got.items()
    }


def main(argv: list[str] | None = None) -> int:
    """Runs draws until ``--minutes`` are over; returns 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--implementation", help="of the rule (default: the fastest)")
    add("--count", type=int, default=20, help="draws before this one (default: 20)")
    add("--first", type=int, default=0, help="the first draw (default: 0)")
    add("--step", type=int, default=1, help="to the next one, for many processes (default: 1)")
    add("--minutes", type=float, default=float("inf"), help="after which no further one starts")
    add("--only", type=int, help="one draw alone")
    add("--head-dim", type=int, help="of keys and values (default: drawn, mostly 128)")
    add("--threads", type=int, default=8, help="that compile (default: 8)")
    args = parser.parse_args(argv)
    compile_as_ampere(args.implementation)
    start, ran, wrong = time.perf_counter(), 0, 0
    late, worst = start + 60 * args.minutes, dict.fromkeys(linear_cases.NAMES, 0.0)
    indices = iter(range(args.first, args.count, args.step) if args.only is None else [args.only])
    waiting: list[Check] = []
    with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
        while True:
            while len(waiting) < args.threads and time.perf_counter() < late:
                if (index := next(indices, None)) is None:
                    break
                drawn = draw(index, jax.device_count(), args.head_dim)
                if args.implementation == _OF_HEADS:
                    drawn = dataclasses.replace(drawn, channels=False)
                waiting.append(Check(drawn, args.implementation, pool))
            if not waiting:
                break
            check = waiting.pop(0)
            try:
                errors, right = check.errors()
            except Exception:
                traceback.print_exc(file=sys.stdout)
                errors, right = {}, False
            ran, wrong = ran + 1, wrong + (not right)
            for name, error in errors.items():
                worst[name] = max(worst[name], error)
            shown = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
            seconds = time.perf_counter() - check.began
            print(f"{'right' if right else 'WRONG'}  {check.drawn}: {shown}, {seconds:.0f} s")
            # A process that is ended has told what it found.
            found = {"linear calls": 1, "wrong": int(not right)}
            print(f"figure: {json.dumps(found)}", flush=True)
    if ran:
        shown = {"largest linear error": float(f"{max(worst.values()):.2g}")}
        print(f"{ran} calls, {wrong} wrong; largest errors {worst}\nfigure: {json.dumps(shown)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
