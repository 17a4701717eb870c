"""Random calls of ``burst_attention``: each is exact, or raises an error that names the argument.

- A call that the documentation allows is as exact as one device, gradients too, with any features
  at once.
- A mistake in any argument, alone or together with others, raises ValueError; what kernels or the
  platform do not support NotImplementedError; an unknown argument TypeError.
"""

from __future__ import annotations

import collections

import dense
import functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import valid_calls as valid
import wrong_calls as wrong
from hypothesis import HealthCheck, Phase, assume, find, given, settings
from hypothesis import strategies as st

import burst_jax

# The same examples in every run. A failure is not shrunk: examples compile for seconds.
SETTINGS = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
SEEDS = st.integers(0, 99)
slow = pytest.mark.slow


@pytest.mark.parametrize("examples", [4, pytest.param(28, marks=slow)])
def test_valid_calls_are_exact(examples):
    """Twice each: other arrays need no other program."""
    met = collections.Counter()

    @settings(SETTINGS, max_examples=examples)
    @given(program=valid.programs(least=6), seed=SEEDS)
    def each(program, seed):
        met.update(program.features)
        run, static = None, {}
        for draw in (seed, seed + 1):
            arrays = valid.draw_arrays(program, draw) | static
            static = valid.static_arrays(program, arrays)
            cotangents = valid.draw_cotangents(program, draw)
            run = run or valid.compiled(program, arrays)
            with program.context():
                got = jax.device_get(run(arrays, cotangents))
            valid.assert_right(program, got, *valid.reference(program, arrays, cotangents))

    each()
    # Fixed programs of test_masks.py and test_padding.py have positions by sequence.
    by_row = {"offset_by_row", "positions_by_row"}
    assert examples < 28 or met.keys() | by_row == set(valid.FEATURES)


def raised(program, call):
    with program.context(), pytest.raises(Exception) as error:  # noqa: PT011
        burst_jax.burst_attention(**call)
    # A subclass, like the errors of a tracer, is an accident.
    assert error.type in (ValueError, NotImplementedError), repr(error.value)
    return error.type, str(error.value)


def names_value(message, value):
    """Whether a message has the value, or its type, shape or dtype."""
    if isinstance(value, tuple) and any(repr(each) in message for each in value):
        return True
    about = [repr(value)[:12], str(value)[:12], type(value).__name__]
    about += [str(getattr(value, name)) for name in ("shape", "dtype") if hasattr(value, name)]
    return any(text in message for text in about)


@pytest.mark.parametrize("name", wrong.ARGUMENTS)
def test_wrong_values_are_named(name):
    @settings(SETTINGS, max_examples=3)
    @given(program=valid.programs(small=True, least=0), data=st.data())
    def each(program, data):
        call = valid.arguments(program, valid.draw_arrays(program, 0))
        # Both sides have segment ids, or neither.
        call |= wrong.good(program, *wrong.IDS) if name in wrong.IDS else {}
        for _ in range(4):
            value = data.draw(wrong.wrong_values(name, program))
            _, message = raised(program, call | {name: value})
            assert name in message
            assert names_value(message, value), message

    each()


@pytest.mark.parametrize("mistake", wrong.MISTAKES.values(), ids=wrong.MISTAKES)
def test_mistakes_of_several_arguments_are_named(mistake):
    @settings(SETTINGS, max_examples=5)
    @given(program=valid.programs(small=True, least=0), data=st.data())
    def each(program, data):
        call = valid.arguments(program, valid.draw_arrays(program, 0))
        changed = mistake(program, call, data.draw)
        assume(changed is not None)
        kind, message = raised(program, call | changed)
        assert kind is ValueError, message
        # The size of a mesh axis is named by the axis.
        assert any(name in message for name in (*changed, *program.mesh.axis_names)), message

    each()


