"""What finds wrong operands of products, on lines as ptxas of CUDA 13.0 made them."""

from __future__ import annotations

import pytest
from register_operands import wrong_operands

NAME = "gated_delta_rule_channel_gradients"
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R140, gdesc[UR32].tnspB, R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def printed(*instructions):
    """A kernel's machine code; labels end with a colon."""
    lines = [f"{NAME}_mosaic_gpu_kernel:"]
    for i, text in enumerate(instructions):
        lines.append(text if text.endswith(":") else f"        /*{16 * i:04x}*/  {text} ;")
    return "\n".join(lines)


@pytest.mark.parametrize("by", [
    "IMAD.MOV.U32 R142, RZ, RZ, 0x3f803f80",
    "@!P0 LDS.128 R140, [R2+UR4]",
    "LDSM.16.M88.4 R137, [R3]",
    "HMMA.16816.F32.BF16 R138, R4, R8, R12",
    "SHFL.IDX PT, R143, R7, RZ, 0x1f",
    "IMAD.WIDE R139, R4, 0x4, R6",
])  # fmt: skip
def test_an_operand_in_flight_is_not_overwritten(by):
    """One of R140 to R143, before the wait."""
    (found,) = wrong_operands(printed(PRODUCT, by, WAIT))
    assert found.kernel.startswith(NAME)
    assert (found.product, found.by) == (f"0000 {PRODUCT}", f"0010 {by.removeprefix('@!P0 ')}")
    assert not wrong_operands(printed(PRODUCT, WAIT, by))


@pytest.mark.parametrize("by", [
    "IMAD.MOV.U32 R144, RZ, RZ, RZ", "STS [R140], R3", "ISETP.NE.AND P0, PT, R140, RZ, PT",
    "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR36].tnspB, R24",
])  # fmt: skip
def test_other_instructions_overwrite_nothing(by):
    """Other registers, operands that are read, and products."""
    assert not wrong_operands(printed(PRODUCT, by, WAIT))


def test_a_wait_leaves_the_youngest_groups():
    """A product without gsb0 is of the group of the next one that has it."""
    older, younger = PRODUCT.replace("140", "60"), PRODUCT.removesuffix(", gsb0")
    by = ("MOV R62, R0", "MOV R141, R0")
    end = PRODUCT.replace("140", "80")
    code = printed(older, younger, end, "WARPGROUP.DEPBAR.LE gsb0, 0x1", *by, WAIT)
    assert [found.by.split(" ", 1)[1] for found in wrong_operands(code)] == [by[1]]


def test_a_loop_overwrites_operands_of_its_last_step():
    """The product is after what overwrites its operand, and in flight when the next step begins."""
    loop = ".L_x_1:", "MOV R142, R0", PRODUCT, "@P0 BRA `(.L_x_1)", WAIT
    (found,) = wrong_operands(printed(*loop))
    assert found.by == "0010 MOV R142, R0"
    assert not wrong_operands(printed(*loop[:3], WAIT, *loop[3:]))


def test_an_operand_is_no_float32_number():
    """Nothing wrote what the first product reads, before it."""
    constant, stale = "IMAD.MOV.U32 R142, RZ, RZ, 0x3f803f80", "FFMA R142, R22, R104, R142"
    (found,) = wrong_operands(printed(stale, PRODUCT, WAIT, constant, PRODUCT, WAIT))
    assert found.product == f"0010 {PRODUCT}"
    assert found.by == f"0000 {stale}"
    assert not wrong_operands(printed(stale, constant, PRODUCT, WAIT, PRODUCT, WAIT))


def test_kernels_must_have_been_printed():
    """No machine code is not code without mistakes."""
    with pytest.raises(AssertionError, match="no machine code was printed"):
        wrong_operands("ptxas info: 0 bytes gmem")
