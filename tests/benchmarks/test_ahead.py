"""Programs lowered for GPUs that are not here: what their folder says, and what is refused."""

from __future__ import annotations

import argparse
import functools
import json
import math
import zlib
from typing import Any
from unittest import mock

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import __main__ as benchmarks
from benchmarks import ahead, exported, train
from benchmarks import export as export_benchmark
from benchmarks.ahead import Ahead, Argument, Values, Writer
from benchmarks.export import Devices
from burst_jax.command_line import Unusable
from burst_jax.models import abstract_decoder

IDS = np.arange(16, dtype=np.int32).reshape(1, 16)


def program(name, **fields):
    arguments = [
        Argument((1, 16, 4), jnp.bfloat16, P(None, "seq"), Values(high=0.5)),
        Argument((1, 16), jnp.int32, P(None, "seq"), Values("array", array=IDS)),
    ]
    return Ahead(
        "sums of 16/2", name, ahead.described_mesh("h200", (2,), ("seq",)),
        lambda x, ids: {"sum": (x.sum(), ids.sum())}, arguments, flops=64.0, **fields,
    )  # fmt: skip


@pytest.mark.cuda_compiler
def test_a_folder_has_each_program_once_and_how_to_call_it(tmp_path):
    writer = Writer(tmp_path)
    size = writer.write(program("first"))
    writer.write(program("second"))
    Writer(tmp_path).write(program("first", tokens=16))
    rows = ahead.read(tmp_path)
    assert [(row["group"], row["name"], row["tokens"]) for row in rows] == [
        ("sums of 16/2", "first", 16), ("sums of 16/2", "second", 0),
    ]  # fmt: skip
    second = rows[1]
    assert (second["devices"], second["shape"], second["axes"]) == (2, [2], ["seq"])
    assert second["arguments"][0] == [[1, 16, 4], "bfloat16", [None, "seq"], "normal", 0.0, 0.5]
    data = (tmp_path / f"{second['file']}.z").read_bytes()
    assert len(data) == size
    found = export.deserialize(bytearray(zlib.decompress(data)))
    assert (found.platforms, found.nr_devices) == (("cuda",), 2)
    assert [x.shape for x in found.in_avals] == [(1, 16, 4), (1, 16)]
    assert len(found.out_avals) == 2
    stored = np.load(tmp_path / f"{second['file']}.npz")
    np.testing.assert_array_equal(stored["1"], IDS)


