"""How far losses and gradients on a mesh are from those of one device, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from burst_jax.verify.batch import group_of
from burst_jax.verify.report import Difference

# A loss, and the gradients of the floating parameters.
Results = tuple[float, Sequence[np.ndarray]]

# A mesh may be off by this many times one device's own error, plus the second number: sums in
# another order. Without a reference both are one number.
_TIMES = 2.0
_PLUS = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 5e-4}
_ALONE = {"float32": 3e-5, "bfloat16": 5e-2, "float16": 1e-2}
# Gradients that are this small next to all others are rounding errors of zero.
_SMALL = 1e-4


def differences(
    names: Sequence[str], mesh: Results, one: Results, reference: Results | None, dtype: str
) -> tuple[Difference, tuple[Difference, ...]]:
    """The difference of the losses, and one of the gradients for each parameter group.

    Args:
      names: of the gradients.
      mesh: on the mesh.
      one: on one device.
      reference: on one device in a wider dtype, or None.
      dtype: the narrowest floating dtype of the loss.
    """
    true_loss, truth = reference or one
    plus = (_PLUS if reference else _ALONE)[dtype]

    def difference(name: str, mesh: float, one: float) -> Difference:
        limit = _TIMES * one + plus if reference else plus
        return Difference(name, mesh, one if reference else None, limit)

    scale = abs(true_loss) or 1.0
    loss = difference("loss", *(abs(value - true_loss) / scale for value, _ in (mesh, one)))
    groups: dict[str, list[int]] = {}
    for index, name in enumerate(names[: len(truth)]):
        groups.setdefault(group_of(name), []).append(index)
    total, count = sum(_squares(x) for x in truth), sum(x.size for x in truth)
    found = []
    for name, members in groups.items():
        size = sum(truth[i].size for i in members)
        norm = max(
            sum(_squares(truth[i]) for i in members),
            _SMALL**2 * total * size / count,
            np.finfo(np.float64).tiny,
        )
        errors = (
            (sum(_squares(_gap(gradients[i], truth[i])) for i in members) / norm) ** 0.5
            for _, gradients in (mesh, one)
        )
        found.append(difference(name, *errors))
    return loss, tuple(found)


def _squares(x: np.ndarray) -> float:
    return float(np.sum(np.square(x.astype(np.float64))))


def _gap(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) - y.astype(np.float64)
