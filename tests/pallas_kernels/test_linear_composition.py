"""The kernel that composes maps of runs, interpreted, against float64."""

from __future__ import annotations

import interpreted
import interpreted_callbacks
import numpy as np
import pytest

from pallas_kernels.linear.sm90.composition import composed

DIM = 128


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize("everywhere", [False, True], ids=["own", "all"])
def test_as_exact_as_float32(everywhere):
    """Runs of two devices in zigzag's order; one device's states, or those of all from a state."""
    rng, places = np.random.default_rng(0), [(0, 0), (1, 0), (1, 1), (0, 1)]
    targets = places if everywhere else [(-1, -1), (0, 0), (0, 1), (-1, -1)]
    wanted, given = (2 if everywhere else 1, 2), []
    if everywhere:
        given = [rng.standard_normal((1, 2, DIM, DIM), np.float32)]
    order = np.array([(*place, *target) for place, target in zip(places, targets, strict=True)])
    shape = 2, 1, 2, 2, DIM, DIM
    u, m = (rng.standard_normal(shape, np.float32) * scale for scale in (1, DIM**-0.5))
    rows = np.concatenate([u, m], -2)

    def run(rows, order, *start):
        return composed(rows, order, wanted, *start)

    with interpreted.interpreted():
        got = np.asarray(interpreted_callbacks.run(run, rows, order.astype(np.int32), *given))
    state = given[0][0].astype(np.float64) if everywhere else np.zeros(shape[3:])
    for (device, column), (target, where) in zip(places, targets, strict=True):
        if target >= 0:
            error = np.abs(got[target, 0, where] - state).max()
            assert error < 1e-6 * max(np.abs(state).max(), 1.0)
        of_run = m[device, 0, column].astype(np.float64)
        state = state @ of_run + u[device, 0, column]
