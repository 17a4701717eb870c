"""Layouts: the sequence permutations that assign tokens to the shards of a ring.

A layout permutes the tokens and does nothing else. It splits ``length`` tokens over ``n`` shards of
``c = length // n`` tokens each; shard ``r`` holds, in index order:

========== ================================= ====================
contiguous block ``r``                       ``length % n == 0``
zigzag     half-blocks ``r`` and ``2n-1-r``  ``length % 2n == 0``
striped    tokens ``r, r+n, r+2n, ...``      ``length % n == 0``
striped:k  stripes ``r, r+n, r+2n, ...``     ``length % kn == 0``
           of k tokens each
balanced:z what :func:`burst_jax.layouts.     ``length % n == 0``
           balance` chose for the batch
========== ================================= ====================

Four shards, 16 tokens::

             contiguous      zigzag          striped         striped:2
    shard 0   0  1  2  3     0  1  14 15     0 4 8  12       0 1 8  9
    shard 1   4  5  6  7     2  3  12 13     1 5 9  13       2 3 10 11
    shard 2   8  9  10 11    4  5  10 11     2 6 10 14       4 5 12 13
    shard 3   12 13 14 15    6  7  8  9      3 7 11 15       6 7 14 15

Positions ascend within every shard, so the tokens of a tile have nearby positions, and the local
kernels skip nearly every tile that is fully masked.

Under a causal mask a contiguous ring leaves the first shard idle most of the time. Zigzag gives
every shard the same work at every step. Striped (Brandon et al. 2023, Striped Attention, section 3)
gives every shard the same work up to one diagonal of the scores. Stripes of 64 or 128 tokens, like
TransformerEngine's, keep whole tiles together, so that fewer tiles need masking; the work of two
shards differs by k diagonals.

A balanced layout is for packed documents: its order differs from batch to batch and from sequence
to sequence (:mod:`burst_jax.layouts.balanced`). Its name has only what a program must know: the
ring needs no more than the last z tokens of every shard.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, auto_axes
from jax.typing import ArrayLike

from burst_jax.parallel.mesh import axes_size, flat_names
from pallas_kernels.arrays import as_int32

Array = jax.Array | np.ndarray
_Named = Literal["contiguous", "zigzag", "striped"]
# One of these names, "striped:k" with stripes of k tokens, like "striped:64", or "balanced:z" with
# a ring zone of z tokens per shard.
Layout = _Named | str
LAYOUTS: tuple[_Named, ...] = get_args(_Named)
_STRIPES = re.compile(r"striped:([1-9][0-9]{0,8})")
_ZONE = re.compile(r"balanced:(0|[1-9][0-9]{0,8})")


def shard_unit(layout: str) -> int:
    """The divisor that a shard's length needs: 2 for zigzag's half-blocks, k for stripes."""
    check_layout(layout)
    return 2 if layout == "zigzag" else stripe_size(layout) or 1


def stripe_size(layout: str) -> int | None:
    """Tokens per stripe, 1 for "striped"; None for a layout without stripes."""
    found = _STRIPES.fullmatch(layout)
    return int(found[1]) if found else 1 if layout == "striped" else None


def zone_size(layout: str) -> int | None:
    """Tokens of every shard in the ring zone of a balanced layout; None for other layouts."""
    found = _ZONE.fullmatch(layout)
    return int(found[1]) if found else None


def check_layout(layout: str) -> None:
    """Raises unless ``layout`` is one of :data:`LAYOUTS`, "striped:k" or "balanced:z"."""
    # A NumPy array of one string compares equal to it, but is not hashable.
    named = isinstance(layout, str) and (layout in LAYOUTS or bool(_STRIPES.fullmatch(layout)))
    if not named and not (isinstance(layout, str) and _ZONE.fullmatch(layout)):
        raise ValueError(
            f"layout is {layout!r}: use one of {', '.join(map(repr, LAYOUTS))}, 'striped:k' for "
            "stripes of k tokens, like 'striped:64', or the layout of burst_jax.layouts.balance"
        )


def _check_fixed(layout: str) -> None:
    """Raises ValueError unless a layout's order is the same for every sequence."""
    check_layout(layout)
    if zone_size(layout) is not None:
        raise ValueError(
            f"layout is {layout!r}, whose order differs between sequences: use what "
            "burst_jax.layouts.balance returned for them: order, positions, place, restore"
        )


