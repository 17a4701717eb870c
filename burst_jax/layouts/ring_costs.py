"""What a ring on packed documents costs, for the search of a placement and for reports of work."""

from __future__ import annotations

import dataclasses

from burst_jax.errors import as_number, shown


@dataclasses.dataclass(frozen=True)
class RingCosts:
    """The modelled time of a device, in causal pairs (query, key) of all heads.

    The starting values were fitted to programs of one device of eight on an H100, with 32 query and
    8 KV heads of 128, forward and backward, where 1 ms is 8.7e6 pairs (docs/performance.md).

    Attributes:
      zone: pairs in the time that a gathered zone of any size takes: kernels that are launched one
        after the other leave a part of the GPU idle as each ends.
      zone_token: pairs in the time that each token of the gathered zone takes, besides its work.
      gathered_token: pairs in the time that each token of all zones together takes to be sorted and
        its gradients to be sent back.
      send: pairs in the time that one token takes to be sent by a device. Sends are overlapped with
        the device's work.
      step: pairs in the time that one ring step of another layout takes besides its work.
      step_token: pairs in the time that one token of a shard takes in every such step with work:
        float32 results are read and written.
      tile: tokens of a tile. A chunk of a split document wastes about one tile of queries.
      limit: a placement with a ring and more than this multiple of the mean work on a device is
        chosen only if there is no other; ``math.inf`` compares time alone.
    """

    zone: float = 4.4e6
    zone_token: float = 360.0
    gathered_token: float = 60.0
    send: float = 800.0
    step: float = 7e5
    step_token: float = 500.0
    tile: int = 128
    limit: float = 1.15

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least, value = field.name == "limit", getattr(self, field.name)
            if not as_number(field.name, value, f"a number, at least {least:d}") >= least:
                raise ValueError(
                    f"{field.name} is {shown(value)}: it must be a number, at least {least:d}"
                )

    def time(self, work: float, zone: int, num_shards: int) -> float:
        """The modelled time of a device in a balanced layout, in pairs.

        Args:
          work: pairs that the device computes.
          zone: tokens of the gathered zone; 0 sends nothing.
          num_shards: number of shards on the ring.
        """
        if not zone:
            return work
        tokens = self.zone_token + num_shards * self.gathered_token
        return work + self.zone + tokens * zone + self._exposed(work, zone, num_shards)

    def ring_time(self, work: float, shard: int, num_shards: int, busy: int) -> float:
        """The modelled time of a device in a layout whose whole shards rotate, in pairs.

        Args:
          work: pairs that the device computes.
          shard: tokens of a shard.
          num_shards: number of shards on the ring.
          busy: number of ring steps in which the device has work.
        """
        steps = (num_shards - 1) * self.step + busy * self.step_token * shard
        return work + steps + self._exposed(work, shard, num_shards)

    def _exposed(self, work: float, tokens: int, num_shards: int) -> float:
        return max(0.0, (num_shards - 1) * self.send * tokens - work)
