"""Equal calls make equal requests; per-head parameters follow their heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from meshes import make_mesh

import burst_jax
from burst_jax.attention.arguments import RingArguments
from burst_jax.attention.call import make_request
from burst_jax.ring.request import Request
from burst_jax.ring.ulysses import own_heads, to_heads
from pallas_kernels import TRITON, AttentionSpec

SIZES = {"outer": 2, "inner": 3, "heads": 4}


def parse(axes: Any = ("outer", "inner"), ulysses_axis: str | None = "heads", **options: Any):
    defaults: dict[str, Any] = {"layout": "zigzag", "is_causal": True}
    return make_request(
        RingArguments(ulysses_axis=ulysses_axis, **defaults | options),
        axis_argument="seq_axis",
        axes=axes,
        size_of=lambda argument, axis: SIZES[axis],
        head_dim=16,
    )


def test_a_request_has_everything_static():
    request = parse(local_window_size=(9, 4), implementation="triton", backward="rotate_query")
    assert request == Request(
        spec=AttentionSpec.of(scale=0.25, left=9, right=0),
        layout="zigzag",
        ring_axes=("outer", "inner"),
        ring_sizes=(2, 3),
        ulysses_axis="heads",
        ulysses_size=4,
        implementation=TRITON,
        rotation="rotate_query",
    )
    assert request.token_axes == ("outer", "inner", "heads")
    assert (request.ring_size, request.token_devices) == (6, 24)


def test_requests_without_a_ring_or_ulysses():
    ulysses, ring = parse(axes=None), parse(axes="inner", ulysses_axis=None)
    assert (ulysses.ring_axes, ulysses.ring_size, ulysses.token_devices) == ((), 1, 4)
    assert (ring.ring_axes, ring.ring_size, ring.token_devices) == (("inner",), 3, 3)
    whole = parse(axes=None, ulysses_axis=None)
    assert (whole.token_axes, whole.ring_size, whole.token_devices) == ((), 1, 1)


def test_equal_calls_make_one_request():
    """An eager call finds its compiled program by it."""
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"scale": None}, {"scale": np.float32(0.25)}),
        ({"local_window_size": 9}, {"local_window_size": (np.int32(9), 0)}),
        ({"is_causal": True}, {"is_causal": np.True_}),
        ({"axes": "inner"}, {"axes": ("inner",)}),
        ({"implementation": "triton"}, {"implementation": TRITON}),
    ]
    for one, other in pairs:
        assert parse(**one) == parse(**other)
        assert hash(parse(**one)) == hash(parse(**other))


# --- per-head parameters -------------------------------------------------------------------------


def test_flax_variables_are_per_head_parameters():
    """A model's own weights, as its module holds them; results and gradients are the array's."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 8, 4, 8)), jnp.float32)
    numbers = jnp.asarray(rng.uniform(size=(2, 4)), jnp.float32)
    mesh = make_mesh(seq=2)

    def loss(x, sinks, slopes):
        out = burst_jax.burst_attention(
            x, x, x, mesh=mesh, is_causal=True, sink_logits=sinks, alibi_slopes=slopes
        )
        return (out**2).sum()

    want, want_gradients = jax.value_and_grad(loss, (1, 2))(x, *numbers)
    weights = nnx.Dict(sinks=nnx.Param(numbers[0]), slopes=nnx.Param(numbers[1]))
    got, gradients = nnx.value_and_grad(lambda w: loss(x, w["sinks"], w["slopes"]))(weights)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for name, truth in zip(("sinks", "slopes"), want_gradients, strict=True):
        assert np.any(truth)
        np.testing.assert_allclose(gradients[name][...], truth, rtol=1e-5, atol=1e-7)


def test_per_head_parameters_follow_the_all_to_all():
    """Each device keeps the entries of its heads, and their gradient comes back to their places."""
    mesh = make_mesh(seq=2)
    x = np.random.default_rng(0).normal(size=(1, 4, 6, 3)).astype(np.float32)
    per_head = np.arange(1, 7, dtype=np.float32)

    def local(x, per_head):
        whole = to_heads(x, "seq", tokens=1, heads=2)
        return whole * own_heads(jax.lax.pcast(per_head, "seq", to="varying"), "seq")[:, None]

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(jax.P(None, "seq"), jax.P()),
        out_specs=jax.P(None, None, "seq"),
    )
    want, pull_want = jax.vjp(lambda x, per_head: x * per_head[:, None], x, per_head)
    got, pull = jax.vjp(run, x, per_head)
    np.testing.assert_array_equal(got, want)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=want.shape), jnp.float32)
    for mine, truth in zip(pull(cotangent), pull_want(cotangent), strict=True):
        np.testing.assert_allclose(mine, truth, rtol=1e-6)


@pytest.mark.parametrize("exchange", [False, True], ids=["ring", "exchange"])
def test_arrays_per_head_in_a_shard_map_without_a_jit(exchange):
    """Forward and gradients are those of the same program under jax.jit."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 8, 4, 8)).astype(np.float32)
    per_head = {
        name: rng.uniform(size=4).astype(np.float32) for name in ("sink_logits", "alibi_slopes")
    }
    axes = (None, "seq") if exchange else ("seq", None)
    split = jax.P(None, "seq")

    def local(x, per_head):
        return burst_jax.ring_attention(
            x, x, x, axes[0], ulysses_axis=axes[1], is_causal=True, **per_head
        )

    run = jax.shard_map(local, mesh=make_mesh(seq=2), in_specs=(split, jax.P()), out_specs=split)

    def loss(x, per_head):
        return (run(x, per_head) ** 2).sum()

    np.testing.assert_allclose(run(x, per_head), jax.jit(run)(x, per_head), rtol=1e-6)
    gradients = jax.grad(loss, (0, 1))
    got, want = gradients(x, per_head), jax.jit(gradients)(x, per_head)
    for mine, truth in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.any(truth)
        np.testing.assert_allclose(mine, truth, rtol=1e-4, atol=1e-6)


def test_arrays_per_head_stay_whole_without_an_exchange():
    per_head = jnp.arange(4.0)
    assert own_heads(per_head, None) is per_head


def test_gradients_per_head_do_not_depend_on_what_was_differentiated_before():
    """JAX keeps traces of a custom_vjp: one for other arguments must not answer for these."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 16, 4, 8)), jnp.float32)
    sinks, slopes = jnp.asarray(rng.uniform(size=(2, 4)), jnp.float32)
    mesh = make_mesh(seq=2)

    def loss(x, sinks, slopes):
        out = burst_jax.burst_attention(
            x, x, x, mesh=mesh, is_causal=True, sink_logits=sinks, alibi_slopes=slopes
        )
        return (out**2).sum()

    arrays = x, sinks, slopes
    want = jax.grad(loss, (0, 1, 2))(*arrays)
    assert all(np.abs(gradient).max() > 0.01 for gradient in want)
    for function in (loss, jax.checkpoint(loss), loss):
        for argnums in ((0,), (1,), (2,), (0, 1, 2)):
            got = jax.grad(function, argnums)(*arrays)
            for which, gradient in zip(argnums, got, strict=True):
                np.testing.assert_allclose(gradient, want[which], rtol=1e-4, atol=1e-6)
