"""Callers' mistakes: every message names the argument, its value and what to do instead."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import assert_close, make_mesh
from mistakes import GLOBAL, IMPOSSIBLE, SHARED, B, H, N, T, good, zeros

import burst_jax


def ring(data=None, **arguments):
    """ring_attention on a ring of one device, arrays closed over so that any object can be one."""
    del data
    arguments.pop("mesh")
    mesh = make_mesh(seq=1)

    def local():
        out = burst_jax.ring_attention(axis_name="seq", **arguments)
        return jax.lax.psum(out, "seq")

    return jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P())()


def test_the_arguments_are_good_otherwise():
    assert burst_jax.burst_attention(**good()).shape == (B, T, N, H)
    assert ring(**good()).shape == (B, T, N, H)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("function", [burst_jax.burst_attention, ring], ids=["burst", "ring"])
def test_shared_mistakes(function, name):
    change, message = SHARED[name]
    with pytest.raises(ValueError, match=message):
        function(**good() | change())


@pytest.mark.parametrize("name", GLOBAL)
def test_mistakes_of_mesh_and_length(name):
    change, message = GLOBAL[name]
    with pytest.raises(ValueError, match=message):
        burst_jax.burst_attention(**good() | change())


@pytest.mark.parametrize("name", IMPOSSIBLE)
@pytest.mark.parametrize("function", [burst_jax.burst_attention, ring], ids=["burst", "ring"])
def test_what_an_implementation_cannot(function, name):
    change, message = IMPOSSIBLE[name]
    with pytest.raises(NotImplementedError, match=message):
        function(**good() | change)


def test_every_table_row_changes_something_good():
    """No row raises because its table is wrong: each names an argument that exists."""
    optional = inspect.signature(burst_jax.burst_attention).parameters
    for change, message in (SHARED | GLOBAL).values():
        assert set(change()) <= set(good()) | set(optional)
        # A message that matches anything would let every row pass.
        assert not re.search(message, "")


def as_local(**arguments):
    return burst_jax.local_attention(**{n: x for n, x in arguments.items() if n != "mesh"})


@pytest.mark.parametrize(
    "function", [burst_jax.burst_attention, ring, as_local], ids=["burst", "ring", "local"]
)
def test_a_scale_that_is_an_array(function):
    def run(scale):
        return function(**good() | {"scale": scale})

    message = r"scale is .*, a JAX array: .*; pass scale=1\.0 and multiply the query by the array"
    with pytest.raises(NotImplementedError, match=message):
        run(jax.numpy.float32(0.5))
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(run)(0.5)


def test_layers_of_different_scales_in_one_scan():
    """The remedy that the message names; the scale has a gradient then."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jax.numpy.asarray(rng.normal(size=(B, T, heads, H)), "float32") for heads in (N, 2, 2)
    )

    @jax.jit
    def scanned(scales):
        def layer(_, scale):
            return None, burst_jax.local_attention(query * scale, key, value, scale=1.0)

        return jax.lax.scan(layer, None, scales)[1]

    outs = scanned(np.array([0.1, 0.7, -1.3], np.float32))
    for out, scale in zip(outs, (0.1, 0.7, -1.3), strict=True):
        assert_close(out, as_local(query=query, key=key, value=value, scale=scale))
    gradient = jax.grad(lambda scale: (scanned(scale) ** 2).sum())(np.ones(1, np.float32))
    assert np.isfinite(gradient).all()
    assert (gradient != 0).all()


# --- dtypes --------------------------------------------------------------------------------------

DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("function", [burst_jax.burst_attention, as_local], ids=["burst", "local"])
def test_query_key_and_value_have_one_dtype(function):
    """Every other triple is refused, and what is cast as the message says has the query's dtype."""
    arrays = {name: good()[name] for name in ("query", "key", "value")}
    for dtypes in itertools.product(DTYPES, repeat=3):
        named = zip(arrays.items(), dtypes, strict=True)
        cast = {name: x.astype(dtype) for (name, x), dtype in named}
        if len(set(dtypes)) == 1:
            assert function(**good() | cast).dtype == dtypes[0]
            continue
        of_all = "query has dtype {}, key {}, value {}: cast them to one dtype".format(*dtypes)
        with pytest.raises(ValueError, match=f"{of_all}, as key.astype"):
            function(**good() | cast)


