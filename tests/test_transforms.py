"""The ring under JAX's transformations, on meshes of several axes, in the caller's shard_map."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys

import compare
import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import burst_jax
from burst_jax.attention import _run
from pallas_kernels import XLA, triton

AXES = ("data", "seq", "model")
B, T, N, K, H = 2, 32, 4, 2, 8
CAUSAL = dense.Mask(is_causal=True)


def make_mesh(*shape, kind=AxisType.Auto):
    """A mesh ("data", "seq", "model") over the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, AXES, axis_types=(kind,) * 3, devices=devices)


def make_inputs(seed=0, batch=B, kv_batch=None, length=T, heads=N, dim=H):
    """``((query, key, value), (cotangents of out and lse))``, float32, in natural order."""
    rng = np.random.default_rng(seed)
    kv = (kv_batch or batch, length, K, dim)
    q = (batch, length, heads, dim)
    q, k, v, do, dlse = (
        rng.normal(size=shape).astype(np.float32) for shape in (q, kv, kv, q, q[:3])
    )
    return (q, k, v), (do, dlse)


def one_device(arrays, cotangents, mask=CAUSAL):
    """``(out, lse, dq, dk, dv)`` of dense attention in float64."""
    keep = mask.dense(None, None, arrays[0].shape[1], arrays[1].shape[1])
    return dense.truth(*arrays, keep, *cotangents, mask.soft_cap)


def assert_close(got, want, limit=1e-6):
    """Every result's relative RMS error is float32 rounding."""
    for name, g, w in zip(compare.NAMES, got, want, strict=True):
        assert np.abs(w[np.isfinite(w)]).max() > 0, name
        _, rms = compare.errors(g, w)
        assert rms < limit, f"{name}: relative RMS {rms:.2g}"


def attend(mesh, layout="zigzag", **options):
    """``(query, key, value) -> (out, lse)``, tokens in natural order outside, permuted inside."""
    n = mesh.shape["seq"]

    def run(*arrays):
        arrays = burst_jax.to_layout(arrays, layout, n)
        results = burst_jax.burst_attention(
            *arrays,
            mesh=mesh,
            layout=layout,
            return_residual=True,
            **{"is_causal": True} | options,
        )
        return burst_jax.from_layout(results, layout, n)

    return run


def forward_and_gradients(run, jit=True):
    """``(arrays, cotangents) -> (out, lse, dq, dk, dv)``."""

    def both(arrays, cotangents):
        results, vjp = jax.vjp(run, *arrays)
        return *results, *vjp(cotangents)

    return jax.jit(both) if jit else both


def ring_of(n, **options):
    return attend(make_mesh(1, n, 1), **options)


