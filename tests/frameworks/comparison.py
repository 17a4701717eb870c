"""Three training steps of a framework's program on one device, and of the patched one on a mesh.

Each ``run_*.py`` here is a script for the environment of one framework (``make test-frameworks``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_disable_most_optimizations", True)  # Most of the time is compilation.

STEPS, TOLERANCE = 3, 1e-5
# Documents of one packed sequence with padding between them, at the end too; 0 is padding.
IDS = np.repeat([1, 2, 0, 3, 4, 0], [23, 9, 3, 17, 8, 4]).astype(np.int32)
LENGTH = len(IDS)


def packed_batch(batch: int, vocabulary: int, seed: int = 0) -> dict[str, np.ndarray]:
    """``tokens``, ``segment_ids``, ``positions`` ``[batch, LENGTH]``, other documents in each."""
    rng = np.random.default_rng(seed)
    ids = np.stack([np.roll(IDS, 5 * row) for row in range(batch)])
    # Documents count from 1 in their order, also where the roll begins in the middle of one.
    starts = np.diff(ids, axis=1, prepend=-1) != 0
    documents = np.where(ids > 0, np.cumsum(starts & (ids > 0), axis=1), 0)
    first = np.maximum.accumulate(np.where(starts, np.arange(LENGTH), 0), axis=1)
    return {
        "tokens": rng.integers(1, vocabulary, ids.shape).astype(np.int32),
        "segment_ids": documents.astype(np.int32),
        "positions": (np.arange(LENGTH) - first).astype(np.int32),
    }


def named_leaves(tree: Any) -> dict[str, np.ndarray]:
    """The arrays of a pytree by their paths, but no empty ones."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves if leaf.size}


class _Sends:
    """Counts the ring's sends while a program is traced."""

    def __init__(self) -> None:
        self.count, self._ppermute = 0, jax.lax.ppermute

    def __enter__(self) -> _Sends:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return self._ppermute(*args, **kwargs)

        jax.lax.ppermute = counted
        return self

    def __exit__(self, *_: object) -> None:
        jax.lax.ppermute = self._ppermute


Result = tuple[list[float], Mapping[str, np.ndarray], Mapping[str, np.ndarray]]


def compare(name: str, unpatched: Callable[[], Result], patched: Callable[[], Result]) -> None:
    """Runs both and compares losses and updated weights.

    Each returns the losses of :data:`STEPS` steps, and the weights before and after them, by name.
    The unpatched program runs first, on one device.

    Raises:
      AssertionError: a loss or a weight differs by more than :data:`TOLERANCE`; a weight that
        training moves by less than 30 times as much, whose comparison would show nothing; a
        program that is not what its name says.
    """
    with _Sends() as sends:
        losses, before, after = unpatched()
    assert sends.count == 0, "the unpatched program calls the ring"
    jax.clear_caches()  # Traces of an earlier comparison.
    with _Sends() as sends:
        ring_losses, ring_before, ring_after = patched()
    assert sends.count > 0, "the patched program sends nothing around the ring"
    assert before.keys() == after.keys() == ring_before.keys() == ring_after.keys()
    assert len(losses) == len(ring_losses) == STEPS

    np.testing.assert_allclose(ring_losses, losses, rtol=TOLERANCE, atol=0)
    errors = {}
    for key, weight in after.items():
        np.testing.assert_array_equal(ring_before[key], before[key], key)
        moved = np.abs(weight - before[key]).max()
        assert moved > 30 * TOLERANCE, f"{key} moved by {moved} only"
        errors[key] = np.abs(ring_after[key] - weight).max()
        assert errors[key] <= TOLERANCE, f"{key} differs by {errors[key]}"
    off = np.abs(np.subtract(ring_losses, losses) / losses).max()
    print(
        f"{name}: {STEPS} steps, losses {', '.join(f'{loss:.4f}' for loss in losses)}; largest "
        f"difference: losses {off:.1e}, {len(errors)} weights {max(errors.values()):.1e}"
    )
