"""Adam's moments in float32 or bfloat16, on the devices or in the host's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from burst_jax.sharding import flat_names
from burst_jax.training.rounding import mixed, random_words, round_at_random

Moments = Literal["device", "host"]

# Moments on the host come to the device in parts of at most so many bytes, or of one layer.
PART_BYTES = 2**26

_Leaf = tuple[jax.Array, jax.Array, jax.Array]
_Index = jax.typing.ArrayLike


def scale_by_adam(
    b1: float, b2: float, *, moment_dtype: jax.typing.DTypeLike, moments: Moments
) -> optax.GradientTransformationExtraArgs:
    """As ``optax.scale_by_adam``, with the moments in a dtype and a memory of their own.

    The arithmetic is in float32, with epsilon 1e-8 outside of the root. To bfloat16 both moments
    are rounded at random: a step moves the second moment by ``1 - b2`` of its value or less, which
    rounding to the nearest bfloat16 would lose. A moment's random bits depend on the number of
    steps, on which array it is, and on its index in it.

    Moments on the host come to the device part by part: a part of the first dimension, which in
    stacked layers is a layer, or some, is fetched, renewed, and written back into its place. The
    updates take the gradients' memory. Moments are renewed where they lie, so a state that was made
    in one memory may be put into the other.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      moment_dtype: float32 or bfloat16.
      moments: where ``init`` makes them.

    Returns:
      A transformation with the state of ``optax.scale_by_adam``. Its ``update`` takes
      ``weight_shardings``, a tree like the weights of ``NamedSharding``: with it each device goes
      through its own parts of moments on the host. Without it the array as a whole is gone
      through, so that no weight may be split along its first dimension.
    """

    def init(params: Any) -> optax.ScaleByAdamState:
        def zeros() -> Any:
            made = optax.tree.zeros_like(params, dtype=moment_dtype)
            return jax.device_put(made, jax.memory.Space.Host) if moments == "host" else made

        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(), zeros())

    def update(
        updates: Any,
        state: optax.ScaleByAdamState,
        params: Any = None,
        *,
        weight_shardings: Any = None,
        **_: Any,
    ) -> tuple[Any, optax.ScaleByAdamState]:
        del params
        leaves, structure = jax.tree.flatten(updates)
        mu, nu = map(structure.flatten_up_to, (state.mu, state.nu))
        shardings = [None] * len(leaves)
        if weight_shardings is not None:
            shardings = structure.flatten_up_to(weight_shardings)
        count = optax.safe_increment(state.count)
        scalars = _Scalars(
            mixed(count.astype(jnp.uint32)), _correction(b1, count), _correction(b2, count)
        )
        renewed = [
            _renewed(partial(_adam, b1, b2), scalars, number, leaf, sharding)
            for number, (*leaf, sharding) in enumerate(zip(leaves, mu, nu, shardings, strict=True))
        ]
        new = [structure.unflatten(column) for column in zip(*renewed, strict=True)]
        return new[0], optax.ScaleByAdamState(count, new[1], new[2])

    return optax.GradientTransformationExtraArgs(init, update)


def on_host(x: jax.Array) -> bool:
    """Whether an array, or a value that is traced, is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


class _Scalars(NamedTuple):
    """What a step's update has beside the arrays.

    Attributes:
      seed: uint32, of the random bits.
      correct_mu: float32, what makes the first moment, which began with 0, a mean of gradients.
      correct_nu: the same for the second moment.
    """

    seed: jax.Array
    correct_mu: jax.Array
    correct_nu: jax.Array


def _correction(decay: float, count: jax.Array) -> jax.Array:
    # Its reciprocal once, to multiply by: XLA makes this of a division by it in some programs and
    # not in others, and the results shall be the same bits in all.
    return 1 / (1 - lax.pow(jnp.float32(decay), count))


