"""Every row of docs/transforms.md."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from typing import Any
from unittest import mock

import compare
import dense
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import numpy_jaxprs
import pytest
from implementations import quick_jit
from jax.sharding import PartitionSpec as P
from rings import B, H, K, N, make_inputs, make_mesh

import burst_jax
from pallas_kernels import XLA

SPEC, BATCH = P(None, "seq"), P("seq")


def as_burst(mesh, check_vma=True, **options):
    """``(query, key, value) -> out`` by burst_attention."""
    del check_vma
    return functools.partial(burst_jax.burst_attention, mesh=mesh, is_causal=True, **options)


def as_ring(mesh, check_vma=True, **options):
    """The same by ring_attention inside a shard_map."""
    run = functools.partial(burst_jax.ring_attention, axis_name="seq", is_causal=True, **options)
    return jax.shard_map(run, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=check_vma)


def as_local(mesh, check_vma=True, **options):
    """The same by local_attention, on each device's whole sequences, a shard of the batch."""
    run = functools.partial(burst_jax.local_attention, is_causal=True, **options)
    return jax.shard_map(run, mesh=mesh, in_specs=BATCH, out_specs=BATCH, check_vma=check_vma)


WAYS = {"burst_attention": as_burst, "ring_attention": as_ring, "local_attention": as_local}
NAMES = {way: name for name, way in WAYS.items()}
SMALL = tuple(jnp.asarray(x[:, :16]) for x in make_inputs()[0])
SMALL_DO = make_inputs()[1][0][:, :16]
RING = make_mesh(1, 2, 1)


def dense_out(q, k, v, check_vma=True):
    del check_vma
    k, v = (dense.repeat_heads(x, N) for x in (k, v))
    return dense.attention(q, k, v, dense.kept(16, 16, is_causal=True))[0]


compiled = quick_jit


def of_dense(results, *args, **options):
    """``results(*args)`` of dense attention: its programs are evaluated by NumPy."""

    def by_numpy(function):
        return lambda *arrays: numpy_jaxprs.traced(function, *arrays)(*arrays)

    with mock.patch.dict(globals(), compiled=by_numpy):
        return results(*args, **options)


def pulled_back(run, *arrays, do=SMALL_DO):
    """``(out, gradients)`` of a function."""

    def both(*arrays):
        out, vjp = jax.vjp(run, *arrays)
        return out, *vjp(do)

    return compiled(both)(*arrays)


@functools.cache
def small_truth():
    """``(out, dq, dk, dv)`` of the small arrays."""
    return of_dense(pulled_back, dense_out, *SMALL)


@functools.cache
def expected(row):
    """What a row of SAME gives of dense attention, for all ways at once."""
    # The same numbers, whatever computes them.
    if row == "jax.checkpoint, policies":
        return [expected("jax.lax.scan")] * 2
    if row in ("eager", "jax.jit", "lower and compile"):
        return small_truth()[0]
    if row == "jax.grad":
        return small_truth()[1:]
    if row in ("jax.vjp", "jax_numpy_rank_promotion=raise"):
        return small_truth()
    return of_dense(SAME[row], dense_out)


def same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert compare.errors(g, w)[1] < 5e-6


# --- transforms that give the same results as of dense attention: (attention) -> results ---------


def grad(run):
    return compiled(jax.grad(lambda *xs: (run(*xs) * SMALL_DO).sum(), (0, 1, 2)))(*SMALL)


def jacrev(run):
    return compiled(jax.jacrev(lambda q: run(q, *SMALL[1:])[0, 5, :2, 0]))(SMALL[0])


def vmap(run):
    """Over other axes of query and key, and not over the value, whose gradient is a sum."""
    query, key = (jnp.stack([x, -0.5 * x], axis) for x, axis in zip(SMALL, (1, 0), strict=False))
    do = jnp.stack([SMALL_DO, 2 * SMALL_DO])
    return pulled_back(jax.vmap(run, in_axes=(1, 0, None)), query, key, SMALL[2], do=do)


def scan(run, wrap=lambda layer: layer):
    """Layers, with gradients through all of them."""

    @wrap
    def layer(x, scale):
        q = x * scale
        return x + run(q, q[:, :, :K], x[:, :, :K]), None

    def layers(x, scales):
        return jax.lax.scan(layer, x, scales)[0]

    return pulled_back(layers, SMALL[0], np.array([1, 0.5], np.float32))


