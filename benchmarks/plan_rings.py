"""Measured rates of rings beside the rates that the model estimates for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from benchmarks.kernels import Case
from benchmarks.results import Results, Row
from benchmarks.ring import CASES
from burst_jax.plan import GPUS, attention
from burst_jax.plan.cost_model import Estimate

# Results of ``python -m benchmarks ring --json`` on two and on four H200. The second file also
# has rows of torch on its four GPUs: torch's context_parallel, and its all-to-all around cuDNN.
_FILES = ("measured_two_h200.json", "measured_four_h200.json")
# The scheme, layout and rotation that a plan has for each way of the benchmark; a rotation of None
# is the one that "auto" takes.
_WAYS = {
    "zigzag": ("ring", "zigzag", None),
    "zigzag, rotate_kv": ("ring", "zigzag", "rotate_kv"),
    "zigzag, rotate_query": ("ring", "zigzag", "rotate_query"),
    "zigzag, NCCL": ("ring", "zigzag", None),
    "striped": ("ring", "striped", None),
    "contiguous": ("ring", "contiguous", None),
    "hybrid, ulysses of 2": ("ring of {pairs}, ulysses of 2", "zigzag", None),
    "ulysses": ("ulysses", "contiguous", None),
}


class Compared(NamedTuple):
    """A measured row and the model's estimate for it.

    Attributes:
      row: the measured rates.
      forward: TFLOP/s per GPU of the forward pass that the model estimates.
      both: TFLOP/s per GPU of forward and backward pass together that the model estimates.
    """

    row: Row
    forward: float
    both: float


def load() -> list[Results]:
    """The measured results, on two GPUs and on four."""
    folder = resources.files("benchmarks")
    runs = []
    for name in _FILES:
        with resources.as_file(folder / name) as path:
            runs.append(Results.load(Path(path)))
    return runs


def compare(results: Results) -> Iterator[Compared]:
    """The measured rows that a plan has an estimate for, with their estimates."""
    cases = {case.name: case for case, _ in CASES}
    for row in results.rows:
        case = cases.get(row.case)
        if case is None or row.peer not in _WAYS or not row.forward > 0:
            continue
        estimate = _estimate(case, row.peer, results.devices)
        flops = 1e-12 * case.flops() / results.devices
        yield Compared(row, flops / estimate.forward_seconds, 3.5 * flops / estimate.seconds)


def _estimate(case: Case, way: str, devices: int) -> Estimate:
    """The model's estimate for one way of the benchmark on one case."""
    gpu = GPUS["h200"]
    if way.endswith("NCCL"):
        gpu = dataclasses.replace(gpu, peer_link=None)
    scheme, layout, rotation = _WAYS[way]
    found = attention(
        length=case.length, batch=case.batch, num_heads=case.heads, num_kv_heads=case.kv_heads,
        head_dim=case.head_dim, gpu=gpu, gpus_per_host=devices, is_causal=case.is_causal,
        local_window_size=case.options["local_window_size"],
    )  # fmt: skip
    return min(
        (
            each
            for each in found.estimates
            if (each.strategy.name, each.layout) == (scheme.format(pairs=devices // 2), layout)
            and rotation in (None, each.backward)
        ),
        key=lambda each: each.backward_bytes,
    )


def table(results: Results) -> str:
    """Measured and modelled rates side by side."""
    lines = [
        f"{results.devices} x {results.device}, jax {results.jax}: TFLOP/s per GPU, measured and "
        "modelled (modelled over measured)",
        "",
        f"{'case':34}{'way':22}{'forward':>20}{'forward + backward':>20}",
    ]
    lines.append("-" * len(lines[-1]))
    for row, forward, both in compare(results):
        cells = [_cell(row.forward, forward), _cell(row.both, both)]
        lines.append(f"{row.case:34}{row.peer:22}{cells[0]:>20}{cells[1]:>20}")
    return "\n".join(lines)


def _cell(measured: float, modelled: float) -> str:
    if math.isnan(measured):
        return "-"
    return f"{measured:.0f} {modelled:.0f} ({modelled / measured:.2f})"
