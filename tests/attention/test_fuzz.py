"""Random calls of ``burst_attention``: each gives the reference's answer, or refuses by name.

Three rules, of which none asks the library what is valid:

- A call that is drawn by the documentation returns what dense attention in float64 makes of it, and
  so does the same call with arguments that are spelled differently.
- A call that was changed into a mistake raises ValueError, whatever else was changed in it. What
  the platform cannot run raises NotImplementedError, an argument that does not exist TypeError.
- A call with a change that may be either raises one of the first two, or returns the right answer.
"""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import fuzz_mutations as mutations
import jax
import numpy as np
import pytest
from fuzz_valid import (
    Plan,
    assert_equal,
    draw_arrays,
    draw_cotangents,
    draw_plan,
    eager_gradients_work,
    gradients_of,
    pick,
    reference,
)

import burst_jax

# How many calls of each kind a test makes, in random order.
KINDS = {"valid": 52, "spelled": 26, "mistake": 106, "either": 4, "cannot run": 6, "unknown": 6}
# Programs of a test: what a call costs is nearly all compiling.
QUICK_PLANS, PLANS = 3, 4
# How large an error of a gradient may be that is one sum over all scores of a head.
NUMBER_SLACK = 10


def arguments(plan: Plan, call: dict[str, Any]) -> dict[str, Any]:
    """What is passed: the mesh of the context is left out."""
    in_context = plan.in_context and call["mesh"] is plan.mesh
    return {name: x for name, x in call.items() if name != "mesh" or not in_context}


def context(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    return jax.set_mesh(plan.mesh) if plan.in_context else contextlib.nullcontext()


def assert_right(plan: Plan, call: dict[str, Any], got: Any, cotangents: Any) -> list[np.ndarray]:
    """Returns what the gradients must be."""
    out, lse, *gradients = reference(call, cotangents)
    if not call.get("return_residual", False):
        got = (got, None)
    result, residual = got
    assert result.dtype == call["query"].dtype
    assert_equal(result, out, plan.dtype, "out")
    if residual is not None:
        assert residual.dtype == np.float32
        assert_equal(residual, lse, plan.dtype, "lse")
    return gradients


def must_answer(rng, plan: Plan, call: dict[str, Any], *, gradients: bool) -> None:
    cotangents = draw_cotangents(rng, call)
    given = arguments(plan, call)
    with context(plan):
        got = burst_jax.burst_attention(**given)
        made = gradients_of(given, cotangents) if gradients else []
    wanted = assert_right(plan, call, got, cotangents)
    for index, (gradient, want) in enumerate(zip(made, wanted, strict=False)):
        slack = NUMBER_SLACK if index > 2 else 1
        assert_equal(gradient, want, plan.dtype, f"gradient {index}", slack)
    assert len(made) in (0, len(wanted))


def must_raise(plan: Plan, call: dict[str, Any], error: type[Exception]) -> None:
    with context(plan), pytest.raises(error) as raised:
        burst_jax.burst_attention(**arguments(plan, call))
    # A subclass, like the errors of a tracer, is an accident.
    assert raised.type is error, f"{raised.type.__name__}: {raised.value}"
    assert len(str(raised.value)) > 20


def may_answer(rng, plan: Plan, call: dict[str, Any]) -> str:
    cotangents = draw_cotangents(rng, call)
    got = error = None
    try:
        with context(plan):
            got = burst_jax.burst_attention(**arguments(plan, call))
    except Exception as raised:
        error = raised
    if error is not None:
        assert type(error) in (ValueError, NotImplementedError), repr(error)
        return "refused"
    assert_right(plan, call, got, cotangents)
    return "answered"


def change(rng, plan: Plan, call: dict[str, Any], choices: Any) -> tuple[str, dict[str, Any]]:
    """A change that applies to the call: its name, and the arguments that it changes."""
    while True:
        function = pick(rng, choices)
        changed = function(rng, plan, call)
        if changed is not None:
            return function.__name__, changed


def one_call(
    rng: np.random.Generator, kind: str, pool: list[Plan], done: collections.Counter
) -> None:
    """Draws a call of a kind, makes it, and counts it in ``done``."""
    index = int(rng.integers(len(pool)))
    compiles = kind in ("valid", "spelled", "either")
    plan = pool[index] if compiles else draw_plan(rng)
    drawn = call = draw_arrays(rng, plan) | {"mesh": plan.mesh}
    names: list[str] = []
    all_changed: set[str] = set()

    def apply(choices: Any, *, keep: bool = False) -> None:
        """Makes one of the changes; with ``keep`` only if it leaves those before it as they are."""
        nonlocal call
        name, changed = change(rng, plan, drawn, choices)
        if keep and changed.keys() & all_changed:
            return
        names.append(name)
        all_changed.update(changed)
        call = call | changed

    try:
        if kind == "valid":
            gradients = index % 3 == 0 and done[f"gradients of {index}"] < 2
            gradients = gradients and eager_gradients_work(plan)
            must_answer(rng, plan, call, gradients=gradients)
            done[f"gradients of {index}"] += gradients
            done["gradients"] += gradients
        elif kind == "spelled":
            apply(mutations.SPELLINGS)
            apply(mutations.SPELLINGS, keep=True)
            must_answer(rng, plan, call, gradients=False)
        elif kind == "either":
            apply(mutations.EITHER)
            done[may_answer(rng, plan, call)] += 1
        elif kind == "mistake":
            apply(mutations.MISTAKES)
            if rng.random() < 0.3:
                apply((mutations.never,))
            if rng.random() < 0.3:
                apply(mutations.SPELLINGS, keep=True)
            must_raise(plan, call, ValueError)
        elif kind == "cannot run":
            apply((mutations.cannot_run,))
            must_raise(plan, call, NotImplementedError)
        else:
            apply((mutations.unknown_keyword,))
            must_raise(plan, call, TypeError)
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(f"{_describe(kind, names, plan, call)}\n{error}") from error
    done[kind] += 1


def _describe(kind: str, names: list[str], plan: Plan, call: dict[str, Any]) -> str:
    """A call in words, to make it again."""

    def brief(x: Any) -> str:
        if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type):
            return f"{type(x).__name__} {x.dtype}{x.shape}"
        return repr(x)

    given = {name: brief(x) for name, x in call.items()}
    return f"{kind} {names}, in_context={plan.in_context}, placed={plan.placed}, {given}"


