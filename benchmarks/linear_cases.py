"""Drawn calls of the gated delta rule, for its benchmark."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.backend import Inputs
from pallas_kernels.linear.chunks import Tokens

HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and contents of a call.

    Attributes:
      length: T.
      heads: N, value heads.
      key_heads: K.
      batch: B, sequences, or blocks of one.
      decay: largest decrease of a log decay.
      documents: whether there are documents and padding.
      edges: whether some betas are 0, 1 and 2.
      channels: whether there is a decay per key channel.
      dims: H and Hv.
    """

    length: int
    heads: int
    key_heads: int
    batch: int = 1
    decay: float = 0.1
    documents: bool = False
    edges: bool = False
    channels: bool = False
    dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)

    @property
    def is_padded(self) -> bool:
        """Whether its head dims are not the kernels'."""
        return self.dims != (HEAD_DIM, HEAD_DIM)

    def __str__(self) -> str:
        blocks = f"{self.batch} x " if self.batch > 1 else ""
        dims = " of {}/{}".format(*self.dims) if self.is_padded else ""
        return f"{blocks}{self.length:,} tokens, {self.key_heads}/{self.heads} heads{dims}"

    def arrays(self) -> tuple[Inputs, jax.Array, jax.Array, jax.Array]:
        """Inputs, the first state, and gradients of the output and of the last state."""
        return _arrays(self)

    def _drawn(self) -> tuple[Inputs, jax.Array, jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 11)
        head_dim, value_dim = self.dims
        by_key = self.batch, self.length, self.key_heads, head_dim
        by_head = self.batch, self.length, self.heads

        def unit(key: jax.Array) -> jax.Array:
            x = jax.random.normal(key, by_key, jnp.float32)
            return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

        def values(key: jax.Array) -> jax.Array:
            return jax.random.normal(key, (*by_head, value_dim), jnp.bfloat16)

        def state(key: jax.Array) -> jax.Array:
            shape = self.batch, self.heads, *self.dims
            return jax.random.normal(key, shape, jnp.float32)

        decays = (*by_head, head_dim) if self.channels else by_head
        log_decay = -self.decay * jax.random.uniform(keys[3], decays, jnp.float32)
        beta = jax.random.uniform(keys[4], by_head, jnp.float32)
        if self.edges:
            kind = jax.random.randint(keys[5], by_head, 0, 10)
            beta = jnp.where(kind < 3, kind.astype(jnp.float32), beta)
        tokens = None
        if self.documents:
            shape = by_head[:2]
            valid = jax.random.uniform(keys[6], shape) > 0.1
            # The first document continues the first state.
            begins = (jax.random.uniform(keys[7], shape) < 0.01) & (jnp.cumsum(valid, 1) > 1)
            tokens = Tokens(begins & valid, valid)
        inputs = Inputs(unit(keys[0]), unit(keys[1]), values(keys[2]), log_decay, beta)
        if tokens is not None:
            zeroed: Any = [
                jnp.where(lax.expand_dims(tokens.valid, range(2, x.ndim)), x, jnp.zeros_like(x))
                for x in inputs[:5]
            ]
            inputs = Inputs(*zeroed, tokens=tokens)
        return inputs, state(keys[8]), values(keys[9]), state(keys[10])


@functools.cache
def _arrays(case: Case) -> tuple[Inputs, jax.Array, jax.Array, jax.Array]:
    return case._drawn()


CHECKED = {
    "plain": Case(1024, 4, 4),
    "one chunk": Case(64, 1, 1),
    "grouped, strong decay": Case(960, 4, 2, decay=3.0),
    "documents and padding": Case(1024, 4, 4, documents=True),
    "beta 0, 1 and 2": Case(1024, 4, 4, batch=2, edges=True),
    "many chunks": Case(8192, 32, 16, documents=True),
}
