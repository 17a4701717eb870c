"""Sizes that no memory has, and a generator shared by threads."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hostile import check, check_all
from served_models import CONFIG, WINDOWS, models, prompts_of

from burst_jax.errors import shown
from burst_jax.serving import Generator, memory
from burst_jax.serving.sampling import Sampling

PROMPTS = prompts_of([9, 5])


@pytest.fixture(scope="module")
def server():
    config = dataclasses.replace(CONFIG, layer_pattern=WINDOWS)
    return Generator(models(config, {"seq": 1}, "contiguous")[0], max_length=64, batch=2)


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
