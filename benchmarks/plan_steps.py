"""Measured seconds of training steps beside the seconds that the model estimates for them."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import NamedTuple

from benchmarks.train import SHAPES
from burst_jax.plan import GPUS, StepEstimate, training


class Step(NamedTuple):
    """A step that ``python -m benchmarks train`` has timed on H200s, of one row.

    Attributes:
      devices: number of GPUs.
      shape: the benchmark's name of the model.
      layers: number of its layers.
      weights: "whole" or "split".
      way: the benchmark's name of the way.
      length: tokens of the row.
      seconds: the median.
    """

    devices: int
    shape: str
    layers: int
    weights: str
    way: str
    length: int
    seconds: float


def load() -> list[Step]:
    """All steps that were timed."""
    text = (resources.files("benchmarks") / "measured_steps.json").read_text()
    return [Step(**row) for row in json.loads(text)]


def estimate_of(step: Step) -> StepEstimate:
    """The model's estimate for a step."""
    parallel = step.way == "tensor parallel"
    ring, tensor = ((1,), step.devices) if parallel else ((step.devices,), 1)
    layout = "contiguous" if parallel else step.way
    config = dataclasses.replace(SHAPES[step.shape], num_layers=step.layers)
    found = training(
        config, length=step.length, gpu=GPUS["h200"], gpus_per_host=step.devices, moments="device"
    )
    wanted = {
        "weights": step.weights, "ring": ring, "tensor": tensor, "layout": layout,
        "remat": config.remat, "remat_layers": None,
    }  # fmt: skip
    (estimate,) = (
        each
        for each in found.estimates
        if all(getattr(each.strategy, name) == value for name, value in wanted.items())
    )
    return estimate


def table() -> str:
    """Measured and modelled seconds side by side."""
    lines = [
        "training steps on H200s, milliseconds, measured and modelled (modelled over measured)",
        "",
        f"{'GPUs':>4}  {'model':12}{'layers':>6}  {'weights':9}{'way':17}{'length':>9}{'ms':>22}",
    ]
    lines.append("-" * len(lines[-1]))
    for step in load():
        modelled = estimate_of(step).seconds.total
        ratio = modelled / step.seconds
        cell = f"{1e3 * step.seconds:.0f} {1e3 * modelled:.0f} ({ratio:.2f})"
        lines.append(
            f"{step.devices:4}  {step.shape:12}{step.layers:6}  {step.weights:9}{step.way:17}"
            f"{step.length:9,}{cell:>22}"
        )
    return "\n".join(lines)
