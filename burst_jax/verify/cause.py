"""Names the cause of a difference, from the steps that :mod:`burst_jax.verify.lockstep` found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from burst_jax.attention.watch import Place, WatchedCall
from burst_jax.jax_compat import source_lines
from burst_jax.layouts.layout import Layout
from burst_jax.layouts.parse import parse_layout
from burst_jax.verify.calls import options_that_differ, sequence_axes_of, where
from burst_jax.verify.lockstep import Origin
from burst_jax.verify.program import Step, equations

_SHIFTS = (
    *("slice", "dynamic_slice", "split", "gather"),
    *("concatenate", "pad", "rev", "dynamic_update_slice"),
)
_RUNNING = (
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
    *("sort", "argsort", "argmax", "argmin", "top_k", "reduce_window", "reduce_window_sum"),
)
# Random keys may be drawn anywhere, their bits are what a token gets.
_RANDOM = (
    "random_bits",
    "random_gamma_impl",
    "threefry2x32",
    "rng_bit_generator",
    "random_fold_in",
)
# Sums that a whole loss may be off by.
_CLOSE = 1e-3


# Primitives that reduce over devices.
_SUMS = {"psum", "psum2", "psum_invariant", "pmean", "all_gather", "all_reduce"}


class Sentences:
    """Turns origins into sentences.

    Args:
      mesh: the mesh.
      layout: its layout.
      calls: attention calls on the mesh.
      one: attention calls on one device.
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        calls: Sequence[WatchedCall],
        one: Sequence[WatchedCall],
    ) -> None:
        self.mesh, self.layout, self.calls, self.one = mesh, layout, calls, one
        # Remedies: in a balanced layout no function restores the order inside of a model.
        self.restore = "restore natural order for it (from_layout)"
        self.positions = "the batch's positions (burst_jax.positions)"
        self.before = "before to_layout"
        if not layout.is_fixed:
            self.restore = "use zigzag, and restore natural order for it (from_layout)"
            self.positions = "the batch's positions"
            self.before = "before documents are placed"

    def all(self, origins: Sequence[Origin]) -> list[str]:
        """One sentence for each line of user code."""
        return list(dict.fromkeys(self.of(origin) for origin in origins))

    def of(self, origin: Origin) -> str:
        """The sentence of one origin."""
        step = origin.step
        line = f"at {step.place}" if step.place is not None else "in the library's code"
        if step.is_attention:
            return self.attention(origin)
        if any(not np.isfinite(x).all() for x in origin.mesh.values() if x.dtype.kind == "f"):
            return (
                f"the result {line} is not finite on the mesh: a layer of this library found "
                "positions in another order than its tokens (an arange?), or a value overflowed; "
                "pass the batch's positions to the layer"
            )
        if step.name == "shard_map":
            return self.shard_map(origin, line)
        root = origin.natural[0] if origin.natural else None
        # What depends on no input reads no tokens, though linspace concatenates and tril compares.
        if (
            isinstance(root, Step)
            and (root.of_inputs or root.name in _RANDOM)
            and (sentence := self.by_index(root)) is not None
        ):
            return sentence
        if root is not None:
            return self.natural(root, step, line)
        if origin.numbers:
            mesh, one = origin.numbers[0]
            return (
                f"{step.name} {line} uses the number {mesh} on the mesh and {one} on one device: a "
                "result must not depend on the number of devices or on a device's share of tokens"
            )
        sentence = self.by_index(step)
        return sentence or f"{step.name} {line} gives other values on the mesh from the same inputs"

    def by_index(self, step: Step) -> str | None:
        """What a step does with tokens by their index; None if it does not."""
        line = f"at {step.place}" if step.place is not None else "in the library's code"
        if step.name in _RANDOM:
            return (
                f"random numbers {line} are drawn by the index of a token, and the "
                f"{self.layout} layout has other tokens there: use dropout_rate of "
                "burst_attention, which depends on positions, or compare without dropout"
            )
        if step.name == "conv_general_dilated":
            return (
                f"a convolution {line} mixes neighbouring tokens by index, which are not "
                f"neighbours in the {self.layout} layout: {self.restore}, or use the contiguous "
                "layout"
            )
        if step.name in _SHIFTS:
            return self.shift(step, line)
        if step.name in _RUNNING:
            return (
                f"{step.name} {line} runs over the tokens by index, which is not their order in "
                f"the {self.layout} layout: compute it where batches are made, {self.before}"
            )
        if step.name in ("scan", "while"):
            return (
                f"a loop {line} runs over the tokens by index, or carries a value from one to the "
                f"next, which is not their order in the {self.layout} layout: {self.restore}"
            )
        return None

    def natural(self, root: Step | str, step: Step, line: str) -> str:
        """An array in natural order was combined with tokens in the layout's order."""
        if isinstance(root, str):
            what = root.removeprefix("input ")
            return (
                f"{step.name} {line} combines tokens in the {self.layout} layout with {what}, "
                "which is in natural order: index it with the batch's positions"
            )
        source = f" at {root.place}" if root.place is not None else ""
        if root.name == "iota":
            made = "counts tokens by index (an arange)"
        elif root.of_inputs:
            made = f"({root.name}) is in natural order"
        else:
            made = "depends on the index of a token alone (like a linspace or a mask)"
        return (
            f"an array made{source} {made} and is combined {line} with tokens in the "
            f"{self.layout} layout, whose index is not their position: use {self.positions} for "
            "RoPE, position embeddings and masks, and let burst_jax.check_positions check them in "
            "training"
        )

    def shift(self, step: Step, line: str) -> str:
        """A slice or a concatenation that reads tokens by their index."""
        types = [x.aval.dtype for x in step.equation.outvars] if step.equation is not None else []
        if types and all(np.issubdtype(dtype, np.integer) for dtype in types):
            return (
                f"{step.name} {line} shifts or picks token ids by index, after the "
                f"permutation to the {self.layout} layout: the next id in the array is not the "
                f"next token; shift targets in natural order, {self.before}"
            )
        return (
            f"{step.name} {line} reads other tokens by index (a shift, or x[:, -1]), and in "
            f"the {self.layout} layout other tokens are there: {self.restore}, or select tokens by "
            "the batch's positions"
        )

    def attention(self, origin: Origin) -> str:
        """Attention on the same inputs gives another result."""
        call, one = self._pair(origin)
        if call is None:
            return "an attention call gives other values on the mesh from the same inputs"
        name = where(call, self.calls)
        if not sequence_axes_of(call):
            reads = "attends" if call.name == "attention" else "runs"
            return (
                f"{name} has seq_axis=None, so it {reads} as if its tokens were in natural order, "
                f"but they are in the {self.layout} layout: pass the seq_axis of the batch"
            )
        own = getattr(call.arguments, "layout", None)
        if own is not None and parse_layout(own) != self.layout:
            return (
                f"{name} has layout={own!r}, but its tokens are in the {self.layout} layout: pass "
                f"layout={self.layout!r} there"
            )
        if one is not None and (different := options_that_differ(call, one)):
            return f"{name} is another one than on one device: {'; '.join(different)}"
        return (
            f"{name} gives other values on the mesh from the same inputs, with the same arguments: "
            "an array argument (segment ids, positions, lengths) is in another order than the "
            "tokens, or an implementation is wrong; try implementation='xla'"
        )

    def shard_map(self, origin: Origin, line: str) -> str:
        """A ``shard_map`` of the caller."""
        step = origin.step
        inside = equations(step.equation.params["jaxpr"]) if step.equation is not None else []
        names = {equation.primitive.name for equation in inside}
        start = f"the shard_map {line} gives other values on the mesh from the same inputs"
        if names & set(_RANDOM):
            return f"{start}: it draws random numbers on each device by the index of a token"
        lines = {Place(*line) for equation in inside for line in source_lines(equation)}
        calls = [c for c in self.calls if c.manual and c.place in lines]
        local = [c for c in calls if not sequence_axes_of(c)]
        if local and local[0].name != "attention":
            return (
                f"{start}: {where(local[0], self.calls)} has no axis_name, so it runs over the "
                "tokens of its own device only; pass axis_name"
            )
        if local:
            return (
                f"{start}: {where(local[0], self.calls)} is local_attention, which attends to the "
                "keys of its own device only; use ring_attention"
            )
        for call in calls:
            own = getattr(call.arguments, "layout", self.layout)
            if parse_layout(own) != self.layout:
                return (
                    f"{start}: {where(call, self.calls)} has layout={own!r}, but its tokens are in "
                    f"the {self.layout} layout"
                )
        if all(x.ndim == 0 for x in origin.right.values()):
            return start + self._scalar(origin, inside)
        if "iota" in names and "axis_index" not in names:
            return (
                f"{start}: it counts tokens from 0 on every device (an arange); pass it the "
                "batch's positions, sharded like the tokens"
            )
        if not calls and "dot_general" in names and "ppermute" not in names:
            return f"{start}: it attends, or sums, over the tokens of one device only"
        return (
            f"{start}: it computes from one device's tokens what needs those of all devices (a "
            "mean, a shift, a maximum), or counts them by index"
        )

    def _scalar(self, origin: Origin, inside: list[Any]) -> str:
        """What is wrong with a loss that a ``shard_map`` of these equations reduces."""
        numbers = [e.primitive.name for e in inside if all(x.aval.shape == () for x in e.outvars)]
        sums = [index for index, name in enumerate(numbers) if name in _SUMS]
        (right,), (mesh,) = list(origin.right.values())[:1], list(origin.mesh.values())[:1]
        ratio = float(mesh) / float(right) if right else math.nan
        sizes = self.mesh.shape
        for axis, size in [*sizes.items(), ("all axes", math.prod(sizes.values()))]:
            if size > 1 and abs(ratio / size - 1) < _CLOSE:
                return (
                    f": {size} times the right value, the number of devices along {axis}; it sums "
                    "over devices what is a mean already, or the same value twice"
                )
            if size > 1 and abs(ratio * size - 1) < _CLOSE:
                return (
                    f": 1/{size} of the right value, the number of devices along {axis}; it "
                    "averages over devices what must be summed (pmean instead of psum)"
                )
        if not _SUMS & {equation.primitive.name for equation in inside}:
            return ": it is the value of one device alone; sum over the devices with lax.psum"
        if sums and "div" not in numbers[: sums[-1]]:
            return (
                ": it sums over devices before it divides, so something before that sum is wrong: "
                "check positions, the layout and the masks of each call in it"
            )
        return (
            ": it averages each device's own mean, and devices have different numbers of tokens "
            "that count; sum losses and weights over all devices (lax.psum), then divide"
        )

    def _pair(self, origin: Origin) -> tuple[WatchedCall | None, WatchedCall | None]:
        """The watched calls of an attention step, on the mesh and on one device."""
        found = []
        for calls in (self.calls, self.one):
            here = [call for call in calls if _same(call.place, origin.step.place)]
            # In a loop over layers one line makes several calls.
            number = origin.number % len(calls) if calls else 0
            exact = calls[number] if calls and calls[number] in here else None
            found.append(exact or next(iter(here), None))
        return found[0], found[1]


def _same(a: Place | None, b: Place | None) -> bool:
    return a is not None and a == b
