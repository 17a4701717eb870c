"""The gated delta rule on one device's tokens, and its gradient, as a ``custom_vjp``.

Forward: the affine map of each run of tokens, an exchange of maps, the scan from the states that
arrive. Backward: the gradient of each run's first state from its own tokens, an exchange with M
transposed, then all gradients. A device alone needs no exchange, and maps for parts alone, as do
the whole documents of a balanced batch. Each run of its split documents is a sequence of its own.
Runs that are too few for a GPU are scanned in parts, which have maps like those of runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.attention.segment_ids import with_padding_zero
from burst_jax.linear.documents import tokens_of
from burst_jax.linear.exchange import Kept, arriving, arriving_gradients
from burst_jax.linear.runs import ALONE, DeviceRuns, DocumentRuns
from burst_jax.linear.split_documents import Slots, SplitRuns, are_of_others, with_zone
from burst_jax.linear.split_documents import arriving as arriving_in_documents
from burst_jax.linear.split_documents import arriving_gradients as gradients_in_documents
from pallas_kernels.arrays import pad_axis, vary, varying_axes
from pallas_kernels.device import Target, current_target
from pallas_kernels.linear.backend import Implementation, Inputs
from pallas_kernels.linear.choice import resolve
from pallas_kernels.linear.chunks import Tokens

# The names under which a remat policy can save results, so that no scan and no exchange runs twice:
# jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES).
CHECKPOINT_NAMES = ("gated_delta_rule_out", "gated_delta_rule_states", "gated_delta_rule_chunks")
# The arguments that are arrays of tokens.
NAMES = ("query", "key", "value", "log_decay", "beta")


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything static of a call. Hashable.

    Attributes:
      runs: how devices share sequences, or documents.
      scale: of q k.
      padding_id: the segment id of padding.
      implementation: the name of the one that the caller chose, or None.
    """

    runs: DeviceRuns | DocumentRuns
    scale: float
    padding_id: int
    implementation: str | None


def in_shard(
    request: Request, arrays: Mapping[str, jax.Array], target: Target | None = None
) -> tuple[jax.Array, ...]:
    """The output and the final state, from one device's arrays; inside a ``shard_map`` with axes.

    Args:
      request: the static part of the call.
      arrays: by the names of the arguments, checked.
      target: the platform to compile for; None is that of the code being traced.

    Returns:
      ``[B, T, N, Hv]``, and float32 ``[B, N, H, Hv]``, which is the same on all devices of a
      sequence; the output alone of a balanced batch.
    """
    runs = request.runs
    # Every array is marked as varying over the axes of the tokens and whatever another one varies
    # over. The transpose sums the gradient of an array that was the same on all devices.
    over = [lax.axis_index(name) for name in runs.axes]
    arrays = vary(dict(arrays), varying_axes(arrays, over))
    target = target or current_target()
    if isinstance(runs, DocumentRuns):
        return (_of_documents(request, runs, arrays, target),)
    inputs, start = _inputs(runs, arrays, request.padding_id), _start(runs, arrays)
    o, ends = _scanned(request, runs, inputs, start, target)
    return runs.join(o), _final(runs, ends)


def _of_documents(
    request: Request, runs: DocumentRuns, arrays: Mapping[str, jax.Array], target: Target
) -> jax.Array:
    """The output of a balanced batch: of whole documents, and of the runs of split ones."""
    # In the tables padding is 0.
    ids = with_padding_zero("segment_ids", arrays["segment_ids"], request.padding_id)
    wrong = are_of_others(arrays["run_checksums"], ids)
    of_split, slots = None, None
    if runs.zone:
        of_split = SplitRuns.of(arrays)
        slots = Slots.of(of_split, runs.zone, runs.zone)
        ids = with_zone(ids, jnp.where(slots.has, 0, ids[:, -runs.zone :]))
    inputs = _inputs(ALONE, {**arrays, "segment_ids": ids}, 0)
    o, _ = _scanned(request, ALONE, inputs, _start(ALONE, arrays), target)
    if of_split is not None and slots is not None:
        batch, count = of_split.shape
        each = batch * count, runs.zone

        def cut(x: jax.Array) -> jax.Array:
            return slots.cut(x[:, -runs.zone :]).reshape(*each, *x.shape[2:])

        given: Any = [cut(arrays[name]) for name in NAMES]
        valid = slots.used.reshape(each)
        pieces = Inputs(*given, tokens=Tokens(jnp.zeros_like(valid), valid))
        start = jnp.repeat(_start(ALONE, arrays), count, 0)
        of_pieces, _ = _scanned(request, runs, pieces, start, target, of_split)
        of_pieces = of_pieces.reshape(batch, -1, *o.shape[2:])
        o = with_zone(o, o[:, -runs.zone :] + slots.pasted(of_pieces))
    return jnp.where(lax.expand_dims(wrong, (1, 2, 3)), jnp.asarray(jnp.nan, o.dtype), o)


