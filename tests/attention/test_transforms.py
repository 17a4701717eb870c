"""The ring under JAX's transformations, and called eagerly."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import Any

import compare
import dense
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import quick_jit
from jaxprs import count
from rings import (
    CAUSAL,
    B,
    H,
    K,
    N,
    T,
    assert_close,
    attend,
    forward_and_gradients,
    make_inputs,
    make_mesh,
    one_device,
    ring_of,
)

import burst_jax
from burst_jax.attention.api import _on_mesh
from pallas_kernels import XLA, triton

# --- transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("backward", ["rotate_kv", "rotate_query"])
def test_gradient_through_lse_alone(backward):
    arrays, (do, dlse) = make_inputs()
    run = ring_of(3, layout="contiguous", backward=backward)
    arrays, do, dlse = jax.tree.map(lambda x: x[:, :30], (arrays, do, dlse))
    got = quick_jit(lambda *arrays: jax.vjp(lambda *xs: run(*xs)[1], *arrays)[1](dlse))(*arrays)
    truth = one_device(arrays, (np.zeros_like(do), dlse))
    for name, g, t in zip(("dq", "dk"), got[:2], truth[2:4], strict=True):
        assert compare.errors(g, t)[1] < 1e-6, name
        assert np.abs(t).max() > 0.1
    assert not np.asarray(got[2]).any()


def test_vmap():
    """Over other axes of each array; a query side alone too, whose keys' gradients are sums."""
    parts = [make_inputs(seed) for seed in range(3)]
    arrays, cotangents = jax.tree.map(lambda *xs: np.stack(xs), *parts)
    axes = 1, 0, 2
    moved = tuple(np.moveaxis(x, 0, axis) for x, axis in zip(arrays, axes, strict=True))
    run = jax.vmap(ring_of(4), in_axes=axes)
    out, lse, *gradients = forward_and_gradients(run)(moved, cotangents)
    gradients = [np.moveaxis(x, axis, 0) for x, axis in zip(gradients, axes, strict=True)]
    for i, part in enumerate(parts):
        assert_close([np.asarray(x[i]) for x in (out, lse, *gradients)], one_device(*part))
    shared = jax.vmap(ring_of(4), in_axes=(0, None, None))
    got = forward_and_gradients(shared)((arrays[0], arrays[1][0], arrays[2][0]), cotangents)
    wants = [
        one_device((arrays[0][i], arrays[1][0], arrays[2][0]), (cotangents[0][i], cotangents[1][i]))
        for i in range(3)
    ]
    for i, want in enumerate(wants):
        assert_close([x[i] for x in got[:3]], want[:3])
    assert_close(got[3:], tuple(sum(want[j] for want in wants) for j in (3, 4)))


LAYERS = 3


def deep(attention, wrap=lambda layer: layer):
    """``(x, weights) -> y``: layers of attention, each with a weight, under ``lax.scan``."""

    @wrap
    def layer(x, weight):
        q = x * weight
        return x + attention(q, q[:, :, :K], x[:, :, K:])[0], None

    return lambda x, weights: jax.lax.scan(layer, x, weights)[0]


def keep_attention(layer):
    policy = jax.checkpoint_policies.save_only_these_names(*burst_jax.CHECKPOINT_NAMES)
    return jax.checkpoint(layer, policy=policy)


def dense_attention(q, k, v):
    k, v = (dense.repeat_heads(x, N) for x in (k, v))
    return dense.attention(q, k, v, CAUSAL.dense(None, None, T, T))[:2]


WRAPS = {"plain": lambda layer: layer, "remat": jax.checkpoint, "keep": keep_attention}


@pytest.mark.parametrize("wrap", ["remat", "keep"])
def test_scan_over_layers(wrap):
    (x, _, _), (dy, _) = make_inputs()
    weights = np.random.default_rng(1).uniform(0.5, 1.5, (LAYERS, 1, 1, N, H)).astype(np.float32)

    def run(attention, wrap):
        y, vjp = jax.vjp(deep(attention, wrap), x, weights)
        return y, *vjp(dy)

    got = quick_jit(lambda: run(ring_of(4), WRAPS[wrap]))()
    want = quick_jit(lambda: run(dense_attention, WRAPS["plain"]))()
    for name, g, w in zip(("y", "dx", "dweights"), got, want, strict=True):
        assert compare.errors(g, w)[1] < 2e-6, name


# --- recomputation -------------------------------------------------------------------------------