def _adam(
    b1: float,
    b2: float,
    gradient: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    scalars: _Scalars,
    starts: Sequence[_Index],
) -> _Leaf:
    """The update, in the gradient's dtype, and the new moments of a part that begins at starts."""
    given = gradient.astype(jnp.float32)
    first = optax.tree.update_moment(given, mu.astype(jnp.float32), b1, 1)
    second = optax.tree.update_moment_per_elem_norm(given, nu.astype(jnp.float32), b2, 2)
    root = jnp.sqrt(second * scalars.correct_nu)
    updates = (first * scalars.correct_mu / (root + 1e-8)).astype(gradient.dtype)
    if mu.dtype != jnp.bfloat16:
        return updates, first.astype(mu.dtype), second.astype(nu.dtype)
    # Half of a word for each moment.
    words = random_words(scalars.seed, gradient.shape, starts)
    upper = words >> jnp.uint32(16)
    return updates, round_at_random(first, words), round_at_random(second, upper)


def _renewed(
    adam: Callable[..., _Leaf],
    scalars: _Scalars,
    number: int,
    leaf: Sequence[jax.Array],
    sharding: NamedSharding | None,
) -> _Leaf:
    """Update and new moments of one array, from its gradient and its old moments."""
    scalars = scalars._replace(seed=mixed(scalars.seed ^ jnp.uint32(number)))
    gradient, mu, nu = leaf
    if not on_host(mu):
        return adam(gradient, mu, nu, scalars, [0] * gradient.ndim)
    if sharding is None:
        return _in_parts(adam, scalars, [0] * gradient.ndim, gradient, mu, nu)
    context, spec = jax.sharding.get_abstract_mesh(), sharding.spec

    def of_a_device(scalars: _Scalars, *own: jax.Array) -> _Leaf:
        starts = _starts(spec, own[0].shape)
        return _in_parts(adam, scalars, starts, *own)

    return jax.shard_map(
        of_a_device,
        mesh=sharding.mesh if context.empty else context,
        in_specs=(PartitionSpec(), spec, spec, spec),
        out_specs=(spec, spec, spec),
    )(scalars, gradient, mu, nu)


def _starts(spec: PartitionSpec, shape: Sequence[int]) -> list[_Index]:
    """Where this device's part of an array begins, in a ``shard_map``."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return [
        size * lax.axis_index(names) if (names := flat_names(entry)) else 0
        for entry, size in zip(entries, shape, strict=True)
    ]


def _in_parts(
    adam: Callable[..., _Leaf],
    scalars: _Scalars,
    starts: Sequence[_Index],
    *leaf: jax.Array,
) -> _Leaf:
    """Renews moments on the host part by part; the updates replace the gradient."""
    gradient, mu, _ = leaf
    if not gradient.ndim:
        return _of_part(adam, scalars, starts, leaf)
    rows = gradient.shape[0]
    row_bytes = max(1, mu.dtype.itemsize * math.prod(gradient.shape[1:]))
    size = min(rows, max(1, PART_BYTES // row_bytes))

    def turn(begin: _Index, size: int, leaf: Sequence[jax.Array]) -> _Leaf:
        def part(x: jax.Array) -> jax.Array:
            # An index that might count from the end would be computed on the device, for which
            # the host would have to wait to know what to copy.
            return lax.dynamic_slice_in_dim(x, begin, size, allow_negative_indices=False)

        new = _of_part(adam, scalars, [starts[0] + begin, *starts[1:]], [part(x) for x in leaf])
        put = partial(lax.dynamic_update_slice_in_dim, axis=0, allow_negative_indices=False)
        return tuple(put(x, y, begin) for x, y in zip(leaf, new, strict=True))

    turns = rows // size
    leaf = lax.fori_loop(0, turns, lambda i, leaf: turn(i * size, size, leaf), tuple(leaf))
    rest = rows - turns * size
    return turn(rows - rest, rest, leaf) if rest else leaf


def _of_part(
    adam: Callable[..., _Leaf],
    scalars: _Scalars,
    starts: Sequence[_Index],
    leaf: Sequence[jax.Array],
) -> _Leaf:
    """Fetches the moments of a part, renews them, and sends them back."""
    device, host = jax.memory.Space.Device, jax.memory.Space.Host
    gradient, mu, nu = leaf
    mu, nu = jax.device_put((mu, nu), device)
    updates, mu, nu = adam(gradient, mu, nu, scalars, starts)
    return updates, *jax.device_put((mu, nu), host)
