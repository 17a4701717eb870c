"""What layers compute next to the residual stream: sums for losses, and the largest logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from burst_jax.parallel.mesh import constrain
from burst_jax.ring.max_logits import MaxLogits
from pallas_kernels.arrays import vary


class LayerSums(NamedTuple):
    """What a layer, or each layer of a stack, computes next to the residual stream. A pytree.

    Attributes:
      sums: those of :meth:`burst_jax.models.FeedForward.with_sums`, added up over tokens.
      max_logits: bounds of the largest logit of each head, -inf in layers with linear attention;
        None if nobody asks for them.
    """

    sums: Any
    max_logits: MaxLogits | None

    @classmethod
    def specs(cls, stage_axis: str | None, tensor_axes: tuple[str, ...]) -> Self:
        """How those of all layers are sharded: layers over stages, logits over heads, too."""
        logits: Any = P(stage_axis, tensor_axes or None)
        return cls(P(stage_axis), logits)

    def where(self, condition: jax.Array) -> Self:
        """These, or where the condition is False those of no tokens."""
        return self._map(
            lambda x: jnp.where(condition, x, 0), lambda x: jnp.where(condition, x, -jnp.inf)
        )

    def over_microbatches(self) -> Self:
        """Those of all microbatches, which are the leading dimension."""
        return self._map(lambda x: x.sum(0), lambda x: x.max(0))

    def over_devices(self, axes: tuple[str, ...]) -> Self:
        """Those of all tokens, which are sharded over these mesh axes. Logits have no gradient."""
        found = self._map(lambda x: x, lax.stop_gradient)
        if not axes:
            return found
        return found._map(
            lambda x: lax.psum(x, axes), lambda x: lax.pmax(vary(x, frozenset(axes)), axes)
        )

    def logits_of(self, kinds: Sequence[Any], mesh: Mesh | AbstractMesh) -> MaxLogits | None:
        """:attr:`max_logits` ``[L, N]`` of the layers with softmax attention, on all devices."""
        layers = np.flatnonzero([kind.mixer == "attention" for kind in kinds])
        return jax.tree.map(lambda x: constrain(x, mesh, P())[layers], self.max_logits)

    def _map(self, of_sums: Any, of_logits: Any) -> Self:
        return self._replace(
            sums=jax.tree.map(of_sums, self.sums),
            max_logits=jax.tree.map(of_logits, self.max_logits),
        )


def no_logits_of(heads: int) -> MaxLogits:
    """The bounds of a layer without softmax attention, in place of those of ``heads`` heads."""
    return MaxLogits(*[jnp.full((heads,), -jnp.inf, jnp.float32)] * 2)
