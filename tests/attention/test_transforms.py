"""What the ring sends under JAX's transformations, and what eager calls trace.

test_transforms_page.py has the values under every transformation.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import count
from rings import H, K, N, attend, make_inputs, make_mesh, ring_of

import burst_jax
from burst_jax.attention.api import _on_mesh
from pallas_kernels import XLA

# --- recomputation -------------------------------------------------------------------------------

LAYERS = 3


def keep_attention(layer):
    policy = jax.checkpoint_policies.save_only_these_names(*burst_jax.CHECKPOINT_NAMES)
    return jax.checkpoint(layer, policy=policy)


# n = 4, no segments. Forward: K and V, 3 hops each. rotate_kv: the same and dK and dV 3 hops each;
# rotate_query: Q, dO and (lse, delta) 3 hops each, and dQ 3.
FORWARD, BACKWARDS = 2 * 3, {"rotate_kv": 2 * 3 + 2 * 3, "rotate_query": 3 * 3 + 3}
WRAPS = {"plain": lambda layer: layer, "remat": jax.checkpoint, "keep": keep_attention}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_permutes_in_the_gradient_of_scanned_layers(wrap, backward):
    (x, _, _), (dy, _) = make_inputs()
    run = attend(make_mesh(1, 4, 1), layout="contiguous", backward=backward)

    @WRAPS[wrap]
    def layer(x, weight):
        q = x * weight
        return x + run(q, q[:, :, :K], x[:, :, K:])[0], None

    def layers(x):
        return jax.lax.scan(layer, x, jnp.ones((LAYERS, 1, 1, N, H), jnp.float32))[0]

    permutes = count(jax.make_jaxpr(lambda x: jax.vjp(layers, x)[1](dy))(x).jaxpr, "ppermute")
    again = FORWARD if wrap == "remat" else 0
    assert permutes == FORWARD + again + BACKWARDS[backward]
    assert count(jax.make_jaxpr(layers)(x).jaxpr, "ppermute") == FORWARD


# --- eager calls, imports ------------------------------------------------------------------------


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

    def attend(**options):
        mesh = make_mesh(1, 2, 1)
        call = functools.partial(burst_jax.burst_attention, mesh=mesh, implementation=counting)
        return functools.partial(call, is_causal=True, **options)

    def gradients():
        out, vjp = jax.vjp(attend(local_window_size=(20, 0)), *arrays)
        return out, *vjp(cotangents[0])

    first = gradients()
    assert set(traced) == {"forward", "backward"}
    compiled, traces = programs(), len(traced)
    out = attend()(*arrays)
    assert len(traced) > traces
    assert programs() == compiled + 1
    compiled, traces = programs(), len(traced)
    again = attend()(*arrays), *gradients()
    assert (programs(), len(traced)) == (compiled, traces)
    for got, want in zip(again, (out, *first), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_kernel_without_a_backward_says_so():
    arrays, (do, _) = make_inputs()
    run = ring_of(2, implementation=dataclasses.replace(XLA, backward=None))
    with pytest.raises(NotImplementedError, match=r"'xla' .* no backward pass; use None or"):
        jax.make_jaxpr(lambda *xs: jax.vjp(lambda *xs: run(*xs)[0], *xs)[1](do))(*arrays)


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
