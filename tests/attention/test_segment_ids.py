"""Segment ids whose padding is not 0. test_fuzz.py draws calls with them."""

import jax.numpy as jnp
import numpy as np
import pytest

from burst_jax.attention.segment_ids import check_ids, with_padding_zero


@pytest.mark.parametrize("padding_id", [-(2**31), -1, 0, 3, 2**31 - 1])
def test_only_padding_becomes_zero_and_documents_stay_apart(padding_id):
    ids = np.asarray([*range(5), 2**31 - 2, padding_id], np.int32)
    for x in (ids, jnp.asarray(ids)):
        new = with_padding_zero("segment_ids", check_ids("segment_ids", x, padding_id), padding_id)
        assert isinstance(new, type(x))
        assert new.dtype == np.int32
        assert new.min() >= 0
        np.testing.assert_array_equal(new == 0, ids == padding_id)
        np.testing.assert_array_equal(new[:, None] == new, ids[:, None] == ids)
