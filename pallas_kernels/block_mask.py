"""Block-sparse masks: a table of which blocks of queries attend to which blocks of keys.

The table is in the sequence's natural order, so a score's entry follows from its positions::

    table[head, q_position // q_block, kv_position // kv_block]

It is an array, whose values are usually not known at trace time. Kernels visit only tiles with an
allowed score (:mod:`pallas_kernels.bounds` lists them), and apply the mask to single scores only in
tiles that are partly masked.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mask import TileSummary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A block-sparse mask. A pytree.

    Attributes:
      table: bool ``[N or 1, rows, columns]``; True where the queries of a row attend to the keys of
        a column. With a leading 1, all heads share it.
      q_block: query positions per row.
      kv_block: key positions per column.
      q_run: queries ``i * q_run`` to ``(i + 1) * q_run - 1`` of a device are in one row, for every
        i; 1 assumes nothing.
      kv_run: the same for keys and columns.
    """

    table: jax.Array
    q_block: int = dataclasses.field(metadata={"static": True})
    kv_block: int = dataclasses.field(metadata={"static": True})
    q_run: int = dataclasses.field(default=1, metadata={"static": True})
    kv_run: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def heads(self) -> int:
        """N, or 1 if all heads share a table."""
        return self.table.shape[0]

    def rows(self, positions: jax.Array) -> jax.Array:
        """The table's row of each query position, int32."""
        return lax.div(positions, jnp.int32(self.q_block))

    def columns(self, positions: jax.Array) -> jax.Array:
        """The table's column of each key position, int32."""
        return lax.div(positions, jnp.int32(self.kv_block))

    def allowed(self, q_positions: jax.Array, kv_positions: jax.Array, groups: int) -> jax.Array:
        """Which scores count, bool ``[K or 1, G or 1, T, S]``.

        Args:
          q_positions: ``[T]``.
          kv_positions: ``[S]``.
          groups: G, query heads per key/value head.
        """
        rows, columns = self.rows(q_positions)[:, None], self.columns(kv_positions)[None, :]
        # Positions past the sequence, of a tile's padding, read an arbitrary entry.
        of_heads = jax.vmap(lambda table: table.at[rows, columns].get(mode="clip"))(self.table)
        return of_heads.reshape(-1, groups if self.heads > 1 else 1, *of_heads.shape[1:])

    def at(self, heads: jax.Array, q_positions: jax.Array, kv_positions: jax.Array) -> jax.Array:
        """Which scores count, for indices of the table's heads and positions that broadcast."""
        return self.table[heads, self.rows(q_positions), self.columns(kv_positions)]

    def tiles(self, q: TileSummary, kv: TileSummary) -> tuple[jax.Array, jax.Array]:
        """What is known about every tile of scores: ``(possible, full)``, bool ``[N or 1, q, kv]``.

        As :meth:`pallas_kernels.mask.Mask.tiles`. It considers all rows and columns between those
        of a tile's first and last position, also those that no token of the tile is in.
        """
        # sums[:, i, j] is the number of True entries before row i and before column j.
        sums = jnp.cumsum(jnp.cumsum(self.table, 1, dtype=jnp.int32), 2, dtype=jnp.int32)
        sums = jnp.pad(sums, ((0, 0), (1, 0), (1, 0)))
        # All sequences have the same positions.
        top, bottom = self.rows(q.first[0]), self.rows(q.last[0]) + 1
        left, right = self.columns(kv.first[0]), self.columns(kv.last[0]) + 1

        def before(row: jax.Array, column: jax.Array) -> jax.Array:
            row, column = row[:, None], column[None, :]
            return jax.vmap(lambda of_head: of_head.at[row, column].get(mode="clip"))(sums)

        seen = before(bottom, right) - before(top, right) - before(bottom, left) + before(top, left)
        entries = (bottom - top)[:, None] * (right - left)[None, :]
        return seen > 0, seen == entries[None]

    def tests_scores(self, block_q: int, block_kv: int) -> bool:
        """Whether kernels must apply the mask to single scores in visited tiles of this size.

        If not, every tile is within one entry of the table, which decides whether it is visited.
        """
        return bool(self.q_run % block_q or self.kv_run % block_kv)
