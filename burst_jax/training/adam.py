"""Adam's moments in float32 or bfloat16, on the devices or in the host's memory."""

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
from burst_jax.training.rounding import mixed, random_words, round_at_random

Moments = Literal["device", "host"]

# Moments on the host come to the device in parts of at most so many elements, or of one layer. In
# float32 they are 16 MiB, which take 30 times as long to copy as a copy takes to start.
PART_SIZE = 2**22

_Index = jax.typing.ArrayLike


def clipped_adam(
    clip_norm: float,
    b1: float,
    b2: float,
    *,
    moment_dtype: jax.typing.DTypeLike,
    moments: Moments,
) -> optax.GradientTransformationExtraArgs:
    """Clipping by global norm and Adam, with the moments in a dtype and a memory of their own.

    The arithmetic is in float32; epsilon is 1e-8, outside of the root. To bfloat16 both moments are
    rounded at random (:mod:`burst_jax.training.rounding`); their bits depend on the number of
    steps, on which of the arrays it is, and on the index in it.

    Moments on the host come to the device part by part: a part of the first dimension, which in
    stacked layers is a layer or some of them, is fetched, renewed, and written back to its place.
    The updates take the gradients' memory. Gradients that were clipped before would take as much
    again, so the two are one transformation.

    The moments are renewed in whatever dtype and memory they are, so a state that is put into the
    other memory stays there.

    Args:
      clip_norm: largest global norm of the gradient; a longer gradient is scaled down to it.
      b1: decay of the first moment.
      b2: decay of the second moment.
      moment_dtype: float32 or bfloat16, in which ``init`` makes the moments.
      moments: where ``init`` makes them.

    Returns:
      A transformation with the state of ``optax.scale_by_adam``. Its ``update`` takes
      ``weight_shardings``, a ``NamedSharding`` for each weight, by which each device goes through
      its own parts of what is on the host. Without it the arrays are gone through as a whole,
      which is right as long as none is split along its first dimension.
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
        renewed = [
            _renewed(_Arrays(*arrays), _of_array(scalars, number), sharding)
            for number, (*arrays, sharding) in enumerate(
                zip(gradients, mu, nu, shardings, strict=True)
            )
        ]
        new = [structure.unflatten(column) for column in zip(*renewed, strict=True)]
        return new[0], optax.ScaleByAdamState(count, new[1], new[2])

    return optax.GradientTransformationExtraArgs(init, update)


class _Arrays(NamedTuple):
    """Of a weight, or of a part of one: the gradient, or the update in its place; the moments."""

    update: jax.Array
    mu: jax.Array
    nu: jax.Array


class _Scalars(NamedTuple):
    """What a step's update has beside the arrays: a seed, and what elements are multiplied by.

    Each product is by one number, behind a barrier. Two in a row, or a division by one, XLA puts
    together in some programs and not in others, and the results would not be the same bits in all.

    Attributes:
      seed: uint32, of the random bits.
      mu_decay: of the first moment.
      nu_decay: of the second moment.
      mu_gradient: of the gradient in the first moment.
      nu_gradient: of the gradient whose square is in the second moment.
      mu_mean: what makes the first moment, which began with 0, a mean of gradients.
      nu_mean: what makes the second moment a mean of squares.
    """

    seed: jax.Array
    mu_decay: jax.Array
    nu_decay: jax.Array
    mu_gradient: jax.Array
    nu_gradient: jax.Array
    mu_mean: jax.Array
    nu_mean: jax.Array


def _scalars(gradients: Any, count: jax.Array, clip_norm: float, b1: float, b2: float) -> _Scalars:
    norm = optax.tree.norm(gradients).astype(jnp.float32)
    clip = jnp.where(norm < clip_norm, 1, clip_norm / norm)
    mu_decay, nu_decay = jnp.float32(b1), jnp.float32(b2)
    scalars = _Scalars(
        seed=mixed(count.astype(jnp.uint32)),
        mu_decay=mu_decay,
        nu_decay=nu_decay,
        mu_gradient=(1 - b1) * clip,
        nu_gradient=math.sqrt(1 - b2) * clip,
        mu_mean=1 / (1 - lax.pow(mu_decay, count)),
        nu_mean=1 / (1 - lax.pow(nu_decay, count)),
    )
    return lax.optimization_barrier(scalars)


def _of_array(scalars: _Scalars, number: int) -> _Scalars:
    """The scalars of the array with this number, which has random bits of its own."""
    return scalars._replace(seed=mixed(scalars.seed ^ jnp.uint32(number)))


def _adam(arrays: _Arrays, scalars: _Scalars, starts: Sequence[_Index]) -> _Arrays:
    """The update, in the gradient's dtype, and the new moments of a part that begins at starts."""
    gradient = arrays.update.astype(jnp.float32)
    root_of_square = scalars.nu_gradient * gradient
    mu = scalars.mu_gradient * gradient + scalars.mu_decay * arrays.mu.astype(jnp.float32)
    nu = root_of_square * root_of_square + scalars.nu_decay * arrays.nu.astype(jnp.float32)
    update = (mu * scalars.mu_mean) / (jnp.sqrt(nu * scalars.nu_mean) + 1e-8)
    update = update.astype(arrays.update.dtype)
    if arrays.mu.dtype != jnp.bfloat16:
        return _Arrays(update, mu, nu)
    # Half of a word for each moment.
    words = random_words(scalars.seed, update.shape, starts)
    return _Arrays(update, round_at_random(mu, words), round_at_random(nu, words >> jnp.uint32(16)))


