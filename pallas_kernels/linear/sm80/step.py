"""A decoding step of gated delta rule layers: one kernel from the projections to the gated output.

One token needs few operations and reads each state once, so a step is bound by memory, or by the
launches of its parts. A CTA has a key head and its value heads, so that no other CTA reads the
convolutions' inputs that it replaces. A warpgroup has every second of the value heads, or all, and
keeps some columns of a state at a time in registers.

All vectors are of one head: computed with an element per thread, passed through shared memory, and
read along the rows or columns of the state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear.chunks import HEAD_DIM
from pallas_kernels.mosaic import fragments
from pallas_kernels.mosaic.fragments import along_columns
from pallas_kernels.mosaic.launch import WARPGROUP_AXIS, launch
from pallas_kernels.mosaic.sm80 import instructions
from pallas_kernels.mosaic.sm80.implementation import needs_ampere

# Columns of a state in registers: with more, fewer CTAs would fit into an SM.
_COLUMNS = 64
# All warps along the columns: sums over rows stay within a warp.
_FRAGMENTS = instructions.Fragments.of(jnp.bfloat16, 1)
_BY_THREAD = plgpu.Layout.WG_STRIDED((HEAD_DIM,), vec_size=1)


class StepWeights(NamedTuple):
    """The weights of a layer that a step reads, but for projections; of any floating dtype.

    Attributes:
      query_conv: ``[W, K, H]``.
      key_conv: ``[W, K, H]``.
      value_conv: ``[W, N, Hv]``.
      a_log: ``[N]``.
      dt_bias: ``[N]``.
      norm: ``[Hv]``.
    """

    query_conv: Any
    key_conv: Any
    value_conv: Any
    a_log: Any
    dt_bias: Any
    norm: Any


class StepState(NamedTuple):
    """What the kernel updates in place.

    Attributes:
      state: float32 ``[B, N, H, Hv]``.
      query: ``[B, W - 1, K, H]``, the convolution's last inputs.
      key: ``[B, W - 1, K, H]``.
      value: ``[B, W - 1, N, Hv]``.
    """

    state: Any
    query: Any
    key: Any
    value: Any


@dataclasses.dataclass(frozen=True)
class StepStatic:
    """Static parameters.

    Attributes:
      key_heads: K.
      heads: N.
      warpgroups: per CTA.
      unit_epsilon: added to the squared norm of a query and of a key.
      norm_epsilon: of the output's norm.
      most_beta: factor on the sigmoid.
    """

    key_heads: int
    heads: int
    warpgroups: int
    unit_epsilon: float
    norm_epsilon: float
    most_beta: float

    def column(self, name: str, head: Any) -> Any:
        """The first column of a head, or a gate's, in the fused product."""
        keys, values = self.key_heads * HEAD_DIM, self.heads * HEAD_DIM
        first, width = {
            "query": (0, HEAD_DIM), "key": (keys, HEAD_DIM), "value": (2 * keys, HEAD_DIM),
            "output_gate": (2 * keys + values, HEAD_DIM), "beta": (2 * keys + 2 * values, 1),
            "decay": (2 * keys + 2 * values + self.heads, 1),
        }[name]  # fmt: skip
        return first + head * width


class _Inputs(NamedTuple):
    """What the kernel reads: see :func:`step`."""

    projected: Any
    weights: StepWeights
    present: Any


class _Results(NamedTuple):
    """What it writes."""

    out: Any
    state: StepState


# Where :func:`step` can run.
unavailable = needs_ampere


def unsupported(projected: jax.Array, state: StepState) -> str | None:
    """Why :func:`step` cannot run these arrays, or None if it can."""
    if projected.dtype not in (jnp.bfloat16, jnp.float16) or state.query.dtype != projected.dtype:
        return f"activations are {projected.dtype}; it supports bfloat16 and float16: cast them"
    if state.state.shape[2:] != (HEAD_DIM, HEAD_DIM):
        return f"the head dims are {state.state.shape[2:]}; it supports {HEAD_DIM}"
    return None


