"""``Generator``: prompts in, tokens out."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import abc
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.layout import padded_length, positions
from burst_jax.models.decoder import Decoder
from burst_jax.refusals import check_integer
from burst_jax.serving.cache import BLOCK, Cache
from burst_jax.serving.model import ServedModel
from burst_jax.serving.sampling import Sampling
from burst_jax.serving.steps import Steps
from burst_jax.sharding import axes_size


@dataclasses.dataclass
class Filled:
    """How far the cache is filled.

    Attributes:
      place: the next place.
      used: slots of each device that are filled or taken by a round of blocks.
      dealt: tokens dealt in the last round of blocks; 0 is no round begun.
    """

    place: int = 0
    used: int = 0
    dealt: int = 0


class Generator:
    """Generates tokens with a decoder whose cache is split over the sequence axes of its mesh.

    The prompt goes through the ring in the model's layout (chunk by chunk, if asked). Its keys and
    values stay where they were computed. Each generated token takes one pass over the cache, on
    every device over its own part, and one exchange of partial results in each layer.

    With a :class:`burst_jax.models.DynamicRope` keys stay rotated as they were when they came, as
    in transformers.

    Weights are copied: each layer's by itself, in the dtype of the computation, whole over all mesh
    axes but the tensor axes. The model may be deleted afterwards.

    Args:
      model: a decoder on a mesh, like :func:`burst_jax.models.load` gives.
      max_length: tokens of a row at most, of all prompts and all generated ones.
      batch: rows; a multiple of the devices along the batch axes.
      prefill_chunk: tokens of a prompt that go through the ring at a time; None is all. Memory for
        activations grows with it.

    Attributes:
      cache_bytes: bytes of the cache on each device.
      seconds_to_first_token: of the last call of :meth:`generate`, None before.

    Raises:
      ValueError: a number below 1, a batch that the mesh does not divide, a model with adapters
        that are not merged, or a cache that does not fit into the devices' memory.
      NotImplementedError: a model with a pipeline.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_length: int,
        batch: int = 1,
        prefill_chunk: int | None = None,
    ) -> None:
        if not isinstance(model, Decoder):
            raise ValueError(f"model is a {type(model).__name__}: it must be a Decoder")
        self.max_length = check_integer("max_length", max_length, 1)
        self.batch = check_integer("batch", batch, 1)
        if prefill_chunk is not None:
            prefill_chunk = check_integer("prefill_chunk", prefill_chunk, 1)
        served = ServedModel(model)
        rows = axes_size(served.parts.mesh, served.parts.batch_axes)
        if batch % rows:
            raise ValueError(
                f"batch is {batch}, and {rows} devices along {served.parts.batch_axes} share its "
                f"rows: use a multiple of {rows}"
            )
        self._layout = dict(model.options).get("layout", "contiguous")
        self._devices = axes_size(served.parts.mesh, served.parts.token_axes)
        # Heads are exchanged inside a shard of the layout, which these devices split once more.
        exchanging = dict(model.options).get("head_parallel_axis")
        self._shards = self._devices // axes_size(served.parts.mesh, exchanging)
        self._chunk = prefill_chunk
        # A prompt is padded, and the last round of blocks may not be full.
        chunks = 1 if prefill_chunk is None else -(-self.max_length // prefill_chunk)
        padding = chunks * (self._step(-(-self.max_length // chunks)) + 1)
        capacity = self.max_length + padding + BLOCK * self._devices
        self._steps = Steps(served, self.batch, capacity, self._layout)
        config, tensor = served.config, axes_size(served.parts.mesh, served.parts.tensor_axes)
        slots = sum(self._steps.rooms[i].slots for i in self._steps.room_of)
        each = 2 * served.heads // tensor * config.head_dim * jnp.dtype(config.dtype).itemsize
        self.cache_bytes = self.batch // rows * slots * each
        self._refuse_too_large()
        self._cache: Cache = self._steps.allocate()
        self._filled = Filled()
        self._lengths = np.zeros(self.batch, np.int64)
        # Of rooms without a window; None: there are none.
        self._slots = next((x.slots for x in self._steps.rooms if not x.is_ring), None)
        self._samplers: dict[Sampling, Any] = {}
        # Of the generation that the cache belongs to.
        self._latest: object = None
        self.seconds_to_first_token: float | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Collection[int] = (),
        seed: int = 0,
        extend: bool = False,
    ) -> abc.Generator[np.ndarray]:
        """Tokens that follow the prompts, one of each row at a time.

        The cache is that of the generator. It is kept when the iterator ends or is dropped, so that
        a second call with ``extend`` goes on from there.

        Args:
          prompts: for each row of the batch the ids of its tokens; rows may differ in length.
          max_new_tokens: of each row.
          temperature: divides logits; 0 takes the most probable token.
          top_k: only this many of the most probable tokens, or None.
          top_p: only the most probable tokens that together have this probability, or None.
          stop_tokens: ids after which a row has ended.
          seed: of the random numbers, which depend on it, the row and the step alone.
          extend: whether the prompts continue the rows that the cache holds.

        Yields:
          int32 ``[batch]``: the next token of each row; -1 where a row has ended.

        Raises:
          ValueError: not one prompt a row, an empty prompt, ids that the vocabulary lacks, more
            tokens than ``max_length``, or numbers out of their range.
          NotImplementedError: ``extend`` with prompts of different lengths.
        """
        sampling = Sampling(temperature, top_k, top_p)
        count = check_integer("max_new_tokens", max_new_tokens, 1)
        rows = self._check_prompts(prompts, count, extend)
        stops = self._check_stops(stop_tokens)
        return self._generate(rows, count, sampling, stops, seed, extend)

    def reset(self) -> None:
        """Forgets all rows. A generation that has not ended cannot go on."""
        self._latest = None
        self._filled = Filled()
        self._lengths[:] = 0
        del self._cache
        self._cache = self._steps.allocate()

    def _generate(
        self,
        rows: list[np.ndarray],
        count: int,
        sampling: Sampling,
        stops: frozenset[int],
        seed: int,
        extend: bool,
    ) -> abc.Generator[np.ndarray]:
        start = time.perf_counter()
        if not extend and self._filled.place:
            self.reset()
        this = self._latest = object()
        key = jax.random.key(seed)
        logits = self._prefill(rows)
        ended = np.zeros(self.batch, bool)
        for step in range(count):
            chosen = self._choose(sampling, logits, key, step)
            tokens = np.asarray(chosen)
            if step == 0:
                self.seconds_to_first_token = time.perf_counter() - start
            shown = np.where(ended, -1, tokens).astype(np.int32)
            ended |= np.isin(tokens, list(stops))
            # The token is put into the cache before it is shown, so that a caller who stops here
            # leaves a cache that holds all that was shown.
            logits = self._decode(chosen)
            yield shown
            if ended.all():
                return
            if self._latest is not this:
                raise ValueError(
                    "another call of generate has begun, and the cache is that call's: end one "
                    "generation before the next, or make a Generator for each"
                )

    def _choose(self, sampling: Sampling, logits: jax.Array, key: jax.Array, step: int) -> Any:
        if sampling not in self._samplers:
            self._samplers[sampling] = jax.jit(sampling.choose)
        return self._samplers[sampling](logits, key, jnp.int32(step))

    def _prefill(self, rows: list[np.ndarray]) -> jax.Array:
        """The prompts into the cache; logits of their last tokens."""
        longest = max(map(len, rows))
        chunk, total = self._cut(longest)
        tokens, present = (np.zeros((self.batch, total), np.int32) for _ in range(2))
        for row, ids in enumerate(rows):
            tokens[row, total - len(ids) :] = ids
            present[row, total - len(ids) :] = 1
        order = positions(self._layout, chunk, self._shards)
        spec = self._steps.specs.slots[0].present
        logits: Any = None
        filled, shard = self._filled, chunk // self._devices
        # What a round of blocks has not taken stays empty.
        fresh, filled.dealt = filled.place == 0, 0
        # The padding before the longest row takes no places of its own: a token's distance to one
        # that the cache holds is that of their places.
        start = filled.place if not fresh else total - longest
        length = max(int(n) + len(ids) for n, ids in zip(self._lengths, rows, strict=True))
        filled.place = start - (total - longest)
        for first in range(0, total, chunk):
            at, used = first + order, filled.used
            self._cache, logits = self._steps.prefill(
                self._cache,
                self._steps.put(tokens[:, at], *spec),
                self._steps.put(present[:, at], *spec),
                self._steps.put((filled.place + order).astype(np.int32), *spec[1:]),
                np.asarray([used, start, length], np.int32),
                0 if fresh else self._reach(used + shard),
            )
            filled.place, filled.used, fresh = filled.place + chunk, used + shard, False
        self._lengths += [len(ids) for ids in rows]
        return logits

    def _cut(self, longest: int) -> tuple[int, int]:
        """``(chunk, total)``: tokens that go through the ring at a time, and all, with padding."""
        chunks = 1 if self._chunk is None else -(-longest // self._chunk)
        chunk = self._padded(-(-longest // chunks))
        return chunk, chunks * chunk

    def _reach(self, slots: int) -> int:
        """How many slots a prompt reads: a few sizes, so that few programs are compiled."""
        most = slots if self._slots is None else self._slots
        step = max(BLOCK, 2 ** max(0, math.ceil(math.log2(slots)) - 2))
        return min(most, -(-slots // step) * step)

    def _decode(self, tokens: Any) -> jax.Array:
        """One token of every row into the cache; logits of the next."""
        filled = self._filled
        if filled.dealt % (BLOCK * self._devices) == 0:
            filled.used, filled.dealt = filled.used + BLOCK, 0
        device, slot = divmod(filled.dealt, BLOCK)
        length = int(self._lengths.max()) + 1
        where = np.asarray([device, filled.used - BLOCK + slot, length], np.int32)
        self._cache, logits = self._steps.decode(
            self._cache, tokens, np.asarray(filled.place, np.int32), where
        )
        filled.place, filled.dealt = filled.place + 1, filled.dealt + 1
        self._lengths += 1
        return logits

    def _padded(self, length: int) -> int:
        """A prompt's length as it goes through the ring, which shards divide.

        Longer prompts have coarser lengths, a sixteenth too much at most, so that few programs are
        compiled.
        """
        step = self._step(length)
        return -(-length // step) * step

    def _step(self, length: int) -> int:
        """What a padded length is a multiple of."""
        unit = math.lcm(padded_length(self._layout, 1, self._shards), self._devices)
        return max(unit, 2 ** max(0, math.ceil(math.log2(length)) - 4) // unit * unit)

    def _check_prompts(self, prompts: Any, count: int, extend: bool) -> list[np.ndarray]:
        """The prompts as arrays."""
        rows = [np.asarray(prompt) for prompt in prompts]
        if len(rows) != self.batch:
            raise ValueError(
                f"{len(rows)} prompts for a batch of {self.batch}: pass one for each row"
            )
        vocabulary = self._steps.model.config.vocab_size
        for row, ids in enumerate(rows):
            if ids.ndim != 1 or not ids.size:
                raise ValueError(
                    f"prompt {row} has shape {ids.shape}: it must be one token id or more; begin "
                    "an empty text with the tokenizer's first token"
                )
            if not np.issubdtype(ids.dtype, np.integer):
                raise ValueError(f"prompt {row} has dtype {ids.dtype}: token ids are integers")
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise ValueError(
                    f"prompt {row} has the ids {ids.min()} to {ids.max()}: the vocabulary has 0 to "
                    f"{vocabulary - 1}"
                )
            before = int(self._lengths[row]) if extend else 0
            if before + len(ids) + count > self.max_length:
                raise ValueError(
                    f"prompt {row} has {len(ids)} tokens after {before} in the cache, and "
                    f"max_new_tokens is {count}: the cache takes {self.max_length} a row; make a "
                    "Generator with a larger max_length"
                )
        if extend and not self._filled.place:
            raise ValueError("extend is True and the cache is empty: generate without it first")
        if extend and len({len(ids) for ids in rows}) > 1:
            raise NotImplementedError(
                "extend is True and the prompts differ in length: padding would stand inside of "
                "rows; pass prompts of one length, or use a Generator of batch 1 for each row"
            )
        rounds = -(-count // (BLOCK * self._devices))
        needed = self._cut(max(map(len, rows)))[1] // self._devices + rounds * BLOCK
        left = None if self._slots is None else self._slots - self._filled.used * extend
        if left is not None and needed > left:
            raise ValueError(
                f"these prompts and {count} new tokens take {needed} slots on each device, padding "
                f"included, and the cache has {left} left of {self._slots}: make a Generator with "
                "a larger max_length, or a smaller prefill_chunk, which is padded less"
            )
        return [ids.astype(np.int32) for ids in rows]

    def _check_stops(self, stop_tokens: Collection[int]) -> frozenset[int]:
        vocabulary = self._steps.model.config.vocab_size
        for token in stop_tokens:
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocabulary:
                raise ValueError(
                    f"stop_tokens has {token!r}: the vocabulary has the ids 0 to {vocabulary - 1}"
                )
        return frozenset(int(token) for token in stop_tokens)

    def _refuse_too_large(self) -> None:
        """Raises ValueError if a device lacks memory for the cache."""
        for device in self._steps.mesh.local_devices:
            found = device.memory_stats() or {}
            if "bytes_limit" not in found:
                continue
            free = found["bytes_limit"] - found.get("bytes_in_use", 0)
            if self.cache_bytes > free:
                raise ValueError(
                    f"a cache of {self.batch} rows of max_length {self.max_length} takes "
                    f"{self.cache_bytes / 2**30:.1f} GiB on each device, and {device} has "
                    f"{free / 2**30:.1f} GiB left: use a smaller max_length or batch, or more "
                    "devices along the sequence axes"
                )
