"""Saving a cache, and loading it on the same mesh and on others."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import in_tiers
from flax import nnx
from meshes import mesh_of
from served_models import CONFIG, LIKE_GPT, Watched, models, prompts_of

from burst_jax.models import Decoder
from burst_jax.serving import Generator
from burst_jax.serving.cache import EMPTY
from burst_jax.training import CheckpointError, Checkpoints

ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)
PROMPTS = prompts_of([9, 5])
# From zigzag with max_length 64 to another mesh, layout and max_length. The first one keeps its
# arrangement; in the second, two devices have a copy of the only key head, with windows.
SAVED = [
    ({"data": 2, "seq": 2}, {"seq": 2}, "zigzag", 64, {"num_layers": 1}),
    ({"tensor": 2, "seq": 2}, {"tensor": 2, "seq": 3}, "striped", 80, LIKE_GPT),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", in_tiers(SAVED, lambda case: f"{case[0]}-{case[1]}", SAVED[:1]))
def test_generation_continues_from_a_saved_cache(case, tmp_path):
    before, after, layout, max_length, config = case
    config, chunk = dataclasses.replace(CONFIG, **config), 16
    first = Watched(
        models(config, before, "zigzag")[1], max_length=64, batch=2, prefill_chunk=chunk
    )
    second = Watched(
        models(config, after, layout)[1], max_length=max_length, batch=2, prefill_chunk=chunk
    )
    # The second save replaces the first.
    for prompts in (prompts_of([16, 9]), prompts_of([31, 17])):
        list(first.generate(prompts, 5))
        first.save_cache(tmp_path / "cache")
    second.load_cache(tmp_path / "cache")
    more = prompts_of([16, 16], 1)
    want, got = (np.stack(list(x.generate(more, 8, extend=True))) for x in (first, second))
    np.testing.assert_array_equal(got, want)
    for ours, theirs in zip(second.logits, first.logits[-8:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def test_a_rearranged_cache_is_filled_evenly(tmp_path):
    """Loaded tokens are packed; the next generated token starts a new slot on device 0."""
    one = Generator(models(ONE_LAYER, {"seq": 1}, "contiguous")[0], max_length=64)
    list(one.generate(prompts_of([7]), 4))
    one.save_cache(tmp_path / "cache")
    two = Generator(models(ONE_LAYER, {"seq": 2}, "contiguous")[1], max_length=64)
    two.load_cache(tmp_path / "cache")
    assert dataclasses.astuple(two._filled) == (11, 6, 0, False)
    assert two._cache is not None
    (slots,) = two._cache.slots
    half = len(slots.cache_positions) // 2
    positions = [np.asarray(slots.cache_positions[start : start + 7]) for start in (0, half)]
    np.testing.assert_array_equal(positions[0], [0, 2, 4, 6, 8, 10, EMPTY])
    np.testing.assert_array_equal(positions[1], [1, 3, 5, 7, 9, EMPTY, EMPTY])


def test_caches_that_cannot_be_loaded(tmp_path):
    folder = tmp_path / "cache"
    model = Decoder(ONE_LAYER, rngs=nnx.Rngs(1), mesh=mesh_of(seq=1), implementation="xla")
    other = Generator(model, max_length=64, batch=2)
    with pytest.raises(ValueError, match="there is no cache to save: it is empty before the"):
        other.save_cache(folder)
    with pytest.raises(FileNotFoundError, match="has no cache: Generator"):
        other.load_cache(folder)
    served = models(ONE_LAYER, {"seq": 1}, "contiguous")[0]
    server = Generator(served, max_length=64, batch=2)
    list(server.generate(PROMPTS, 3))
    server.save_cache(folder)
    whole = np.stack(list(other.generate(PROMPTS, 3)))
    list(other.generate(PROMPTS, 1))
    with pytest.raises(ValueError, match="is of another model or batch: sum of the weights' bits"):
        other.load_cache(folder)
    # A failed load leaves the cache unchanged.
    rest = np.stack(list(other.generate(whole[1][:, None], 1, extend=True)))
    np.testing.assert_array_equal(rest[0], whole[2])
    with pytest.raises(ValueError, match="batch is 2 there and 1 here"):
        Generator(served, max_length=64).load_cache(folder)
    with pytest.raises(ValueError, match="has a sequence of 12 tokens, and max_length is 9: make"):
        Generator(served, max_length=9, batch=2).load_cache(folder)
    with Checkpoints(tmp_path / "run") as run:
        run.save(3, {"w": jnp.ones(2)})
    for call in (server.save_cache, server.load_cache):
        with pytest.raises(ValueError, match="has checkpoints that are not a cache: use a folder"):
            call(tmp_path / "run")
    largest = max(folder.rglob("ocdbt*/d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(reversed(largest.read_bytes())))
    with pytest.raises(CheckpointError, match="content does not match its hash"):
        server.load_cache(folder)
