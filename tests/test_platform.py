"""What the library asks of XLA, by platform, GPU and processes."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import burst_jax

MODE = "xla_gpu_collective_permute_mode"


def options_on(kind, **options):
    """Of a program for one GPU of a kind."""
    mesh = AbstractMesh((1,), ("seq",), abstract_device=AbstractDevice(kind, None, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        return burst_jax.compiler_options(**options)


def test_nothing_is_asked_of_other_platforms():
    assert burst_jax.compiler_options() == {}
    assert burst_jax.compiler_options("cpu", peer_copies=True) == {}


@pytest.mark.parametrize(
    ("kind", "processes", "peer"),
    [
        ("NVIDIA H200", 1, True),
        ("NVIDIA A100-SXM4-80GB", 1, True),
        ("NVIDIA H200", 2, False),  # Copy engines reach the memory of one process.
        ("NVIDIA GeForce RTX 4090", 1, False),  # Its driver lets no GPU read another's.
        ("a GPU of tomorrow", 1, False),
    ],
)
def test_copy_engines_move_blocks_where_they_can(kind, processes, peer, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    options = options_on(kind)
    assert options["xla_gpu_enable_latency_hiding_scheduler"]
    assert (options.get(MODE) == "COLLECTIVES_PEER_MEMORY") == peer
    # Told so, they do, or do not.
    assert MODE in options_on(kind, peer_copies=True)
    assert MODE not in options_on(kind, peer_copies=False)
