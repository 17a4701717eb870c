"""Random calls of ``burst_attention``: each is exact, or raises an error that names the argument.

- A call that the documentation allows is as exact as one device, gradients too, with any features
  at once.
- A wrong value of any argument raises ValueError or NotImplementedError, whatever else the call
  has. test_errors.py has the messages.
"""

from __future__ import annotations

import compare
import dense
import functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import valid_calls as valid
from flax import nnx
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from implementations import quick_jit
from jax.sharding import Mesh
from mistakes import GLOBAL, SHARED

import burst_jax
from burst_jax.attention.arguments import AttentionArguments
from burst_jax.attention.validation import ARRAYS, PER_HEAD

# The same examples in every run. A failure is not shrunk: examples compile for seconds.
SETTINGS = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
SEEDS = st.integers(0, 99)
slow = pytest.mark.slow


@pytest.mark.parametrize("part", [slice(3), pytest.param(slice(3, 10), marks=slow)], ids=str)
def test_valid_calls_are_exact(part):
    """Twice each: other arrays need no other program. The slow part has what the quick has not."""
    drawn, met, traced = 0, set(), []

    @settings(SETTINGS, max_examples=part.stop)
    @given(program=valid.programs(least=6), seed=SEEDS)
    def each(program, seed):
        nonlocal drawn
        drawn += 1
        if drawn <= (part.start or 0):
            met.update(valid.arguments(program, valid.draw(program, seed)[0]))
            return
        run, static = None, {}
        for one in (seed, seed + 1):
            arrays, cotangents = valid.draw(program, one)
            arrays |= static
            static = valid.static_arrays(program, arrays)
            run = run or valid.compiled(program, arrays, attention)
            got, wanted = run(arrays, cotangents), valid.reference(program, arrays, cotangents)
            compare.assert_exact(got, wanted, program.dtype, 2)

    def attention(**call):
        traced.append(None)
        met.update(call)
        return burst_jax.burst_attention(**call)

    each()
    # JAX may have dropped one of its many programs meanwhile.
    assert 0 < len(traced) < 1.2 * part.stop
    # test_masks.py has block masks on rings, test_functions.py dropout, test_document_tables.py the
    # tables of balanced layouts.
    elsewhere = {"block_mask", "dropout_rate", "dropout_key", "document_tables"}
    assert part.stop < 10 or met >= set(AttentionArguments.names()) - elsewhere


# --- wrong values --------------------------------------------------------------------------------

KEYWORDS = {*AttentionArguments.names(), "return_residual"}
IDS = ("query_segment_ids", "key_value_segment_ids")
# Whatever a caller may pass by accident.
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.complex_numbers(),
    st.binary(max_size=4), st.lists(st.integers(), max_size=3), st.tuples(st.text(max_size=3)),
    st.tuples(st.integers(), st.floats()),
    st.sampled_from((object(), (), {}, {"x"}, np.ndarray, Mesh, [1.0], ["seq"], (None,), b"seq")),
    st.sampled_from((np.array("auto"), np.array([True]), np.array(True), np.array(0.5))),
    st.sampled_from((np.float32(np.inf), jnp.ones((1, 1, 2)), jnp.bool_(True))),
    st.just(np.ones((1, 1, 2), int)),
)  # fmt: skip


def is_axes(program, x):
    names = (x,) if isinstance(x, str) else x
    return isinstance(names, tuple) and all(name in program.mesh.axis_names for name in names)


def is_int(x):
    return isinstance(x, int) and not isinstance(x, bool)


def is_real(x):
    return is_int(x) or isinstance(x, (float, np.floating))


def is_window(x):
    sides = x if isinstance(x, tuple) and len(x) == 2 else (x,)
    return all(side is None or (is_int(side) and 0 <= side < 2**31) for side in sides)


