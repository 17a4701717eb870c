"""Counters in global memory, by which CTAs of a launch wait for results of others.

A CTA may wait only for CTAs that come before it in the grid, and those must wait for none. CTAs
start in the order of the grid, so all that it waits for run or have finished when it starts.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

_INDEX = plgpu.Layout.WG_SPLAT(())


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _INDEX))
def count(_, counters: Any, index: Any) -> None:
    """``counters[index] += 1``, once per warpgroup, after the copies that it has waited for.

    After these copies the warpgroup must have passed a barrier; ``plgpu.wait_smem_to_gmem`` has
    one.
    """
    utils.inline_ptx(
        """{
        .reg .pred elected;
        .reg .b32 thread;
        .reg .b64 place;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 elected, thread, 0;
        mad.wide.u32 place, $1, 4, $0;
        fence.proxy.async;
        @elected red.release.gpu.global.add.u32 [place], 1;
        }""",
        utils.memref_ptr(counters),
        index.registers.flat[0],
        has_side_effects=True,
    )


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _INDEX, _INDEX))
def wait_for(_, counters: Any, index: Any, least: Any) -> None:
    """Waits until ``counters[index] >= least``; later copies read what was written before."""
    utils.inline_ptx(
        """{
        .reg .pred early;
        .reg .b32 counted;
        .reg .b64 place;
        mad.wide.u32 place, $1, 4, $0;
        again:
        ld.acquire.gpu.global.u32 counted, [place];
        setp.lt.u32 early, counted, $2;
        @early bra again;
        fence.proxy.async;
        }""",
        utils.memref_ptr(counters),
        index.registers.flat[0],
        least.registers.flat[0],
        has_side_effects=True,
    )
