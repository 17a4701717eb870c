"""Sampling of the next token from logits; random numbers do not depend on the mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.errors import as_number, check_integer


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Attributes:
      temperature: divides logits; 0 is greedy.
      top_k: sample from the k most probable tokens; None is all.
      top_p: sample from the fewest most probable tokens whose probabilities sum to at least p; None
        is all.

    Raises:
      ValueError: a value out of range, or top_k or top_p at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if value is None and name == "top_p":
                continue
            object.__setattr__(self, name, as_number(name, value))
        # Logits divided by a smaller temperature overflow float32.
        if self.temperature != 0 and not 1e-6 <= self.temperature < np.inf:
            raise ValueError(
                f"temperature is {self.temperature}: it must be 0, or finite and at least 1e-6"
            )
        if self.top_k is not None:
            object.__setattr__(self, "top_k", check_integer("top_k", self.top_k, 1))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1, or None")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise ValueError(
                f"top_k is {self.top_k}, top_p {self.top_p}, and temperature is 0, which is "
                "greedy: leave them out, or pass a temperature above 0"
            )

    def choose(self, logits: jax.Array, key: jax.Array, lengths: jax.Array) -> jax.Array:
        """The next token of every sequence.

        Args:
          logits: float32 ``[B, V]``.
          key: a ``jax.random.key``.
          lengths: int32 ``[B]``, tokens of each sequence; folded into the key with the batch index.

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
            # A token is kept while the sum before it is below top_p; the first one always is.
            least = jnp.where(before < self.top_p, ordered, jnp.inf).min(-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)

        def one(row: jax.Array, length: jax.Array, logits: jax.Array) -> jax.Array:
            own = jax.random.fold_in(jax.random.fold_in(key, row), length)
            return jax.random.categorical(own, logits)

        rows = jnp.arange(logits.shape[0])
        return jax.vmap(one)(rows, lengths, logits).astype(jnp.int32)
