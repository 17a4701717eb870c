"""Every row of docs/transforms.md, for burst_attention and for ring_attention."""

from __future__ import annotations

import functools
import pathlib
import re

import compare
import dense
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import quick_jit
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rings import (
    CAUSAL,
    B,
    H,
    K,
    N,
    make_inputs,
    make_mesh,
)

import burst_jax
from pallas_kernels import triton


def as_burst(mesh, **options):
    """``(query, key, value) -> out`` by burst_attention."""
    return functools.partial(burst_jax.burst_attention, mesh=mesh, is_causal=True, **options)


def as_ring(mesh, check_vma=True, **options):
    """The same by ring_attention inside a shard_map."""
    spec = P(None, "seq")
    run = functools.partial(
        burst_jax.ring_attention, axis_name="seq", is_causal=True, layout="contiguous", **options
    )
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


WAYS = {"burst_attention": as_burst, "ring_attention": as_ring}
SMALL = tuple(jnp.asarray(x[:, :16]) for x in make_inputs()[0])
SMALL_DO = make_inputs()[1][0][:, :16]
SMALL_TANGENTS = tuple(jnp.flip(x, 1) for x in SMALL)


def auto_mesh():
    return make_mesh(1, 4, 1)


def dense_out(q, k, v):
    k, v = (dense.repeat_heads(x, N) for x in (k, v))
    return dense.attention(q, k, v, CAUSAL.dense(None, None, 16, 16))[0]


@functools.cache
def small_truth():
    """``(out, dq, dk, dv)`` of the small arrays."""

    def both(*arrays):
        out, vjp = jax.vjp(dense_out, *arrays)
        return out, *vjp(SMALL_DO)

    return quick_jit(both)(*SMALL)


def same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert compare.errors(g, w)[1] < 2e-6


def gradients(run):
    return jax.grad(lambda *arrays: (run(*arrays) * SMALL_DO).sum(), (0, 1, 2))


def row_jit(way):
    same(jax.jit(way(auto_mesh()))(*SMALL), small_truth()[0])


def row_grad(way):
    same(quick_jit(gradients(way(auto_mesh())))(*SMALL), small_truth()[1:])


def row_vjp(way):
    @quick_jit
    def both(*arrays):
        out, vjp = jax.vjp(way(auto_mesh()), *arrays)
        return out, *vjp(SMALL_DO)

    same(both(*SMALL), small_truth())


def row_jacrev(way):
    def jacobian(run):
        return quick_jit(jax.jacrev(lambda q: run(q, *SMALL[1:])[0, 5, :2, 0]))(SMALL[0])

    same(jacobian(way(auto_mesh())), jacobian(dense_out))


def row_vmap(way):
    many = [np.stack([x, -x]) for x in SMALL]
    same(quick_jit(jax.vmap(way(auto_mesh())))(*many), jax.vmap(dense_out)(*many))


def vmap_over_data(run):
    many = [np.stack([x, -x]) for x in SMALL]
    got = quick_jit(jax.vmap(run, spmd_axis_name="data"))(*many)
    same(got, jax.vmap(dense_out)(*many))
    assert got.sharding.spec[0] == "data"


def row_vmap_spmd_axis_name(way):
    mesh = make_mesh(2, 4, 1)
    options = {"check_vma": False} if way is as_ring else {}
    vmap_over_data(way(mesh, **options))
    many, do = [np.stack([x, -x]) for x in SMALL], np.stack([SMALL_DO, 2 * SMALL_DO])

    def pulled_back(run):
        mapped = jax.vmap(run, spmd_axis_name="data" if run is not dense_out else None)
        return quick_jit(lambda *xs: jax.vjp(mapped, *xs)[1](do))(*many)

    same(pulled_back(way(mesh, **options)), pulled_back(dense_out))


def row_scan(way):
    run = way(auto_mesh())

    def step(q, scale):
        return run(q * scale, *SMALL[1:]), None

    scales = np.array([1, 0.5], np.float32)
    got = quick_jit(lambda q: jax.lax.scan(step, q, scales)[0])(SMALL[0])
    same(got, dense_out(0.5 * small_truth()[0], *SMALL[1:]))


