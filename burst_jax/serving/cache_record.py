"""What a saved cache's record holds next to the arrays, checked before anything is read by it."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np

from burst_jax.errors import check_integer, shown
from burst_jax.serving.cache import EMPTY, CacheCapacity, FillState
from burst_jax.training.checkpoint_files import Record


@dataclasses.dataclass(frozen=True)
class CacheRecord:
    """The host state of a saved cache.

    Attributes:
      facts: all but the mesh that the values in the cache depend on, by name.
      capacities: the distinct capacities.
      capacity_of: for each layer the index of its capacity.
      heads: key heads of the arrays, copies included.
      filled: how far the cache is filled.
      lengths: tokens of each sequence.
    """

    facts: dict[str, Any]
    capacities: list[CacheCapacity]
    capacity_of: list[int]
    heads: int
    filled: FillState
    lengths: list[int]

    def as_json(self) -> dict[str, Any]:
        """What :meth:`parse` reads."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return found | {
            "capacities": [dataclasses.astuple(capacity) for capacity in self.capacities],
            "filled": dataclasses.asdict(self.filled),
        }

    @classmethod
    def parse(cls, where: str, extra: Any) -> Self:
        """What :meth:`as_json` has made.

        Args:
          where: the file, for messages.
          extra: a JSON object with any values.

        Raises:
          ValueError: a value of another type or out of range.
        """

        def integer(name: str, value: Any, least: int, most: int = EMPTY - 1) -> int:
            return check_integer(f"{where}: {name}", value, least, most)

        def listed(name: str, value: Any, kind: type = list) -> Any:
            if not isinstance(value, kind) or not value:
                what = "an object" if kind is dict else "a list"
                raise ValueError(f"{where}: {name} is {shown(value)}: it must be {what}, not empty")
            return value

        capacities = []
        for index, each in enumerate(listed("capacities", extra.get("capacities"))):
            name = f"capacities[{index}]"
            if len(listed(name, each)) != 3:
                raise ValueError(f"{where}: {name} is {shown(each)}: it must be three numbers")
            window, slots, devices = each
            window = None if window is None else integer(name, window, 1, 2**31 - 1)
            capacities.append(
                CacheCapacity(window, integer(name, slots, 1), integer(name, devices, 1))
            )
        capacity_of = [
            integer("capacity_of", each, 0, len(capacities) - 1)
            for each in listed("capacity_of", extra.get("capacity_of"))
        ]
        filled = listed("filled", extra.get("filled"), dict)
        names = [field.name for field in dataclasses.fields(FillState)]
        if sorted(filled) != sorted(names) or not isinstance(filled["holes"], bool):
            raise ValueError(
                f"{where}: filled is {shown(filled)}: it must have the integers and the boolean "
                f"{', '.join(names)}"
            )
        last = integer("filled.next_position", filled["next_position"], 1)
        for name in ("used", "generated"):
            integer(f"filled.{name}", filled[name], 0)
        return cls(
            listed("facts", extra.get("facts"), dict),
            capacities,
            capacity_of,
            integer("heads", extra.get("heads"), 1),
            FillState(**filled),
            [integer("lengths", x, 0, last) for x in listed("lengths", extra.get("lengths"))],
        )

    def check_arrays(self, where: str, saved: Record, head_dim: int) -> None:
        """Raises ValueError unless the saved arrays have the shapes that this describes.

        Args:
          where: the file, for messages.
          saved: the checkpoint's record.
          head_dim: features of a head of the generator's model.
        """
        batch, expected = len(self.lengths), {}
        sizes = [capacity.slots * capacity.devices for capacity in self.capacities]
        for index, size in enumerate(sizes):
            expected[f"slots.{index}.0"], expected[f"slots.{index}.1"] = (size,), (batch, size)
        for layer, index in enumerate(self.capacity_of):
            shape = batch, sizes[index], self.heads, head_dim
            expected |= {f"{kind}.{layer}": shape for kind in ("keys", "values")}
        for name, shape in expected.items():
            found = saved.arrays.get(name)
            if found is None or found[0] != shape:
                raise ValueError(
                    f"{where}: arrays has {name} with shape {shown(found and found[0])}, and "
                    f"capacities, capacity_of, heads and lengths describe {shape}"
                )

    def check_slots(self, where: str, slots: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Raises ValueError unless these slots of each capacity are those of the lengths.

        Args:
          where: the folder, for messages.
          slots: for each capacity ``(cache positions [C], present [B, C])``.
        """
        for index, (capacity, (positions, present)) in enumerate(
            zip(self.capacities, slots, strict=True)
        ):
            held = positions[present.any(0)]
            counts = present.sum(1)
            wrong = (
                not ((present == 0) | (present == 1)).all()
                # The last token of a prompt, and each generated one, is held by some sequence.
                or held.min(initial=0) < 0
                or held.max(initial=-1) + 1 != self.filled.next_position
                or len(np.unique(held)) < len(held)
                or (counts > self.lengths).any()
                or (not capacity.is_ring_buffer and (counts != self.lengths).any())
            )
            if wrong:
                raise ValueError(
                    f"{where}: slots.{index} holds other tokens than lengths and "
                    "filled.next_position describe"
                )
