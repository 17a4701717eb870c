"""JAX 0.11 lowers Mosaic GPU kernels in less time; the kernels are the same.

Its layout inference sorts values by their printed operations. For each one MLIR numbers the whole
module again, 16 to 48 % of the time. With the numbers of one module kept, the texts are the same.
JAX 0.12 does not sort.
"""

from __future__ import annotations

import functools
import io
import types
from typing import Any
from unittest import mock

from jax.experimental.mosaic.gpu import constraints, layout_inference
from jaxlib.mlir import ir


class _Operation:
    """An operation that prints itself with the numbers of its module."""

    def __init__(self, operation, numbers_of):
        self.operation, self.numbers_of = operation, numbers_of

    def __str__(self):
        text = io.StringIO()
        self.operation.print(state=self.numbers_of(_outermost(self.operation)), file=text)
        return text.getvalue()


def _outermost(operation):
    while (parent := operation.parent) is not None:
        operation = getattr(parent, "operation", parent)
    return operation


def install():
    """From here on; the numbers are valid while variables are sorted, which changes no module."""
    compute, name = constraints.compute_transitively_equal_vars, layout_inference.ValueSite.__str__

    def compute_with_numbers(system):
        numbers_of = functools.lru_cache(maxsize=1)(ir.AsmState)

        def name_with_numbers(site):
            named: Any = types.SimpleNamespace(type=site.type, index=site.index)
            named.operation = _Operation(site.operation, numbers_of)
            return name(named)

        with mock.patch.object(layout_inference.ValueSite, "__str__", name_with_numbers):
            return compute(system)

    constraints.compute_transitively_equal_vars = compute_with_numbers
