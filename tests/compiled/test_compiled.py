"""What XLA makes of the ring on 8 x A100 and 8 x H100, read from the compiled programs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import compiled_programs as compiled
import functions
import jax
import jax.numpy as jnp
import pytest
from compiled_programs import KERNELS, KERNELS_AND_ROTATIONS, gradient
from jax.sharding import PartitionSpec as P
from routes import hops_of_passes

import burst_jax
from burst_jax.ring.rotation import ShardShape, backward_bytes, choose_rotation, forward_bytes
from pallas_kernels import AttentionInputs, AttentionSpec, KVSide, QuerySide, resolve, triton
from pallas_kernels.pallas_triton.configs import SHARED_MEMORY, TritonConfig, triton_configs

pytestmark = pytest.mark.cuda_compiler

GPUS = ("a100", "h100")


def attend(mesh, **options):
    options = {"is_causal": True, "layout": "zigzag", **options}
    return functools.partial(burst_jax.burst_attention, mesh=mesh, **options)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@KERNELS
def test_every_forward_permute_overlaps_with_a_kernel(gpu, kernels, packed):
    mesh = compiled.gpu_mesh(gpu, 8)
    shapes = compiled.inputs(mesh, 2048, 16, 4)
    if packed:
        ids = compiled.segment_ids(mesh, 2048)

        def run(query, key, value, ids):
            segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
            return attend(mesh, implementation=kernels, **segments)(query, key, value)

        program = compiled.compile_for(run, *shapes, ids)
    else:
        program = compiled.compile_for(attend(mesh, implementation=kernels), *shapes)
    events = compiled.schedule(program)
    assert [kind for kind, _ in events].count("start") == 7
    assert not [event for event in events if event[0] == "sync"]
    assert events.count(("kernel", "burst_forward")) == 8
    assert compiled.overlapped(events) == [["burst_forward"]] * 7
    assert compiled.step_names(program, "custom-call") == [
        f"ring_forward_step_{step}/jit(forward)/burst_forward" for step in range(8)
    ]
    assert compiled.step_names(program, "collective-permute-start") == [
        f"ring_forward_step_{step}" for step in range(7)
    ]


def wires(rotation, n, tokens, heads, kv_heads, dim, value_dim=None):
    """Bytes that a device sends forward and backward, by the formulas."""
    # (n-1) c K (H + Hv) s forward; (n-1) c K (H + Hv) (s + t) to rotate K and V backward;
    # (n-1) c N (H + Hv) s + 2(n-1) c N 4 + (n-1) c N H t to rotate the queries.
    hops, c, k, h, s, t = n - 1, tokens, kv_heads, dim, 2, 4
    both = h + (h if value_dim is None else value_dim)
    forward = hops * c * k * both * s
    backward = {
        "rotate_kv": hops * c * k * both * s + hops * c * k * both * t,
        "rotate_query": hops * c * heads * (both * s + 2 * 4) + hops * c * heads * h * t,
    }[rotation]
    # The library's own arithmetic, which `auto` decides by, says the same.
    shape = ShardShape(c, c, heads, k, h, s, value_dim=value_dim)
    assert forward_bytes(hops_of_passes(n), shape) == forward
    assert backward_bytes(rotation, hops_of_passes(n), shape) == backward
    return forward, backward


def assert_sends(program, wire):
    """``wire`` bytes per device, by permutes alone."""
    assert compiled.permuted_bytes(program) == wire
    for other in ("all-gather", "all-to-all", "all-reduce"):
        assert other not in compiled.text_of(program)


def gradient_events(gpu, kernels, rotation, packed):
    """Read from the program of the gradient: the forward's seven hops, then the backward's."""
    n, tokens, heads = 8, 2048, 8
    mesh = compiled.gpu_mesh(gpu, n)
    shapes = compiled.inputs(mesh, tokens, heads, heads)
    ids = (compiled.segment_ids(mesh, 2048),) if packed else ()

    def run(query, key, value, *ids):
        options = {"implementation": kernels, "backward": rotation}
        if ids:
            options |= {"query_segment_ids": ids[0], "key_value_segment_ids": ids[0]}
        return gradient(attend(mesh, **options))(query, key, value)

    program = compiled.compile_for(run, *shapes, *ids)
    if not packed:
        assert_sends(program, sum(wires(rotation, n, tokens, heads, heads, 128)))
    return compiled.schedule(program)


@pytest.mark.parametrize("rotation", ["rotate_kv", "rotate_query"])
@pytest.mark.parametrize(
    ("gpu", "packed"),
    [("a100", False), ("a100", True), ("h100", False)],
    ids=["a100-plain", "a100-packed", "h100-plain"],
)
def test_every_backward_permute_overlaps_with_a_kernel(gpu, rotation, packed):
    """With two kernels, for dQ and for dK and dV, each overlaps with one permute."""
    n, events = 8, gradient_events(gpu, "triton", rotation, packed)
    stationary, rotating = ("burst_dq", "burst_dkv")[:: 1 if rotation == "rotate_kv" else -1]
    kernels = [name for kind, name in events if kind == "kernel"]
    assert kernels[:n] == ["burst_forward"] * n
    assert sorted(kernels[n : n + 2]) == sorted([stationary, rotating])
    assert len(kernels) == n + 2 * (n + 1)  # The local block in two halves.
    assert kernels[n + 4 : -2] == [stationary, rotating] * (n - 2)
    for pair in (
        kernels[n + 2 : n + 4],
        kernels[-2:],
    ):  # No gradient was received: in any order.
        assert sorted(pair) == sorted([stationary, rotating])
    # 7 hops of K, V forward. Then the block is sent during the rotating side's kernel (in the first
    # two steps, which wait for no gradient, during both), the gradient during the other kernel, and
    # at last during both.
    overlapped = compiled.overlapped(events)
    assert overlapped[:7] == [["burst_forward"]] * 7
    for both in (overlapped[7], overlapped[8], overlapped[-1]):
        assert sorted(both) == sorted([stationary, rotating])
    assert overlapped[9:-1] == [*[[stationary], [rotating]] * 5, [stationary]]
    assert not [event for event in events if event[0] == "sync"]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("rotation", ["rotate_kv", "rotate_query"])
@KERNELS
def test_fused_backward_permutes_overlap_with_its_one_kernel(gpu, kernels, rotation, packed):
    """The block is sent to the next step, the previous step's gradient to the one after.

    In the first two steps the block is sent alone, in the last two the gradient.
    """
    n, events = 8, gradient_events(gpu, kernels, rotation, packed)
    kernels = [name for kind, name in events if kind == "kernel"]
    assert kernels == ["burst_forward"] * n + ["burst_backward"] * (n + 1)
    hops = 2 * (n - 1)
    assert compiled.overlapped(events) == [["burst_forward"]] * 7 + [["burst_backward"]] * hops
    assert not [event for event in events if event[0] == "sync"]


@KERNELS_AND_ROTATIONS
def test_bytes_of_grouped_heads_are_the_formulas(gpu, kernels, rotation):
    """With values of half the keys' head dim, on four devices.

    The tests above read those of as many key heads as query heads, of one head dim, on eight.
    """
    mesh, shape = compiled.gpu_mesh(gpu, 4), (1024, 8, 2, 128)
    attention = attend(mesh, implementation=kernels, backward=rotation)
    forward, backward = wires(rotation, mesh.size, *shape, value_dim=64)
    arrays = compiled.inputs(mesh, *shape, value_dim=64)
    assert_sends(compiled.compile_for(gradient(attention), *arrays), forward + backward)
    if rotation == "rotate_kv":  # The forward is the same in either rotation.
        assert_sends(compiled.compile_for(attention, *arrays), forward)


@KERNELS_AND_ROTATIONS
def test_of_two_devices_the_local_gradient_is_not_sent(gpu, kernels, rotation):
    """One hop of a block forward, one backward, and one of its gradient."""
    mesh, (tokens, heads, kv_heads, dim) = compiled.gpu_mesh(gpu, 2), (512, 4, 2, 128)
    attention = attend(mesh, implementation=kernels, backward=rotation)
    shapes = compiled.inputs(mesh, tokens, heads, kv_heads, dim)
    program = compiled.compile_for(gradient(attention), *shapes)
    kv, q = 2 * tokens * kv_heads * dim, tokens * heads * dim
    backward = {"rotate_kv": kv * (2 + 4), "rotate_query": q * (2 * 2 + 4) + 2 * tokens * heads * 4}
    assert compiled.permuted_bytes(program) == 2 * kv + backward[rotation]
    shape = ShardShape(tokens, tokens, heads, kv_heads, dim, 2)
    assert backward_bytes(rotation, hops_of_passes(2), shape) == backward[rotation]
    assert all(compiled.overlapped(compiled.schedule(program)))


@pytest.mark.parametrize("heads", [(8, 8), (8, 4)], ids=["gqa1", "gqa2"])  # where it changes
def test_auto_sends_the_fewest_bytes(heads):
    """By the formulas that the test above reads in both rotations' programs."""
    mesh, hops = compiled.gpu_mesh("a100", 4), hops_of_passes(4)
    program = compiled.compile_for(gradient(attend(mesh)), *compiled.inputs(mesh, 256, *heads))
    shape = ShardShape(256, 256, *heads, head_dim=128, itemsize=2)
    backward = {
        rotation: backward_bytes(rotation, hops, shape)
        for rotation in ("rotate_kv", "rotate_query")
    }
    forward = forward_bytes(hops, shape)
    assert compiled.permuted_bytes(program) == forward + min(backward.values())
    assert backward["rotate_kv"] != backward["rotate_query"]
    chosen = choose_rotation("auto", shape, kv_hops=hops, query_hops=hops)
    assert chosen == ("rotate_query" if heads[0] == heads[1] else "rotate_kv")


