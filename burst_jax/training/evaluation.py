"""Evaluation of a decoder: the mean loss over held-out batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from burst_jax.errors import check_integer
from burst_jax.models.config import DecoderConfig
from burst_jax.training.batches import Batch
from burst_jax.training.fused_loss import SUBCHUNKS
from burst_jax.training.loss import CHUNK_SIZE, next_token_loss

# (params, batch) -> (sum of losses in nats, sum of weights).
EvalStep = Callable[[nnx.State, Batch[jax.Array]], tuple[jax.Array, jax.Array]]
# The logarithm of the largest float, rounded down.
_MOST_NATS = 709


class Evaluation(NamedTuple):
    """Result of :func:`evaluate`.

    Attributes:
      nll: mean negative log-likelihood in nats per target, weighted by the batches' weights.
      perplexity: its exponential, infinite if that is too large for a float.
      tokens: sum of weights, which is the number of targets if all weights are 0 or 1.
    """

    nll: float
    perplexity: float
    tokens: int


def make_eval_step(graphdef: nnx.GraphDef, *, chunk_size: int = CHUNK_SIZE) -> EvalStep:
    """A jitted ``(params, batch) -> (sum of losses in nats, sum of weights)``.

    Args:
      graphdef: graph definition of the decoder, see :func:`init_train_state`.
      chunk_size: number of tokens in a device's chunk of the loss.

    Returns:
      The function; both results are float32 scalars. Its first call raises ValueError if the batch
      has another layout or number of shards than the decoder, or if weights are sharded although
      the decoder has no rules.

    Raises:
      ValueError: chunk_size below 1.
    """
    check_integer("chunk_size", chunk_size, 1)

    @jax.jit
    def jitted(params: nnx.State, batch: Batch[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return next_token_loss(nnx.merge(graphdef, params), batch, chunk_size=chunk_size)

    checked = False

    def eval_step(params: nnx.State, batch: Batch[jax.Array]) -> tuple[jax.Array, jax.Array]:
        nonlocal checked
        if not checked:
            model = nnx.merge(graphdef, params)
            model.reject_sharded_weights()
            model.reject_other_layout(batch["positions"], batch["segment_ids"])
            checked = True
        return jitted(params, batch)

    return eval_step


def evaluate(
    eval_step: EvalStep,
    params: nnx.State,
    batches: Iterable[Batch[jax.Array]],
) -> Evaluation:
    """Mean loss over all targets of all batches.

    Args:
      eval_step: result of :func:`make_eval_step`.
      params: weights of the decoder.
      batches: batches of :func:`place_batch`.

    Raises:
      ValueError: no batch has a target.
    """
    total, count = 0.0, 0.0
    for batch in batches:
        batch_total, batch_count = eval_step(params, batch)
        total += float(batch_total)
        count += float(batch_count)
    if not count:
        raise ValueError("batches hold no targets: there is nothing to evaluate")
    nll = total / count
    # math.exp raises beyond the largest float.
    perplexity = math.inf if nll > _MOST_NATS else math.exp(nll)
    return Evaluation(nll=nll, perplexity=perplexity, tokens=round(count))


def evaluation_memory(config: DecoderConfig, tokens: int, *, chunk_size: int = CHUNK_SIZE) -> int:
    """Estimates the bytes that evaluating ``tokens`` tokens needs on a device, without the weights.

    They are the larger of two: the residual stream, its norm and the largest arrays of a layer
    (``[tokens, features]`` of query, key, value and output, or of gate and up projections; a
    mixture has k copies of those and of the tokens), and the head with a chunk of logits.

    Args:
      config: the decoder's, with the dtype of the evaluation.
      tokens: of all sequences of a batch, on one device.
      chunk_size: that of :func:`make_eval_step`.
    """
    size, d, experts = jnp.dtype(config.dtype).itemsize, config.embed_dim, config.experts
    # The inputs of the output projection, and the outputs of all others.
    attention = 0
    for sizes in map(config.mixer_sizes, config.mixers):
        features = sizes["out"][0] + sum(sizes[name][1] for name in sizes if name != "out")
        attention = max(attention, features)
    hidden = 2 * config.mlp_dim
    if experts is not None:
        hidden = max(experts.per_token * (hidden + 2 * d), 2 * experts.shared_dim)
    hidden = max(hidden, 2 * (config.dense_dim or 0))
    layer = tokens * size * (2 * d + max(attention, hidden // config.mlp_chunks))
    converts = jnp.dtype(config.dtype) != jnp.dtype(config.param_dtype)
    cast = size * d * config.vocab_size if converts else 0
    logits = 4 * min(tokens, chunk_size // SUBCHUNKS) * config.vocab_size
    return max(layer, tokens * size * 2 * d + cast + logits)
