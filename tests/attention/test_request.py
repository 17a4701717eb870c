"""Equal calls make equal requests; per-head parameters follow their heads."""

from __future__ import annotations

import fractions
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from meshes import make_mesh

import burst_jax
from burst_jax.attention.arguments import RingArguments
from burst_jax.attention.call import make_request
from burst_jax.layouts import Zigzag
from burst_jax.ring.request import Request
from burst_jax.ring.ulysses import own_heads, to_heads
from pallas_kernels import MOSAIC_SM80, AttentionSpec

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
    request = parse(local_window_size=(9, 4), implementation="mosaic_sm80", backward="rotate_query")
    assert request == Request(
        spec=AttentionSpec.of(scale=0.25, left=9, right=0),
        layout=Zigzag(),
        ring_axes=("outer", "inner"),
        ring_sizes=(2, 3),
        ulysses_axis="heads",
        ulysses_size=4,
        implementation=MOSAIC_SM80,
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
        ({"scale": 0.5}, {"scale": fractions.Fraction(1, 2)}),
        ({"logits_soft_cap": 2.0}, {"logits_soft_cap": np.int64(2)}),
        ({"layout": "zigzag"}, {"layout": np.str_("zigzag")}),
        ({"local_window_size": 9}, {"local_window_size": (np.int32(9), 0)}),
        ({"is_causal": True}, {"is_causal": np.True_}),
        ({"axes": "inner"}, {"axes": ("inner",)}),
        ({"implementation": "mosaic_sm80"}, {"implementation": MOSAIC_SM80}),
    ]
    for one, other in pairs:
        assert parse(**one) == parse(**other)
        assert hash(parse(**one)) == hash(parse(**other))


# --- per-head parameters -------------------------------------------------------------------------


def test_gradients_of_per_head_parameters_as_arrays_and_flax_variables():
    """JAX keeps traces of a custom_vjp: one for other arguments must not answer for these."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 8, 4, 8)), jnp.float32)
    sinks, slopes = jnp.asarray(rng.uniform(size=(2, 4)), jnp.float32)

    def loss(x, sinks, slopes):
        out = burst_jax.local_attention(
            x, x, x, is_causal=True, sink_logits=sinks, alibi_slopes=slopes,
            implementation="reference",
        )  # fmt: skip
        return (out**2).sum()

    arrays = x, sinks, slopes
    want = jax.grad(loss, (0, 1, 2))(*arrays)
    assert all(np.abs(gradient).max() > 0.01 for gradient in want)
    for function, which in ((loss, 0), (loss, 1), (jax.checkpoint(loss), 2), (loss, 2)):
        np.testing.assert_allclose(jax.grad(function, which)(*arrays), want[which], 1e-4, 1e-6)
    weights = nnx.Dict(sinks=nnx.Param(sinks), slopes=nnx.Param(slopes))
    got = nnx.grad(lambda w: loss(x, w["sinks"], w["slopes"]))(weights)
    for name, truth in zip(("sinks", "slopes"), want[1:], strict=True):
        np.testing.assert_allclose(got[name][...], truth, rtol=1e-4, atol=1e-6)


def test_per_head_parameters_follow_the_all_to_all():
    """Each device keeps the entries of its heads, and their gradient comes back to their places."""
    mesh = make_mesh(seq=2)
    x = np.random.default_rng(0).normal(size=(1, 4, 6, 3)).astype(np.float32)
    per_head = jnp.arange(1.0, 7.0)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)
    assert own_heads(per_head, None) is per_head

    def local(x, per_head):
        whole = to_heads(x, "seq", tokens=1, heads=2)
        return whole * own_heads(jax.lax.pcast(per_head, "seq", to="varying"), "seq")[:, None]

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(jax.P(None, "seq"), jax.P()), out_specs=jax.P(None, None, "seq")
    )

    @jax.jit
    def results(x, per_head):
        out, pull = jax.vjp(run, x, per_head)
        return out, *pull(cotangent)

    of_x, of_head = (cotangent * per_head[:, None], (cotangent * x).sum((0, 1, 3)))
    for got, want in zip(results(x, per_head), (x * per_head[:, None], of_x, of_head), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_arrays_per_head_in_a_shard_map_without_a_jit():
    """The same as under jax.jit; with an all-to-all, which JAX 0.11.2 runs eagerly, too."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 8, 4, 8)).astype(np.float32)
    per_head = {
        name: rng.uniform(size=4).astype(np.float32) for name in ("sink_logits", "alibi_slopes")
    }
    split = jax.P(None, "seq")

    def local(x, per_head):
        return burst_jax.ring_attention(
            x, x, x, None, ulysses_axis="seq", is_causal=True, implementation="reference",
            **per_head,
        )  # fmt: skip

    run = jax.shard_map(local, mesh=make_mesh(seq=2), in_specs=(split, jax.P()), out_specs=split)
    np.testing.assert_allclose(run(x, per_head), jax.jit(run)(x, per_head), rtol=1e-6)