@KERNELS_AND_ROTATIONS
def test_memory_per_device_does_not_grow_with_the_ring(gpu, kernels, rotation):
    temp = {}
    for n in (4, 12, 16):
        mesh = compiled.gpu_mesh(gpu, n)
        attention = gradient(attend(mesh, implementation=kernels, backward=rotation))
        program = compiled.compile_for(attention, *compiled.inputs(mesh, 1024, 8, 8))
        temp[n] = compiled.temp_bytes(program) / 2**20
    # One K/V block is 4 MiB here, its gradient 8; tile tables are a few KiB a step. How arrays of
    # many sizes fit together varies by as much at first.
    assert temp[16] - temp[12] < 0.25, temp
    assert temp[12] - temp[4] < 8.25, temp


def test_remat_policy_holds_no_second_forward_ring():
    n, heads, kv_heads = 4, 8, 2
    mesh = compiled.gpu_mesh("a100", n)
    shapes = compiled.inputs(mesh, 512, heads, kv_heads)
    names = jax.checkpoint_policies.save_only_these_names(*burst_jax.CHECKPOINT_NAMES)

    def wire(**remat):
        # Something before the attention, so that its inputs too are recomputed.
        def layer(query, key, value):
            return attend(mesh)(jnp.sin(query), jnp.sin(key), jnp.sin(value))

        layer = jax.checkpoint(layer, **remat)
        return compiled.permuted_bytes(compiled.compile_for(gradient(layer), *shapes))

    forward, backward = wires("rotate_kv", n, 512, heads, kv_heads, 128)
    assert wire(policy=names) == forward + backward
    nothing = jax.checkpoint_policies.nothing_saveable
    assert wire(policy=nothing) == forward + backward + forward  # what the policy saves


