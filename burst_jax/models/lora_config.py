"""``Lora``: which projections of a decoder have low-rank adapters, and of which rank."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re

from burst_jax.errors import check_integer

# A layer's projections, and what transformers calls them.
PROJECTIONS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA, Hu et al. 2021): ``x W + (alpha / rank) (x A) B`` for ``x W``.

    A is ``[inputs, rank]`` and B ``[rank, outputs]``. Both are float32. W is frozen.

    Attributes:
      rank: their rank.
      alpha: the numerator of their factor; None is ``rank``, so that the factor is 1.
      targets: the projections that have adapters: a regular expression that matches the whole of
        their names, or a tuple of names. They are called query, key, value, out, gate, up and down,
        or as transformers calls them, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
        down_proj.

    Raises:
      ValueError: a rank below 1, an alpha that is not positive, no regular expression, or a name or
        expression that no projection has.
    """

    rank: int
    alpha: float | None = None
    targets: str | tuple[str, ...] = ".*"

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, 1)
        alpha = self.alpha
        real = isinstance(alpha, numbers.Real) and not isinstance(alpha, bool)
        if alpha is not None and not (real and 0 < alpha < math.inf):
            raise ValueError(f"alpha is {alpha!r}: it must be positive and finite, or None")
        if not self.projections:
            raise ValueError(f"targets is {self.targets!r}: it matches none of {_names()}")

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections that have adapters, among query, key, value, out, gate, up and down."""
        if isinstance(self.targets, str):
            try:
                pattern = re.compile(self.targets)
            except re.error as error:
                raise ValueError(
                    f"targets is {self.targets!r}: no regular expression ({error}); write names "
                    "like 'query|value'"
                ) from None
            return tuple(
                ours
                for ours, theirs in PROJECTIONS.items()
                if pattern.fullmatch(ours) or pattern.fullmatch(theirs)
            )
        known = {*PROJECTIONS, *PROJECTIONS.values()}
        names = isinstance(self.targets, tuple) and all(isinstance(x, str) for x in self.targets)
        if not names or not known.issuperset(self.targets):
            raise ValueError(
                f"targets is {self.targets!r}: pass a regular expression, or a tuple of names "
                f"among {_names()}"
            )
        return tuple(
            ours
            for ours, theirs in PROJECTIONS.items()
            if ours in self.targets or theirs in self.targets
        )

    @property
    def scale(self) -> float:
        """``alpha / rank``."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def _names() -> str:
    return ", ".join(f"{ours} ({theirs})" for ours, theirs in PROJECTIONS.items())
