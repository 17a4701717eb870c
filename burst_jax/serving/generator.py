"""``Generator``: prompts in, tokens out."""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_jax.errors import check_integer, check_seed
from burst_jax.layouts.permutation import padded_length, positions
from burst_jax.models.decoder import Decoder
from burst_jax.parallel.mesh import axes_size
from burst_jax.serving import saved
from burst_jax.serving.cache import Cache, Filled
from burst_jax.serving.model import ServedModel
from burst_jax.serving.prompts import check_prompts, check_stops
from burst_jax.serving.sampling import Sampling
from burst_jax.serving.steps import At, Into, Steps


class Generator:
    """Generates tokens with a decoder whose cache is split over the sequence axes of its mesh.

    The prompt goes through the ring in the model's layout (chunk by chunk, if asked). Its keys and
    values stay where they were computed. Each generated token takes one pass over the cache, on
    every device over its own part, and one exchange of partial results in each layer.

    With a :class:`burst_jax.models.DynamicRope` keys stay rotated as they were when they came, as
    in transformers.

    Weights are copied: each layer's by itself, in the dtype of the computation, whole over all mesh
    axes but the tensor axes, or with ``split_weights`` but for these and the sequence axes. The
    model may be deleted afterwards.

    Args:
      model: a decoder on a mesh, like :func:`burst_jax.models.load` gives.
      max_length: tokens of a row at most, of all prompts and all generated ones. A first prompt
        always has room for its padding; with ``extend`` each further prompt takes up to an eighth
        more than its tokens, a few tokens at least.
      batch: rows; a multiple of the devices along the batch axes.
      prefill_chunk: tokens of a prompt that go through the ring at a time; None is all. Memory for
        activations grows with it.
      split_weights: whether each device of the sequence axes keeps and reads a part of each matrix.
        A token then takes three exchanges of activations more in each layer, and a prompt gathers
        one layer's weights after the other. The model must have rules.

    Attributes:
      cache_bytes: bytes of the cache on each device.
      seconds_to_first_token: of the last call of :meth:`generate`, None before.

    Raises:
      ValueError: a number below 1, a batch that the mesh does not divide, a model with adapters
        that are not merged, one without rules whose weights are to be split, or a cache that does
        not fit into the devices' memory.
      NotImplementedError: a model with a pipeline.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        max_length: int,
        batch: int = 1,
        prefill_chunk: int | None = None,
        split_weights: bool = False,
    ) -> None:
        if not isinstance(model, Decoder):
            raise ValueError(f"model is a {type(model).__name__}: it must be a Decoder")
        self.max_length = check_integer("max_length", max_length, 1)
        self.batch = check_integer("batch", batch, 1)
        if prefill_chunk is not None:
            prefill_chunk = check_integer("prefill_chunk", prefill_chunk, 1)
        served = ServedModel(model, split_weights)
        rows = axes_size(served.parts.mesh, served.parts.batch_axes)
        if batch % rows:
            raise ValueError(
                f"batch is {batch}, and {rows} devices along {served.parts.batch_axes} share its "
                f"rows: use a multiple of {rows}"
            )
        self._layout = dict(model.options).get("layout", "contiguous")
        self._devices = axes_size(served.parts.mesh, served.parts.token_axes)
        # Heads are exchanged inside a shard of the layout, which these devices split once more.
        exchanging = dict(model.options).get("ulysses_axis")
        self._shards = self._devices // axes_size(served.parts.mesh, exchanging)
        self._chunk = prefill_chunk
        # A prompt is padded, and the last slot may not be full on all devices.
        chunks = 1 if prefill_chunk is None else -(-self.max_length // prefill_chunk)
        padding = chunks * (self._step(-(-self.max_length // chunks)) + 1)
        capacity = self.max_length + padding + self._devices
        self._steps = Steps(served, self.batch, capacity, self._layout)
        config, tensor = served.config, axes_size(served.parts.mesh, served.parts.tensor_axes)
        slots = sum(self._steps.rooms[i].slots for i in self._steps.room_of)
        each = 2 * served.heads // tensor * config.head_dim * jnp.dtype(config.dtype).itemsize
        self.cache_bytes = self.batch // rows * slots * each
        self._refuse_too_large()
        # None: it was lost when a program failed that it had been given to.
        self._cache: Cache | None = self._steps.allocate()
        self._filled = Filled()
        self._lengths = np.zeros(self.batch, np.int64)
        # Of each device in rooms without a window; None: there are no such rooms.
        self._room_slots = next((x.slots for x in self._steps.rooms if not x.is_ring), None)
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
          stop_tokens: ids after which a row has ended. The stop token itself is shown and kept.
          seed: of the random numbers, which depend on it, on the row and on the number of tokens
            before, not on the mesh.
          extend: whether the prompts continue the rows that the cache holds, which are what was
            shown of each. Without it the cache is emptied first.

        Yields:
          int32 ``[batch]``: the next token of each row; -1 where a row has ended. Work begins with
          the first one, and so does what happens to the cache.

        Raises:
          ValueError: not one prompt a row, an empty prompt, ids that the vocabulary lacks, more
            tokens than ``max_length`` or the cache has room for, or numbers out of their range;
            while it runs, if another call has begun, whose the cache is then.
          NotImplementedError: ``extend`` with a model that has windows, and prompts of different
            lengths or rows that did not end together.
        """
        vocabulary = self._steps.model.config.vocab_size
        sampling = Sampling(temperature, top_k, top_p)
        count = check_integer("max_new_tokens", max_new_tokens, 1)
        rows = check_prompts(prompts, self.batch, vocabulary)
        stops = check_stops(stop_tokens, vocabulary)
        key = jax.random.key(check_seed(seed))
        self._check_room(rows, count, extend)
        return self._generate(rows, count, sampling, stops, key, extend)

    def reset(self) -> None:
        """Forgets all rows. A generation that has not ended cannot go on."""
        self._forget()
        self._cache = self._steps.allocate()

    def save_cache(self, folder: str | Path) -> None:
        """Writes the cache into a folder, so that another process can go on from it.

        It is written by orbax under another name, hashed, and renamed when it is complete. A cache
        that the folder has already is removed after that. With several processes all of them call
        this, and all must see the folder.

        Args:
          folder: of this cache alone; it is made if it is not there.

        Raises:
          ValueError: the cache is empty, ``folder`` is a file, or it has checkpoints of something
            else, which would be removed.
          burst_jax.training.CheckpointError: it could not be written.
        """
        if self._cache is None or not self._filled.place:
            raise ValueError(
                "there is no cache to save: it is empty before the first token, and after a call "
                "that failed; generate first"
            )
        saved.save(folder, self._steps, saved.Kept(self._cache, self._filled, self._lengths))

    def load_cache(self, folder: str | Path) -> None:
        """Reads a cache that :meth:`save_cache` has written, in the place of this generator's own.

        ``generate(..., extend=True)`` goes on from there. The model must be the one that made it,
        with the same weights, dtype and batch. The mesh, the layout, ``max_length`` and
        ``prefill_chunk`` may be others. A generation that has not ended cannot go on.

        Args:
          folder: where the cache is.

        Raises:
          FileNotFoundError: no cache is there.
          ValueError: it is a cache of another model or batch, or longer than this generator's. The
            message names what differs; this generator's cache is as it was.
          burst_jax.training.CheckpointError: it is damaged. Every file is compared with its hash.
        """
        kept = saved.load(folder, self._steps, self.max_length, self._forget)
        self._cache, self._filled, self._lengths = kept

    def _forget(self) -> None:
        self._latest, self._cache = None, None
        self._filled = Filled()
        self._lengths[:] = 0

    def _generate(
        self,
        rows: list[np.ndarray],
        count: int,
        sampling: Sampling,
        stops: list[int],
        key: jax.Array,
        extend: bool,
    ) -> abc.Generator[np.ndarray]:
        start = time.perf_counter()
        # Other calls may have changed the cache since this one was made.
        self._check_room(rows, count, extend)
        if self._cache is None or (not extend and self._filled.place):
            self.reset()
        this = self._latest = object()
        logits = self._prefill(rows)
        ended = np.zeros(self.batch, bool)
        for step in range(count):
            if self._latest is not this:
                raise ValueError(
                    "another call of generate has begun, and the cache is that call's: end one "
                    "generation before the next, or make a Generator for each"
                )
            chosen = self._choose(sampling, logits, key)
            if step == 0:
                jax.block_until_ready(chosen)
                self.seconds_to_first_token = time.perf_counter() - start
            # The token is put into the cache before it is shown, so that the cache holds what was
            # shown wherever the caller stops. The program starts before the token has come from the
            # device, which so has work while the host waits and makes the next call.
            logits = self._decode(chosen, ~ended)
            tokens = np.asarray(chosen)
            shown = np.where(ended, -1, tokens).astype(np.int32)
            ended |= np.isin(tokens, stops)
            yield shown
            if ended.all():
                return

    def _choose(self, sampling: Sampling, logits: jax.Array, key: jax.Array) -> jax.Array:
        """The next token of every row."""
        if sampling not in self._samplers:
            self._samplers[sampling] = jax.jit(sampling.choose)
        return self._samplers[sampling](logits, key, self._lengths.astype(np.int32))

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
        filled, shard, lengths = self._filled, chunk // self._devices, [len(ids) for ids in rows]
        cache_was_empty, padding = filled.place == 0, total - longest
        # Behind tokens that the cache holds, padding takes no places: a token's distance to one of
        # them is that of their places. What the last slot lacks on some devices stays empty.
        start = padding if cache_was_empty else filled.place
        at = filled.place if cache_was_empty else filled.place - padding
        used, longest_row = filled.used, int((self._lengths + lengths).max())
        cache = self._taken()
        for first in range(0, total, chunk):
            part = first + order
            reach = 0 if cache_was_empty and first == 0 else self._reach(used + shard)
            cache, logits = self._steps.prefill(
                cache,
                self._steps.put(tokens[:, part], *spec),
                self._steps.put(present[:, part], *spec),
                self._steps.put((at + part).astype(np.int32), *spec[1:]),
                Into(np.int32(used), np.int32(start), np.int32(longest_row)),
                reach,
            )
            used += shard
        holes = filled.holes or not (cache_was_empty or len(set(lengths)) == 1)
        self._cache, self._filled = cache, Filled(at + total, used, 0, holes)
        self._lengths += lengths
        return logits

    def _taken(self) -> Cache:
        """The cache, which a program is given; if that fails there is none."""
        cache, self._cache = self._cache, None
        assert cache is not None
        return cache

    def _cut(self, longest: int) -> tuple[int, int]:
        """``(chunk, total)``: tokens that go through the ring at a time, and all, with padding."""
        chunks = 1 if self._chunk is None else -(-longest // self._chunk)
        chunk = self._padded(-(-longest // chunks))
        return chunk, chunks * chunk

    def _reach(self, slots: int) -> int:
        """How many slots a prompt reads: a few sizes, so that few programs are compiled."""
        most = slots if self._room_slots is None else self._room_slots
        step = max(16, 2 ** max(0, math.ceil(math.log2(slots)) - 2))
        return min(most, -(-slots // step) * step)

    def _decode(self, tokens: jax.Array, going: np.ndarray) -> jax.Array:
        """One token of every row into the cache; logits of the next.

        ``going``: bool ``[batch]``, the rows that have not ended.
        """
        filled, device = self._filled, self._filled.dealt % self._devices
        used = filled.used + (device == 0)
        numbers = filled.place, device, used - 1, int(self._lengths.max()) + 1
        cache, logits = self._steps.decode(
            self._taken(), tokens, jnp.asarray(going, jnp.int32), At(*map(np.int32, numbers))
        )
        self._cache = cache
        holes = filled.holes or not going.all()
        self._filled = Filled(filled.place + 1, used, filled.dealt + 1, holes)
        self._lengths += going
        return logits

    def _padded(self, length: int) -> int:
        """A prompt's length as it goes through the ring, which shards divide.

        Longer prompts have coarser lengths, an eighth too much at most, so that few programs are
        compiled.
        """
        step = self._step(length)
        return -(-length // step) * step

    def _step(self, length: int) -> int:
        """What a padded length is a multiple of."""
        unit = math.lcm(padded_length(self._layout, 1, self._shards), self._devices)
        return max(unit, 2 ** max(0, math.ceil(math.log2(length)) - 4) // unit * unit)

    def _check_room(self, rows: list[np.ndarray], count: int, extend: bool) -> None:
        """Raises an error if the cache cannot take the prompts and ``count`` tokens more."""
        if extend and (self._cache is None or not self._filled.place):
            raise ValueError(
                "extend is True and the cache is empty, as it is after a call that failed: "
                "generate without extend first"
            )
        lengths = [len(ids) for ids in rows]
        has_windows = any(window is not None for window in self._steps.model.windows)
        if extend and has_windows and (len(set(lengths)) > 1 or self._filled.holes):
            raise NotImplementedError(
                "extend is True, the model has windows, and rows would have padding inside, which "
                "a window would count: the prompts differ in length, or rows did not end together; "
                "use a Generator of batch 1 for each row"
            )
        for row, (length, before) in enumerate(zip(lengths, self._lengths * extend, strict=True)):
            if before + length + count > self.max_length:
                raise ValueError(
                    f"prompt {row} has {length} tokens after {before} in the cache, and "
                    f"max_new_tokens is {count}: the cache takes {self.max_length} a row; make a "
                    "Generator with a larger max_length"
                )
        if self._room_slots is None:
            return
        needed = self._cut(max(lengths))[1] // self._devices + -(-count // self._devices)
        left = self._room_slots - self._filled.used * extend
        if needed > left:
            raise ValueError(
                f"these prompts and {count} new tokens take {needed} slots on each device, padding "
                f"included, and the cache has {left} left of {self._room_slots}: make a Generator "
                f"whose max_length is larger by {(needed - left) * self._devices}"
            )

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
