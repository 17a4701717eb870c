"""An nnx linear-attention layer, Gated DeltaNet, for models with sharded, permuted sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from burst_jax.attention.order import reject_wrong_order
from burst_jax.attention.segment_ids import with_padding_zero
from burst_jax.errors import check_bool, check_integer, check_positive
from burst_jax.layers.nnx_layer import KERNEL_INIT
from burst_jax.layers.norm import RMSNorm
from burst_jax.layers.projection import check_explicit_heads, check_local_heads, project
from burst_jax.layouts.parse import LayoutLike, parse_layout
from burst_jax.layouts.tables import DocumentTables
from burst_jax.linear import gated_delta_rule, gated_delta_rule_step, short_convolution
from burst_jax.linear.convolution import convolved_step
from burst_jax.parallel.mesh import (
    AxisNames,
    flat_names,
    gather_explicit,
    inside_shard_map,
    resolve_mesh,
    with_devices,
    without_devices,
)

# Added to the squared norm of a query and of a key, as in transformers' Qwen3-Next.
NORM_EPSILON = 1e-6
# Time steps dt at initialization, log-uniform, and decay rates A, uniform (arXiv 2412.06464).
TIME_STEPS = (1e-3, 0.1)
DECAY_RATES = (1.0, 16.0)
# Each tap of a depthwise convolution is uniform in +- 1 / sqrt(taps).
CONV_INIT = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class DeltaNetState(NamedTuple):
    """What :meth:`GatedDeltaNet.step` needs of the tokens before; a pytree of fixed size.

    Attributes:
      state: float32 ``[B, N, H, Hv]``, that of :func:`burst_jax.linear.gated_delta_rule`.
      query: ``[B, W - 1, K, H]``, the convolution's inputs at the last W - 1 tokens; 0 where the
        document has fewer.
      key: ``[B, W - 1, K, H]``, the same for keys.
      value: ``[B, W - 1, N, Hv]``, the same for values.
    """

    state: jax.Array
    query: jax.Array
    key: jax.Array
    value: jax.Array


class GatedDeltaNet(nnx.Module):
    """Gated DeltaNet over a mesh, the linear-attention layer of Qwen3-Next.

    ::

        q, k, v = (silu(conv(x W)) for W in (Wq, Wk, Wv))     # [B,T,K,H] [B,T,K,H] [B,T,N,Hv]
        beta = sigmoid(x Wb)                                  # [B,T,N]
        g = -exp(A_log) softplus(x Wa + dt_bias)              # [B,T,N]
        o = gated_delta_rule(q / |q|, k / |k|, v, g, beta)    # [B,T,N,Hv]
        out = (norm(o) silu(x Wz)) Wo                         # [B,T,D]

    B batch, T length, D features, N value heads, K key heads, H head dim of queries and keys, Hv
    head dim of values, W taps. ``conv`` is a causal depthwise convolution
    (:func:`burst_jax.linear.short_convolution`), ``norm`` an RMS norm of each head over Hv. Gates
    and norms are computed in float32.

    Inside a ``shard_map`` over the sequence axes (over any axis, if the sequence is not sharded)
    the layer's input and weights are one device's. Along ``tensor_axis`` a device has the weights
    of its own heads, and the output projections of all devices' heads are summed.

    Args:
      in_features: number of features of the input, D.
      num_heads: number of value heads, N.
      num_key_heads: number of query and key heads, K, a divisor of N; None is N. Value head h uses
        key head ``h // (N // K)``.
      head_dim: number of features of a query and key head, H.
      value_head_dim: number of features of a value head, Hv; None is H.
      out_features: number of features of the output; None is D.
      conv_taps: number of taps of the convolutions, W.
      norm_epsilon: epsilon of the output's norm.
      negative_eigenvalues: whether beta is ``2 sigmoid(x Wb)``, with which the state's transitions
        have eigenvalues from -1 to 1 (arXiv 2411.12537), as in Olmo Hybrid.
      dtype: floating dtype of the computation; None promotes the dtypes of input and weights.
      param_dtype: floating dtype of the weights, but for ``A_log`` and ``dt_bias``, which are
        float32.
      kernel_init: initializer of the input projections.
      out_kernel_init: initializer of the output kernel; None is ``kernel_init``.
      rngs: random numbers for the initializers (stream "params").
      mesh: as in :func:`burst_jax.linear.gated_delta_rule`, like the next six.
      seq_axis: the mesh axes that shard the tokens; None if none does.
      batch_axis: the mesh axes that shard the batch.
      tensor_axis: the mesh axes that shard the heads, K and N.
      layout: "contiguous" or "zigzag", or "balanced:z", of a batch.
      padding_id: the segment id of padding.
      implementation: that of the gated delta rule, "mosaic_sm90", "mosaic_sm80" or "xla"; None is
        the fastest that supports the call.

    Raises:
      ValueError: sizes that do not fit together, a negative_eigenvalues that is no bool, or an
        unknown layout.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        head_dim: int,
        value_head_dim: int | None = None,
        out_features: int | None = None,
        conv_taps: int = 4,
        norm_epsilon: float = 1e-6,
        negative_eigenvalues: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = KERNEL_INIT,
        out_kernel_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
        mesh: Mesh | AbstractMesh | None = None,
        seq_axis: AxisNames = "seq",
        batch_axis: AxisNames = None,
        tensor_axis: AxisNames = None,
        layout: LayoutLike = "contiguous",
        padding_id: int = 0,
        implementation: str | None = None,
    ) -> None:
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        check_sizes(num_heads, num_key_heads, head_dim, value_head_dim, conv_taps)
        check_positive("norm_epsilon", norm_epsilon)
        check_bool("negative_eigenvalues", negative_eigenvalues)
        parse_layout(layout)
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.negative_eigenvalues = negative_eigenvalues
        # A tuple, because nnx hashes the static attributes of a module.
        self.options: tuple[tuple[str, Any], ...] = (
            ("batch_axis", batch_axis),
            ("implementation", implementation),
            ("layout", layout),
            ("mesh", mesh),
            ("padding_id", padding_id),
            ("seq_axis", seq_axis),
            ("tensor_axis", tensor_axis),
        )
        linear = functools.partial(
            nnx.LinearGeneral, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        inner = functools.partial(linear, kernel_init=kernel_init)
        key_heads, value_heads = (num_key_heads, head_dim), (num_heads, value_head_dim)
        self.query = inner(in_features, key_heads)
        self.key = inner(in_features, key_heads)
        self.value = inner(in_features, value_heads)
        dt_shape = self._add_gates(inner, in_features, head_dim, value_heads)
        self.out = linear(
            value_heads,
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
        )

        def taps(heads: tuple[int, int]) -> nnx.Param:
            found = CONV_INIT(rngs.params(), (conv_taps, math.prod(heads)), param_dtype)
            return nnx.Param(found.reshape(conv_taps, *heads))

        self.query_conv, self.key_conv, self.value_conv = map(
            taps, (key_heads, key_heads, value_heads)
        )
        rates = jax.random.uniform(
            rngs.params(), (num_heads,), jnp.float32, DECAY_RATES[0], DECAY_RATES[1]
        )
        self.A_log = nnx.Param(jnp.log(rates))
        low, high = map(math.log, TIME_STEPS)
        steps = jnp.exp(jax.random.uniform(rngs.params(), dt_shape, jnp.float32, low, high))
        # softplus of it is the time step.
        self.dt_bias = nnx.Param(steps + jnp.log(-jnp.expm1(-steps)))
        self.norm = RMSNorm(value_head_dim, epsilon=norm_epsilon, param_dtype=param_dtype)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | np.ndarray | None = None,
        segment_ids: jax.Array | None = None,
        *,
        document_tables: DocumentTables | None = None,
    ) -> jax.Array:
        """Mixes the tokens of the whole sequence.

        Args:
          x: ``[B, T, D]``, tokens in the order of the option ``layout``.
          positions: integers ``[B, T]`` or ``[T]``: each token's position in its sequence, in the
            order of the tokens (:func:`burst_jax.positions`). The layer does not need them, and
            checks their order as :class:`burst_jax.BurstAttention` does. None checks nothing.
          segment_ids: integers ``[B, T]`` in the order of the tokens, an id per document, and
            ``padding_id`` for padding; None is one document.
          document_tables: those of :func:`burst_jax.linear.gated_delta_rule`, in a balanced layout.

        Returns:
          ``[B, T, out_features]`` in the dtype of the computation; 0 for padding.

        Raises:
          ValueError: wrong shapes or dtypes, or positions in another order than the tokens. Under
            ``jit`` the values of positions are unknown: a sequence with such positions becomes NaN
            instead.
          NotImplementedError: a striped layout.
        """
        out = self.mix(x, segment_ids, document_tables)
        options = dict(self.options) | {"is_causal": True}
        if positions is None or self._mesh() is None:
            return out
        if segment_ids is not None:
            segment_ids = with_padding_zero("segment_ids", segment_ids, options["padding_id"])
        return reject_wrong_order(out, positions, segment_ids, options)

    def mix(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        document_tables: DocumentTables | None = None,
    ) -> jax.Array:
        """As a call without positions."""
        return self._mix(x, segment_ids, document_tables)[0]

    def prefill(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        state: DeltaNetState | None = None,
    ) -> tuple[jax.Array, DeltaNetState]:
        """The call, and the state after each sequence's last token, for :meth:`step`.

        Sequences of different lengths start or end with padding, which may also be elsewhere.
        Inside a ``shard_map`` states are those of a device's heads, the same on all devices of a
        sequence.

        Args:
          x: ``[B, T, D]``, as in the call.
          segment_ids: as in the call. The state is that of the last document.
          state: of the tokens before, which each sequence's first document continues: sequences can
            be processed in parts. A part that is all padding keeps it. None is no token.

        Returns:
          ``(out, state)``.

        Raises:
          ValueError: as in the call, or the state has another shape.
          NotImplementedError: a striped or balanced layout.
        """
        if state is not None:
            self._check_state(state, x.shape[0])
        out, after = self._mix(x, segment_ids, before=state, return_state=True)
        assert after is not None
        return out, after

    def initial_state(self, batch: int, dtype: DTypeLike | None = None) -> DeltaNetState:
        """The state before the first token.

        Args:
          batch: number of sequences, B.
          dtype: of the convolution's inputs; None is that of the computation, or of the weights if
            the layer has none.
        """
        batch = check_integer("batch", batch, 1)
        taps, *key_heads = self.query_conv.shape
        value_heads = self.value_conv.shape[1:]
        dtype = self.query.dtype or self.query.param_dtype if dtype is None else dtype
        keys, values = (
            jnp.zeros((batch, taps - 1, *heads), dtype) for heads in (key_heads, value_heads)
        )
        state = jnp.zeros((batch, value_heads[0], key_heads[1], value_heads[1]), jnp.float32)
        return DeltaNetState(state, keys, keys, values)

    def step(self, x: jax.Array, state: DeltaNetState) -> tuple[jax.Array, DeltaNetState]:
        """One token of each sequence, for decoding.

        Args:
          x: ``[B, D]``.
          state: of the tokens before, from :meth:`prefill`, :meth:`initial_state` or a step. It has
            the same size for sequences of any length.

        Returns:
          ``(out, state)``: ``[B, out_features]``, and the state after the token.

        Raises:
          ValueError: ``x`` or the state has another shape.
        """
        if x.ndim != 2:
            raise ValueError(f"x has shape {x.shape}: a step needs [B, features], one token each")
        self._check_state(state, x.shape[0])
        layer = gather_explicit(self)
        x = x[:, None]
        names, tails = ("query", "key", "value"), state[1:]
        inputs = [project(getattr(layer, name), x)[:, 0] for name in names]
        weights = [getattr(layer, f"{name}_conv")[...] for name in names]
        mixed, tails = convolved_step(tails, inputs, weights, jax.nn.silu)
        query, key, value = mixed
        decay, beta = layer.gates(x)
        out, new = gated_delta_rule_step(
            unit(query), unit(key), value, decay[:, 0], beta[:, 0], state.state
        )
        return layer._output(out[:, None], x)[:, 0], DeltaNetState(new, *tails)

    def with_projections(self, **projections: nnx.Module) -> GatedDeltaNet:
        """A copy with other projections, for use inside a ``shard_map``.

        Args:
          **projections: by name (query, key, value, output_gate, beta, decay, out): modules that
            are called like the layer's, with its attributes ``kernel`` and ``bias``.
        """
        layer = nnx.merge(*nnx.split(self))
        for name, projection in projections.items():
            setattr(layer, name, projection)
        return layer

    def gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``(log decay, beta)`` in float32, as of :func:`burst_jax.linear.gated_delta_rule`."""
        wide, bias = jnp.float32, _wide(self.dt_bias)
        time_step = jax.nn.softplus(self._time_step(x).astype(wide) + bias)
        rate = jnp.exp(_wide(self.A_log)).reshape(-1, *[1] * (bias.ndim - 1))
        beta = jax.nn.sigmoid(project(self.beta, x).astype(wide))
        return -rate * time_step, 2 * beta if self.negative_eigenvalues else beta

    def _add_gates(
        self, linear: Any, in_features: int, head_dim: int, value_heads: tuple[int, int]
    ) -> tuple[int, ...]:
        """Adds the gates' projections by ``linear``; returns the shape of ``dt_bias``."""
        del head_dim
        self.output_gate = linear(in_features, value_heads)
        self.beta = linear(in_features, value_heads[0])
        self.decay = linear(in_features, value_heads[0])
        return value_heads[:1]

    def _time_step(self, x: jax.Array) -> jax.Array:
        """The time step of the decays before bias and softplus."""
        return project(self.decay, x)

    def _output_gate(self, x: jax.Array) -> jax.Array:
        """The factor on the normalized heads, float32 ``[B, T, N, Hv]``."""
        return jax.nn.silu(project(self.output_gate, x).astype(jnp.float32))

    def _mix(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None,
        document_tables: DocumentTables | None = None,
        *,
        before: DeltaNetState | None = None,
        return_state: bool = False,
    ) -> tuple[jax.Array, DeltaNetState | None]:
        """``(out, state)`` of the call, after the state ``before``; None unless requested."""
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}: it needs [B, T, features]")
        options: Any = dict(self.options)
        implementation = options.pop("implementation")
        tensor_axis = options["tensor_axis"]
        if inside := inside_shard_map(options["seq_axis"]):
            axes = flat_names(options["seq_axis"])
            options = {
                "axis_name": axes or None,
                "seq_axis": None,
                "layout": options["layout"],
                "padding_id": options["padding_id"],
            }
        else:
            check_explicit_heads(tensor_axis, self._mesh(), type(self).__name__)
        options |= {"segment_ids": segment_ids, "document_tables": document_tables}
        layer = gather_explicit(self)
        if inside:
            for kind, count in (("key", self.num_key_heads), ("value", self.num_heads)):
                local = getattr(layer, kind).kernel.shape[-2]
                check_local_heads(tensor_axis, kind, local, count, "all weights")
        tails = {}

        def mixed(name: str) -> jax.Array:
            inputs, taps = project(getattr(layer, name), x), getattr(layer, f"{name}_conv")[...]
            tail = None if before is None else getattr(before, name)
            if tail is not None:
                tail = tail.reshape(*tail.shape[:2], math.prod(tail.shape[2:]))
            found = short_convolution(
                inputs.reshape(*inputs.shape[:2], -1), taps.reshape(len(taps), -1),
                initial_tail=tail, return_final_tail=return_state, **options,
            )  # fmt: skip
            out, tail = found if isinstance(found, tuple) else (found, None)
            if tail is not None:
                tails[name] = tail.reshape(*tail.shape[:2], *inputs.shape[2:])
            return jax.nn.silu(out).reshape(inputs.shape)

        query, key, value = unit(mixed("query")), unit(mixed("key")), mixed("value")
        found = gated_delta_rule(
            query, key, value, *layer.gates(x), implementation=implementation,
            initial_state=None if before is None else before.state,
            return_final_state=return_state, **options,
        )  # fmt: skip
        valid = None if segment_ids is None else segment_ids != options["padding_id"]
        if isinstance(found, tuple):
            return layer._output(found[0], x, valid), DeltaNetState(found[1], **tails)
        return layer._output(found, x, valid), None

    def _output(self, out: jax.Array, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """The output projection of the normalized, gated heads ``[B, T, N, Hv]``; 0 in padding."""
        gated = self.norm(out.astype(jnp.float32)) * self._output_gate(x)
        if valid is not None:  # Padding may hold NaN, and so its gate.
            gated = jnp.where(valid[..., None, None], gated, 0)
        tensor_axis = dict(self.options)["tensor_axis"]
        return project(self.out, gated.astype(out.dtype), summed_over=tensor_axis)

    def _mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh of the arrays; None on one device."""
        mesh = dict(self.options)["mesh"]
        if mesh is None and jax.sharding.get_abstract_mesh().empty:
            return None
        return resolve_mesh(mesh)

    def _check_state(self, state: DeltaNetState, batch: int) -> None:
        """Raises ValueError for a state of another number of sequences, or of other sizes."""
        wanted = jax.eval_shape(lambda: self.initial_state(batch, jnp.float32))
        for name, given, own in zip(state._fields, state, wanted, strict=True):
            if given.shape != own.shape:
                raise ValueError(
                    f"state.{name} has shape {given.shape}, and of x's {batch} sequences it has "
                    f"{own.shape}: pass the state that this layer returned for them"
                )

    def __getstate__(self) -> dict[str, Any]:
        saved = tuple(without_devices(dict(self.options)).items())
        return super().__getstate__() | {"options": saved}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        options = tuple(with_devices(dict(state["options"])).items())
        super().__setstate__(dict(state) | {"options": options})


def unit(x: jax.Array) -> jax.Array:
    """``x / sqrt(|x|^2 + 1e-6)`` over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    norm = lax.rsqrt(jnp.sum(jnp.square(wide), -1, keepdims=True) + NORM_EPSILON)
    return (wide * norm).astype(x.dtype)


def check_sizes(
    num_heads: int, num_key_heads: int, head_dim: int, value_head_dim: int, conv_taps: int
) -> None:
    """Raises ValueError for sizes of :class:`GatedDeltaNet` that do not fit together."""
    sizes = {
        "num_heads": num_heads, "num_key_heads": num_key_heads, "head_dim": head_dim,
        "value_head_dim": value_head_dim, "conv_taps": conv_taps,
    }  # fmt: skip
    for name, size in sizes.items():
        check_integer(name, size, 1, 2**31 - 1)
    if num_heads % num_key_heads:
        raise ValueError(
            f"num_heads is {num_heads}, num_key_heads {num_key_heads}: num_heads must be a "
            "multiple of num_key_heads"
        )


def _wide(weight: nnx.Param) -> jax.Array:
    return weight[...].astype(jnp.float32)
