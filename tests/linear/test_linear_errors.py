"""Errors: every message names the argument, its value and the remedy."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from burst_jax import linear
from burst_jax.layouts.layout import Layout
from burst_jax.linear.runs import device_runs
from pallas_kernels import SlowerKernelsWarning
from pallas_kernels.linear import choice
from pallas_kernels.linear.backend import Inputs

B, T, K, N, H, HV = 2, 24, 2, 4, 8, 16
FUNCTION = "gated_delta_rule"


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


GOOD: dict[str, Any] = {
    "query": zeros(B, T, K, H), "key": zeros(B, T, K, H), "value": zeros(B, T, N, HV),
    "log_decay": zeros(B, T, N), "beta": zeros(B, T, N),
}  # fmt: skip
STEP: dict[str, Any] = {name: x[:, 0] for name, x in GOOD.items()} | {"state": zeros(B, N, H, HV)}
CONVOLUTION: dict[str, Any] = {"x": zeros(B, T, N), "weight": zeros(4, N)}
IDS = np.ones((B, T), np.int32)

# Changes of a call, and its message.
WRONG = [
    ({"query": zeros(B, T, H)}, "query has shape (2, 24, 8): it must be [B, T, K, H]"),
    ({"key": zeros(B, T, 1, H)},
     "key has shape (2, 24, 1, 8), query has K = 2: key must be [B, T, K, H] with the same K"),
    ({"value": zeros(B, T, 3, HV), "log_decay": zeros(B, T, 3), "beta": zeros(B, T, 3)},
     "key has 2 heads, value 3: the number of value heads must be a multiple"),
    ({"beta": zeros(B, 5, N)}, "beta has shape (2, 5, 4), query has T = 24"),
    ({"log_decay": zeros(B, T)},
     "log_decay has shape (2, 24): it must be [B, T, N] or [B, T, N, H], with no empty dimension"),
    ({"log_decay": zeros(B, T, N, HV)},
     "log_decay has shape (2, 24, 4, 16), query has H = 8: log_decay must be [B, T, N, H] with the "
     "same H"),
    ({"log_decay": zeros(B, T, K, H)}, "log_decay has shape (2, 24, 2, 8), value has N = 4"),
    ({"log_decay": zeros(B, T, N, 0)},
     "log_decay has shape (2, 24, 4, 0): it must be [B, T, N, H], with no empty dimension"),
    ({"beta": None}, "beta is a NoneType: it must be an array"),
    ({"query": [1.0]}, "query is a list: it must be an array"),
    ({"key": zeros(B, T, K, H, dtype=jnp.bfloat16)},
     "dtypes are query float32, key bfloat16, value float32: cast them to one dtype"),
    ({"beta": zeros(B, T, N, dtype=jnp.int32)}, "beta has dtype int32: cast it to one of"),
    ({"initial_state": zeros(B, N, HV, H)}, "initial_state has shape (2, 4, 16, 8), query has H"),
    ({"initial_state": zeros(B, N, H, HV, dtype=jnp.bfloat16)},
     "initial_state has dtype bfloat16: cast it to float32"),
    ({"segment_ids": IDS[:, :5]}, "segment_ids has shape (2, 5), query has T = 24"),
    ({"segment_ids": IDS.astype(np.float32)}, "segment_ids has dtype float32: convert it to int32"),
    ({"segment_ids": -IDS}, "segment_ids holds -1, and padding_id is 0: pass padding_id=-1 if"),
    ({"padding_id": 0.5}, "padding_id is 0.5: it must be an integer"),
    ({"scale": "1"}, "scale is '1': it must be a Python number"),
    ({"return_final_state": 1}, "return_final_state is 1: it must be True or False"),
    ({"implementation": "cuda"}, "implementation is 'cuda': use None or one of 'mosaic_sm90'"),
    ({"layout": "zigzig"}, "layout is 'zigzig': use one of"),
]  # fmt: skip
OF_MESH = [
    ({"seq_axis": "sequence"}, "seq_axis is 'sequence': the mesh's axes are 'data', 'seq'"),
    ({"batch_axis": "seq"}, "batch_axis is 'seq', and so is one of seq_axis"),
    ({"batch_axis": ("data", "model")}, "query has shape (2, 24, 2, 8): its B must be a"),
    ({"axis_name": "seq"}, "axis_name is 'seq' and mesh is given: pass axis_name for one"),
    ({"layout": "zigzag", **{name: x[:, :22] for name, x in GOOD.items()}},
     "the length T of value is 22: the zigzag layout over 2 shards needs a multiple of 4"),
]  # fmt: skip
IMPOSSIBLE = [
    ({"layout": "striped"},
     "layout is 'striped', in which neighboring tokens are on different devices: gated_delta_rule "
     "needs 'zigzag' or 'contiguous', in all layers of the model"),
    ({"layout": "striped:4"}, "layout is 'striped:4', in which"),
    ({"implementation": "mosaic_sm90"},
     "implementation 'mosaic_sm90' cannot run: it needs compute capability 9.0 (Hopper), the "
     "arrays are on 'cpu'; use None"),
    ({"implementation": "mosaic_sm80"},
     "implementation 'mosaic_sm80' cannot run: it needs compute capability 8.0 (Ampere) or newer"),
]  # fmt: skip


def message_of(kind, call):
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def on_mesh(**change):
    mesh = mesh_of(data=2, seq=2, model=2)
    return linear.gated_delta_rule(**GOOD | {"mesh": mesh} | change)


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(change, message):
    for call in (functools.partial(linear.gated_delta_rule, **GOOD | change),
                 functools.partial(on_mesh, **change)):  # fmt: skip
        assert message in message_of(ValueError, call)


@pytest.mark.parametrize(("change", "message"), OF_MESH, ids=[message for _, message in OF_MESH])
def test_wrong_meshes(change, message):
    assert message in message_of(ValueError, functools.partial(on_mesh, **change))


@pytest.mark.parametrize(
    ("change", "message"), IMPOSSIBLE, ids=[message for _, message in IMPOSSIBLE]
)
def test_what_is_not_implemented(change, message):
    assert message in message_of(NotImplementedError, functools.partial(on_mesh, **change))


def inside(devices, axes, **arguments):
    """Inside a shard_map over all axes of a mesh, with tokens over ``axes``."""
    spec = P(None, axes)
    names = list(GOOD)

    def run(*arrays):
        return linear.gated_delta_rule(*arrays, **arguments)

    sharded = jax.shard_map(run, mesh=devices, in_specs=(spec,) * len(names), out_specs=spec)
    # Traced: run eagerly, each operation would be a program.
    return jax.eval_shape(sharded, *GOOD.values())


def test_inside_and_outside_of_a_shard_map():
    mesh = mesh_of(seq=2)
    forgotten = message_of(ValueError, lambda: inside(mesh, "seq"))
    assert (
        "axis_name is None inside a shard_map over ('seq',): pass axis_name='seq', or" in forgotten
    )
    given = message_of(ValueError, lambda: inside(mesh, "seq", mesh=mesh))
    assert "mesh is given inside a shard_map over ('seq',): pass axis_name= there" in given
    other = message_of(ValueError, lambda: inside(mesh, "seq", axis_name="data"))
    assert "axis_name is 'data', the manual mesh axes here are ('seq',): call" in other
    outside = message_of(ValueError, lambda: linear.gated_delta_rule(**GOOD, axis_name="seq"))
    assert "call gated_delta_rule inside a shard_map over that axis, or outside of one" in outside
    odd = mesh_of(seq=8)
    uneven = message_of(ValueError, lambda: inside(odd, "seq", axis_name="seq", layout="zigzag"))
    assert "value holds 3 tokens per shard: the zigzag layout needs an even number" in uneven
    two = mesh_of(a=2, b=2)
    both = message_of(ValueError, lambda: inside(two, ("a", "b"), seq_axis=("a", "b")))
    assert "pass axis_name=('a', 'b'), or seq_axis=None if each device has whole" in both
    twice = message_of(ValueError, lambda: inside(mesh, "seq", axis_name=("seq", "seq")))
    assert "axis_name is ('seq', 'seq'): it names an axis twice" in twice
    unnamed = message_of(ValueError, lambda: inside(two, "a", layout="zigzag"))
    assert "and layout is 'zigzag': pass axis_name=, the mesh axes of the sequence, or" in unnamed
    batch = message_of(ValueError, lambda: inside(mesh, "seq", axis_name="seq", batch_axis="seq"))
    assert "batch_axis is 'seq', and mesh is None: it is an axis of mesh=" in batch
    # Whole sequences on each device.
    assert inside(mesh, None, seq_axis=None).shape == (B, T, N, HV)


def test_a_shard_map_over_other_axes():
    mesh = mesh_of(data=2, seq=2)
    spec, run = P(), functools.partial(linear.gated_delta_rule, layout="zigzag")
    partly = jax.shard_map(
        lambda *x: run(*x), mesh=mesh, in_specs=(spec,) * len(GOOD), out_specs=spec,
        axis_names={"data"},
    )  # fmt: skip
    found = message_of(ValueError, lambda: jax.jit(partly)(*GOOD.values()))
    assert "shard_map over ('data',), and seq_axis 'seq' is not manual there: make it a" in found


@dataclasses.dataclass(frozen=True, repr=False)
class Rotated(Layout):
    """Shard r holds block r + 1."""

    @property
    def name(self):
        return "rotated"

    def block_shards(self, shard_length, num_shards):
        return shard_length, (np.arange(num_shards) + 1) % num_shards


def test_a_layout_whose_runs_do_not_lead_up_or_down():
    found = message_of(NotImplementedError, lambda: device_runs(Rotated(), ("seq",), 4, FUNCTION))
    assert "layout is 'rotated': the runs of tokens that gated_delta_rule supports lead up" in found


def test_arrays_of_several_devices_need_a_mesh():
    mesh = mesh_of(seq=2)
    split = jax.device_put(GOOD["value"], jax.NamedSharding(mesh, P(None, "seq")))
    message = message_of(ValueError, lambda: linear.gated_delta_rule(**GOOD | {"value": split}))
    assert message.startswith("value is split over several devices, float32[2,24,4,16]")
    assert "pass mesh= to gated_delta_rule, with seq_axis=None if no axis" in message


def test_errors_of_the_step():
    for change, message in (
        ({"state": zeros(B, N, HV, H)}, "state has shape (2, 4, 16, 8), query has H = 8"),
        ({"state": zeros(B, N, H, HV, dtype=jnp.bfloat16)}, "state has dtype bfloat16: cast it"),
        ({"beta": zeros(B)}, "beta has shape (2,): it must be [B, N]"),
        ({"log_decay": zeros(B)}, "log_decay has shape (2,): it must be [B, N] or [B, N, H], with"),
        ({"log_decay": zeros(B, N, HV)}, "log_decay has shape (2, 4, 16), query has H = 8: log_d"),
    ):
        call = functools.partial(linear.gated_delta_rule_step, **STEP | change)
        assert message in message_of(ValueError, call)


def test_errors_of_the_convolution():
    mesh = mesh_of(seq=2)
    for kind, change, message in (
        (ValueError, {"weight": zeros(4, 5)}, "weight has shape (4, 5), x has F = 4: weight must"),
        (ValueError, {"x": zeros(B, T)}, "x has shape (2, 24): it must be [B, T, F]"),
        (ValueError, {"weight": zeros(4, N, dtype=jnp.int32)}, "weight has dtype int32: cast it"),
        (ValueError, {"segment_ids": -IDS}, "segment_ids holds -1, and padding_id is 0"),
        (ValueError, {"x": zeros(B, 23, N)}, "the length T of x is 23: the contiguous layout"),
        (NotImplementedError, {"layout": "striped"}, "short_convolution needs 'zigzag'"),
    ):
        call = functools.partial(linear.short_convolution, **CONVOLUTION | {"mesh": mesh} | change)
        assert message in message_of(kind, call)


def resolved(name, capability, dim=128, dtype=jnp.bfloat16, channels=()):
    x = jax.ShapeDtypeStruct((1, 64, 2, dim), dtype)
    decay, beta = (jax.ShapeDtypeStruct((1, 64, 2, *x), jnp.float32) for x in (channels, ()))
    inputs = Inputs(x, x, x, decay, beta)
    found = choice.resolve(name, platform="gpu", compute_capability=capability, inputs=inputs)
    return found.name


def test_implementations_of_each_gpu(monkeypatch):
    with pytest.warns(SlowerKernelsWarning, match="a GPU that this process does not have"):
        assert resolved(None, 8.0) == "xla"
    monkeypatch.setattr(utils, "_infer_arch", lambda: (8, 0))
    assert resolved(None, 8.0) == resolved(None, 10.0) == resolved("mosaic_sm80", 9.0)
    assert resolved(None, 8.0) == "mosaic_sm80"
    assert resolved(None, 9.0) == resolved("mosaic_sm90", 9.0) == "mosaic_sm90"
    assert resolved("xla", 9.0) == "xla"
    for options, reason in (
        ({"capability": 9.0, "dim": 129},
         "'mosaic_sm90': it has key head dims up to 128, query has 129 (value: any)"),
        ({"capability": 9.0, "dtype": jnp.float32},
         "'mosaic_sm90': it computes in bfloat16, query has dtype float32"),
        ({"capability": 8.0, "channels": (128,)},
         "'mosaic_sm80': it has one decay per token and value head, log_decay has shape (1, 64, 2, "
         "128), a decay per key channel"),
        ({"capability": 8.6}, "'mosaic_sm80': its scans need 166912 bytes of shared memory per"),
        ({"capability": 8.0, "dtype": jnp.float16},
         "'mosaic_sm80': it computes in bfloat16, query has dtype float16"),
    ):  # fmt: skip
        with pytest.warns(SlowerKernelsWarning, match=re.escape(reason)):
            assert resolved(None, **options) == "xla"
    with warnings.catch_warnings():  # A GPU without kernels of attention either.
        warnings.simplefilter("error")
        assert resolved(None, 7.5) == "xla"
    assert resolved(None, 9.0, dim=61) == "mosaic_sm90"
    assert resolved(None, 8.0, dim=61) == "mosaic_sm80"
    with pytest.raises(NotImplementedError, match="'mosaic_sm90' cannot run: it has key head dims"):
        resolved("mosaic_sm90", 9.0, dim=256)
    assert resolved(None, 9.0, channels=(128,)) == "mosaic_sm90"
    with pytest.raises(NotImplementedError, match="'mosaic_sm80' cannot run: it has one decay per"):
        resolved("mosaic_sm80", 9.0, channels=(128,))
