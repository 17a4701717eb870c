"""What one local attention computes, apart from its arrays: mask, score and dropout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import numpy as np

from pallas_kernels import elementwise
from pallas_kernels.dropout import Dropout
from pallas_kernels.mask import Mask
from pallas_kernels.score import Score


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static part of an attention: hashable, so that it can be part of a jit cache key.

    Attributes:
      mask: which keys a query attends to.
      score: how a logit is computed from a product.
      dropout: which weights are dropped; None drops none.
    """

    mask: Mask
    score: Score
    dropout: Dropout | None = None

    @property
    def calls_functions(self) -> bool:
        """Whether there is a ``score_mod`` or ``mask_mod``."""
        return self.score.score_mod is not None or self.mask.mask_mod is not None

    @property
    def converts_distances(self) -> bool:
        """Whether a ``score_mod`` converts the distance of positions to float32.

        A ``mask_mod`` converts the exact distance: it must mask the same scores everywhere.
        """
        function = self.score.score_mod
        if function is None:
            return False
        traced = elementwise.trace(function, takes_score=True)
        return elementwise.with_float_distances(traced) is not None

    @classmethod
    def of(
        cls,
        scale: float,
        left: int | None = None,
        right: int | None = None,
        logits_soft_cap: float | None = None,
    ) -> AttentionSpec:
        """A spec from the arguments of :class:`Mask` and :class:`Score`."""
        return cls(Mask(left, right), Score(scale, logits_soft_cap))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Queries and keys per tile of scores."""

    block_q: int
    block_kv: int

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")


def unsupported_functions(
    spec: AttentionSpec,
    *,
    backward: bool,
    operations: Collection[str],
    integer_operations: Collection[str],
    dtypes: Collection[str],
) -> str | None:
    """Why kernels cannot run the spec's ``score_mod`` or ``mask_mod``, or None if they can.

    Args:
      spec: the mask and the score.
      backward: whether the derivative is needed, too.
      operations: names of the operations that the kernels have.
      integer_operations: names of those that they have for integers alone.
      dtypes: names of the dtypes that they have them for.
    """
    score_mod, mask_mod, runs = spec.score.score_mod, spec.mask.mask_mod, {}
    if score_mod is not None:
        of_score = elementwise.with_derivative if backward else elementwise.modified
        runs["score_mod"] = elementwise.trace(
            functools.partial(of_score, score_mod), takes_score=True
        )
    if mask_mod is not None:
        runs["mask_mod"] = elementwise.trace(mask_mod, takes_score=False)
    for name, traced in runs.items():
        for operation in traced.operations:
            if operation.name not in {*operations, *integer_operations}:
                return (
                    f"{name} does {operation.name!r}, which its kernels cannot do with tiles of "
                    "scores: write it by elementwise arithmetic"
                )
            result = operation.outputs[0].dtype
            if operation.name in integer_operations and np.issubdtype(result, np.floating):
                return (
                    f"{name} does {operation.name!r} in {result}, which its kernels can do with "
                    "integers alone: compute it from int32"
                )
            for variable in operation.outputs:
                if str(variable.dtype) not in dtypes:
                    return (
                        f"{name} computes in {variable.dtype}; its kernels have "
                        f"{', '.join(sorted(dtypes))}: cast to one of them"
                    )
        if traced.captured:
            shape = np.shape(traced.captured[0])
            return (
                f"{name} captures an array of shape {shape}, and its kernels take numbers alone; "
                "compute it from positions and heads"
            )
    return None
