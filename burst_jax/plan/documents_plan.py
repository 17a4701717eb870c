"""The planner for packed documents: what share of ideal every layout and ring size reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from burst_jax.errors import check_integer, shown
from burst_jax.layouts.balanced import check_lengths
from burst_jax.layouts.parse import LAYOUTS, parse_layout
from burst_jax.layouts.ring_costs import RingCosts
from burst_jax.layouts.work import MIN_SHARD, WorkReport, report_of_runs

# Shares that differ by less are equally good.
_AS_GOOD = 0.01


@dataclasses.dataclass(frozen=True)
class LayoutWork:
    """The work of one layout on a ring of one size.

    Attributes:
      num_shards: size of the ring.
      layout: the layout.
      report: balance, empty steps, bytes and share of ideal.
    """

    num_shards: int
    layout: str
    report: WorkReport

    def record(self) -> dict[str, Any]:
        """All figures as plain values, for JSON."""
        names = "balance", "empty_steps", "bytes_sent", "share_of_ideal"
        figures = {name: getattr(self.report, name) for name in names}
        return {"num_shards": self.num_shards, "layout": self.layout} | figures


@dataclasses.dataclass(frozen=True)
class DocumentsPlan:
    """The result of :func:`documents`; ``print`` it for a table.

    Attributes:
      length: tokens of a sequence.
      lengths: of every sequence's documents.
      work: every layout on every ring size, the smallest ring first, then the best layout.
      left_out: ``(ring and layout, reason)`` for every impossible one.
    """

    length: int
    lengths: tuple[tuple[int, ...], ...]
    work: tuple[LayoutWork, ...]
    left_out: tuple[tuple[str, str], ...]

    def best(self, num_shards: int) -> LayoutWork:
        """The recommended layout on a ring of this size: as good as any, with the fewest bytes.

        Raises:
          ValueError: a size that was not planned.
        """
        found = [each for each in self.work if each.num_shards == num_shards]
        if not found:
            sizes = ", ".join(map(str, sorted({each.num_shards for each in self.work})))
            raise ValueError(f"num_shards is {num_shards}: the planned sizes are {sizes}")
        most = max(each.report.share_of_ideal for each in found)
        as_good = [each for each in found if each.report.share_of_ideal >= most - _AS_GOOD]
        return min(as_good, key=lambda each: each.report.bytes_sent)

    def record(self) -> dict[str, Any]:
        """The whole plan as plain values, for JSON."""
        sizes = sorted({each.num_shards for each in self.work})
        return {
            "length": self.length,
            "documents": [list(each) for each in self.lengths],
            "recommended": {size: self.best(size).layout for size in sizes},
            "estimates": [each.record() for each in self.work],
            "left_out": dict(self.left_out),
        }

    def __str__(self) -> str:
        every = [length for each in self.lengths for length in each]
        padding = 1 - sum(every) / (self.length * len(self.lengths))
        lines = [
            f"{len(self.lengths)} x {self.length:,} tokens, {len(every)} documents, median "
            f"{int(np.median(every)):,}, longest {max(every):,}; {padding:.1%} padding; causal",
            "of ideal: share of the time without waiting, ring steps and partly masked tiles, "
            "modelled with the rates of an H100",
            "slowest: the device with most work, relative to the mean; empty steps: ring steps "
            "without work; bytes: relative to zigzag",
            "",
            f"{'ring':>5}  {'layout':16}{'of ideal':>9}{'slowest':>9}{'empty steps':>13}"
            f"{'bytes':>8}",
        ]
        lines.append("-" * len(lines[-1]))
        for each in self.work:
            report, is_best = each.report, each is self.best(each.num_shards)
            lines.append(
                f"{each.num_shards:5}  {each.layout:16}{report.share_of_ideal:9.0%}"
                f"{report.balance:9.2f}{report.empty_steps:13.0%}{report.bytes_sent:8.0%}"
                + ("  recommended" if is_best else "")
            )
        lines += [f"left out: {name}: {reason}" for name, reason in self.left_out]
        return "\n".join(lines)


def documents(
    batch: Sequence[Iterable[int] | np.ndarray],
    *,
    length: int,
    hosts: int = 1,
    gpus_per_host: int = 8,
) -> DocumentsPlan:
    """Compares layouts and ring sizes for the packed documents of a batch.

    The causal pairs of every device and ring step are exact, their times modelled
    (:class:`burst_jax.layouts.RingCosts`). It runs on the host, without a GPU.

    Args:
      batch: the document lengths of each sequence that is on one ring, in natural order.
      length: tokens of a sequence, T; what the documents leave is padding.
      hosts: number of hosts.
      gpus_per_host: number of GPUs per host. Ring sizes are the divisors of all GPUs, from 2 on;
        other GPUs have other sequences.

    Returns:
      A :class:`DocumentsPlan`.

    Raises:
      ValueError: numbers that are not positive integers, no document at all, documents that do not
        fit in ``length``, or a length that no ring can shard.
    """
    length = check_integer("length", length, 1, 2**31 - 1)
    size = check_integer("hosts", hosts, 1) * check_integer("gpus_per_host", gpus_per_host, 1)
    lengths = _checked(batch, length)
    costs = RingCosts()
    work, left_out = [], []
    for n in (n for n in range(2, size + 1) if size % n == 0):
        found = []
        if length < n * MIN_SHARD:
            reason = f"shards of fewer than {MIN_SHARD:,} tokens are slow in any layout"
            left_out.append((f"ring of {n}", reason))
            continue
        for layout in map(parse_layout, (*LAYOUTS, "balanced")):
            if length % (n * layout.unit):
                reason = f"length is {length}: it must be a multiple of {n * layout.unit}"
                left_out.append((f"ring of {n}, {layout}", reason))
                continue
            # By runs of documents: arrays of the tokens of a large batch take gigabytes.
            fitted, runs = layout.of_lengths(lengths, n, length // n)
            report = report_of_runs(runs, fitted, n, length=length, costs=costs)
            found.append(LayoutWork(n, fitted.name, report))
        work += sorted(found, key=lambda each: -each.report.share_of_ideal)
    if not work:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out)
        raise ValueError(
            f"length is {length}: no ring can shard it over {size} GPUs"
            + (f": {reasons}" if reasons else "")
        )
    return DocumentsPlan(length, lengths, tuple(work), tuple(left_out))


def _checked(batch: Any, length: int) -> tuple[tuple[int, ...], ...]:
    """The lengths of each sequence's documents as Python integers."""
    if not isinstance(batch, Iterable):
        raise ValueError(
            f"batch is {shown(batch)}: it must be a list, the document lengths of each sequence"
        )
    lengths = []
    for i, each in enumerate(batch):
        found = check_lengths(f"batch[{i}]", each)
        if sum(found) > length:
            raise ValueError(
                f"batch[{i}] has {sum(found)} tokens in all, more than length {length}: pack fewer "
                "documents, cut long ones, or increase length"
            )
        lengths.append(tuple(found))
    if not any(lengths):
        raise ValueError("batch has no documents: it needs the document lengths of a sequence")
    return tuple(lengths)