def padded_length(layout: str, length: int, num_shards: int) -> int:
    """The smallest length, ``length`` or longer, that ``layout`` can split over ``num_shards``."""
    multiple = shard_unit(layout) * _check_shards(num_shards)
    return -(-length // multiple) * multiple


def check_length(layout: str, length: int, num_shards: int, name: str = "length") -> None:
    """Raises ValueError if ``layout`` cannot split ``length``, with the length to pad to.

    ``name`` is the name of the length in the message.
    """
    fit = padded_length(layout, length, num_shards)
    if fit != length:
        multiple = shard_unit(layout) * num_shards
        raise ValueError(
            f"{name} is {length}: the {layout} layout over {num_shards} shards needs a multiple of "
            f"{multiple}; pad to {fit} (pad_to_layout pads and masks the padding)"
        )
    check_zone(layout, length // num_shards)


def check_zone(layout: str, shard_length: int) -> None:
    """Raises ValueError if a balanced layout's zone is longer than a shard."""
    zone = zone_size(layout)
    if zone is not None and zone > shard_length:
        raise ValueError(
            f"layout is {layout!r}, and a shard has {shard_length} tokens: make the batch, the "
            "model and the mesh with the same number of shards and length"
        )


def shard_positions(layout: str, shard_length: int, num_shards: int, shard: ArrayLike) -> jax.Array:
    """Positions of one shard's tokens, in index order.

    Args:
      layout: the layout's name.
      shard_length: number of tokens per shard, ``c``.
      num_shards: number of shards on the ring, ``n``.
      shard: the shard's index, a Python int or a traced int32 (``lax.axis_index``).

    Returns:
      int32 ``[shard_length]``, ascending; in a balanced layout the places, because the positions
      differ between sequences. A NumPy array for a Python int: what is computed from it
      alone, as tile bounds, is computed while tracing.
    """
    check_layout(layout)
    known = isinstance(shard, int)
    xp: Any = np if known else jnp
    shard = np.int32(shard) if known else jnp.asarray(shard, jnp.int32)
    index: Any = xp.arange(shard_length, dtype=np.int32)
    if layout == "contiguous" or zone_size(layout) is not None:
        return shard * shard_length + index
    stripe = stripe_size(layout)
    if stripe is not None:
        return stripe * shard + index + (num_shards - 1) * stripe * (index // stripe)
    half = shard_length // 2
    # The second half-block, 2n-1-r, starts where index - half would be 0.
    start = xp.where(index < half, shard * half, (2 * num_shards - 1 - shard) * half - half)
    return start + index


def shard_runs(
    layout: str, shard_length: int, num_shards: int, *, across_stripes: bool = True
) -> tuple[np.ndarray, int, int]:
    """The positions of :func:`shard_positions` for all shards, as arithmetic progressions (runs).

    Args:
      layout: the layout's name.
      shard_length: number of tokens per shard.
      num_shards: number of shards on the ring.
      across_stripes: whether a run takes one token of each stripe; otherwise a run is one stripe.

    Returns:
      ``(starts, stride, count)``: run j of shard r has the positions ``starts[r, j] + stride * i``
      for i from 0 to ``count - 1``; starts is int64 ``[num_shards, runs]``.
    """
    shard, stripe = np.arange(num_shards), stripe_size(layout)
    if stripe is not None:
        starts, count = stripe * shard[:, None], shard_length // stripe
        if across_stripes:
            return starts + np.arange(stripe), num_shards * stripe, count
        return starts + num_shards * stripe * np.arange(count), 1, stripe
    blocks = shard_unit(layout)
    last, count = 2 * num_shards - 1, shard_length // blocks
    starts = np.stack([shard, last - shard][:blocks], axis=1) * count
    return starts, 1, count


def run_in_blocks(layout: str, shard_length: int, num_shards: int, block: int) -> int:
    """Number of adjacent tokens of a shard that are always in one block of the sequence.

    Args:
      layout: the layout's name.
      shard_length: number of tokens per shard.
      num_shards: number of shards on the ring.
      block: block size in positions; the first block starts at position 0.

    Returns:
      The largest r that is known: tokens ``i r .. i r + r - 1`` of every shard are in one block,
      for every i.
    """
    stripe = stripe_size(layout)
    if stripe is not None:
        whole = block % (num_shards * stripe) == 0
        return block // num_shards if whole else math.gcd(stripe, block)
    return math.gcd(shard_length // shard_unit(layout), block)


def positions(layout: Layout, length: int, num_shards: int) -> np.ndarray:
    """The position of every token of a sequence in ``layout``: ``to_layout(arange(length))``.

    RoPE needs these positions, sharded like the tokens. With an ``arange`` most tokens would get
    the position of another token.

    Args:
      layout: "contiguous", "zigzag", "striped" or "striped:k"
        (:mod:`burst_jax.layouts.permutation`).
      length: number of tokens of the whole sequence.
      num_shards: number of shards on the ring: the size of ``seq_axis``, or of both axes together
        if it is a pair. ``ulysses_axis`` does not count.

    Returns:
      int32 NumPy array ``[length]``; index ``i`` of a sequence in ``layout`` holds token
      ``positions[i]``.

    Raises:
      ValueError: the layout is unknown or cannot split ``length``; the message has the length to
        pad to.
    """
    _check_fixed(layout)
    check_length(layout, length, _check_shards(num_shards))
    index = np.arange(length, dtype=np.int32)
    if layout == "contiguous":
        return index
    stripe = stripe_size(layout)
    if stripe is not None:
        return index.reshape(-1, num_shards, stripe).swapaxes(0, 1).reshape(-1)
    halves = index.reshape(2 * num_shards, -1)
    pairs = np.stack([halves[:num_shards], halves[: num_shards - 1 : -1]], axis=1)
    return pairs.reshape(-1)


def to_layout[Tree](x: Tree, layout: Layout, num_shards: int, axis: int = 1) -> Tree:
    """Permutes the tokens along ``axis`` from natural order into ``layout``.

    Do it once, where batches are made, for tokens, targets, positions and segment ids together.
    NumPy arrays stay on the host. JAX arrays are permuted on their devices and keep their sharding,
    over Auto and Explicit mesh axes.

    Args:
      x: an array or a pytree of arrays, all of the same length along ``axis``.
      layout: "contiguous", "zigzag", "striped" or "striped:k"
        (:mod:`burst_jax.layouts.permutation`).
      num_shards: number of shards on the ring, as in :func:`positions`.
      axis: the sequence axis, 1 for ``[B, T, ...]``.

    Returns:
      ``x`` permuted, with its types, shapes and dtypes.

    Raises:
      ValueError: the layout is unknown, or cannot split the length (the message has the length to
        pad to).
    """
    return jax.tree.map(lambda leaf: _permute(leaf, layout, num_shards, axis, inverse=False), x)


def from_layout[Tree](x: Tree, layout: Layout, num_shards: int, axis: int = 1) -> Tree:
    """Permutes the tokens along ``axis`` from ``layout`` back into natural order.

    The inverse of :func:`to_layout`, with the same arguments and errors.
    """
    return jax.tree.map(lambda leaf: _permute(leaf, layout, num_shards, axis, inverse=True), x)


def pad_to_layout[Tree](
    tree: Tree,
    layout: Layout,
    num_shards: int,
    segment_ids: Array | None = None,
    *,
    multiple_of: int = 1,
) -> tuple[Tree, Array]:
    """Pads sequences at the end to a length that ``layout`` can split, and masks the padding.

    Call it before :func:`to_layout`. Padding has segment id 0, which attends to nothing and is
    attended to by nothing, so its outputs and gradients are exactly zero.

    Args:
      tree: an array ``[B, T, ...]`` or a pytree of such arrays, all with the same B and T. They are
        padded with zeros of their dtype.
      layout: "contiguous", "zigzag", "striped" or "striped:k"
        (:mod:`burst_jax.layouts.permutation`).
      num_shards: number of shards on the ring, as in :func:`positions`.
      segment_ids: ``[B, T]`` of any integer dtype with values in the range of int32, 0 for padding;
        None is one segment per sequence.
      multiple_of: another divisor of the padded length, default 1. With a ``ulysses_axis`` it is
        the number of devices on the ring and on that axis together, while ``num_shards`` counts the
        ring only.

    Returns:
      ``(tree, segment_ids)``: the padded pytree, and int32 ``[B, T_padded]`` for
      ``query_segment_ids`` and ``key_value_segment_ids``. NumPy arrays stay NumPy arrays, and JAX
      arrays stay JAX arrays; segment ids made for JAX arrays are a JAX array.

    Raises:
      ValueError: arrays of different ``[B, T]``, fewer than two dimensions, an unknown layout,
        ``segment_ids`` of another shape or of a non-integer dtype, or an array that is sharded over
        Explicit mesh axes which do not divide the padded length.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError("tree holds no arrays: pass an array [B, T, ...] or a pytree of them")
    for leaf in leaves:
        _check_is_array("tree", leaf)
        if np.ndim(leaf) < 2:
            raise ValueError(f"tree holds an array of shape {np.shape(leaf)}: it needs [B, T, ...]")
    shapes = {np.shape(leaf)[:2] for leaf in leaves}
    if len(shapes) > 1:
        raise ValueError(f"tree holds arrays of different [B, T]: {sorted(shapes)}")
    ((batch, length),) = shapes
    if segment_ids is None:
        segment_ids = np.ones((batch, length), np.int32)
        if arrays := [leaf for leaf in leaves if isinstance(leaf, jax.Array)]:
            segment_ids = _shard_like(jnp.asarray(segment_ids), arrays[0])
    if not hasattr(segment_ids, "dtype"):
        raise ValueError(
            f"segment_ids is a {type(segment_ids).__name__}: it must be an int32 array [B, T]"
        )
    if np.shape(segment_ids) != (batch, length):
        raise ValueError(
            f"segment_ids has shape {np.shape(segment_ids)}: it must be {(batch, length)}, the "
            "arrays' [B, T]"
        )
    segment_ids = as_int32("segment_ids", segment_ids)
    if not isinstance(multiple_of, (int, np.integer)) or multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of!r}: it must be a positive integer")
    step = math.lcm(padded_length(layout, 1, num_shards), int(multiple_of))
    extra = -length % step
    padded = jax.tree.map(lambda leaf: _pad_end(leaf, extra), tree)
    return padded, _pad_end(segment_ids, extra)


def _pad_end(x: Array, extra: int) -> Array:
    """``x`` ``[B, T, ...]`` with ``extra`` zeros appended to the T tokens."""
    widths = [(0, 0), (0, extra)] + [(0, 0)] * (np.ndim(x) - 2)
    if not isinstance(x, jax.Array):
        return np.pad(x, widths)
    mesh, names = _explicit_axes(x, 1)
    devices, length = axes_size(mesh, names), x.shape[1] + extra
    if length % devices:
        raise ValueError(
            f"the padded length is {length}, and the array's tokens are sharded over the Explicit "
            f"mesh axes {names}, {devices} devices, which do not divide it: make num_shards a "
            f"multiple of {devices}, or pad before the array is placed on the mesh"
        )
    return _over_auto_axes(lambda x: jnp.pad(x, widths), x)


def _explicit_axes(x: jax.Array, axis: int) -> tuple[AbstractMesh, tuple[str, ...]]:
    """The mesh of ``x``, and the Explicit mesh axes that shard its dimension ``axis``."""
    sharding = jax.typeof(x).sharding
    split = sharding.spec[axis] if axis < len(sharding.spec) else None
    explicit = sharding.mesh.explicit_axes
    return sharding.mesh, tuple(name for name in flat_names(split) if name in explicit)


def _shard_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x`` ``[B, T]``, sharded over Explicit mesh axes like ``like`` ``[B, T, ...]``."""
    mesh, batch = _explicit_axes(like, 0)
    _, tokens = _explicit_axes(like, 1)
    if not mesh.explicit_axes:
        return x
    if not isinstance(like, jax.core.Tracer) and isinstance(like.sharding, jax.NamedSharding):
        mesh = like.sharding.mesh  # Concrete; the mesh in the type has no devices.
    return jax.reshard(x, jax.NamedSharding(mesh, jax.P(batch or None, tokens or None)))


def _permute(x: Array, layout: str, num_shards: int, axis: int, *, inverse: bool) -> Array:
    """One leaf of :func:`to_layout`, or of :func:`from_layout` with ``inverse``."""
    _check_fixed(layout)
    _check_shards(num_shards)
    _check_is_array("x", x)
    shape = np.shape(x)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis is {axis}: the array has shape {shape}")
    axis %= len(shape)
    check_length(layout, shape[axis], num_shards, name=f"the array's length along axis {axis}")
    if layout == "contiguous":
        return x
    reorder = functools.partial(
        _reorder, layout=layout, num_shards=num_shards, axis=axis, inverse=inverse
    )
    return _over_auto_axes(reorder, x) if isinstance(x, jax.Array) else reorder(x, np)


def _over_auto_axes(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``function(x)`` with the sharding of ``x``, with Explicit mesh axes treated as Auto inside.

    Over Explicit axes JAX infers the sharding of every result, and rejects a reshape of a sharded
    sequence as ambiguous. Over Auto axes the compiler decides.
    """
    sharding = jax.typeof(x).sharding
    explicit = tuple(sharding.mesh.explicit_axes)
    if not set(explicit) & set(flat_names(*sharding.spec)):
        return function(x)
    over_auto: Any = auto_axes(function, axes=explicit, out_sharding=sharding)
    return over_auto(x)


def _reorder(
    x: Any, xp: Any = jnp, *, layout: str, num_shards: int, axis: int, inverse: bool
) -> Any:
    """``x`` permuted by ``xp``, NumPy or ``jax.numpy``."""
    # Reshapes, flips and transposes instead of a gather: XLA fuses them into one copy.
    shape = x.shape
    n, lead, tail = num_shards, shape[:axis], shape[axis + 1 :]
    stripe = stripe_size(layout)
    if stripe is not None:
        rows = (n, -1, stripe) if inverse else (-1, n, stripe)
        return xp.swapaxes(xp.reshape(x, (*lead, *rows, *tail)), axis, axis + 1).reshape(shape)
    leading = (slice(None),) * axis
    if inverse:  # [n, (low, high), half] to the low halves in order, then the high halves reversed.
        pairs = xp.reshape(x, (*lead, n, 2, -1, *tail))
        low, high = pairs[(*leading, slice(None), 0)], pairs[(*leading, slice(None), 1)]
        return xp.concatenate([low, xp.flip(high, axis)], axis).reshape(shape)
    halves = xp.reshape(x, (*lead, 2 * n, -1, *tail))
    low, high = halves[(*leading, slice(0, n))], halves[(*leading, slice(n, None))]
    return xp.stack([low, xp.flip(high, axis)], axis + 1).reshape(shape)


def _check_is_array(name: str, leaf: Any) -> None:
    """Raises ValueError for a Python number: a list of them is a pytree, not an array."""
    if not hasattr(leaf, "dtype"):
        raise ValueError(
            f"{name} holds {leaf!r}, a {type(leaf).__name__}: pass an array or a pytree of arrays, "
            "np.asarray(x) for a list of numbers"
        )


def _check_shards(num_shards: int) -> int:
    """``num_shards`` as a Python int; ValueError unless it is a positive integer."""
    if not isinstance(num_shards, (int, np.integer)) or num_shards < 1:
        raise ValueError(f"num_shards is {num_shards!r}: it must be a positive integer")
    return int(num_shards)
