"""``score_mod`` and ``mask_mod``: users' own functions of single scores."""

from __future__ import annotations

import functools
import re
from typing import Any

import compare
import functions
import jax
import jax.numpy as jnp
import local_cases
import numpy as np
import pytest
from cases import in_tiers
from flax import nnx
from implementations import IMPLEMENTATIONS, QUICK
from meshes import mesh_of
from ring_cases import a_case, assert_exact, case_id

import burst_jax
from pallas_kernels import AttentionSpec, Mask, Operands, Score, Tokens, resolve

CASES = [
    a_case(1, "contiguous", "full"),
    a_case(2, "zigzag", "causal", backward="rotate_query"),
    a_case(3, "striped", "packed_causal", shard="63"),
    a_case(5, "contiguous", "window40_17", backward="rotate_query", shard="longer_keys"),
    a_case(8, "zigzag", "packed_window_cap"),
    a_case("2x3", "striped", "causal", backward="rotate_query"),
    a_case("2+h4", "zigzag", "causal"),
]
CASES = [case | {"functions": True} for case in CASES]
CASES[2]["numbers"] = CASES[5]["numbers"] = "both"
CASES[3]["dropout"] = CASES[4]["dropout"] = 0.3


@pytest.mark.parametrize("case", in_tiers(CASES, case_id, CASES[2:7:2]))
def test_a_ring_is_as_exact_as_one_device(case):
    assert_exact(case)


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


@pytest.mark.parametrize("name", ["xla", "reference", "triton"])
@pytest.mark.parametrize(
    "index", range(len(LOCAL_CASES)), ids=map(local_cases.case_id, LOCAL_CASES)
)
def test_one_device_is_as_exact_as_dense(index, name):
    inputs, truth, one_device = local_oracle(index)
    attend = jax.jit(local_cases.attend, static_argnums=(0, 1), compiler_options=QUICK)
    arrays = inputs.q, inputs.kvs, inputs.q_tokens, inputs.kv_tokens, inputs.cotangents
    arrays += inputs.numbers, inputs.seeds, inputs.blocks
    got = [np.asarray(x) for x in attend(IMPLEMENTATIONS[name], inputs.spec, *arrays)]
    dtype = LOCAL_CASES[index]["dtype"]
    compare.assert_as_good_as(got, one_device, truth, dtype, 2 if dtype == "float32" else 1.5)
    local_cases.assert_zero_where_blind(got, inputs)


B, T, N, K, H = 2, 48, 4, 2, 8
SLOPES = (0.3, -0.1, 0.05, 0.0)


@functools.lru_cache
def arrays():
    rng = np.random.default_rng(3)
    return [jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K)]


