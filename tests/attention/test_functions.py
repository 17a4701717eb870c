"""``score_mod`` and ``mask_mod``."""

from __future__ import annotations

import functools
import re
from typing import Any

import compare
import dense
import functions
import jax
import jax.numpy as jnp
import local_cases
import numpy as np
import pytest
from flax import nnx
from implementations import IMPLEMENTATIONS, QUICK
from meshes import mesh_of
from ring_cases import a_case, assert_exact, case_id

import burst_jax
from pallas_kernels import AttentionInputs, AttentionSpec, KVSide, Mask, QuerySide, Score, resolve

CASES = [
    a_case(3, "striped", "packed_causal", shard="63") | {"numbers": "both", "dropout": 0.3},
    a_case("2+h4", "zigzag", "causal", backward="rotate_query"),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_ring_is_as_exact_as_one_device(case):
    assert_exact(case | {"functions": True})


# Every kernel, in each of its forms: whole tiles and parts, ranges, a bias, a soft cap, dropout,
# and a table of blocks.
LOCAL_CASE = {
    "mask": "causal", "order": "contiguous", "blocks": 2, "heads": (4, 2), "lengths": (48, 48),
    "head_dim": 16, "dtype": "float32", "numbers": "none", "functions": "functions",
}  # fmt: skip
LOCAL_CASES = [
    LOCAL_CASE | changes
    for changes in (
        {},
        {"mask": "packed_window_cap", "order": "striped", "lengths": (63, 45)},
        {"mask": "packed_window_ranges", "lengths": (20, 57), "numbers": "both", "dropout": 0.3},
        {"mask": "cap", "heads": (8, 1), "dtype": "bfloat16", "table": (16, 16, True)},
    )
]


@functools.lru_cache
def local_oracle(index):
    inputs = local_cases.make_inputs(LOCAL_CASES[index], index)
    return inputs, *local_cases.oracle(inputs)


QUICK_CASES = {("triton", 0), ("triton", 1), ("triton", 2), ("triton", 3), ("xla", 1), ("xla", 3)}
QUICK_CASES |= {("reference", 2)}


@pytest.mark.parametrize(
    ("name", "index"),
    [
        pytest.param(name, index, marks=() if (name, index) in QUICK_CASES else pytest.mark.slow)
        for name in ("xla", "reference", "triton")
        for index in range(len(LOCAL_CASES))
    ],
)
def test_one_device_is_as_exact_as_dense(name, index):
    inputs, truth, one_device = local_oracle(index)
    attend = jax.jit(local_cases.attend, static_argnums=(0, 1), compiler_options=QUICK)
    arrays = inputs.q, inputs.kvs, inputs.q_tokens, inputs.kv_tokens, inputs.cotangents
    arrays += inputs.numbers, inputs.seeds, inputs.blocks
    got = [np.asarray(x) for x in attend(IMPLEMENTATIONS[name], inputs.spec, *arrays)]
    dtype = LOCAL_CASES[index]["dtype"]
    compare.assert_as_good_as(got, one_device, truth, dtype, 2 if dtype == "float32" else 1.5)
    local_cases.assert_zero_where_blind(got, inputs)


B, T, N, K, H = 2, 48, 4, 2, 8
SLOPES = np.asarray((0.3, -0.1, 0.05, 0.0), np.float32)
DOCUMENT = 20
SEGMENTS = 1 + np.broadcast_to(np.arange(T) // DOCUMENT, (B, T))
RNG = np.random.default_rng(3)
ARRAYS = [RNG.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K)]
DO = RNG.normal(size=(B, T, N, H)).astype(np.float32)


def results(mesh, **options):
    """``(out, dq, dk, dv)`` of a call, under a random cotangent."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(do, *arrays):
        attend = functools.partial(burst_jax.burst_attention, mesh=mesh, **options)
        out, vjp = jax.vjp(attend, *arrays)
        cotangent = jax.reshard(do, jax.typeof(out).sharding) if mesh.explicit_axes else do
        return out, *vjp(cotangent)

    return run(DO, *ARRAYS)


def wanted(keep=None, **options):
    """The same by dense attention in float64."""
    keep = np.ones((B, T, T), bool) if keep is None else keep
    out, _, *gradients = dense.truth(*ARRAYS, keep, DO, np.zeros((B, T, N)), **options)
    return out, *gradients


def assert_close(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def number(x):
    return x.astype(jnp.float32)


def alibi(score, batch, head, q_position, kv_position):
    slopes = [jnp.where(head == i, np.float32(x), np.float32(0)) for i, x in enumerate(SLOPES)]
    return score - sum(slopes) * number(jnp.abs(q_position - kv_position))


CAUSAL = dense.Mask(is_causal=True)
BY_ARGUMENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alibi-table": (
        {"score_mod": lambda s, b, h, q, k: s - jnp.asarray(SLOPES)[h] * number(jnp.abs(q - k))},
        {"numbers": {"alibi_slopes": SLOPES}, "distance": dense.distances(T, T)},
    ),
    "cap": ({"score_mod": lambda s, b, h, q, k: 1.5 * jnp.tanh(s / 1.5)}, {"soft_cap": 1.5}),
    "prefix": (
        {"mask_mod": lambda b, h, q, k: (q >= k) | (k < 8 + 4 * b)},
        {"keep": CAUSAL.dense(None, None, T, T, prefix_lengths=np.array([8, 12]))},
    ),
    "documents": (
        {"mask_mod": lambda b, h, q, k: q // DOCUMENT == k // DOCUMENT},
        {"keep": dense.Mask().dense(SEGMENTS, SEGMENTS, T, T)},
    ),
    "score-as-mask": (
        {"score_mod": lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf)},
        {"keep": CAUSAL.dense(None, None, T, T)},
    ),
}


@pytest.mark.parametrize(("function", "argument"), BY_ARGUMENT.values(), ids=BY_ARGUMENT)
def test_a_function_computes_what_an_argument_does(function, argument):
    assert_close(
        results(mesh_of(jax.sharding.AxisType.Auto, seq=2), **function), wanted(**argument)
    )


@pytest.mark.parametrize(
    ("kind", "axis"), [("Auto", "tensor_axis"), ("Explicit", "ulysses_axis")], ids=str
)
def test_batch_and_head_indices_are_global(kind, axis):
    """The same as on one device, with batch, heads and sequence sharded."""
    score, keep = functions.on_all(B, N, range(T), range(T))
    mesh = mesh_of(jax.sharding.AxisType[kind], data=2, seq=2, tensor=2)
    with jax.set_mesh(mesh):
        got = results(mesh, batch_axis="data", **{axis: "tensor"}, **functions.called(True))
    assert_close(got, wanted(keep, score=score))


@pytest.mark.parametrize("name", ["xla", "triton", "reference"])
def test_masked_scores_pass_no_gradient(name):
    """Not even where the derivative of score_mod is NaN or infinite: at the masked keys."""

    def score_mod(score, batch, head, q_position, kv_position):
        ahead = number(q_position - kv_position)
        # The mask hides the keys where this divides by 0.
        bent = jnp.where(ahead == 7.0, score / (ahead - 7.0), 1.5 * score)
        return jnp.where(q_position > 30, bent, -jnp.inf)

    def mask_mod(batch, head, q_position, kv_position):
        ahead = q_position - kv_position
        return (ahead > 0) & (ahead != 7)

    got = results(
        mesh_of(jax.sharding.AxisType.Auto, seq=1),
        score_mod=score_mod, mask_mod=mask_mod, implementation=IMPLEMENTATIONS[name],
    )  # fmt: skip
    for x in got:
        assert np.isfinite(x).all()
        assert (np.abs(x) > 0).any()
    for x in got[:2]:
        assert (x[:, :31] == 0).all()
        assert (np.abs(x[:, 31:]) > 0).any()


def mistaken(**options):
    return burst_jax.local_attention(*map(jnp.asarray, ARRAYS), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_mod": 3}, "score_mod is 3: it must be a function, score_mod(score, batch, head"),
        ({"mask_mod": np.ones((2, 2), bool)}, "it must be a function, mask_mod(batch, head"),
        ({"score_mod": lambda s, *_: s - s.max()}, "does 'reduce_max': it sees one score at a"),
        ({"score_mod": lambda s, *_: jnp.stack([s, s])}, "returns float32[2] for one score"),
        ({"score_mod": lambda s, b, *_: b}, "returns int32[] for one score: it must return one fl"),
        ({"mask_mod": lambda b, h, q, k: q - k}, "returns int32[] for one score: it must return"),
        ({"mask_mod": lambda b, h, q, k: None}, "returns nothing for one score"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        mistaken(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"score_mod": lambda s, b, h, q, k: s + jnp.asarray(SLOPES)[h]},
            "score_mod does 'dynamic_slice', which its kernels cannot do",
        ),
        (
            {"mask_mod": lambda b, h, q, k: jnp.asarray([True, False])[q % 2]},
            "mask_mod does 'dynamic_slice', which its kernels cannot do",
        ),
        (
            {"score_mod": lambda s, b, h, q, k: s + s.astype(jnp.float8_e4m3fn).astype(s.dtype)},
            "score_mod computes in float8_e4m3fn",
        ),
    ],
)
def test_what_kernels_cannot_do_is_refused_by_name_and_done_by_another(options, message):
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        mistaken(**options, implementation=IMPLEMENTATIONS["triton"])
    assert np.isfinite(mistaken(**options)).all()


def test_traced_captures_are_refused():
    for transform in (jax.jit, jax.grad, lambda run: lambda x: jax.vmap(run)(x[None])):
        with pytest.raises(NotImplementedError, match=r"captures float32.*compiled in"):
            transform(lambda x: mistaken(score_mod=lambda s, *_: s * x).sum())(jnp.float32(2))


def test_layers_take_functions_and_refuse_rows_and_heads_that_they_do_not_know():
    mesh = mesh_of(jax.sharding.AxisType.Auto, seq=2, data=2)
    options = {"mesh": mesh, "batch_axis": "data", "rope_theta": None, "rngs": nnx.Rngs(0)}
    x = jax.random.normal(jax.random.key(0), (2, 16, 8))
    causal = burst_jax.BurstAttention(8, 2, **options, is_causal=True)
    masked = burst_jax.BurstAttention(8, 2, **options, mask_mod=lambda b, h, q, k: q >= k)
    nnx.update(masked, nnx.state(causal))
    np.testing.assert_allclose(masked(x), causal(x), rtol=1e-5, atol=1e-6)
    by_row = burst_jax.BurstAttention(8, 2, **options, mask_mod=lambda b, h, q, k: b <= k)
    split = jax.P("data", "seq")
    inside = jax.shard_map(lambda x: by_row(x), mesh=mesh, in_specs=split, out_specs=split)
    with pytest.raises(NotImplementedError, match="reads the batch row or the head"):
        inside(x)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_table_of_blocks_of_a_function(by_head):
    def mask_mod(batch, head, q_position, kv_position):
        near = (q_position >= kv_position) & (q_position - kv_position < 9 + 4 * batch)
        return near | (kv_position < 4) & (head == 1) if by_head else near

    heads = N if by_head else None
    table = burst_jax.block_mask_of(mask_mod, T, T, 4, 8, num_heads=heads, batch=B)
    grid = np.ix_(range(B), range(heads or 1), range(T), range(T))
    blocks = np.asarray(mask_mod(*grid)).any(0).reshape(-1, T // 4, 4, T // 8, 8).any((2, 4))
    np.testing.assert_array_equal(table, blocks if by_head else blocks[0])
    got = results(mesh_of(jax.sharding.AxisType.Auto, seq=2), mask_mod=mask_mod, block_mask=table)
    assert_close(got, wanted(np.broadcast_to(np.asarray(mask_mod(*grid)), (B, heads or 1, T, T))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((T, T, 7, 8), "block_q is 7, q_length 48: blocks must divide the length"),
        ((T, T, 4, 8), "batch is None, and mask_mod reads it: pass the size, batch=..."),
    ],
)
def test_mistakes_of_a_table_are_named(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        burst_jax.block_mask_of(lambda b, h, q, k: b + h < q, *arguments)


@pytest.mark.parametrize(
    ("dim", "score_mod", "chosen"),
    [
        (64, functions.score_mod, "mosaic_sm90"),
        (128, alibi, "mosaic_sm90"),
        (128, functions.score_mod, "the head dim is 128, and the derivative of score_mod depends"),
        (64, lambda s, b, h, q, k: jnp.sin(s), "score_mod does 'sin', which its kernels cannot"),
    ],
    ids=["slope64", "added128", "slope128", "sine"],
)
def test_hoppers_own_backward_takes_what_it_has_registers_and_instructions_for(
    dim, score_mod, chosen
):
    x: Any = jax.ShapeDtypeStruct((1, 128, 2, dim), jnp.bfloat16)
    inputs = AttentionInputs(QuerySide(x), KVSide(x, x))
    spec = AttentionSpec(Mask(), Score(1.0, score_mod=score_mod))

    def choose(name):
        where = {"platform": "gpu", "compute_capability": 9.0, "backward": True, "spec": spec}
        return resolve(name, inputs=inputs, **where).name

    if chosen == "mosaic_sm90":
        assert choose("mosaic_sm90") == chosen
        return
    with pytest.raises(NotImplementedError, match=re.escape(chosen)):
        choose("mosaic_sm90")
    assert choose(None) == "triton"
