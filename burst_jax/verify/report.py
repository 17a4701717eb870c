"""``Report``: what a comparison found."""

from __future__ import annotations

import dataclasses
from typing import Any

from burst_jax.verify.batch import Segments

# A table shows all groups up to this many, and otherwise those with the largest differences.
_MOST_ROWS = 24


@dataclasses.dataclass(frozen=True)
class Difference:
    """The loss, or the gradients of one parameter group.

    Attributes:
      name: "loss", or the group: the path of the module that has the parameters.
      mesh: relative difference between mesh and reference; for gradients the relative RMS.
      one_device: the same for one device: what its own dtype costs. None without a reference.
      limit: what is allowed for ``mesh``.
    """

    name: str
    mesh: float
    one_device: float | None
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the limit; NaN is not."""
        return self.mesh <= self.limit


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a comparison cost.

    Attributes:
      seconds: to compile and run, by program: "one device", "reference", "mesh", "search".
      bytes: memory of a device, arguments, results and temporaries, by program.
    """

    seconds: dict[str, float]
    bytes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of :func:`burst_jax.verify.compare`; ``print(report)`` shows a table.

    Attributes:
      mesh: mesh axes and sizes, like "data=2,seq=4".
      layout: the layout on the mesh.
      dtype: the narrowest floating dtype in which the loss computes.
      reference: dtype of the reference; None if the loss cannot be computed in a wider one.
      no_reference: why it cannot; None if it can.
      losses: the loss by program: "mesh", "one device", and "reference".
      loss: relative difference of the losses.
      gradients: a difference for each parameter group.
      segments: what the batch has of padding; None if it has no segment ids.
      replicated: mesh axes along which devices compute the same.
      problems: one sentence each: what differs, and the cause if it was found.
      cost: time and memory.
    """

    mesh: str
    layout: str
    dtype: str
    reference: str | None
    no_reference: str | None
    losses: dict[str, float]
    loss: Difference
    gradients: tuple[Difference, ...]
    segments: Segments | None
    replicated: tuple[str, ...]
    problems: tuple[str, ...]
    cost: Cost

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def record(self) -> dict[str, Any]:
        """The report as a JSON-serializable dict."""
        record = dataclasses.asdict(self) | {"passed": self.passed}
        for each in (record["loss"], *record["gradients"]):
            each |= {k: str(v) for k, v in each.items() if isinstance(v, float) and v != v}
        record["losses"] = {k: v if v == v else "nan" for k, v in self.losses.items()}
        return record

    def __str__(self) -> str:
        shown = sorted(self.gradients, key=lambda group: (group.passed, -group.mesh))
        shown = shown[:_MOST_ROWS]
        rows = [self.loss, *(group for group in self.gradients if group in shown)]
        width = max(len("loss"), *(len(row.name) + 2 for row in rows))
        beyond = self.reference or "one device"
        lines = [
            f"{self.layout} on {self.mesh}, {self.dtype}; differences relative to "
            + (f"{self.reference} on one device" if self.reference else "one device"),
            "  ".join(f"{name} loss {value:.6f}" for name, value in self.losses.items()),
            "",
            f"{'':{width}}  {'mesh':>9}  {'one device':>10}  {'limit':>9}",
        ]
        for row in rows:
            name = row.name if row is self.loss else f"  {row.name}"
            one = "-" if row.one_device is None else f"{row.one_device:.1e}"
            lines.append(
                f"{name:{width}}  {row.mesh:9.1e}  {one:>10}  {row.limit:9.1e}"
                + ("" if row.passed else "  differs")
            )
            if row is self.loss and self.gradients:
                lines.append(f"gradients, relative RMS to {beyond}")
        if len(shown) < len(self.gradients):
            lines.append(f"  and {len(self.gradients) - len(shown)} groups with smaller ones")
        lines += ["", *self._footer()]
        return "\n".join(lines)

    def _footer(self) -> list[str]:
        lines = []
        if self.segments is not None:
            share = "" if self.segments.loss is None else (
                f", {100 * self.segments.loss:.1f} % of the loss weight"
            )  # fmt: skip
            lines.append(
                f"in segment {self.segments.padding_id}: {100 * self.segments.tokens:.1f} % of the "
                f"tokens{share}"
            )
        if self.no_reference is not None:
            lines.append(
                f"no reference in a wider dtype: {self.no_reference}; limits are those of "
                f"{self.dtype}"
            )
        axes = ", ".join(self.replicated) or "none"
        lines.append(f"mesh axes whose devices all compute the same attention: {axes}")
        sizes = {name: f", {size / 2**20:,.1f} MiB" for name, size in self.cost.bytes.items()}
        lines.append(
            "cost: "
            + "; ".join(
                f"{name} {seconds:.1f} s{sizes.get(name, '')}"
                for name, seconds in self.cost.seconds.items()
            )
            + " per device"
        )
        if self.passed:
            return [*lines, "PASSED"]
        return [*lines, "FAILED", *(f"- {problem}" for problem in self.problems)]
