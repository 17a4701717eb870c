"""Other head dims for kernels that have 128 of keys and values alone.

The rule computes each column of a state ``[H, Hv]`` from the same queries, keys, decays and betas,
so the columns of a value head are those of several heads of 128, which share its key head. What is
missing to 128 is padded with zeros: such columns stay zero, and so do rows of a state whose query
and key are zero. No padding is seen outside: maps, states and gradients have the true head dims.

Rows are not divided: every update reads all of them (``k^T S``).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arrays import pad_axis
from pallas_kernels.linear.backend import Gradients, Implementation, Inputs
from pallas_kernels.linear.chunks import HEAD_DIM


def value_parts(value_dim: int) -> int:
    """Heads of 128 whose values are those of one head."""
    return -(-value_dim // HEAD_DIM)


def with_head_dims(kernels: Implementation) -> Implementation:
    """``kernels`` of head dims 128 for key head dims up to 128 and any value head dim.

    What the passes share, ``prepared`` and ``kept``, is that of the padded heads.
    """

    def prepare(inputs: Inputs) -> Any:
        return kernels.prepare(_Heads.of(inputs).padded(inputs))

    def forward(
        inputs: Inputs, prepared: Any, start: jax.Array, scale: float
    ) -> tuple[jax.Array, jax.Array, Any]:
        heads = _Heads.of(inputs)
        given = heads.padded(inputs), prepared, heads.split_states(start)
        o, last, kept = kernels.forward(*given, scale)
        return heads.merged(o), heads.merged_states(last), kept

    def mapped(inputs: Inputs, start: jax.Array) -> tuple[Any, jax.Array]:
        heads = _Heads.of(inputs)
        prepared, rows = kernels.mapped(heads.padded(inputs), heads.split_states(start))
        return prepared, heads.merged_rows(rows)

    def restore(inputs: Inputs, kept: Any) -> Any:
        return kernels.restore(_Heads.of(inputs).padded(inputs), kept)

    def first_gradient(
        inputs: Inputs, prepared: Any, do: jax.Array, last: jax.Array, scale: float
    ) -> jax.Array:
        heads = _Heads.of(inputs)
        given = heads.padded(inputs), prepared, heads.split(do), heads.split_states(last)
        return heads.merged_states(kernels.first_gradient(*given, scale))

    def backward(
        inputs: Inputs, prepared: Any, start: jax.Array, do: jax.Array, last: jax.Array,
        scale: float,
    ) -> Gradients:  # fmt: skip
        heads = _Heads.of(inputs)
        states = heads.split_states(start), heads.split(do), heads.split_states(last)
        made = kernels.backward(heads.padded(inputs), prepared, *states, scale)
        return heads.merged_gradients(made)

    def parts(inputs: Inputs, has_maps: bool) -> int:
        return kernels.parts(jax.eval_shape(_Heads.of(inputs).padded, inputs), has_maps)

    def compose(
        rows: jax.Array, order: Any, wanted: tuple[int, int], start: jax.Array | None = None
    ) -> jax.Array:
        assert kernels.compose is not None
        heads = _Heads(rows.shape[-1], rows.shape[-2] - rows.shape[-1])
        start = None if start is None else heads.split_columns(start)
        found = kernels.compose(heads.split_rows(rows), order, wanted, start)
        return heads.merged_columns(found)

    return dataclasses.replace(
        kernels, prepare=prepare, forward=forward, mapped=mapped, restore=restore,
        first_gradient=first_gradient, backward=backward, parts=parts,
        compose=None if kernels.compose is None else compose,
    )  # fmt: skip


class _Heads(NamedTuple):
    """The heads of a call. Its arrays are returned unchanged if all head dims are 128.

    Attributes:
      keys: H, at most 128.
      values: Hv.
    """

    keys: int
    values: int

    @classmethod
    def of(cls, inputs: Inputs) -> _Heads:
        return cls(inputs.q.shape[-1], inputs.v.shape[-1])

    @property
    def parts(self) -> int:
        return value_parts(self.values)

    def padded(self, inputs: Inputs) -> Inputs:
        """The inputs of heads of 128; those of a value head follow each other."""
        q, k, v, log_decay, beta, tokens = inputs
        q, k = (pad_axis(x, -1, HEAD_DIM) for x in (q, k))
        if log_decay.ndim > beta.ndim:
            log_decay = pad_axis(log_decay, -1, HEAD_DIM)
        log_decay, beta = (self._repeated(x) for x in (log_decay, beta))
        return Inputs(q, k, self.split(v), log_decay, beta, tokens)

    def split(self, x: jax.Array) -> jax.Array:
        """``[B, T, N parts, 128]`` of values ``[B, T, N, Hv]``."""
        x = pad_axis(x, -1, self.parts * HEAD_DIM)
        return x.reshape(*x.shape[:2], -1, HEAD_DIM) if self.parts > 1 else x

    def merged(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`split`."""
        if self.parts > 1:
            x = x.reshape(*x.shape[:2], -1, self.parts * HEAD_DIM)
        return x[..., : self.values]

    def split_states(self, x: jax.Array) -> jax.Array:
        """``[B, N parts, 128, 128]`` of states ``[B, N, H, Hv]``."""
        x = pad_axis(pad_axis(x, -1, self.parts * HEAD_DIM), -2, HEAD_DIM)
        if self.parts == 1:
            return x
        x = x.reshape(*x.shape[:-1], self.parts, HEAD_DIM)
        return jnp.moveaxis(x, -2, 2).reshape(x.shape[0], -1, HEAD_DIM, HEAD_DIM)

    def merged_states(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`split_states`."""
        if self.parts > 1:
            x = self._by_part(x)
            x = jnp.moveaxis(x, 2, -2).reshape(*x.shape[:2], HEAD_DIM, -1)
        return x[..., : self.keys, : self.values]

    def split_rows(self, x: jax.Array) -> jax.Array:
        """The maps' rows ``[..., N parts, 128 + 128, 128]`` of those that devices exchange."""
        if (self.keys, self.values) == (HEAD_DIM, HEAD_DIM):
            return x
        u, m = jnp.split(x, [self.values], axis=-2)
        m = pad_axis(pad_axis(m, -1, HEAD_DIM), -2, HEAD_DIM)
        return jnp.concatenate([self.split_columns(u), jnp.repeat(m, self.parts, -3)], axis=-2)

    def split_columns(self, x: jax.Array) -> jax.Array:
        """``[..., N parts, 128, 128]`` of transposed states ``[..., N, Hv, H]``."""
        x = pad_axis(pad_axis(x, -1, HEAD_DIM), -2, self.parts * HEAD_DIM)
        return x.reshape(*x.shape[:-3], -1, HEAD_DIM, HEAD_DIM) if self.parts > 1 else x

    def merged_columns(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`split_columns`."""
        if self.parts > 1:
            x = x.reshape(*x.shape[:-3], -1, self.parts * HEAD_DIM, HEAD_DIM)
        return x[..., : self.values, : self.keys]

    def merged_rows(self, x: jax.Array) -> jax.Array:
        """``[B, N, Hv + H, H]`` of the maps' rows ``[B, N parts, 128 + 128, 128]``.

        M is the same in all parts.
        """
        if (self.keys, self.values) == (HEAD_DIM, HEAD_DIM):
            return x
        x = self._by_part(x)
        u, m = x[..., :HEAD_DIM, :], x[:, :, 0, HEAD_DIM:, :]
        u = u.reshape(*u.shape[:2], -1, HEAD_DIM)[..., : self.values, :]
        return jnp.concatenate([u, m[..., : self.keys, :]], axis=2)[..., : self.keys]

    def merged_gradients(self, x: Gradients) -> Gradients:
        """Those of heads of 128 are summed where the heads have the same input.

        Of queries and keys they are so already, as those of all value heads of a key head.
        """
        q, k = (each[..., : self.keys] for each in (x.q, x.k))
        log_decay, beta = (self._summed(each) for each in (x.log_decay, x.beta))
        if log_decay.ndim > beta.ndim:
            log_decay = log_decay[..., : self.keys]
        return Gradients(q, k, self.merged(x.v), log_decay, beta, self.merged_states(x.start))

    def _repeated(self, x: jax.Array) -> jax.Array:
        """``[B, T, N parts, ...]`` of ``[B, T, N, ...]``."""
        return jnp.repeat(x, self.parts, axis=2) if self.parts > 1 else x

    def _summed(self, x: jax.Array) -> jax.Array:
        """The transpose of :meth:`_repeated`, of float32."""
        if self.parts == 1:
            return x
        return x.reshape(*x.shape[:2], -1, self.parts, *x.shape[3:]).sum(3)

    def _by_part(self, x: jax.Array) -> jax.Array:
        """``[B, N, parts, ...]`` of ``[B, N parts, ...]``."""
        return x.reshape(x.shape[0], -1, self.parts, *x.shape[2:])
