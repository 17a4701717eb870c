"""What XLA makes of training steps with sharded weights: what is sent, when, and the memory."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax import ShardingRules
from burst_jax.models import (
    DecoderConfig,
    DeltaNet,
    Experts,
    KimiDelta,
    LayerKind,
    MixtureOfExperts,
)
from burst_jax.models.remat import Remat
from burst_jax.plan.device_sizes import device_sizes
from burst_jax.plan.step_memory import step_memory
from burst_jax.plan.training_strategy import TrainingStrategy
from burst_jax.training import (
    abstract_train_state,
    chunked_cross_entropy,
    make_optimizer,
    make_train_step,
)

pytestmark = pytest.mark.cuda_compiler

CONFIG = DecoderConfig(
    vocab_size=512, num_layers=3, embed_dim=512, num_heads=4, num_kv_heads=2, head_dim=128,
    mlp_dim=1024, dtype=jnp.bfloat16,
)  # fmt: skip
N, TOKENS = 4, 4096


def compile_step(config, tokens=TOKENS, implementation=compiled.SMALL, gpu="a100", **sizes):
    """A step of ``tokens`` tokens a GPU, and the shapes of weights and optimizer state.

    ``sizes``: of the mesh's axes, which are named as the fields of ``ShardingRules`` are, or
    ``heads``, the Ulysses axis.
    """
    mesh = compiled.named_mesh(gpu, **sizes)
    names = [field.name for field in dataclasses.fields(ShardingRules)]
    rules = ShardingRules(**{name: name if name in sizes else None for name in names})
    options: dict[str, Any] = {"ulysses_axis": "heads"} if "heads" in sizes else {}
    optimizer = make_optimizer(1e-3, 10)
    graphdef, params, state = abstract_train_state(
        config, optimizer, mesh, layout="zigzag", implementation=implementation, rules=rules,
        **options,
    )  # fmt: skip
    tokens_per_row = tokens * sizes["seq"] * sizes.get("heads", 1)
    shape = sizes.get("data", 1) * sizes.get("fsdp", 1), tokens_per_row
    sharding = NamedSharding(mesh, P(rules.batch_axes or None, ("seq", *options.values())))
    names = dict.fromkeys(("inputs", "targets", "positions"), jnp.int32) | {"weights": jnp.float32}
    batch: Any = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in names.items()
    }
    step = make_train_step(graphdef, optimizer, compiler_options=compiled.step_options())
    with compiled.mosaic_compiles_for(mesh), compiled.of_empty_kernels():
        traced = step.trace(params, state, batch | {"segment_ids": None})
        return traced.lower(lowering_platforms=("cuda",)).compile(), params, state


def parts_of(tree):
    """The shapes of a device's parts, layers counted one by one."""
    return [
        x.sharding.shard_shape(x.shape)[("layers" in jax.tree_util.keystr(path)) :]
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


# Wide enough that a layer's products and kernels take longer than its weights travel.
WIDE = dataclasses.replace(
    CONFIG, num_layers=2, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336,
    remat="offload",
)  # fmt: skip


def assert_sends_what_is_offloaded_during_kernels(program, config, tokens):
    """To the host."""
    memory: Any = program.memory_analysis()
    # The layer's input, out and lse.
    lanes = config.embed_dim + config.num_heads * config.head_dim
    per_token = 2 * lanes + 4 * config.num_heads
    assert memory.host_temp_size_in_bytes == config.num_layers * tokens * per_token
    copies = compiled.host_copies(program)
    (forward,) = (found for found in copies if any("update" in name for name, _ in found))
    assert len(forward) == 3
    # A layer's input leaves while its ring runs, out and lse during the matrix products after it.
    assert all(works for _, works in forward)
    assert any("burst_forward" in work for _, works in forward for work in works)


@pytest.mark.parametrize(
    ("sizes", "config", "tokens"),
    [({"fsdp": 2, "seq": 2, "tensor": 2}, CONFIG, TOKENS), ({"seq": 2}, WIDE, 32768)],
    ids=["fsdp2-seq2-tensor2", "seq2-wide"],
)
def test_a_step_with_sharded_weights(sizes, config, tokens):
    """Weights are sent by permutes, activations on the ring alone.

    In one process the copy engines move weights: a permute for each distance of two devices. Layers
    are under ``lax.scan`` and ``jax.checkpoint``: in both loops every block's permute overlaps with
    a kernel or a matrix product, and the forward ring runs once.
    """
    program, params, state = compile_step(config, tokens, **sizes)
    assert not compiled.moves(program, "all-gather")
    assert "reduce-scatter" not in compiled.text_of(program)
    elements = {math.prod(shape) for shape in parts_of(params)}
    kv_heads = config.num_kv_heads // sizes.get("tensor", 1)
    block = tokens * kv_heads * config.head_dim
    assert block not in elements
    distances = sizes.get("fsdp", 1) * sizes["seq"] - 1
    loops = []
    for sent in compiled.moves(program, "collective-permute").values():
        of_weights = []
        for shapes, during in sent:
            sizes_sent = {math.prod(shape) for shape in shapes}
            # K and V, or their gradients, wait for no weights.
            assert sizes_sent == {block} or sizes_sent <= elements
            assert during or block not in sizes_sent
            if sizes_sent != {block}:
                of_weights.append((len(shapes), during))
        if len(of_weights) < len(sent):  # Blocks are sent in the layers' loops.
            loops.append(of_weights)
    forward, backward = sorted(loops, key=lambda loop: sum(count for count, _ in loop))
    # A layer's seven matrices travel together. So do, in the backward pass, those of the layer
    # before and the gradients of the feed-forward, and the gradients of attention at the end.
    assert [count for count, _ in forward] == [7] * distances
    assert sorted(count for count, _ in backward) == [4] * distances + [10] * distances
    if config is WIDE:
        assert all(during for _, during in forward)
        assert all(during for count, during in backward if count == 10)
        assert_sends_what_is_offloaded_during_kernels(program, config, tokens)
    ran = [
        [name for kind, name in events if kind == "kernel"]
        for events in compiled.loop_schedules(program)
    ]
    # The local block in two halves; no kernel runs twice for another reader of its results.
    assert ran[0] == ["burst_forward"] * sizes["seq"]
    assert ran[1] == ["burst_backward"] * (sizes["seq"] + 1)
    memory: Any = program.memory_analysis()
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((params, state))
    )
    assert held <= memory.argument_size_in_bytes <= held + 4 * 4 * tokens + 2**16
    made = compiled.arrays_in_order(program)
    # No stack of what layers keep, of their weights or gradients is copied into another order.
    shards = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(params["layers"])]
    stacks = {("f32", size) for size in map(math.prod, shards) if size > 2**16}
    stacks.add(("bf16", config.num_layers * tokens * config.num_heads * config.head_dim))
    moved = {tuple(array) for name, op, *array in made if "transpose" in name or op == "copy"}
    assert not stacks & moved
    # Nor is one filled before it is overwritten.
    assert not stacks & {tuple(array) for name, _, *array in made if "broadcast" in name}
    # The head's gradient is summed, into this device's part, before the layers' backward pass.
    head: Any = params["head"]["kernel"]
    part = "f32", math.prod(head.sharding.shard_shape(head.shape))
    loop = max(i for i, (_, op, *_) in enumerate(made) if op == "while")
    came = ("collective-permute", "collective-permute-done")
    assert sum(op in came and tuple(array) == part for _, op, *array in made[:loop]) == distances


