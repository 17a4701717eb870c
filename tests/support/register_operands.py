"""Whether machine code gives a product what it reads in registers.

The left operand of a Hopper matrix product may be registers. They must be written before it, and
may not change before it has been waited for. ptxas before CUDA 13.3 moves the write of a constant
behind the first of two products that read it: the first one reads what was in the register, or,
if it is late enough, the constant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+):")
_ENTRY = re.compile(r"^(\w+)_mosaic_gpu_kernel:")
# Their first operand is no register that they write.
_WITHOUT_RESULT = frozenset(
    (
        *("ST", "STS", "STG", "STL", "STSM", "RED", "BAR", "SYNCS", "UTMALDG", "UTMASTG", "UBLKCP"),
        "HGMMA",
    )
)
_LOADS = frozenset(("LD", "LDS", "LDG", "LDL", "LDC"))
# They make a float32 number, where an operand has two of 16 bits.
_FLOAT32 = frozenset(("FFMA", "FADD", "FMUL", "FMNMX", "MUFU", "I2F", "I2FP"))


class Wrong(NamedTuple):
    """A wrong operand: the kernel, the product, and what wrote the register.

    That is an instruction while the product is in flight, or the last one before it, if its result
    is a float32 number.
    """

    kernel: str
    product: str
    by: str


class _Instruction(NamedTuple):
    text: str
    name: str
    operands: list[str]
    label: str | None = None

    @property
    def left_operand(self) -> range:
        """The registers of a product's left operand; none for other instructions."""
        found = re.match(r"R(\d+)", self.operands[1]) if self.name.startswith("HGMMA") else None
        return range(int(found[1]), int(found[1]) + 4) if found else range(0)

    @property
    def results(self) -> range:
        """The registers that it writes, but for a product's."""
        parts = self.name.split(".")
        if parts[0] in _WITHOUT_RESULT:
            return range(0)
        for operand in self.operands[:2]:
            if found := re.fullmatch(r"R(\d+)(\.\w+)*", operand):
                return range(int(found[1]), int(found[1]) + _width(parts))
            if not re.fullmatch(r"U?P(T|\d+)", operand):
                break
        return range(0)


def _width(parts: list[str]) -> int:
    """The number of registers of a result."""
    if parts[0] in _LOADS:
        return 4 if "128" in parts else 2 if "64" in parts else 1
    if parts[0] == "LDSM":
        return int(parts[-1]) if parts[-1].isdigit() else 1
    if parts[0] in ("HMMA", "IMMA"):
        return 4
    return 2 if "WIDE" in parts or parts[0] in ("CS2R", "DADD", "DMUL", "DFMA") else 1


def wrong_operands(text: str) -> list[Wrong]:
    """What is found in kernels that MOSAIC_GPU_DUMP_SASS=1 has printed.

    Raises:
      AssertionError: no kernel was printed.
    """
    kernels = _kernels(text)
    assert kernels, f"no machine code was printed: {text[-500:]!r}"
    return [x for kernel, code in kernels.items() for x in _of_kernel(kernel, code)]


def _kernels(text: str) -> dict[str, list[_Instruction]]:
    kernels: dict[str, list[_Instruction]] = {}
    code: list[_Instruction] = []
    for line in text.splitlines():
        if found := _ENTRY.match(line):
            # One name may have several kernels.
            code = kernels[f"{found[1]} {len(kernels)}"] = []
        elif found := _LABEL.match(line):
            code.append(_Instruction(line, "", [], found[1]))
        elif found := _LINE.search(line):
            operands = [operand.strip() for operand in found[3].split(",")]
            code.append(_Instruction(f"{found[1]} {found[2]} {found[3]}", found[2], operands))
    return kernels


def _of_kernel(kernel: str, code: list[_Instruction]) -> list[Wrong]:
    pairs = dict.fromkeys([*_overwritten(code), *_unwritten(code)])
    return [Wrong(kernel, *pair) for pair in pairs]


def _unwritten(code: list[_Instruction]) -> Iterator[tuple[str, str]]:
    """Products and what wrote their operands last, where that is no operand."""
    last: dict[int, _Instruction] = {}
    for instruction in code:
        for register in instruction.left_operand:
            by = last.get(register)
            if by is not None and by.name.split(".")[0] in _FLOAT32:
                yield instruction.text, by.text
        last.update(dict.fromkeys(instruction.results, instruction))


def _overwritten(code: list[_Instruction]) -> list[tuple[str, str]]:
    """Products and what overwrites their operands while they are in flight."""
    places = {x.label: i for i, x in enumerate(code) if x.label}
    found: dict[tuple[str, str], None] = {}

    def scan(first: int, last: int, flight: _Flight) -> None:
        """Follows ``code[first:last]``, and loops once more."""
        for i in range(first, last):
            instruction = code[i]
            for product in flight.pass_by(instruction):
                found[product, instruction.text] = None
            target = places.get(_target(instruction), last)
            if target < i and first == 0 and flight:
                scan(target, i, flight.copy())

    scan(0, len(code), _Flight([], {}))
    return list(found)


def _target(instruction: _Instruction) -> str:
    found = re.search(r"`\((\.L_\w+)\)", instruction.text)
    return found[1] if found and instruction.name.startswith("BRA") else ""


class _Flight(NamedTuple):
    """Registers that products in flight read, with their products.

    Attributes:
      groups: by group that can be waited for, oldest first.
      group: of the group that is not complete.
    """

    groups: list[dict[int, str]]
    group: dict[int, str]

    def __bool__(self) -> bool:
        return bool(self.groups or self.group)

    def copy(self) -> _Flight:
        """A copy that changes by itself."""
        return _Flight(list(self.groups), dict(self.group))

    def pass_by(self, instruction: _Instruction) -> list[str]:
        """The products whose operands the instruction overwrites."""
        operands = instruction.operands
        if instruction.name.startswith("HGMMA"):
            self.group.update(dict.fromkeys(instruction.left_operand, instruction.text))
            if operands[-1] == "gsb0":
                self.groups.append(dict(self.group))
                self.group.clear()
            return []
        if instruction.name.startswith("WARPGROUP.DEPBAR"):
            remain = int(operands[1], 16)
            del self.groups[: max(0, len(self.groups) - remain)]
            return []
        read = [*self.groups, self.group]
        return [group[r] for r in instruction.results for group in read if r in group]