# Which of ANYTHING an argument accepts, by the documentation; others accept None, or nothing.
ACCEPTS = {
    **dict.fromkeys(valid.QKV, lambda p, x: False),
    **dict.fromkeys(
        ("pad", "is_causal", "deterministic", "return_residual"), lambda p, x: isinstance(x, bool)
    ),
    **dict.fromkeys(("layout", "backward"), lambda p, x: False),
    "seq_axis": lambda p, x: x is None or (is_axes(p, x) and x != ()),
    "ulysses_axis": lambda p, x: x is None or (isinstance(x, str) and is_axes(p, x)),
    **dict.fromkeys(("batch_axis", "tensor_axis"), lambda p, x: x is None or is_axes(p, x)),
    **dict.fromkeys(("score_mod", "mask_mod"), lambda p, x: x is None or isinstance(x, type)),
    "query_offset": lambda p, x: (
        (is_int(x) and abs(x) < 2**30) or (isinstance(x, np.ndarray) and x.dtype.kind == "i")
    ),
    "padding_id": lambda p, x: is_int(x) and -(2**31) <= x < 2**31,
    "scale": lambda p, x: x is None or (is_real(x) and abs(x) <= 2.0**100),
    "logits_soft_cap": lambda p, x: x is None or (is_real(x) and 2.0**-60 <= x <= 2.0**60),
    "local_window_size": lambda p, x: is_window(x),
    "attention_chunk_size": lambda p, x: x is None or (is_int(x) and x > 0),
    "dropout_rate": lambda p, x: is_real(x) and 0 <= x < 1,
}


def ones(program, name):
    """An array that the argument accepts."""
    if name == "block_mask":
        return np.ones((1, 1), bool)
    dtype = {"float": program.dtype, "float32": "float32"}.get(ARRAYS[name].dtype, "int32")
    return np.ones([program.sizes[x] for x in valid.SHAPES[name]], jnp.dtype(dtype))


def bent(program, name):
    """Arrays of another rank, shape, type or dtype than the argument accepts."""
    x = ones(program, name)
    dtypes = {"i": (np.float32, np.bool_), "b": (np.float32, np.int32)}
    wrong = [
        *(x[None, None], x[..., None, None], x[:0], x.tolist(), memoryview(bytes(4))),
        *(x.astype(dtype) for dtype in dtypes.get(x.dtype.kind, (np.float64, np.int32, np.bool_))),
        *(x.astype(dtype) for dtype in (">f4", object, np.complex64)), np.full(x.shape, "x"),
        jax.ShapeDtypeStruct(x.shape, x.dtype), np.ma.masked_array(x, x > 0),
        jax.random.split(jax.random.key(0), x.shape), jax.new_ref(jnp.asarray(x)),
        # A Flax variable stands for the array of per-head parameters.
        nnx.Param(jnp.asarray(x[:0] if name in PER_HEAD else x)),
    ]  # fmt: skip
    if name not in (*valid.QKV, "block_mask"):
        wrong.append(np.concatenate([x, x[:1]]))
    if name in valid.QKV:
        wrong += [x.astype(jnp.float8_e4m3fn), x[0], x.sum(), np.moveaxis(x, 3, 0)[:, :, :0]]
        wrong += [x.astype(jnp.dtype(d)) for d in ("bfloat16", "float32") if d != program.dtype]
    return wrong


def wrong_values(name, program):
    """Values that one argument does not accept, whatever the rest of the call is."""
    accepts = ACCEPTS.get(name, lambda program, x: x is None)
    strategies = [ANYTHING.filter(lambda x: not accepts(program, x))]
    rows = [change[name] for change, _ in SHARED + GLOBAL if [*change] == [name]]
    # Whether an array is wrong may depend on the sizes of the others.
    rows = [x for x in rows if not (name in ARRAYS and hasattr(x, "shape"))]
    if rows := [x for x in rows if not accepts(program, x)]:
        strategies.append(st.sampled_from(rows))
    if name in ARRAYS and name != "query_offset":
        strategies += 2 * [st.sampled_from(bent(program, name))]
    return st.one_of(strategies)


