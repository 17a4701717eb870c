"""Testing scores by a block-sparse mask, for tiles with several of its entries.

Gathering an entry per score would take an address per score, more registers than there are. So the
table is packed: per row and KV tile, each bit of a word is the entry of one run of keys, all of
which are in one column. A query reads the word of its row. A score shifts it by its key's run,
which is known at compile time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import pad_axis
from pallas_kernels.inputs import AttentionInputs
from pallas_kernels.pallas_triton import lowering
from pallas_kernels.spec import Tiles

_BITS = 32


class BlockWords(NamedTuple):
    """Static parameters of the test.

    Attributes:
      run: keys per bit.
      words: words per row and KV tile.
      tiles: number of KV tiles.
      block_kv: keys per tile.
    """

    run: int
    words: int
    tiles: int
    block_kv: int

    @classmethod
    def of(cls, inputs: AttentionInputs, tiles: Tiles, together: int) -> BlockWords | None:
        """The test in tiles of this size; None if none is needed (``BlockMask.tests_scores``)."""
        mask = inputs.shared.block_mask
        if mask is None or not mask.tests_scores(tiles.block_q, tiles.block_kv, together):
            return None
        run = math.gcd(mask.kv_run, tiles.block_kv)
        words = -(-tiles.block_kv // (run * _BITS))
        return cls(run, words, -(-inputs.kv_length // tiles.block_kv), tiles.block_kv)

    def packed(self, inputs: AttentionInputs) -> jax.Array:
        """The words, int32 ``[N or 1, rows * tiles * words]``."""
        mask = inputs.shared.block_mask
        assert mask is not None
        columns = mask.columns(inputs.kv_positions[:: self.run])
        heads, rows, _ = mask.table.shape
        bits = mask.table.at[:, :, columns].get(mode="clip")
        per_tile = self.block_kv // self.run
        bits = pad_axis(bits, 2, self.tiles * per_tile).reshape(heads, rows, self.tiles, per_tile)
        bits = pad_axis(bits, 3, self.words * _BITS).reshape(heads, rows, -1, _BITS)
        places = jnp.arange(_BITS, dtype=jnp.uint32)
        words = (bits.astype(jnp.uint32) << places).sum(-1, dtype=jnp.uint32)
        return lax.bitcast_convert_type(words, jnp.int32).reshape(heads, -1)

    def seen(
        self,
        words: Any,
        head: Any,
        rows: jax.Array,
        tile: Any,
        shaped: tuple[Callable[..., Any], Callable[..., Any]],
    ) -> jax.Array:
        """Which scores of a tile the mask allows.

        Args:
          words: reference to the words of the program's heads.
          head: index of the head among them.
          rows: int32, the table's row of each query.
          tile: KV tile.
          shaped: shape queries and keys for a tile of scores: ``as_column``, ``as_row``.
        """
        of_queries, of_keys = shaped
        first = (rows * jnp.int32(self.tiles) + tile) * jnp.int32(self.words)
        runs = lax.div(jnp.arange(self.block_kv, dtype=jnp.int32), jnp.int32(self.run))
        seen = None
        for index in range(self.words):
            at = first + jnp.int32(index)
            word = of_queries(lowering.load(words.at[head, at]))
            place = of_keys(runs - jnp.int32(index * _BITS))
            here = None
            if self.words > 1:
                here = (place >= 0) & (place < _BITS)
                place = jnp.where(here, place, 0)
            shape = jnp.broadcast_shapes(word.shape, place.shape)
            word, place = jnp.broadcast_to(word, shape), jnp.broadcast_to(place, shape)
            bit = (lax.shift_right_logical(word, place) & 1) != 0
            bit = bit if here is None else bit & here
            seen = bit if seen is None else seen | bit
        assert seen is not None
        return seen
