"""What a training run is made of, given wrongly: mesh, rules, sizes, seed, optimizer, batches.

Each message names the argument, its value and the remedy. Nothing here is compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from burst_jax import ShardingRules
from burst_jax.models import Decoder, DecoderConfig
from burst_jax.training import (
    abstract_train_state,
    init_train_state,
    make_batch,
    make_eval_step,
    make_optimizer,
    make_train_step,
    place_batch,
    rows_here,
)

CONFIG = DecoderConfig(
    vocab_size=64, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16
)
# Whatever is wrong is given as Any, as a caller without a type checker gives it.
optimizer_of: Any = make_optimizer
batch_of: Any = make_batch
text: Any = "adam"
half: Any = 1.5


def state(mesh: Any, config: Any = CONFIG, optimizer: Any = None, **options: Any) -> Any:
    optimizer = make_optimizer(1e-3, 10) if optimizer is None else optimizer
    return abstract_train_state(config, optimizer, mesh, **options)


def made(mesh: Any, seed: Any) -> Any:
    return init_train_state(CONFIG, make_optimizer(1e-3, 10), mesh, seed)


MESHES = {
    "none": (lambda: state(None), "mesh is None and no mesh is set: pass mesh="),
    "text": (lambda: state("fsdp=2"), "mesh is a str: it must be a jax.sharding.Mesh"),
    "devices": (lambda: state(jax.devices()), "mesh is a list: it must be a jax.sharding.Mesh"),
    "no-devices": (
        lambda: made(mesh_of(seq=2).abstract_mesh, 0),
        "mesh is a AbstractMesh: it must be a jax.sharding.Mesh, which has devices",
    ),
    "no-seq": (
        lambda: state(mesh_of(fsdp=2)),
        "seq_axis is 'seq': the mesh's axes are 'fsdp'; name one of them, or pass seq_axis=None",
    ),
    "no-such-batch-axis": (
        lambda: state(mesh_of(seq=2), batch_axis="data"),
        "batch_axis is 'data': the mesh's axes are 'seq'; .* or pass batch_axis=None",
    ),
    "no-name": (
        lambda: state(mesh_of(seq=2), batch_axis=2),
        "batch_axis is 2: it must be a mesh axis, a tuple of them, or None",
    ),
    "rules-of-another-mesh": (
        lambda: state(mesh_of(fsdp=2), rules=ShardingRules()),
        r"ShardingRules' data is 'data': the mesh's axes are 'fsdp'; .* ShardingRules.of\(mesh\)",
    ),
    "rules-text": (lambda: state(mesh_of(fsdp=2), rules="fsdp"), "rules is a str: it must be a Sh"),
    "rules-dict": (lambda: state(mesh_of(fsdp=2), rules={}), "rules is a dict: it must be a Shar"),
    "rules-of-text": (lambda: ShardingRules.of(text), "mesh is a str: it must be a jax"),
}
WRONG: Any = {
    "axis-twice-in-one": {"data": ("a", "a")},
    "empty-name": {"fsdp": ""},
    "list": {"seq": ["a", "b"]},
    "number": {"tensor": 2},
    "empty-stage": {"stage": ""},
}
RULES = {
    name: (
        functools.partial(ShardingRules, **given),
        f"ShardingRules' {next(iter(given))} is .*: (use different|it must be a mesh axis)",
    )
    for name, given in WRONG.items()
}
SIZES = {
    f"{name}-{value}": (functools.partial(DecoderConfig, **{name: value}), f"{name} is {value!r}: ")
    for name, value in {
        "vocab_size": 0, "num_layers": True, "embed_dim": 1.5, "mlp_dim": -1, "num_kv_heads": 0,
        "dtype": "int32", "param_dtype": "float99", "remat": "all",
    }.items()
}  # fmt: skip
SIZES |= {
    "config": (lambda: state(mesh_of(seq=1), {}), "config is a dict: it must be a DecoderConfig"),
    "heads": (lambda: DecoderConfig(num_heads=4, num_kv_heads=3), "num_heads is 4, num_kv_heads 3"),
}
SEEDS = {
    "seed-negative": (lambda: made(mesh_of(seq=1), -1), "seed is -1: it must be an integer, at le"),
    "seed-float": (lambda: made(mesh_of(seq=1), 0.5), "seed is 0.5: it must be an integer"),
    "seed-none": (lambda: made(mesh_of(seq=1), None), "seed is None: it must be an integer"),
    "seed-large": (lambda: made(mesh_of(seq=1), 2**32), "seed is 4294967296: it must be below"),
}
NO_MODEL: Any = nnx.graphdef(nnx.Dict())
STEPS = {
    "optimizer-text": (
        lambda: state(mesh_of(seq=1), optimizer="adam"),
        "optimizer is 'adam': pass the result of make_optimizer, or an optax.GradientT",
    ),
    "optimizer-of-step": (
        lambda: make_train_step(NO_MODEL, text),
        "optimizer is 'adam': pass the",
    ),
    "accumulate": (
        lambda: make_train_step(NO_MODEL, make_optimizer(1e-3, 10), accumulate=half),
        "accumulate is 1.5: it must be an integer, at least 1",
    ),
    "chunk_size": (
        lambda: make_train_step(NO_MODEL, make_optimizer(1e-3, 10), chunk_size=0),
        "chunk_size is 0: it must be an integer, at least 1",
    ),
    "chunk_size-of-eval": (lambda: make_eval_step(NO_MODEL, chunk_size=0), "chunk_size is 0: it"),
    "rate-negative": (lambda: optimizer_of(-1.0, 10), "learning_rate is -1.0: it must be positive"),
    "rate-nan": (lambda: optimizer_of(float("nan"), 10), "learning_rate is nan: it must be posit"),
    "rate-infinite": (lambda: optimizer_of(float("inf"), 10), "learning_rate is inf: .* finite"),
    "rate-text": (lambda: optimizer_of("1e-3", 10), "learning_rate is '1e-3': it must be a number"),
    "steps": (lambda: optimizer_of(1e-3, 2.5), "steps is 2.5: it must be an integer, at least 1"),
    "warmup": (lambda: optimizer_of(1e-3, 9, warmup_steps=9), r"warmup_steps is 9: .* 0 \.\.\. s"),
    "decay": (lambda: optimizer_of(1e-3, 9, weight_decay=-1), "weight_decay is -1: it must be 0"),
    "final": (lambda: optimizer_of(1e-3, 9, final_fraction=-1), "final_fraction is -1: it must be"),
    "clip": (lambda: optimizer_of(1e-3, 9, clip_norm=0), "clip_norm is 0: it must be positive"),
    "b2": (lambda: optimizer_of(1e-3, 9, b2=1), "b2 is 1: it must be at least 0, and below 1"),
    "moment-dtype": (
        lambda: optimizer_of(1e-3, 9, moment_dtype="float16"),
        "moment_dtype is float16: use float32 or bfloat16",
    ),
    "moment-dtype-text": (
        lambda: optimizer_of(1e-3, 9, moment_dtype="float99"),
        "moment_dtype is 'float99': use float32 or bfloat16",
    ),
    "moments": (
        lambda: optimizer_of(1e-3, 9, moments="cpu"),
        "moments is 'cpu': use one of 'device', 'host'",
    ),
}
ROWS = np.zeros((2, 9), int)
BATCHES = {
    "floats": (lambda: batch_of(ROWS * 1.0), "rows has dtype float64: token ids are integers"),
    "one-row": (lambda: batch_of(ROWS[0]), r"rows has shape \(9,\): it needs \[B, T \+ 1\]"),
    "one-token": (lambda: batch_of(ROWS[:, :1]), r"rows has shape \(2, 1\): it needs"),
    "large": (lambda: batch_of(ROWS + 2**40), "rows holds 1099511627776: int32 cannot"),
    "negative": (lambda: batch_of(ROWS - 100), "rows holds token id -100: ids count from 0; for p"),
    "segments": (
        lambda: batch_of(ROWS, segment_ids=ROWS[:, 1:].tolist()),
        r"segment_ids has shape \(2, 8\), rows \(2, 9\): they must be equal",
    ),
    "layout": (lambda: batch_of(ROWS, layout="zig"), "layout is 'zig': use one of 'contiguous'"),
    "shards": (lambda: batch_of(ROWS, num_shards=mesh_of(seq=2)), "num_shards is Mesh.*: it must"),
}
BATCH: Any = make_batch(ROWS)
place: Any = place_batch
here: Any = rows_here
PLACES = {
    "mesh": (lambda: place(BATCH, None), "mesh is a NoneType: it must be a jax.sharding.Mesh, wh"),
    "no-devices": (
        lambda: place(BATCH, mesh_of(seq=2).abstract_mesh),
        "mesh is a AbstractMesh: it must be a jax.sharding.Mesh, which has devices",
    ),
    "no-seq": (
        lambda: place(BATCH, mesh_of(fsdp=2)),
        "seq_axis is 'seq': the mesh's axes are 'fsdp'; .* or pass seq_axis=None",
    ),
    "axis-twice": (
        lambda: place(BATCH, mesh_of(seq=2), batch_axis="seq"),
        "batch_axis is 'seq', and so is one of seq_axis: use different mesh axes",
    ),
    "list": (
        lambda: place(BATCH, mesh_of(seq=2), seq_axis=["seq"]),
        r"seq_axis is \['seq'\]: it m",
    ),
    "rows": (
        lambda: place(BATCH, mesh_of(data=4), seq_axis=None, batch_axis="data"),
        r"batch has 2 sequences: use a multiple of 4, the shards of mesh axes \('data',\)",
    ),
    "rows_here-axis": (
        lambda: here(mesh_of(seq=2), 4, batch_axis="data"),
        "batch_axis is 'data': the mesh's axes are 'seq'",
    ),
    "place_batch-rules": (
        lambda: place(BATCH, mesh_of(seq=2), rules="seq"),
        "rules is a str: it must be a ShardingRules",
    ),
    "rows_here-rules": (
        lambda: here(mesh_of(seq=2), 2, rules=mesh_of(seq=2)),
        "rules is a Mesh: it must be a ShardingRules",
    ),
    "rows_here-none": (lambda: here(mesh_of(seq=2), 0), "batch is 0: it must be an integer, at le"),
    "rows_here-text": (lambda: here(mesh_of(seq=2), "4"), "batch is '4': it must be an integer"),
}
TABLE = {
    f"{area}: {name}": case
    for area, cases in {
        "meshes": MESHES, "rules": RULES, "sizes": SIZES, "seeds": SEEDS, "steps": STEPS,
        "batches": BATCHES, "places": PLACES,
    }.items()
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), TABLE.values(), ids=TABLE)
def test_bad_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mesh_that_is_set_is_the_mesh():
    mesh = mesh_of(seq=2)
    with jax.set_mesh(mesh):
        _, params, _ = state(None)
    for weight in jax.tree.leaves(params):
        assert weight.sharding.mesh.axis_names == mesh.axis_names


TOKENS, POSITIONS = np.zeros((2, 8), np.int32), np.arange(8)
CALLS = {
    "floats": ((TOKENS * 1.0, POSITIONS), "tokens has dtype float64: token ids are integers"),
    "one-row": ((TOKENS[0], POSITIONS), r"tokens has shape \(8,\): it needs \[B, T\]"),
    "list": (([[1] * 8] * 2, POSITIONS), "tokens is a list: it must be an array"),
    "no-positions": ((TOKENS, None), "positions is a NoneType: it must be an array"),
    "positions-short": (
        (TOKENS, POSITIONS[:6]),
        r"positions has shape \(6,\), tokens \(2, 8\): it needs \[B, T\] or \[T\]",
    ),
    "positions-rows": ((TOKENS, np.zeros((3, 8), int)), r"positions has shape \(3, 8\), tokens"),
    "positions-floats": ((TOKENS, POSITIONS * 1.0), "positions has dtype float64: convert it to"),
    "segments-short": (
        (TOKENS, POSITIONS, TOKENS[:, :6]),
        r"segment_ids has shape \(2, 6\), tokens \(2, 8\): they must be equal",
    ),
}


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, rngs=nnx.Rngs(0), mesh=mesh_of(seq=2))


@pytest.mark.parametrize(("arguments", "message"), CALLS.values(), ids=CALLS)
def test_bad_arrays_of_a_decoder_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(*arguments)


def test_weights_split_over_auto_axes_need_rules(model):
    """Where it can be seen: in an eager call, and before a step or an evaluation is compiled."""
    mesh, optimizer = mesh_of(seq=2), make_optimizer(1e-3, 10)
    graphdef, params = nnx.split(model)
    kernel: Any = params["layers"]["mlp"]["up"]["kernel"]
    split = jax.NamedSharding(mesh, P(None, "seq"))
    kernel.set_value(jax.device_put(kernel.get_value(), split))
    message = (
        r"layers.mlp.up.kernel is sharded as P\(None, 'seq'.*\) over Auto mesh axes, and the decode"
        r"r has no rules: .*; pass rules=ShardingRules\(...\), or replicate the weights"
    )
    step, eval_step = make_train_step(graphdef, optimizer), make_eval_step(graphdef)
    moments = optimizer.transform.init(params)
    batch = place_batch(BATCH, mesh_of(seq=2))
    for call in (
        lambda: nnx.merge(graphdef, params)(TOKENS, POSITIONS),
        lambda: step(params, moments, batch),
        lambda: step.trace(params, moments, batch),
        lambda: eval_step(params, batch),
    ):
        with pytest.raises(ValueError, match=message):
            call()
