"""Whether positions can be those of tokens in a layout: the mistake that changes every score.

RoPE takes positions from the caller, the ring's masks take them from the layout. A caller who
permutes the tokens and passes ``arange`` (or does not permute at all) gets a loss that falls, and a
model that never saw the order of its text. In the zigzag and striped orders positions go down at
least once between shards::

    zigzag, 2 shards     tokens lie as   0 1 6 7 | 2 3 4 5
    positions            right           0 1 6 7 | 2 3 4 5
                         an arange       0 1 2 3 | 4 5 6 7

Two things cannot be right:

- Positions that only ascend along the array, within every segment, although the layout's order
  falls inside one of them: the later tokens of a segment would have the earlier positions.
- Of rows with segment ids: a token whose position is below that of the token before it in the text,
  both of one segment, and is by one above that of the token before it in the array. So it was
  counted along the array. That finds an ``arange`` in packed rows too, whose segments mostly end
  where the layout's order falls. Where positions restart inside a segment, at whatever number, no
  token of another place has the number below.

Nothing else is refused: positions may restart with a document, start anywhere, repeat or leave
places out. So a row of documents so short that none reaches to where the order falls passes, with
whatever positions. Without a mask that knows positions (causal, window) any order computes the
same, and nothing is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_jax.layout import positions as layout_positions
from burst_jax.sharding import (
    flat_names,
    place_explicit,
    resolve_mesh,
    sequence_axes,
    token_spec,
)
from pallas_kernels.arrays import as_int32


def refuse_wrong_order(
    x: jax.Array, positions: Any, segment_ids: Any, options: Mapping[str, Any]
) -> jax.Array:
    """``x`` itself, but NaN in the rows whose positions contradict the layout.

    Positions and segment ids whose values are known (NumPy arrays, or JAX arrays outside ``jit``)
    raise instead. Those of a traced call are known on the devices alone, where nothing can raise;
    NaN makes the loss NaN at the first step. Of the second rule a traced call checks the tokens at
    the ends of each device's part and of each block of the layout: one sum over the sequence axes,
    of a dozen integers for each row and device.

    Args:
      x: ``[B, T, D]``, what was computed with the positions.
      positions: integers ``[B, T]`` or ``[T]``, in the layout's order.
      segment_ids: integers ``[B, T]``, 0 for padding, or None.
      options: keyword arguments of ``burst_attention``, checked by it.

    Raises:
      ValueError: known positions contradict the layout.
    """
    layout = options.get("layout", "contiguous")
    masked = options.get("is_causal", False) or options.get("local_window_size") is not None
    if not masked or layout == "contiguous":
        return x
    mesh = resolve_mesh(options.get("mesh"))
    ring = flat_names(options.get("seq_axis", "seq"))
    n, length = math.prod(mesh.shape[axis] for axis in ring), x.shape[1]
    falls = np.diff(layout_positions(layout, length, n)) < 0
    if not falls.any():
        return x
    if _known(positions) and (segment_ids is None or _known(segment_ids)):
        segments = np.ones((1, length), np.int32) if segment_ids is None else segment_ids
        places, segments = np.atleast_2d(positions), np.asarray(segments)
        wrong = _contradict(places, segments, falls)
        if segment_ids is not None:
            everything = _Samples(layout_positions(layout, length, n)[None], all_of_them=True)
            wrong = wrong | _goes_back(places, segments, everything)
        if wrong.any():
            raise ValueError(
                f"positions of row {int(wrong.argmax())} are in another order than its tokens, "
                f"which lie in the {layout} layout over {n} shards (an arange?): pass "
                f"burst_jax.positions({layout!r}, {length}, {n}), or permute what you have with "
                f"to_layout(..., {layout!r}, {n}), as make_batch does; tokens too"
            )
        return x
    tokens, batch = sequence_axes(options), options.get("batch_axis")
    shards = math.prod(mesh.shape[axis] for axis in tokens)
    between = falls[length // shards - 1 :: length // shards]
    samples = None
    if segment_ids is not None:
        samples = _Samples(layout_positions(layout, length, n).reshape(shards, -1))
    positions = jnp.atleast_2d(as_int32("positions", positions))
    segments = jnp.ones((1, length), jnp.int32)
    if segment_ids is not None:
        segments = as_int32("segment_ids", segment_ids)
    # One row of positions or segment ids serves all rows of x, and is split over no batch axis.
    arrays = positions, segments
    specs = [
        token_spec(batch if array.shape[0] == x.shape[0] else None, tokens) for array in arrays
    ]
    given = (place_explicit(a, mesh, spec) for a, spec in zip(arrays, specs, strict=True))
    rows = batch if any(array.shape[0] == x.shape[0] for array in arrays) else None

    def local(positions: jax.Array, segments: jax.Array) -> jax.Array:
        return _contradict_across(positions, segments, between, tokens, samples)

    wrong = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=jax.P(rows))(*given)
    return jnp.where(wrong[:, None, None], jnp.asarray(jnp.nan, x.dtype), x)


def _known(array: Any) -> bool:
    """Whether this process has the values."""
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def _pairs(positions: Any, segments: Any) -> tuple[Any, Any]:
    """Of neighbours in the array: whether both are of one segment, and whether positions ascend."""
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    return same, positions[:, 1:] > positions[:, :-1]


def _contradict(positions: Any, segments: Any, falls: np.ndarray) -> Any:
    """bool ``[rows]``; ``falls[i]``: in the layout, token i + 1 of the array is before token i."""
    same, ascend = _pairs(positions, segments)
    return (ascend | ~same).all(1) & (same & falls).any(1)


class _Samples:
    """Tokens of every device, and which of them follow each other in the text and in the array.

    Attributes:
      places: indices in a device's part: both ends, and where a block of the layout ends in it; or
        all of them.
      tokens: of tokens that are shown with both the token before in the text and the token before
        in the array, each as ``device * len(places) + sample``.
      before_in_text: of each of these the token before in the text.
      before_in_array: and the token before in the array.
    """

    def __init__(self, text: np.ndarray, *, all_of_them: bool = False) -> None:
        """``text``: the place in the text of every token, by device, ``[devices, tokens]``."""
        length = text.shape[1]
        # Where striped, no neighbours in the array are neighbours in the text, so none is a seam.
        steps = np.diff(text)
        seams = np.flatnonzero((steps != steps.min(initial=text.size)).any(0))
        some = np.concatenate([[0, 1, length - 2, length - 1], seams, seams + 1])
        if all_of_them:
            some = np.arange(length)
        self.places = np.unique(some.clip(0, length - 1))
        shown = text[:, self.places].reshape(-1)
        array = (np.arange(text.shape[0])[:, None] * length + self.places).reshape(-1)
        (in_text, known_text), (in_array, known_array) = _before(shown), _before(array)
        self.tokens = np.flatnonzero(known_text & known_array)
        self.before_in_text, self.before_in_array = in_text[self.tokens], in_array[self.tokens]


def _before(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every entry the index of the one that is by one less, and whether there is one."""
    order = np.argsort(places)
    found = order[np.searchsorted(places[order], places - 1)]
    return found, places[found] == places - 1


