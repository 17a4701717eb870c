"""The Mosaic GPU kernels on a CPU, interpreted: results, data races and waits that nobody ends."""

from __future__ import annotations

import dataclasses
import functools

import compare
import interpreted
import jax
import jax.numpy as jnp
import local
import local_cases
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from local_cases import assert_zero_where_blind, attend, case_id

from pallas_kernels import REFERENCE, mosaic_sm90
from pallas_kernels.pallas_mosaic import forward_copy, forward_step, items, memory
from pallas_kernels.pallas_mosaic.configs import MosaicConfig
from pallas_kernels.pallas_mosaic.tickets import TicketCounter

needs_interpreter = pytest.mark.mosaic_interpreter
# Two forward programs side by side share key tiles.
CLUSTERS = mosaic_sm90(MosaicConfig(128, 64, 2, cluster=2), MosaicConfig(64, 128, 2))
# The smallest tiles there are. Lengths are chosen for few steps, with parts of tiles on both sides.
KERNELS = mosaic_sm90(MosaicConfig(128, 64, 2), MosaicConfig(64, 128, 2))
NAMES = "mask", "order", "blocks", "heads", "lengths", "head_dim", "dtype", "numbers", "dropout"
CASES = [
    dict(zip(NAMES, levels, strict=False))
    for levels in (
        ("causal", "contiguous", 1, (2, 1), (136, 200), 32, "bfloat16", "none"),
        ("full", "contiguous", 2, (1, 1), (72, 136), 64, "float16", "sinks"),
        ("packed_window_cap", "striped", 2, (2, 1), (136, 72), 32, "bfloat16", "both"),
        # The second shard's keys are all in the future: its items have nothing to visit.
        ("causal", "contiguous", 2, (2, 1), (64, 136), 64, "bfloat16", "slopes"),
        ("packed_causal", "striped", 2, (2, 2), (136, 72), 64, "bfloat16", "both"),
        ("full", "zigzag", 1, (2, 1), (136, 200), 32, "float16", "slopes"),
        ("causal", "zigzag", 1, (1, 1), (200, 136), 64, "bfloat16", "slopes"),
        ("packed_window_ranges", "striped", 2, (2, 1), (136, 72), 32, "bfloat16", "slopes"),
        ("ranges", "contiguous", 1, (2, 1), (72, 136), 64, "bfloat16", "none"),
        ("causal", "striped", 1, (2, 1), (136, 72), 32, "bfloat16", "none", 0.3),
        ("packed", "contiguous", 2, (2, 2), (136, 136), 64, "bfloat16", "both", 0.1),
        # Positions of the caller's own may come in any order.
        ("causal", "shuffled", 1, (2, 1), (72, 136), 32, "bfloat16", "slopes"),
    )
]
# Values of another head dim than keys: a smaller one, and a larger one.
CASES[1]["value_dim"], CASES[4]["value_dim"] = 32, 96
# Masks by blocks, of each head its own and one for all. Some items have nothing to visit.
TABLES = [
    dict(zip(NAMES, levels, strict=False)) | {"table": table}
    for levels, table in (
        (("full", "contiguous", 2, (2, 1), (128, 192), 64, "bfloat16", "none"), (64, 64, True)),
        (
            ("packed_causal", "zigzag", 1, (2, 1), (256, 256), 32, "float16", "both"),
            (128, 64, False),
        ),
    )
]
CASES += TABLES
# Functions of scores, with parts of tiles on both sides.
FUNCTIONS = [
    dict(zip(NAMES, levels, strict=False)) | {"functions": "functions"}
    for levels in (
        ("causal", "contiguous", 1, (2, 1), (136, 200), 32, "bfloat16", "none"),
        ("packed_window_cap", "striped", 2, (2, 1), (136, 72), 32, "float16", "both", 0.3),
        ("ranges", "zigzag", 1, (2, 2), (72, 136), 64, "bfloat16", "slopes"),
    )
]
CASES += FUNCTIONS
# Multi-head latent attention, as DeepSeek's models have it.
LATENT = {**CASES[0], "lengths": (72, 136), "head_dim": 192, "value_dim": 128}
# The second hop merges with the lse of the first, and has tiles of the backward without a mask.
FAR_LEVELS = ("causal", "contiguous", 2, (2, 1), (136, 128), 32, "bfloat16", "both")
FAR = dict(zip(NAMES, FAR_LEVELS, strict=False))
PLAIN, SLOPES, FULL_SLOPES, WIDE, RANGES = CASES[0], *(CASES[i] for i in (3, 5, 6, 7))
QUICK = PLAIN, SLOPES, RANGES, TABLES[0], FUNCTIONS[0]


