"""What one local attention computes, apart from its arrays: mask, score and dropout."""

from __future__ import annotations

import dataclasses

from pallas_kernels.dropout import Dropout
from pallas_kernels.mask import Mask
from pallas_kernels.score import Score


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static part of an attention: hashable, so that it can key a jit cache.

    Attributes:
      mask: which keys a query sees.
      score: how a logit is made of a product.
      dropout: which weights are dropped; None drops none.
    """

    mask: Mask
    score: Score
    dropout: Dropout | None = None

    @property
    def calls_functions(self) -> bool:
        """Whether there is a function of the caller's, which reads where a score is."""
        return self.score.score_mod is not None or self.mask.mask_mod is not None

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
    """How many query and key tokens one tile of scores spans."""

    block_q: int
    block_kv: int

    def __post_init__(self):
        for name in ("block_q", "block_kv"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