def _renewed(arrays: _Arrays, scalars: _Scalars, sharding: NamedSharding | None) -> _Arrays:
    """Update and new moments of one weight, from its gradient and its old moments."""
    starts = [0] * arrays.update.ndim
    if jax.typeof(arrays.mu).memory_space != jax.memory.Space.Host:
        return _adam(arrays, scalars, starts)
    if sharding is None:
        return _in_parts(arrays, scalars, starts)
    context, spec = jax.sharding.get_abstract_mesh(), sharding.spec

    def on_a_device(own: _Arrays, scalars: _Scalars) -> _Arrays:
        return _in_parts(own, scalars, _starts(spec, own.update.shape))

    return jax.shard_map(
        on_a_device,
        mesh=sharding.mesh if context.empty else context,
        in_specs=(spec, PartitionSpec()),
        out_specs=spec,
    )(arrays, scalars)


def _starts(spec: PartitionSpec, shape: Sequence[int]) -> list[_Index]:
    """Where this device's part of an array begins, in a ``shard_map``; ``shape`` is the part's."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return [
        size * lax.axis_index(names) if (names := flat_names(entry)) else 0
        for entry, size in zip(entries, shape, strict=True)
    ]


def _turns(rows: int, most: int) -> tuple[int, int, int]:
    """``(turns, size, rest)``: so many turns of so many rows, at most ``most``, and the rest.

    There is a rest only if no turns of half of ``most`` or more come out even: XLA may fetch it, as
    whatever is not in a loop, long before it is needed.
    """
    fewest = -(-rows // most)
    for turns in range(fewest, 2 * fewest + 1):
        if rows % turns == 0:
            return turns, rows // turns, 0
    return rows // most, most, rows % most


def _in_parts(arrays: _Arrays, scalars: _Scalars, starts: Sequence[_Index]) -> _Arrays:
    """Renews moments on the host part by part; the updates replace the gradient."""
    if not arrays.update.ndim:
        return _of_part(arrays, scalars, starts)
    rows, *others = arrays.update.shape
    turns, size, rest = _turns(rows, max(1, PART_SIZE // max(1, math.prod(others))))

    def turn(begin: _Index, size: int, arrays: _Arrays) -> _Arrays:
        # An index that might count from the end would be computed on the device, and the host would
        # have to wait for it to know what to copy.
        take = partial(lax.dynamic_slice_in_dim, allow_negative_indices=False)
        put = partial(lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False)
        part = _Arrays(*(take(x, begin, size) for x in arrays))
        new = _of_part(part, scalars, [starts[0] + begin, *starts[1:]])
        return _Arrays(*(put(x, y, begin) for x, y in zip(arrays, new, strict=True)))

    arrays = lax.fori_loop(0, turns, lambda i, arrays: turn(i * size, size, arrays), arrays)
    return turn(rows - rest, rest, arrays) if rest else arrays


def _of_part(arrays: _Arrays, scalars: _Scalars, starts: Sequence[_Index]) -> _Arrays:
    """Fetches the moments of a part, renews them, and sends them back."""
    there = jax.device_put((arrays.mu, arrays.nu), jax.memory.Space.Device)
    new = _adam(_Arrays(arrays.update, *there), scalars, starts)
    return _Arrays(new.update, *jax.device_put((new.mu, new.nu), jax.memory.Space.Host))
