"""How much of ideal the ring reaches on each batch of packed documents, for the run's log."""

from __future__ import annotations

import sys

import numpy as np

from burst_jax.layouts.balanced_layout import Balanced
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.layouts.permutation import from_layout
from burst_jax.layouts.work import MIN_SHARD, work_report
from burst_jax.training import Batch, is_main

# The hint appears below this share, if a balanced layout's is larger by this factor and above a
# least share: below it the documents are too short for a ring in any layout.
_LOW, _GAIN, _LEAST = 0.7, 1.3, 0.3
# Batches with a low share that are placed to know what a balanced layout would reach.
_TRIES = 10


class WorkLog:
    """The modelled share of ideal of each batch's attention, and one hint if it is low.

    ::

        work_log = WorkLog(num_shards=4)
        batch = make_batch(rows, layout="zigzag", num_shards=4, segment_ids=segment_ids)
        run_log.step(step, metrics | work_log(batch, "zigzag"))

    If a balanced layout would be at least 1.3 times as fast where less than 70 % of ideal are
    reached, it prints one line on stderr that names the remedy. Shards of fewer than 2,048 tokens
    have neither: fixed costs dominate them in any layout.

    Args:
      num_shards: number of shards on the ring, as in :func:`make_batch`.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._tries = _TRIES

    def __call__(self, batch: Batch[np.ndarray], layout: LayoutLike) -> dict[str, float]:
        """The metric ``share_of_ideal`` of this process' sequences, see :func:`work_report`.

        Args:
          batch: result of :func:`make_batch`, on the host.
          layout: its layout.

        Returns:
          ``{"share_of_ideal": ...}`` on process 0; nothing on the others, without segment ids,
          without a ring, or with shards of fewer than 2,048 tokens.
        """
        segment_ids, n = batch["segment_ids"], self._num_shards
        if segment_ids is None or n == 1 or not is_main():
            return {}
        if segment_ids.shape[1] < n * MIN_SHARD:
            return {}
        layout = parse_layout(layout)
        if not layout.is_fixed:
            report = work_report(segment_ids, layout, n, positions=batch["positions"])
            return {"share_of_ideal": report.share_of_ideal}
        segment_ids = from_layout(segment_ids, layout, n)
        share = work_report(segment_ids, layout, n).share_of_ideal
        if share < _LOW and self._tries:
            self._tries -= 1
            self._hint(segment_ids, layout, share)
        return {"share_of_ideal": share}

    def _hint(self, segment_ids: np.ndarray, layout: Layout, share: float) -> None:
        n = self._num_shards
        balanced = work_report(segment_ids, Balanced(), n).share_of_ideal
        if balanced < max(_GAIN * share, _LEAST):
            return
        self._tries = 0
        print(
            f"hint: on these packed documents the ring's slowest device reaches {share:.0%} of "
            f"ideal attention with the {layout} layout, and {balanced:.0%} with a balanced one: "
            "use --layout balanced, or burst_jax.training.make_batch(rows, layout='balanced')",
            file=sys.stderr,
            flush=True,
        )