def step(
    projected: jax.Array,
    weights: StepWeights,
    state: StepState,
    present: jax.Array,
    *,
    unit_epsilon: float,
    norm_epsilon: float,
    most_beta: float,
) -> tuple[jax.Array, StepState]:
    """One token of each sequence, between the projections of its layer.

    Args:
      projected: ``[B, columns]``, the outputs of all input projections: queries, keys, values and
        output gates of all heads, then betas and decays before their activations.
      weights: of the layer.
      state: before the token.
      present: int32 ``[B]``, 0 for sequences that keep their state.
      unit_epsilon: added to the squared norm of a query and of a key.
      norm_epsilon: of the output's norm.
      most_beta: factor on the sigmoid of beta.

    Returns:
      ``(out, state)``: the normalized, gated heads ``[B, N, Hv]``, and the state after the token.
    """
    batch, heads = state.state.shape[:2]
    key_heads = state.query.shape[2]
    static = StepStatic(
        key_heads, heads, math.gcd(heads // key_heads, 2), unit_epsilon, norm_epsilon, most_beta
    )
    vector = plgpu.SMEM((static.warpgroups, HEAD_DIM), jnp.float32)
    results = launch(
        functools.partial(_kernel, static),
        "gated_delta_rule_step",
        semantics=plgpu.LoweringSemantics.Lane,
        grid={"batch": batch, "head": key_heads},
        warpgroups=static.warpgroups,
        inputs=_Inputs(projected, weights, present),
        results=_Results(jax.ShapeDtypeStruct((batch, heads, HEAD_DIM), projected.dtype), state),
        memory=dict.fromkeys(("query", "key", "value", "out"), vector),
    )
    return results.out, results.state


def _kernel(static: StepStatic, given: _Inputs, results: _Results, memory: Any) -> None:
    """One CTA."""
    batch, key_head, warpgroup = (
        lax.axis_index(name) for name in ("batch", "head", WARPGROUP_AXIS)
    )
    memory = {name: ref.at[warpgroup] for name, ref in memory.items()}
    head = _Head(static, given, results, memory, batch)
    query = head.convolved("query", key_head)
    key = head.convolved("key", key_head)
    group = static.heads // static.key_heads
    for turn in range(group // static.warpgroups):
        head.run(key_head * group + turn * static.warpgroups + warpgroup)
    # The other warpgroup has read the old inputs, too.
    instructions.cta_barrier()

    @pl.when((warpgroup == 0) & (given.present[batch] > 0))
    def _():
        head.keep("query", key_head, query)
        head.keep("key", key_head, key)


class _Head(NamedTuple):
    """A warpgroup's work on one sequence."""

    static: StepStatic
    given: _Inputs
    results: _Results
    memory: Any
    batch: Any

    def convolved(self, name: str, head: Any) -> list[jax.Array]:
        """Writes the activated output to shared memory; returns the convolution's inputs."""
        old, taps = getattr(self.results.state, name), getattr(self.given.weights, f"{name}_conv")
        window = [_load(old.at[self.batch, i, head]) for i in range(old.shape[1])]
        window.append(self.projected(name, head))
        terms = [_wide(x) * _wide(_load(taps.at[i, head])) for i, x in enumerate(window)]
        total = functools.reduce(jnp.add, terms)
        self.memory[name][...] = total * _sigmoid(total)
        return window

    def projected(self, name: str, head: Any) -> jax.Array:
        """A head's part of the product."""
        part = pl.ds(self.static.column(name, head), HEAD_DIM)
        return _load(self.given.projected.at[self.batch, part])

    def keep(self, name: str, head: Any, window: list[jax.Array]) -> None:
        """Stores the inputs that the next token's convolution reads."""
        for i, x in enumerate(window[1:]):
            instructions.store(getattr(self.results.state, name).at[self.batch, i, head], x)

    def gate(self, name: str, head: Any) -> jax.Array:
        """A gate of a head before its activation."""
        return _wide(self.given.projected[self.batch, self.static.column(name, head)])

    def run(self, head: Any) -> None:
        """A value head."""
        static, given, memory = self.static, self.given, self.memory
        is_present = given.present[self.batch] > 0
        value = self.convolved("value", head)
        pl.when(is_present)(lambda: self.keep("value", head, value))
        fragments.warpgroup_barrier()
        query, key = (
            _unit(instructions.load_vector(memory[name], _FRAGMENTS.rows), static.unit_epsilon)
            for name in ("query", "key")
        )
        # softplus
        time_step = self.gate("decay", head) + _wide(given.weights.dt_bias[head])
        time_step = jnp.maximum(time_step, 0) + jnp.log(1 + jnp.exp(-jnp.abs(time_step)))
        decay = jnp.exp(-jnp.exp(_wide(given.weights.a_log[head])) * time_step)
        beta = static.most_beta * _sigmoid(self.gate("beta", head))
        shape = HEAD_DIM, _COLUMNS
        query, key = (_FRAGMENTS.along_rows(x, shape) for x in (query, key))
        # Then the state remains what it is, without a branch around every store.
        decay = jnp.where(is_present, decay, 1)
        key = jnp.where(is_present, key, 0)
        for first in range(0, HEAD_DIM, _COLUMNS):
            part = pl.ds(first, _COLUMNS)
            place = self.results.state.state.at[self.batch, head, :, part]
            state = decay * instructions.load(place, _FRAGMENTS.tile)
            values = instructions.load_vector(memory["value"].at[part], _FRAGMENTS.columns)
            update = beta * (values - jnp.sum(key * state, axis=0))
            update = jnp.where(is_present, update, 0)
            state = state + key * _along_columns(update, shape)
            memory["out"].at[part][...] = jnp.sum(query * state, axis=0) * HEAD_DIM**-0.5
            instructions.store(place, state)
        fragments.warpgroup_barrier()
        self.write(head)

    def write(self, head: Any) -> None:
        """The normalized, gated output."""
        rows = instructions.load_vector(self.memory["out"], _FRAGMENTS.rows)
        own = instructions.load_vector(self.memory["out"], _BY_THREAD)
        mean = jnp.sum(rows * rows, axis=0) * (1 / HEAD_DIM)
        gate = _wide(self.projected("output_gate", head))
        normed = own * lax.rsqrt(mean + self.static.norm_epsilon)
        out = normed * _wide(_load(self.given.weights.norm)) * gate * _sigmoid(gate)
        target = self.results.out
        instructions.store(target.at[self.batch, head], out.astype(target.dtype))


def _load(ref: Any) -> jax.Array:
    return instructions.load(ref, _BY_THREAD)


def _along_columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return plgpu.layout_cast(along_columns(x, shape), _FRAGMENTS.tile)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def _unit(x: jax.Array, epsilon: float) -> jax.Array:
    """A vector of norm 1."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=0) + epsilon)
