"""The kernel of decoding, interpreted, against two matrix products; what it supports."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from typing import Any

import interpreted_sm80
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ON_GPU
from implementations import quick_jit
from jaxprs import primitives

from burst_jax.serving.cache import SlotMetadata
from pallas_kernels import SlowerKernelsWarning, decode
from pallas_kernels.decode import PartialAttention, attend_by_matmuls
from pallas_kernels.device import Target
from pallas_kernels.mosaic.sm80 import implementation
from pallas_kernels.mosaic.sm80.decode import DecodeConfig, default_splits, partial_attention


def _as_any(x: Any) -> Any:
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "value_dim", "window", "soft_cap", "splits", "scale", "config"),
    [
        ((2, 1, 4, 2, 16), 48, None, None, 3, -0.2, None),
        ((1, 20, 4, 1, 32), 16, 30, 5.0, 1, 0.2, None),
        ((1, 10, 4, 1, 16), 32, None, None, 2, 0.2, DecodeConfig(2, 2)),
    ],
    ids=["4-key-groups", "2-row-blocks", "2-key-groups"],
)
def test_the_kernel_equals_two_matmuls(shape, value_dim, window, soft_cap, splits, scale, config):
    rng = np.random.default_rng(0)
    (batch, length, heads, kv_heads, dim), capacity, used = shape, 200, 150

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    q, k = normal(batch, length, heads, dim), normal(batch, capacity, kv_heads, dim)
    v = normal(batch, capacity, kv_heads, value_dim)
    present = (rng.random((batch, capacity)) < 0.8) & (np.arange(capacity) < used)
    slots = SlotMetadata(*(jnp.asarray(x, jnp.int32) for x in (rng.permutation(capacity), present)))
    last = jnp.int32(capacity - 10)
    scores: Any = {"scale": scale, "logits_soft_cap": soft_cap, "window": window}
    # A sink takes its part of the softmax, be it the largest logit or not.
    sinks = jnp.asarray([-1.0, 0.0, 3.0, 9.0], jnp.float32)

    @quick_jit
    def results(q, k, v):
        exact = [x.astype(jnp.float32) for x in (q, k, v)]
        where = slots.cache_positions, slots.present, last, jnp.int32(used)
        want = attend_by_matmuls(exact[0], exact[1], exact[2], *where, **scores)
        parts = partial_attention(q, k, v, *where, splits=splits, config=config, **scores)
        assert len(parts[0]) == splits
        got = PartialAttention(*parts).merged()
        lse = [(x.most + jnp.log(x.total))[0] for x in (got, want)]
        share = jnp.exp(lse[1] - jnp.logaddexp(lse[1], sinks))[..., None]
        out = want.attention(None)
        return (got.attention(None), out), lse, (want.attention(sinks), out * share)

    with contextlib.nullcontext() if ON_GPU else interpreted_sm80.interpreted():
        outs, lse, with_sinks = jax.block_until_ready(results(q, k, v))
    np.testing.assert_allclose(*outs, atol=8e-3)  # Weights are rounded to bfloat16.
    np.testing.assert_allclose(*lse, atol=1e-5)
    np.testing.assert_allclose(*with_sinks, atol=1e-6)


def test_positions_alone_decide_which_keys_are_masked():
    """One loop masks score by score, also where no tile of queries or keys is partial."""

    def kernel(length, capacity):
        arrays = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((1, length, 4, 64), jnp.bfloat16), *[((1, capacity, 2, 64), jnp.bfloat16)] * 2,
                ((capacity,), jnp.int32), ((1, capacity), jnp.int32), *[((), jnp.int32)] * 2,
            )
        ]  # fmt: skip
        options: Any = {"scale": 0.1, "window": 30, "splits": 2, "config": DecodeConfig(1)}
        run = functools.partial(partial_attention, **options)
        return primitives(jax.make_jaxpr(run)(*arrays).jaxpr, inside="run_scoped")

    whole = kernel(8, 128)
    assert whole["while"] == 1
    assert kernel(5, 150) == whole


@pytest.mark.parametrize(
    ("ctas", "splits"), [(8, 16), (32, 4), (96, 4), (132, 1), (140, 4), (256, 1)]
)
def test_splits_are_even_over_the_sms(ctas, splits):
    assert default_splits(ctas, 132) == splits


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (None, {}),
        (None, {"capability": 9.0, "dims": (256, 256)}),
        (r"compute capability 8.0 \(Ampere\) or newer", {"capability": 7.5}),
        ("all bfloat16 or all float16", {"dtypes": ("float32", "float32")}),
        ("all bfloat16 or all float16", {"dtypes": ("bfloat16", "float16")}),
        (r"the head dims are \(128, 40\); decoding supports multiples of 16", {"dims": (128, 40)}),
        (r"the head dims are \(272, 64\)", {"dims": (272, 64)}),
        (None, {"capability": 8.6}),
        ("decoding needs 164864 bytes of shared memory per CTA; this GPU has 101376",
         {"capability": 8.9, "dims": (256, 256)}),
    ],
)  # fmt: skip
def test_what_the_kernel_supports(monkeypatch, expected, options):
    """What it does not is a warning, and takes matmuls."""
    dim, value_dim = options.get("dims", (128, 128))
    dtypes = options.get("dtypes", ("bfloat16", "bfloat16"))
    shapes = (2, 1, 32, dim), (2, 99, 8, dim), (2, 99, 8, value_dim)
    kinds = dtypes[0], dtypes[1], dtypes[1]
    q, k, v = (_as_any(jax.ShapeDtypeStruct(*x)) for x in zip(shapes, kinds, strict=True))
    capability = options.get("capability", 8.0)
    chosen = []
    for name in ("attend_by_kernel", "attend_by_matmuls"):
        monkeypatch.setattr(decode, name, lambda *_, name=name, **scores: chosen.append(name))
    monkeypatch.setattr(decode, "target_of", lambda _: Target("gpu", capability))
    # As on a machine that has the GPU.
    monkeypatch.setattr(implementation, "compiles_for", lambda: (8, 0))
    arrays = q, k, v, *[jnp.zeros(2, jnp.int32)] * 4
    attend = functools.partial(decode.partial_attention, *arrays, scale=1.0)
    with warnings.catch_warnings(record=True, action="always") as found:
        for name in (None, "mosaic_sm90", "xla"):
            attend(implementation=name)
    kernel = "attend_by_matmuls" if expected else "attend_by_kernel"
    assert chosen == [kernel, kernel, "attend_by_matmuls"]
    warned = bool(expected) and capability >= 8.0
    assert len(found) == 2 * warned
    for each in found:
        message = f"decoding takes 'xla' here, and not 'mosaic_sm80': .*{expected}.*warnings filter"
        assert re.match(message, str(each.message))
        assert each.category is SlowerKernelsWarning