@pytest.mark.parametrize(
    ("lengths", "dtype", "head_dim", "value_dim"),
    [
        *itertools.product(["ragged"], ["bfloat16"], [40, 64, 96, 128], [None]),
        *itertools.product(["ragged"], ["float32"], [64, 128], [None]),
        *itertools.product(["whole", "alone"], ["bfloat16"], [64, 128], [None]),
        *itertools.product(["ragged"], ["bfloat16", "float32"], [256], [None]),
        # In bfloat16's tiles, with two other instructions.
        ("ragged", "float16", 128, None),
        # Multi-head latent attention, as DeepSeek's models have it.
        *itertools.product(["ragged", "whole"], ["bfloat16"], [192], [128]),
    ],
)
@pytest.mark.parametrize("gpu", GPUS)
def test_triton_tiles_fit_without_register_spills(gpu, lengths, dtype, head_dim, value_dim):
    """The ring's program, where o is carried and gradients are added to; or one device's."""
    devices = 1 if lengths == "alone" else 2
    mesh, tokens = compiled.gpu_mesh(gpu, devices), 1000 if lengths == "ragged" else 1024
    arrays = compiled.inputs(mesh, tokens, 4, 2, head_dim, jnp.dtype(dtype), value_dim=value_dim)
    ids = compiled.segment_ids(mesh, tokens)

    def run(query, key, value, ids):
        # Documents and a soft cap have other tiles than plain masks over whole tiles.
        of_general = {
            "logits_soft_cap": 20.0,
            "query_segment_ids": ids,
            "key_value_segment_ids": ids,
        }
        attention = attend(
            mesh,
            implementation="triton",
            local_window_size=300,
            **(of_general if lengths == "ragged" else {}),
        )
        return gradient(attention)(query, key, value)

    # At head dim 256 a program's sums fill the registers, and what is added in place at the end
    # spills. Smaller tiles without spills are slower.
    refuse = {"xla_gpu_fail_ptx_compilation_on_register_spilling": head_dim < 256}
    events = compiled.schedule(compiled.compile_for(run, *arrays, ids, **refuse))
    # The local block's work is split, unless there is no ring.
    backward = devices + 1 if devices > 1 else 1
    for kernel, count in (("forward", devices), ("dq", backward), ("dkv", backward)):
        assert events.count(("kernel", f"burst_{kernel}")) == count


