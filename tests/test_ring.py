"""The ring against dense float64 attention, over all pairs of its options."""

from __future__ import annotations

import dataclasses
import functools

import compare
import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_pairs, packed_segments
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import burst_jax
from pallas_kernels import XLA

MASKS = {
    "full": dense.Mask(),
    "causal": dense.Mask(is_causal=True),
    "window96": dense.Mask(is_causal=True, window=96),
    "window40_17": dense.Mask(window=(40, 17)),
    "packed": dense.Mask(segments=True),
    "packed_causal": dense.Mask(is_causal=True, segments=True),
    "packed_window_cap": dense.Mask(is_causal=True, window=50, segments=True, soft_cap=4.0),
    "cap": dense.Mask(soft_cap=2.0),
}
FACTORS = {
    "layout": ("contiguous", "zigzag", "striped"),
    "n": (1, 2, 3, 4, 5, 7, 8),
    "mask": tuple(MASKS),
    "heads": ((4, 4), (8, 2), (8, 1)),
    "backward": ("rotate_kv", "rotate_query"),
    "shard": ("even", "63", "100", "longer_keys", "longer_queries"),
    "head_dim": (16, 40, 33),
    "dtype": ("float32", "bfloat16", "float16"),
}


CASES = all_pairs(FACTORS)


def case_id(case):
    heads, group = case["heads"][0], case["heads"][0] // case["heads"][1]
    return (
        f"{case['layout']}-n{case['n']}-{case['mask']}-h{heads}gqa{group}-{case['backward']}"
        f"-{case['shard']}-dim{case['head_dim']}-{case['dtype']}"
    )


