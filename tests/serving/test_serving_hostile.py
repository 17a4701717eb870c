"""Hostile saved caches, sizes that no memory has, and a generator shared by threads."""

from __future__ import annotations

import dataclasses
import json
import threading
from functools import partial
from types import SimpleNamespace

import hostile
import jax
import numpy as np
import pytest
from hostile import INTEGERS, VALUES, check, check_all
from served_models import CONFIG, WINDOWS, models, prompts_of

from burst_jax.errors import shown
from burst_jax.serving import Generator, memory
from burst_jax.serving.sampling import Sampling
from burst_jax.training import checkpoint_files

PROMPTS = prompts_of([9, 5])
ANY = set(VALUES)
POSITIVE = INTEGERS | {"missing", "null"}
# Counts may be 0.
COUNTS = POSITIVE - {"zero"}
FIELDS = {
    "extra.facts": ANY,
    "extra.facts.batch": ANY,
    "extra.capacities": ANY,
    "extra.capacities.0": ANY,
    "extra.capacities.0.0": INTEGERS,
    "extra.capacities.0.1": ANY,
    "extra.capacity_of": ANY,
    "extra.capacity_of.0": ANY - {"zero"},
    "extra.heads": ANY,
    "extra.filled": ANY,
    "extra.filled.next_position": ANY,
    "extra.filled.used": COUNTS,
    "extra.filled.generated": COUNTS,
    "extra.filled.holes": ANY - {"true"},
    "extra.lengths": ANY,
    "extra.lengths.1": ANY,
}
ALSO = {
    "extra.capacities.0": ("capacities",), "extra.capacities.0.0": ("capacities",),
    "extra.capacities.0.1": ("capacities",),
    "extra.capacity_of.0": ("capacity_of",), "extra.lengths.1": ("lengths",),
    "extra.facts": ("not a cache", "another model"),
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    config = dataclasses.replace(CONFIG, layer_pattern=WINDOWS)
    return Generator(models(config, {"seq": 1}, "contiguous")[0], max_length=64, batch=2)


@pytest.mark.slow
def test_saved_caches(server, tmp_path):
    """Records with any value and a hash that is right."""
    list(server.generate(PROMPTS, 3))
    folder = tmp_path / "cache"
    server.save_cache(folder)
    file = folder / "0" / "record.json"
    valid = json.loads(file.read_bytes().splitlines()[0])

    def results():
        for case in hostile.json_cases(valid, FIELDS, ALSO):
            if case.name.endswith("deep-list"):
                continue  # A record that is no JSON is a checkpoint's, of which this is one kind.
            text = case.content + b"\n"
            file.write_bytes(text + checkpoint_files._hash_bytes(text).encode() + b"\n")
            yield check(
                case.name, lambda: server.load_cache(folder), ("cache", *case.names),
                rejected=case.rejected,
            )  # fmt: skip

    with hostile.unchanged(tmp_path, file):
        check_all(results(), 300)


NUMBERS = [10**5000, -1, 0, 2.5, True, None, "1", float("nan"), [1], 2**31, 2**62]


def test_sizes(server, monkeypatch):
    """Sizes that are no numbers, or that no memory has; none is allocated."""
    model = models(CONFIG, {"seq": 1}, "contiguous")[0]
    monkeypatch.setattr(memory, "_host_memory", lambda: 2**33)

    def results():
        for value in NUMBERS:
            name = shown(value)
            for key in ("max_length", "batch"):
                sizes = {"max_length": 64, "batch": 1} | {key: value}
                yield check(
                    f"{key} {name}", partial(Generator, model, **sizes), (key,), rejected=True
                )
            for key in ("temperature", "top_p", "top_k"):
                options = {"temperature": 1.0, key: value}
                yield check(f"{key} {name}", partial(Sampling, **options), (key,))
            call = partial(server.generate, PROMPTS, value)
            yield check(f"tokens {name}", call, ("max_new_tokens",), rejected=True)
        for length in (10**9, 2**29, 10**8):
            call = partial(Generator, model, max_length=length)
            yield check(f"max_length {length}", call, ("max_length",), rejected=True)

    check_all(results(), 50)


def test_free_memory_of_cpus_is_shared(server, monkeypatch):
    devices = jax.devices()[:4]
    monkeypatch.setattr(server._steps, "mesh", SimpleNamespace(local_devices=devices))
    monkeypatch.setattr(memory, "_host_memory", lambda: 4 * server.cache_bytes)
    server._check_memory()
    monkeypatch.setattr(memory, "_host_memory", lambda: 4 * server.cache_bytes - 4)
    with pytest.raises(
        ValueError, match=r"and each of 4 CPU devices has 0\.0 GiB left: use a small"
    ):
        server._check_memory()
    monkeypatch.undo()
    assert 2**25 < (memory._host_memory() or 0) < 2**50


def test_threads_that_share_a_generator_never_mix_tokens(server):
    """Each thread gets its own tokens, or the error that another has taken over the cache."""
    prompts = [prompts_of([9, 5], seed) for seed in range(3)]
    want = [np.stack(list(server.generate(each, 8))) for each in prompts]
    results, start = [[] for _ in prompts], threading.Barrier(len(prompts))

    def run(index):
        start.wait()
        for _ in range(5):
            try:
                for step, tokens in enumerate(server.generate(prompts[index], 8)):
                    results[index].append(bool((tokens == want[index][step]).all()))
            except ValueError as error:
                results[index].append("has taken over the cache" in str(error))
            except BaseException as error:
                results[index].append(repr(error))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each and set(each) == {True} for each in results), results