# n = 4, no segments. Forward: K and V, 3 hops each. rotate_kv: the same and dK and dV 3 hops each;
# rotate_query: Q, dO and (lse, delta) 3 hops each, and dQ 3.
FORWARD, BACKWARDS = 2 * 3, {"rotate_kv": 2 * 3 + 2 * 3, "rotate_query": 3 * 3 + 3}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("depth", ["one_layer", "scan"])
def test_permutes_in_the_gradient(wrap, backward, depth):
    (x, k, v), (dy, _) = make_inputs()
    run = attend(make_mesh(1, 4, 1), layout="contiguous", backward=backward)

    def gradient(x, k, v):
        if depth == "scan":
            weights = jnp.ones((LAYERS, 1, 1, N, H), jnp.float32)
            return jax.vjp(lambda x: deep(run, WRAPS[wrap])(x, weights), x)[1](dy)
        return jax.vjp(WRAPS[wrap](lambda *arrays: run(*arrays)[0]), x, k, v)[1](dy)

    permutes = count(jax.make_jaxpr(gradient)(x, k, v).jaxpr, "ppermute")
    again = FORWARD if wrap == "remat" else 0
    assert permutes == FORWARD + again + BACKWARDS[backward]


def test_forward_alone_sends_nothing_more():
    arrays, _ = make_inputs()
    jaxpr = jax.make_jaxpr(attend(make_mesh(1, 4, 1), layout="contiguous"))(*arrays)
    assert count(jaxpr.jaxpr, "ppermute") == FORWARD


# --- eager calls, options, imports ---------------------------------------------------------------


def test_a_second_eager_call_traces_nothing():
    arrays, cotangents = make_inputs()
    jitted: Any = _on_mesh  # JAX's types say nothing of its cache
    programs = jitted._cache_size
    traced = []

    def forward(*args, **kwargs):
        traced.append("forward")
        return XLA.forward(*args, **kwargs)

    def backward(*args, **kwargs):
        traced.append("backward")
        assert XLA.backward is not None
        return XLA.backward(*args, **kwargs)

    counting = dataclasses.replace(XLA, forward=forward, backward=backward)
    mesh = make_mesh(1, 4, 1)

    def call():
        run = functools.partial(
            burst_jax.burst_attention,
            mesh=make_mesh(1, 4, 1),
            implementation=counting,
            is_causal=True,
            local_window_size=(20, 0),
        )
        out, vjp = jax.vjp(run, *arrays)
        return out, *vjp(cotangents[0])

    first = call()
    assert set(traced) == {"forward", "backward"}
    compiled, traces = programs(), len(traced)
    plain = [burst_jax.burst_attention(*arrays, mesh=mesh, implementation=counting)]
    assert len(traced) > traces
    assert programs() == compiled + 1
    compiled, traces = programs(), len(traced)
    plain.append(burst_jax.burst_attention(*arrays, mesh=mesh, implementation=counting))
    second = call()
    assert len(traced) == traces
    assert programs() == compiled
    for pair in (plain, *zip(first, second, strict=True)):
        got, want = pair
        np.testing.assert_array_equal(got, want)


def test_the_residual_is_optional():
    arrays, _ = make_inputs()
    mesh = make_mesh(1, 4, 1)
    alone = burst_jax.burst_attention(*arrays, mesh=mesh)
    out, lse = burst_jax.burst_attention(*arrays, mesh=mesh, return_residual=True)
    np.testing.assert_array_equal(alone, out)
    assert (lse.shape, lse.dtype) == ((B, T, N), jnp.float32)


def test_triton_kernels_on_the_ring():
    """Interpreted: carry, packed pairs and bounds as the ring gives them, 64 tokens a shard."""
    arrays, cotangents = make_inputs(batch=1, length=128, heads=2, dim=16)
    kernels = triton(interpret=True)
    run = ring_of(2, layout="striped", backward="rotate_query", implementation=kernels)
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, one_device(arrays, cotangents))


def test_a_kernel_without_a_backward_says_so():
    arrays, (do, _) = make_inputs(batch=1, dim=16)
    run = ring_of(2, implementation=dataclasses.replace(XLA, backward=None))
    with pytest.raises(NotImplementedError, match=r"'xla' .* no backward pass; use None or"):
        jax.vjp(lambda *xs: run(*xs)[0], *arrays)[1](do)


IMPORT_ALL = """
import importlib, pkgutil
import burst_jax, pallas_kernels
for package in (burst_jax, pallas_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            print(module.name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing started a backend"
"""


def test_importing_touches_no_backend():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"burst_jax.ring.vjp", "burst_jax.training.step", "pallas_kernels.xla"} <= imported