def planned_bytes(config, params, strategy, length, kernels="fused"):
    """The temporary memory of a step, according to the planner."""
    of_device = device_sizes(config, params, strategy, length=length, batch=1)
    memory = step_memory(of_device, strategy, "rotate_kv", kernels=kernels, moment_size=4)
    return memory.activations + memory.gradients + memory.work


@pytest.mark.slow
def test_gathered_experts_are_sent_ahead():
    """A layer's experts travel during the layer before; no array has all experts for all tokens."""
    experts = Experts(32, 4)
    config = dataclasses.replace(
        CONFIG, num_layers=2, mlp_dim=256, feed_forward=MixtureOfExperts, experts=experts
    )
    program, params, _ = compile_step(config, seq=N)
    strategy = TrainingStrategy("sharded", 1, (N,), 1, "zigzag", config.remat)
    planned = planned_bytes(config, params, strategy, N * TOKENS)
    assert compiled.temp_bytes(program) == pytest.approx(planned, rel=0.1)
    gate = experts.count, config.embed_dim // N, config.mlp_dim
    loops = compiled.moves(program, "collective-permute").values()

    def experts_in_loop(kernel: str) -> list[list[str]]:
        """What overlaps with each transfer of experts, in the loop with the kernel."""
        found = [
            [during for shapes, during in sent if gate in shapes]
            for sent in loops
            if any(kernel in during for _, during in sent)
        ]
        (layer,) = filter(None, found)
        return layer

    # One permute for each distance.
    forward = experts_in_loop("burst_forward")
    assert len(forward) == N - 1
    assert all(forward)
    # Gradients are sent with the weights of the layer before.
    backward = experts_in_loop("burst_backward")
    assert len(backward) == N - 1
    assert all("burst_backward" in during for during in backward)
    most = max(
        math.prod(map(int, filter(None, shape.split(","))))
        for operations in compiled.computations(program).values()
        for operation in operations
        for shape in re.findall(r"\b[a-z]+\d*\[([\d,]*)\]", operation.result)
    )
    rows = TOKENS * experts.per_token * config.embed_dim
    assert most == rows < TOKENS * experts.count * config.mlp_dim