def test_burst_attention_inside_shard_map():
    mesh = make_mesh(seq=4)
    run = jax.shard_map(
        lambda q: burst_jax.burst_attention(q, q, q, mesh=mesh),
        mesh=mesh,
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    with pytest.raises(ValueError, match=r"inside a shard_map over .*'seq'.*: call ring_attention"):
        run(zeros(B, T, N, H))


def test_ring_attention_outside_shard_map():
    q = zeros(B, T, N, H)
    with pytest.raises(
        ValueError, match=r"axis_name is 'seq', .*: call ring_attention inside a sh"
    ):
        burst_jax.ring_attention(q, q, q, "seq")


def test_ring_attention_over_an_axis_that_is_not_manual():
    run = jax.shard_map(
        lambda q: burst_jax.ring_attention(q, q, q, "heads"),
        mesh=make_mesh(seq=4),
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    with pytest.raises(ValueError, match=r"axis_name is 'heads', the manual mesh axes .*'seq'"):
        run(zeros(B, T, N, H))


def test_head_exchange_over_an_axis_that_is_not_manual():
    run = jax.shard_map(
        lambda q: burst_jax.ring_attention(q, q, q, "seq", ulysses_axis="heads"),
        mesh=make_mesh(seq=4),
        in_specs=P(None, "seq"),
        out_specs=P(None, "seq"),
    )
    with pytest.raises(ValueError, match=r"ulysses_axis is 'heads', the manual mesh axes"):
        run(zeros(B, T, N, H))


def test_ring_attention_names_its_own_arguments():
    q = zeros(B, T, N, H)
    with pytest.raises(
        ValueError, match=r"axis_name is None outside of a shard_map, .*: call burs"
    ):
        burst_jax.ring_attention(q, q, q, None)
    with pytest.raises(ValueError, match="ulysses_axis is 'seq', and so is axis_name"):
        burst_jax.ring_attention(q, q, q, "seq", ulysses_axis="seq")


def test_odd_zigzag_shard():
    q = zeros(B, 3, N, H)
    message = (
        "query holds 3 tokens per shard: the zigzag layout needs an even number; pad .* with pad"
    )
    with pytest.raises(ValueError, match=message):
        ring(query=q, key=q, value=q, layout="zigzag", mesh=None)


@pytest.mark.parametrize("spec", [P(), P("data", "seq"), P(None, None, "seq")], ids=str)
def test_explicit_axes_split_otherwise(spec):
    mesh = make_mesh(data=2, seq=4, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        arrays = {
            name: jax.device_put(good()[name], jax.NamedSharding(mesh, P(None, "seq")))
            for name in ("key", "value")
        }
        query = jax.device_put(zeros(B, T, 4, H), jax.NamedSharding(mesh, spec))
        message = (
            r"query is sharded as .* over Explicit mesh axes, the ring needs .*'seq'.*: set "
            r"seq_axis, batch_axis and tensor_axis .*, or reshard it: jax.reshard\(query, "
        )
        with pytest.raises(ValueError, match=message):
            burst_jax.burst_attention(query, **arrays)


def test_bias_and_mask_by_position():
    """As jax.nn.dot_product_attention(query, key, value, bias, mask) takes them."""
    arguments = good()
    arrays = [arguments.pop(name) for name in ("query", "key", "value")]
    message = (
        "takes query, key and value by position, and 2 more came: .* bias and mask, .* specify a "
        "mask by is_causal, local_window_size, query_segment_ids .* or mask_mod, a bias by "
        "alibi_slopes or score_mod, and leave them out if .* None"
    )
    call: Any = burst_jax.burst_attention  # its type says that there are three
    with pytest.raises(TypeError, match=message):
        call(*arrays, None, None, **arguments)


@pytest.mark.parametrize("function", [burst_jax.burst_attention, ring], ids=["burst", "ring"])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_bias_and_mask_by_keyword(function, name):
    message = (
        f"_attention has no argument '{name}': dense bias and mask, .* are not supported; specify "
        "a mask by is_causal, local_window_size, query_segment_ids .* or mask_mod, a bias by "
        "alibi_slopes or score_mod, and leave them out if .* None"
    )
    for value in (None, np.ones((B, N, T, T), bool)):
        with pytest.raises(TypeError, match=message):
            function(**good() | {name: value})


@pytest.mark.parametrize("function", [burst_jax.burst_attention, ring], ids=["burst", "ring"])
def test_an_unknown_keyword(function):
    message = r"_attention\(\) got an unexpected keyword argument 'is_casual'. Did you mean 'is_c"
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
