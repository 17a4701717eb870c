"""The sm80 kernels compiled for an A100: registers, spills and shared memory."""

from __future__ import annotations

import compiled_programs as compiled
import pytest
from compiled_calls import run_for_ampere

FRESH, CARRIED, EVERYTHING = {"carried": False}, {}, {"full": True, "dropout": True}
# Bytes that are stored or loaded; few of them inside of the loops.
SPILLS = (
    ("forward", (64,), FRESH, 0),
    ("forward", (96,), FRESH, 24),
    ("forward", (128,), CARRIED, 0),
    ("forward", (128,), FRESH | EVERYTHING, 0),
    ("forward", (192, 128), FRESH, 0),
    ("forward", (256,), FRESH | EVERYTHING, 0),
    ("backward", (64,), FRESH, 200),
    ("backward", (128,), CARRIED, 208),
    ("backward", (128,), FRESH | {"deterministic": True}, 276),
    ("backward", (192, 128), FRESH, 0),
    ("backward", (256,), {"full": True}, 576),
    ("backward", (64,), {"mods": "score+mask"}, 976),
    # Without a mask one loop visits all tiles.
    ("backward", (64,), FRESH | {"causal": False}, 120),
    ("backward", (128,), FRESH | {"causal": False}, 92),
    ("backward", (256,), FRESH | {"causal": False}, 360),
)
# Of the gated delta rule, that of gradients alone, which has no loop.
LINEAR = "chunks", "forward", "output", "last", "states", "first_gradient", "gradients"
LINEAR_SPILLS = 340
GROUPED = ("product", "transposed", "gradient")


@pytest.mark.cuda_compiler
def test_registers():
    """One process compiles all, and separates what the assembler reports of each."""
    printed = run_for_ampere(
        "from compiled_calls import compile_call\n"
        "from pallas_kernels import mosaic_sm80\n"
        f"for half, dims, options, _ in {SPILLS}:\n"
        "    print('====', flush=True)\n"
        "    local = mosaic_sm80(deterministic=options.pop('deterministic', False))\n"
        "    compile_call(local, 'a100', half, *dims, shape=(1, 4, 2), **options)\n"
        "from compiled_calls import compile_grouped\n"
        "from pallas_kernels.mosaic.sm80 import grouped\n"
        f"for name in {GROUPED}:\n"
        "    print('====', flush=True)\n"
        "    compile_grouped(grouped, 'a100', name)\n"
        "print('====', flush=True)\n"
        "from compiled_calls import compile_linear\n"
        "from pallas_kernels.linear.sm80 import operation\n"
        "compile_linear(operation, 'a100')\n"
    )
    *reports, of_linear = printed.split("====\n")[1:]
    seen = compiled.ptxas(of_linear)
    assert seen.kernels == {f"gated_delta_rule_{name}" for name in LINEAR}
    assert seen.spills <= LINEAR_SPILLS, seen
    for name, report in zip(GROUPED, reports[len(SPILLS) :], strict=True):
        assert "'sm_80'" in report
        assert compiled.ptxas(report).spills == 0, name
    for (half, *call, spilled), report in zip(SPILLS, reports[: len(SPILLS)], strict=True):
        assert "'sm_80'" in report
        seen = compiled.ptxas(report)
        assert seen.kernels == {f"burst_{half}"}
        assert seen.spills <= spilled, (half, call, seen)
