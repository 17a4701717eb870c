"""Programs at training lengths, as users write them, are traced and lowered for both GPU families.

Drawn by a design in which most pairs of what they try occur, always the same: calls of attention
with all arguments, layers, and whole training steps, on meshes of 1, 2 and 8 GPUs. Lowering takes
seconds, most of it for kernels, so it is left out of most: what JAX rejects, it rejects while it
traces. ``--lowered-programs 300`` draws more.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from typing import Any

import lowered_models as models
import lowered_programs as programs
import pytest
from conftest import LOWERED_PROGRAMS, USUAL_PROGRAMS

from pallas_kernels import SlowerKernelsWarning

pytestmark = pytest.mark.every_jax

KINDS: dict[str, Any] = {
    "calls": programs.a_call, "layers": models.a_layer, "steps": models.a_step,
}  # fmt: skip
# Of each kind: how many are quick, and how many there are.
QUICK = {"calls": 6, "layers": 2, "steps": 1}
COUNTS = {
    "calls": LOWERED_PROGRAMS, "layers": LOWERED_PROGRAMS // 4, "steps": LOWERED_PROGRAMS // 6,
}  # fmt: skip
AT_ONCE = 10


@functools.cache
def drawn(kind):
    return programs.designed(KINDS[kind], max(QUICK[kind], COUNTS[kind]))


def assert_none_fails(each, *, lowers):
    failed = []
    for program in each:
        try:
            program.check(lowers=lowers)
        except Exception:
            failed.append(f"{program}\n{traceback.format_exc(limit=-3)}")
    assert not failed, f"{len(failed)} of {len(each)}:\n" + "\n".join(failed)


def test_packed_calls():
    assert_none_fails(programs.packed_calls(), lowers=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_programs(kind):
    assert_none_fails(drawn(kind)[: QUICK[kind]], lowers=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first"),
    [(kind, i) for kind in KINDS for i in range(QUICK[kind], COUNTS[kind], AT_ONCE)],
)
def test_more_programs(kind, first):
    assert_none_fails(drawn(kind)[first : first + AT_ONCE], lowers=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "some"), [("calls", slice(0, 6, 3)), ("layers", slice(2)), ("steps", slice(1, 2))],
    ids=KINDS,
)  # fmt: skip
def test_some_are_lowered(kind, some):
    """For both families; a step for Hopper, since test_compiled_training.py has A100s alone."""
    assert_none_fails(drawn(kind)[some], lowers=True)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", programs.GPUS)
def test_a_packed_call_is_lowered(gpu):
    """With its gradient, to the kernels of its family."""
    call = next(x for x in programs.packed_calls() if (x.gpu, x.layout) == (gpu, "zigzag"))
    assert call.gradient
    with warnings.catch_warnings(action="error", category=SlowerKernelsWarning):
        assert_none_fails([call], lowers=True)


def test_the_design_tries_what_there_is():
    """Few levels are in none of the programs, and every one of the first levels is."""
    design = programs.designed(programs.a_call, max(USUAL_PROGRAMS, LOWERED_PROGRAMS))
    levels = frozenset().union(*(call.levels for call in design))
    for wanted in (
        programs.GPUS, programs.LAYOUTS, programs.ZONES, programs.FEATURES,
        [f"tokens{count}" for count in programs.TOKENS], ["gradient", "forward"],
        ["burst_attention", "ring_attention", "local_attention", "Auto", "Explicit"],
    ):  # fmt: skip
        assert set(wanted) <= levels