def inputs_of(case):
    return local_cases.make_inputs(case, seed=7, batch=1)


def interpret(run, *arrays, **options):
    """``run(*arrays)`` as NumPy arrays, its kernels interpreted."""
    with interpreted.interpreted(**options):
        # A function of its own each time: nothing is taken that was traced before.
        return jax.tree.map(np.asarray, jax.jit(lambda *arrays: run(*arrays))(*arrays))


def interpret_all(inputs, kernels=KERNELS, **options):
    run = functools.partial(attend, kernels, inputs.spec)
    arrays = inputs.q, inputs.kvs, inputs.q_tokens, inputs.kv_tokens, inputs.cotangents
    return interpret(run, *arrays, inputs.numbers, inputs.seeds, inputs.blocks, **options)


def interpret_forward(inputs, carry=None, out_dtype=None, kernels=KERNELS, **options):
    """``(o, lse)`` over the first shard of keys."""

    def run(q, kv, q_tokens, kv_tokens, of_heads, carry):
        kwargs = {"spec": inputs.spec, "out_dtype": out_dtype, **of_heads}
        return local.forward(kernels, q, kv, q_tokens, kv_tokens, carry, **kwargs)

    return interpret(run, *first_shard(inputs), carry, **options)


def first_shard(inputs):
    """What a forward reads of the queries, the first shard of keys and the heads."""
    of_heads = {name: getattr(inputs, name) for name in ("numbers", "seeds", "blocks")}
    return inputs.q, inputs.kvs[0], inputs.q_tokens, inputs.kv_tokens[0], of_heads


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "programs"),
    [
        pytest.param(
            case,
            2 if case["blocks"] == 1 else None,
            id=case_id(case),
            marks=() if case in QUICK else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_as_exact_as_dense(monkeypatch, case, programs):
    """``programs``: how many draw tickets until no item is left; None is one for each item."""
    if programs is not None:
        monkeypatch.setattr(items, "multiprocessors", lambda: programs)
    inputs = inputs_of(case)
    # The shipped tiles of this one are for three warpgroups.
    got = interpret_all(inputs, mosaic_sm90() if case is WIDE else KERNELS)
    truth, one_device = local_cases.oracle(inputs)
    compare.assert_as_good_as(got, one_device, truth, case["dtype"])
    assert_zero_where_blind(got, inputs)


@needs_interpreter
def test_forward_of_latent_attention():
    """Its backward takes more memory and registers than there are, so there is none to test."""
    inputs = inputs_of(LATENT)
    got = interpret_forward(inputs)
    arrays = inputs.q, inputs.kvs[0], inputs.q_tokens, inputs.kv_tokens[0]
    want = local.forward(REFERENCE, *arrays, spec=inputs.spec, numbers=inputs.numbers)
    for name, x, y in zip(("out", "lse"), got, want, strict=True):
        assert compare.errors(x, y)[1] < compare.RELATIVE_RMS["bfloat16"], name


@needs_interpreter
@pytest.mark.parametrize("case", [PLAIN, SLOPES], ids=["plain", "slopes"])
def test_the_last_call_rounds_out_and_nothing_else(case):
    inputs = inputs_of(case)
    rng = np.random.default_rng(0)
    batch, length, heads, _ = inputs.q.shape
    carry = (
        rng.normal(size=inputs.q.shape).astype(np.float32),
        rng.normal(size=(batch, heads, length)).astype(np.float32),
    )
    o, lse = interpret_forward(inputs, carry)
    rounded, same_lse = interpret_forward(inputs, carry, jnp.bfloat16)
    np.testing.assert_array_equal(rounded, o.astype(jnp.bfloat16))
    np.testing.assert_array_equal(same_lse, lse)


@needs_interpreter
@pytest.mark.parametrize("scale", [1e-38, 2.0**-63], ids=["added", "in-the-products"])
def test_a_bias_over_a_tiny_scale(scale):
    """Over a scale of 1e-38 the bias would be infinite: it is added to the scores instead."""
    inputs = inputs_of(SLOPES)
    spec = dataclasses.replace(
        inputs.spec, score=dataclasses.replace(inputs.spec.score, scale=scale)
    )
    inputs = dataclasses.replace(inputs, spec=spec)
    o, lse = interpret_forward(inputs)
    # The products count for nothing: logits are the bias.
    q, k, v = (x.astype(np.float32) for x in (inputs.q, *inputs.kvs[0]))
    arrays = q * 0, (k, v), inputs.q_tokens, inputs.kv_tokens[0]
    want_o, want_lse = local.forward(REFERENCE, *arrays, spec=spec, numbers=inputs.numbers)
    np.testing.assert_allclose(lse, np.asarray(want_lse), rtol=1e-5, atol=1e-5)
    assert compare.errors(o, want_o)[1] < compare.RELATIVE_RMS["bfloat16"]


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "programs"),
    [
        pytest.param(case, programs, id=f"{case_id(case)}-programs{programs}", marks=marks)
        for case, programs, marks in (
            # Three query tiles, so that the last cluster's second one is beyond the queries.
            ({**PLAIN, "lengths": (264, 328)}, 2, ()),
            ({**PLAIN, "mask": "full", "lengths": (392, 200)}, 4, ()),
            ({**CASES[4], "lengths": (264, 136)}, None, ()),
            # Products that start from the slopes, masks by blocks, functions of scores.
            ({**SLOPES, "lengths": (264, 136)}, 2, pytest.mark.slow),
            ({**TABLES[1], "lengths": (256, 256)}, 2, pytest.mark.slow),
            ({**FUNCTIONS[1], "lengths": (264, 72)}, 2, pytest.mark.slow),
        )
    ],
)
def test_programs_of_a_cluster_share_keys(monkeypatch, case, programs):
    """``programs``: as many at a time, of which two are a cluster; None is one for each tile."""
    if programs is not None:
        monkeypatch.setattr(items, "multiprocessors", lambda: programs)
    inputs = inputs_of(case)
    rng = np.random.default_rng(0)
    batch, length, heads, _ = inputs.q.shape
    carry = None
    if case["numbers"] != "none":
        carry = (
            rng.normal(size=(batch, length, heads, inputs.kvs[0][1].shape[-1])).astype(np.float32),
            rng.normal(size=(batch, heads, length)).astype(np.float32),
        )
    got = interpret_forward(inputs, carry, kernels=CLUSTERS)
    *arrays, of_heads = first_shard(inputs)
    want = local.forward(REFERENCE, *arrays, carry=carry, spec=inputs.spec, **of_heads)
    want = jax.tree.map(np.asarray, want)
    for name, x, y in zip(("o", "lse"), got, want, strict=True):
        seen = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(x), seen)
        worst = compare.errors(x[seen], y[seen])[1]
        assert worst < compare.RELATIVE_RMS[case["dtype"]], (name, worst)


