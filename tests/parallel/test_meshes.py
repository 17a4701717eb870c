"""The ring on meshes of several axes, Auto and Explicit, and in the caller's own shard_map."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from rings import (
    B,
    H,
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
from pallas_kernels import XLA
from pallas_kernels.arrays import unvary

# --- meshes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "batch_axis", "tensor_axis", "shard"),
    [
        ((2, 2, 2), "data", "model", (2, T // 2, N // 2, H)),
        ((2, 2, 2), ("data", "model"), None, (1, T // 2, N, H)),
        pytest.param((1, 4, 2), None, ("model",), (4, T // 4, N // 2, H), marks=pytest.mark.slow),
        pytest.param((2, 4, 1), ("data",), None, (2, T // 4, N, H), marks=pytest.mark.slow),
    ],
)
def test_batch_and_head_axes(shape, batch_axis, tensor_axis, shard):
    arrays, cotangents = make_inputs(batch=4)
    mesh = make_mesh(*shape)
    run = attend(mesh, layout="contiguous", batch_axis=batch_axis, tensor_axis=tensor_axis)
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, one_device(arrays, cotangents))
    assert got[0].sharding.shard_shape(got[0].shape) == shard


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_unsharded_sequences(kind):
    """``seq_axis=None``, in the library's shard_map and in the caller's own."""
    arrays, cotangents = make_inputs()
    mesh, spec = mesh_of(kind, data=2, model=2), P("data", None, "model")
    options: Any = {"is_causal": True, "layout": "zigzag", "return_residual": True}

    def attend_here(*arrays):
        return burst_jax.burst_attention(
            *arrays, mesh=mesh, seq_axis=None, batch_axis="data", tensor_axis="model", **options
        )

    in_own_map = jax.shard_map(
        lambda *arrays: burst_jax.ring_attention(*arrays, axis_name=None, **options),
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=(spec,) * 2,
    )
    arrays, cotangents = jax.device_put((arrays, cotangents), jax.NamedSharding(mesh, spec))
    want = one_device(*jax.device_get((arrays, cotangents)))
    for run in (attend_here, in_own_map):
        with jax.set_mesh(mesh):
            got = forward_and_gradients(run)(arrays, cotangents)
        assert_close(got, want)
        assert got[0].sharding.shard_shape(got[0].shape) == (B // 2, T, N // 2, H)


@pytest.mark.parametrize(
    ("shape", "jit"), [((2, 2, 2), True), ((1, 4, 2), False)], ids=["2x2x2-jit", "1x4x2-eager"]
)
def test_explicit_axes(shape, jit):
    """Results and gradients have the sharding of the arguments in their types."""
    arrays, cotangents = make_inputs()
    mesh = make_mesh(*shape, kind=AxisType.Explicit)
    spec = P("data", "seq", "model")
    arrays_in, cotangents_in = jax.tree.map(
        lambda x: jax.device_put(
            burst_jax.to_layout(x, "zigzag", shape[1]), jax.NamedSharding(mesh, spec)
        ),
        (arrays, cotangents),
    )
    run = functools.partial(
        burst_jax.burst_attention,
        batch_axis="data",
        tensor_axis="model",
        layout="zigzag",
        is_causal=True,
        return_residual=True,
    )
    with jax.set_mesh(mesh):
        got = forward_and_gradients(run, jit)(arrays_in, cotangents_in)
    for result in got:
        assert result.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), result.ndim)
    got = [burst_jax.from_layout(np.asarray(x), "zigzag", shape[1]) for x in got]
    assert_close(got, one_device(arrays, cotangents))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_the_mesh_in_context_equals_the_argument(kind):
    arrays, _ = make_inputs()
    mesh = make_mesh(1, 4, 1, kind=kind)
    arrays = jax.device_put(arrays, jax.NamedSharding(mesh, P(None, "seq")))
    given = burst_jax.burst_attention(*arrays, mesh=mesh)
    with jax.set_mesh(mesh):
        found = burst_jax.burst_attention(*arrays)
        in_jit = jax.jit(burst_jax.burst_attention)(*arrays)
    np.testing.assert_array_equal(given, found)
    np.testing.assert_array_equal(given, in_jit)
    shape = {shard.data.shape for shard in found.addressable_shards}
    assert shape == {(B, T // 4, N, H)}


@pytest.mark.parametrize(
    ("kind", "jit"), [(np.asarray, False), (jnp.asarray, True)], ids=["numpy-eager", "jax-jit"]
)
def test_inputs_on_one_device(kind, jit):
    arrays, cotangents = make_inputs()
    placed = jax.tree.map(kind, (arrays, cotangents))
    got = forward_and_gradients(ring_of(4), jit)(*placed)
    assert_close(got, one_device(arrays, cotangents))


# --- the caller's own shard_map ------------------------------------------------------------------


def in_shard_map(mesh, specs, check_vma, axis_names=frozenset(), **options):
    """``(query, key, value) -> (out, lse)`` by ring_attention."""

    def local(*arrays):
        return burst_jax.ring_attention(
            *arrays, axis_name="seq", is_causal=True, return_residual=True, **options
        )

    return jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[0]), check_vma=check_vma,
        axis_names=axis_names,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("check_vma", "backward"),
    [(True, "rotate_kv"), (True, "rotate_query"), (False, "rotate_query")],
)
def test_ring_attention_in_the_callers_shard_map(check_vma, backward):
    arrays, cotangents = make_inputs()
    specs = (P("data", "seq", "model"),) * 3
    run = in_shard_map(make_mesh(2, 2, 2), specs, check_vma, backward=backward)
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, one_device(arrays, cotangents))


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check"])
def test_keys_shared_by_the_batch(check_vma):
    """K and V are replicated over the data axis and Q is sharded: dK and dV are summed over it."""
    arrays, cotangents = make_inputs(kv_batch=1)
    specs = (P("data", "seq"), P(None, "seq"), P(None, "seq"))
    run = in_shard_map(make_mesh(2, 4, 1), specs, check_vma)
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, shared_keys(arrays, cotangents))


def shared_keys(arrays, cotangents):
    """float64 results for K and V of batch size 1 that both sequences of Q attend to."""
    q, k, v = arrays
    repeated = (q, *(np.repeat(x, 2, axis=0) for x in (k, v)))
    out, lse, dq, dk, dv = one_device(repeated, cotangents)
    return out, lse, dq, dk.sum(0, keepdims=True), dv.sum(0, keepdims=True)


def test_results_vary_over_the_ring_even_if_the_kernels_are_unmarked():
    """Hopper's kernels mark no result as varying, and gradients of such results would be summed."""

    def forward(*args, **options):
        return jax.tree.map(unvary, XLA.forward(*args, **options))

    unmarked, seen = dataclasses.replace(XLA, forward=forward), []

    def local(*arrays):
        out, lse = burst_jax.ring_attention(
            *arrays, axis_name="seq", implementation=unmarked, return_residual=True
        )
        seen.extend(jax.typeof(x).manual_axis_type.varying for x in (out, lse))
        return out, lse

    specs = (P(None, "seq"),) * 3
    run = jax.shard_map(local, mesh=make_mesh(1, 4, 1), in_specs=specs, out_specs=specs[:2])
    jax.make_jaxpr(run)(*make_inputs()[0])
    assert seen == [frozenset({"seq"})] * 2


def test_gradients_taken_inside_the_shard_map():
    """With check_vma the sum over the data axis is part of the gradient."""
    arrays, cotangents = make_inputs(kv_batch=1)
    mesh = make_mesh(2, 4, 1)
    q, kv = P("data", "seq"), P(None, "seq")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=((q, kv, kv), (q, q)),
        out_specs=(q, q, q, kv, kv),
    )
    def run(arrays, cotangents):
        def local(*arrays):
            return burst_jax.ring_attention(
                *arrays, axis_name="seq", is_causal=True, return_residual=True
            )

        results, vjp = jax.vjp(local, *arrays)
        return *results, *vjp(cotangents)

    assert_close(run(arrays, cotangents), shared_keys(arrays, cotangents))


def test_shard_map_over_the_sequence_axis_only():
    """The other mesh axes stay Auto."""
    arrays, cotangents = make_inputs()
    run = in_shard_map(make_mesh(2, 2, 2), (P(None, "seq"),) * 3, True, axis_names={"seq"})
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, one_device(arrays, cotangents))
