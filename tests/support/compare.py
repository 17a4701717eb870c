"""Errors against a float64 reference, relative to one device's error in the same precision."""

from __future__ import annotations

import dense
import jax.numpy as jnp
import numpy as np

GRADIENTS = ("dq", "dk", "dv")
NAMES = ("out", "lse", *GRADIENTS)
# The gradient of a per-head parameter is one sum over all scores of a head. The rounding error of a
# single sum varies by chance, so several times one device's is allowed.
NUMBER_FACTOR = 4
# Relative RMS that rounding alone explains: a few units in the last place of each dtype.
RELATIVE_RMS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def errors(got, truth):
    """``(largest, relative RMS)`` absolute error over finite entries; -inf must match exactly."""
    got, truth = np.asarray(got, np.float64), np.asarray(truth, np.float64)
    assert got.shape == truth.shape
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(got[~finite], truth[~finite])
    gap = np.where(finite, got, 0) - np.where(finite, truth, 0)
    size = np.sqrt(np.mean(np.where(finite, truth, 0) ** 2))
    assert np.isfinite(gap).all(), "not a number where the truth is finite"
    return np.abs(gap).max(), np.sqrt(np.mean(gap**2)) / max(size, 1e-30)


def assert_exact(got, reference, dtype, factor=1.5, lse_factor=None, noise=None):
    """As exact as one device, in the right dtypes, and :func:`assert_zero_where_blind`.

    ``reference`` is a :class:`dense.Reference`; the other arguments are those of
    :func:`assert_as_good_as`.
    """
    truth, one_device, *_ = reference
    assert tuple(x.dtype.name for x in got[:5]) == (dtype, "float32", *[dtype] * 3)
    assert_as_good_as(got, one_device, truth, dtype, factor, lse_factor, noise)
    assert_zero_where_blind(got, reference)


def assert_within(got, reference, bounds):
    """Every element differs from the truth by no more than its bound; -inf is -inf.

    ``bounds``: of :func:`dense.largest_errors`. Then :func:`assert_zero_where_blind`.
    """
    names = *NAMES, *(f"number {i}" for i in range(len(bounds) - len(NAMES)))
    for name, g, t, bound in zip(names, got, reference.truth, bounds, strict=True):
        assert g.shape == t.shape, f"{name}: shape {g.shape}, not {t.shape}"
        finite = np.isfinite(t)
        gap = np.abs(np.where(finite, g.astype(np.float64), 0) - np.where(finite, t, 0))
        right = np.where(finite, gap <= bound, g == t)
        if not right.all():
            wrong = np.argwhere(~right)
            at = tuple(wrong[np.argmax(gap[~right] / np.maximum(bound[~right], 1e-30))].tolist())
            raise AssertionError(
                f"{name}: {len(wrong)} of {right.size} elements are wrong, the first at "
                f"{tuple(wrong[0].tolist())}, the worst at {at}: {g[at]}, not {t[at]:.6g} "
                f"(rounding explains {bound[at]:.2g})"
            )
    assert_zero_where_blind(got, reference)


def assert_zero_where_blind(got, reference):
    """Queries that attend to nothing, and keys that none attends to: 0, lse -inf or a sink."""
    truth, _, keep, largest_bias = reference
    out, lse, dq, dk, dv, *_ = got
    blind = ~np.broadcast_to(dense.sees(keep), lse.shape)
    unseen = ~np.broadcast_to(dense.is_seen(keep, dk.shape[2]), dk.shape[:3])
    for x, nothing in ((out, blind), (dq, blind), (dk, unseen), (dv, unseen)):
        assert not x[nothing].any()
    # -inf, or a sink. Some kernels add a bias to the sink and subtract it from lse.
    atol = 1e-6 + np.finfo(np.float32).eps * largest_bias
    np.testing.assert_allclose(lse[blind], truth[1][blind], rtol=1e-6, atol=atol)


def assert_as_good_as(
    got, one_device, truth, dtype, factor=1.5, lse_factor=None, noise=None, largest_bias=0.0
):
    """Asserts that every largest and RMS error is at most ``factor`` times one device's.

    ``lse_factor``: that of lse, which is always float32; None is ``factor``. ``noise``: standard
    deviations of the errors of per-head gradients, of which three are allowed; None is 0.
    ``largest_bias``: of any score. Kernels compute a bias relative to a tile's first query and
    subtract what that adds from lse, so one ulp of it is allowed.

    On top of that, the rounding of the result itself and a few ulps for float32 sums in another
    order are allowed. Gradients use ``exp(score - lse)`` of the rounded lse: one ulp of lse, at
    most ``eps |lse|``, scales a query's gradient by that factor, so it is allowed too.
    """
    numbers = [f"number {i}" for i in range(len(truth) - len(NAMES))]
    noises = dict(zip(numbers, noise or [0.0] * len(numbers), strict=True))
    # ALiBi makes logits larger, and so their rounding errors.
    larger = 1.5 if numbers else 1
    factors = dict.fromkeys(NAMES, factor * larger)
    if lse_factor is not None:
        factors["lse"] = lse_factor * larger
    largest_lse = np.abs(np.where(np.isfinite(truth[1]), truth[1], 0)).max()
    for name, g, d, t in zip((*NAMES, *numbers), got, one_device, truth, strict=True):
        if name in numbers:
            _assert_number_gradient(name, g, d, t, dtype, noises[name])
            continue
        kind = "float32" if name == "lse" else dtype
        eps = float(jnp.finfo(kind).eps)
        worst, rms = errors(g, t)
        dense_worst, dense_rms = errors(d, t)
        largest = np.abs(np.where(np.isfinite(t), t, 0)).max()
        slack = 4 * eps if kind == "float32" else eps / 2
        if name in GRADIENTS:
            slack += float(jnp.finfo("float32").eps) * largest_lse
        allowed = factors[name] * dense_worst + slack * largest
        allowed_rms = factors[name] * dense_rms + (eps if kind == "float32" else 0)
        if name == "lse":
            of_bias = eps * largest_bias
            allowed += of_bias
            size = np.sqrt(np.mean(np.where(np.isfinite(t), t, 0) ** 2))
            allowed_rms += of_bias / max(size, 1e-30)
        assert worst <= allowed, f"{name}: error {worst:.3g}, one device's {dense_worst:.3g}"
        assert rms <= allowed_rms, f"{name}: relative RMS {rms:.3g}, one device's {dense_rms:.3g}"
        assert rms <= RELATIVE_RMS[kind] * (2 if numbers else 1), f"{name}: relative RMS {rms:.3g}"


def _assert_number_gradient(name, got, one_device, truth, dtype, noise):
    """Asserts the same of a float32 gradient ``[N]``, one sum per head."""
    assert got.dtype == np.float32, name
    worst, _ = errors(got, truth)
    dense_worst, _ = errors(one_device, truth)
    # In 16 bits delta is computed from the rounded out: an ulp of out changes the sum.
    eps = 1e-5 if dtype == "float32" else float(jnp.finfo(dtype).eps)
    largest = np.abs(truth).max()
    assert largest > 0, name
    allowed = NUMBER_FACTOR * dense_worst + eps * largest + 3 * noise
    assert worst <= allowed, f"{name}: error {worst:.3g}, one device's {dense_worst:.3g}"