def row_checkpoint(way):
    policy = jax.checkpoint_policies.save_only_these_names(*burst_jax.CHECKPOINT_NAMES)
    for kept in (None, policy):
        run = jax.checkpoint(way(auto_mesh()), policy=kept)
        same(quick_jit(gradients(run))(*SMALL), small_truth()[1:])


def row_explicit(way):
    mesh = jax.make_mesh((4,), ("seq",), devices=jax.devices()[:4])
    assert mesh.axis_types == (AxisType.Explicit,)
    arrays = jax.device_put(SMALL, jax.NamedSharding(mesh, P(None, "seq")))
    with jax.set_mesh(mesh):
        got = jax.jit(way(mesh))(*arrays)
    same(got, small_truth()[0])
    assert jax.typeof(got).sharding.spec == P(None, "seq", None, None)


def exported(way, devices, shape):
    """A program exported for arrays of a shape with symbolic sizes, and called."""
    mesh = make_mesh(1, devices, 1)
    scope = jax.export.SymbolicScope()
    sharding = jax.NamedSharding(mesh, P(None, "seq"))
    shapes = (
        jax.export.symbolic_shape(f"{shape}, {heads}, {H}", scope=scope) for heads in (N, K, K)
    )
    like = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=sharding) for x in shapes]
    program = jax.export.export(jax.jit(way(mesh)))(*like)
    same(jax.jit(program.call)(*jax.device_put(SMALL, sharding)), small_truth()[0])


def row_export(way):
    exported(way, 4, f"{B}, 16")


def row_export_symbolic_batch(way):
    exported(way, 1, "b, 16")
    with pytest.raises(NotImplementedError, match=r"whose B is symbolic, on a ring of 2 devices"):
        exported(way, 2, "b, 16")


def row_export_symbolic_length(way):
    message = "whose T is symbolic: .*; export one program per length, or pad"
    with pytest.raises(NotImplementedError, match=message):
        exported(way, 1, f"{B}, t")


def row_forward_mode(way):
    run = way(make_mesh(1, 1, 1))
    _, linear = jax.linearize(run, *SMALL)
    for differentiate in (
        lambda: jax.jvp(run, SMALL, SMALL),
        lambda: jax.jvp(jax.jit(run), SMALL, SMALL),
        lambda: jax.jit(lambda *xs: jax.jvp(run, xs, xs))(*SMALL),
        lambda: jax.jacfwd(lambda q: run(q, *SMALL[1:]).sum())(SMALL[0]),
        lambda: linear(*SMALL),
    ):
        with pytest.raises(NotImplementedError, match=r"forward-mode differ.*: use reverse mode"):
            differentiate()


def squares(run):
    """A function whose gradient is not linear in anything."""
    return lambda q, k, v: (run(q, k, v) ** 2).sum()


def row_forward_over_reverse(way):
    """As jax.hessian does it, in queries, keys and values at once."""

    def product(run):
        gradient = jax.grad(squares(run), (0, 1, 2))
        return quick_jit(lambda *xs: jax.jvp(gradient, xs, SMALL_TANGENTS)[1])(*SMALL)

    want = product(dense_out)
    for backward in ("rotate_kv", "rotate_query"):
        run = way(make_mesh(1, 2, 1), implementation="xla", backward=backward)
        same(product(run), want)
    kernel = triton(interpret=True)
    run = way(make_mesh(1, 1, 1), implementation=kernel, **uncheckable(way))
    with pytest.raises(
        NotImplementedError, match=r"implementation 'triton' .*: pass implementation="
    ):
        product(run)


def uncheckable(way):
    """Interpreted kernels cannot be traced with check_vma."""
    return {"check_vma": False} if way is as_ring else {}