@needs_interpreter
@pytest.mark.slow
def test_slopes_at_far_positions():
    """Errors are small beside the bias, not beside the positions, and an lse lacks no constant."""
    near = inputs_of(FAR)
    slopes = np.array([0.7, -0.3], np.float32)
    near = dataclasses.replace(near, numbers=near.numbers | {"alibi_slopes": slopes})

    def moved(tokens):
        return tokens._replace(positions=tokens.positions + np.int32(10_000_019))

    kv_tokens = [moved(tokens) for tokens in near.kv_tokens]
    far = dataclasses.replace(near, q_tokens=moved(near.q_tokens), kv_tokens=kv_tokens)
    got = interpret_all(far)
    truth, one_device = local_cases.oracle(near)
    compare.assert_as_good_as(got, one_device, truth, FAR["dtype"])
    np.testing.assert_allclose(got[1], truth[1], rtol=1e-5, atol=1e-5)


def nothing(*args, **kwargs):
    del args, kwargs


def products_not_awaited(acc, *, wait_n=0):
    return LOAD(acc, wait_n=2)


class Theirs:
    """Stands for a class of JAX's interpreter."""

    def run(self, thread):
        del thread


class Same(Theirs):
    def run(self, thread):
        del thread


class Gone(Theirs):
    def stop(self):
        """Overrides nothing."""


