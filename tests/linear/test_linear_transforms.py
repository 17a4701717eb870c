"""The gated delta rule under JAX's transformations, and its single step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jaxprs
import linear_calls as calls
import linear_cases
import numpy as np
import pytest
from implementations import quick_jit
from meshes import mesh_of

from burst_jax import linear

N_DEVICES, LAYOUT = 2, "contiguous"


@functools.cache
def case(batch=2, channels=False):
    rng = np.random.default_rng(0)
    return linear_cases.draw(rng, 100, batch=batch, head_dim=8, documents=3, channels=channels)


@functools.cache
def truth():
    return linear_cases.truth(case())


def assert_right(got):
    for name, want in truth().items():
        assert linear_cases.error(got[name], want) < 2e-6, name


@pytest.mark.parametrize(
    ("check_vma", "channels"), [(True, False), pytest.param(False, True, marks=pytest.mark.slow)]
)
def test_inside_a_shard_map(check_vma, channels):
    """States are replicated: their gradients are those of the whole sequence."""
    call = calls.in_shard_map(3, "zigzag", check_vma=check_vma)
    longer = linear_cases.draw(
        np.random.default_rng(1), 102, batch=2, head_dim=8, value_dim=4, documents=3,
        channels=channels,
    )  # fmt: skip
    got = calls.results(call, longer, 3, "zigzag")
    for name, want in linear_cases.truth(longer).items():
        assert linear_cases.error(got[name], want) < 2e-6, name


def test_without_mesh_it_is_one_device():
    call = functools.partial(calls._call)
    assert_right(calls.results(call, case(), 1, LAYOUT))


def test_vmap():
    """Of sequences without a batch dimension."""
    run = calls.on_mesh(N_DEVICES, LAYOUT)

    def one(*arrays):
        results = run(*(x[None] for x in arrays))
        return tuple(x[0] for x in results)

    assert_right(calls.results(jax.vmap(one), case(), N_DEVICES, LAYOUT))


def test_scan_over_layers_that_are_recomputed():
    """Twice the same layer, with named results saved; gradients as without."""
    mesh = mesh_of(seq=N_DEVICES)
    c = case()
    q, k, v, log_decay, beta = c[:5]
    policy = jax.checkpoint_policies.save_only_these_names(*linear.CHECKPOINT_NAMES)

    def layer(x, _):
        return linear.gated_delta_rule(q, k, x, log_decay, beta, mesh=mesh), None

    def plain(x):
        return layer(layer(x, None)[0], None)[0]

    def scanned(x):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, None, length=2)[0]

    def both(run):
        def of(x, do):
            o, vjp = jax.vjp(run, x)
            return o, *vjp(do)

        return quick_jit(of)(v, c.do)

    for got, want in zip(both(scanned), both(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_named_results_save_the_scan_and_the_exchange():
    """Recomputed with both names saved, the forward pass gathers no maps again."""
    mesh = mesh_of(seq=3)
    arrays = [jnp.asarray(x[:, :99]) for x in case()[:5]]

    def gathers(policy):
        def loss(*arrays):
            def run(*x):
                return linear.gated_delta_rule(*x, mesh=mesh)

            return (jax.checkpoint(run, policy=policy)(*arrays) ** 2).sum()

        program = jax.make_jaxpr(jax.value_and_grad(loss, argnums=2))(*arrays)
        return jaxprs.count(program.jaxpr, "all_gather")

    names = jax.checkpoint_policies.save_only_these_names(*linear.CHECKPOINT_NAMES)
    saved, recomputed = gathers(names), gathers(jax.checkpoint_policies.nothing_saveable)
    # One array forward, M and U backward; and forward again.
    assert (saved, recomputed) == (3, 4)


@pytest.mark.slow
def test_x64():
    with jax.enable_x64(True):
        got = calls.results(calls.on_mesh(N_DEVICES, LAYOUT), case(), N_DEVICES, LAYOUT)
        assert got["o"].dtype == got["last"].dtype == np.float32
        ids = jnp.asarray(np.asarray(case().ids, np.int64))
        o, _ = calls.on_mesh(N_DEVICES, LAYOUT)(*map(jnp.asarray, case()[:6]), ids)
        np.testing.assert_allclose(o, got["o"], rtol=0, atol=1e-6)
    assert_right(got)


@pytest.mark.parametrize("channels", [False, True])
def test_single_steps_are_the_rule(channels):
    """Token by token, continuing a state, against float64."""
    c = case(channels=channels)._replace(ids=None)
    want = linear_cases.truth(c)
    state, outputs = jnp.asarray(c.start), []
    step = quick_jit(linear.gated_delta_rule_step)
    for t in range(20):
        o, state = step(*(jnp.asarray(x[:, t]) for x in c[:5]), state=state)
        outputs.append(o)
    assert linear_cases.error(jnp.stack(outputs, 1), want["o"][:, :20]) < 1e-6
    arrays = [jnp.asarray(x[:, :20]) for x in c[:5]]
    _, last = linear.gated_delta_rule(
        *arrays, initial_state=jnp.asarray(c.start), return_final_state=True
    )
    np.testing.assert_allclose(state, last, rtol=0, atol=1e-5)
    arrays = [jnp.asarray(x[:, 20], jnp.bfloat16) for x in c[:3]]
    arrays += [jnp.asarray(x[:, 20]) for x in c[3:5]]
    o, after = linear.gated_delta_rule_step(*arrays, state=state, scale=0.5)
    assert o.dtype == jnp.bfloat16
    assert after.dtype == jnp.float32
