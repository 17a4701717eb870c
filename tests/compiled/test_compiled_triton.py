"""The Triton kernels compiled for A100 and H100: registers and shared memory of what ships."""

from __future__ import annotations

import functools

import compiled_programs as compiled
import jax
import jax.numpy as jnp
import pytest
from compiled_calls import compile_call
from jax.sharding import PartitionSpec as P

from pallas_kernels import AttentionInputs, AttentionSpec, KVSide, QuerySide, triton
from pallas_kernels.pallas_triton.configs import TritonConfig

pytestmark = pytest.mark.cuda_compiler

SPILLS = "xla_gpu_fail_ptx_compilation_on_register_spilling"


FULL = {"full": True}


@pytest.mark.parametrize(
    ("gpus", "dims", "options"),
    [
        # Every entry of the tables: for whole tiles, and for everything else.
        ("a100+h100", (64, 64), {}),
        ("a100+h100", (128, 128), {}),
        ("a100+h100", (192, 128), {}),
        ("a100+h100", (64, 64), FULL),
        ("a100+h100", (128, 128), FULL),
        ("a100+h100", (192, 128), FULL),
        ("a100+h100", (256, 256), FULL),
        ("a100+h100", (64, 64), FULL | {"dtype": "float32"}),
        ("a100+h100", (128, 128), FULL | {"dtype": "float32"}),
        ("h100", (256, 256), FULL | {"dtype": "float32"}),
        # Features that take registers.
        ("a100", (128, 128), {"dropout": True}),
        ("h100", (64, 64), {"dropout": True}),
        ("a100", (192, 128), {"numbers": "differentiated"}),
        ("h100", (128, 128), {"numbers": "differentiated"}),
        ("a100", (128, 128), {"ranges": True, "segments": True}),
        ("h100", (64, 64), {"ranges": True, "full": True}),
        ("a100", (128, 128), {"mods": "score+mask", "segments": True}),
        ("h100", (64, 64), {"mods": "score+mask", "segments": True}),
        ("a100", (128, 128), {"blocks": 32}),
        ("h100", (64, 64), {"blocks": 16}),
    ],
    ids=lambda x: "+".join(map(str, x)) or "plain" if isinstance(x, dict) else str(x),
)
def test_shipped_tiles_spill_no_registers(gpus, dims, options):
    """Where o is carried and gradients are added in place.

    At head dim 256 a program's sums fill the registers, and what is added in place at the end
    spills. Smaller tiles without spills are slower.
    """
    for gpu in gpus.split("+"):
        local = triton(compute_capability={"a100": 8.0, "h100": 9.0}[gpu])
        refuse = {SPILLS: dims[0] < 256}
        program = compile_call(
            local, gpu, "forward+backward", *dims, shape=(1, 4, 2), **options, **refuse
        )
        kernels = {kernel for what, kernel in compiled.schedule(program) if what == "kernel"}
        assert kernels == {"burst_forward", "burst_dq", "burst_dkv"}


def test_spilling_tiles_are_refused():
    """The guard of the test above: tiles that are too large for the registers do not pass."""
    mesh = compiled.gpu_mesh("a100", 1)
    arrays = compiled.inputs(mesh, 512, 2, 2, 128)
    run = call_of("forward", TritonConfig(block_q=128, block_kv=128, num_warps=4, num_stages=2))
    compiled.compile_for(run(mesh=mesh), *arrays)
    with pytest.raises(Exception, match="register spilling"):
        compiled.compile_for(run(mesh=mesh), *arrays, **{SPILLS: True})


def call_of(kernel, config):
    """``mesh -> call`` of one kernel with a config."""
    local, spec = triton(config=config), AttentionSpec.of(0.1, right=0)

    def run(q, k, v):
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)
        stats = jnp.zeros((2, 1, 2, q.shape[1]), jnp.float32)
        inputs = AttentionInputs(
            QuerySide(q, positions, do=q, stats=stats), KVSide(k, v, positions)
        )
        if kernel == "forward":
            return local.forward(inputs, local.forward_bounds(inputs, spec=spec), spec=spec)[0]
        assert local.backward is not None
        bounds = local.backward_bounds(inputs, spec=spec)
        dq, (dk, _), _ = local.backward(inputs, bounds, spec=spec)
        return dq if kernel == "dq" else dk  # XLA drops the other kernel.

    specs = {"in_specs": (P(),) * 3, "out_specs": P(), "check_vma": False}
    return functools.partial(jax.shard_map, run, **specs)


@pytest.mark.parametrize(("kernel", "stages"), [("forward", 4), ("dq", 5), ("dkv", 4)])
def test_computed_shared_memory_is_what_xla_says(kernel, stages):
    """Asked of a GPU with none to spare: the error says what the kernel needs."""
    mesh, config = compiled.gpu_mesh("h100", 1), TritonConfig(128, 128, 8, stages)
    run = call_of(kernel, config)
    with pytest.raises(Exception, match="Shared memory size limit exceeded") as caught:
        compiled.compile_for(run(mesh=mesh), *compiled.inputs(mesh, 1024, 2, 2, 128))
    requested = int(compiled.find(r"requested (\d+)", str(caught.value)).group(1))
    computed = config.shared_memory(kernel, 128, 2)
    assert computed <= requested <= computed + 8 * 1024