class Changed(Theirs):
    def run(self, thread, warp=None):
        del thread, warp


def test_a_method_that_jax_changed_is_named():
    """With any JAX."""
    interpreted.check_overrides((Same,))
    with pytest.raises(RuntimeError, match=r"Theirs.stop is not there; .* takes \['self'\]"):
        interpreted.check_overrides((Same, Gone))
    with pytest.raises(RuntimeError, match=r"Theirs.run takes \['self', 'thread'\]; .*'warp'"):
        interpreted.check_overrides((Same, Changed))


def free_for_one(config, arrivals, count):
    del config
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


LOAD = plgpu.wgmma_accumulator_load
MISTAKES = {
    "results-not-visible-to-the-copy": (PLAIN, plgpu, "commit_smem", nothing, "RACE"),
    "memory-written-while-it-is-copied": (PLAIN, plgpu, "wait_smem_to_gmem", nothing, "RACE"),
    "keys-freed-while-multiplied": (
        PLAIN, plgpu, "wgmma_accumulator_load", products_not_awaited, "RACE",
    ),
    "positions-freed-while-read": (FULL_SLOPES, forward_step, "end_reads", nothing, "RACE"),
    "nobody-arrives": (PLAIN, plgpu, "barrier_arrive", nothing, "deadlock: .* waited 2"),
}  # fmt: skip


MISTAKES_OF_CLUSTERS = {
    "ends-while-the-other-arrives": (forward_copy, "_await_last_reads", nothing, "may end before"),
    "ends-while-tickets-are-read": (TicketCounter, "await_last_reads", nothing, "may end before"),
    "a-stage-is-free-for-one": (memory, "_in_cluster", free_for_one, "RACE|not complete"),
}


@needs_interpreter
@pytest.mark.parametrize("mistake", MISTAKES_OF_CLUSTERS)
def test_a_mistake_of_clusters_shows(monkeypatch, mistake):
    module, name, wrong, message = MISTAKES_OF_CLUSTERS[mistake]
    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(items, "multiprocessors", lambda: 2)
    inputs = inputs_of({**PLAIN, "lengths": (264, 328)})
    with pytest.raises(Exception, match=message):
        interpret_forward(inputs, kernels=CLUSTERS)


@needs_interpreter
@pytest.mark.parametrize(
    "mistake",
    ["nobody-arrives", *(pytest.param(m, marks=pytest.mark.slow) for m in list(MISTAKES)[:-1])],
)
def test_a_mistake_shows(monkeypatch, mistake):
    """The guard of the tests above: what they would make of a wrong kernel."""
    case, module, name, wrong, message = MISTAKES[mistake]
    monkeypatch.setattr(module, name, wrong)
    # Only where nobody arrives is there no use in patience.
    patience = 2.0 if mistake == "nobody-arrives" else 120.0
    with pytest.raises(Exception, match=message):
        interpret_all(inputs_of(case), patience=patience)