def test_arguments_have_their_values_on_the_devices():
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,))
    spec, shape = P(None, "seq"), (2, 4096)

    def put(values, dtype=jnp.float32):
        x = Argument(shape, dtype, spec, values).put(mesh, 3)
        assert x.sharding == NamedSharding(mesh, spec)
        assert (x.shape, x.dtype) == (shape, dtype)
        return np.asarray(x, np.float64)

    normal = put(Values(high=0.02), jnp.bfloat16)
    assert abs(normal.mean()) < 1e-3
    assert abs(normal.std() - 0.02) < 1e-3
    uniform = put(Values("uniform", -0.1, 0.0))
    assert -0.1 <= uniform.min() < -0.099
    assert -0.001 < uniform.max() <= 0
    assert set(np.unique(put(Values("uniform", 2, 5), jnp.int32))) == {2, 3, 4}
    given = np.arange(8192, dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(put(Values("array", array=given)), given)


def test_a_call_carries_its_first_results():
    call = exported._Call(lambda x, y: (x + y, y * 2), list(map(jnp.int32, (1, 10))), 1)
    assert [call(), call()] == [[20], [20]]
    assert call._arrays == [21, 10]


def test_differences_are_relative_to_the_norm_and_of_equal_shapes():
    first = [jnp.full((2, 8), 2.0), jnp.zeros(3), jnp.ones(4, jnp.int32)]
    assert exported.differences(first, first) == [0, 0, 0]
    other = [jnp.full((2, 8), 2.5), jnp.ones(3), jnp.ones(4, jnp.int32)]
    assert exported.differences(other, first) == [0.25, math.inf, 0]
    assert exported.differences(other[:2], first) is None
    assert exported.differences([first[0].T, *first[1:]], first) is None
    nan = [first[0].at[0, 0].set(jnp.nan), *first[1:]]
    assert exported.differences(nan, first) == [math.inf, 0, 0]


@pytest.mark.parametrize(
    ("rows", "only", "message"),
    [
        (None, [""], "has no programs"),
        ([{"group": "ring", "jax": jax.__version__}], ["x"], r"--only \['x'\]: no group"),
        ([{"group": "ring", "jax": "0.1.2"}], ["rin"], "was written by JAX 0.1.2; this is JAX"),
        (
            [{"group": "ring", "jax": jax.__version__, "devices": 2}], [""],
            "needs 2 or more NVIDIA GPUs; JAX runs on 'cpu'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_timed_is_refused(tmp_path, rows, only, message):
    if rows is not None:
        (tmp_path / ahead.TABLE).write_text(json.dumps(rows))
    with pytest.raises(Unusable, match=message):
        exported.run(argparse.Namespace(folder=tmp_path, only=only, json=None))


@pytest.mark.cuda_compiler
def test_suites_are_written(tmp_path, capsys):
    with compiled.of_empty_kernels():
        benchmarks.main([
            "export", str(tmp_path), "--suites", "rings", "packed", "gdn", "--suffix", ", new",
            "--only", "8K, 32/32 heads, forward", "16 documents of 8K, 32/8 heads, forward",
        ])  # fmt: skip
    names = ["every GPU alone, new", "zigzag, new", "every GPU alone, new", "balanced, new"]
    assert [row["name"] for row in ahead.read(tmp_path)] == names
    assert capsys.readouterr().out.count("MiB") == 4


@pytest.mark.cuda_compiler
def test_a_training_step_is_written(tmp_path):
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "embed_dim": 32,
        "mlp_dim": 32,
        "vocab_size": 64,
        "head_dim": 16,
    }
    sizes |= {"num_heads": 4, "num_kv_heads": 2}
    step = export_benchmark._step(Devices("h200", 2), "7b-layers", 256, 2, **sizes)
    with compiled.of_empty_kernels():
        Writer(tmp_path).write(step)
    (row,) = ahead.read(tmp_path)
    found = export.deserialize(
        bytearray(zlib.decompress((tmp_path / f"{row['file']}.z").read_bytes()))
    )
    carried = row["carried"]
    assert 0 < carried < len(row["arguments"])
    assert [x.shape for x in found.in_avals] == [tuple(x[0]) for x in row["arguments"]]
    # The next call takes the state that this one returns; loss and norm follow.
    given, made = ([(x.shape, x.dtype) for x in of] for of in (found.in_avals, found.out_avals))
    assert given[:carried] == made[:carried]
    assert len(found.out_avals) == carried + 2
    # It stays where it was, whatever the compiler would choose.
    devices = [*step.mesh.devices.flat]
    with mock.patch.object(jax, "devices", return_value=devices):
        lowered = ahead.load(tmp_path, row).lowered
    kept = [x.sharding.spec for x in jax.tree.leaves(lowered.out_info)[:carried]]
    assert [P(*x[2]) for x in row["arguments"][:carried]] == kept
    assert P(None, None, "seq") in kept


@pytest.mark.cuda_compiler
def test_steps_of_a_group_fit_on_the_gpus_together(monkeypatch):
    """A group's programs are timed in turns, each with a state of its own."""

    @functools.cache
    def weights_of(shape):
        mesh = jax.sharding.AbstractMesh((), ())
        return sum(
            x.size for x in jax.tree.leaves(abstract_decoder(train.SHAPES[shape], mesh=mesh)[1])
        )

    def step(devices, shape, length, n, moment_dtype="float32", weights="sharded", **changes):
        assert {*changes} <= {"remat", "remat_layers"}
        size = weights_of(shape) * (4 + 2 * jnp.dtype(moment_dtype).itemsize)
        size /= 1 if weights == "replicated" else n
        return Ahead(f"step {length:,} on {n}", shape, devices.mesh((n,)), sum, [], flops=size)

    monkeypatch.setattr(export_benchmark, "_step", step)
    states: dict[str, float] = {}
    names = []
    for suite in ("steps", "8b", "experts"):
        for made in export_benchmark.SUITES[suite](Devices("h200", 2)):
            states[made.group] = states.get(made.group, 0) + made.flops / 2**30
            names.append((made.group, made.name))
    assert len({*names}) == len(names) == 18
    # Next to what a step itself needs.
    assert max(states.values()) < 60, states


def test_scalar_results_are_printed():
    """Of a decoding step none: it returns logits."""
    loss, norm, logits = jnp.float32(2.5), jnp.float32(0.1234567), jnp.zeros((2, 3))
    assert exported.numbers([loss, norm]) == "2.5 0.123457"
    assert exported.numbers([logits]) == ""
