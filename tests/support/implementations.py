"""The implementations of local attention that tests run, in tiles small enough for small arrays."""

from __future__ import annotations

import dataclasses
import functools

import interpreted_sm80
import jax
import jax.numpy as jnp
import pytest
from ampere import compile_as_ampere
from conftest import IMPLEMENTATION, ON_GPU, REPLAYING

from pallas_kernels import (
    MOSAIC_SM80,
    MOSAIC_SM90,
    REFERENCE,
    Tiles,
    mosaic_sm80,
    xla,
)
from pallas_kernels.mosaic.sm80.configs import BackwardConfig, ForwardConfig

# Most of these tests' time is compile time, for programs that run once. Not so on a GPU, nor of
# other projects' cases at their own sizes.
QUICK = None if ON_GPU or REPLAYING else {"xla_backend_optimization_level": 0}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


def _interpreted(kernels):
    """The sm80 kernels on a CPU."""

    def inside(function):
        def run(*args, **options):
            # A program that runs after the with block would find races between atomic additions.
            with interpreted_sm80.interpreted(detect_races=False):
                return function(*args, **options)

        return run

    of = kernels.forward, kernels.backward
    forward, backward = map(inside, of)
    return dataclasses.replace(kernels, forward=forward, backward=backward)


IMPLEMENTATIONS = {
    "reference": REFERENCE,
    "xla": xla.in_tiles(Tiles(16, 24)),
    "mosaic_sm80": _interpreted(mosaic_sm80(ForwardConfig(64, 32), BackwardConfig(64, 64))),
}
if IMPLEMENTATION == "mosaic_sm80":
    compile_as_ampere(IMPLEMENTATION)
    IMPLEMENTATIONS["mosaic_sm80"] = MOSAIC_SM80
if IMPLEMENTATION == "mosaic_sm90":
    IMPLEMENTATIONS["mosaic_sm90"] = MOSAIC_SM90
# What tests of local attention are about: on a GPU the kernels that were named.
UNDER_TEST = [x for x in IMPLEMENTATIONS if not ON_GPU or x.startswith(IMPLEMENTATION)]


def dtype_of(name):
    """The widest dtype that an implementation supports."""
    return jnp.dtype("bfloat16" if name.startswith("mosaic") else "float32")


def each_of(names):
    """Parametrizes a test by ``name``. Interpreted kernels take seconds to compile."""
    marks = {True: pytest.mark.slow, False: ()}
    cases = [
        pytest.param(name, marks=marks[name.startswith("mosaic") and not ON_GPU]) for name in names
    ]
    return pytest.mark.parametrize("name", cases)
