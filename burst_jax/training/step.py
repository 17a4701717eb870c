"""The jitted training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from burst_jax.errors import check_integer
from burst_jax.models.shardings import DecoderShardings
from burst_jax.parallel.mesh import axes_size
from burst_jax.parallel.platform import compiler_options as default_compiler_options
from burst_jax.training.batches import Batch
from burst_jax.training.loss import CHUNK_SIZE, next_token_loss
from burst_jax.training.optimizer import Optimizer
from burst_jax.training.state import split_trained, transform_of


class TrainStep:
    """The jitted training step of a decoder, which :func:`make_train_step` makes.

    ``step(params, opt_state, batch) -> (params, opt_state, metrics)``. The memory of the old
    ``params`` and ``opt_state`` is donated to the new ones, which keep the old ones' shardings. If
    the decoder has low-rank adapters, they alone have gradients, and all other weights stay.
    Metrics are float32 scalars: ``loss`` (weighted mean of nats per target, before the update),
    ``grad_norm`` (norm of the gradient before clipping), and ``learning_rate`` if the optimizer is
    an :class:`burst_jax.training.Optimizer` whose state counts its steps.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: Optimizer | optax.GradientTransformation,
        chunk_size: int,
        accumulate: int,
        compiler_options: Mapping[str, bool | int | str] | None,
        z_loss: float = 0.0,
    ) -> None:
        self._graphdef = graphdef
        self._transform = transform_of(optimizer)
        self._schedule = optimizer.schedule if isinstance(optimizer, Optimizer) else None
        self._accumulate = accumulate
        self._loss = partial(next_token_loss, chunk_size=chunk_size, z_loss=z_loss)
        self._compiler_options = compiler_options
        self._jitted: jax.stages.Wrapped | None = None
        self._weight_shardings: Any = None

    def __call__(
        self, params: nnx.State, opt_state: optax.OptState, batch: Batch[jax.Array]
    ) -> tuple[nnx.State, optax.OptState, dict[str, jax.Array]]:
        """Takes one step with a batch of :func:`place_batch`.

        Raises:
          ValueError: the first batch is in the order of another layout than the decoder's, or of
            another number of shards.
        """
        if self._jitted is None:
            nnx.merge(self._graphdef, params).refuse_other_layout(batch["positions"])
        return self._jit(params, opt_state)(params, opt_state, batch)

    def trace(
        self, params: nnx.State, opt_state: optax.OptState, batch: Batch[jax.Array]
    ) -> jax.stages.Traced:
        """The traced program, to lower and compile ahead of time.

        The arguments may be arrays or ``jax.ShapeDtypeStruct`` with shardings.
        """
        return self._jit(params, opt_state).trace(params, opt_state, batch)

    def _jit(self, params: nnx.State, opt_state: optax.OptState) -> jax.stages.Wrapped:
        if self._jitted is None:
            nnx.merge(self._graphdef, params).refuse_split_weights()
            # The shardings of weights and optimizer state are known from the first call only. If
            # the compiler chose those of the new weights, it might shard one over the sequence
            # axis, and every later step would gather it.
            shardings = jax.tree.map(_named_sharding, (params, opt_state))
            self._weight_shardings = jax.tree.map(_named_sharding, split_trained(params)[0])
            options = self._compiler_options
            self._jitted = jax.jit(
                self._step,
                donate_argnums=(0, 1),
                out_shardings=(*shardings, None),
                compiler_options=default_compiler_options() if options is None else dict(options),
            )
        return self._jitted

    def _step(
        self, params: Any, opt_state: Any, batch: Batch[jax.Array]
    ) -> tuple[Any, Any, dict[str, Any]]:
        trained, frozen = split_trained(params)
        loss, grads = self._mean_loss_and_gradient(trained, frozen, batch)
        with jax.numpy_dtype_promotion("standard"):  # As in the schedule.
            updates, new_opt_state = _update(
                self._transform, grads, opt_state, trained, self._weight_shardings
            )
            grad_norm = optax.tree.norm(grads)
        metrics = {"loss": loss, "grad_norm": grad_norm}
        count = _step_count(opt_state)
        if self._schedule is not None and count is not None:
            metrics["learning_rate"] = jnp.asarray(self._schedule(count), jnp.float32)
        new: Any = optax.apply_updates(trained, updates)
        return nnx.merge_state(new, frozen), new_opt_state, metrics

    def _mean_loss_and_gradient(
        self, trained: Any, frozen: Any, batch: Batch[jax.Array]
    ) -> tuple[jax.Array, Any]:
        def total_loss(trained: Any, batch: Batch[jax.Array]) -> tuple[jax.Array, jax.Array]:
            return self._loss(nnx.merge(self._graphdef, trained, frozen), batch)

        gradient = jax.value_and_grad(total_loss, has_aux=True)
        if self._accumulate == 1:
            (total, count), grads = gradient(trained, batch)
        else:
            parts = nnx.merge(self._graphdef, trained, frozen).shardings()
            total, count, grads = self._accumulated(gradient, trained, batch, parts)
        count = jnp.where(count == 0, 1.0, count)  # A batch without targets has the loss 0.
        return total / count, jax.tree.map(lambda g: (g / count).astype(g.dtype), grads)

    def _accumulated(
        self, gradient: Any, trained: Any, batch: Batch[jax.Array], parts: DecoderShardings
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The sums of loss, targets and gradient over parts of the batch, one after the other."""
        rows = batch["inputs"].shape[0]
        devices = axes_size(parts.mesh, parts.batch_axes)
        stages = axes_size(parts.mesh, parts.stage_axis)
        microbatches = math.lcm(stages, parts.microbatches)
        multiple = self._accumulate * devices * microbatches
        if rows % multiple:
            pipeline = f" and of {microbatches} microbatches of the pipeline"
            raise ValueError(
                f"accumulate is {self._accumulate}, the batch has {rows} rows: use a multiple of "
                f"{multiple} rows, so that each part has some for each of {devices} devices"
                + pipeline
                * (microbatches > 1)
            )
        rows_and_tokens = parts.token_spec(2)

        # Each device cuts its own rows, so nothing moves.
        def cut(x: jax.Array) -> jax.Array:
            return x.reshape(self._accumulate, x.shape[0] // self._accumulate, *x.shape[1:])

        cuts = jax.shard_map(
            partial(jax.tree.map, cut),
            mesh=parts.mesh,
            in_specs=rows_and_tokens,
            out_specs=PartitionSpec(None, *rows_and_tokens),
        )(batch)

        def add(sums: Any, batch: Batch[jax.Array]) -> tuple[Any, None]:
            (total, count), grads = gradient(trained, batch)
            return jax.tree.map(jnp.add, sums, (total, count, grads)), None

        zero = jnp.zeros((), jnp.float32)
        zeros = zero, zero, jax.tree.map(jnp.zeros_like, trained)
        return jax.lax.scan(add, zeros, cuts)[0]


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    chunk_size: int = CHUNK_SIZE,
    accumulate: int = 1,
    z_loss: float = 0.0,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> TrainStep:
    """The jitted training step of a decoder.

    Args:
      graphdef: graph definition of the decoder, see :func:`init_train_state`.
      optimizer: what :func:`make_optimizer` returns, or any optax transformation.
      chunk_size: number of tokens that the loss takes at a time on each device.
      accumulate: number of parts of the batch whose gradients are computed one after the other and
        added up, in the dtype of the weights. The step is that of the whole batch, in the memory of
        a part.
      z_loss: coefficient of the squared log-sum-exp that is added to each target's loss, and so to
        the metric ``loss``; see :func:`chunked_cross_entropy`.
      compiler_options: options for ``jax.jit``; None is what :func:`burst_jax.compiler_options`
        returns.

    Returns:
      ``step(params, opt_state, batch) -> (params, opt_state, metrics)``, a :class:`TrainStep`.

    Raises:
      ValueError: accumulate or chunk_size below 1, an optimizer that is none.
    """
    check_integer("accumulate", accumulate, 1)
    check_integer("chunk_size", chunk_size, 1)
    return TrainStep(graphdef, optimizer, chunk_size, accumulate, compiler_options, z_loss)


def _update(
    transform: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    weight_shardings: Any,
) -> tuple[Any, Any]:
    """The transformation's updates and new state, split as weights and state are.

    ``weight_shardings`` goes to those transformations that take further arguments: over Auto axes
    the arrays do not tell how they are split.

    Transformations are written for arrays of any sharding, as they are over Auto axes. Over
    Explicit axes JAX refuses, for example, Adafactor's product of a row and a column that are split
    over different axes.
    """
    with_more = optax.with_extra_args_support(transform)

    def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        return with_more.update(grads, opt_state, params, weight_shardings=weight_shardings)

    if not any(jax.typeof(x).sharding.mesh.explicit_axes for x in jax.tree.leaves(params)):
        return update(grads, opt_state, params)
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, (params, opt_state))
    on_auto_axes: Any = jax.sharding.auto_axes(update, out_sharding=shardings)
    return on_auto_axes(grads, opt_state, params)


def _named_sharding(x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding | None:
    """The sharding of ``x`` if it names mesh axes; None leaves the choice to the compiler."""
    return x.sharding if isinstance(x.sharding, NamedSharding) else None


def _step_count(opt_state: optax.OptState) -> jax.Array | None:
    """The number of updates so far, which the optimizer counts; None if it counts none."""
    counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
    return counts[0][1] if counts else None