def checkpoint(run):
    policy = jax.checkpoint_policies.save_only_these_names(*burst_jax.CHECKPOINT_NAMES)
    return [scan(run, functools.partial(jax.checkpoint, policy=kept)) for kept in (None, policy)]


def ahead_of_time(run):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), SMALL)
    return jax.jit(run).lower(*shapes).compile()(*SMALL)


def in_context(context):
    def results(run):
        with context():
            return pulled_back(run, *SMALL)

    return results


SAME = {
    "eager": lambda run: run(*SMALL),
    "jax.jit": lambda run: jax.jit(run)(*SMALL),
    "jax.grad": grad,
    "jax.vjp": lambda run: pulled_back(run, *SMALL),
    "jax.jacrev": jacrev,
    "jax.vmap, in_axes": vmap,
    "jax.lax.scan": scan,
    "jax.checkpoint, policies": checkpoint,
    "lower and compile": ahead_of_time,
    "jax_numpy_rank_promotion=raise": in_context(lambda: jax.numpy_rank_promotion("raise")),
}


# --- the other rows: (burst_attention's or ring_attention's way) -> None -------------------------


def row_vmap_spmd_axis_name(way):
    many, do = [np.stack([x, -x]) for x in SMALL], np.stack([SMALL_DO, 2 * SMALL_DO])
    run = way(make_mesh(2, 2, 1), check_vma=False)
    got = pulled_back(jax.vmap(run, spmd_axis_name="data"), *many, do=do)
    same(got, of_dense(pulled_back, jax.vmap(dense_out), *many, do=do))
    assert got[0].sharding.spec[0] == "data"


@pytest.mark.slow
def test_masks_of_each_example_over_explicit_axes():
    """An offset of every example; keys' positions, segment ids and V are those of all examples."""
    mesh = jax.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
    (q, k, v), offsets = (x[:1] for x in SMALL), np.array([0, 3], np.int32)
    queries, keys = np.stack([q, -q]), np.stack([k, 2 * k])
    ids: Any = np.repeat([[1, 2]], [9, 7], 1).astype(np.int32)

    def one(query, key, offset):
        return burst_jax.burst_attention(
            query, key, v, mesh=mesh, is_causal=True, query_offset=offset,
            query_segment_ids=ids, key_value_segment_ids=ids,
        )  # fmt: skip

    def both(*arrays):
        out, vjp = jax.vjp(jax.vmap(one, spmd_axis_name="data"), *arrays)
        return out, *vjp(out)[:2]

    with jax.set_mesh(mesh):
        split = jax.device_put((queries, keys), jax.NamedSharding(mesh, P("data", None, "seq")))
        of_examples = jax.device_put(offsets, jax.NamedSharding(mesh, P("data")))
        got = quick_jit(both)(*split, of_examples)
    for i, offset in enumerate(offsets):
        keep = dense.kept(
            16, 16, is_causal=True, query_offset=offset,
            query_segment_ids=ids, key_value_segment_ids=ids,
        )  # fmt: skip

        def truth(query, key, keep=keep):
            key, value = (dense.repeat_heads(x, N) for x in (key, v))
            return dense.attention(query, key, value, keep)[0]

        def with_gradients(*arrays, truth=truth):
            out, vjp = jax.vjp(truth, *arrays)
            return out, *vjp(out)

        arrays = queries[i], keys[i]
        wanted = numpy_jaxprs.traced(with_gradients, *arrays)(*arrays)
        same([np.asarray(x)[i] for x in got], list(wanted))


