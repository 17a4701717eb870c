"""The ring against dense float64 attention, over all pairs of its options."""

from __future__ import annotations

import collections
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
from compiled_programs import gradient
from implementations import IMPLEMENTATIONS
from meshes import mesh_of
from ring_cases import a_case, assert_exact, case_id, program_of

import burst_jax
from burst_jax.ring import local
from pallas_kernels import XLA
from pallas_kernels.backend import DqAccumulator

# Rings, two levels, Ulysses within a node, and all of them together: tests/attention/test_fuzz.py
# draws further ones.
FACTORS = {
    "ring": (3, "2x3", "2+h2", "1x2+h4"),
    "layout": ("contiguous", "zigzag", "striped:3"),
    "mask": ("causal", "window40_17", "packed_window_cap"),
    "heads": ((4, 4), (8, 2), (8, 1)),
    "backward": ("rotate_kv", "rotate_query"),
    "shard": ("63", "longer_keys", "longer_queries"),
    "head_dim": (16, 33),
    "value_dim": ("same", 24),
    "dtype": ("float32", "bfloat16", "float16"),
    "numbers": ("none", "both"),
}
# The quick tier meets every level of every factor, all tests every pair of them.
CASES = all_pairs(FACTORS, seed=17)  # the fewest cases of a few seeds
# Every second one with the dense reference, which compiles in two thirds of the time.
CASES = [case | {"implementation": ("xla", "reference")[i % 2]} for i, case in enumerate(CASES)]
# Four Ulysses devices copy each of two key heads.
COPIED = a_case("h4", "contiguous", "causal")


@pytest.mark.parametrize("case", in_tiers([*CASES, COPIED], case_id, [*few_of(CASES), COPIED]))
def test_ring_is_as_exact_as_one_device(case, program):
    assert_exact(case, jit=program)


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


@pytest.mark.slow
def test_error_does_not_grow_with_the_ring():
    """With large logits, of 16-bit inputs; a second run gives the same bits."""
    case = a_case(4, "zigzag", "causal", "auto") | {"dtype": "bfloat16", "head_dim": 32}
    programs = [program_of(case | {"ring": n}, scale=36 * 32**-0.5) for n in (4, 1)]
    programs[1] = dataclasses.replace(programs[1], sizes=programs[0].sizes)
    inputs = valid.draw(programs[0], 0)
    truth = valid.reference(programs[0], *inputs).truth
    run, run_on_one = (valid.compiled(program, inputs[0]) for program in programs)
    four, again, one = run(*inputs), run(*inputs), run_on_one(*inputs)
    for name, got, same, single, exact in zip(compare.NAMES, four, again, one, truth, strict=True):
        _, rms = compare.errors(got, exact)
        _, single_rms = compare.errors(single, exact)
        assert rms <= 1.5 * single_rms + 1e-6, name
        np.testing.assert_array_equal(same, got, err_msg=name)


def with_accumulator(zeros, finish, **options):
    """XLA's local attention, with dQ accumulated in a form of its own: heads first, and negative.

    ``zeros``: dQ's shape, ``maximum`` and inputs ``-> accumulator``; ``finish``: the inverse.
    """

    def add(inputs, bounds, dq, dkv=None, *, spec, out_dtype=None):
        del out_dtype
        assert XLA.backward is not None
        made, dkv, per_head = XLA.backward(inputs, bounds, None, dkv, spec=spec)
        sums, *rest = dq
        length = made.shape[1]
        return (sums.at[:, :, :length].add(-made.swapaxes(1, 2)), *rest), dkv, per_head

    def first(inputs, bounds, *, spec, maximum=lambda x: x):
        del bounds, spec
        batch, length, heads, dim = inputs.query.q.shape
        return zeros((batch, heads, length, dim), maximum, inputs)

    accumulator = DqAccumulator(first, add, finish, **options)
    return dataclasses.replace(XLA, dq_accumulator=accumulator, backward=accumulator.backward)


def padded_form(padding, counts, **options):
    """Without other state, with so many further queries; ``counts`` what is traced."""

    def zeros(shape, maximum, inputs):
        del maximum, inputs
        counts["zeros"] += 1
        batch, heads, length, dim = shape
        return (jnp.zeros((batch, heads, length + padding, dim)),)

    def finish(dq, inputs, *, spec):
        del spec
        counts["finish"] += 1
        return -dq[0][:, :, : inputs.q_length].swapaxes(1, 2)

    return with_accumulator(zeros, finish, **options)


@pytest.mark.parametrize(
    ("ring", "backward", "padding", "additive", "counts"),
    [
        # Made once, and every step adds to it.
        ("5", "rotate_kv", 3, False, {"zeros": 1, "finish": 1}),
        ("2+h2", "rotate_kv", 0, True, {"zeros": 1, "finish": 1}),
        # Three partial sums rotate; and for its size.
        ("5", "rotate_query", 0, True, {"zeros": 3 + 1, "finish": 1}),
        # Would send more, or cannot be added up. Each call makes one; three of them are traced:
        # with no sums, with that of dK and dV, with both.
        ("3", "rotate_query", 1, True, {"zeros": 3 + 1, "finish": 3}),
        ("3", "rotate_query", 0, False, {"zeros": 3, "finish": 3}),
        ("1", "rotate_kv", 0, True, {"zeros": 1, "finish": 1}),
    ],
)
def test_dq_is_accumulated_in_a_form_of_the_implementation_s_own(
    ring, backward, padding, additive, counts
):
    seen = collections.Counter()
    kernels = padded_form(padding, seen, is_additive=additive)
    case = a_case(ring, "zigzag", "causal", backward, kernels)
    assert_exact(case | {"heads": (4, 4)})
    assert seen == counts