def names_value(message, value):
    """Whether a message has the value, or its type, shape or dtype."""
    if isinstance(value, tuple) and any(repr(each) in message for each in value):
        return True
    about = [repr(value)[:12], str(value)[:12], type(value).__name__]
    about += [str(getattr(value, name)) for name in ("shape", "dtype") if hasattr(value, name)]
    about += ["inf"] if is_int(value) and abs(value) > 10**308 else []
    return any(text in message for text in about)


@pytest.mark.parametrize("name", sorted({*valid.QKV, *KEYWORDS}))
def test_wrong_values_are_named(name):
    @settings(SETTINGS, max_examples=3)
    @given(program=valid.programs(small=True, least=0), data=st.data())
    def each(program, data):
        arrays, _ = valid.draw(program, 0)
        call = valid.arguments(program, valid.place(program, arrays))
        if name in ("segment_ids", *IDS):
            # Both sides have segment ids, or there is one array of them.
            call = {each: x for each, x in call.items() if not each.endswith("segment_ids")}
            call |= {each: ones(program, each) for each in IDS} if name in IDS else {}
        for _ in range(4):
            value = data.draw(wrong_values(name, program))
            with program.context(), pytest.raises(Exception) as error:  # noqa: PT011
                burst_jax.burst_attention(**call | {name: value})
            # A subclass, like the errors of a tracer, is an accident.
            assert error.type in (ValueError, NotImplementedError), repr(error.value)
            message = str(error.value)
            assert name in message
            assert names_value(message, value), message

    each()


# --- the reference itself ------------------------------------------------------------------------


def test_the_reference_is_the_gradient_of_dense_attention():
    """By JAX, with everything that a score may have."""
    rng, (batch, t, s, heads, kv_heads) = np.random.default_rng(0), (2, 5, 7, 4, 2)
    shapes = (batch, t, heads, 3), (batch, s, kv_heads, 3), (batch, s, kv_heads, 2)
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    do, dlse = rng.normal(size=(batch, t, heads, 2)), rng.normal(size=(batch, t, heads))
    numbers = dense.per_head("both", heads)
    distance = np.abs(np.subtract.outer(np.arange(t), np.arange(s))).astype(np.float64)
    factors = 1.25 * (rng.random((batch, heads, t, s)) < 0.8)
    score = functions.OfAll(functions.score_mod, batch, heads, tuple(range(t)), tuple(range(s)))
    keep = dense.kept(t, s, batch=batch, heads=heads, mask_mod=functions.mask_mod)
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

    @quick_jit
    def results_and_gradients(arrays, cotangents):
        results, vjp = jax.vjp(attend, *(x.astype(jnp.float64) for x in arrays))
        return *results, *vjp(cotangents)

    with jax.enable_x64(True):
        arrays = (q, k, v, numbers["alibi_slopes"], numbers["sink_logits"])
        want = results_and_gradients(arrays, (do, dlse))
    for x, y in zip(dense.truth(q, k, v, *given), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_a_wrong_answer_is_noticed():
    """Zeros, tokens in another order and a tenth too much, in each of the results."""
    program = find(valid.programs(), lambda program: program.sizes["T"] > 8, settings=SETTINGS)
    wanted = valid.reference(program, *valid.draw(program, 0))
    wanted = wanted._replace(truth=wanted.truth[:5], one_device=wanted.one_device[:5])
    dtypes = [np.dtype(program.dtype), np.dtype("float32"), *[np.dtype(program.dtype)] * 3]
    right = [x.astype(dtype) for x, dtype in zip(wanted.truth, dtypes, strict=True)]
    compare.assert_exact(right, wanted, program.dtype)
    for index, x in enumerate(right):
        for wrong in (np.zeros_like(x), np.roll(x, 1, axis=1), x * x.dtype.type(1.1)):
            answer = [*right[:index], wrong, *right[index + 1 :]]
            with pytest.raises(AssertionError):
                compare.assert_exact(answer, wanted, program.dtype)
