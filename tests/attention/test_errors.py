"""Errors: every message names the argument, its value and the remedy."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, make_mesh, mesh_of
from mistakes import ARRAY_SCALE, GLOBAL, IMPOSSIBLE, SHARED, B, H, N, T, good, zeros

import burst_jax
from burst_jax import local_attention


def ring(**arguments):
    """ring_attention on a ring of one device, arrays closed over so that any object can be one."""
    arguments.pop("mesh")
    mesh = make_mesh(seq=1)

    def local():
        out = burst_jax.ring_attention(axis_name="seq", **arguments)
        return jax.lax.psum(out, "seq")

    return jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P())()


def as_local(**arguments):
    return local_attention(**{name: x for name, x in arguments.items() if name != "mesh"})


FUNCTIONS = {"burst": burst_jax.burst_attention, "ring": ring, "local": as_local}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_all_functions_raise_the_same_errors(function):
    # The arguments are good otherwise.
    assert jax.eval_shape(lambda: function(**good())).shape == (B, T, N, H)
    for kind, rows in ((ValueError, SHARED), (NotImplementedError, IMPOSSIBLE)):
        for change, message in rows:
            call = good() | change
            if function is as_local and {"layout", "backward"} & change.keys():
                with pytest.raises(TypeError, match="unexpected keyword argument"):
                    function(**call)
                continue
            with pytest.raises(kind, match=message):
                function(**call)
    with pytest.raises(NotImplementedError, match=ARRAY_SCALE):
        jax.jit(lambda scale: function(**good() | {"scale": scale}))(0.5)


@pytest.mark.parametrize(("change", "message"), GLOBAL, ids=[message for _, message in GLOBAL])
def test_errors_of_mesh_and_length(change, message):
    with pytest.raises(ValueError, match=message):
        burst_jax.burst_attention(**good() | change)


# --- remedies that messages name -----------------------------------------------------------------


def test_layers_of_different_scales_in_one_scan():
    """The query is multiplied by the scale, which has a gradient then."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(B, T, heads, H)), "float32") for heads in (N, 2, 2)
    )

    attend = functools.partial(local_attention, implementation="reference")

    @jax.jit
    def scanned(scales):
        def layer(_, scale):
            return None, attend(query * scale, key, value, scale=1.0)

        return jax.lax.scan(layer, None, scales)[1]

    outs, gradient = jax.vjp(scanned, np.array([0.1, -1.3], np.float32))
    for out, scale in zip(outs, (0.1, -1.3), strict=True):
        assert_close(out, attend(query, key, value, scale=scale))
    assert np.isfinite(gradient(outs)[0]).all()
    assert (gradient(outs)[0] != 0).all()


def test_positions_of_every_sequence_by_a_map():
    """Keys at other positions in each sequence: one sequence at a time."""
    query, key, value = (jax.random.normal(jax.random.key(i), (B, T, N, H)) for i in range(3))
    places, slopes = jnp.array([np.arange(T), np.arange(T)[::-1]]), jnp.ones(N)
    options: Any = {"is_causal": True, "query_offset": T - 1, "alibi_slopes": slopes}
    options |= {"implementation": "reference"}

    def of_one(sequence, attend=local_attention, **mesh):
        *arrays, at = (x[None] for x in sequence)
        return attend(*arrays, key_value_positions=at[0], **options, **mesh)[0]

    got = jax.lax.map(of_one, (query, key, value, places))
    flipped = [x.at[1].set(x[1, ::-1]) for x in (key, value)]
    assert_close(got, local_attention(query, *flipped, **options))
    mesh = {"attend": burst_jax.burst_attention, "mesh": mesh_of(data=2, seq=2)}
    by_mesh = functools.partial(jax.lax.map, functools.partial(of_one, **mesh))
    assert jax.eval_shape(by_mesh, (query, key, value, places)).shape == got.shape


# --- where a function is called ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["query_offset", "query_positions", "key_value_positions"])
def test_layers_do_not_accept_positions(name):
    with pytest.raises(ValueError, match=f"BurstAttention does not accept {name}: queries and k"):
        burst_jax.BurstAttention(16, 2, rngs=None, **{name: 3})  # pyrefly: ignore


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"seq"}, r"\('seq',\): call ring_attention there, .* outside of it(?!,)"),
        ({"data"}, r"\('data',\): .* \('seq',\) too, .* outside of it, with \('data',\) as batch_"),
        ({"data", "seq"}, r"\('data', 'seq'\): call .* outside of it, with \('data',\) as batch_"),
    ],
    ids=["seq", "data", "both"],
)
def test_burst_attention_inside_shard_map(axes, message):
    mesh, spec = mesh_of(data=2, seq=4), P(*(x if x in axes else None for x in ("data", "seq")))
    run = jax.shard_map(
        lambda q: burst_jax.burst_attention(q, q, q, mesh=mesh),
        mesh=mesh, axis_names=axes, in_specs=spec, out_specs=spec,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"is called inside a shard_map over " + message):
        jax.eval_shape(run, zeros(B, T, N, H))


