"""What a benchmark measured, and the JSON file that it is kept in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax


@dataclasses.dataclass
class Row:
    """One implementation on one case; NaN is what was not measured.

    Attributes:
      case: what was computed.
      peer: by whom.
      forward: TFLOP/s of the forward pass.
      both: TFLOP/s of the forward and the backward pass together.
      error: the largest relative one of out, dq, dk, dv.
      note: why it was not timed, or empty.
      memory: GiB per device of the forward and the backward pass.
    """

    case: str
    peer: str
    forward: float = math.nan
    both: float = math.nan
    error: float = math.nan
    note: str = ""
    memory: float = math.nan

    def agrees(self, limit: float, *programs: dict[str, float]) -> bool:
        """Keeps the largest error, and whether it is within the limit; else a note says which.

        Each program's errors are counted: two may compute the same result.
        """
        errors = [pair for errors in programs for pair in errors.items()]
        worst, self.error = max(errors, key=lambda pair: pair[1])
        if self.error > limit:
            self.note = f"wrong: {worst}; not timed"
        return not self.note


@dataclasses.dataclass
class Results:
    """One run of the benchmark.

    Attributes:
      device: the GPU, as its driver names it.
      jax: JAX's version.
      dtype: of query, key and value.
      matmul: TFLOP/s of a large matmul, the most that any implementation could reach.
      devices: how many of them were used together; rates are per device.
      rows: in the order in which they were measured.
    """

    device: str
    jax: str
    dtype: str
    matmul: float
    devices: int = 1
    rows: list[Row] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes them as JSON, numbers that are not finite as null."""

        def plain(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        record = {name: plain(value) for name, value in vars(self).items()}
        record["rows"] = [
            {name: plain(value) for name, value in vars(row).items()} for row in self.rows
        ]
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        with replacing(path) as file:
            file.write_text(text)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads what :meth:`save` wrote.

        Raises:
          ValueError: there is no such file, or it holds something else.
        """
        try:
            record = json.loads(path.read_text())
            loaded = _typed(cls, {**record, "rows": [_typed(Row, row) for row in record["rows"]]})
            if not loaded.rows or not loaded.matmul > 0:
                raise ValueError("it needs rows and a matmul above 0")
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{path} is no result of the benchmark ({reason}); "
                f"write it anew with: python -m burst_jax.bench kernels --json {path} (or ring)"
            ) from error
        return loaded


def gib(program: jax.stages.Compiled) -> float:
    """GiB per device of arguments, results and what lies between; NaN if the backend says none."""
    memory = program.memory_analysis()
    if memory is None:
        return math.nan
    parts = (getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))
    return 2**-30 * (sum(parts) - memory.alias_size_in_bytes)


def _typed(cls: Any, record: dict[str, Any]) -> Any:
    """An instance of a dataclass whose every field is in ``record``, and of its type."""
    values = {}
    for field in dataclasses.fields(cls):
        value = record[field.name]
        if field.type == "float":
            if value is None:
                value = math.nan
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isinf(value):
                raise ValueError(f"{field.name} is {value!r}: it must be a number or null")
            value = float(value)
        elif field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{field.name} is {value!r}: it must be an integer")
        elif field.type == "str" and not isinstance(value, str):
            raise ValueError(f"{field.name} is {value!r}: it must be a string")
        values[field.name] = value
    return cls(**values)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside ``path``, which takes its place at the end.

    If the body raises, ``path`` is as it was and nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
