"""The Mosaic GPU kernels on a CPU, interpreted: results, data races and waits that nobody ends."""

from __future__ import annotations

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

from pallas_kernels import mosaic_gpu
from pallas_kernels.pallas_mosaic import items
from pallas_kernels.pallas_mosaic.configs import MosaicConfig

needs_interpreter = pytest.mark.mosaic_interpreter
# The smallest tiles there are. Lengths are chosen for few steps, with parts of tiles on both sides.
KERNELS = mosaic_gpu(MosaicConfig(128, 64, 2), MosaicConfig(64, 128, 2))
NAMES = "mask", "order", "blocks", "heads", "lengths", "head_dim", "dtype", "numbers"
CASES = [
    dict(zip(NAMES, levels, strict=True))
    for levels in (
        ("causal", "contiguous", 1, (2, 1), (136, 200), 32, "bfloat16", "none"),
        ("full", "contiguous", 2, (1, 1), (72, 136), 64, "float16", "sinks"),
        ("packed_window_cap", "striped", 2, (2, 1), (136, 72), 32, "bfloat16", "both"),
        ("causal", "zigzag", 1, (2, 1), (136, 136), 64, "bfloat16", "slopes"),
    )
]


def inputs_of(case):
    return local_cases.make_inputs(case, seed=7, batch=1)


def interpret(run, *arrays, **options):
    """``run(*arrays)`` as NumPy arrays, its kernels interpreted."""
    with interpreted.interpreted(**options):
        # A function of its own each time: nothing is taken that was traced before.
        return jax.tree.map(np.asarray, jax.jit(lambda *arrays: run(*arrays))(*arrays))


def interpret_all(inputs, **options):
    run = functools.partial(attend, KERNELS, inputs.spec)
    arrays = inputs.q, inputs.kvs, inputs.q_tokens, inputs.kv_tokens, inputs.cotangents
    return interpret(run, *arrays, inputs.numbers, **options)


def interpret_forward(inputs, carry=None, out_dtype=None, **options):
    """``(o, lse)`` over the first shard of keys."""

    def run(q, kv, q_tokens, kv_tokens, numbers, carry):
        kwargs = {"spec": inputs.spec, "numbers": numbers, "out_dtype": out_dtype}
        return local.forward(KERNELS, q, kv, q_tokens, kv_tokens, carry, **kwargs)

    arrays = inputs.q, inputs.kvs[0], inputs.q_tokens, inputs.kv_tokens[0]
    return interpret(run, *arrays, inputs.numbers, carry, **options)


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "programs"),
    [*((case, None) for case in CASES), (CASES[0], 2)],
    ids=[*map(case_id, CASES), "two-programs-draw-tickets"],
)
def test_as_exact_as_dense(monkeypatch, case, programs):
    """``programs``: how many take all items; None is one for each item."""
    if programs is not None:
        monkeypatch.setattr(items, "_multiprocessors", lambda: programs)
    inputs = inputs_of(case)
    got = interpret_all(inputs)
    truth, one_device = local_cases.oracle(inputs)
    compare.assert_as_good_as(got, one_device, truth, case["dtype"])
    assert_zero_where_blind(got, inputs)


@needs_interpreter
def test_the_last_call_rounds_out_and_nothing_else():
    inputs = inputs_of(CASES[0])
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


LOAD = plgpu.wgmma_accumulator_load
MISTAKES = {
    "results-not-visible-to-the-copy": ("commit_smem", nothing, "RACE"),
    "memory-written-while-it-is-copied": ("wait_smem_to_gmem", nothing, "RACE"),
    "keys-freed-while-multiplied": (
        "wgmma_accumulator_load",
        products_not_awaited,
        "RACE",
    ),
    "nobody-arrives": ("barrier_arrive", nothing, "deadlock: .* waited 2"),
}


@needs_interpreter
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(monkeypatch, mistake):
    """The guard of the tests above: what they would make of a wrong kernel."""
    name, wrong, message = MISTAKES[mistake]
    monkeypatch.setattr(plgpu, name, wrong)
    with pytest.raises(Exception, match=message):
        # Only where nobody arrives is there no use in patience.
        interpret_all(inputs_of(CASES[0]), patience=2.0 if mistake == "nobody-arrives" else 120.0)
