"""Grouped matrix product: plain JAX against float64, its errors and its memory."""

from __future__ import annotations

import functools
import importlib
from typing import Any
from unittest import mock

import grouped_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import primitives

from pallas_kernels import SlowerKernelsWarning, grouped, vary, varying_axes
from pallas_kernels.device import Target
from pallas_kernels.group_tiles import GroupTiles
from pallas_kernels.grouped import grouped_matmul
from pallas_kernels.mosaic.sm80 import implementation

X, W, SIZES = jnp.ones((6, 4)), jnp.ones((3, 4, 5)), jnp.asarray([2, 0, 3])


@pytest.mark.parametrize("name", grouped_cases.SIZES)
def test_as_exact_as_float64(name):
    case = grouped_cases.make(name, 24, 40, "float32")
    grouped_cases.check(case, grouped_cases.results(case, "xla"), 1e-6)


def test_in_bfloat16():
    case = grouped_cases.make("ragged", 24, 40, "bfloat16")
    grouped_cases.check(case, grouped_cases.results(case), 5e-3)


def test_the_gradients_are_differentiable():
    """Second derivatives equal those of a product with one gathered matrix per row."""
    case = grouped_cases.make("ragged", 8, 8, "float32")
    group = np.repeat(np.arange(len(case.sizes)), case.sizes)
    rows = len(group)

    def dense(x, w):
        return jnp.einsum("mk,mkn->mn", x[:rows], w[group])

    def penalty(product, x, w):
        norm = lambda x, w: (jnp.tanh(product(x, w)) ** 2).sum()  # noqa: E731
        return sum((g**2).sum() for g in jax.grad(norm, (0, 1))(x, w))

    x, w = case.x / 8, case.w
    ours = lambda x, w: grouped_matmul(x, w, case.sizes)  # noqa: E731
    for got, wanted in zip(
        jax.jit(jax.grad(functools.partial(penalty, ours), (0, 1)))(x, w),
        jax.jit(jax.grad(functools.partial(penalty, dense), (0, 1)))(x, w),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)


def test_inside_shard_map_scan_and_remat():
    """Rows and sizes differ from device to device; the gradient of w is the sum over them."""
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    cases = [grouped_cases.make(name, 8, 8, "float32", rows=320) for name in ("ragged", "many")]
    x = jnp.stack([case.x for case in cases])
    sizes = jnp.stack([jnp.resize(case.sizes, (4,)) // 2 for case in cases])
    w = cases[0].w[:4]

    def layers(x, w, sizes):
        @jax.checkpoint
        def layer(x, _):
            return jnp.tanh(grouped_matmul(x, w, sizes)), None

        return jax.lax.scan(layer, x, None, length=2)[0]

    def loss(x, w):
        local = lambda x, w, sizes: layers(x[0], w, sizes[0])[None]  # noqa: E731
        specs = P("d"), P(), P("d")
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("d"))
        return (mapped(x, w, sizes) ** 2).sum()

    def one_by_one(x, w):
        return sum(
            (layers(*each, s) ** 2).sum()
            for each, s in zip(((a, w) for a in x), sizes, strict=True)
        )

    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    wanted = jax.jit(jax.grad(one_by_one, (0, 1)))(x, w)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_results_of_kernels_vary_as_their_operands_do(family):
    """Else the gradient of what uses them has another type than they have."""
    kernels = importlib.import_module(f"pallas_kernels.mosaic.{family}.grouped")
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])
    varying = []

    def local(x, w, sizes):
        w, sizes = vary((w, sizes), frozenset("d"))
        out = kernels.product(x, w, sizes, transposed=False)
        gradient = kernels.weight_gradient(x, out, sizes)
        varying.extend(map(varying_axes, (out, gradient)))
        return out

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P("d"))
    rows = jnp.ones((128, 64), jnp.bfloat16)
    jax.eval_shape(mapped, rows, jnp.ones((2, 64, 64), jnp.bfloat16), jnp.asarray([40, 20]))
    assert varying == [{"d"}, {"d"}]


