"""The optimizer, the jitted training step and held-out evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from burst_jax.models.decoder import Decoder, DecoderConfig, abstract_decoder
from burst_jax.platform import compiler_options as default_compiler_options
from burst_jax.sharding import AxisNames
from burst_jax.training.batches import Batch
from burst_jax.training.loss import next_token_loss


class Optimizer(NamedTuple):
    """An optax transformation that keeps its step count, and its learning rate by step."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule


class Evaluation(NamedTuple):
    """Mean negative log-likelihood in nats per token, its exponential, and tokens counted."""

    nll: float
    perplexity: float
    tokens: int


def make_optimizer(
    learning_rate: float,
    steps: int,
    *,
    warmup_steps: int | None = None,
    final_fraction: float = 0.1,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
) -> Optimizer:
    """AdamW with linear warm-up, cosine decay and clipping by global norm.

    Weights decay in matrices only (parameters named ``kernel``), not in norms, biases and
    embeddings: stacked layers make a norm's scale look like a matrix, so its name decides.

    Args:
      learning_rate: the peak.
      steps: length of the schedule; it ends at ``final_fraction * learning_rate``.
      warmup_steps: None is a tenth of the steps, at most 1000.
      final_fraction: of the peak.
      weight_decay: decoupled, times the learning rate.
      clip_norm: largest global norm of the gradient.
      b1: decay of the first moment.
      b2: decay of the second moment.

    Raises:
      ValueError: a learning rate or clip_norm not positive, steps below 1, a warm-up that is
        not shorter than the schedule.
    """
    if warmup_steps is None:
        warmup_steps = min(steps // 10, 1000)
    for name, value in (("learning_rate", learning_rate), ("clip_norm", clip_norm)):
        if not value > 0:
            raise ValueError(f"{name} is {value}: it must be positive")
    if steps < 1:
        raise ValueError(f"steps is {steps}: it must be at least 1")
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"warmup_steps is {warmup_steps}: it must be in 0 ... steps - 1 ({steps - 1})"
        )
    curve = optax.warmup_cosine_decay_schedule(
        init_value=learning_rate / (warmup_steps + 1),
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=steps,
        end_value=final_fraction * learning_rate,
    )

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        # optax mixes Python numbers and integers, which callers under strict promotion forbid.
        with jax.numpy_dtype_promotion("standard"):
            return jnp.asarray(curve(count), jnp.float32)

    transform = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.scale_by_adam(b1=b1, b2=b2),
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(schedule),
    )
    return Optimizer(transform, schedule)


def decay_mask(params: Any) -> Any:
    """True where weight decay applies: parameters named ``kernel``."""

    def is_kernel(path: tuple[Any, ...], _: Any) -> bool:
        return any(getattr(entry, "key", None) == "kernel" for entry in path)

    return jax.tree_util.tree_map_with_path(is_kernel, params)


def init_train_state(
    config: DecoderConfig, optimizer: Optimizer, mesh: Any, seed: int, **options: Any
) -> tuple[nnx.GraphDef, Any, Any]:
    """Weights and optimizer state, made on the mesh and replicated over it.

    The same seed gives the same weights on every mesh.

    Args:
      config: the decoder's.
      optimizer: of :func:`make_optimizer`.
      mesh: also the mesh of the decoder's attention.
      seed: of the weights.
      **options: the decoder's other attention options.

    Returns:
      ``(graphdef, params, opt_state)``; ``nnx.merge(graphdef, params)`` is the decoder.
    """
    graphdef, _ = abstract_decoder(config, mesh=mesh, **options)
    replicated = NamedSharding(mesh, PartitionSpec())

    @partial(jax.jit, out_shardings=replicated)
    def init() -> tuple[Any, Any]:
        params = nnx.state(Decoder(config, rngs=nnx.Rngs(params=seed), mesh=mesh, **options))
        return params, optimizer.transform.init(params)

    params, opt_state = init()
    return graphdef, params, opt_state


