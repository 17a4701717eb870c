"""What XLA makes of two-level rings, windows, Ulysses and whole training steps."""

from __future__ import annotations

import functools

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest
from compiled_programs import KERNELS, gradient
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from routes import hops_of_passes

import burst_jax
from burst_jax.attention.arguments import AttentionOptions
from burst_jax.models import DecoderConfig
from burst_jax.models.decoder import abstract_decoder
from burst_jax.ring.rotation import ShardShape, backward_bytes, forward_bytes
from burst_jax.training import make_optimizer, make_train_step

pytestmark = pytest.mark.cuda_compiler

ROTATIONS = pytest.mark.parametrize("rotation", ["rotate_kv", "rotate_query"])


@ROTATIONS
@KERNELS
def test_two_level_ring_of_two_nodes_of_eight(gpu, kernels, rotation):
    """Every permute overlaps with a kernel, on both interconnects at once."""
    hosts, gpus, tokens, heads, kv_heads, dim = 2, 8, 1024, 8, 4, 128
    mesh = compiled.gpu_mesh(gpu, hosts, gpus)
    attention = functools.partial(
        burst_jax.burst_attention, mesh=mesh, seq_axis=("outer", "inner"), layout="zigzag",
        is_causal=True, implementation=kernels, backward=rotation,
    )  # fmt: skip
    shapes = compiled.inputs(mesh, tokens, heads, kv_heads, dim)
    program = compiled.compile_for(gradient(attention), *shapes)
    events = compiled.schedule(program)
    assert events.count(("kernel", "burst_forward")) == hosts * gpus
    assert all(compiled.overlapped(events))
    # The outer block in eighths, one during each forward kernel of the first pass; the same
    # backward, and the gradient of the first pass in sevenths.
    outer = compiled.permutes_between_hosts(program, gpus)
    assert len(outer) == gpus + gpus + (gpus - 1) + 1
    hops = hops_of_passes(*[gpus] * hosts)
    shape = ShardShape(tokens, tokens, heads, kv_heads, dim, 2)
    forward = forward_bytes(hops, shape)
    assert compiled.permuted_bytes(program) == forward + backward_bytes(rotation, hops, shape)
    # Between the hosts: a block forward, a block and two gradients backward.
    between = hops.between_passes
    assert compiled.permuted_bytes(program, between_hosts_of=gpus) == forward_bytes(
        between, shape
    ) + backward_bytes(rotation, between, shape)
    # On one level every hop would cross between some hosts: 15, 15 and 15.
    assert between.blocks + between.sums < (hops.blocks + hops.sums) / 6


def test_memory_does_not_grow_with_the_number_of_nodes():
    temp = []
    for hosts in (4, 12):  # With two, no block is sent in chunks while a gradient is.
        mesh = compiled.gpu_mesh("a100", hosts, 4)
        attention = functools.partial(
            burst_jax.burst_attention, mesh=mesh, seq_axis=("outer", "inner"), is_causal=True,
            implementation="triton",
        )  # fmt: skip
        program = compiled.compile_for(gradient(attention), *compiled.inputs(mesh, 1024, 8, 8))
        temp.append(compiled.temp_bytes(program))
    # Chunks leave gaps: for 32 more steps less than one K/V block's 4 MiB.
    assert temp[1] - temp[0] < 4 * 2**20, [f"{size / 2**20:.2f} MiB" for size in temp]


@ROTATIONS
def test_a_window_sends_only_what_it_needs(rotation):
    """Two shards back of sixteen: two hops forward, and two backward, also of the gradient."""
    mesh, (tokens, heads, kv_heads, dim) = compiled.gpu_mesh("a100", 16), (512, 4, 2, 128)
    attention = functools.partial(
        burst_jax.burst_attention, mesh=mesh, is_causal=True, local_window_size=(1024, 0),
        implementation="triton", backward=rotation,
    )  # fmt: skip
    shapes = compiled.inputs(mesh, tokens, heads, kv_heads, dim)
    program = compiled.compile_for(gradient(attention), *shapes)
    hops = hops_of_passes(3)
    assert hops[:2] == (2, 2)
    shape = ShardShape(tokens, tokens, heads, kv_heads, dim, 2)
    forward = forward_bytes(hops, shape)
    assert compiled.permuted_bytes(program) == forward + backward_bytes(rotation, hops, shape)
    events = compiled.schedule(program)
    assert events.count(("kernel", "burst_forward")) == 3
    assert all(compiled.overlapped(events))