def test_what_cannot_run_and_what_does_not_exist():
    assert set(wrong.ARGUMENTS) == set(wrong.ACCEPTS)

    @settings(SETTINGS, max_examples=6)
    @given(program=valid.programs(small=True, least=0), data=st.data())
    def each(program, data):
        call = valid.arguments(program, valid.draw_arrays(program, 0))
        name = data.draw(st.sampled_from(list(wrong.LIMITS)))
        value = data.draw(st.sampled_from(wrong.LIMITS[name]))
        kind, message = raised(program, call | {name: value})
        assert kind is NotImplementedError, message
        assert name in message or repr(value) in message
        unknown = data.draw(st.sampled_from(("is_casual", "mask", "axis_name", "positions")))
        with program.context(), pytest.raises(TypeError, match=unknown) as error:
            burst_jax.burst_attention(**call | {unknown: None})
        assert error.type is TypeError

    each()


# --- the reference itself ------------------------------------------------------------------------


def test_the_reference_is_the_gradient_of_dense_attention():
    """By JAX, with everything that a score may have."""
    rng, (batch, t, s, heads, kv_heads) = np.random.default_rng(0), (2, 5, 7, 4, 2)
    shapes = (batch, t, heads, 3), (batch, s, kv_heads, 3), (batch, s, kv_heads, 2)
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    do, dlse = rng.normal(size=(batch, t, heads, 2)), rng.normal(size=(batch, t, heads))
    numbers = dense.per_head("both", heads)
    distance = dense.distances(t, s).astype(np.float64)
    factors = 1.25 * (rng.random((batch, heads, t, s)) < 0.8)
    score, keep = functions.on_all(batch, heads, np.arange(t), np.arange(s))
    given = keep, do, dlse, 2.0, numbers, distance, factors, score, 0.7

    def attend(q, k, v, slopes, sinks):
        k, v = (jnp.repeat(x, heads // kv_heads, 2) for x in (k, v))
        logits = score(2 * jnp.tanh(0.7 * jnp.einsum("btnh,bsnh->bnts", q, k) / 2))
        logits -= slopes[:, None, None] * distance
        logits = jnp.where(keep, logits, -jnp.inf)
        sinks = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, sinks], 3)
        weights = jax.nn.softmax(logits)[..., :-1] * factors
        out = jnp.einsum("bnts,bsnh->btnh", weights, v)
        return out, jax.nn.logsumexp(logits, 3).swapaxes(1, 2)

    with jax.enable_x64(True):
        arrays = (q, k, v, numbers["alibi_slopes"], numbers["sink_logits"])
        results, vjp = jax.vjp(attend, *(jnp.asarray(x, jnp.float64) for x in arrays))
        want = [*results, *vjp((jnp.asarray(do), jnp.asarray(dlse)))]
    for x, y in zip(dense.truth(q, k, v, *given), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_a_wrong_answer_is_noticed():
    """Zeros, tokens in another order and a tenth too much, in each of the results."""
    program = find(valid.programs(), lambda program: program.sizes["T"] > 8, settings=SETTINGS)
    arrays, cotangents = valid.draw_arrays(program, 0), valid.draw_cotangents(program, 0)
    truth, one_device, keep = valid.reference(program, arrays, cotangents)
    letters = "TTTSS"
    dtypes = [np.dtype(program.dtype), np.dtype("float32"), *[np.dtype(program.dtype)] * 3]
    order = [valid.order_of(program, letter) for letter in letters]
    right = [x[:, at].astype(d) for x, at, d in zip(truth, order, dtypes, strict=False)]
    valid.assert_right(program, right, truth[:5], one_device[:5], keep)
    for index, x in enumerate(right):
        for wrong_one in (np.zeros_like(x), np.roll(x, 1, axis=1), x * x.dtype.type(1.1)):
            answer = [*right[:index], wrong_one, *right[index + 1 :]]
            with pytest.raises(AssertionError):
                valid.assert_right(program, answer, truth[:5], one_device[:5], keep)
