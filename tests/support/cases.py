"""The cases of the matrix tests and their tiers, and packed sequences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

# By arguments of burst_attention; "segments" and "ranges": with drawn segment ids and KV bounds.
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window20": {"is_causal": True, "local_window_size": 20},
    "window40_17": {"local_window_size": (40, 17)},
    "packed": {"segments": True},
    "packed_causal": {"is_causal": True, "segments": True},
    "packed_window_cap": {
        "is_causal": True, "local_window_size": 50, "segments": True, "logits_soft_cap": 4.0,
    },
    "cap": {"logits_soft_cap": 2.0},
    "ranges": {"ranges": True},
    "packed_window_ranges": {
        "is_causal": True, "local_window_size": 70, "segments": True, "ranges": True,
    },
}  # fmt: skip


def all_pairs(factors, seed=0):
    """Cases in which every pair of levels of two factors occurs."""
    rng = np.random.default_rng(seed)
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    cases = []
    while missing:
        tries, unmet = [], sorted(missing, key=repr)
        for _ in range(60):
            case = {name: levels[rng.integers(len(levels))] for name, levels in factors.items()}
            # Start from a missing pair, so that every case adds at least one.
            for name, level in unmet[rng.integers(len(unmet))]:
                case[name] = level
            met = set(itertools.combinations(case.items(), 2)) & missing
            tries.append((len(met), met, case))
        _, met, case = max(tries, key=lambda entry: entry[0])
        missing -= met
        cases.append(case)
    return cases


def value_dim(case):
    """The head dim of a case's values: "same" as that of its keys, or another number."""
    dim = case.get("value_dim", "same")
    return case["head_dim"] if dim == "same" else dim


def few_of(cases):
    """A minimal subset of the cases in which every level of every factor still occurs."""
    missing = {level for case in cases for level in case.items()}
    few = []
    while missing:
        best = max(cases, key=lambda case: len(missing & set(case.items())))
        missing -= set(best.items())
        few.append(best)
    return few


def in_tiers(cases, name, quick):
    """Parameters of a test over cases: those that are not in ``quick`` are slow."""
    return [
        pytest.param(case, id=name(case), marks=() if case in quick else pytest.mark.slow)
        for case in cases
    ]


def packed_segments(rng, batch, length):
    """Documents of random lengths, each followed by padding; padding at the end."""
    rows = np.zeros((batch, length), np.int32)
    for row in rows:
        at, segment = int(rng.integers(0, 4)), 1
        while at < length - length // 8:
            size, gap = int(rng.integers(1, length // 2 + 2)), int(rng.integers(0, 9))
            row[at : min(at + size, length - length // 8)] = segment
            at, segment = at + size + gap, segment + 1
    return rows


def key_ranges(rng, rows, length):
    """``(key_starts, key_ends)``: wide, narrow and empty KV bounds per query."""
    starts, ends = rng.integers(-2, length, size=(2, rows, length)).astype(np.int32)
    wide = rng.random((rows, length)) < 0.7
    starts, ends = np.where(wide, starts // 4, starts), np.where(wide, length - ends // 4, ends)
    # Some neighbours attend to the same keys, so that some tiles are full.
    starts[:, length // 2 :], ends[:, length // 2 :] = starts[:, -1:], ends[:, -1:] + 3
    return starts, ends