@pytest.mark.parametrize("kv_heads", [8, 4, 2], ids=["two_each", "one_each", "shared"])
def test_ulysses_within_a_node_and_a_ring_between_nodes(kv_heads):
    """Two nodes of four: one all-to-all per array, in its dtype; nothing is gathered."""
    mesh, (tokens, heads, dim) = compiled.gpu_mesh("h100", 2, 4), (1024, 16, 128)
    attention = functools.partial(
        burst_jax.burst_attention, mesh=mesh, seq_axis="outer", ulysses_axis="inner",
        is_causal=True, layout="zigzag", implementation="mosaic_sm90", backward="rotate_kv",
    )  # fmt: skip
    shapes = compiled.inputs(mesh, tokens, heads, kv_heads, dim)
    program = compiled.compile_for(gradient(attention), *shapes)
    assert "all-gather" not in compiled.text_of(program)
    copied = max(kv_heads, 4)  # Two heads for four devices are copied, and their gradients summed.
    itemsize = 4 if copied > kv_heads else 2
    exchanged = [
        *[tokens * heads * dim * 2] * 4,  # q, out, do, dq
        *[tokens * copied * dim * 2] * 2,  # k, v
        *[tokens * copied * dim * itemsize] * 2,  # dk, dv
        tokens * heads * 4,  # delta
    ]
    assert sorted(compiled.exchanged_bytes(program)) == sorted(exchanged)
    events = compiled.schedule(program)
    assert all(compiled.overlapped(events))


@pytest.mark.parametrize(
    ("gpu", "kernels", "rotation"),
    [("a100", "mosaic_sm80", "rotate_kv"), ("h100", "mosaic_sm90", "rotate_query")],
)
def test_a_training_step_keeps_the_schedule(gpu, kernels, rotation):
    """Layers under ``lax.scan`` and ``jax.checkpoint``: in both loops every permute overlaps
    with a kernel, and the forward ring runs once."""
    n, mesh = 8, compiled.gpu_mesh(gpu, 8)
    config = DecoderConfig(
        num_layers=2, embed_dim=512, num_heads=4, num_kv_heads=2, head_dim=128, mlp_dim=1024,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    options: AttentionOptions = {
        "implementation": kernels, "layout": "zigzag", "backward": rotation
    }  # fmt: skip
    graphdef, params = abstract_decoder(config, mesh=mesh, **options)
    optimizer = make_optimizer(1e-3, 10)

    def shapes(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    params = shapes(params, P())
    state = shapes(jax.eval_shape(optimizer.transform.init, params), P())
    # Enough that every CTA of the Hopper kernels has several work tiles.
    tokens = jax.ShapeDtypeStruct((1, 16384 * n), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, 16384 * n), jnp.float32)
    batch = dict.fromkeys(("inputs", "targets", "positions"), tokens)
    batch = shapes(batch | {"weights": weights}, P(None, "seq")) | {"segment_ids": None}
    step = make_train_step(graphdef, optimizer, compiler_options=compiled.step_options())
    with compiled.mosaic_compiles_for(mesh):
        program = step.trace(params, state, batch).lower(lowering_platforms=("cuda",)).compile()
    forward, backward = compiled.loop_schedules(program)
    assert [name for kind, name in forward if kind == "kernel"] == ["burst_forward"] * n
    assert all(compiled.overlapped(forward))
    assert all(compiled.overlapped(backward))
    # The local block in two halves; no kernel runs twice for another reader of its results.
    ran = [name for kind, name in backward if kind == "kernel"]
    assert ran == ["burst_backward"] * (n + 1)
