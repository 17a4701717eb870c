"""Limits of losses and gradients, against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from burst_jax.verify.differences import differences

# Of a loss without a reference, and what is added to twice one device's error with one.
ALONE = {"float32": 3e-5, "bfloat16": 5e-2, "float16": 1e-2}
PLUS = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 5e-4}


def results(loss, *scales):
    """A loss and the gradients of two groups, which are multiples of fixed arrays."""
    rows = np.arange(1.0, 5.0), np.array([2.0, -1.0])
    return loss, [x * scale for x, scale in zip(rows, scales, strict=True)]


@pytest.mark.parametrize("dtype", ALONE)
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_without_a_reference_the_limit_is_the_dtypes(dtype, factor):
    off = factor * ALONE[dtype]
    one = results(2.0, 1.0, 1.0)
    loss, groups = differences(
        ["a.kernel", "b.kernel"], results(2.0 * (1 + off), 1 + off, 1.0), one, None, dtype
    )
    assert [each.name for each in (loss, *groups)] == ["loss", "a", "b"]
    assert [each.limit for each in (loss, *groups)] == [ALONE[dtype]] * 3
    np.testing.assert_allclose([loss.mesh, groups[0].mesh], off, rtol=1e-6)
    assert groups[1].mesh == 0
    assert [loss.passed, groups[0].passed, groups[1].passed] == [factor < 1] * 2 + [True]
    assert loss.one_device is groups[0].one_device is None


@pytest.mark.parametrize("dtype", PLUS)
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_with_a_reference_the_mesh_may_have_twice_the_error_of_one_device(dtype, factor):
    own = 3 * PLUS[dtype]
    limit = 2 * own + PLUS[dtype]
    off = factor * limit
    loss, groups = differences(
        ["a.kernel", "b.kernel"],
        results(2.0 * (1 - off), 1.0, 1 + off),
        results(2.0 * (1 + own), 1.0, 1 - own),
        results(2.0, 1.0, 1.0),
        dtype,
    )
    for each in (loss, groups[1]):
        np.testing.assert_allclose(
            (each.mesh, each.one_device or 0.0, each.limit), (off, own, limit), rtol=1e-6
        )
        assert each.passed is (factor < 1)
    assert (groups[0].mesh, groups[0].limit) == (0, PLUS[dtype])


def test_nan_is_no_agreement():
    one = results(2.0, 1.0, 1.0)
    loss, groups = differences(["a", "b"], results(np.nan, np.nan, 1.0), one, one, "float32")
    assert [each.passed for each in (loss, *groups)] == [False, False, True]


@pytest.mark.parametrize(("size", "passed"), [(1e-9, True), (1e-3, False)])
def test_gradients_that_are_small_next_to_all_others_are_rounding_of_zero(size, passed):
    """Their scale is 1e-4 of that of all gradients, unless they are larger."""
    large = np.full(100, 10.0)
    truth, off = [large, np.zeros(100)], [large, np.full(100, size)]
    _, groups = differences(["a.w", "b.w"], (1.0, off), (1.0, truth), (1.0, truth), "float32")
    np.testing.assert_allclose(groups[1].mesh, size / (1e-4 * 10 / 2**0.5), rtol=1e-6)
    assert groups[1].passed is passed


def test_arrays_of_one_module_are_one_group():
    truth = [np.array([3.0]), np.array([4.0]), np.array([1.0])]
    mesh = [np.array([3.0]), np.array([4.5]), np.array([1.0])]
    names = ["layer.0.kernel", "layer.0.bias", "head.kernel"]
    _, groups = differences(names, (1.0, mesh), (1.0, truth), (1.0, truth), "float32")
    assert [group.name for group in groups] == ["layer.0", "head"]
    np.testing.assert_allclose([group.mesh for group in groups], [0.5 / 5, 0])
