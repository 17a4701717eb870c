"""What a profile of a ring shows: its steps, and in each of them the kernel and what is sent."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from compiled_programs import gradient
from implementations import QUICK
from meshes import mesh_of

import burst_jax
from burst_jax.training import Profile

# A ring of three, where one kernel makes both gradients: burst_jax/ring/schedule.py. The last step
# of each direction sends nothing on, but for the sum that goes home.
SENDS = {"forward": [0, 1], "backward": [0, 1, 2, 3]}
KERNELS = {"forward": [0, 1, 2], "backward": [0, 1, 2, 3]}
CALLED = {"forward": "forward", "backward": "_gradients"}


def ring_of_three():
    mesh = mesh_of(seq=3)
    attention = functools.partial(
        burst_jax.burst_attention, mesh=mesh, implementation="xla", backward="rotate_kv"
    )
    return jax.jit(gradient(attention)), [jnp.ones((1, 24, 2, 8))] * 3


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_step_of_a_ring_has_its_name(direction):
    run, arrays = ring_of_three()
    names = run.lower(*arrays).as_text(debug_info=True)

    def steps_with(operation: str) -> list[int]:
        path = rf'"(?:[^"]*/)?ring_{direction}_step_(\d+)/{re.escape(operation)}'
        return sorted({int(step) for step in re.findall(path, names)})

    assert steps_with("ppermute") == SENDS[direction]
    assert steps_with(f"jit({CALLED[direction]})") == KERNELS[direction]
    assert f'"burst_{direction}/' in names  # What the function is called that the steps call.


@pytest.mark.slow
def test_a_trace_has_the_names(tmp_path):
    run, arrays = ring_of_three()
    program = run.lower(*arrays).compile(compiler_options=QUICK)
    with Profile(tmp_path, 1, skip=0) as profile, profile.step(7):
        jax.block_until_ready(program(*arrays))
    (trace,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    written = trace.read_bytes()
    # Of so small a ring the backward's last kernel has no tile left, and XLA leaves it out.
    for direction in KERNELS:
        for step in range(3):
            path = f"/ring_{direction}_step_{step}/jit({CALLED[direction]})/burst_{direction}/"
            assert path.encode() in written