class TrainStep:
    """The jitted training step of a decoder, :func:`make_train_step`'s.

    ``step(params, opt_state, batch) -> (params, opt_state, metrics)``. Both states are donated, and
    the new ones keep their shardings. Metrics are float32 scalars: ``loss`` (mean nats per target,
    before the update), ``grad_norm`` (before clipping), ``learning_rate``.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: Optimizer,
        chunk_size: int,
        token_axes: AxisNames,
        compiler_options: dict[str, Any] | None,
    ) -> None:
        self._graphdef = graphdef
        self._optimizer = optimizer
        self._loss = partial(next_token_loss, chunk_size=chunk_size, token_axes=token_axes)
        self._compiler_options = compiler_options
        self._jitted: Any = None

    def __call__(
        self, params: Any, opt_state: Any, batch: Batch
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Takes the step."""
        return self._jit(params, opt_state)(params, opt_state, batch)

    def trace(self, params: Any, opt_state: Any, batch: Batch) -> jax.stages.Traced:
        """The program, to lower and compile ahead of time; shapes with shardings are enough."""
        return self._jit(params, opt_state).trace(params, opt_state, batch)

    def _jit(self, params: Any, opt_state: Any) -> Any:
        if self._jitted is None:
            # The states' shardings are known only now. Left to the compiler, a weight could come
            # back sharded over the sequence axis, and every next step would gather it.
            shardings = jax.tree.map(_named_sharding, (params, opt_state))
            options = self._compiler_options
            self._jitted = jax.jit(
                self._step,
                donate_argnums=(0, 1),
                out_shardings=(*shardings, None),
                compiler_options=default_compiler_options() if options is None else options,
            )
        return self._jitted

    def _step(self, params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, dict[str, Any]]:
        def mean_loss(params: Any) -> jax.Array:
            model = nnx.merge(self._graphdef, params)
            total, count = self._loss(model, batch)
            return total / jnp.maximum(count, 1.0)

        loss, grads = jax.value_and_grad(mean_loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # As in the schedule.
            updates, new_opt_state = self._optimizer.transform.update(grads, opt_state, params)
            grad_norm = optax.tree.norm(grads)
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": self._optimizer.schedule(_step_count(opt_state)),
        }
        return optax.apply_updates(params, updates), new_opt_state, metrics


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: Optimizer,
    *,
    chunk_size: int = 1024,
    token_axes: AxisNames = None,
    compiler_options: dict[str, Any] | None = None,
) -> TrainStep:
    """The jitted training step of a decoder.

    Args:
      graphdef: the decoder's, see :func:`init_train_state`.
      optimizer: of :func:`make_optimizer`.
      chunk_size: tokens per device that the loss takes at a time.
      token_axes: mesh axes that the loss splits the tokens over; None is the attention's.
      compiler_options: for ``jax.jit``; None is :func:`burst_jax.compiler_options`'s.

    Returns:
      ``step(params, opt_state, batch) -> (params, opt_state, metrics)``, a :class:`TrainStep`.
    """
    return TrainStep(graphdef, optimizer, chunk_size, token_axes, compiler_options)


def make_eval_step(
    graphdef: nnx.GraphDef, *, chunk_size: int = 1024
) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Jitted ``(params, batch) -> (sum of losses in nats, number of targets)``."""

    @jax.jit
    def eval_step(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return next_token_loss(nnx.merge(graphdef, params), batch, chunk_size=chunk_size)

    return eval_step


def evaluate(
    eval_step: Callable[[Any, Batch], tuple[jax.Array, jax.Array]],
    params: Any,
    batches: Iterable[Batch],
) -> Evaluation:
    """Mean loss over batches, each target counted once.

    Raises:
      ValueError: no batch, or none with a target.
    """
    total, count = 0.0, 0.0
    for batch in batches:
        batch_total, batch_count = eval_step(params, batch)
        total += float(batch_total)
        count += float(batch_count)
    if not count:
        raise ValueError("batches hold no targets: there is nothing to evaluate")
    return Evaluation(nll=total / count, perplexity=math.exp(total / count), tokens=round(count))


def _named_sharding(x: Any) -> NamedSharding | None:
    return x.sharding if isinstance(x.sharding, NamedSharding) else None


def _step_count(opt_state: Any) -> jax.Array:
    """The number of updates so far: Adam's count."""
    return optax.tree_utils.tree_get(
        opt_state,
        "count",
        filtering=lambda path, _: getattr(path[-1], "tuple_name", None) == "ScaleByAdamState",
    )
