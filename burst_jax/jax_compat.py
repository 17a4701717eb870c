"""Private JAX APIs that the library uses; all other modules import them from here.

Each has the JAX versions that it was seen in, and the public replacement to wait for.
"""

from __future__ import annotations

import jax
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge


def backends_are_initialized() -> bool:
    """Whether JAX's backends have started, without starting them.

    Seen in 0.11.2 and 0.12; no public replacement (``jax.devices()`` starts the backends).
    """
    return _xla_bridge.backends_are_initialized()


def distributed_process_count() -> int:
    """Number of processes that ``jax.distributed.initialize`` joined, without starting backends.

    Seen in 0.11.2 and 0.12; replace by ``jax.process_count()`` once it starts no backend.
    """
    initialized = jax.distributed.is_initialized()
    return (_distributed.global_state.num_processes or 1) if initialized else 1


def vmapped_over_mesh_axes() -> bool:
    """Whether a ``jax.vmap`` with ``spmd_axis_name`` is being traced around the caller.

    Seen in 0.11.2 and 0.12; replace by a public query of the axis environment.
    """
    return bool(_core.get_axis_env().spmd_axis_names)