def lengths(shard, layout, n):
    """T and S whose shards have the odd sizes that the layout permits."""
    step = 2 if layout == "zigzag" else 1  # a zigzag shard is two equal halves
    t, s = {
        "even": (64, 64),
        "63": (63, 63),
        "100": (100, 100),
        "longer_keys": (20, 57),
        "longer_queries": (70, 31),
    }[shard]
    return tuple(-(-length // step) * step * n for length in (t, s))


def make_inputs(case, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    t, s = lengths(case["shard"], case["layout"], case["n"])
    heads, kv_heads = case["heads"]
    dim, batch = case["head_dim"], 2
    dtype = jnp.dtype(case["dtype"])
    shapes = [(batch, t, heads, dim)] + [(batch, s, kv_heads, dim)] * 2 + [(batch, t, heads, dim)]
    # Rounded to the tested dtype first: the truth starts from the same numbers.
    q, k, v, do = (rng.normal(size=x).astype(dtype) for x in shapes)
    q, k = (q * dtype.type(scale)), (k * dtype.type(scale))
    dlse = rng.normal(size=(batch, t, heads)).astype(np.float32)
    segments = (None, None)
    if MASKS[case["mask"]].segments:
        segments = (packed_segments(rng, batch, t), packed_segments(rng, batch, s))
        if t == s:
            segments = (segments[0], segments[0])
    return (q, k, v), (do, dlse), segments


def ring_results(case, arrays, cotangents, segments, **options):
    """(out, lse, dq, dk, dv) in natural order."""
    n, layout = case["n"], case["layout"]
    mesh = jax.make_mesh((n,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])
    put = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, P(None, "seq")))
    arrays, cotangents, segments = jax.tree.map(
        lambda x: put(burst_jax.to_layout(x, layout, n)), (arrays, cotangents, segments)
    )
    options = {**MASKS[case["mask"]].options, "backward": case["backward"], **options}

    @jax.jit
    def run(arrays, cotangents, segments):
        def attend(query, key, value):
            return burst_jax.burst_attention(
                query,
                key,
                value,
                mesh=mesh,
                layout=layout,
                query_segment_ids=segments[0],
                key_value_segment_ids=segments[1],
                return_residual=True,
                **options,
            )

        primal, vjp = jax.vjp(attend, *arrays)
        return *primal, *vjp(cotangents)

    results = run(arrays, cotangents, segments)
    return [burst_jax.from_layout(np.asarray(x), layout, n) for x in results]


def oracle(case, arrays, cotangents, segments):
    """``(truth, one device's results, keep)``."""
    mask = MASKS[case["mask"]]
    keep = mask.dense(*segments, arrays[0].shape[1], arrays[1].shape[1])
    args = (*arrays, keep, *cotangents, mask.soft_cap)
    return dense.truth(*args), dense.one_device(*args), keep


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_ring_is_as_exact_as_one_device(case):
    inputs = make_inputs(case)
    got = ring_results(case, *inputs)
    truth, one_device, keep = oracle(case, *inputs)
    compare.assert_as_good_as(got, one_device, truth, case["dtype"])
    blind_queries = ~np.broadcast_to(keep.any(2), truth[0].shape[:2])
    unseen_keys = ~np.broadcast_to(keep.any(1), truth[3].shape[:2])
    out, lse, dq, dk, dv = got
    assert (out[blind_queries] == 0).all()
    assert (lse[blind_queries] == -np.inf).all()
    assert (dq[blind_queries] == 0).all()
    assert (dk[unseen_keys] == 0).all()
    assert (dv[unseen_keys] == 0).all()


def _halves():
    """XLA's tiles with the two gradients made apart, for which the ring has another schedule."""

    def dq_half(*args, **options):
        *arrays, dq = args
        return XLA.backward(*arrays, dq, None, **options)[0]

    def dkv_half(*args, **options):
        *arrays, dkv = args
        return XLA.backward(*arrays, None, dkv, **options)[1]

    return dataclasses.replace(XLA, name="halves", backward_dq=dq_half, backward_dkv=dkv_half)


HALVES = _halves()
# In float32, where a gradient that is added twice, late or not at all shows at once.
SPLIT_CASES = [{**case, "dtype": "float32"} for case in CASES[::3]]


@pytest.mark.parametrize("case", SPLIT_CASES, ids=case_id)
def test_gradients_made_apart_are_as_exact(case):
    inputs = make_inputs(case)
    got = ring_results(case, *inputs, implementation=HALVES)
    truth, one_device, _ = oracle(case, *inputs)
    compare.assert_as_good_as(got, one_device, truth, case["dtype"])


def test_both_rotations_of_many_rings_are_made_apart():
    met = {(case["backward"], case["n"]) for case in SPLIT_CASES}
    for backward in ("rotate_kv", "rotate_query"):
        assert len({n for rotation, n in met if rotation == backward and n > 2}) >= 3


def test_packed_cases_have_rows_that_see_nothing():
    """The zeros asserted above are asserted of something."""
    blind = 0
    for case in CASES:
        (q, k, _), _, segments = make_inputs(case)
        keep = MASKS[case["mask"]].dense(*segments, q.shape[1], k.shape[1])
        blind += int((~keep.any(2)).any())
    assert blind >= 10


def test_zero_gradients_fail():
    """The guard: a comparison that all-zero gradients pass would prove nothing."""
    case = {**CASES[0], "dtype": "bfloat16"}
    inputs = make_inputs(case)
    truth, one_device, _ = oracle(case, *inputs)
    for name in ("dq", "dk", "dv"):
        broken = [x * 0 if n == name else x for n, x in zip(compare.NAMES, truth, strict=True)]
        with pytest.raises(AssertionError, match=name):
            compare.assert_as_good_as(broken, one_device, truth, "bfloat16")


BASE = {
    "layout": "zigzag",
    "n": 8,
    "mask": "causal",
    "heads": (4, 2),
    "backward": "auto",
    "shard": "even",
    "head_dim": 32,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("scale", [1.0, 6.0], ids=["unit_logits", "large_logits"])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_error_does_not_grow_with_the_ring(mask, scale):
    case = {**BASE, "mask": mask}
    inputs = make_inputs(case, scale=scale)
    truth, _, _ = oracle(case, *inputs)
    eight = ring_results(case, *inputs)
    one = ring_results({**case, "n": 1, "layout": "contiguous"}, *inputs)
    for name, got, single, exact in zip(compare.NAMES, eight, one, truth, strict=True):
        _, rms = compare.errors(got, exact)
        _, single_rms = compare.errors(single, exact)
        assert rms <= 1.5 * single_rms + 1e-6, name


@pytest.mark.parametrize("backward", ["rotate_kv", "rotate_query"])
def test_same_bits_twice(backward):
    case = {**BASE, "backward": backward, "mask": "packed_causal"}
    inputs = make_inputs(case)
    first, second = ring_results(case, *inputs), ring_results(case, *inputs)
    for name, a, b in zip(compare.NAMES, first, second, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_reference_implementation_runs_on_the_ring():
    """`implementation=` reaches the local attention: dense and tiled agree to float32 rounding."""
    case = {**BASE, "dtype": "float32", "n": 3}
    inputs = make_inputs(case)
    tiled = ring_results(case, *inputs, implementation="xla")
    plain = ring_results(case, *inputs, implementation="reference")
    for name, a, b in zip(compare.NAMES, tiled, plain, strict=True):
        _, rms = compare.errors(a, b)
        assert rms < 1e-6, name
    assert any((a != b).any() for a, b in zip(tiled, plain, strict=True))