def _goes_back(positions: Any, segments: Any, samples: _Samples) -> Any:
    """bool ``[rows]``: whether a token was counted along the array, against the text."""
    here, before = positions[:, samples.tokens], positions[:, samples.before_in_text]
    segment = segments[:, samples.tokens]
    same = (segment == segments[:, samples.before_in_text]) & (segment != 0)
    counted = here == positions[:, samples.before_in_array] + 1
    return (same & (here < before) & counted).any(1)


def _contradict_across(
    positions: jax.Array,
    segments: jax.Array,
    falls: np.ndarray,
    axes: tuple[str, ...],
    samples: _Samples | None,
) -> jax.Array:
    """The same of rows that are split over mesh axes; ``falls`` between the devices' parts alone.

    Inside a shard the layout's order always ascends, so a shard says of itself whether its
    positions do, and the tokens at its ends say the rest.
    """
    same, ascend = _pairs(positions, segments)
    descends = (same & ~ascend).any(1)
    rows = descends.shape[0]
    places = np.array([0, -1]) if samples is None else np.array([0, -1, *samples.places])
    shown = [jnp.broadcast_to(x[:, places].T, (places.size, rows)) for x in (positions, segments)]
    mine = jnp.concatenate([*shown, descends.astype(jnp.int32)[None]])
    here = jnp.arange(falls.size + 1, dtype=jnp.int32) == lax.axis_index(axes)
    every = lax.psum(jnp.where(here[:, None, None], mine, 0), axes)
    place, segment, descends = jnp.split(every, [places.size, 2 * places.size], axis=1)
    same = (segment[:-1, 1] == segment[1:, 0]) & (segment[1:, 0] != 0)
    ascend = place[1:, 0] > place[:-1, 1]
    ordered = (ascend | ~same).all(0) & (descends == 0).all((0, 1))
    wrong = ordered & (same & falls[:, None]).any(0)
    if samples is None:
        return wrong
    place, segment = (x[:, 2:].reshape(-1, rows).T for x in (place, segment))
    return wrong | _goes_back(place, segment, samples)
