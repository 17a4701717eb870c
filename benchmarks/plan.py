"""Measured rings and training steps next to the planner's estimates."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import train
from benchmarks.kernel_cases import Case
from benchmarks.results import Results, Row
from benchmarks.ring import CASES
from burst_jax.models.remat import Remat
from burst_jax.plan import GPUS, Estimate, Gpu, StepEstimate, attention, training

# Rates of the kernels of 22 November, with which the rings of four H200 and some steps were
# measured. The planner has those of what ships.
_EARLIER = dataclasses.replace(GPUS["h200"], forward=605.0, backward=540.0, large_head=(1.0, 1.0))
# Results of ``python -m benchmarks ring --json`` on two and on four H200, and the rates of their
# kernels. The second file also has rows of torch on the same GPUs: context_parallel, and
# all-to-alls around cuDNN.
_FILES = {"measured_two_h200.json": GPUS["h200"], "measured_four_h200.json": _EARLIER}
# The planner's strategy, layout and rotation for each strategy of the benchmark; None is "auto".
_STRATEGIES = {
    "zigzag": ("ring", "zigzag", None),
    "zigzag, rotate_kv": ("ring", "zigzag", "rotate_kv"),
    "zigzag, rotate_query": ("ring", "zigzag", "rotate_query"),
    "zigzag, NCCL": ("ring", "zigzag", None),
    "striped": ("ring", "striped", None),
    "contiguous": ("ring", "contiguous", None),
    "ring + Ulysses of 2": ("ring of {pairs}, ulysses of 2", "zigzag", None),
    "Ulysses": ("ulysses", "contiguous", None),
}


class ComparedRing(NamedTuple):
    """A measured row and its estimate.

    Attributes:
      row: the measured rates.
      forward: estimated TFLOP/s per GPU of the forward pass.
      both: estimated TFLOP/s per GPU of forward and backward pass together.
    """

    row: Row
    forward: float
    both: float


def load_rings() -> list[tuple[Results, Gpu]]:
    """The measured rings, on two GPUs and on four, and these GPUs with the kernels of that day."""
    folder = resources.files("benchmarks")
    runs = []
    for name, gpu in _FILES.items():
        with resources.as_file(folder / name) as path:
            runs.append((Results.load(Path(path)), gpu))
    return runs


def compare_rings(results: Results, gpu: Gpu) -> Iterator[ComparedRing]:
    """The measured rows that the planner has estimates for, with these."""
    cases = {case.name: case for case, _ in CASES}
    for row in results.rows:
        case = cases.get(row.case)
        if case is None or row.peer not in _STRATEGIES or not row.forward > 0:
            continue
        estimate = _ring_estimate(case, row.peer, results.devices, gpu)
        flops, both = (
            1e-12 * x / results.devices for x in (case.flops(), case.flops_with_gradients())
        )
        yield ComparedRing(row, flops / estimate.forward_seconds, both / estimate.seconds)


def _ring_estimate(case: Case, name: str, devices: int, gpu: Gpu) -> Estimate:
    """The estimate for one strategy of the benchmark on one case."""
    if name.endswith("NCCL"):
        gpu = dataclasses.replace(gpu, peer_link=None)
    strategy, layout, rotation = _STRATEGIES[name]
    found = attention(
        length=case.length, batch=case.batch, num_heads=case.heads, num_kv_heads=case.kv_heads,
        head_dim=case.head_dim, gpu=gpu, gpus_per_host=devices, is_causal=case.is_causal,
        local_window_size=case.options["local_window_size"],
    )  # fmt: skip
    return min(
        (
            each
            for each in found.estimates
            if (each.strategy.name, each.layout) == (strategy.format(pairs=devices // 2), layout)
            and rotation in (None, each.backward)
        ),
        key=lambda each: each.backward_bytes,
    )


def ring_table(results: Results, gpu: Gpu) -> str:
    """Measured and estimated rates as a table."""
    lines = [
        f"{results.devices} x {results.device}, jax {results.jax}: TFLOP/s per GPU, measured and "
        "estimated (ratio)",
        "",
        f"{'case':34}{'strategy':22}{'forward':>20}{'forward + backward':>20}",
    ]
    lines.append("-" * len(lines[-1]))
    for row, forward, both in compare_rings(results, gpu):
        cells = [_rates(row.forward, forward), _rates(row.both, both)]
        lines.append(f"{row.case:34}{row.peer:22}{cells[0]:>20}{cells[1]:>20}")
    return "\n".join(lines)


def _rates(measured: float, estimated: float) -> str:
    if math.isnan(measured):
        return "-"
    return f"{measured:.0f} {estimated:.0f} ({estimated / measured:.2f})"


class Step(NamedTuple):
    """A step with batch size 1 that ``python -m benchmarks train`` has timed on H200s.

    Attributes:
      devices: number of GPUs.
      shape: the benchmark's name of the model.
      layers: number of its layers.
      weights: "replicated", "sharded", or "exchanged": sharded, with experts that stay where they
        are.
      strategy: the benchmark's name of the strategy.
      length: sequence length.
      seconds: the median.
      remat: what layers save.
      remat_layers: in how many layers; None is all. The planner may have another number.
      moment_dtype: of AdamW's moments.
      earlier: whether its kernels were earlier, slower ones.
      untuned: whether XLA chose its dense products without timing any, which are slower.
    """

    devices: int
    shape: str
    layers: int
    weights: str
    strategy: str
    length: int
    seconds: float
    remat: Remat = "attention"
    remat_layers: int | None = None
    moment_dtype: str = "float32"
    earlier: bool = False
    untuned: bool = False


def load_steps() -> list[Step]:
    """The measured steps."""
    text = (resources.files("benchmarks") / "measured_steps.json").read_text()
    return [Step(**row) for row in json.loads(text)]


@functools.cache
def step_estimate(step: Step) -> StepEstimate:
    """The estimate for a step."""
    parallel = step.strategy == "tensor parallel"
    ring, tensor = ((1,), step.devices) if parallel else ((step.devices,), 1)
    config = dataclasses.replace(train.SHAPES[step.shape], num_layers=step.layers)
    found = training(
        config, length=step.length, gpu=_EARLIER if step.earlier else GPUS["h200"],
        gpus_per_host=step.devices, moments="device", moment_dtype=step.moment_dtype,
    )  # fmt: skip
    exchanged = step.weights == "exchanged"
    wanted = {
        "weights": "sharded" if exchanged else step.weights,
        "ring": ring, "tensor": tensor, "remat": step.remat,
        "layout": "contiguous" if parallel else step.strategy,
    }  # fmt: skip
    (estimate,) = (
        each
        for each in found.estimates
        if all(getattr(each.strategy, name) == value for name, value in wanted.items())
        and (each.strategy.remat_layers is None) == (step.remat_layers is None)
        and bool(each.strategy.expert) == exchanged
    )
    return estimate


def step_table() -> str:
    """Measured and estimated seconds as a table."""
    lines = [
        "training steps on H200s, milliseconds, measured and estimated (ratio)",
        "",
        f"{'GPUs':>4}  {'model':18}{'layers':>6}  {'weights':12}{'strategy':17}{'remat':11}"
        f"{'length':>9}{'ms':>22}",
    ]
    lines.append("-" * len(lines[-1]))
    for step in load_steps():
        cell = _rates(1e3 * step.seconds, 1e3 * step_estimate(step).seconds.total)
        lines.append(
            f"{step.devices:4}  {step.shape:18}{step.layers:6}  {step.weights:12}"
            f"{step.strategy:17}{step.remat:11}{step.length:9,}{cell:>22}"
        )
    return "\n".join(lines)


def add_command(commands: Any) -> None:
    """Adds ``plan`` to the command line."""
    parser = commands.add_parser("plan", help=__doc__)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Prints the tables."""
    del args
    print("\n\n".join([*itertools.starmap(ring_table, load_rings()), step_table()]))
