"""Mixture of experts (Shazeer 2017): each token's feed-forward is k of E gated MLPs.

A router scores the experts for each token. A device sorts its tokens, k times each, by expert, so
that an expert's tokens are consecutive rows; three grouped products run all experts; the rows are
sorted back and summed over k::

    tokens [n, D] -> rows [n k, D] -> gate, up [n k, M] -> rows [n k, D] -> tokens [n, D]

No token is dropped, and no array has a dimension for tokens and one for experts, except the
router's scores. Routing does not depend on the order of the tokens, so any sequence layout works.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_jax.errors import check_integer, check_positive, shown
from burst_jax.layers.lora import add_adapter
from burst_jax.models.feed_forward import (
    ACTIVATIONS,
    Auxiliary,
    DecoderConfig,
    FeedForward,
    GatedMLP,
)
from burst_jax.models.remat import MLP_PRODUCTS, ROUTES
from burst_jax.parallel.collectives import psum_manual
from burst_jax.parallel.mesh import AxisNames
from burst_jax.parallel.rules import LogicalAxes
from pallas_kernels.arrays import vary, varying_axes
from pallas_kernels.grouped import grouped_matmul

Score = Literal["softmax", "sigmoid"]
# The slope of the clamped variant's sigmoid, with which x sigmoid(slope x) is nearly GELU.
_CLAMPED_SLOPE = 1.702
_MAX_EXPERTS = 65536


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a :class:`MixtureOfExperts`, whose hidden features are ``config.mlp_dim``.

    Attributes:
      count: number of experts, E.
      per_token: number of experts that a token is sent to, k: those with the largest logits.
      score: function of the router's logits that weights the experts' outputs: "softmax" over all
        experts, or "sigmoid" of each.
      normalize: whether a token's k weights are divided by their sum. For "softmax" this is the
        softmax over the k logits.
      router_bias: whether the router has a bias.
      clamp: bound c of gpt-oss's gated unit, or None for ``config.activation``. Hidden features are
        then ``g * sigmoid(1.702 g) * (u + 1)``, with g the gate's output, at most c, and u the up
        projection's, from -c to c.
      shared_dim: number of hidden features of a shared expert, a gated MLP for all tokens whose
        output is added; 0 is none.
      balance_loss: coefficient of the load-balancing loss (Fedus et al. 2021), per layer
        ``E sum_e f_e p_e``, with f_e the share of an expert in all assignments and p_e its mean
        score, scores being normalized to a sum of 1; 1 if the load is even.
      z_loss: coefficient of the router's z-loss (Zoph et al. 2022), per layer the mean of
        ``logsumexp(logits)**2``.

    Raises:
      ValueError: a number out of range, or an unknown score.
    """

    count: int
    per_token: int
    score: Score = "softmax"
    normalize: bool = True
    router_bias: bool = False
    clamp: float | None = None
    shared_dim: int = 0
    balance_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_integer("count", self.count, 1, _MAX_EXPERTS)
        check_integer("per_token", self.per_token, 1, self.count)
        check_integer("shared_dim", self.shared_dim, 0, 2**31 - 1)
        if self.score not in get_args(Score):
            raise ValueError(
                f"score is {shown(self.score)}: use one of {str(get_args(Score))[1:-1]}"
            )
        if self.clamp is not None:
            check_positive("clamp", self.clamp, also=", or None")
        for name in ("balance_loss", "z_loss"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(
                    f"{name} is {shown(value)}: it must be 0, which is none, or positive and finite"
                )


class MixtureOfExperts(FeedForward):
    """``sum over k of w_k expert_k(x)``, each expert a gated MLP like :class:`GatedMLP`'s.

    Its numbers are ``config.experts`` (:class:`Experts`), ``config.mlp_dim`` (hidden features of
    one expert), ``config.activation`` and ``config.mlp_bias`` (biases of the experts' three
    projections). Router logits and weights are float32. The arguments are those of
    :class:`FeedForward`.

    Experts are sharded as dense weights are: inputs of gate and up, and outputs of down, over the
    axes of "embed", and hidden features over ``hidden_axis``. The router is replicated.
    """

    weight_axes: ClassVar[Mapping[tuple[str, ...], LogicalAxes]] = {
        ("router", "kernel"): (None, None),
        ("router", "bias"): (None,),
        ("gate", "kernel"): (None, "embed", "mlp"),
        ("up", "kernel"): (None, "embed", "mlp"),
        ("down", "kernel"): (None, "mlp", "embed"),
        ("gate", "bias"): (None, "mlp"),
        ("up", "bias"): (None, "mlp"),
        ("down", "bias"): (None, None),
        **{("shared", *path): axes for path, axes in GatedMLP.weight_axes.items()},
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
        self.gate = _Matrices(experts.count, d, m, bias, dtype, init, rngs)
        self.up = _Matrices(experts.count, d, m, bias, dtype, init, rngs)
        self.down = _Matrices(experts.count, m, d, bias, dtype, out_init, rngs)
        dense = dataclasses.replace(
            config, mlp_dim=experts.shared_dim or 1, experts=None, feed_forward=GatedMLP
        )
        shared = GatedMLP(dense, out_init=out_init, rngs=rngs) if experts.shared_dim else None
        self.shared = nnx.data(shared)
        self.hidden_axis = hidden_axis

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
        return config.embed_dim * (experts.count + 3 * hidden)

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
        weights, routes, sums = self._route(x, tokens, present)
        # float32 weights of the rows.
        row_weights = _permuted(weights.reshape(-1), routes.order, routes.inverse)
        rows = _dispatched(tokens, routes.order, routes.inverse)

        def product(matrices: _Matrices, rows: jax.Array) -> jax.Array:
            kernel = matrices.kernel[...].astype(config.dtype)
            rows, kernel, sizes = _varying((rows, kernel, routes.sizes))
            out = grouped_matmul(rows, kernel, sizes)
            if matrices.bias is None or matrices is self.down:
                return out
            # Gathered in float32, in which the gradient's sum over rows is then computed.
            bias = matrices.bias[...].astype(jnp.float32)
            bias, ids = _varying((bias, routes.ids))
            return (out + bias.at[ids].get(mode="clip")).astype(config.dtype)

        gate, up = product(self.gate, rows), product(self.up, rows)
        if keeps_products:
            gate, up = (checkpoint_name(each, MLP_PRODUCTS) for each in (gate, up))
        # Weighted before the last product, whose output the gradient then does not read.
        hidden = self._hidden(gate, up) * row_weights[:, None].astype(config.dtype)
        out = _permuted(product(self.down, hidden), *_varying((routes.inverse, routes.order)))
        out = out.reshape(-1, experts.per_token, x.shape[-1]).sum(1, dtype=jnp.float32)
        out = psum_manual(out.astype(config.dtype), self.hidden_axis)
        if self.down.bias is not None:
            # Added once, after the sum over devices, to the experts' outputs.
            of_experts = jnp.zeros((tokens.shape[0], experts.count), jnp.float32)
            of_experts = jnp.put_along_axis(
                _varying((of_experts, weights))[0], routes.experts, weights, 1, inplace=False
            )
            bias = of_experts @ self.down.bias[...].astype(jnp.float32)
            out = out + bias.astype(config.dtype)
        out = out.reshape(x.shape)
        if self.shared is not None:
            out = out + self.shared(x, keeps_products=keeps_products)
        return out, sums

    @classmethod
    def auxiliary(cls, config: DecoderConfig, sums: Any) -> Auxiliary:
        """Load-balancing loss and z-loss, both means over the layers.

        The metrics are ``balance_loss`` and ``router_z_loss``, without their coefficients, and
        ``max_expert_load``: the largest number of tokens of an expert in any layer, as a multiple
        of the mean.
        """
        experts = config.experts
        assigned = jnp.maximum(jnp.sum(sums.counts, -1, keepdims=True), 1)
        share, tokens = sums.counts / assigned, assigned / experts.per_token
        balance = experts.count * jnp.mean(jnp.sum(share * sums.scores / tokens, -1))
        z = jnp.mean(sums.z / tokens[:, 0])
        metrics = {
            "balance_loss": balance,
            "router_z_loss": z,
            "max_expert_load": experts.count * jnp.max(share),
        }
        return Auxiliary(experts.balance_loss * balance + experts.z_loss * z, metrics)

    def _route(
        self, x: jax.Array, tokens: jax.Array, present: jax.Array | None
    ) -> tuple[jax.Array, Routes, Sums]:
        """The experts' weights, float32 ``[n, k]``, where tokens are sent, and sums over tokens."""
        experts = self.config.experts
        logits = self.router(tokens.astype(jnp.float32))
        if self.config.lora is not None:
            logits = add_adapter(self.router, x, logits.reshape(*x.shape[:2], -1))
            logits = logits.reshape(-1, experts.count)
        scores = jax.nn.softmax(logits) if experts.score == "softmax" else jax.nn.sigmoid(logits)
        _, chosen = lax.top_k(lax.stop_gradient(logits), experts.per_token)
        # Stored: a recomputation that rounds otherwise would order other rows.
        chosen = checkpoint_name(chosen.astype(jnp.int32), ROUTES)
        weights = jnp.take_along_axis(scores, chosen, 1)
        if experts.normalize:
            weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
        routes = _routes(chosen, experts.count, present)
        # Padding has no weights, and is left out of the sums.
        kept = np.float32(1) if present is None else present[:, None].astype(jnp.float32)
        normalized = scores
        if experts.score == "sigmoid":
            normalized = scores / (jnp.sum(scores, -1, keepdims=True) + 1e-20)
        squared = jax.nn.logsumexp(logits, -1, keepdims=True) ** 2
        sums = Sums(
            counts=lax.stop_gradient(routes.sizes.astype(jnp.float32)),
            scores=jnp.sum(normalized * kept, 0),
            z=jnp.sum(squared * kept),
        )
        return weights * kept, routes, sums

    def _hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The hidden features from the outputs of gate and up."""
        clamp = self.config.experts.clamp
        if clamp is None:
            return ACTIVATIONS[self.config.activation](gate) * up
        gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
        return gate * jax.nn.sigmoid(_CLAMPED_SLOPE * gate) * (up + 1)


class Sums(NamedTuple):
    """A router's sums over tokens, without padding.

    Attributes:
      counts: float32 ``[E]``, the number of tokens sent to each expert.
      scores: float32 ``[E]``, of the tokens' scores, normalized to 1 over the experts.
      z: float32, of the squared log-sum-exp of the logits.
    """

    counts: jax.Array
    scores: jax.Array
    z: jax.Array


class Routes(NamedTuple):
    """Where n tokens are sent, k times each; row i of the sorted rows is of token order[i] // k.

    Attributes:
      experts: int32 ``[n, k]``, the experts of each token.
      ids: int32 ``[n k]``, the expert of each sorted row, E for padding, which comes last.
      order: int32 ``[n k]``, the index in ``experts`` of each sorted row.
      inverse: int32 ``[n k]``, its inverse.
      sizes: int32 ``[E]``, the number of rows of each expert.
    """

    experts: jax.Array
    ids: jax.Array
    order: jax.Array
    inverse: jax.Array
    sizes: jax.Array


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


def _routes(chosen: jax.Array, count: int, present: jax.Array | None) -> Routes:
    """The routes of tokens to the experts ``chosen [n, k]``; padding is sent to none."""
    ids = chosen if present is None else jnp.where(present[:, None], chosen, count)
    index = vary(jnp.arange(ids.size, dtype=jnp.int32), varying_axes(ids))
    ids, order = lax.sort((ids.reshape(-1), index), num_keys=1, is_stable=True)
    _, inverse = lax.sort((order, index), num_keys=1)
    ends = jnp.searchsorted(ids, jnp.arange(count, dtype=jnp.int32), side="right")
    sizes = jnp.diff(ends.astype(jnp.int32), prepend=jnp.zeros((1,), jnp.int32))
    return Routes(chosen, ids, order, inverse, sizes)


def _varying(arrays: Any) -> Any:
    """The arrays, marked to vary over the same mesh axes."""
    return vary(arrays, varying_axes(arrays))


# Rows are gathered in both directions; JAX's own gradient would scatter and add.
@jax.custom_vjp
def _permuted(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """``x[order]``, for a permutation and its inverse."""
    return x[order]


_permuted.defvjp(
    lambda x, order, inverse: (x[order], inverse),
    lambda inverse, gradient: (gradient[inverse], None, None),
)


@jax.custom_vjp
def _dispatched(tokens: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """The sorted rows ``[n k, D]`` of tokens ``[n, D]``: row i is token ``order[i] // k``."""
    return tokens[order // (order.shape[0] // tokens.shape[0])]


def _dispatched_forward(
    tokens: jax.Array, order: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The empty residual carries the number of tokens.
    return _dispatched(tokens, order, inverse), (inverse, jnp.zeros((tokens.shape[0], 0)))


def _dispatched_backward(
    residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    inverse, empty = residuals
    copies = gradient[inverse].reshape(empty.shape[0], -1, gradient.shape[-1])
    return copies.sum(1, dtype=jnp.float32).astype(gradient.dtype), None, None


_dispatched.defvjp(_dispatched_forward, _dispatched_backward)