def _scanned(
    request: Request,
    runs: DeviceRuns | DocumentRuns,
    inputs: Inputs,
    start: jax.Array,
    target: Target,
    of_split: SplitRuns | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The output of runs in the batch, and the state after each; ``of_split`` are their tables."""
    length = inputs.v.shape[1]
    implementation = resolve(
        request.implementation,
        platform=target.platform,
        compute_capability=target.compute_capability,
        inputs=inputs,
    )
    inputs, parts = _padded(inputs, implementation.multiple), 1
    if isinstance(runs, DeviceRuns):
        parts = implementation.parts(inputs, runs.total > 1)
        # Moves no data.
        inputs = jax.tree.map(lambda x: _by_part(x, parts), inputs)
        start = pad_axis(start[:, None], 1, parts).reshape(-1, *start.shape[1:])
    o, ends = _rule(_Rule(runs, request.scale, implementation, parts), inputs, start, of_split)
    o = o.reshape(-1, o.shape[1] * parts, *o.shape[2:])
    return o[:, :length], ends.reshape(-1, parts, *ends.shape[1:])[:, -1]


def _by_part(x: jax.Array, parts: int) -> jax.Array:
    """``[B * parts, T / parts, ...]`` of ``[B, T, ...]``."""
    return x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])


def _inputs(runs: DeviceRuns, arrays: Mapping[str, jax.Array], padding_id: int) -> Inputs:
    """A device's runs in the batch, with zeros in padding."""
    given: Any = [runs.split(arrays[name]) for name in NAMES]
    if "segment_ids" not in arrays:
        return Inputs(*given)
    tokens = tokens_of(runs, arrays["segment_ids"], padding_id)
    # Padding has beta 0, but 0 times infinity or NaN is NaN.
    given = [
        jnp.where(lax.expand_dims(tokens.valid, range(2, x.ndim)), x, jnp.zeros((), x.dtype))
        for x in given
    ]
    return Inputs(*given, tokens=tokens)


def _padded(inputs: Inputs, multiple: int) -> Inputs:
    """Runs of whole chunks: keys of zeros change no state."""
    length = -(-inputs.v.shape[1] // multiple) * multiple
    return jax.tree.map(lambda x: pad_axis(x, 1, length), inputs)


def _start(runs: DeviceRuns, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """The initial state at the first run of a sequence, zeros at the others."""
    key, value = arrays["key"], arrays["value"]
    batch, _, heads, values = value.shape
    initial = arrays.get("initial_state")
    if initial is None:
        shape = batch * runs.count, heads, key.shape[-1], values
        return vary(jnp.zeros(shape, jnp.float32), varying_axes(value))
    if runs.total == 1:
        return initial
    is_first = lax.expand_dims(runs.here() == 0, range(1, 1 + initial.ndim))
    return runs.in_batch(jnp.where(is_first, initial, 0))


def _final(runs: DeviceRuns, ends: jax.Array) -> jax.Array:
    """The state after the last run of a sequence."""
    if runs.total > 1:
        ends = runs.per_run(ends)
        is_last = lax.expand_dims(runs.here() == runs.total - 1, range(1, ends.ndim))
        ends = jnp.where(is_last, ends, 0).sum(0)
    return lax.psum(ends, runs.axes) if runs.axes else ends


class _Rule(NamedTuple):
    """What is static in the ``custom_vjp``.

    Attributes:
      runs: of all devices.
      scale: of q k.
      implementation: of the passes.
      parts: of each run; the arrays have one after the other as sequences of the batch.
    """

    runs: DeviceRuns | DocumentRuns
    scale: float
    implementation: Implementation
    parts: int

    def arriving(
        self, rows: jax.Array, of_split: SplitRuns | None, prepared: Any
    ) -> tuple[jax.Array, jax.Array | Kept, Any]:
        """The states that arrive at each part of this device's runs, and what is kept of M."""
        if isinstance(self.runs, DocumentRuns):
            assert of_split is not None
            states, kept = arriving_in_documents(self.runs, of_split, rows)
            return states.mT, kept, prepared
        name = self.implementation.meanwhile
        deferred = None if name is None else getattr(prepared, name)
        compose = self.implementation.compose
        states, kept, deferred = arriving(self.runs, rows, deferred, self.parts, compose)
        if name is not None:
            prepared = prepared._replace(**{name: deferred})
        return states.mT, kept, prepared

    def arriving_gradients(
        self, kept: jax.Array | Kept, own: jax.Array, of_split: SplitRuns | None
    ) -> jax.Array:
        """Those of the parts' last states, from later ones."""
        if isinstance(self.runs, DocumentRuns):
            assert of_split is not None
            assert not isinstance(kept, Kept)
            return gradients_in_documents(self.runs, of_split, kept, own.mT).mT
        assert isinstance(kept, Kept)
        return arriving_gradients(self.runs, kept, own.mT).mT


class _Residuals(NamedTuple):
    """What the backward pass reads.

    Attributes:
      inputs: of the forward pass.
      kept: what the implementation keeps of it.
      start: the state before each part of a run.
      m: what the exchange keeps of the maps' M; None without maps.
      of_split: the tables of the runs, of split documents.
    """

    inputs: Inputs
    kept: Any
    start: jax.Array
    m: jax.Array | Kept | None
    of_split: SplitRuns | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(
    rule: _Rule, inputs: Inputs, start: jax.Array, of_split: SplitRuns | None
) -> tuple[jax.Array, jax.Array]:
    """The output and the state after each part; ``start`` is added to what arrives at each."""
    return _forward(rule, inputs, start, of_split)[0]


def _forward(
    rule: _Rule, inputs: Inputs, start: jax.Array, of_split: SplitRuns | None
) -> tuple[tuple[jax.Array, jax.Array], _Residuals]:
    runs, scale, implementation, parts = rule
    m = None
    if isinstance(runs, DocumentRuns) or runs.total * parts > 1:
        prepared, rows = implementation.mapped(inputs, start)
        states, m, prepared = rule.arriving(rows, of_split, prepared)
        start = start + states
        m, start = jax.tree.map(lambda x: checkpoint_name(x, CHECKPOINT_NAMES[1]), (m, start))
    else:
        prepared = implementation.prepare(inputs)
    o, last, kept = implementation.forward(inputs, prepared, start, scale)
    o = checkpoint_name(o, CHECKPOINT_NAMES[0])
    kept = jax.tree.map(lambda x: checkpoint_name(x, CHECKPOINT_NAMES[2]), kept)
    return (o, last), _Residuals(inputs, kept, start, m, of_split)


def _backward(
    rule: _Rule, residuals: _Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Inputs, jax.Array, None]:
    _, scale, implementation, _ = rule
    inputs, kept, start, m, of_split = residuals
    do, last = cotangents
    if inputs.tokens is not None:
        do = jnp.where(inputs.tokens.valid[..., None, None], do, jnp.zeros((), do.dtype))
    prepared = implementation.restore(inputs, kept)
    if m is not None:
        own = implementation.first_gradient(inputs, prepared, do, last, scale)
        last = last + rule.arriving_gradients(m, own, of_split)
    made = implementation.backward(inputs, prepared, start, do, last, scale)
    *gradients, first = made
    arrays = [x.astype(y.dtype) for x, y in zip(gradients, inputs[:5], strict=True)]
    no_gradient: Any = None
    return Inputs(*arrays, tokens=no_gradient), first, None


_rule.defvjp(_forward, _backward)
