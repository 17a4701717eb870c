"""What XLA makes of expert parallelism: what is sent when, and no array of all experts."""

from __future__ import annotations

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax import ShardingRules
from burst_jax.models import DecoderConfig, Experts, MixtureOfExperts
from burst_jax.models.weights import flat_weights, with_weights

pytestmark = pytest.mark.cuda_compiler

N, TOKENS, D, ASSIGNED = 4, 4096, 512, 12288
CONFIG = DecoderConfig(
    embed_dim=D, mlp_dim=256, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, remat="none",
    feed_forward=MixtureOfExperts, experts=Experts(16, 8, shared_dim=1024),
)  # fmt: skip


def test_tokens_are_sent_while_the_shared_expert_runs():
    """By permutes, in a round of static size; one loop per direction has further rounds."""
    mesh = compiled.named_mesh("h100", seq=N)
    rules = ShardingRules(data=None, fsdp=None, seq=None, tensor=None, expert="seq")
    init = nnx.initializers.lecun_normal()
    layer = nnx.eval_shape(lambda: MixtureOfExperts(CONFIG, out_init=init, rngs=nnx.Rngs(0)))
    layer.expert_axis = "seq"
    graphdef, state = nnx.split(layer)
    shapes = flat_weights(state)
    axes = CONFIG.feed_forward.weight_axes
    # The shared expert's weights are whole here.
    specs = {path: P() if path[0] == "shared" else rules.spec(axes[path]) for path in shapes}

    def local(weights, x):
        layer = nnx.merge(graphdef, with_weights(state, weights))
        return layer.with_sums(x, None, keeps_products=False)[0]

    def run(weights, x):
        feed_forward = jax.shard_map(
            local, mesh=mesh, in_specs=(specs, P(None, "seq")), out_specs=P(None, "seq")
        )
        out, vjp = jax.vjp(feed_forward, weights, x)
        return vjp(out)

    def placed(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = {path: placed(shapes[path].shape, spec) for path, spec in specs.items()}
    x = placed((1, N * TOKENS, D), P(None, "seq"))
    program = compiled.compile_for(run, weights, x, has_kernels=False)
    assert not {"all-to-all", "all-gather"} & {
        operation.opcode.removesuffix("-start")
        for operations in compiled.computations(program).values()
        for operation in operations
    }
    loops = [x for x in compiled.computations(program)["ENTRY"] if x.opcode == "while"]
    assert len([x for x in loops if "known_trip_count" not in x.rest]) == 2
    sent = compiled.moves(program, "collective-permute")["ENTRY"]
    # Each token once per device, a number and a weight per assignment, and the experts' counts.
    rows = [during for shapes, during in sent if (1, TOKENS, D) in shapes]
    kinds = {shape[1:] for shapes, _ in sent for shape in shapes}
    assert kinds == {(TOKENS, D), (ASSIGNED,), (16 // N,)}
    # Tokens, results, and the gradients of both, to all other devices each.
    assert len(rows) == 4 * (N - 1)
    assert all(rows[: N - 1])
    # The gradients of tokens travel while those of the experts' matrices are computed.
    assert all("burst_grouped_gradient" in during for during in rows[1 - N :])
    most = max(elements for *_, elements in compiled.arrays_in_order(program))
    # A round's rows.
    assert most == N * ASSIGNED * D < TOKENS * 16 * D
