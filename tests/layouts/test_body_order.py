"""Calls in the body of ``in_layout`` whose tokens are in another order than it made."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh_of

from burst_jax import burst_attention, in_layout, local_attention, positions, ring_attention
from burst_jax.linear import gated_delta_rule, short_convolution

T = 32
X = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
RING = "zigzag over 8 shards, and this call has zigzag over 4 (the size of {} 'seq'): pass "
RING += "num_shards=4 to in_layout"


def attend(x, other=None, *, of=burst_attention, **options):
    other = x if other is None else other
    given: Any = {"is_causal": True, "layout": "zigzag"} | options
    return of(x, other, other, **given)


def in_shard_map(mesh, **options):
    """Attention on one device's arrays."""
    ring = functools.partial(attend, of=ring_attention, axis_name="seq", **options)
    spec = jax.P(None, "seq")
    return jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec)


def traced(attention, num_shards, layout="zigzag", x=X):
    """Traces ``attention`` in a body; nothing runs."""
    body = in_layout(lambda x, at, ids: attention(x), layout, num_shards)
    return jax.eval_shape(body, x)


def rule(x, **options):
    gates = jnp.zeros(x.shape[:3], jnp.float32)
    return gated_delta_rule(x, x, x, gates, gates, layout="zigzag", **options)


def in_scan(attention):
    return lambda x: jax.lax.scan(lambda x, _: (attention(x), None), x, None, length=2)[0]


def forms(mesh):
    """Programs around attention on a ring of 4, by name, with the argument that names its axis."""
    whole = functools.partial(attend, mesh=mesh)
    axes = {"spmd_axis_name": "data"}
    return {
        "global": (whole, "seq_axis"),
        "jit": (jax.jit(whole), "seq_axis"),
        "scan": (in_scan(whole), "seq_axis"),
        "remat": (jax.checkpoint(whole), "seq_axis"),
        "vmap": (lambda x: jax.vmap(lambda x: whole(x[None])[0], **axes)(x), "seq_axis"),
        "shard_map": (in_shard_map(mesh), "axis_name"),
        "rule": (functools.partial(rule, mesh=mesh), "seq_axis"),
        "convolution": (
            lambda x: short_convolution(
                x[..., 0], jnp.ones((4, 2), jnp.float32), layout="zigzag", mesh=mesh
            ),
            "seq_axis",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("form", forms(None))
def test_another_number_of_shards_than_the_ring_raises(form):
    with jax.set_mesh(mesh_of(data=1, seq=4)):
        attention, argument = forms(jax.sharding.get_abstract_mesh())[form]
        # Cached by JAX where it is jitted: a body traces it again.
        jax.eval_shape(attention, X)
        with pytest.raises(ValueError, match=re.escape(RING.format(argument))):
            traced(attention, 8)
        traced(attention, 4)
        jax.eval_shape(attention, X)


def test_what_a_call_has_to_change():
    mesh = mesh_of(seq=2, heads=2)
    whole = functools.partial(attend, mesh=mesh)
    for attention, layout, shards, message in (
        (functools.partial(whole, layout="contiguous"), "zigzag", 2,
         "has contiguous over 2 (the size of seq_axis 'seq'): pass layout='zigzag' to the call"),
        (functools.partial(whole, layout="striped"), "zigzag", 4,
         "pass layout='zigzag' to the call and num_shards=2 to in_layout"),
        # The layout's number of shards leaves out the Ulysses axis.
        (functools.partial(whole, ulysses_axis="heads"), "zigzag", 4, "over 2 (the size of seq_ax"),
        (functools.partial(whole, seq_axis=("seq", "heads")), "zigzag", 2,
         "over 4 (the size of seq_axis ('seq', 'heads')): pass num_shards=4 to in_layout"),
        (lambda x: local_attention(x, x, x, is_causal=True), "striped", 2,
         "has contiguous over 1 (it has no ring): pass num_shards=1 to in_layout"),
        (rule, "zigzag", 2, "has zigzag over 1 (it has no ring): pass num_shards=1 to in_layout"),
        (lambda x: whole(x[:, ::2], x), "zigzag", 4, "zigzag over 4 shards, and this call has"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            traced(attention, shards, layout)


def test_what_is_not_wrong_does_not_raise():
    mesh = mesh_of(seq=2, heads=2)
    whole = functools.partial(attend, mesh=mesh)
    at = jnp.asarray(positions("zigzag", T, 4))
    explicit = {"query_positions": at, "key_value_positions": at}
    memory = jnp.ones((1, 2 * T, 2, 8), jnp.float32)
    natural = in_layout(lambda x, at, ids: whole(x, layout="contiguous"), "contiguous", 2)
    for attention, layout, shards in (
        (functools.partial(whole, ulysses_axis="heads"), "zigzag", 2),
        (functools.partial(whole, layout="contiguous"), "contiguous", 8),
        (functools.partial(whole, layout="contiguous"), "zigzag", 1),
        (lambda x: local_attention(x, x, x, is_causal=True, **explicit), "zigzag", 4),
        # Without masks that read positions any order is right.
        (functools.partial(whole, layout="contiguous", is_causal=False), "zigzag", 2),
        # Other tokens.
        (lambda x: x + jnp.mean(whole(memory, layout="contiguous")), "zigzag", 2),
        (
            lambda x: whole(x, memory, key_value_positions=jnp.arange(2 * T, dtype=jnp.int32)),
            "zigzag", 2,
        ),
        # Of keys alone the positions are read, and these are other tokens.
        (
            lambda x: attend(
                x, memory, mesh=mesh, layout="contiguous", is_causal=False,
                key_value_seq_lengths=jnp.array([5]),
            ),
            "zigzag", 2,
        ),
        # Stripes of whole shards are the natural order.
        (functools.partial(whole, layout="contiguous"), f"striped:{T // 2}", 2),
        # A part with an order of its own.
        (natural, "zigzag", 2),
    ):  # fmt: skip
        traced(attention, shards, layout)
    # The order ends with the body, also if it raises.
    with pytest.raises(ZeroDivisionError):
        traced(lambda x: 1 / 0, 8)
    jax.eval_shape(whole, X)


def test_positions_and_ids_must_be_integers():
    x = np.ones((2, 12, 3), np.float32)
    call = in_layout(lambda x, at, ids: x, "zigzag", 3)
    with pytest.raises(ValueError, match="positions has dtype float32: it must be an array of int"):
        call(x, np.ones((2, 12), np.float32))
    with pytest.raises(ValueError, match="segment_ids has dtype bool: it must be an array of int"):
        call(x, segment_ids=np.ones((2, 12), bool))
