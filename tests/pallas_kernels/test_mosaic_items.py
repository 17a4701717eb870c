"""The order in which a Hopper kernel's programs take their work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pallas_mosaic.items import Items

MIB = 2**20


def order(items):
    """``(batch row, head, tile)`` of every item, as they are taken, ``[count, 3]``."""
    at = jax.vmap(lambda number: jnp.stack([jnp.int32(x) for x in items.place_of(number)]))
    return np.asarray(at(jnp.arange(items.count, dtype=jnp.int32)))


@pytest.mark.parametrize("equal", [False, True], ids=["unequal", "equal"])
@pytest.mark.parametrize("last_first", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(("batch", "heads"), [(1, 6), (2, 6), (3, 1), (1, 7)])
@pytest.mark.parametrize("shared", [1, 10 * MIB, 100 * MIB])
def test_every_item_is_taken_once(batch, heads, last_first, shared, equal):
    items = Items(batch, heads, 5, last_first, shared, equal=equal)
    taken = order(items)
    assert len({tuple(item) for item in taken}) == items.count == batch * heads * 5
    assert (taken.max(0) == (batch - 1, heads - 1, 4)).all()
    assert (taken.min(0) == 0).all()


def test_the_longest_of_a_section_come_first():
    items = Items(1, 8, 4, last_first=True, shared_bytes=6 * MIB)
    assert items.section == 4  # heads, 24 MiB of what they share
    taken = order(items)
    for section in (taken[:16], taken[16:]):
        assert sorted(set(section[:, 1])) == list(range(section[0, 1], section[0, 1] + 4))
        np.testing.assert_array_equal(section[:, 2], np.repeat([3, 2, 1, 0], 4))


@pytest.mark.parametrize(
    ("heads", "tiles", "shared", "section"),
    [
        (32, 128, 16, 1),  # of 32 heads the last one's end costs little
        (8, 128, 16, 2),  # of 8 it would cost an eighth
        (32, 32, 4, 8),
        (32, 32, 2, 8),  # long enough as it is
        (8, 256, 40, 1),
    ],
)
def test_the_last_section_is_as_long_as_the_longest_item(heads, tiles, shared, section):
    items = Items(1, heads, tiles, last_first=False, shared_bytes=shared * MIB)
    assert items.section == section


def test_equal_items_go_head_by_head():
    items = Items(1, 8, 4, last_first=True, shared_bytes=1, equal=True)
    assert items.section == 1
    np.testing.assert_array_equal(order(items)[:, 1], np.repeat(range(8), 4))


def test_programs():
    assert Items(1, 32, 128, True, 1).programs == 132  # an H100's, where no GPU is known
    small = Items(1, 2, 4, True, 1)
    assert (small.programs, small.one_each) == (8, True)
    unlooped = Items(1, 32, 128, True, 1, looped=False)
    assert (unlooped.programs, unlooped.one_each) == (4096, True)
