"""The share of ideal attention in the log of train_lm.py, and its hint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from run_log import RunLog
from work_log import WorkLog

from burst_jax.layouts import work_report
from burst_jax.layouts.work import MIN_SHARD
from burst_jax.training import make_batch


def test_the_log_has_the_share_of_ideal_and_one_hint(tmp_path, capsys):
    n, length = 4, 4 * MIN_SHARD
    segment_ids = np.repeat(np.arange(1, n + 1, dtype=np.int32), length // n)[None]
    segment_ids = np.append(segment_ids, [[n]], 1)
    options: Any = {"num_shards": n, "segment_ids": segment_ids}
    zigzag, balanced = (
        make_batch(np.ones_like(segment_ids), layout=layout, **options)
        for layout in ("zigzag", "balanced:0")
    )
    work_log = WorkLog(n)
    share = work_log(zigzag, "zigzag")["share_of_ideal"]
    expected = work_report(segment_ids[:, :-1], "zigzag", n).share_of_ideal
    assert share == pytest.approx(expected)
    hint = capsys.readouterr().err
    assert f"the ring's slowest device reaches {share:.0%} of ideal attention with the zigz" in hint
    assert "and 100% with a balanced one: use --layout balanced, or burst_jax" in hint
    work_log(zigzag, "zigzag")
    with RunLog(tmp_path, 1, tokens_per_step=1, flops_per_step=1, peak=None) as log:
        numbers = work_log(balanced, "balanced:0")
        assert numbers == {"share_of_ideal": 1}
        log.step(1, {"loss": 1.0, "grad_norm": 1.0} | numbers)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "attention 100% of ideal" in printed.out
    # No ring, no documents, shards that are too short for a share to mean something, and a document
    # that no layout makes faster.
    one: Any = make_batch(np.ones((1, length + 1), int), layout="zigzag", num_shards=n)
    arrays: Any = zigzag
    short: Any = {name: x if x is None else x[:, :-8] for name, x in arrays.items()}
    assert WorkLog(1)(zigzag, "zigzag") == WorkLog(n)(one, "zigzag") == {}
    assert WorkLog(n)(short, "zigzag") == {}
    WorkLog(n)(one | {"segment_ids": np.ones((1, length), np.int32)}, "zigzag")
    assert capsys.readouterr().err == ""
