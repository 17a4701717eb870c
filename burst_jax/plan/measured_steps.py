"""Measured seconds of training steps beside the seconds that the model estimates for them."""

from __future__ import annotations

import json
from importlib import resources
from typing import NamedTuple

from burst_jax.bench.train import CONFIG
from burst_jax.plan import GPUS
from burst_jax.plan.training import StepEstimate, plan_training


class Step(NamedTuple):
    """A measured step of ``python -m burst_jax.bench train`` and the model's estimate for it.

    Attributes:
      devices: number of GPUs.
      way: the benchmark's name of the way.
      length: tokens of the one row.
      seconds: of the measured step.
      estimate: the model's.
    """

    devices: int
    way: str
    length: int
    seconds: float
    estimate: StepEstimate


def steps() -> list[Step]:
    """All measured steps: the benchmark's four layers, weights whole, on H200s."""
    text = (resources.files("burst_jax.plan") / "measured_steps.json").read_text()
    return [
        Step(run["devices"], **row, estimate=_estimate(run["devices"], row["way"], row["length"]))
        for run in json.loads(text)
        for row in run["rows"]
    ]


def _estimate(devices: int, way: str, length: int) -> StepEstimate:
    parallel = way == "tensor parallel"
    ring, tensor = ((1,), devices) if parallel else ((devices,), 1)
    layout = "contiguous" if parallel else way
    found = plan_training(
        CONFIG, length=length, gpu=GPUS["h200"], gpus_per_host=devices, moments="device"
    )
    wanted = ("whole", ring, tensor, layout, CONFIG.remat)
    (estimate,) = (
        each
        for each in found.estimates
        if (each.way.weights, each.way.ring, each.way.tensor, each.way.layout, each.way.remat)
        == wanted
    )
    return estimate


def table() -> str:
    """Measured and modelled seconds side by side."""
    lines = [
        "training steps on H200s, milliseconds, measured and modelled (modelled over measured)",
        "",
        f"{'GPUs':>4}{'length':>10}  {'way':18}{'ms':>22}",
    ]
    lines.append("-" * len(lines[-1]))
    for step in steps():
        modelled = step.estimate.seconds.total
        ratio = modelled / step.seconds
        cell = f"{1e3 * step.seconds:.0f} {1e3 * modelled:.0f} ({ratio:.2f})"
        lines.append(f"{step.devices:4}{step.length:10,}  {step.way:18}{cell:>22}")
    return "\n".join(lines)
