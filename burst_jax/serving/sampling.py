"""Choosing the next token from logits; random numbers do not depend on the mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: divides logits; 0 takes the most probable token.
      top_k: only this many of the most probable tokens; None is all.
      top_p: only the most probable tokens that together have at least this probability; None is
        all.

    Raises:
      ValueError: a number out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 or more")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k is {self.top_k!r}: it must be 1 or more, or None")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1, or None")

    def choose(self, logits: jax.Array, key: jax.Array, step: jax.Array) -> jax.Array:
        """The next token of every row.

        Args:
          logits: float32 ``[B, V]``.
          key: a ``jax.random.key``.
          step: number of the token in its row; each row and step has random numbers of its own.

        Returns:
          int32 ``[B]``.
        """
        if self.temperature == 0:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            ordered = -jnp.sort(-logits, -1)
            probabilities = jax.nn.softmax(ordered, -1)
            before = jnp.cumsum(probabilities, -1) - probabilities
            # A token is kept while those before it have less than top_p, the first one always.
            least = jnp.where(before < self.top_p, ordered, jnp.inf).min(-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)

        def one(row: jax.Array, logits: jax.Array) -> jax.Array:
            own = jax.random.fold_in(jax.random.fold_in(key, row), step)
            return jax.random.categorical(own, logits)

        return jax.vmap(one)(jnp.arange(logits.shape[0]), logits).astype(jnp.int32)
