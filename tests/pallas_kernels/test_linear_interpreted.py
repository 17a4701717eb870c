"""The gated delta rule's kernels on a CPU, interpreted, against float64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import interpreted
import interpreted_callbacks
import interpreted_sm80
import jax.numpy as jnp
import linear_cases
import numpy as np
import pytest

from pallas_kernels.linear.backend import Inputs
from pallas_kernels.linear.chunks import Tokens
from pallas_kernels.linear.kernel_parts import Form
from pallas_kernels.linear.sm80 import ahead as ahead80
from pallas_kernels.linear.sm80 import operation as sm80
from pallas_kernels.linear.sm90 import ahead as ahead90
from pallas_kernels.linear.sm90 import operation as sm90
from pallas_kernels.linear.sm90 import scan as scan90

# What interprets them, their operation, and arguments of its first pass.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sm90": (interpreted.interpreted, sm90, {"form": Form.APART}),
    "sm90-ahead": (interpreted.interpreted, sm90, {"form": Form.AHEAD}),
    "sm80": (interpreted_sm80.interpreted, sm80, {"form": Form.APART}),
    "sm80-ahead": (interpreted_sm80.interpreted, sm80, {"form": Form.AHEAD}),
}
KERNELS = {sm80.__name__: sm80.MOSAIC_SM80, sm90.__name__: sm90.MOSAIC_SM90}
# [tokens, options]: an even and an odd number of chunks, more than stages, and one; documents that
# begin inside of chunks; padding; groups; chunks that leave nothing in the last state.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "edges-grouped": (128, {"heads": 2, "documents": 3, "edges": True}),
    "5-chunks-documents": (320, {"heads": 1, "documents": 3}),
    "strong-decay": (64, {"heads": 2, "key_heads": 2, "decay": 3.0}),
    "6-chunks-forgotten": (384, {"heads": 1, "decay": 3.0}),
}
# With a decay per key channel, which Hopper's kernels alone have.
CHANNEL_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "edges-grouped": (128, {"heads": 2, "documents": 3, "edges": True}),
    "5-chunks-documents": (320, {"heads": 1, "documents": 3}),
    "strong-decay": (64, {"heads": 1, "decay": 5.0, "last": 0.1}),
}
# Key and value head dims: padded, padded and split, split alone; no multiples of 8.
HEAD_DIMS = {"sm90": (96, 192), "sm80": (100, 300), "channels": (61, 130)}
# Relative, Euclidean. Plain JAX with the same roundings has 2 to 4e-3, of 512 tokens and more.
ALLOWED = 5e-3


def run(case, family, both_chains):
    """Results by name; those of the affine map and of the first state's gradient alone, too.

    With ``both_chains`` also of the map by two chains of a CTA.
    """
    case, tokens = linear_cases.zeros_in_padding(case), None
    if case.ids is not None:
        tokens = Tokens(case.begins, case.valid)
    q, k, v, do = (np.asarray(x, jnp.bfloat16) for x in (case.q, case.k, case.v, case.do))
    states = case.start, case.dlast, case.start / 2
    start, last, half = (np.asarray(x, np.float32) for x in states)
    interpret, operation, options = FAMILIES[family]
    kernels = KERNELS[operation.__name__]

    def run_all(inputs, start, do, last, half):
        if options["form"] is Form.APART:  # As devices of a ring do.
            prepared, rows = kernels.mapped(inputs, half)
        else:
            prepared = operation.prepare(inputs, **options)
            rows = operation.affine(inputs, prepared, half)
        maps = {"mapped": rows}
        if both_chains:
            with mock.patch.object(scan90, "num_sms", return_value=1):
                maps["mapped by two chains"] = operation.affine(inputs, prepared, half)
        *results, kept = kernels.forward(inputs, prepared, start, case.scale)
        prepared = kernels.restore(inputs, kept)
        gradients = kernels.backward(inputs, prepared, start, do, last, case.scale)
        alone = kernels.first_gradient(inputs, prepared, do, last, case.scale)
        return dict(zip(linear_cases.NAMES, (*results, *gradients), strict=True)), maps, alone

    inputs = Inputs(q, k, v, case.log_decay, case.beta, tokens)
    with interpret():
        got, maps, alone = interpreted_callbacks.run(run_all, inputs, start, do, last, half)
    for name, rows in maps.items():
        # The rows of the map, those of U and below them those of M, are transposed.
        columns = rows.astype(np.float64).swapaxes(-1, -2)
        u, m = np.split(columns, [case.start.shape[-1]], axis=-1)
        got[name] = m @ half + u
    return got | {"alone": alone}


def check(name, cases, family, both_chains=False, **more):
    length, options = cases[name]
    case = linear_cases.draw(np.random.default_rng(0), length, **options, **more)
    want, terms = linear_cases.truth_and_terms(case)
    want |= {"mapped": want["last"], "alone": want["dstart"]}
    want |= {"mapped by two chains": want["last"]}
    results = run(case, family, both_chains)
    for result, got in results.items():
        # Few tokens have terms of beta's gradient that cancel.
        of = terms["dbeta"] if result == "dbeta" else None
        assert linear_cases.error(got, want[result], of) < ALLOWED, result
    if case.ids is not None:
        # No decay applies there.
        assert not results["dlog_decay"][case.begins | ~case.valid].any()


def names(cases):
    return [pytest.param(n, marks=() if n == "edges-grouped" else pytest.mark.slow) for n in cases]


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", names(CASES))
def test_as_exact_as_bfloat16(monkeypatch, name, family):
    for module in (ahead80, ahead90):
        # As few SMs without a scan as possible: their warpgroups have several chunks each.
        monkeypatch.setattr(module, "num_sms", lambda: 1)
    if family == "sm90":  # Two chains of the affine map in a CTA; elsewhere one.
        monkeypatch.setattr(scan90, "num_sms", lambda: 1)
    check(name, CASES, family)


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize("name", names(CHANNEL_CASES))
def test_decays_per_channel(monkeypatch, name):
    """The map by one chain of a CTA and by two."""
    monkeypatch.setattr(scan90, "num_sms", lambda: 1000)
    check(name, CHANNEL_CASES, "sm90", both_chains=True, channels=True)


@pytest.mark.mosaic_interpreter
@pytest.mark.parametrize("name", HEAD_DIMS)
def test_other_head_dims(name):
    """The rows of the map, too, have the true ones."""
    channels, (head_dim, value_dim) = name == "channels", HEAD_DIMS[name]
    sizes = {"head_dim": head_dim, "value_dim": value_dim} | (
        {"channels": True} if channels else {}
    )
    check("edges-grouped", CASES, "sm90" if channels else name, **sizes)
