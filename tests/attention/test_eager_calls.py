"""Eager calls reuse their compiled programs; an implementation without a backward pass."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from rings import make_inputs, make_mesh, ring_of

import burst_jax
from burst_jax.attention.api import _on_mesh
from pallas_kernels import XLA


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
    with pytest.raises(NotImplementedError, match=r"'xla' .* no backward pass, and gradients"):
        jax.make_jaxpr(lambda *xs: jax.vjp(lambda *xs: run(*xs)[0], *xs)[1](do))(*arrays)