@pytest.mark.parametrize(
    ("changes", "tokens", "seq", "ulysses", "accuracy"),
    [
        # Between the memory of all layers as "attention" and of all as "selective".
        ({"num_layers": 4, "remat": "selective", "remat_layers": 2}, 4 * TOKENS, 1, 1, 0.1),
        # Norms of the residual stream, of what is added to it, of queries and of keys; and the
        # output gate, without which it would be 7 % less.
        ({"num_layers": 2, "remat": "none", "attention_gate": True}, 2 * TOKENS, 2, 2, 0.05),
    ],
    ids=["two-of-four-selective", "none-ring-ulysses"],
)
def test_a_step_takes_the_memory_that_the_planner_says(changes, tokens, seq, ulysses, accuracy):
    config = dataclasses.replace(CONFIG, post_norms=True, **changes)
    assert config.qk_norm
    heads = {"heads": ulysses} if ulysses > 1 else {}
    program, params, _ = compile_step(config, tokens, seq=seq, **heads)

    def planned(remat: Remat, count: int | None) -> int:
        strategy = TrainingStrategy(
            "sharded", 1, (seq,), 1, "zigzag", remat, remat_layers=count, ulysses=ulysses
        )
        return planned_bytes(config, params, strategy, seq * ulysses * tokens)

    found = compiled.temp_bytes(program)
    assert found == pytest.approx(planned(config.remat, config.remat_layers), rel=accuracy)
    if config.remat == "selective":
        assert planned("attention", None) < 0.9 * found
        assert planned("selective", None) > 1.1 * found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delta_net", "hybrid", "remat"),
    [
        pytest.param(DeltaNet(4, 2, 128, 128), True, "attention", id="hybrid"),
        pytest.param(DeltaNet(4, 2, 128, 128), False, "none", id="pure-none"),
        pytest.param(KimiDelta(4, 4, 128, 128), False, "full", id="kimi-full"),
    ],
)
def test_a_step_with_linear_attention_takes_the_memory_that_the_planner_says(
    delta_net, hybrid, remat
):
    linear, seq, tokens = LayerKind(mixer="delta_net"), 2, 4 * TOKENS
    changes: dict[str, Any] = {"remat": remat, "delta_net": delta_net}
    if hybrid:
        pattern = linear, linear, linear, LayerKind()
        config = dataclasses.replace(CONFIG, num_layers=4, layer_pattern=pattern, **changes)
    else:
        config = DecoderConfig(
            vocab_size=512, num_layers=2, embed_dim=512, mlp_dim=1024, dtype=jnp.bfloat16, **changes
        )
    # Kernels of decays per channel are Hopper's.
    hopper = isinstance(delta_net, KimiDelta)
    gpu, name = ("h100", "mosaic_sm90") if hopper else ("a100", "mosaic_sm80")
    program, params, _ = compile_step(config, tokens, name, gpu, seq=seq)
    strategy = TrainingStrategy("sharded", 1, (seq,), 1, "zigzag", config.remat)
    kernels = "fused" if hopper else "reordered"
    planned = planned_bytes(config, params, strategy, seq * tokens, kernels)
    assert compiled.temp_bytes(program) == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize(
    ("kernel_dtype", "triton"),
    [(jnp.float32, True), (jnp.bfloat16, False)],
    ids=["float32-triton", "bfloat16-cublas"],
)
def test_the_loss_takes_three_products_and_the_memory_of_a_chunk(kernel_dtype, triton):
    """XLA picks one of the two kinds of products on the GPU, by timing them."""
    tokens, features, vocab, chunk = 16384, 768, 32768, 4096
    mesh = compiled.gpu_mesh("h100", 1)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def run(hidden, kernel, targets, weights):
        def loss(hidden, kernel):
            return chunked_cross_entropy(
                hidden, kernel, targets, weights, mesh=mesh, chunk_size=chunk
            )[0]

        return jax.value_and_grad(loss, (0, 1))(hidden, kernel)

    program = compiled.compile_for(
        run,
        array((1, tokens, features), jnp.bfloat16),
        array((features, vocab), kernel_dtype),
        array((1, tokens), jnp.int32),
        array((1, tokens), jnp.float32),
        xla_gpu_enable_triton_gemm=triton,
    )
    products = compiled.matrix_products(program)
    # Each is once in the program: in the body of a loop.
    results = [f"f32[1024,{vocab}]", f"f32[{chunk},{features}]", f"f32[{features},{vocab}]"]
    assert sorted(result for *_, result in products) == sorted(results)
    assert all(factor.startswith("bf16[") for *factors, _ in products for factor in factors)
    # The slopes, a quarter of the chunk's float32 logits, and for a kernel of bfloat16 the sum of
    # its gradient; for one of float32 its copy in bfloat16. Nothing else is as large as a tenth.
    kernel = features * vocab
    held = 2 * chunk * vocab + chunk * vocab + (4 if kernel_dtype == jnp.bfloat16 else 2) * kernel
    assert compiled.temp_bytes(program) < 1.1 * held