def row_reverse_over_reverse(way):
    def twice(run):
        def slope(q):
            return (jax.grad(squares(run))(q, *SMALL[1:]) * SMALL_DO).sum()

        return quick_jit(jax.grad(slope))(SMALL[0])

    same(twice(way(make_mesh(1, 2, 1), implementation="reference")), twice(dense_out))
    message = "gradient of a gradient through implementation 'xla' .*: take forward over reverse"
    with pytest.raises(NotImplementedError, match=message):
        twice(way(auto_mesh(), implementation="xla"))


def row_eval_shape(way):
    shape = jax.eval_shape(way(auto_mesh()), *SMALL)
    assert (shape.shape, shape.dtype) == (SMALL[0].shape, jnp.float32)


def row_ahead_of_time(way):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), SMALL)
    program = jax.jit(way(auto_mesh())).lower(*shapes).compile()
    same(program(*SMALL), small_truth()[0])


def row_disable_jit(way):
    run = way(make_mesh(1, 2, 1), implementation="reference")
    with jax.disable_jit():
        same(run(*SMALL), small_truth()[0])


def row_debug_nans(way):
    """With rows that see nothing, whose lse is -inf."""
    ids = np.ones((B, 16), np.int32)
    ids[:, 10:] = 0

    def run(q, k, v, ids):
        given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        if way is as_burst:
            return way(auto_mesh(), **given)(q, k, v)
        spec = P(None, "seq")

        def local(q, k, v, ids):
            given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
            return burst_jax.ring_attention(q, k, v, "seq", is_causal=True, **given)

        return jax.shard_map(local, mesh=auto_mesh(), in_specs=spec, out_specs=spec)(q, k, v, ids)

    def both(*arrays):
        out, vjp = jax.vjp(lambda q, k, v: run(q, k, v, ids), *arrays)
        return out, *vjp(SMALL_DO)

    with jax.debug_nans(True):
        out, *_ = jax.jit(both)(*SMALL)
    assert not np.asarray(out)[:, 10:].any()
    same(out[:, :10], small_truth()[0][:, :10])


def row_x64(way):
    with jax.enable_x64(True):
        got = jax.jit(way(auto_mesh()))(*SMALL)
    assert got.dtype == jnp.float32
    same(got, small_truth()[0])


def row_rank_promotion(way):
    with jax.numpy_rank_promotion("raise"):
        same(jax.jit(way(auto_mesh()))(*SMALL), small_truth()[0])


ROWS = {
    "jax.jit": row_jit,
    "jax.grad": row_grad,
    "jax.vjp": row_vjp,
    "jax.jacrev": row_jacrev,
    "jax.vmap, in_axes": row_vmap,
    "jax.vmap, spmd_axis_name": row_vmap_spmd_axis_name,
    "jax.lax.scan": row_scan,
    "jax.checkpoint, policies": row_checkpoint,
    "meshes of Explicit axes": row_explicit,
    "jax.export": row_export,
    "jax.export, symbolic batch": row_export_symbolic_batch,
    "jax.export, symbolic length": row_export_symbolic_length,
    "jax.jvp, jax.jacfwd, jax.linearize": row_forward_mode,
    "jax.hessian, jax.jvp of jax.grad": row_forward_over_reverse,
    "jax.grad of jax.grad": row_reverse_over_reverse,
    "jax.eval_shape": row_eval_shape,
    "lower and compile": row_ahead_of_time,
    "jax.disable_jit": row_disable_jit,
    "jax_debug_nans": row_debug_nans,
    "jax_enable_x64": row_x64,
    "jax_numpy_rank_promotion=raise": row_rank_promotion,
}


QUICK = ("jax.jit", "jax.vmap, in_axes", "jax.eval_shape")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row.startswith(QUICK) else pytest.mark.slow) for row in ROWS],
)
@pytest.mark.parametrize("way", WAYS)
def test_the_table_of_transforms(way, row):
    ROWS[row](WAYS[way])


def test_the_page_has_these_rows():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "transforms.md").read_text()
    rows = re.findall(r"^\| `?([^|`]+?)`? \|.*\|$", page, re.M)
    assert [row for row in rows if row != "transform" and set(row) != {"-"}] == list(ROWS)
