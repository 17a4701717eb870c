"""Results of a benchmark, and their JSON file."""

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

from burst_jax.json_files import parse_object, read_bounded


@dataclasses.dataclass
class Row:
    """The measurement of one implementation on one case; NaN where nothing was measured.

    Attributes:
      case: name of the case.
      peer: name of the implementation or strategy.
      forward: TFLOP/s of the forward pass.
      both: TFLOP/s of the forward and the backward pass together.
      error: largest relative error of out, dq, dk and dv; inf if one is not finite.
      note: why it was not timed, or empty.
      memory: GiB per device of the forward and the backward pass.
      mhz: the GPUs' median SM clock in the forward and the backward pass.
      watts: the mean power of a GPU in the forward and the backward pass.
    """

    case: str
    peer: str
    forward: float = math.nan
    both: float = math.nan
    error: float = math.nan
    note: str = ""
    memory: float = math.nan
    mhz: float = math.nan
    watts: float = math.nan

    def agrees(self, limit: float, *programs: dict[str, float]) -> bool:
        """Whether all errors are within the limit; records the largest, and its name if it is not.

        Args:
          limit: largest accepted relative error.
          *programs: for each program its relative errors by the name of the result.
        """
        errors = [pair for errors in programs for pair in errors.items()]
        # NaN compares false with everything: it must count as the largest error.
        worst, error = max(errors, key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])
        self.error = math.inf if math.isnan(error) else error
        if not self.error <= limit:
            self.note = f"wrong: {worst}; not timed"
        return not self.note


@dataclasses.dataclass
class Results:
    """The results of one run of a benchmark.

    Attributes:
      device: name of the GPU, from its driver.
      jax: JAX's version.
      dtype: name of the dtype of query, key and value.
      matmul: TFLOP/s of a large matmul, the upper bound of all implementations.
      devices: number of GPUs; rates are per GPU.
      rows: the measurements, in order.
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
        save_json(record, path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads what :meth:`save` wrote.

        Raises:
          ValueError: the file does not exist, or does not contain benchmark results.
        """

        def number(value: Any) -> Any:
            return math.nan if value is None else value

        try:
            record = parse_object(read_bounded(path, name="it"), "it")
            rows = [Row(**{name: number(x) for name, x in row.items()}) for row in record["rows"]]
            loaded = cls(**{name: number(x) for name, x in record.items()} | {"rows": rows})
            if not loaded.rows or not loaded.matmul > 0:
                raise ValueError("it needs rows and a matmul above 0")
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{path} is not a result of a benchmark ({reason}); "
                f"write it with: python -m benchmarks kernels --json {path} (or ring)"
            ) from error
        return loaded


def gib(program: jax.stages.Compiled) -> float:
    """GiB per device of a program: arguments, results and temporaries.

    NaN if the backend does not report it.
    """
    memory = program.memory_analysis()
    if memory is None:
        return math.nan
    parts = (getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))
    return 2**-30 * (sum(parts) - memory.alias_size_in_bytes)


def save_json(record: dict[str, Any], path: Path) -> None:
    """Writes a record as JSON, or leaves the old file as it was."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write_text(text)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which replaces ``path`` when the body ends.

    If the body raises, ``path`` is unchanged and the temporary file is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
