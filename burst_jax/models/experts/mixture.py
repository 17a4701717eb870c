"""Mixture of experts (Shazeer 2017): each token's feed-forward is k of E gated MLPs.

A router scores the experts for each token. A device sorts its tokens, k times each, by expert, so
that an expert's tokens are consecutive rows; three grouped products run all experts; the rows are
sorted back and summed over k::

    tokens [n, D] -> rows [n k, D] -> gate, up [n k, M] -> rows [n k, D] -> tokens [n, D]

No token is dropped, and no array has a dimension for tokens and one for experts, except the
router's scores. Routing does not depend on the order of the tokens, so any sequence layout works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.layers.lora import add_adapter
from burst_jax.models.activations import ACTIVATIONS
from burst_jax.models.experts.chunks import run_chunked
from burst_jax.models.experts.config import dense_config
from burst_jax.models.experts.decoding import SharedExpert, can_decode, largest, run_decoding
from burst_jax.models.experts.exchange import owner_tables, run_exchanged
from burst_jax.models.experts.rows import copied, moved, of_groups, routes_of, sizes_of, summed
from burst_jax.models.feed_forward import (
    Auxiliary,
    DecoderConfig,
    FeedForward,
    GatedMLP,
    check_chunks,
)
from burst_jax.models.remat import MLP_PRODUCTS, ROUTES
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.mesh import AxisNames, flat_names
from burst_jax.parallel.rules import LogicalAxes
from pallas_kernels.arrays import vary, varying_axes
from pallas_kernels.grouped import grouped_matmul

# The slope of the clamped variant's sigmoid, with which x sigmoid(slope x) is nearly GELU.
_CLAMPED_SLOPE = 1.702
# While decoding, the largest logits are found by comparing all pairs, if these are so few.
_COMPARISONS = 2**20


class MixtureOfExperts(FeedForward):
    """``sum over k of w_k expert_k(x)``, each expert a gated MLP like :class:`GatedMLP`'s.

    Its numbers are ``config.experts`` (:class:`burst_jax.models.Experts`), ``config.mlp_dim``
    (hidden features of one expert), ``config.activation`` and ``config.mlp_bias`` (biases of the
    experts' three projections). Router logits and weights are float32. The arguments are those of
    :class:`FeedForward`.

    Experts are sharded as dense weights are: inputs of gate and up, and outputs of down, over the
    axes of "embed", and hidden features over ``hidden_axis``. The router is replicated. With
    ``expert_axis`` (``ShardingRules.expert``) each device has some of the experts, and devices
    exchange tokens (expert parallelism).

    With ``config.mlp_chunks`` the experts run in chunks of tokens, and the gradient always computes
    their hidden features again.
    """

    chunks_tokens: ClassVar[bool] = True
    weight_axes: ClassVar[Mapping[tuple[str, ...], LogicalAxes]] = {
        ("router", "kernel"): (None, None),
        ("router", "bias"): (None,),
        ("choice_bias",): (None,),
        ("gate", "kernel"): ("expert", "embed", "mlp"),
        ("up", "kernel"): ("expert", "embed", "mlp"),
        ("down", "kernel"): ("expert", "mlp", "embed"),
        ("gate", "bias"): ("expert", "mlp"),
        ("up", "bias"): ("expert", "mlp"),
        ("down", "bias"): (None, None),
        **{("shared", *path): axes for path, axes in GatedMLP.weight_axes.items()},
        ("shared_gate", "kernel"): (None, None),
    }

    def __init__(
        self,
        config: DecoderConfig,
        *,
        out_init: nnx.Initializer,
        hidden_axis: AxisNames = None,
        rngs: nnx.Rngs,
    ) -> None:
        d, m, experts = config.embed_dim, config.mlp_dim, config.experts
        init = nnx.initializers.lecun_normal()
        dtype, bias = config.param_dtype, config.mlp_bias
        self.config = config
        self.router = nnx.Linear(
            d, experts.count, use_bias=experts.router_bias, dtype=jnp.float32, param_dtype=dtype,
            kernel_init=init, rngs=rngs,
        )  # fmt: skip
        # Not named kernel, so that it has no weight decay.
        bias_of_choice = jnp.zeros((experts.count,), jnp.float32)
        self.choice_bias = nnx.Param(bias_of_choice) if experts.choice_bias else None
        self.gate = _Matrices(experts.count, d, m, bias, dtype, init, rngs)
        self.up = _Matrices(experts.count, d, m, bias, dtype, init, rngs)
        self.down = _Matrices(experts.count, m, d, bias, dtype, out_init, rngs)
        dense = dense_config(config, experts.shared_dim or 1)
        shared = GatedMLP(dense, out_init=out_init, rngs=rngs) if experts.shared_dim else None
        self.shared = nnx.data(shared)
        gate = None
        if experts.shared_gate:
            gate = nnx.Linear(
                d, 1, use_bias=False, dtype=jnp.float32, param_dtype=dtype, kernel_init=init,
                rngs=rngs,
            )  # fmt: skip
        self.shared_gate = nnx.data(gate)
        self.hidden_axis = hidden_axis
        # Of a decoding step: the mesh axes along which devices have the same tokens.
        self._same_tokens: tuple[str, ...] | None = None

    def decoding(self, *, hidden_axis: AxisNames, same_tokens_axis: AxisNames) -> Self:
        """See :class:`FeedForward`."""
        block: Any = super().decoding(hidden_axis=hidden_axis, same_tokens_axis=same_tokens_axis)
        block._same_tokens = flat_names(same_tokens_axis)
        return block

    @property
    def hidden_axis(self) -> AxisNames:
        """See :class:`FeedForward`; the shared expert's, too."""
        return self._hidden_axis

    @hidden_axis.setter
    def hidden_axis(self, axis: AxisNames) -> None:
        self._hidden_axis = axis
        if self.shared is not None:
            self.shared.hidden_axis = axis

    @classmethod
    def projections(cls, config: DecoderConfig) -> dict[str, tuple[int, int]]:
        """``(inputs, outputs)`` of the router."""
        return {"router": (config.embed_dim, config.experts.count)}

    @classmethod
    def num_matmul_params(cls, config: DecoderConfig) -> int:
        """Number of weights that multiply each token: those of the router and of k experts."""
        experts = config.experts
        hidden = experts.per_token * config.mlp_dim + experts.shared_dim
        return config.embed_dim * (experts.count + experts.shared_gate + 3 * hidden)

    def __call__(self, x: jax.Array, *, keeps_products: bool) -> jax.Array:
        """See :class:`FeedForward`."""
        return self.with_sums(x, None, keeps_products=keeps_products)[0]

    def with_sums(
        self, x: jax.Array, present: jax.Array | None, *, keeps_products: bool
    ) -> tuple[jax.Array, Sums]:
        """See :class:`FeedForward`. Padding is sent to no expert: only the shared one sees it."""
        config, experts = self.config, self.config.experts
        x = x.astype(config.dtype)
        tokens = x.reshape(-1, x.shape[-1])
        if present is not None:
            present = present.reshape(-1) != 0
        weights, chosen, sums = self._route(x, tokens, present)
        expert_axes, same = flat_names(self.expert_axis), self._same_tokens or ()
        decodes = self._same_tokens is not None
        sent = tuple(name for name in expert_axes if name not in same)
        ids, count = chosen, experts.count
        if same:
            local_ids, groups = map(jnp.asarray, owner_tables(count, expert_axes, same))
            count //= lax.axis_size(same)
            ids = jnp.where(groups[ids] == lax.axis_index(same), local_ids[ids], count)
        if present is not None:
            ids = jnp.where(present[:, None], ids, count)
        sizes = sizes_of(ids.reshape(-1), count)
        run = partial(_run_experts, config, keeps_products)
        # Sums over devices, of the gradients of what all have, are of tokens, not of their copies.
        arrays = _varying((self._parameters(), tokens, weights))

        def shared() -> jax.Array | None:
            if self.shared is None:
                return None
            out = self.shared(x, keeps_products=keeps_products)
            weight = self._shared_weight(x)
            return out if weight is None else out * weight.astype(out.dtype)

        def routed(
            arrays: Any, ids: jax.Array, meanwhile: Callable[[], Any]
        ) -> tuple[jax.Array, Any, jax.Array | None]:
            routes = routes_of(ids.reshape(-1), count)
            if sent:
                out, other, rounds = run_exchanged(
                    run, arrays, routes, axes=sent, factor=experts.capacity_factor,
                    meanwhile=meanwhile,
                )  # fmt: skip
                return out, other, lax.stop_gradient(rounds.astype(jnp.float32))
            order, inverse = _varying((routes.order, routes.inverse))
            rows = copied(arrays[1], order, inverse)
            row_weights = moved(arrays[2].reshape(-1), order, inverse)
            out = run(arrays[0], rows, row_weights, routes.sorted_ids, routes.sizes)
            return summed(moved(out, inverse, order), arrays[1].shape[0]), meanwhile(), None

        def chunk(arrays: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
            out, _, rounds = routed(arrays, ids, lambda: None)
            return out.astype(config.dtype), rounds

        rounds = None

        if decodes and not sent and can_decode(tokens.shape[0], arrays[0]):
            one_more = None if expert_axes else self._shared_as_routed(arrays[0], tokens)
            of_all = shared() if one_more is None else None
            distinct = tokens.shape[0] == 1 and not same
            out = run_decoding(partial(_hidden, config), arrays, ids, distinct, one_more)
        elif config.mlp_chunks > 1:
            check_chunks(config, x.shape[1])
            of_all, ids = shared(), _varying((ids, arrays))[0]
            out, rounds = run_chunked(chunk, config.mlp_chunks, arrays, ids)
        else:
            out, of_all, rounds = routed(arrays, ids, shared)
        if rounds is not None:
            sums = sums._replace(rounds=jnp.stack([rounds, jnp.ones_like(rounds)]))
        # What experts of other devices have is not the same hidden features, but other terms.
        hidden = [name for name in flat_names(self.hidden_axis) if name not in expert_axes]
        out = psum_manual(out.astype(config.dtype), (*hidden, *same))
        if self.down.bias is not None:
            # Added once, after the sum over devices, to the experts' outputs.
            of_experts = jnp.zeros((tokens.shape[0], experts.count), jnp.float32)
            of_experts = jnp.put_along_axis(
                _varying((of_experts, weights))[0], chosen, weights, 1, inplace=False
            )
            bias = of_experts @ self.down.bias[...].astype(jnp.float32)
            out = out + bias.astype(config.dtype)
        out = out.reshape(x.shape)
        if of_all is not None:
            out = out + of_all
        return out, sums._replace(counts=lax.stop_gradient(sizes.astype(jnp.float32)))

    @classmethod
    def auxiliary(cls, config: DecoderConfig, sums: Any) -> Auxiliary:
        """Load-balancing loss and z-loss, both means over the layers with experts.

        The metrics are ``balance_loss`` and ``router_z_loss``, without their coefficients, and
        ``max_expert_load``: the largest number of tokens of an expert in any layer, as a multiple
        of the mean. With expert parallelism also ``further_rounds``: the number of exchanges after
        the first one, added up over the layers, a mean over groups of devices; 0 if all loads are
        within ``capacity_factor``.
        """
        experts = config.experts
        assigned = jnp.maximum(jnp.sum(sums.counts, -1, keepdims=True), 1)
        share, tokens = sums.counts / assigned, assigned / experts.per_token
        layers = len(sums.z) - sum(kind.dense for kind in config.layer_kinds)
        balance = experts.count * jnp.sum(share * sums.scores / tokens) / layers
        z = jnp.sum(sums.z / tokens[:, 0]) / layers
        metrics = {
            "balance_loss": balance,
            "router_z_loss": z,
            "max_expert_load": experts.count * jnp.max(share),
        }
        if sums.rounds is not None:
            metrics["further_rounds"] = jnp.sum(sums.rounds[:, 0] / sums.rounds[:, 1])
        return Auxiliary(experts.balance_loss * balance + experts.z_loss * z, metrics)

    def _route(
        self, x: jax.Array, tokens: jax.Array, present: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, Sums]:
        """The experts' weights, float32 ``[n, k]``, these experts, and sums, without counts."""
        experts = self.config.experts
        logits = self.router(tokens.astype(jnp.float32))
        if self.config.lora is not None:
            logits = add_adapter(self.router, x, logits.reshape(*x.shape[:2], -1))
            logits = logits.reshape(-1, experts.count)
        scores = jax.nn.softmax(logits) if experts.score == "softmax" else jax.nn.sigmoid(logits)
        choice = logits if experts.chooses_by_logits else self._choice(scores)
        few = self._same_tokens is not None and logits.size * experts.count <= _COMPARISONS
        if few and experts.chooses_by_logits:
            values, chosen = largest(logits, experts.per_token)
            weights = self._weights_of(values, logits)
        else:
            _, chosen = (largest if few else lax.top_k)(
                lax.stop_gradient(choice), experts.per_token
            )
            # Stored: a recomputation that rounds otherwise would order other rows.
            chosen = checkpoint_name(chosen.astype(jnp.int32), ROUTES)
            weights = jnp.take_along_axis(scores, chosen, 1)
            if experts.normalize:
                weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
        if experts.scale != 1:
            weights = weights * np.float32(experts.scale)
        # Padding has no weights, and is left out of the sums.
        kept = np.float32(1) if present is None else present[:, None].astype(jnp.float32)
        normalized = scores
        if experts.score == "sigmoid":
            normalized = scores / (jnp.sum(scores, -1, keepdims=True) + 1e-20)
        squared = jax.nn.logsumexp(logits, -1, keepdims=True) ** 2
        sums = Sums(
            counts=jnp.zeros((experts.count,), jnp.float32),
            scores=jnp.sum(normalized * kept, 0),
            z=jnp.sum(squared * kept),
        )
        return weights * kept, chosen, sums

    def _choice(self, scores: jax.Array) -> jax.Array:
        """By what a token's experts are chosen, ``[n, E]``; -inf for experts of other groups."""
        experts = self.config.experts
        if self.choice_bias is not None:
            scores = scores + self.choice_bias[...].astype(jnp.float32)
        if experts.groups == experts.groups_per_token:
            return scores
        grouped = scores.reshape(scores.shape[0], experts.groups, -1)
        best, _ = lax.top_k(lax.stop_gradient(grouped), 2)
        _, kept = lax.top_k(best.sum(-1), experts.groups_per_token)
        is_kept = (kept[:, :, None] == np.arange(experts.groups, dtype=kept.dtype)).any(1)
        return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(scores.shape)

    def _weights_of(self, values: jax.Array, logits: jax.Array) -> jax.Array:
        """The weights of the chosen experts from their logits ``[n, k]``, for decoding."""
        experts = self.config.experts
        if experts.score == "sigmoid":
            weights = jax.nn.sigmoid(values)
        else:
            # With normalized weights the sum over all experts cancels out.
            total = (
                values[:, :1] if experts.normalize else jax.nn.logsumexp(logits, -1, keepdims=True)
            )
            weights = jnp.exp(values - total)
        if not experts.normalize:
            return weights
        # Term by term: XLA would launch a kernel for a reduction.
        return weights / (sum(jnp.split(weights, weights.shape[1], 1)) + 1e-20)

    def _shared_weight(self, x: jax.Array) -> jax.Array | None:
        """The shared expert's gate, float32 ``[..., 1]``; None without one."""
        if self.shared_gate is None:
            return None
        return jax.nn.sigmoid(self.shared_gate(x.astype(jnp.float32)))

    def _shared_as_routed(self, parameters: _Parameters, tokens: jax.Array) -> SharedExpert | None:
        """The shared expert as one more of the routed ones; None if it is not like them."""
        shared, experts = self.shared, self.config.experts
        if shared is None or self.config.mlp_bias or experts.clamp is not None:
            return None
        dtype = self.config.dtype
        gate, up, down = (
            each.kernel[...].astype(dtype) for each in (shared.gate, shared.up, shared.down)
        )
        if gate.shape != parameters.gate.shape[1:]:
            return None
        weight = self._shared_weight(tokens)
        if weight is None:
            weight = jnp.ones((tokens.shape[0], 1), jnp.float32)
        return SharedExpert(gate, up, down, weight)

    def _parameters(self) -> _Parameters:
        """The experts' weights, in the dtypes that products read."""
        kernels = (
            each.kernel[...].astype(self.config.dtype) for each in (self.gate, self.up, self.down)
        )
        biases = (
            None if each.bias is None else each.bias[...].astype(jnp.float32)
            for each in (self.gate, self.up)
        )
        return _Parameters(*kernels, *biases)


class Sums(NamedTuple):
    """A router's sums over tokens, without padding.

    Attributes:
      counts: float32 ``[E]``, the number of tokens sent to each expert.
      scores: float32 ``[E]``, of the tokens' scores, normalized to 1 over the experts.
      z: float32, of the squared log-sum-exp of the logits.
      rounds: float32 ``[2]``, with expert parallelism: further rounds of this device, and 1.
    """

    counts: jax.Array
    scores: jax.Array
    z: jax.Array
    rounds: jax.Array | None = None


class _Parameters(NamedTuple):
    """The experts' weights on a device, with whole inputs; biases, if any, are float32."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None
    up_bias: jax.Array | None


class _Matrices(nnx.Module):
    """One matrix ``[inputs, outputs]``, and an optional bias, per expert."""

    def __init__(
        self,
        count: int,
        inputs: int,
        outputs: int,
        bias: bool,
        dtype: Any,
        init: nnx.Initializer,
        rngs: nnx.Rngs,
    ) -> None:
        keys = jax.random.split(rngs.params(), count)
        self.kernel = nnx.Param(jax.vmap(lambda key: init(key, (inputs, outputs), dtype))(keys))
        self.bias = nnx.Param(jnp.zeros((count, outputs), dtype)) if bias else None


def _run_experts(
    config: DecoderConfig,
    keeps_products: bool,
    parameters: _Parameters,
    rows: jax.Array,
    row_weights: jax.Array,
    expert: jax.Array,
    sizes: jax.Array,
) -> jax.Array:
    """Rows ``[R, D]``, ordered by expert, through their experts, without the bias of down.

    ``row_weights`` are float32 ``[R]``, ``expert`` the expert of each row, ``sizes`` the number of
    rows of each; rows after the last one are 0.
    """

    def product(rows: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        out = grouped_matmul(*_varying((rows, kernel, sizes)))
        if bias is None:
            return out
        bias = of_groups(config.dtype, *_varying((bias, expert, sizes)))
        return (out.astype(jnp.float32) + bias).astype(config.dtype)

    gate = product(rows, parameters.gate, parameters.gate_bias)
    up = product(rows, parameters.up, parameters.up_bias)
    if keeps_products:
        gate, up = (checkpoint_name(each, MLP_PRODUCTS) for each in (gate, up))
    hidden = _hidden(config, gate, up)
    # Weighted before the last product, whose output the gradient then does not read.
    return product(hidden * row_weights[:, None].astype(config.dtype), parameters.down)


def _hidden(config: DecoderConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gated unit."""
    clamp = config.experts.clamp
    if clamp is None:
        return ACTIVATIONS[config.activation](gate) * up
    gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
    return gate * jax.nn.sigmoid(_CLAMPED_SLOPE * gate) * (up + 1)


def _varying(arrays: Any) -> Any:
    """The arrays, marked to vary over the same mesh axes."""
    return vary(arrays, varying_axes(arrays))