def test_an_accumulator_starts_from_the_maximum_over_the_ring():
    """Over all keys that its queries meet."""

    def zeros(shape, maximum, inputs):
        return jnp.zeros(shape), maximum(jnp.max(inputs.kv.k))

    def finish(dq, inputs, *, spec):
        del spec
        return jnp.full_like(inputs.query.q, dq[1])

    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh_of(outer=2, inner=3), seq_axis=("outer", "inner"),
        implementation=with_accumulator(zeros, finish, is_additive=False), backward="rotate_kv",
    )  # fmt: skip
    key = jnp.broadcast_to(jnp.arange(24.0)[:, None, None], (1, 24, 2, 8))
    out, vjp = jax.vjp(attend, key, key, key)
    np.testing.assert_array_equal(vjp(out)[0], 23)


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


def calls_of(jaxpr, name):
    """The equations of a traced program that call a jitted function of this name."""
    for equation in jaxpr.eqns:
        if equation.params.get("name") == name:
            yield equation
            continue
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr):
            inner = getattr(value, "jaxpr", value)
            yield from calls_of(inner, name) if is_jaxpr(inner) else ()


@pytest.mark.parametrize(
    ("size", "dtypes"),
    [(1, ["bfloat16"]), (2, ["bfloat16"] * 2), (5, ["float32"] * 3 + ["bfloat16"] * 2)],
)
def test_out_is_rounded_by_the_last_two_steps(size, dtypes):
    """So the last one can work in place; any earlier rounding would add up."""
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh_of(seq=size), implementation=IMPLEMENTATIONS["xla"]
    )
    x = jnp.zeros((1, 10, 2, 8), jnp.bfloat16)
    calls = calls_of(jax.make_jaxpr(attend)(x, x, x).jaxpr, "forward")
    assert [call.outvars[0].aval.dtype.name for call in calls] == dtypes


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


def test_each_step_of_a_ring_has_a_name():
    """Steps that send and steps with a kernel, of a ring of three.

    The last step of the backward pass is the gradient's final transfer.
    """
    attend = functools.partial(
        burst_jax.burst_attention, mesh=mesh_of(seq=3), implementation=XLA, backward="rotate_kv"
    )
    names = jax.jit(gradient(attend)).lower(*[jnp.ones((1, 24, 2, 8))] * 3)
    names = names.as_text(debug_info=True)
    for direction, sends, kernels in (
        ("forward", [0, 1], [0, 1, 2]),
        ("backward", [0, 1, 2, 3], [0, 1, 2, 3]),
    ):
        for operation, want in (("ppermute", sends), (f"jit({direction})", kernels)):
            path = rf'"(?:[^"]*/)?ring_{direction}_step_(\d+)/{re.escape(operation)}'
            assert sorted({int(step) for step in re.findall(path, names)}) == want
        assert f'"burst_{direction}/' in names  # The function that the steps call.


@pytest.mark.parametrize(
    ("layout", "limit", "least", "known"),
    [
        ("contiguous", "_MOST_KNOWN_SCORES", 0, None),
        pytest.param("zigzag", "_MOST_KNOWN_STEPS", 0, None, marks=pytest.mark.slow),
        # Bounds alone: positions of queries, and of keys at two steps, are 3 x 4,096.
        pytest.param("contiguous", "_MOST_KNOWN_NUMBERS", 12000, 1, marks=pytest.mark.slow),
        pytest.param("contiguous", "_MOST_KNOWN_NUMBERS", 0, None, marks=pytest.mark.slow),
    ],
)
def test_tile_bounds_known_while_tracing_are_those_that_devices_compute(
    monkeypatch, layout, limit, least, known
):
    """Every shard has several tiles."""
    mesh, length = mesh_of(outer=2, inner=2), 4096
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, length, 1, 8))
    tables, results, of = [], [], local._known_tables

    def kept(route, inputs, tables_of):
        with monkeypatch.context() as patch:
            patch.setattr(local, "_known_tables", of)  # It calls itself.
            tables.append(of(route, inputs, tables_of))
        return tables[-1]

    monkeypatch.setattr(local, "_known_tables", kept)
    for most in (getattr(local, limit), least):
        monkeypatch.setattr(local, limit, most)
        jax.clear_caches()
        attend = functools.partial(
            burst_jax.burst_attention, mesh=mesh, seq_axis=("outer", "inner"), layout=layout,
            is_causal=True, local_window_size=(700, 0), implementation="xla",
        )  # fmt: skip
        results.append(jax.jit(gradient(attend))(q, k, v))
    half = len(tables) // 2
    assert half >= 2  # both passes
    # Positions and bounds.
    assert [x and len(x) for x in tables] == [2] * half + [known] * half
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.abs(want).max() > 0.1