def feature_of(name, mesh, tokens):
    """``(arrays, options)`` of a feature: what it reads, and the call's arguments made of that."""
    ids = compiled.segment_ids(mesh, tokens)
    masks = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype

    def whole(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P()))

    def table(blocks):
        return {"block_mask": whole(4, blocks, blocks, dtype=jnp.bool)}, {}

    mods = {"score_mod": functions.score_mod, "mask_mod": functions.mask_mod}
    return {
        "dropout": ({"dropout_key": whole(dtype=key)}, {"dropout_rate": 0.1}),
        "parameters": (dict.fromkeys(("sink_logits", "alibi_slopes"), whole(4)), {}),
        "functions": ({}, mods),
        "functions_and_masks": (masks, {"local_window_size": 300, **mods}),
        "bounds": (masks | {"key_starts": ids, "key_ends": ids}, {"local_window_size": 300}),
        # Blocks that are parts of tiles, and blocks of whole tiles.
        "small_blocks": table(2 * tokens // 32),
        "large_blocks": table(2 * tokens // 512),
        "ragged_blocks": table(2 * tokens // 16),
    }[name]


@pytest.mark.parametrize(
    ("feature", "tokens", "head_dim", "value_dim"),
    [
        *(("dropout", 1024, dim, dim) for dim in (64, 128)),
        *(("parameters", 1024, *dims) for dims in ((64, 64), (128, 128), (192, 128))),
        ("functions_and_masks", 1000, 64, 64),
        ("functions", 1024, 128, 128),
        ("bounds", 1000, 64, 64),
        ("bounds", 1024, 128, 128),
        ("ragged_blocks", 1024 + 32, 64, 64),
        ("small_blocks", 1024, 128, 128),
        ("large_blocks", 1024, 128, 128),
    ],
)
@pytest.mark.parametrize("gpu", GPUS)
def test_features_spill_no_registers(gpu, feature, tokens, head_dim, value_dim):
    """Triton's kernels in a ring, with the gradients of per-head parameters."""
    mesh = compiled.gpu_mesh(gpu, 2)
    arrays = compiled.inputs(mesh, tokens, 4, 2, head_dim, value_dim=value_dim)
    read, options = feature_of(feature, mesh, tokens)

    def run(query, key, value, read):
        parameters = read if feature == "parameters" else {}

        def attention(query, key, value, parameters):
            given = {**options, **read, **parameters}
            return attend(mesh, implementation="triton", **given)(query, key, value)

        out, vjp = jax.vjp(attention, query, key, value, parameters)
        return vjp(out)

    refuse = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    events = compiled.schedule(compiled.compile_for(run, *arrays, read, **refuse))
    assert events.count(("kernel", "burst_dq")) == 3


@compiled.KERNELS
def test_gradients_of_sinks_and_slopes_vary_as_the_arrays_do(gpu, kernels):
    """Mosaic's results carry no marks of the mesh axes over which they vary; shard_map checks."""
    mesh = compiled.gpu_mesh(gpu, 2)
    arrays = compiled.inputs(mesh, 256, 4, 2)
    numbers = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P()))

    def loss(query, key, value, sinks, slopes):
        numbers = {"sink_logits": sinks, "alibi_slopes": slopes}
        out = attend(mesh, implementation=kernels, **numbers)(query, key, value)
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (3, 4))).trace(*arrays, numbers, numbers)
    assert [x.shape for x in jax.tree.leaves(traced.out_info)] == [(4,), (4,)]


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_shipped_tiles_fit_the_shared_memory_of_every_gpu_they_are_for(capability, dtype):
    itemsize = jnp.dtype(dtype).itemsize
    pairs = [*((dim, dim) for dim in (32, 64, 96, 128, 256)), (192, 128), (64, 256)]
    for (head_dim, value_dim), packed in itertools.product(pairs, (False, True)):
        spec = AttentionSpec.of(1.0)
        configs = triton_configs(
            capability, head_dim, dtype, 4096, 4096, spec, packed, value_dim=value_dim
        )
        for kernel, config in configs._asdict().items():
            size = config.shared_memory(kernel, head_dim, itemsize, value_dim) + 2048
            assert size <= SHARED_MEMORY[capability], (kernel, head_dim, value_dim, config)


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
@pytest.mark.parametrize("stages", [2, 3])
def test_computed_shared_memory_is_what_xla_says(kernel, stages):
    """Asked of a GPU with none to spare: the error says what the kernel needs."""
    mesh, dim = compiled.gpu_mesh("h100", 1), 128
    config = TritonConfig(128, 128, 8, 2 + stages)
    arrays = compiled.inputs(mesh, 1024, 2, 2, dim)
    local = triton(config=config)
    spec, positions = AttentionSpec.of(0.1, right=0), jnp.arange(1024, dtype=jnp.int32)
    stats = jnp.zeros((2, 1, 2, 1024), jnp.float32)

    def run(q, k, v):
        query = QuerySide(q, positions, do=q, stats=stats)
        inputs = AttentionInputs(query, KVSide(k, v, positions))
        if kernel == "forward":
            return local.forward(inputs, local.forward_bounds(inputs, spec=spec), spec=spec)[0]
        half = {"dq": local.backward_dq, "dkv": local.backward_dkv}[kernel]
        assert half is not None
        return half(inputs, local.backward_bounds(inputs, spec=spec), spec=spec)[0]

    run = jax.shard_map(run, mesh=mesh, in_specs=(P(),) * 3, out_specs=P(), check_vma=False)
    with pytest.raises(Exception, match="Shared memory size limit exceeded") as caught:
        compiled.compile_for(run, *arrays)
    requested = int(compiled.find(r"requested (\d+)", str(caught.value)).group(1))
    computed = config.shared_memory(kernel, dim, 2)
    assert computed <= requested <= computed + 8 * 1024