IN_SHARD_MAP: list[tuple[bool | str, str | None, dict[str, Any], str]] = [
    (False, "seq", {}, r"axis_name is 'seq', .*: call ring_attention inside a sh"),
    (False, None, {}, r"axis_name is None outside of a shard_map, .*: call burs"),
    (False, "seq", {"ulysses_axis": "seq"}, "ulysses_axis is 'seq', and so is axis_name"),
    ("vmap", "seq", {}, r"axis_name is 'seq', .* \(an axis of jax.vmap is not one\), or burst_at"),
    (True, "heads", {}, r"axis_name is 'heads', the manual mesh axes .*'seq'"),
    (True, "seq", {"ulysses_axis": "heads"}, r"ulysses_axis is 'heads', the manual mesh axes"),
    (True, "seq", {"layout": "zigzag"},
     "query holds 3 tokens per shard: the zigzag layout needs an even number; pad .* with pad"),
]  # fmt: skip


@pytest.mark.parametrize(("inside", "axis", "options", "message"), IN_SHARD_MAP)
def test_ring_attention_names_its_own_arguments(inside, axis, options, message):
    def run(q):
        return burst_jax.ring_attention(q, q, q, axis, **options)

    if inside == "vmap":
        run = jax.vmap(lambda q: burst_jax.ring_attention(q, q, q, axis), axis_name=axis)
        run = functools.partial(lambda run, q: run(q[None]), run)
    elif inside:
        spec = P(None, "seq")
        run = jax.shard_map(run, mesh=make_mesh(seq=4), in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match=message):
        run(zeros(B, 12, N, H))


@pytest.mark.parametrize(
    ("sizes", "spec", "message"),
    [
        (
            {"data": 2, "seq": 4},
            P("data", "seq"),
            r"call needs .*: pass batch_axis='data' \(layers",
        ),
        ({"data": 2, "seq": 4}, P(None, None, None, "seq"), r"call needs .*'seq'.*\): reshard it"),
        ({"a": 2, "b": 4}, P("a"), r"mesh of {'a': 2, 'b': 4}, the call's mesh has {'data': 2, '"),
    ],
    ids=["batch", "head-dim", "mesh"],
)
def test_explicit_axes_split_otherwise(sizes, spec, message):
    mesh, own = (mesh_of(AxisType.Explicit, **each) for each in ({"data": 2, "seq": 4}, sizes))
    query = jax.device_put(good()["query"], jax.NamedSharding(own, spec))
    with pytest.raises(ValueError, match=r"query is sharded as .*" + message):
        burst_jax.burst_attention(query, query, query, mesh=mesh)


NO_DENSE_MASK = (
    "bias and mask, .* specify a mask by is_causal, local_window_size, segment_ids, .* or "
    "mask_mod, a bias by alibi_slopes or score_mod, and leave them out if .* None"
)


def test_dense_masks_and_unknown_keywords():
    """By position, as jax.nn.dot_product_attention(query, key, value, bias, mask) takes them."""
    arguments = good()
    arrays = [arguments.pop(name) for name in ("query", "key", "value")]
    for function, options in ((burst_jax.burst_attention, arguments), (local_attention, {})):
        positional: Any = function  # Its type says that there are three.
        message = f"takes query, key and value by position, and 2 more came: .* {NO_DENSE_MASK}"
        with pytest.raises(TypeError, match=message):
            positional(*arrays, None, None, **options)
    for function in FUNCTIONS.values():
        for name, value in itertools.product(("mask", "bias"), (None, np.ones((B, N, T, T), bool))):
            message = f"_attention has no argument '{name}': dense {NO_DENSE_MASK}"
            with pytest.raises(TypeError, match=message):
                function(**good() | {name: value})
        message = r"got an unexpected keyword argument 'is_casual'. Did you mean 'is_causal'\?"
        with pytest.raises(TypeError, match=message):
            function(**good() | {"is_casual": True})
        with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'zzz'(?!\. Did)"):
            function(**good() | {"zzz": True})


@pytest.mark.parametrize("context", [False, True], ids=["mesh", "set_mesh"])
def test_arrays_on_other_devices_than_the_mesh(context):
    mesh, arguments = make_mesh(seq=4), good()
    arguments["key"] = jax.device_put(arguments["key"], jax.devices()[5])
    message = (
        r"key is on device 5, the mesh on devices 0, 1, 2, 3: put it onto the mesh, "
        r"jax.device_put\(key, jax.NamedSharding\(mesh, jax.P\(...\)\)\)"
    )
    with (
        jax.set_mesh(mesh) if context else contextlib.nullcontext(),
        pytest.raises(ValueError, match=message),
    ):
        burst_jax.burst_attention(**arguments | {"mesh": None if context else mesh})