def fuzz(seed: int, plans: int) -> collections.Counter:
    rng = np.random.default_rng(seed)
    pool = [draw_plan(rng) for _ in range(plans)]
    done: collections.Counter = collections.Counter()
    kinds = np.repeat(list(KINDS), list(KINDS.values()))
    for number, kind in enumerate(rng.permutation(kinds)):
        try:
            one_call(rng, str(kind), pool, done)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, call {number}: {error}") from error
    return done


# 800 calls of 15 programs in all, 200 calls of them in the quick tier.
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_every_call_is_answered_or_refused(seed):
    done = fuzz(seed, PLANS if seed else QUICK_PLANS)
    assert {kind: done[kind] for kind in KINDS} == KINDS
    assert sum(KINDS.values()) == 200
    assert done["gradients"]
    assert done["answered"] + done["refused"] == KINDS["either"]


def test_every_change_applies_to_some_call():
    """No change is in vain: each is made of one of a few plans, and changes it."""
    rng = np.random.default_rng(0)
    plans = [draw_plan(rng) for _ in range(50)]
    calls = [draw_arrays(rng, plan) | {"mesh": plan.mesh} for plan in plans]
    changes = (*mutations.MISTAKES, *mutations.SPELLINGS, *mutations.EITHER)
    for function in dict.fromkeys(changes):
        made = [function(rng, plan, call) for plan, call in zip(plans, calls, strict=True)]
        assert any(made), function.__name__


def test_a_wrong_answer_is_noticed():
    """The guard: an answer of zeros, and one of tokens in another order, are no answers."""
    rng = np.random.default_rng(1)
    plan = draw_plan(rng)
    call = draw_arrays(rng, plan) | {"mesh": plan.mesh, "return_residual": True}
    cotangents = draw_cotangents(rng, call)
    out, lse, *_ = reference(call, cotangents)
    dtype = call["query"].dtype
    right = out.astype(dtype), lse.astype(np.float32)
    assert_right(plan, call, right, cotangents)
    for wrong in (out * 0, np.roll(out, 1, axis=1), out * 1.1):
        with pytest.raises(AssertionError, match="out: error"):
            assert_right(plan, call, (wrong.astype(dtype), right[1]), cotangents)
