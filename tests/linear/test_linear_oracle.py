"""The recurrence that the tests of linear attention compare with: its gradients."""

import linear_cases
import numpy as np
import pytest


@pytest.mark.parametrize(("documents", "channels"), [(0, False), (3, False), (3, True)])
def test_gradients_are_those_of_differences(documents, channels):
    """Of the output and the last state, in drawn directions, over more than one kept state."""
    rng = np.random.default_rng(documents)
    options = {"batch": 2, "heads": 4, "key_heads": 2, "head_dim": 3, "value_dim": 5}
    case = linear_cases.draw(rng, 70, **options, documents=documents, channels=channels)
    truth = linear_cases.truth(case)
    names = ("q", "k", "v", "log_decay", "beta", "start")
    inputs = [np.asarray(getattr(case, name), np.float64) for name in names]
    directions = [rng.standard_normal(x.shape) for x in inputs]

    def value(step, name):
        moved = {
            each: x + step * d if each == name else x
            for each, x, d in zip(names, inputs, directions, strict=True)
        }
        found = linear_cases.truth(case._replace(**moved))
        do = case.do if case.ids is None else np.where(case.valid[..., None, None], case.do, 0)
        return np.vdot(found["o"], do) + np.vdot(found["last"], case.dlast)

    for name, direction in zip(names, directions, strict=True):
        difference = (value(1e-6, name) - value(-1e-6, name)) / 2e-6
        np.testing.assert_allclose(np.vdot(truth[f"d{name}"], direction), difference, rtol=1e-6)