def results(mesh, **options):
    """``(out, dq, dk, dv)`` of a call, under a random cotangent."""
    rng = np.random.default_rng(4)
    do = jnp.asarray(rng.normal(size=(B, T, N, H)), jnp.float32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(*arrays):
        attend = functools.partial(burst_jax.burst_attention, mesh=mesh, **options)
        out, vjp = jax.vjp(attend, *arrays)
        cotangent = jax.reshard(do, jax.typeof(out).sharding) if mesh.explicit_axes else do
        return out, *vjp(cotangent)

    return run(*arrays())


def number(x):
    return x.astype(jnp.float32)


def alibi(score, batch, head, q_position, kv_position):
    slopes = [jnp.where(head == i, np.float32(x), np.float32(0)) for i, x in enumerate(SLOPES)]
    return score - sum(slopes) * number(jnp.abs(q_position - kv_position))


TABLE = np.asarray(SLOPES, np.float32)
DOCUMENT = 20
SEGMENTS = 1 + np.broadcast_to(np.arange(T) // DOCUMENT, (B, T))


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        ({"score_mod": alibi}, {"alibi_slopes": TABLE}),
        (
            {"score_mod": lambda s, b, h, q, k: s - jnp.asarray(TABLE)[h] * number(jnp.abs(q - k))},
            {"alibi_slopes": TABLE},
        ),
        ({"score_mod": lambda s, b, h, q, k: 1.5 * jnp.tanh(s / 1.5)}, {"logits_soft_cap": 1.5}),
        ({"mask_mod": lambda b, h, q, k: q >= k}, {"is_causal": True}),
        pytest.param(
            {"mask_mod": lambda b, h, q, k: jnp.abs(q - k) <= 7},
            {"local_window_size": 7},
            marks=pytest.mark.slow,
        ),
        (
            {"mask_mod": lambda b, h, q, k: (q >= k) | (k < 8 + 4 * b)},
            {"is_causal": True, "prefix_lengths": np.array([8, 12])},
        ),
        (
            {"mask_mod": lambda b, h, q, k: q // DOCUMENT == k // DOCUMENT},
            {"query_segment_ids": SEGMENTS, "key_value_segment_ids": SEGMENTS},
        ),
        (
            {"score_mod": lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf)},
            {"is_causal": True},
        ),
    ],
    ids=["alibi", "alibi-table", "cap", "causal", "window", "prefix", "documents", "score-as-mask"],
)
def test_a_function_is_what_the_argument_says(function, argument):
    mesh = mesh_of(jax.sharding.AxisType.Auto, seq=2)
    for got, want in zip(results(mesh, **function), results(mesh, **argument), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2], ids=lambda kind: kind.name)
def test_rows_and_heads_are_those_of_the_whole_call(kind):
    """The same as on one device, with batch, heads and sequence split, and with heads exchanged."""
    mods = {"score_mod": functions.score_mod, "mask_mod": functions.mask_mod}
    want = results(mesh_of(jax.sharding.AxisType.Auto, seq=1), **mods)
    mesh = mesh_of(kind, data=2, seq=2, tensor=2)
    with jax.set_mesh(mesh):
        for axes in ({"tensor_axis": "tensor"}, {"ulysses_axis": "tensor"}):
            got = results(mesh, batch_axis="data", **axes, **mods)
            for x, y in zip(got, want, strict=True):
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_rows_that_a_function_hides_pass_no_gradient():
    """Their scores are all -inf: out is 0, and nothing of it is NaN."""
    mesh = mesh_of(jax.sharding.AxisType.Auto, seq=2)

    def score_mod(score, batch, head, q_position, kv_position):
        return jnp.where(q_position > 30, score / number(q_position - 30), -jnp.inf)

    out, dq, dk, dv = results(mesh, score_mod=score_mod, implementation=IMPLEMENTATIONS["triton"])
    for x in (out, dq):
        assert (x[:, :31] == 0).all()
        assert (np.abs(x[:, 31:]) > 0).any()
    assert np.isfinite(dk).all()
    assert np.isfinite(dv).all()


def mistaken(**options):
    return burst_jax.local_attention(*arrays(), **options)


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
            {"score_mod": lambda s, b, h, q, k: s + jnp.asarray(TABLE)[h]},
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
    dense = np.asarray(mask_mod(*grid)).any(0).reshape(-1, T // 4, 4, T // 8, 8).any((2, 4))
    np.testing.assert_array_equal(table, dense if by_head else dense[0])
    mesh = mesh_of(jax.sharding.AxisType.Auto, seq=2)
    want = results(mesh, mask_mod=mask_mod)
    got = results(mesh, mask_mod=mask_mod, block_mask=table)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


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
    tokens = Tokens(jnp.arange(128, dtype=jnp.int32))
    spec = AttentionSpec(Mask(), Score(1.0, score_mod=score_mod))

    def choose(name):
        where = {"platform": "gpu", "compute_capability": 9.0, "backward": True, "spec": spec}
        return resolve(name, operands=Operands(x, x, x, tokens, tokens), **where).name

    if chosen == "mosaic_sm90":
        assert choose("mosaic_sm90") == chosen
        return
    with pytest.raises(NotImplementedError, match=re.escape(chosen)):
        choose("mosaic_sm90")
    assert choose(None) == "triton"
