"""Adam with float32 or bfloat16 moments, in device memory or offloaded to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from burst_jax.parallel.mesh import flat_names

Moments = Literal["device", "host"]

# Offloaded moments are streamed to the device in chunks of at most this many elements, or of one
# layer. In float32 a chunk is 16 MiB, whose copy takes 30 times as long as launching the copy.
CHUNK_ELEMENTS = 2**22

_Index = jax.typing.ArrayLike


def clipped_adam(
    clip_norm: float,
    b1: float,
    b2: float,
    *,
    moment_dtype: jax.typing.DTypeLike,
    moments: Moments,
) -> optax.GradientTransformationExtraArgs:
    """Global-norm clipping and Adam, with configurable dtype and memory of the moments.

    Arithmetic is float32; epsilon is 1e-8, outside the square root. Moments in bfloat16 use
    stochastic rounding. The random bits depend only on the step count, the index of the array, and
    the index of the element.

    Offloaded moments are streamed through the device: each chunk of the first dimension (one or
    more layers of a stacked weight) is fetched, updated and written back in place. The updates
    reuse the gradients' memory. Clipping is part of this transformation because clipped gradients
    would be a second copy.

    The update keeps the dtype and memory of the moments it is given, so a state moved to the other
    memory stays there.

    Args:
      clip_norm: largest global norm of the gradient; a longer gradient is scaled down to it.
      b1: decay of the first moment.
      b2: decay of the second moment.
      moment_dtype: dtype of the moments that ``init`` creates, float32 or bfloat16.
      moments: memory in which ``init`` creates the moments.

    Returns:
      A transformation with the state of ``optax.scale_by_adam``. Its ``update`` accepts
      ``weight_shardings``, a ``NamedSharding`` per weight, with which each device streams its own
      shards of offloaded moments. Without it arrays are streamed as a whole, which is correct as
      long as no array is sharded along its first dimension.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        def zeros() -> Any:
            made = optax.tree.zeros_like(params, dtype=moment_dtype)
            return jax.device_put(made, jax.memory.Space.Host) if moments == "host" else made

        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        weight_shardings: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, optax.ScaleByAdamState]:
        del params, extra_args
        gradients, structure = jax.tree.flatten(updates)
        mu, nu = map(structure.flatten_up_to, (state.mu, state.nu))
        shardings = [None] * len(gradients)
        if weight_shardings is not None:
            shardings = structure.flatten_up_to(weight_shardings)
        count = jnp.asarray(optax.safe_increment(state.count))
        scalars = _scalars(updates, count, clip_norm, b1, b2)
        arrays = zip(gradients, mu, nu, strict=True)
        results = [
            _update_array(_Arrays(*each), scalars.for_array(index), sharding)
            for index, (each, sharding) in enumerate(zip(arrays, shardings, strict=True))
        ]
        new = [structure.unflatten(column) for column in zip(*results, strict=True)]
        return new[0], optax.ScaleByAdamState(count, new[1], new[2])

    return optax.GradientTransformationExtraArgs(init, update)


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm of all elements of a pytree, computed in float32.

    A sum of a million squares overflows float16, and rounds to two digits in bfloat16.
    """
    leaves = (x.astype(jnp.float32) for x in jax.tree.leaves(tree))
    return jnp.sqrt(sum((jnp.sum(x * x) for x in leaves), start=jnp.float32(0)))


class _Arrays(NamedTuple):
    """One weight's gradient (later its update, in the same memory) and moments, or a chunk."""

    update: jax.Array
    mu: jax.Array
    nu: jax.Array


class _Scalars(NamedTuple):
    """The seed and the factors of one step.

    Each product in the update has one factor, behind an optimization barrier: XLA merges two
    products, or a product and a division, in some programs and not in others, which would change
    bits between meshes.

    Attributes:
      seed: uint32 seed of the random bits.
      mu_decay, nu_decay: factors of the old moments.
      mu_gradient: factor of the gradient in the first moment.
      nu_gradient: factor of the gradient that is squared for the second moment.
      mu_mean, nu_mean: bias corrections.
    """

    seed: jax.Array
    mu_decay: jax.Array
    nu_decay: jax.Array
    mu_gradient: jax.Array
    nu_gradient: jax.Array
    mu_mean: jax.Array
    nu_mean: jax.Array

    def for_array(self, index: int) -> _Scalars:
        """The scalars of one array, with a seed of its own."""
        return self._replace(seed=_mix(self.seed ^ jnp.uint32(index)))


def _scalars(gradients: Any, count: jax.Array, clip_norm: float, b1: float, b2: float) -> _Scalars:
    norm = global_norm(gradients)
    clip = jnp.where(norm < clip_norm, 1, clip_norm / norm)
    mu_decay, nu_decay = jnp.float32(b1), jnp.float32(b2)
    scalars = _Scalars(
        seed=_mix(count.astype(jnp.uint32)),
        mu_decay=mu_decay,
        nu_decay=nu_decay,
        mu_gradient=(1 - b1) * clip,
        nu_gradient=math.sqrt(1 - b2) * clip,
        mu_mean=1 / (1 - lax.pow(mu_decay, count)),
        nu_mean=1 / (1 - lax.pow(nu_decay, count)),
    )
    return lax.optimization_barrier(scalars)


