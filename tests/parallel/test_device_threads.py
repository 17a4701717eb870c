"""Programs evaluated by a thread for each device compute what XLA's devices do."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_threads import Group, evaluated
from implementations import quick_jit
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

SHIFT, ROWS = [(0, 1), (1, 2), (2, 0)], P(("a", "b"), None)


def on_device(x, table):
    """Every collective, over one axis and both in either order, and in loops."""
    turn = functools.partial(lax.ppermute, axis_name="b", perm=SHIFT)
    here = lax.axis_index(("b", "a")), lax.axis_index("b")

    def step(carry, _):
        carry = turn(carry)
        return carry, lax.psum(carry, "a")

    # A device of "a" runs as many steps as its index says, all devices of "b" the same.
    steps = lax.while_loop(
        lambda state: state[0] < lax.axis_index("a"),
        lambda state: (state[0] + 1, lax.psum(state[1], "b")),
        (0, x),
    )[1]
    sums = lax.psum(x, ("a", "b")), lax.psum(x.astype(jnp.bfloat16), "b"), lax.pmax(x, "a")
    gathered = (
        lax.all_gather(x, ("b", "a")), lax.all_gather(x, ("a", "b"), axis=1, tiled=True),
        lax.psum_scatter(table, "b", scatter_dimension=1, tiled=True),
        lax.psum_scatter(table[:2], "a"),
        lax.all_to_all(table, "b", 1, 0, tiled=True), lax.all_to_all(table[:2], "a", 0, 2),
    )  # fmt: skip
    sent = lax.ppermute(x, "b", [(0, 2)]), lax.scan(step, x, None, length=2)
    found = here, steps, sums, gathered, sent, -lax.pmin(-x, "b"), lax.pmean(x, "b")
    return jax.tree.map(lambda x: x[None], found)


def run(x, table):
    mesh = mesh_of(a=2, b=3)
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    whole = mapped(on_device, in_specs=(ROWS, P()), out_specs=P(("b", "a")))
    checked = jax.shard_map(
        lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=P("a", "b"), out_specs=P("a")
    )
    return whole(x, table), jax.grad(lambda x: (checked(jnp.sin(x)) ** 2).sum())(x)


def test_every_collective_is_that_of_xla():
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(6, 6)).astype(np.float32), rng.normal(size=(6, 3, 2)).astype("f4")
    got, want = evaluated(run)(*arrays), quick_jit(run)(*arrays)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        limit = 1e-2 if y.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("names", "message"),
    [(("psum", "pmax"), "run different collectives: {'p"), (("psum", "psum"), None)],
)
def test_devices_that_run_different_collectives_raise(names, message):
    group = Group(2)
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(group.exchange, i, name, i) for i, name in enumerate(names)]
        if message is None:
            assert [future.result() for future in futures] == [[0, 1]] * 2
        else:
            with pytest.raises(AssertionError, match=message):
                futures[0].result()