@pytest.mark.parametrize(("rows", "block", "align"), [(70, 16, 1), (72, 16, 8), (8, 64, 8)])
def test_every_row_is_in_one_tile_of_its_group(rows, block, align):
    """Drawn sizes, empty and negative ones too, whose sum is less or more than the rows."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(-2, rows, (40, 5)) * (rng.random((40, 5)) < 0.5)
    sizes[0] = 0
    find = functools.partial(GroupTiles.of, rows=rows, block=block, align=align)
    found = jax.tree.map(np.asarray, jax.jit(jax.vmap(find))(jnp.asarray(sizes, jnp.int32)))
    for each, *tiles, count in zip(sizes.clip(0), *found, strict=True):
        owners = np.repeat(np.arange(len(each) + 1), [*each, rows])[:rows]
        group, first, begin, end = (x[: count[0]] for x in tiles)
        assert (begin < end).all()
        np.testing.assert_array_equal(np.repeat(group, end - begin), owners)
        np.testing.assert_array_equal(begin, [0, *end[:-1]])
        assert ((first <= begin) & (end <= first + block) & (first % align == 0)).all()
        assert (tiles[2][count[0] :] >= tiles[3][count[0] :]).all()


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_the_tiles_alone_decide_which_rows_are_of_a_group(monkeypatch, family):
    """The same kernel runs whether tiles are whole or not, and nothing else reads the sizes."""
    kernels = importlib.import_module(f"pallas_kernels.mosaic.{family}.grouped")
    product = functools.partial(kernels.product, transposed=False)
    sizes: Any = jax.ShapeDtypeStruct((2,), jnp.int32)

    def traced(run, rows, *others):
        x = jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16)
        # JAX keeps the traces of a function.
        return jax.make_jaxpr(lambda *arrays: run(*arrays))(x, *(others or [x]), sizes).jaxpr

    def reads_sizes(jaxpr):
        return any(jaxpr.invars[-1] in equation.invars for equation in jaxpr.eqns)

    weights = jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16)
    for run, others, table in (
        (product, [weights], "GroupTiles"), (kernels.weight_gradient, [], "GroupBounds")
    ):  # fmt: skip
        whole, part = (traced(run, rows, *others) for rows in (256, 200))
        assert primitives(whole, inside="run_scoped") == primitives(part, inside="run_scoped")
        assert reads_sizes(whole)
        of = getattr(kernels, table).of
        fixed = mock.Mock(of=lambda _, *shape, of=of: of(jnp.asarray([40, 24], jnp.int32), *shape))
        monkeypatch.setattr(kernels, table, fixed)
        assert not reads_sizes(traced(run, 256, *others))


def test_no_copy_of_the_rows_per_group():
    def gradients(x, w, sizes):
        return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)[1](x)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2048, 128), (64, 128, 128))]
    compiled = jax.jit(gradients).lower(*shapes, jax.ShapeDtypeStruct((64,), jnp.int32)).compile()
    # The sums of dw, and less than as much again; x per group would be 67 MB.
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 64 * 128 * 128 * 4


def test_traced_sizes_past_the_last_row_are_left_out():
    got = jax.jit(grouped_matmul)(X, W, jnp.asarray([4, -1, 5]))
    np.testing.assert_array_equal(got, 4 * np.ones((6, 5)))


HOPPER, AMPERE = Target("gpu", 9.0), Target("gpu", 8.0)
BF16 = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((2, 64, 128), jnp.bfloat16)


@pytest.mark.parametrize(
    ("target", "arrays", "name"),
    [
        (HOPPER, BF16, "mosaic_sm90"),
        (AMPERE, BF16, "mosaic_sm80"),
        (Target("gpu", 7.5), BF16, "xla"),
        (HOPPER, (X, W), "xla"),
    ],
)
def test_choice(monkeypatch, target, arrays, name):
    monkeypatch.setattr(grouped, "target_of", lambda x: target)
    monkeypatch.setattr(implementation, "compiles_for", lambda: (8, 0))
    assert grouped._choose(None, *arrays).name == name


def test_a_kernel_that_cannot_be_compiled_is_a_warning(monkeypatch):
    monkeypatch.setattr(grouped, "target_of", lambda x: AMPERE)
    monkeypatch.setattr(implementation, "compiles_for", lambda: (9, 0))
    with pytest.warns(SlowerKernelsWarning, match="takes 'xla' here, and not 'mosaic_sm80': the"):
        assert grouped._choose(None, *BF16).name == "xla"


@pytest.mark.parametrize(
    ("target", "arrays", "message"),
    [
        (HOPPER, (X, W), "'mosaic_sm90': x is float32; .*: cast x and w"),
        (AMPERE, (BF16[0][:, :24], BF16[1][:, :24]), "'mosaic_sm80': K is 24; .*: pad the"),
    ],
    ids=["dtype", "K"],
)
def test_xla_on_a_gpu_that_has_kernels_is_a_warning(monkeypatch, target, arrays, message):
    monkeypatch.setattr(grouped, "target_of", lambda x: target)
    monkeypatch.setattr(implementation, "compiles_for", lambda: (8, 0))
    with pytest.warns(
        SlowerKernelsWarning, match=f"'xla' here, and not {message}.*\\. XLA is many"
    ):
        assert grouped._choose(None, *arrays).name == "xla"


@pytest.mark.parametrize(
    ("target", "arrays", "message"),
    [
        (Target("cpu", None), BF16, "it needs compute capability 9.0"),
        (
            HOPPER,
            (X, W),
            "x is float32; it supports bfloat16 and float16: cast x and w; use None, w",
        ),
        (
            HOPPER,
            (BF16[0][:, :24], BF16[1][:, :24]),
            "K is 24; it supports multiples of 64: pad the features; use None",
        ),
        (HOPPER, (BF16[0], BF16[1][:, :, :40]), "N is 40; it supports multiples of 64"),
    ],
    ids=["cpu", "dtype", "K", "N"],
)
def test_unsupported(monkeypatch, target, arrays, message):
    monkeypatch.setattr(grouped, "target_of", lambda x: target)
    message = f"implementation 'mosaic_sm90' cannot run: {message}"
    x, w = arrays
    with pytest.raises(NotImplementedError, match=message):
        grouped_matmul(x, w, jnp.zeros(len(w), int), implementation="mosaic_sm90")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X[0]}, r"x has shape \(4,\): it must be \[M, K\]"),
        ({"w": W[0]}, r"w has shape \(4, 5\): it must be \[G, K, N\]"),
        ({"group_sizes": SIZES[0]}, r"group_sizes has shape \(\): it must be \[G\]"),
        ({"x": X.astype(int)}, "x has dtype int32: convert it to a floating-point dtype"),
        (
            {"w": W.astype(jnp.bfloat16)},
            "w is bfloat16, x float32: convert one to the dtype of the other",
        ),
        (
            {"w": W[:, :3]},
            r"w has shape \(3, 3, 5\), x \(6, 4\): the second axis of w must have as many elements "
            "as a row of x",
        ),
        (
            {"group_sizes": SIZES[:2]},
            "group_sizes has 2 elements, w 3 groups: each group must have a size",
        ),
        (
            {"group_sizes": SIZES.astype(jnp.float32)},
            "group_sizes has dtype float32: convert it to int32",
        ),
        ({"group_sizes": SIZES - 1}, "group_sizes holds -1: sizes must be 0 or more"),
        ({"group_sizes": SIZES * 2}, "group_sizes add up to 10, x has 6 rows: pass all rows"),
        (
            {"implementation": "cuda"},
            "implementation is 'cuda': use None or one of 'mosaic_sm90', 'mosaic_sm80', 'xla'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_errors(changed, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**{"x": X, "w": W, "group_sizes": SIZES} | changed)