# --- meshes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "batch_axis", "head_axis"),
    [
        ((1, 8, 1), None, None),
        ((2, 2, 2), "data", "model"),
        ((1, 4, 2), None, ("model",)),
        ((2, 4, 1), ("data",), None),
        ((2, 2, 2), ("data", "model"), None),
        ((1, 4, 2), ("data",), ("model",)),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_batch_and_head_axes(shape, batch_axis, head_axis):
    arrays, cotangents = make_inputs(batch=4)
    mesh = make_mesh(*shape)
    run = attend(mesh, batch_axis=batch_axis, head_axis=head_axis)
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, one_device(arrays, cotangents))
    n, split = shape[1], [batch_axis, head_axis]
    sizes = [
        int(np.prod([mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ())]))
        for axis in split
    ]
    placed = jax.jit(
        functools.partial(
            burst_jax.burst_attention, mesh=mesh, batch_axis=batch_axis, head_axis=head_axis
        )
    )(*arrays)
    shard = placed.sharding.shard_shape(placed.shape)
    assert shard == (4 // sizes[0], T // n, N // sizes[1], H)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2)], ids=["2x2x2", "1x4x2"])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_explicit_axes(shape, jit):
    """Types carry the sharding: in the arguments', in the results', and in the gradients'."""
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
        head_axis="model",
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
def test_mesh_of_the_context_is_the_mesh_of_the_argument(kind):
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


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_inputs_that_are_not_sharded(jit, kind):
    arrays, cotangents = make_inputs()
    placed = jax.tree.map(kind, (arrays, cotangents))
    got = forward_and_gradients(ring_of(4), jit)(*placed)
    assert_close(got, one_device(arrays, cotangents))


# --- transformations -----------------------------------------------------------------------------


def test_grad_of_a_scalar():
    arrays, (do, _) = make_inputs()
    run = ring_of(4)

    def loss(*arrays):
        return (run(*arrays)[0] * do).sum()

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    want = one_device(arrays, (do, np.zeros((B, T, N), np.float32)))
    assert_close((*want[:2], *got), want)


@pytest.mark.parametrize("backward", ["rotate_kv", "rotate_query"])
def test_gradient_through_lse_alone(backward):
    arrays, (do, dlse) = make_inputs()
    run = ring_of(3, layout="contiguous", backward=backward)
    arrays, do, dlse = jax.tree.map(lambda x: x[:, :30], (arrays, do, dlse))
    got = jax.jit(lambda *arrays: jax.vjp(lambda *xs: run(*xs)[1], *arrays)[1](dlse))(*arrays)
    truth = one_device(arrays, (np.zeros_like(do), dlse))
    for name, g, t in zip(("dq", "dk"), got[:2], truth[2:4], strict=True):
        assert compare.errors(g, t)[1] < 1e-6, name
        assert np.abs(t).max() > 0.1
    assert not np.asarray(got[2]).any()


@pytest.mark.parametrize("axes", [0, (1, 0, 2)], ids=["first_axis", "mixed_axes"])
def test_vmap(axes):
    parts = [make_inputs(seed) for seed in range(3)]
    arrays, cotangents = jax.tree.map(lambda *xs: np.stack(xs), *parts)
    axes_of = (axes,) * 3 if isinstance(axes, int) else axes
    moved = tuple(np.moveaxis(x, 0, axis) for x, axis in zip(arrays, axes_of, strict=True))
    run = jax.vmap(ring_of(4), in_axes=axes_of)
    out, lse, *gradients = forward_and_gradients(run)(moved, cotangents)
    gradients = [np.moveaxis(x, axis, 0) for x, axis in zip(gradients, axes_of, strict=True)]
    for i, part in enumerate(parts):
        assert_close([np.asarray(x[i]) for x in (out, lse, *gradients)], one_device(*part))


def test_vmap_over_queries_alone():
    """K and V shared by all of them: their gradients are sums."""
    arrays, cotangents = make_inputs()
    queries = np.stack([arrays[0], -arrays[0][:, ::-1]])
    many = jax.tree.map(lambda x: np.stack([x, 2 * x]), cotangents)
    run = jax.vmap(ring_of(4), in_axes=(0, None, None))
    out, lse, dq, dk, dv = forward_and_gradients(run)((queries, *arrays[1:]), many)
    parts = [
        one_device((queries[i], *arrays[1:]), jax.tree.map(lambda x, i=i: x[i], many))
        for i in (0, 1)
    ]
    for i in (0, 1):
        one = out[i], lse[i], dq[i], parts[i][3], parts[i][4]
        assert_close(one, parts[i])
    for got, want in ((dk, parts[0][3] + parts[1][3]), (dv, parts[0][4] + parts[1][4])):
        assert compare.errors(got, want)[1] < 1e-6


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


@pytest.mark.parametrize("wrap", WRAPS)
def test_scan_over_layers(wrap):
    (x, _, _), (dy, _) = make_inputs()
    weights = np.random.default_rng(1).uniform(0.5, 1.5, (LAYERS, 1, 1, N, H)).astype(np.float32)

    def run(attention, wrap):
        y, vjp = jax.vjp(deep(attention, wrap), x, weights)
        return y, *vjp(dy)

    got = jax.jit(lambda: run(ring_of(4), WRAPS[wrap]))()
    want = jax.jit(lambda: run(dense_attention, WRAPS["plain"]))()
    for name, g, w in zip(("y", "dx", "dweights"), got, want, strict=True):
        assert compare.errors(g, w)[1] < 2e-6, name


# --- recomputation -------------------------------------------------------------------------------


def count(jaxpr, primitive):
    """Equations of one primitive, those inside other equations included."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == primitive
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += count(inner, primitive)
    return total


# n = 4, no segments. Forward: K and V as one array, 3 hops. rotate_kv: the same and dK, dV 4 hops;
# rotate_query: (Q, dO) and (lse, delta) 3 hops each, and dQ 4.
FORWARD, BACKWARDS = 3, {"rotate_kv": 3 + 4, "rotate_query": 3 + 3 + 4}


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


def test_forward_alone_keeps_nothing_for_a_gradient():
    arrays, _ = make_inputs()
    jaxpr = jax.make_jaxpr(attend(make_mesh(1, 4, 1), layout="contiguous"))(*arrays)
    assert count(jaxpr.jaxpr, "ppermute") == FORWARD


# --- the caller's own shard_map ------------------------------------------------------------------


def in_shard_map(mesh, specs, check_vma, **options):
    """``(query, key, value) -> (out, lse)`` by ring_attention."""

    def local(*arrays):
        return burst_jax.ring_attention(
            *arrays, axis_name="seq", is_causal=True, return_residual=True, **options
        )

    return jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[0]), check_vma=check_vma
    )


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check"])
@pytest.mark.parametrize("backward", ["rotate_kv", "rotate_query"])
def test_ring_attention_in_the_callers_shard_map(check_vma, backward):
    arrays, cotangents = make_inputs()
    specs = (P("data", "seq", "model"),) * 3
    run = in_shard_map(make_mesh(2, 2, 2), specs, check_vma, backward=backward)
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, one_device(arrays, cotangents))


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check"])
def test_keys_that_all_rows_of_the_batch_share(check_vma):
    """K and V replicated over the data axis, Q split: their gradients are summed over it."""
    arrays, cotangents = make_inputs(kv_batch=1)
    specs = (P("data", "seq"), P(None, "seq"), P(None, "seq"))
    run = in_shard_map(make_mesh(2, 4, 1), specs, check_vma)
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, shared_keys(arrays, cotangents))


def shared_keys(arrays, cotangents):
    """The truth for K and V of one row that both rows of Q attend to."""
    q, k, v = arrays
    repeated = (q, *(np.repeat(x, 2, axis=0) for x in (k, v)))
    out, lse, dq, dk, dv = one_device(repeated, cotangents)
    return out, lse, dq, dk.sum(0, keepdims=True), dv.sum(0, keepdims=True)


def test_gradients_taken_inside_the_shard_map():
    """With check_vma the sum over the data axis is made where the gradient is taken."""
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
            return burst_jax.ring_attention(*arrays, "seq", is_causal=True, return_residual=True)

        results, vjp = jax.vjp(local, *arrays)
        return *results, *vjp(cotangents)

    assert_close(run(arrays, cotangents), shared_keys(arrays, cotangents))


def test_shard_map_over_the_sequence_alone():
    """The other mesh axes stay automatic."""
    arrays, cotangents = make_inputs()
    spec = P(None, "seq")

    def local(*arrays):
        return burst_jax.ring_attention(*arrays, "seq", is_causal=True, return_residual=True)

    run = jax.shard_map(
        local,
        mesh=make_mesh(2, 2, 2),
        in_specs=(spec,) * 3,
        out_specs=(spec, spec),
        axis_names={"seq"},
    )
    got = forward_and_gradients(run)(arrays, cotangents)
    assert_close(got, one_device(arrays, cotangents))


# --- eager calls, options, imports ---------------------------------------------------------------


def test_a_second_eager_call_traces_nothing():
    arrays, cotangents = make_inputs()
    traced = []

    def forward(*args, **kwargs):
        traced.append("forward")
        return XLA.forward(*args, **kwargs)

    def backward(*args, **kwargs):
        traced.append("backward")
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
    compiled, traces = _run._cache_size(), len(traced)
    plain = [burst_jax.burst_attention(*arrays, mesh=mesh, implementation=counting)]
    assert len(traced) > traces
    assert _run._cache_size() == compiled + 1
    compiled, traces = _run._cache_size(), len(traced)
    plain.append(burst_jax.burst_attention(*arrays, mesh=mesh, implementation=counting))
    second = call()
    assert len(traced) == traces
    assert _run._cache_size() == compiled
    for pair in (plain, *zip(first, second, strict=True)):
        np.testing.assert_array_equal(*pair)


def test_options_may_be_numpy_scalars():
    arrays, _ = make_inputs()
    mesh = make_mesh(1, 4, 1)
    numpy = burst_jax.burst_attention(
        *arrays,
        mesh=mesh,
        is_causal=np.True_,
        scale=np.float32(0.25),
        local_window_size=(np.int64(9), np.int32(0)),
        logits_soft_cap=np.float64(3),
    )
    python = burst_jax.burst_attention(
        *arrays,
        mesh=mesh,
        is_causal=True,
        scale=0.25,
        local_window_size=(9, 0),
        logits_soft_cap=3,
    )
    np.testing.assert_array_equal(numpy, python)


def test_scale_is_the_factor_on_the_logits():
    arrays, cotangents = make_inputs()
    q, k, v = arrays
    scaled = forward_and_gradients(ring_of(4, scale=0.5))(arrays, cotangents)
    want = one_device((q * np.float32(0.5 * np.sqrt(H)), k, v), cotangents)
    want[2] = want[2] * 0.5 * np.sqrt(H)
    assert_close(scaled, want)


def test_the_residual_is_optional():
    arrays, _ = make_inputs()
    mesh = make_mesh(1, 4, 1)
    alone = burst_jax.burst_attention(*arrays, mesh=mesh)
    out, lse = burst_jax.burst_attention(*arrays, mesh=mesh, return_residual=True)
    np.testing.assert_array_equal(alone, out)
    assert (lse.shape, lse.dtype) == ((B, T, N), jnp.float32)


@pytest.mark.parametrize("backward", ["rotate_kv", "rotate_query"])
def test_triton_kernels_on_the_ring(backward):
    """Interpreted: carry, packed pairs and bounds as the ring gives them, 64 tokens a shard."""
    arrays, cotangents = make_inputs(batch=1, length=128, heads=2, dim=16)
    kernels = triton(interpret=True)
    run = ring_of(2, layout="striped", backward=backward, implementation=kernels)
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
    assert {"burst_jax.ring", "pallas_kernels.xla"} <= set(done.stdout.split())