def row_explicit(way):
    mesh = jax.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
    assert mesh.explicit_axes == ("seq",)
    spec = P(*(BATCH if way is as_local else SPEC), *[None] * 3)[:4]
    arrays = jax.device_put(SMALL, jax.NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        got = jax.jit(way(mesh))(*arrays)
    same(got, small_truth()[0])
    assert jax.typeof(got).sharding.spec == P(*spec)


def exported(way, devices, shape):
    """A program exported for arrays of a shape with symbolic sizes, and called."""
    mesh = make_mesh(1, devices, 1)
    scope = jax.export.SymbolicScope()
    sharding = jax.NamedSharding(mesh, SPEC)
    shapes = (
        jax.export.symbolic_shape(f"{shape}, {heads}, {H}", scope=scope) for heads in (N, K, K)
    )
    like = [jax.ShapeDtypeStruct(x, jnp.float32, sharding=sharding) for x in shapes]
    program = jax.export.export(jax.jit(way(mesh)))(*like)
    same(jax.jit(program.call)(*jax.device_put(SMALL, sharding)), small_truth()[0])


def row_export_symbolic_batch(way):
    exported(way, 1, "b, 16")
    if way is as_local:  # JAX itself rejects a shard_map over such a batch.
        return
    with pytest.raises(NotImplementedError, match=r"whose B is symbolic, on a ring of 2 devices"):
        exported(way, 2, "b, 16")


def row_export_symbolic_length(way):
    message = "whose T is symbolic: .*; export one program per length, or pad"
    with pytest.raises(NotImplementedError, match=message):
        exported(way, 1, f"{B}, t")


def row_shard_map_over_others(way):
    """Over data alone: the sequence's axis stays Auto, and a ring needs a shard_map of its own."""
    mesh, specs = make_mesh(2, 2, 1), {"in_specs": P("data"), "out_specs": P("data")}
    over_data = functools.partial(jax.shard_map, mesh=mesh, axis_names={"data"}, **specs)
    attend = functools.partial(getattr(burst_jax, NAMES[way]), is_causal=True)
    if way is as_local:
        same(pulled_back(over_data(attend), *SMALL), small_truth())
        return
    if way is as_burst:
        message = r"over \('data',\): make it one over \('seq',\) too, and call ring_attention the"
        with pytest.raises(ValueError, match=message):
            over_data(functools.partial(attend, mesh=mesh))(*SMALL)
        return
    ring = functools.partial(attend, axis_name="seq")
    nested = over_data(jax.shard_map(ring, axis_names={"seq"}, in_specs=SPEC, out_specs=SPEC))
    same(jax.jit(nested)(*SMALL), small_truth()[0])
    with pytest.raises(ValueError, match="Cannot lower jaxpr with verifier errors"):
        pulled_back(nested, *SMALL)


def row_vmap_axis_name(way):
    many = [jnp.stack([x, x]) for x in SMALL]
    if way is as_ring:
        ring = functools.partial(burst_jax.ring_attention, axis_name="i")
        with pytest.raises(ValueError, match=r"axis_name is 'i', .*\(an axis of jax.vmap is not"):
            jax.vmap(ring, axis_name="i")(*many)
    else:
        same(jax.vmap(way(RING), axis_name="i")(*many)[1], small_truth()[0])


def row_two_meshes(_):
    """One program of arrays on different devices, and Explicit arrays of another mesh."""
    one, other = (jax.make_mesh((2,), (name,), devices=jax.devices()[:2]) for name in ("seq", "x"))
    arrays = jax.device_put(SMALL, jax.NamedSharding(other, P(None, "x")))
    with pytest.raises(ValueError, match=r"over a mesh of {'x': 2}, the call's mesh has {'seq': 2"):
        burst_jax.burst_attention(*arrays, mesh=one)
    moved = jax.device_put(arrays, jax.NamedSharding(one, SPEC))
    same(burst_jax.burst_attention(*moved, mesh=one, is_causal=True), small_truth()[0])


def row_forward_mode(way):
    run = way(make_mesh(1, 1, 1))
    _, linear = jax.linearize(run, *SMALL)
    for differentiate in (
        lambda: jax.jvp(run, SMALL, SMALL),
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
        gradient, tangents = jax.grad(squares(run), (0, 1, 2)), tuple(jnp.flip(x, 1) for x in SMALL)
        return compiled(lambda *xs: jax.jvp(gradient, xs, tangents)[1])(*SMALL)

    want = of_dense(product, dense_out)
    rotations = {"backward": "rotate_kv"}, {"backward": "rotate_query"}
    for options in ({},) if way is as_local else rotations:
        same(product(way(RING, implementation="xla", **options)), want)
    kernels = dataclasses.replace(XLA, name="kernels", second_derivatives="none")
    run = way(make_mesh(1, 1, 1), implementation=kernels)
    with pytest.raises(
        NotImplementedError, match=r"implementation 'kernels' .*: pass implementation="
    ):
        product(run)


def row_reverse_over_reverse(way):
    def twice(run):
        def slope(q):
            return (jax.grad(squares(run))(q, *SMALL[1:]) * SMALL_DO).sum()

        return compiled(jax.grad(slope))(SMALL[0])

    same(twice(way(RING, implementation="reference")), of_dense(twice, dense_out))
    message = "gradient of a gradient through implementation 'xla' .*: take forward over reverse"
    with pytest.raises(NotImplementedError, match=message):
        twice(way(RING, implementation="xla"))


def row_eval_shape(way):
    shape = jax.eval_shape(way(RING), *SMALL)
    assert (shape.shape, shape.dtype) == (SMALL[0].shape, jnp.float32)


def row_disable_jit(_):
    """Without a mask: each of its operations would be a program of its own."""
    run = functools.partial(burst_jax.burst_attention, mesh=RING, implementation="reference")
    with jax.disable_jit():
        got = run(*SMALL)
    same(got, jax.jit(run)(*SMALL))


def row_debug_nans(way):
    """With rows that see nothing, whose lse is -inf."""
    lengths = jnp.full(B // RING.size if way is as_local else B, 9)
    ends = {"key_value_seq_lengths": lengths, "query_seq_lengths": lengths}
    with jax.debug_nans(True):
        out, *_ = pulled_back(way(RING, **ends), *SMALL)
    assert not np.asarray(out)[:, 9:].any()
    same(out[:, :9], small_truth()[0][:, :9])


def row_debug_infs(way):
    """Where a query attends to nothing only lse is -inf, and only who asks for it gets it."""
    if way is not as_burst:  # Without a shard_map around it, whose eager results are checked.
        run = functools.partial(burst_jax.local_attention, is_causal=True)
    else:
        run = functools.partial(burst_jax.burst_attention, mesh=RING, is_causal=True)
    run = functools.partial(run, key_value_seq_lengths=np.asarray([0, *[9] * (B - 1)]))
    with jax.debug_infs(True):
        out = run(*SMALL)
        _, *gradients = pulled_back(run, *SMALL)
        with pytest.raises(FloatingPointError, match=r"nvalid value \(inf\)"):
            run(*SMALL, return_residual=True)
    assert not np.asarray(out)[0].any()
    same(out[1:, :9], small_truth()[0][1:, :9])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def row_x64(way):
    with jax.enable_x64(True):
        got = jax.jit(way(RING))(*SMALL)
    assert got.dtype == jnp.float32
    same(got, small_truth()[0])


ROWS = {
    "jax.vmap, spmd_axis_name": row_vmap_spmd_axis_name,
    "jax.vmap, axis_name": row_vmap_axis_name,
    "jax.shard_map over other axes": row_shard_map_over_others,
    "meshes of Explicit axes": row_explicit,
    "arrays of two meshes": row_two_meshes,
    "jax.export": lambda way: exported(way, 2, f"{B}, 16"),
    "jax.export, symbolic batch": row_export_symbolic_batch,
    "jax.export, symbolic length": row_export_symbolic_length,
    "jax.jvp, jax.jacfwd, jax.linearize": row_forward_mode,
    "jax.hessian, jax.jvp of jax.grad": row_forward_over_reverse,
    "jax.grad of jax.grad": row_reverse_over_reverse,
    "jax.eval_shape": row_eval_shape,
    "jax.disable_jit": row_disable_jit,
    "jax_debug_nans": row_debug_nans,
    "jax_debug_infs": row_debug_infs,
    "jax_enable_x64": row_x64,
}
QUICK = ("eager", "jax.jit", "jax.vmap, in_axes", "jax.eval_shape")
EVERY = [*SAME, *ROWS]
# Of burst_attention alone: the others have no jit of their own, and the same derivatives.
OF_ONE = (
    *("jax.grad", "jax.jacrev", "jax.lax.scan", "lower and compile", "jax.disable_jit"),
    *("jax_numpy_rank_promotion=raise", "jax_enable_x64", "arrays of two meshes", "jax.export"),
    "jax.checkpoint, policies",
)
# ring_attention's second derivatives and NaNs are burst_attention's.
NOT_RING = (
    *("jax.hessian, jax.jvp of jax.grad", "jax.grad of jax.grad"),
    *("jax_debug_nans", "jax_debug_infs"),
)


@pytest.mark.parametrize(
    ("way", "row"),
    [
        pytest.param(way, row, marks=() if row in QUICK else pytest.mark.slow)
        for way in WAYS
        for row in EVERY
        if way == "burst_attention" or row not in OF_ONE
        if way != "ring_attention" or row not in NOT_RING
    ],
)
def test_the_table_of_transforms(way, row):
    if row in ROWS:
        ROWS[row](WAYS[way])
    else:
        same(SAME[row](WAYS[way](RING)), expected(row))


def test_the_page_has_these_rows():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "transforms.md").read_text()
    rows = re.findall(r"^\| `?([^|`]+?)`? \|.*\|$", page, re.M)
    rows = [row for row in rows if row != "transform" and set(row) != {"-"}]
    assert sorted(rows) == sorted(EVERY)
