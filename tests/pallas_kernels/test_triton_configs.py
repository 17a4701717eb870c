"""Which tiles the Triton kernels get."""

from __future__ import annotations

import pytest

from pallas_kernels import AttentionSpec
from pallas_kernels.pallas_triton.configs import TritonConfig, triton_configs

PLAIN = AttentionSpec.of(1.0, right=0)


def configs(capability=9.0, dim=128, dtype="bfloat16", length=4096, spec=PLAIN, packed=False):
    return triton_configs(capability, dim, dtype, length, length, spec, packed)


@pytest.mark.parametrize("capability", [None, 8.6, 8.9, 10.0, 12.1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_gpu_without_a_table_gets_the_tiles_that_fit_all(capability, dtype):
    for dim in (32, 64, 96, 128, 256):
        assert configs(capability, dim, dtype) == configs(None, dim, dtype)


def test_each_table_is_for_its_gpu():
    assert len({configs(capability) for capability in (None, 8.0, 9.0)}) == 3
    assert configs(dtype="bfloat16") == configs(dtype="float16") != configs(dtype="float32")


@pytest.mark.parametrize("capability", [None, 8.0, 9.0])
def test_values_of_fewer_lanes_leave_room_for_larger_tiles(capability):
    def tiles(dim, value_dim):
        return triton_configs(
            capability, dim, "bfloat16", 4096, 4096, PLAIN, False, value_dim=value_dim
        )

    assert (tiles(192, 128) == tiles(192, 192)) == (capability is None)
    # Wider values than keys take the tiles of heads as wide as the values.
    assert tiles(64, 256) == tiles(256, 256)
    assert tiles(64, 64) == configs(capability, 64)


@pytest.mark.parametrize("capability", [8.0, 9.0])
@pytest.mark.parametrize(
    "what",
    [
        {"length": 4000},
        {"packed": True},
        {"spec": AttentionSpec.of(1.0, right=0, logits_soft_cap=30.0)},
    ],
    ids=["ragged", "packed", "cap"],
)
def test_what_takes_registers_gets_tiles_that_leave_them(capability, what):
    assert configs(capability, **what) != configs(capability)
    assert configs(capability, spec=AttentionSpec.of(1.0, left=99, right=0)) == configs(capability)


def test_shared_memory_counts_what_is_walked_over_in_every_stage():
    config = TritonConfig(64, 128, num_warps=8, num_stages=3)
    kib = 1024
    assert config.shared_memory("forward", 128, 2) == (2 * 3 * 32 + 16) * kib
    assert config.shared_memory("dq", 128, 2) == (2 * 3 * 32 + 2 * 16) * kib
    assert config.shared_memory("dkv", 128, 2) == (2 * 3 * 16 + 2 * 32) * kib
    # A head dim of 96 is padded to 128 lanes; rows in registers take no shared memory.
    assert config.shared_memory("dq", 96, 2) == config.shared_memory("dq", 128, 2)
    # Values of another head dim: v and dO have their own lanes.
    assert config.shared_memory("forward", 192, 2, 128) == (3 * (64 + 32) + 32) * kib
    assert config.shared_memory("dq", 192, 2, 128) == (3 * (64 + 32) + 32 + 16) * kib
    assert config.shared_memory("dkv", 192, 2, 128) == (3 * (32 + 16) + 64 + 32) * kib
    kept = TritonConfig(64, 128, num_warps=8, num_stages=3, rows_in_registers=True)
    assert kept.shared_memory("dq", 128, 2) == 2 * 3 * 32 * kib
