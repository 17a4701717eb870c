"""``score_mod`` and ``mask_mod``, with dropout where both read positions.

test_errors.py has their mistakes.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import dense
import functions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import valid_calls as valid
from flax import nnx
from implementations import IMPLEMENTATIONS, quick_jit
from jax import lax
from jax.sharding import AxisType
from meshes import mesh_of
from ring_cases import a_case, assert_exact

import burst_jax
from pallas_kernels import (
    MOSAIC_SM80,
    MOSAIC_SM90,
    AttentionInputs,
    AttentionSpec,
    KVSide,
    Mask,
    QuerySide,
    Score,
    resolve,
)

slow = pytest.mark.slow


@pytest.mark.slow
def test_a_ring_is_as_exact_as_one_device_with_the_same_weights_dropped():
    case = a_case(3, "striped", "packed_causal", "rotate_query", shard="63") | {"numbers": "both"}
    assert_exact(case | {"functions": "functions", "dropout": True})


@pytest.mark.parametrize(
    ("kind", "axis"),
    [("Auto", "tensor"), pytest.param("Explicit", "ulysses", marks=pytest.mark.slow)],
    ids=["auto", "explicit"],
)
def test_batch_and_head_indices_and_seeds_are_global(kind, axis):
    """The same as on one device, with batch, heads and sequence sharded."""
    features = ("score_mod", "mask_mod", "dropout", "is_causal")
    mesh = {"data": 2, "seq": 2, axis: 2}
    valid.assert_exact(valid.program_of(mesh, features, kind=AxisType[kind]))


B, T, N, K, H = 2, 48, 4, 2, 8
SLOPES = np.asarray((0.3, -0.1, 0.05, 0.0), np.float32)
RNG = np.random.default_rng(3)
ARRAYS = [RNG.normal(size=(B, T, n, H)).astype(np.float32) for n in (N, K, K)]
DO = RNG.normal(size=(B, T, N, H)).astype(np.float32)


def results(**options):
    """``(out, dq, dk, dv)`` of a call on one device, under a random cotangent."""

    @quick_jit
    def run(do, *arrays):
        out, vjp = jax.vjp(functools.partial(burst_jax.local_attention, **options), *arrays)
        return out, *vjp(do)

    return run(DO, *ARRAYS)


def number(x):
    return x.astype(jnp.float32)


def alibi(score, batch, head, q_position, kv_position):
    slopes = [jnp.where(head == i, np.float32(x), np.float32(0)) for i, x in enumerate(SLOPES)]
    return score - sum(slopes) * number(jnp.abs(q_position - kv_position))


def test_functions_compute_what_arguments_do():
    """Prefixes by a mask_mod; ALiBi slopes of a captured table, and scores of -inf as a mask."""

    def score_mod(score, batch, head, q, k):
        score = score - jnp.asarray(SLOPES)[head] * number(jnp.abs(q - k))
        return jnp.where(k < 40, score, -jnp.inf)

    got = results(score_mod=score_mod, mask_mod=lambda b, h, q, k: (q >= k) | (k < 8 + 4 * b))
    out, _, *gradients = dense.reference(
        DO, np.zeros((B, T, N)), **dict(zip(valid.QKV, ARRAYS, strict=True)), is_causal=True,
        prefix_lengths=np.array([8, 12]), key_value_seq_lengths=np.array([40, 40]),
        alibi_slopes=SLOPES,
    ).truth  # fmt: skip
    for x, y in zip(got, (out, *gradients[:3]), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_masked_scores_pass_no_gradient():
    """Not even where the derivative of score_mod is NaN or infinite: at the masked keys."""

    def score_mod(score, batch, head, q_position, kv_position):
        ahead = number(q_position - kv_position)
        # The mask hides the keys where this divides by 0.
        bent = jnp.where(ahead == 7.0, score / (ahead - 7.0), 1.5 * score)
        return jnp.where(q_position > 30, bent, -jnp.inf)

    def mask_mod(batch, head, q_position, kv_position):
        ahead = q_position - kv_position
        return (ahead > 0) & (ahead != 7)

    got = results(score_mod=score_mod, mask_mod=mask_mod, implementation=IMPLEMENTATIONS["xla"])
    for x in got:
        assert np.isfinite(x).all()
        assert (np.abs(x) > 0).any()
    for x in got[:2]:
        assert (x[:, :31] == 0).all()
        assert (np.abs(x[:, 31:]) > 0).any()


def mistaken(**options):
    return burst_jax.local_attention(*map(jnp.asarray, ARRAYS), **options)


# fmt: off
LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"score_mod": lambda s, b, h, q, k: s + jnp.asarray(SLOPES)[h]},
     "score_mod does 'dynamic_slice', which its kernels cannot do"),
    ({"mask_mod": lambda b, h, q, k: jnp.asarray([True, False])[q % 2]},
     "mask_mod does 'dynamic_slice', which its kernels cannot do"),
    ({"score_mod": lambda s, b, h, q, k: s + s.astype(jnp.float8_e4m3fn).astype(s.dtype)},
     "score_mod computes in float8_e4m3fn"),
    ({"score_mod": lambda s, b, h, q, k: s + lax.rem(s, 3.0)},
     "score_mod does 'rem' in float32, which its kernels can do with integers alone: compute it"),
]
# fmt: on


def test_kernels_name_the_operation_that_they_do_not_support():
    x: Any = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    inputs = AttentionInputs(QuerySide(x), KVSide(x, x))
    for options, message in LIMITS:
        spec = AttentionSpec(
            Mask(mask_mod=options.get("mask_mod")), Score(1.0, score_mod=options.get("score_mod"))
        )
        for kernels in (MOSAIC_SM80, MOSAIC_SM90):
            reason = kernels.unsupported_functions(spec, inputs, backward=False)
            assert reason is not None
            assert message in reason
        assert np.isfinite(mistaken(**options)).all()


def test_traced_captures_raise():
    for transform in (jax.jit, jax.grad, lambda run: lambda x: jax.vmap(run)(x[None])):
        with pytest.raises(NotImplementedError, match=r"captures float32.*compiled in"):
            transform(lambda x: mistaken(score_mod=lambda s, *_: s * x).sum())(jnp.float32(2))


def test_layers_accept_functions_of_positions_inside_shard_map():
    mesh = mesh_of(seq=2, data=2)
    options: Any = {"mesh": mesh, "batch_axis": "data", "rope_theta": None, "rngs": nnx.Rngs(0)}
    x, split = jax.random.normal(jax.random.key(0), (2, 16, 8)), jax.P("data", "seq")

    def inside(mask_mod):
        layer = burst_jax.BurstAttention(8, 2, **options, mask_mod=mask_mod)
        run = jax.shard_map(lambda x: layer(x), mesh=mesh, in_specs=split, out_specs=split)
        return jax.eval_shape(run, x)

    assert inside(lambda b, h, q, k: q >= k).shape == x.shape
    with pytest.raises(NotImplementedError, match="reads the batch row or the head"):
        inside(lambda b, h, q, k: b <= k)


@pytest.mark.parametrize("by_head", [False, True])
def test_block_mask_of_a_function(by_head):
    def mask_mod(batch, head, q_position, kv_position):
        near = (q_position >= kv_position) & (q_position - kv_position < 9 + 4 * batch)
        return near | (kv_position < 4) & (head == 1) if by_head else near

    heads = N if by_head else None
    table = burst_jax.block_mask_of(mask_mod, T, 40, 4, 8, num_heads=heads, batch=B)
    grid = np.ix_(range(B), range(heads or 1), range(T), range(40))
    blocks = np.asarray(mask_mod(*grid)).any(0).reshape(-1, T // 4, 4, 5, 8).any((2, 4))
    np.testing.assert_array_equal(table, blocks if by_head else blocks[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((T, T, 7, 8), "block_q is 7, q_length 48: blocks must divide the length"),
        ((T, T, 4, 8), "batch is None, and mask_mod reads it: pass the size, batch=..."),
    ],
)
def test_errors_of_block_mask_of(arguments, message):
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
def test_sm90_backward_supports_what_its_registers_and_instructions_allow(dim, score_mod, chosen):
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
    assert choose(None) == ("xla" if dim == 64 else "mosaic_sm80")
