"""The ring against dense float64 attention, over all pairs of its options."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import compare
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import valid_calls as valid
from cases import all_pairs, few_of, in_tiers
from implementations import IMPLEMENTATIONS
from meshes import mesh_of
from ring_cases import a_case, assert_exact, case_id, program_of

import burst_jax

# Rings, two levels, Ulysses within a node, and all of them together.
FACTORS = {
    "ring": (1, 3, 5, 7, "2x3", "2+h2", "h4", "1x2+h4"),
    "layout": ("contiguous", "zigzag", "striped", "striped:3"),
    "mask": ("full", "causal", "window40_17", "packed_window_cap"),
    "heads": ((4, 4), (8, 2), (8, 1)),
    "backward": ("rotate_kv", "rotate_query"),
    "shard": ("even", "63", "longer_keys", "longer_queries"),
    "head_dim": (16, 33),
    "value_dim": ("same", 24),
    "dtype": ("float32", "bfloat16", "float16"),
    "numbers": ("none", "both"),
}
# The quick tier meets every level of every factor, all tests every pair of them.
CASES = all_pairs(FACTORS)
# Four Ulysses devices copy each of two key heads.
COPIED = a_case("h4", "contiguous", "causal")


@pytest.mark.parametrize("case", in_tiers([*CASES, COPIED], case_id, [*few_of(CASES), COPIED]))
def test_ring_is_as_exact_as_one_device(case):
    assert_exact(case)


def test_zero_gradients_fail():
    """The guard: a comparison that all-zero gradients pass would prove nothing."""
    case = a_case(3, "zigzag", "packed_window_cap", shard="63") | {"dtype": "bfloat16"}
    program = program_of(case)
    truth, one_device, keep, _ = valid.reference(program, *valid.draw(program, 0))
    assert not keep.any(3).all()  # Some queries see nothing: their zeros are asserted above.
    for name in ("dq", "dk", "dv"):
        broken = [x * 0 if n == name else x for n, x in zip(compare.NAMES, truth, strict=True)]
        with pytest.raises(AssertionError, match=name):
            compare.assert_as_good_as(broken, one_device, truth, "bfloat16")


def test_error_does_not_grow_with_the_ring():
    """With large logits, of 16-bit inputs; a second run gives the same bits."""
    case = a_case(8, "zigzag", "causal", "auto") | {"dtype": "bfloat16", "head_dim": 32}
    programs = [program_of(case | {"ring": n}, scale=36 * 32**-0.5) for n in (8, 1)]
    programs[1] = dataclasses.replace(programs[1], sizes=programs[0].sizes)
    inputs = valid.draw(programs[0], 0)
    truth = valid.reference(programs[0], *inputs).truth
    run, run_on_one = (valid.compiled(program, inputs[0]) for program in programs)
    eight, again, one = run(*inputs), run(*inputs), run_on_one(*inputs)
    for name, got, same, single, exact in zip(compare.NAMES, eight, again, one, truth, strict=True):
        _, rms = compare.errors(got, exact)
        _, single_rms = compare.errors(single, exact)
        assert rms <= 1.5 * single_rms + 1e-6, name
        np.testing.assert_array_equal(same, got, err_msg=name)


def events(jaxpr, stack=""):
    """``(ring step, event)`` of a traced ring in order: p permute, k kernel, b barrier."""
    letters = {"ppermute": "p", "optimization_barrier": "b"}
    for equation in jaxpr.eqns:
        here = f"{stack}/{equation.source_info.name_stack}"
        step = "".join(re.findall(r"ring_(\w+_step_\d)", here)[-1:])
        if equation.primitive.name in letters:
            yield step, letters[equation.primitive.name]
        elif equation.params.get("name") in ("forward", "backward"):
            yield step, "k"
        else:
            for value in jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr):
                inner = getattr(value, "jaxpr", value)
                yield from events(inner, here) if is_jaxpr(inner) else ()


def is_jaxpr(x):
    return hasattr(x, "eqns")


# By ring step, with a barrier per result at the end of each pass. Between the passes are the
# barriers of out, of lse, of delta and of the backward ring's inputs.
SEQUENCES = {
    # Q, dO and the stats are sent, and the sum of dQ two steps later.
    ((4,), "rotate_query"): "ppkb ppkb ppkb k bbbb pppkb pppkb ppppkb pkb pkbbbb",
    # K and V are sent to the next step, and in chunks to the next pass.
    ((2, 3), "rotate_kv"): "ppppkb ppppkb ppkb ppkb ppkb k bbbb"
    " ppppkb ppppkb ppppkb ppppkb ppppppkb ppkb ppkbbbbb",
}


@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_every_step_ends_with_a_barrier_unless_nothing_is_sent(case):
    sizes, rotation = case
    axes = ("outer", "inner")[-len(sizes) :]
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh_of(**dict(zip(axes, sizes, strict=True))),
        seq_axis=axes, is_causal=True, layout="zigzag", backward=rotation,
        implementation=IMPLEMENTATIONS["xla"],
    )  # fmt: skip
    x = jnp.zeros((1, 48, 2, 8))
    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(attend, x, x, x)[1](x))(x)
    steps = itertools.groupby(events(jaxpr.jaxpr), lambda event: event[0])
    assert " ".join("".join(kind for _, kind in step) for _, step in steps) == SEQUENCES[case]
