"""Errors of training runs: mesh, rules, sizes, seed, optimizer, batches.

Each message names the argument, its value and the remedy. Nothing is compiled.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from meshes import mesh_of

from burst_jax import ShardingRules
from burst_jax.models import DecoderConfig
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
# Typed as Any, as for a caller without a type checker.
optimizer_of: Any = make_optimizer
batch_of: Any = make_batch
config_of: Any = DecoderConfig
rules_of: Any = ShardingRules
train_step: Any = make_train_step
NO_MODEL: Any = nnx.graphdef(nnx.Dict())
OPTIMIZER = make_optimizer(1e-3, 10)
ROWS, SEQ, FSDP, DATA = (
    np.zeros((2, 9), int),
    mesh_of(seq=2),
    mesh_of(fsdp=2),
    mesh_of(data=2, seq=4),
)
BATCH: Any = make_batch(ROWS)
RULES = ShardingRules.of(FSDP)


def state(mesh: Any, config: Any = CONFIG, optimizer: Any = OPTIMIZER, **options: Any) -> Any:
    return abstract_train_state(config, optimizer, mesh, **options)


def made(mesh: Any, seed: Any) -> Any:
    return init_train_state(CONFIG, OPTIMIZER, mesh, seed)


def place(mesh: Any, batch: Any = BATCH, **options: Any) -> Any:
    return place_batch(batch, mesh, **options)


def zeros(*shapes: tuple[int, ...]) -> Any:
    return [np.zeros(shape, np.int32) for shape in shapes]


def here(mesh: Any, batch: Any, **options: Any) -> Any:
    return rows_here(mesh, batch, **options)


# fmt: off
TABLE = [
    # Meshes and rules.
    (lambda: state(None), "mesh is None and no mesh is set: pass mesh="),
    (lambda: state("fsdp=2"), "mesh is a str: it must be a jax.sharding.Mesh"),
    (lambda: made(SEQ.abstract_mesh, 0),
     "mesh is a AbstractMesh: it must be a jax.sharding.Mesh, which has devices"),
    (lambda: state(FSDP),
     "seq_axis is 'seq': the mesh's axes are 'fsdp'; name one of them, or pass seq_axis=None "
     "if no axis shards tokens"),
    (lambda: state(SEQ, batch_axis="data"),
     "batch_axis is 'data': the mesh's axes are 'seq'; .* or pass batch_axis=None"),
    (lambda: state(SEQ, batch_axis=2),
     "batch_axis is 2: it must be a mesh axis, a tuple of them, or None"),
    (lambda: state(FSDP, rules=ShardingRules()),
     r"ShardingRules' data is 'data': the mesh's axes are 'fsdp'; .* ShardingRules.of\(mesh\)"),
    (lambda: state(FSDP, rules="fsdp"), "rules is a str: it must be a Sh"),
    (lambda: rules_of.of("adam"), "mesh is a str: it must be a jax"),
    (lambda: rules_of(data=("a", "a")), "ShardingRules' data is .*: use different"),
    (lambda: rules_of(seq=["a", "b"]), "ShardingRules' seq is .*: it must be a mesh axis"),
    (lambda: rules_of(stage=""), "ShardingRules' stage is .*: it must be a mesh axis"),
    # Sizes and seeds; tests/models/test_decoder.py has more.
    (lambda: config_of(num_layers=True), "num_layers is True: "),
    (lambda: config_of(param_dtype="float99"), "param_dtype is 'float99': "),
    (lambda: state(SEQ, {}), "config is a dict: it must be a DecoderConfig"),
    (lambda: made(SEQ, -1), "seed is -1: it must be an integer, at le"),
    (lambda: made(SEQ, 0.5), "seed is 0.5: it must be an integer"),
    (lambda: made(SEQ, 2**32), "seed is 4294967296: it must be below"),
    # Optimizers and steps.
    (lambda: state(SEQ, optimizer="adam"),
     "optimizer is 'adam': pass the result of make_optimizer, or an optax.GradientT"),
    (lambda: train_step(NO_MODEL, "adam"), "optimizer is 'adam': pass the"),
    (lambda: train_step(NO_MODEL, OPTIMIZER, accumulate=1.5),
     "accumulate is 1.5: it must be an integer, at least 1"),
    (lambda: train_step(NO_MODEL, OPTIMIZER, chunk_size=0),
     "chunk_size is 0: it must be an integer, at least 1"),
    (lambda: make_eval_step(NO_MODEL, chunk_size=0), "chunk_size is 0: it"),
    (lambda: optimizer_of(-1.0, 10), "learning_rate is -1.0: it must be positive"),
    (lambda: optimizer_of(1e300, 10), "learning_rate is 1e.300: it must be positive and finite in"),
    (lambda: optimizer_of(float("nan"), 10), "learning_rate is nan: it must be posit"),
    (lambda: optimizer_of(float("inf"), 10), "learning_rate is inf: .* finite"),
    (lambda: optimizer_of("1e-3", 10), "learning_rate is '1e-3': it must be a number"),
    (lambda: optimizer_of(1e-3, 2.5), "steps is 2.5: it must be an integer, at least 1"),
    (lambda: optimizer_of(1e-3, 9, warmup_steps=9), r"warmup_steps is 9: .* 0 \.\.\. s"),
    (lambda: optimizer_of(1e-3, 9, weight_decay=-1), "weight_decay is -1: it must be 0"),
    (lambda: optimizer_of(1e-3, 9, final_fraction=-1), "final_fraction is -1: it must be"),
    (lambda: optimizer_of(1e-3, 9, clip_norm=0), "clip_norm is 0: it must be positive"),
    (lambda: optimizer_of(1e-3, 9, b2=1), "b2 is 1: it must be at least 0, and below 1"),
    (lambda: optimizer_of(1e-3, 9, moment_dtype="float16"),
     "moment_dtype is float16: use float32 or bfloat16"),
    (lambda: optimizer_of(1e-3, 9, moment_dtype="float99"),
     "moment_dtype is 'float99': use float32 or bfloat16"),
    (lambda: optimizer_of(1e-3, 9, moments="cpu"), "moments is 'cpu': use one of 'device', 'host'"),
    # Batches.
    (lambda: batch_of(ROWS, segment_ids=np.ones((2, 9))),
     "segment_ids has dtype float64: convert it to int32"),
    (lambda: place(DATA, zeros((2, 18)), batch_axis="data"),
     r"batch has length T 18: it must be a multiple of 4, .*make_batch"),
    (lambda: place(DATA, zeros((2, 16), (2, 17)), batch_axis="data"),
     r"shapes \[\(2, 16\), \(2, 17\)\]: .* one shape \[B, T\]"),
    (lambda: place(DATA, zeros((2, 16, 3))), r"batch has arrays of shapes \[\(2, 16, 3\)\]"),
    (lambda: place(DATA, [[1, 2]]), "batch holds a leaf of int: it must hold arrays"),
    (lambda: place(DATA, np.array([["a"]])), "batch holds a leaf of <U1: it must hold arrays"),
    (lambda: place(DATA, np.array([[None]])), "batch holds a leaf of object: it must hold arrays"),
    (lambda: place(FSDP, rules=RULES, seq_axis=None),
     "seq_axis is None in addition to rules, which define it: leave it out"),
    (lambda: place(FSDP, rules=RULES, batch_axis="fsdp"), "batch_axis is 'fsdp' in addition to r"),
    (lambda: here(FSDP, 4, rules=RULES, batch_axis="fsdp"), "batch_axis is 'fsdp' in addition"),
    (lambda: batch_of(ROWS + 2**40), "rows holds 1099511627776: int32 cannot"),
    (lambda: batch_of(ROWS, num_shards=SEQ), "num_shards is Mesh.*: it must"),
    (lambda: place(None), "mesh is a NoneType: it must be a jax.sharding.Mesh, wh"),
    (lambda: place(SEQ.abstract_mesh),
     "mesh is a AbstractMesh: it must be a jax.sharding.Mesh, which has devices"),
    (lambda: place(SEQ, batch_axis="seq"),
     "batch_axis is 'seq', and so is one of seq_axis: use different mesh axes"),
    (lambda: place(SEQ, seq_axis=["seq"]), r"seq_axis is \['seq'\]: it m"),
    (lambda: place(SEQ, rules="seq"), "rules is a str: it must be a ShardingRules"),
    (lambda: here(SEQ, 4, batch_axis="data"), "batch_axis is 'data': the mesh's axes are 'seq'"),
    (lambda: here(SEQ, 2, rules=SEQ), "rules is a Mesh: it must be a ShardingRules"),
    (lambda: here(SEQ, 0), "batch is 0: it must be an integer, at le"),
    (lambda: here(SEQ, 10**20), "batch is 100000000000000000000: .* and at most 1048576"),
    (lambda: here(SEQ, "4"), "batch is '4': it must be an integer"),
]
# fmt: on


@pytest.mark.parametrize(("call", "message"), TABLE, ids=[message for _, message in TABLE])
def test_bad_inputs_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_mesh_that_is_set_is_the_mesh():
    with jax.set_mesh(SEQ):
        _, params, _ = state(None)
    for weight in jax.tree.leaves(params):
        assert weight.sharding.mesh.axis_names == SEQ.axis_names


TOKENS, POSITIONS = np.zeros((2, 8), np.int32), np.arange(8)
# fmt: off
CALLS = [
    ((TOKENS * 1.0, POSITIONS), "tokens has dtype float64: token ids are integers"),
    ((TOKENS[0], POSITIONS), r"tokens has shape \(8,\): it needs \[B, T\]"),
    (([[1] * 8] * 2, POSITIONS), "tokens is a list: it must be an array"),
    ((TOKENS, None), "positions is a NoneType: it must be an array"),
    ((TOKENS, POSITIONS[:6]),
     r"positions has shape \(6,\), tokens \(2, 8\): it needs \[B, T\] or \[T\]"),
    ((TOKENS, POSITIONS * 1.0), "positions has dtype float64: convert it to"),
    ((TOKENS, POSITIONS, TOKENS[:, :6]),
     r"segment_ids has shape \(2, 6\), tokens \(2, 8\): they must be equal"),
]
# fmt: on


def test_bad_arrays_of_a_decoder_and_weights_split_without_rules_raise():
    """Where it can be seen: in an eager call, and before a step or an evaluation is compiled."""
    graphdef, *shapes = abstract_train_state(CONFIG, OPTIMIZER, SEQ)
    zeros_on = lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)  # noqa: E731
    params, moments = jax.tree.map(zeros_on, shapes)
    model: Any = nnx.merge(graphdef, params)
    for arguments, message in CALLS:
        with pytest.raises(ValueError, match=message):
            model(*arguments)
    kernel: Any = params["layers"]["mlp"]["up"]["kernel"]
    split = jax.NamedSharding(SEQ, P(None, "seq"))
    kernel.set_value(jax.device_put(kernel.get_value(), split))
    message = (
        r"layers.mlp.up.kernel is sharded as P\(None, 'seq'.*\) over Auto mesh axes, and the decode"
        r"r has no rules: .*; pass rules=ShardingRules\(...\), or replicate the weights"
    )
    step, eval_step = make_train_step(graphdef, OPTIMIZER), make_eval_step(graphdef)
    batch = place_batch(BATCH, SEQ)
    for call in (
        lambda: nnx.merge(graphdef, params)(TOKENS, POSITIONS),
        lambda: step(params, moments, batch),
        lambda: step.trace(params, moments, batch),
        lambda: eval_step(params, batch),
    ):
        with pytest.raises(ValueError, match=message):
            call()
