"""The ring on meshes of several axes, Auto and Explicit, and in the caller's own shard_map."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
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
)

import burst_jax
from pallas_kernels import XLA
from pallas_kernels.arrays import unvary

AXES: Any = {"batch_axis": "data", "tensor_axis": "model"}


def test_batch_and_head_axes():
    """Of NumPy arrays, which are on no mesh."""
    arrays, cotangents = make_inputs()
    run = attend(make_mesh(2, 2, 2), layout="contiguous", **AXES)
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, one_device(arrays, cotangents))
    assert got[0].sharding.shard_shape(got[0].shape) == (B // 2, T // 2, N // 2, H)


def test_explicit_axes():
    """Of the mesh in context. Results and gradients have the arguments' shardings as types."""
    arrays, cotangents = make_inputs()
    mesh = make_mesh(2, 2, 2, kind=AxisType.Explicit)
    sharding = jax.NamedSharding(mesh, P("data", "seq", "model"))
    inputs = jax.device_put(burst_jax.to_layout((arrays, cotangents), "zigzag", 2), sharding)
    options: Any = {"layout": "zigzag", "is_causal": True, "return_residual": True}
    with jax.set_mesh(mesh):
        run = functools.partial(burst_jax.burst_attention, **AXES, **options)
        got = forward_and_gradients(run)(*inputs)
        eager = run(*inputs[0])
    np.testing.assert_array_equal(eager[0], run(*inputs[0], mesh=mesh)[0])
    for result in (*eager, *got):
        assert result.sharding.is_equivalent_to(sharding, result.ndim)
    got = burst_jax.from_layout(jax.device_get(got), "zigzag", 2)
    assert_close(got, one_device(arrays, cotangents))


# --- the caller's own shard_map ------------------------------------------------------------------


def in_shard_map(mesh, specs, **options):
    """``(query, key, value) -> (out, lse)`` by ring_attention."""

    def local(*arrays):
        return burst_jax.ring_attention(
            *arrays, axis_name="seq", is_causal=True, return_residual=True, **options
        )

    return functools.partial(
        jax.shard_map, local, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[0])
    )


def shared_keys(arrays, cotangents):
    """float64 results for K and V of batch size 1 that both sequences of Q attend to."""
    q, k, v = arrays
    repeated = (q, *(np.repeat(x, 2, axis=0) for x in (k, v)))
    out, lse, dq, dk, dv = one_device(repeated, cotangents)
    return out, lse, dq, dk.sum(0, keepdims=True), dv.sum(0, keepdims=True)


@pytest.mark.parametrize(("check_vma", "backward"), [(True, "rotate_kv"), (False, "rotate_query")])
def test_ring_attention_in_an_outer_shard_map(check_vma, backward):
    """K and V are replicated over the data axis and Q is sharded: dK and dV are summed over it."""
    arrays, cotangents = make_inputs(kv_batch=1)
    specs = P("data", "seq", "model"), P(None, "seq", "model"), P(None, "seq", "model")
    run = in_shard_map(make_mesh(2, 2, 2), specs, backward=backward)(check_vma=check_vma)
    assert_close(forward_and_gradients(run)(arrays, cotangents), shared_keys(arrays, cotangents))


def test_shard_map_over_the_sequence_axis_only():
    """The other mesh axes stay Auto."""
    arrays, cotangents = make_inputs()
    run = in_shard_map(make_mesh(2, 2, 2), (P(None, "seq"),) * 3)(axis_names={"seq"})
    assert_close(forward_and_gradients(run)(arrays, cotangents), one_device(arrays, cotangents))


def test_gradients_taken_inside_the_shard_map():
    """With check_vma the sum over the data axis is part of the gradient."""
    arrays, cotangents = make_inputs(kv_batch=1)
    q, kv = P("data", "seq"), P(None, "seq")

    def local(arrays, cotangents):
        attend = functools.partial(
            burst_jax.ring_attention, axis_name="seq", is_causal=True, return_residual=True
        )
        results, vjp = jax.vjp(attend, *arrays)
        return *results, *vjp(cotangents)

    specs = {"in_specs": ((q, kv, kv), (q, q)), "out_specs": (q, q, q, kv, kv)}
    run = jax.jit(jax.shard_map(local, mesh=make_mesh(2, 2, 1), **specs))
    assert_close(run(arrays, cotangents), shared_keys(arrays, cotangents))


def test_results_vary_over_the_ring_even_if_the_kernels_are_unmarked():
    """Mosaic's kernels mark no result as varying, and gradients of such results would be summed."""

    def unmarked(function: Any) -> Any:
        return lambda *args, **options: jax.tree.map(unvary, function(*args, **options))

    both = {"forward": unmarked(XLA.forward), "backward": unmarked(XLA.backward)}
    implementation, seen = dataclasses.replace(XLA, **both), []

    def local(query, key, value, numbers):
        results = burst_jax.ring_attention(
            query, key, value, "seq", sink_logits=numbers, alibi_slopes=numbers,
            implementation=implementation, return_residual=True,
        )  # fmt: skip
        seen.extend(jax.typeof(x).manual_axis_type.varying for x in results)
        return results

    tokens = P(None, "seq")
    specs: Any = {"in_specs": (*[tokens] * 3, P()), "out_specs": (tokens, tokens)}
    run = jax.shard_map(local, mesh=make_mesh(1, 4, 1), **specs)
    arrays, cotangents = make_inputs()
    arrays = *arrays, np.ones(N, np.float32)
    # shard_map checks that each gradient varies as its array does.
    gradients = jax.eval_shape(lambda arrays: jax.vjp(run, *arrays)[1](cotangents), arrays)
    assert [x.shape for x in gradients] == [x.shape for x in arrays]
    assert set(seen) == {frozenset({"seq"})}


def test_axes_of_a_spec():
    none = {"batch_axis": None, "seq_axis": None, "tensor_axis": None}
    assert burst_jax.axes_of(P()) == none
    assert burst_jax.axes_of(P(None, "seq")) == none | {"seq_axis": "seq"}
    found = burst_jax.axes_of(P(("data", "fsdp"), ("outer", "inner"), ("model",), None))
    assert found == {
        "batch_axis": ("data", "fsdp"), "seq_axis": ("outer", "inner"), "tensor_axis": "model",
    }  # fmt: skip
    wrong: Any = ("data", "seq")
    for spec, message in (
        (P(None, None, None, "model"), "which shards the head dim over .*'model'"),
        (P(None, None, None, None, "x"), "up to four entries"),
        (P(P.UNCONSTRAINED, "seq"), "each None, a mesh axis's name or a tuple of names"),
        (wrong, "spec is a tuple: it must be a jax.sharding.PartitionSpec"),
    ):
        with pytest.raises(ValueError, match=message):
            burst_jax.axes_of(spec)
