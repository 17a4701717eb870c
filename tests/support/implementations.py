"""The implementations of local attention that tests run, in tiles small enough for small arrays."""

from __future__ import annotations

import functools

import jax
import pytest
from conftest import IMPLEMENTATION, ON_GPU, REPLAYING
from jax.experimental.mosaic.gpu import utils

from pallas_kernels import (
    MOSAIC_SM80,
    MOSAIC_SM90,
    REFERENCE,
    Tiles,
    triton,
    xla,
)
from pallas_kernels.pallas_triton.configs import TritonConfig

# Most of these tests' time is compile time, for programs that run once. Not so on a GPU, nor of
# other projects' cases at their own sizes.
QUICK = None if ON_GPU or REPLAYING else {"xla_backend_optimization_level": 0}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK)


SMALL = TritonConfig(16, 32, num_warps=4, num_stages=1)
IMPLEMENTATIONS = {
    "reference": REFERENCE,
    "xla": xla.in_tiles(Tiles(16, 24)),
    "triton": triton(interpret=not ON_GPU, config=SMALL),
}
if IMPLEMENTATION == "triton":
    # In the tiles that ship for this GPU, too.
    capability = float(jax.devices()[0].compute_capability)
    IMPLEMENTATIONS["triton_shipped"] = triton(compute_capability=capability)
if IMPLEMENTATION == "mosaic_sm80":
    if float(jax.devices()[0].compute_capability) >= 9:
        # A newer GPU runs Ampere's instructions, if Mosaic GPU is told to compile them.
        utils._infer_arch = lambda: (8, 0)
    IMPLEMENTATIONS["mosaic_sm80"] = MOSAIC_SM80
if IMPLEMENTATION == "mosaic_sm90":
    IMPLEMENTATIONS["mosaic_sm90"] = MOSAIC_SM90
# What tests of local attention are about: on a GPU the kernels that were named.
UNDER_TEST = [x for x in IMPLEMENTATIONS if not ON_GPU or x.startswith(IMPLEMENTATION)]


def each_of(names):
    """Parametrizes a test by ``name``. Triton's kernels run one variant of the gradient alone."""
    slow = {"triton"} - {IMPLEMENTATION}
    marks = {name: [pytest.mark.slow] if name in slow else [] for name in names}
    return pytest.mark.parametrize("name", [pytest.param(x, marks=marks[x]) for x in names])
