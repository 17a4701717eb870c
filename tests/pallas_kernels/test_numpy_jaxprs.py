"""Interpreted kernels' programs, evaluated by NumPy, compute what XLA makes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy_jaxprs
from jax import lax


def program(x, half, i, j):
    """Whatever NumPy defines otherwise than XLA, and all that calls other programs."""

    def step(carry, x):
        return carry + x.sum(), jnp.where(carry > 0, x, -x)

    last, rows = lax.scan(step, jnp.float32(-1), x, reverse=True)
    doubled = lax.while_loop(lambda state: state < 100, lambda state: 2 * state, i[1])
    picked = [lax.switch(at, [lambda: 1, lambda: 2, lambda: 3]) for at in (i[0], i[1], i[3])]
    called = jax.pure_callback(np.sort, jax.ShapeDtypeStruct(i.shape, i.dtype), i)
    square = x[:3] + 4 * jnp.eye(3)
    return {
        "scan": (last, rows), "while": doubled, "switch": picked, "callback": called,
        "quotients": (lax.div(i, j), lax.rem(i, j), i * j * 2**20),
        "shifts": (i << 40 - j, lax.shift_right_logical(i, j), i.view(jnp.uint32)),
        "rounds": (jnp.round(x), x.astype(jnp.int32), (x * 1e10).astype(jnp.int32)),
        "half": (half.sum(1), half * half, half.max(), lax.dot(half, half.T)),
        "slices": (lax.dynamic_slice(x, (i[0], i[3]), (2, 2)), x[i[1]], x[::2, 1:]),
        "updates": lax.dynamic_update_slice(x, x[:2, :2], (i[3], i[0])),
        "selects": (jnp.clip(x, -0.5, 0.5), lax.select_n(i % 2, i, j), jnp.sign(i)),
        "reduces": lax.reduce(
            (x, 2 * x), (jnp.float32(0), jnp.float32(1)),
            lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]), (0,),
        ),
        "stacks": (jnp.stack([x, -x], 1), lax.unstack(x, 1)),
        "sorts": lax.sort([i % 3, j, i], num_keys=1), "split": jnp.split(x, [1, 3]),
        "pads": (lax.pad(x, jnp.float32(7), [(1, -1, 0), (-1, 1, 2)]), jnp.pad(x, 1)),
        "sums": (jnp.cumsum(x, 0), lax.cumsum(x, axis=1, reverse=True)),
        "largest": (lax.cummax(x, 0), lax.cummax(x, axis=1, reverse=True)),
        "arithmetic shifts": lax.shift_right_arithmetic(i * 100, j + 30),
        "rows": (x[i], x.at[i].get(mode="fill"), x.at[j].get(mode="clip"), x[:, i % 3][i % 4]),
        "columns": jnp.take_along_axis(x, i[:, None] % 3, 1),
        "added": (x.at[i % 4].add(x), x.at[j, 1].add(2.0), x.at[i].add(x, mode="clip")),
        "set": (x.at[i].set(7.0, mode="drop"), x.at[1:3, j % 3].set(1.0)),
        "examples": jax.vmap(lambda x, i: x.at[i % 3].add(x[(i + 1) % 3]))(x, i),
        "solved": [
            lax.linalg.triangular_solve(
                square, x[:3], left_side=True, lower=lower, transpose_a=turned, unit_diagonal=unit
            )
            for lower, turned, unit in ((True, False, True), (False, True, False))
        ],
        "solved from the right": lax.linalg.triangular_solve(square, x, lower=True),
        "functions": [f(x) for f in (jnp.sin, jnp.cos, jnp.log1p, jnp.expm1, jax.nn.sigmoid)],
        "complex": jnp.exp(lax.complex(x, 2 * x)).imag + lax.rsqrt(1 + x * x),
        "products": (jnp.einsum("bij,bkj->bik", x.reshape(2, 2, 3), x.reshape(2, 2, 3)), x.T @ x),
    }  # fmt: skip


def test_numpy_computes_what_xla_does():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 3)).astype(np.float32)
    i, j = np.array([[-7, 3, 7, 50], [2, -3, 5, 9]], np.int32)
    args = x, x[:, :2].astype(jnp.bfloat16), i, j
    want = jax.tree.leaves(jax.jit(program)(*args))
    jaxpr = jax.make_jaxpr(program)(*args)
    got = numpy_jaxprs.evaluate(jaxpr, jaxpr.consts, *args)
    for number, (x, y) in enumerate(zip(got, want, strict=True)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), number
        tolerance = 1e-2 if y.dtype == jnp.bfloat16 else 1e-6
        x, y = (np.asarray(each, np.float64) for each in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=1e-6, err_msg=str(number))
