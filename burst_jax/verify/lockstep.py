"""Runs a loss on one device and on a mesh in lockstep, and finds the steps that differ.

Both programs are the same operations, traced from the same code. Each step on the mesh gets the
values that one device computed, permuted to the layout. So errors do not propagate: a step whose
result differs is itself wrong. An array of the mesh may be in the layout's order or in natural
order (a table of positions, for example): both are right until one step combines them.

Then every such step is tried: the mesh's program runs with all earlier steps corrected, and again
with this one corrected too. If the results are the same, the step is harmless, otherwise a cause.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from burst_jax.verify.program import Known, Program, Step, Value

# Relative RMS that rounding of one step explains, by the narrowest floating dtype of its arrays.
_ROUNDING = {"bfloat16": 2e-2, "float16": 3e-3}
_ROUNDING_ELSE = 3e-5
# A step that changes the results by less is harmless.
_HARMLESS = 1e-6
# At most this many lines are tried alone.
_MOST_TRIES = 12


# Runs of dimensions (first, end, lead), each ``[lead, T]`` in one, that are in the layout's order.
Choice = tuple[tuple[int, int, int], ...]


class Ordered(NamedTuple):
    """The shape of an array, and which runs of its dimensions are in the layout's order."""

    shape: tuple[int, ...]
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Order:
    """The permutation of the layout, applied to arrays of any shape.

    Attributes:
      batch: B.
      index: ``[1, T]``, or ``[B, T]`` if sequences differ in their order: place i of the layout
        holds token ``index[b, i]`` of sequence b.
    """

    batch: int
    index: np.ndarray

    @property
    def length(self) -> int:
        """T."""
        return self.index.shape[1]

    def sequences(self, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """``(first, end, lead)`` of each run of dimensions that is ``[lead, T]`` in one."""
        single = [(i, i + 1, 1) for i, size in enumerate(shape) if size == self.length > 1]
        tokens = self.batch * self.length
        single += [(i, i + 1, self.batch) for i, size in enumerate(shape) if size == tokens > 1]
        single = [run for run in sorted(set(single)) if self._splits(shape, run) is not None]
        if single or self.length == 1:
            return single[:3]
        # Chunks of tokens, [B, n, T / n]. The first dimension is the batch.
        for first in range(1, len(shape)):
            for end in range(first + 2, len(shape) + 1):
                run = first, end, 1
                if (
                    shape[first] > 1
                    and math.prod(shape[first:end]) == self.length
                    and self._splits(shape, run) is not None
                ):
                    return [run]
        return []

    def is_shared(self, shape: tuple[int, ...]) -> bool:
        """Whether an array has one order for sequences that differ in theirs, like an arange."""
        return (
            len(self.index) > 1
            and any(size in (self.length, self.batch * self.length) for size in shape)
            and not self.sequences(shape)
        )

    def expected(self, shape: tuple[int, ...], inputs: Sequence[Ordered]) -> Choice:
        """The runs that should be in the layout's order, for a result that is in no known order.

        A dimension of T or B T elements may be a vocabulary or features instead of tokens. An input
        of the same rank decides, by the same dimensions; without one ``[B, T, ...]`` is assumed.
        """
        runs = self.sequences(shape)
        alike = [each for each in inputs if len(each.shape) == len(shape)]
        alike.sort(key=lambda each: each.shape != shape)
        for each in alike:
            if set(runs) & set(self.sequences(each.shape)):
                other = [run for run in runs if run not in self.sequences(each.shape)]
                return tuple(sorted({*(run for run in runs if run in each.choice), *other}))
        first = [run for run in runs if run[:2] == (1, 2) and shape[0] == self.batch]
        return tuple(first or runs)

    def _splits(
        self, shape: tuple[int, ...], run: tuple[int, int, int]
    ) -> tuple[int, int, int, int] | None:
        """Sizes of what is before the batch, of the batch, between it and the tokens, and after.

        None if sequences differ in their order and no dimension can be the batch.
        """
        first, end, lead = run
        head, tail = math.prod(shape[:first]), math.prod(shape[end:])
        if len(self.index) == 1:
            return head * lead, 1, 1, tail
        if lead == self.batch:
            return head, lead, 1, tail
        places = [i for i in range(first) if shape[i] == self.batch]
        if not places:
            return None
        place = 0 if places[0] == 0 else places[-1]
        return math.prod(shape[:place]), self.batch, math.prod(shape[place + 1 : first]), tail

    def choices(self, shape: tuple[int, ...]) -> list[Choice]:
        """Which runs of dimensions may be in the layout's order: from all of them to none."""
        runs = self.sequences(shape)
        counts = range(len(runs), -1, -1)
        return [choice for k in counts for choice in itertools.combinations(runs, k)]

    def apply(self, x: np.ndarray, choice: Choice) -> np.ndarray:
        """``x`` with these runs of dimensions permuted from natural order to the layout."""
        for run in choice:
            splits = self._splits(x.shape, run)
            assert splits is not None
            before, batch, between, after = splits
            parts = x.reshape(before, batch, between, self.length, after)
            index = self.index.reshape(1, batch, 1, self.length, 1)
            x = np.take_along_axis(parts, index, 3).reshape(x.shape)
        return x


@dataclasses.dataclass(eq=False)
class Origin:
    """A step whose result differs although its inputs are right.

    Attributes:
      step: on the mesh.
      index: its index in the mesh's program.
      right: what its results should be, by output.
      mesh: what they were.
      natural: of its inputs, what was in natural order next to inputs in the layout's: the step or
        the name of the input that it comes from.
      numbers: constants of the step that differ, on the mesh and on one device.
      number: of attention steps, how many came before.
    """

    step: Step
    index: int
    right: dict[int, np.ndarray]
    mesh: dict[int, np.ndarray]
    natural: list[Step | str]
    numbers: list[tuple[Any, Any]]
    number: int


def agrees(mesh: np.ndarray, one: np.ndarray, rounding: float) -> bool:
    """Whether two arrays differ by rounding at most; other kinds of numbers must be equal."""
    if mesh.shape != one.shape:
        return False
    if not np.issubdtype(one.dtype, np.inexact) and one.dtype.kind != "V":
        return bool(np.array_equal(mesh, one))
    if one.dtype.kind == "c":
        return agrees(mesh.real, one.real, rounding) and agrees(mesh.imag, one.imag, rounding)
    mesh, one = mesh.astype(np.float64), one.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(mesh[~finite], one[~finite], equal_nan=True):
        return False
    gap = np.linalg.norm(mesh[finite] - one[finite])
    return bool(gap <= rounding * np.linalg.norm(one[finite]))  # NaN is no agreement.


def _largest_gap(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> float:
    """The largest relative RMS between results."""
    gaps = [
        np.linalg.norm(x.astype(np.float64) - y) / max(np.linalg.norm(y.astype(np.float64)), 1e-30)
        for x, y in zip(before, after, strict=True)
    ]
    return float(np.max(gaps))


def host(x: Any) -> np.ndarray:
    """An array on the host; a random key as its bits."""
    if jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


class Lockstep:
    """Two programs, run step by step.

    Args:
      one: the program of one device.
      mesh: the program of the mesh.
      order: the layout's permutation.
      names: names of the inputs.
      meshes: that of one device, and the mesh.
    """

    def __init__(
        self,
        one: Program,
        mesh: Program,
        order: Order,
        names: Sequence[str],
        meshes: tuple[Mesh, Mesh],
    ) -> None:
        self.one, self.mesh, self.order, self.names = one, mesh, order, names
        self.meshes = meshes
        signatures = [[(s.name, s.place, len(s.outputs)) for s in p.steps] for p in (one, mesh)]
        matcher = difflib.SequenceMatcher(None, *signatures, autojunk=False)
        self.pairs = {
            block.b + i: block.a + i
            for block in matcher.get_matching_blocks()
            for i in range(block.size)
        }

    def causes(self, one_inputs: Sequence[Any], mesh_inputs: Sequence[Any]) -> list[Origin]:
        """The steps that make the results of the mesh differ from one device's."""
        origins = self.origins(one_inputs, mesh_inputs)
        if len(origins) < 2:
            return origins
        # A line that runs in every layer is reported once.
        found: dict[Any, Origin] = {}
        tried, before = 0, None
        for index, origin in enumerate(origins):
            calls = origin.number if origin.step.is_attention else None
            line = origin.step.place, origin.step.name, calls
            if line in found:
                before = None
                continue
            if tried == _MOST_TRIES:
                found[line] = origin
                continue
            tried += 1
            before = before or self.corrected(mesh_inputs, origins[:index])
            after = self.corrected(mesh_inputs, origins[: index + 1])
            if not _largest_gap(before, after) <= _HARMLESS:  # NaN is not harmless.
                found[line] = origin
            before = after
        return list(found.values())

    def origins(self, one_inputs: Sequence[Any], mesh_inputs: Sequence[Any]) -> list[Origin]:
        """All steps whose result differs although their inputs are equal."""
        ones = _values(self.one, one_inputs)
        values = _values(self.mesh, mesh_inputs)
        # Where an array in natural order comes from, by its number.
        natural: dict[int, Step | str] = {}
        self.ordered: dict[int, Ordered] = {}
        pairs = zip(self.mesh.inputs, self.one.inputs, self.names, strict=True)
        for mine, theirs, name in pairs:
            self._note(natural, mine, host(values[mine]), host(ones[theirs]), f"input {name}")
        for number, value in self.mesh.constants:
            x = host(value)
            if any(len(choice) for choice in self.order.choices(x.shape)) and self._varies(x):
                self._of_constant(natural, number, x)
        origins: list[Origin] = []
        last_one, last_mesh = _last_uses(self.one), _last_uses(self.mesh)
        done, attention = 0, 0
        for index, step in enumerate(self.mesh.steps):
            partner = self.pairs.get(index)
            _run(step, values, self.meshes[1])
            if partner is not None:
                while done <= partner:
                    _run(self.one.steps[done], ones, self.meshes[0])
                    # Freed once neither this nor a later step reads them.
                    _free(self.one, last_one, done, ones, keep=done == partner)
                    done += 1
                self._compare(index, self.one.steps[partner], ones, values, natural, origins)
                if origins and origins[-1].index == index:
                    origins[-1].number = attention
            else:
                self._inherit(step, natural)
            attention += step.is_attention
            _free(self.mesh, last_mesh, index, values)
        return origins

    def _compare(
        self,
        index: int,
        partner: Step,
        ones: dict[int, Any],
        values: dict[int, Any],
        natural: dict[int, Step | str],
        origins: list[Origin],
    ) -> None:
        step = self.mesh.steps[index]
        numbers = [x for x in step.inputs if isinstance(x, int)]
        roots = [natural[x] for x in numbers if x in natural]
        rounding = _rounding([values.get(x) for x in (*numbers, *step.outputs)])
        right: dict[int, np.ndarray] = {}
        mesh: dict[int, np.ndarray] = {}
        wrong = False
        for mine, theirs in zip(step.outputs, partner.outputs, strict=True):
            if np.shape(values[mine]) != np.shape(ones[theirs]):
                continue  # Residuals of attention, in the form of the mesh.
            x, y = host(values[mine]), host(ones[theirs])
            choices = self.order.choices(x.shape)
            fits = [c for c in choices if agrees(x, self.order.apply(y, c), rounding)]
            if fits:
                choice = fits[0]
            else:
                wrong, known = True, (self.ordered[n] for n in numbers if n in self.ordered)
                choice = self.order.expected(x.shape, list(known))
            self.ordered[mine] = Ordered(x.shape, choice)
            if len(choices) > 1 or self.order.is_shared(x.shape):
                is_natural = bool(fits) and not choice
            else:
                # A part of the sequence, x[:, 1:], is corrected to that of the natural order.
                is_natural = self._is_part(step, values) if not fits else any(
                    n in natural and np.shape(values[n]) == x.shape for n in numbers
                )  # fmt: skip
            if is_natural:
                natural[mine] = roots[0] if roots else step
            right[mine], mesh[mine] = self.order.apply(y, choice), x
            values[mine] = _put(right[mine], values[mine])
        if wrong:
            both = zip(step.inputs, partner.inputs, strict=False)
            known = [
                (x.value, y.value) for x, y in both if isinstance(x, Known) and isinstance(y, Known)
            ]
            known = [(x, y) for x, y in known if np.ndim(x) == np.ndim(y) == 0 and x != y]
            origins.append(Origin(step, index, right, mesh, roots, known, 0))

    def _is_part(self, step: Step, values: dict[int, Any]) -> bool:
        """Whether an operation without a sequence dimension in its result has one in an input."""
        shapes = [np.shape(values[x]) for x in step.inputs if isinstance(x, int)]
        own = step.is_attention or step.name == "shard_map"
        return not own and any(map(self.order.sequences, shapes))

    def _note(
        self, natural: dict[int, Step | str], number: int, x: np.ndarray, y: np.ndarray, name: str
    ) -> None:
        choices = self.order.choices(x.shape)
        fits = [c for c in choices if agrees(x, self.order.apply(y, c), 0.0)]
        if fits:
            self.ordered[number] = Ordered(x.shape, fits[0])
        if fits and not fits[0] and (len(choices) > 1 or self.order.is_shared(x.shape)):
            natural[number] = name

    def _of_constant(self, natural: dict[int, Step | str], number: int, x: np.ndarray) -> None:
        """A captured array is in natural order if one device has the same one."""
        for _, value in self.one.constants:
            if agrees(x, host(value), 0.0):
                natural[number] = f"a captured array of shape {x.shape}"

    def _varies(self, x: np.ndarray) -> bool:
        return not agrees(x, self.order.apply(x, self.order.choices(x.shape)[0]), 0.0)

    def _inherit(self, step: Step, natural: dict[int, Step | str]) -> None:
        roots = [natural[x] for x in step.inputs if isinstance(x, int) and x in natural]
        if roots and not step.is_attention:
            natural |= dict.fromkeys(step.outputs, roots[0])

    def corrected(self, inputs: Sequence[Any], origins: Sequence[Origin]) -> list[np.ndarray]:
        """Results of the mesh's program with the right results at these steps."""
        values, last = _values(self.mesh, inputs), _last_uses(self.mesh)
        right = {origin.index: origin.right for origin in origins}
        for index, step in enumerate(self.mesh.steps):
            _run(step, values, self.meshes[1])
            for number, x in right.get(index, {}).items():
                values[number] = _put(x, values[number])
            _free(self.mesh, last, index, values)
        return [host(_read(x, values)) for x in self.mesh.results]


def _values(program: Program, inputs: Sequence[Any]) -> dict[int, Any]:
    return dict(program.constants) | dict(zip(program.inputs, inputs, strict=True))


def _read(x: Value, values: dict[int, Any]) -> Any:
    return x.value if isinstance(x, Known) else values[x]


def _run(step: Step, values: dict[int, Any], mesh: Mesh) -> None:
    out = step.run(*(_on_devices(_read(x, values), mesh) for x in step.inputs))
    values |= zip(step.outputs, out, strict=True)


def _on_devices(x: Any, mesh: Mesh) -> Any:
    """``x``, replicated over the mesh if it is an array on other devices."""
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) == mesh.size:
        return x
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def _last_uses(program: Program) -> dict[int, int]:
    """The index of the last step that reads each value; results are never freed."""
    last: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        last |= dict.fromkeys(
            (*step.outputs, *(x for x in step.inputs if isinstance(x, int))), index
        )
    return last | {x: len(program.steps) for x in program.results if isinstance(x, int)}


def _free(
    program: Program, last: dict[int, int], index: int, values: dict[int, Any], keep: bool = False
) -> None:
    step = program.steps[index]
    outputs = set(step.outputs) if keep else set()
    for x in {*step.outputs, *(x for x in step.inputs if isinstance(x, int))} - outputs:
        if last[x] == index:
            values.pop(x, None)


def _rounding(arrays: Sequence[Any]) -> float:
    names = {jax.numpy.dtype(x.dtype).name for x in arrays if _is_float(x)}
    return max((_ROUNDING.get(name, _ROUNDING_ELSE) for name in names), default=0.0)


def _is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating)


def _put(x: np.ndarray, like: Any) -> Any:
    """``x`` on the devices of ``like``."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return like
    return jax.device_put(x, like.sharding)
