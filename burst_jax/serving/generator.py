"""``Generator``: prompts in, tokens out."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from burst_jax.errors import check_integer, check_seed
from burst_jax.layouts.parse import layout_option
from burst_jax.layouts.permutation import positions
from burst_jax.models.decoder import Decoder
from burst_jax.models.hf.trained_length import check_trained_length
from burst_jax.parallel.mesh import axes_size
from burst_jax.serving.cache import (
    MAX_LENGTH,
    Cache,
    FillState,
    PromptPosition,
    TokenPosition,
)
from burst_jax.serving.memory import free_memory
from burst_jax.serving.model import ServedModel
from burst_jax.serving.prompts import check_prompts, check_stops
from burst_jax.serving.sampling import Sampling
from burst_jax.serving.steps import Steps


def _locked[**P, T](method: Callable[P, T]) -> Callable[P, T]:
    """A method during which no other thread uses the generator's cache."""

    @functools.wraps(method)
    def run(*args: P.args, **options: P.kwargs) -> T:
        with args[0]._lock:  # pyrefly: ignore[missing-attribute] - the Generator
            return method(*args, **options)

    return run


class Generator:
    """Generates tokens with a decoder whose KV cache is sharded over the sequence axes of its mesh.

    The prompt runs through the ring in the model's layout, in chunks if ``prefill_chunk`` is set.
    Its keys and values stay on the devices that computed them. For each generated token, every
    device attends to its shard of the cache, with one all-gather of partial results per layer.

    Linear-attention layers scan the prompt over the devices. They keep a state of fixed size,
    which each device of a sequence has and updates for every token.

    With a :class:`burst_jax.models.DynamicRope` keys keep the rotation that they were written with,
    as in transformers.

    Weights are copied, one array per layer, in the compute dtype. They are sharded over the tensor
    axes only, or with ``split_weights`` also over the sequence axes. The model may be deleted
    afterwards.

    Threads may share it. One step runs at a time: the prefill of a call, or one token. A call in
    one thread ends the generations of the others, whose next step raises ValueError. All processes
    must make the same calls in the same order, so with several, only one thread may.

    Args:
      model: a decoder on a mesh, like :func:`burst_jax.models.load` returns. Its option
        ``implementation`` names the kernels of the prefill; a token is decoded by the same kernel
        for every name but "xla" (:func:`pallas_kernels.decode.partial_attention`).
      max_length: maximum tokens per sequence, of all prompts and all generated tokens. The first
        prompt always fits with its padding; each further prompt (``extend``) may use up to an
        eighth more slots than it has tokens, and at least a few more.
      batch: batch size; a multiple of the devices along the batch axes.
      prefill_chunk: maximum tokens of a prompt per pass through the ring; None is all. Memory for
        activations is proportional to it.
      split_weights: whether each device of the sequence axes stores and reads a shard of each
        matrix. Each token then needs three more collectives of activations per layer, and prefill
        gathers one layer's weights at a time. The model must have rules.

    Attributes:
      cache_bytes: bytes of the cache on each device.
      seconds_to_first_token: time to first token of the last :meth:`generate`; None before.

    Raises:
      ValueError: a number below 1, a ``max_length`` above 2**29, a batch that the mesh does not
        divide, a model with LoRA adapters or in a balanced layout, ``split_weights`` without rules,
        or a cache larger than the free memory of the devices, or of the host for CPU devices.
      NotImplementedError: a model with a pipeline; linear-attention layers in a striped layout, or
        with one tap.
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
        self.max_length = check_integer("max_length", max_length, 1, MAX_LENGTH)
        self.batch = check_integer("batch", batch, 1, MAX_LENGTH)
        if prefill_chunk is not None:
            prefill_chunk = check_integer("prefill_chunk", prefill_chunk, 1, MAX_LENGTH)
        self._lock = threading.RLock()
        check_trained_length(model.config, "max_length", self.max_length)
        served = ServedModel(model, split_weights)
        shards = axes_size(served.shardings.mesh, served.shardings.batch_axes)
        if batch % shards:
            raise ValueError(
                f"batch is {batch}, and it is sharded over {shards} devices along "
                f"{served.shardings.batch_axes}: use a multiple of {shards}"
            )
        self._layout = layout_option(model.options)
        self._devices = axes_size(served.shardings.mesh, served.shardings.token_axes)
        # The Ulysses axis splits each shard of the layout.
        ulysses_axis = dict(model.options).get("ulysses_axis")
        self._shards = self._devices // axes_size(served.shardings.mesh, ulysses_axis)
        self._chunk = prefill_chunk
        # Prompts are padded, and the last slot may be empty on some devices.
        chunks = 1 if prefill_chunk is None else -(-self.max_length // prefill_chunk)
        padding = chunks * (self._step(-(-self.max_length // chunks)) + 1)
        length = self.max_length + padding + self._devices
        self._steps = Steps(served, self.batch, length)
        self.cache_bytes = self._steps.layer_bytes
        self._check_memory()
        # None after the failure of a program that it was donated to.
        self._cache: Cache | None = self._steps.allocate()
        self._filled = FillState()
        self._lengths = np.zeros(self.batch, np.int64)
        # Slots per device of layers without a window; None if there are no such layers.
        self._full_slots = next(
            (x.slots for x in self._steps.capacities if not x.is_ring_buffer), None
        )
        self._samplers: dict[Sampling, Any] = {}
        # The numbers that the last decoding step returned: their values, and the array.
        self._following: tuple[np.ndarray, Any] = np.zeros(0, np.int32), None
        # Identifies the call of generate that owns the cache.
        self._owner: object = None
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
        """Generates the tokens that follow the prompts, one per sequence at a time.

        The generator's cache is kept when the iterator ends or is dropped, so that a later call
        with ``extend`` continues from it.

        Args:
          prompts: token ids for each sequence of the batch; lengths may differ.
          max_new_tokens: maximum number of new tokens per sequence.
          temperature: divides logits; 0 is greedy.
          top_k: sample from the k most probable tokens; None is all.
          top_p: sample from the fewest most probable tokens whose probabilities sum to at least p;
            None is all.
          stop_tokens: ids that end a sequence. The stop token itself is returned and stored.
          seed: of the random numbers, which depend on the seed, the batch index and the number of
            preceding tokens, but not on the mesh.
          extend: whether the prompts continue the sequences in the cache, which are what was
            returned. Otherwise the cache is cleared first.

        Yields:
          int32 ``[batch]``: the next token of each sequence; -1 where it has ended. Prefill, and
          changes to the cache, happen when the first one is requested.

        Raises:
          ValueError: not one prompt per sequence, an empty prompt, ids outside of the vocabulary,
            more tokens than ``max_length`` or than the cache has space for, or values out of range;
            during iteration, if another call has taken over the cache.
          NotImplementedError: ``extend`` with a model that has windows, and prompts of different
            lengths or sequences that ended at different tokens.
        """
        vocabulary = self._steps.model.config.vocab_size
        sampling = Sampling(temperature, top_k, top_p)
        count = check_integer("max_new_tokens", max_new_tokens, 1, MAX_LENGTH)
        rows = check_prompts(prompts, self.batch, vocabulary)
        stops = check_stops(stop_tokens, vocabulary)
        key = jax.random.key(check_seed(seed))
        self._check_space(rows, count, extend)
        return self._generate(rows, count, sampling, stops, key, extend)

    @_locked
    def reset(self) -> None:
        """Clears the cache. A running generation cannot continue."""
        # The old cache's memory is free before a new one is allocated.
        self._owner, self._cache = None, None
        self._filled = FillState()
        self._lengths[:] = 0
        self._cache = self._steps.allocate()

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
        with self._lock:
            # Other calls may have changed the cache since this one was made.
            self._check_space(rows, count, extend)
            if self._cache is None or (not extend and self._filled.next_position):
                self.reset()
            me = self._owner = object()
            logits = self._prefill(rows)
        ended = np.zeros(self.batch, bool)
        for step in range(count):
            with self._lock:
                if self._owner is not me:
                    raise ValueError(
                        "another call of generate has taken over the cache: finish one generation "
                        "before the next, or use a Generator for each"
                    )
                chosen = self._choose(sampling, logits, key)
                if step == 0:
                    jax.block_until_ready(chosen)
                    self.seconds_to_first_token = time.perf_counter() - start
                # The token is written to the cache before it is returned, so that the cache holds
                # what was returned wherever the caller stops. The program is dispatched before the
                # token is copied to the host, so that the device is busy while the host waits.
                logits = self._decode(chosen, ~ended)
            tokens = np.asarray(chosen)
            returned = np.where(ended, -1, tokens).astype(np.int32)
            ended |= np.isin(tokens, stops)
            yield returned
            if ended.all():
                return

    def _choose(self, sampling: Sampling, logits: jax.Array, key: jax.Array) -> jax.Array:
        """The next token of every sequence."""
        if sampling not in self._samplers:
            self._samplers[sampling] = jax.jit(sampling.choose)
        return self._samplers[sampling](logits, key, self._lengths.astype(np.int32))

    def _prefill(self, rows: list[np.ndarray]) -> jax.Array:
        """Writes the prompts to the cache; returns the logits of their last tokens."""
        longest = max(map(len, rows))
        chunk, total = self._chunked(longest)
        tokens, present = (np.zeros((self.batch, total), np.int32) for _ in range(2))
        for row, ids in enumerate(rows):
            tokens[row, total - len(ids) :] = ids
            present[row, total - len(ids) :] = 1
        order = positions(self._layout, chunk, self._shards)
        spec = self._steps.token_spec
        logits: Any = None
        filled, shard, lengths = self._filled, chunk // self._devices, [len(ids) for ids in rows]
        cache_was_empty, padding = filled.next_position == 0, total - longest
        # Padding after cached tokens gets no new cache positions: the distance of two tokens must
        # be that of their cache positions. Slots that some devices have not filled stay empty.
        start = padding if cache_was_empty else filled.next_position
        at = filled.next_position if cache_was_empty else filled.next_position - padding
        used, longest_sequence = filled.used, int((self._lengths + lengths).max())
        cache = self._donate()
        for first in range(0, total, chunk):
            part = first + order
            reach = 0 if cache_was_empty and first == 0 else self._reach(used + shard)
            cache, logits = self._steps.prefill(
                reach,
                self._steps.model.leaves,
                cache,
                self._steps.put(tokens[:, part], *spec),
                self._steps.put(present[:, part], *spec),
                self._steps.put((at + part).astype(np.int32), *spec[1:]),
                PromptPosition(np.int32(used), np.int32(start), np.int32(longest_sequence)),
            )
            used += shard
        holes = filled.holes or not (cache_was_empty or len(set(lengths)) == 1)
        self._cache, self._filled = cache, FillState(at + total, used, 0, holes)
        self._lengths += lengths
        return logits

    def _donate(self) -> Cache:
        """The cache, to be donated to a program; there is none if the program fails."""
        cache, self._cache = self._cache, None
        assert cache is not None
        return cache

    def _chunked(self, longest: int) -> tuple[int, int]:
        """``(chunk, total)``: tokens per prefill chunk, and in total, with padding."""
        chunks = 1 if self._chunk is None else -(-longest // self._chunk)
        chunk = self._padded(-(-longest // chunks))
        return chunk, chunks * chunk

    def _reach(self, slots: int) -> int:
        """Number of slots that prefill reads, rounded up so that few programs are compiled."""
        if self._full_slots is None:  # Other layers read their whole cache.
            return 1
        step = max(16, 2 ** max(0, math.ceil(math.log2(slots)) - 2))
        return min(self._full_slots, -(-slots // step) * step)

    def _decode(self, tokens: jax.Array, running: np.ndarray) -> jax.Array:
        """Writes one token per sequence to the cache; returns the logits of the next.

        ``running``: bool ``[batch]``, the sequences that have not ended.
        """
        filled, device = self._filled, self._filled.generated % self._devices
        used = filled.used + (device == 0)
        position = TokenPosition(
            filled.next_position, device, used - 1, int(self._lengths.max()) + 1
        )
        numbers = np.array([*running, *position], np.int32)
        expected, array = self._following
        if not np.array_equal(numbers, expected):
            array = self._steps.put(numbers)
        self._cache, logits, array = self._steps.decode(
            self._steps.model.leaves, self._donate(), tokens, array
        )
        following = np.array([*running, *position.following(self._devices)], np.int32)
        self._following = following, array
        holes = filled.holes or not running.all()
        self._filled = FillState(filled.next_position + 1, used, filled.generated + 1, holes)
        self._lengths += running
        return logits

    def _padded(self, length: int) -> int:
        """The padded length of a prompt, a multiple of the layout's shards.

        Longer prompts are padded to coarser lengths, by at most an eighth, so that few programs are
        compiled.
        """
        step = self._step(length)
        return -(-length // step) * step

    def _step(self, length: int) -> int:
        """The number of which a padded length is a multiple."""
        unit = math.lcm(self._layout.padded_length(1, self._shards), self._devices)
        return max(unit, 2 ** max(0, math.ceil(math.log2(length)) - 4) // unit * unit)

    @_locked
    def _check_space(self, rows: list[np.ndarray], count: int, extend: bool) -> None:
        """Raises an error if the cache has no space for the prompts and ``count`` new tokens."""
        if extend and (self._cache is None or not self._filled.next_position):
            raise ValueError(
                "extend is True and the cache is empty, as it is after a call that failed: "
                "generate without extend first"
            )
        lengths = [len(ids) for ids in rows]
        has_windows = self._steps.model.has_windows
        if extend and has_windows and (len(set(lengths)) > 1 or self._filled.holes):
            raise NotImplementedError(
                "extend is True, the model has windows, and sequences would have padding inside, "
                "which a window would count: the prompts differ in length, or sequences ended at "
                "different tokens; use a Generator of batch 1 for each sequence"
            )
        for row, (length, before) in enumerate(zip(lengths, self._lengths * extend, strict=True)):
            if before + length + count > self.max_length:
                raise ValueError(
                    f"prompt {row} has {length} tokens after {before} in the cache, and "
                    f"max_new_tokens is {count}: the cache holds {self.max_length} per "
                    "sequence; make a Generator with a larger max_length"
                )
        if self._full_slots is None:
            return
        needed = self._chunked(max(lengths))[1] // self._devices + -(-count // self._devices)
        left = self._full_slots - self._filled.used * extend
        if needed > left:
            raise ValueError(
                f"these prompts and {count} new tokens need {needed} slots on each device, padding "
                f"included, and the cache has {left} of {self._full_slots} left: make a Generator "
                f"whose max_length is larger by {(needed - left) * self._devices}"
            )

    def _check_memory(self) -> None:
        """Raises ValueError if a device has too little free memory for the cache."""
        for free, device in free_memory(self._steps.mesh.local_devices):
            if self.cache_bytes > free:
                raise ValueError(
                    f"a cache of batch {self.batch} and max_length {self.max_length} needs "
                    f"{self.cache_bytes / 2**30:.1f} GiB on each device, and {device} has "
                    f"{free / 2**30:.1f} GiB left: use a smaller max_length or batch, or more "
                    "devices along the sequence axes"
                )