def test_spilling_tiles_are_refused():
    """The guard of the test above: tiles that are too large for the registers do not pass."""
    mesh = compiled.gpu_mesh("a100", 1)
    arrays = compiled.inputs(mesh, 512, 2, 2, 128)
    config = TritonConfig(block_q=128, block_kv=128, num_warps=4, num_stages=2)

    def local(query, key, value):
        positions = jnp.arange(512, dtype=jnp.int32)
        bounds = jnp.zeros((1, 4, 4), jnp.int32)
        spec = AttentionSpec.of(0.1, right=0)
        inputs = AttentionInputs(QuerySide(query, positions), KVSide(key, value, positions))
        return triton(config=config).forward(inputs, bounds, spec=spec)

    specs = (jax.P(None, "seq"),) * 3
    outs = (jax.P(None, "seq"), jax.P(None, None, "seq"))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=outs)
    compiled.compile_for(run, *arrays)
    with pytest.raises(Exception, match="register spilling"):
        compiled.compile_for(run, *arrays, xla_gpu_fail_ptx_compilation_on_register_spilling=True)


@pytest.mark.parametrize(("gpu", "capability"), [("a100", 8.0), ("h100", 9.0), ("h200", 9.0)])
def test_the_gpu_is_known_before_tracing(gpu, capability):
    """Without this the choice of kernels would fall to what the compiling machine has."""
    mesh, seen = compiled.gpu_mesh(gpu, 1), []

    def local(x):
        from burst_jax.parallel.target import compute_capability, current_platform

        seen.append((current_platform(), compute_capability()))
        return x

    spec = jax.P("seq")
    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)).trace(
        jax.ShapeDtypeStruct((8,), jnp.float32)
    )
    assert seen[0] == ("gpu", capability)
    query: Any = jax.ShapeDtypeStruct((1, 8, 1, 16), jnp.bfloat16)
    inputs = AttentionInputs(QuerySide(query), KVSide(query, query))
    where = {"platform": "gpu", "compute_capability": capability, "inputs": inputs}
    hopper = "mosaic_sm90" if jax.__version_info__ < (0, 12) else "triton"
    # Mosaic GPU itself does not know which GPU is meant.
    assert resolve(None, **where).name == (hopper if capability == 9.0 else "triton")
    with compiled.mosaic_compiles_for(mesh):
        chosen = resolve(None, **where).name
        assert chosen == (hopper if capability == 9.0 else "mosaic_sm80")