def _adam(arrays: _Arrays, scalars: _Scalars, starts: Sequence[_Index]) -> _Arrays:
    """The update, in the gradient's dtype, and new moments of the chunk that begins at starts."""
    gradient = arrays.update.astype(jnp.float32)
    root_of_square = scalars.nu_gradient * gradient
    mu = scalars.mu_gradient * gradient + scalars.mu_decay * arrays.mu.astype(jnp.float32)
    nu = root_of_square * root_of_square + scalars.nu_decay * arrays.nu.astype(jnp.float32)
    update = (mu * scalars.mu_mean) / (jnp.sqrt(nu * scalars.nu_mean) + 1e-8)
    update = update.astype(arrays.update.dtype)
    if arrays.mu.dtype != jnp.bfloat16:
        return _Arrays(update, mu, nu)
    # One random word per element: a half for each moment.
    words = random_words(scalars.seed, update.shape, starts)
    return _Arrays(
        update, stochastic_round(mu, words), stochastic_round(nu, words >> jnp.uint32(16))
    )


def _update_array(arrays: _Arrays, scalars: _Scalars, sharding: NamedSharding | None) -> _Arrays:
    """Update and new moments of one weight."""
    starts = [0] * arrays.update.ndim
    if jax.typeof(arrays.mu).memory_space != jax.memory.Space.Host:
        return _adam(arrays, scalars, starts)
    if sharding is None:
        return _update_in_chunks(arrays, scalars, starts)
    context, spec = jax.sharding.get_abstract_mesh(), sharding.spec

    def on_one_device(shard: _Arrays, scalars: _Scalars) -> _Arrays:
        return _update_in_chunks(shard, scalars, _shard_starts(spec, shard.update.shape))

    return jax.shard_map(
        on_one_device,
        mesh=sharding.mesh if context.empty else context,
        in_specs=(spec, PartitionSpec()),
        out_specs=spec,
    )(arrays, scalars)


def _shard_starts(spec: PartitionSpec, shape: Sequence[int]) -> list[_Index]:
    """Global index of the first element of this device's shard of ``shape``, in ``shard_map``."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return [
        size * lax.axis_index(names) if (names := flat_names(entry)) else 0
        for entry, size in zip(entries, shape, strict=True)
    ]


def _chunking(length: int, most: int) -> tuple[int, int, int]:
    """``(chunks, size, remainder)`` of the first dimension, with ``size <= most``.

    Prefers a size of at least half of ``most`` without remainder: XLA may fetch a remainder, like
    everything outside a loop, long before it is needed.
    """
    fewest = -(-length // most)
    for chunks in range(fewest, 2 * fewest + 1):
        if length % chunks == 0:
            return chunks, length // chunks, 0
    return length // most, most, length % most


def _update_in_chunks(arrays: _Arrays, scalars: _Scalars, starts: Sequence[_Index]) -> _Arrays:
    """Streams offloaded moments through the device; the updates replace the gradient."""
    if not arrays.update.ndim:
        return _update_chunk(arrays, scalars, starts)
    length, *others = arrays.update.shape
    chunks, size, rest = _chunking(length, max(1, CHUNK_ELEMENTS // max(1, math.prod(others))))

    def step(begin: _Index, size: int, arrays: _Arrays) -> _Arrays:
        # A possibly negative index would be normalized on the device, and the host would have to
        # synchronize to learn which slice to copy.
        take = partial(lax.dynamic_slice_in_dim, allow_negative_indices=False)
        put = partial(lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False)
        chunk = _Arrays(*(take(x, begin, size) for x in arrays))
        new = _update_chunk(chunk, scalars, [starts[0] + begin, *starts[1:]])
        return _Arrays(*(put(x, y, begin) for x, y in zip(arrays, new, strict=True)))

    arrays = lax.fori_loop(0, chunks, lambda i, arrays: step(i * size, size, arrays), arrays)
    return step(length - rest, rest, arrays) if rest else arrays


def _update_chunk(arrays: _Arrays, scalars: _Scalars, starts: Sequence[_Index]) -> _Arrays:
    """Fetches the moments of a chunk, updates them, and sends them back to the host."""
    moments = jax.device_put((arrays.mu, arrays.nu), jax.memory.Space.Device)
    new = _adam(_Arrays(arrays.update, *moments), scalars, starts)
    return _Arrays(new.update, *jax.device_put((new.mu, new.nu), jax.memory.Space.Host))


def random_words(
    seed: jax.Array, shape: Sequence[int], starts: Sequence[jax.typing.ArrayLike]
) -> jax.Array:
    """Stateless random bits: each word depends only on the seed and the element's global index.

    A shard or chunk of an array therefore gets the bits of the whole array's elements.

    Args:
      seed: uint32 scalar.
      shape: shape of the chunk.
      starts: global index of the chunk's first element, one per dimension.

    Returns:
      uint32 of ``shape``, uniformly distributed.
    """
    words = seed
    for size, start in zip(shape, starts, strict=True):
        index = jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(start, jnp.uint32)
        words = _mix(words[..., None] ^ index)
    return words


def _mix(words: jax.Array) -> jax.Array:
    """A bijective hash of uint32 words, of the form of MurmurHash3's finalizer.

    The constants are those of https://nullprogram.com/blog/2018/07/31/, which have less bias.
    """
    words = (words ^ (words >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    words = (words ^ (words >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return words ^ (words >> jnp.uint32(16))


def stochastic_round(x: jax.Array, words: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16, up with a probability equal to the dropped fraction.

    The expected value of the result is ``x``.

    Args:
      x: float32.
      words: uint32 of the same shape, whose lower 16 bits are random.

    Returns:
      bfloat16 of the same shape; infinities and NaN are unchanged.
    """
    dropped = jnp.uint32(0xFFFF)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (words & dropped)
    rounded = lax.bitcast_convert_type(bits & ~dropped, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
