"""Counters in global memory, by which CTAs of a launch wait for results of others.

A CTA may wait only for CTAs that come before it in the grid, and those must wait for none. CTAs
start in the order of the grid, so all that it waits for run or have finished when it starts.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

_INDEX = plgpu.Layout.WG_SPLAT(())


def count(counters: Any, index: Any, *, by_tma: bool) -> None:
    """``counters[index] += 1``, once per warpgroup, after what it has written.

    All threads must have passed a barrier of the warpgroup since their writes, or since they have
    waited for copies to global memory; ``plgpu.wait_smem_to_gmem`` has one. Kernels call it as an
    attribute of this module, so that tests can replace it.

    Args:
      counters: int32, in global memory.
      index: int32 scalar.
      by_tma: whether TMA has written it (from Hopper on), or threads have.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _INDEX))
    def add(_, counters, index):
        utils.inline_ptx(
            f"""{{
            .reg .pred elected;
            .reg .b32 thread;
            .reg .b64 place;
            mov.u32 thread, %tid.x;
            and.b32 thread, thread, 127;
            setp.eq.u32 elected, thread, 0;
            mad.wide.u32 place, $1, 4, $0;
            {_fence(by_tma)}
            @elected red.release.gpu.global.add.u32 [place], 1;
            }}""",
            utils.memref_ptr(counters),
            index.registers.flat[0],
            has_side_effects=True,
        )

    add(counters, index)


def wait_for(counters: Any, index: Any, least: Any, *, by_tma: bool) -> None:
    """Waits until ``counters[index] >= least``; later copies read what was written before.

    Kernels call it as an attribute of this module, so that tests can replace it.

    Args:
      counters: int32, in global memory.
      index: int32 scalar.
      least: int32 scalar.
      by_tma: whether TMA reads it (from Hopper on), or threads do.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _INDEX, _INDEX))
    def wait(_, counters, index, least):
        utils.inline_ptx(
            f"""{{
            .reg .pred early;
            .reg .b32 counted;
            .reg .b64 place;
            mad.wide.u32 place, $1, 4, $0;
            again:
            ld.acquire.gpu.global.u32 counted, [place];
            setp.lt.u32 early, counted, $2;
            @early bra again;
            {_fence(by_tma)}
            }}""",
            utils.memref_ptr(counters),
            index.registers.flat[0],
            least.registers.flat[0],
            has_side_effects=True,
        )

    wait(counters, index, least)


def _fence(by_tma: bool) -> str:
    """Between the threads' accesses and TMA's."""
    return "fence.proxy.async;" if by_tma else ""
