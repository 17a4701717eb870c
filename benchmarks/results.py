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
    """What was measured of one implementation on one case; NaN stands for no measurement.

    Attributes:
      case: name of the case.
      peer: name of the implementation.
      forward: TFLOP/s of the forward pass.
      both: TFLOP/s of the forward and the backward pass together.
      error: largest relative error of out, dq, dk and dv.
      note: why the implementation was not timed, or empty.
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
        """Whether all errors are within the limit; keeps the largest, and notes its name if not.

        Args:
          limit: the largest relative error that is right.
          *programs: for each program its relative errors by the result's name; two programs may
            compute a result of one name.
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
      device: name of the GPU, as its driver gives it.
      jax: JAX's version.
      dtype: name of the dtype of query, key and value.
      matmul: TFLOP/s of a large matmul, the most that any implementation could reach.
      devices: how many GPUs were used together; rates are per GPU.
      rows: what was measured, in the order of measuring.
    """

    device: str
    jax: str
    dtype: str
    matmul: float
    devices: int = 1
    rows: list[Row] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes the results as JSON; a number that is not finite is written as null."""

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
          ValueError: there is no such file, or it holds no results of a benchmark.
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
                f"write it anew with: python -m benchmarks kernels --json {path} (or ring)"
            ) from error
        return loaded


def gib(program: jax.stages.Compiled) -> float:
    """GiB per device that a program takes, for its arguments, its results and everything between.

    NaN if the backend does not tell.
    """
    memory = program.memory_analysis()
    if memory is None:
        return math.nan
    parts = (getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))
    return 2**-30 * (sum(parts) - memory.alias_size_in_bytes)


def _typed[Record: (Row, Results)](cls: type[Record], record: dict[str, Any]) -> Record:
    """An instance of the dataclass ``cls`` with the values of ``record``.

    Raises:
      KeyError: a field is missing.
      ValueError: a value is not of its field's type.
    """
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
    """A path beside ``path`` to write to; the new file replaces ``path`` when the body ends.

    If the body raises, ``path`` stays as it was, and the new file is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
