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

from burst_jax.errors import check_bool, check_integer
from burst_jax.models.shardings import DecoderShardings
from burst_jax.parallel.mesh import axes_size
from burst_jax.parallel.xla_options import compiler_options as default_compiler_options
from burst_jax.training.adam import global_norm
from burst_jax.training.batches import Batch, batch_specs
from burst_jax.training.loss import CHUNK_SIZE, loss_with_auxiliary
from burst_jax.training.optimizer import Optimizer
from burst_jax.training.state import split_trained, transform_of

# The factor of the loss in a backward pass with float16.
_FLOAT16_SCALE = 1024


class TrainStep:
    """The jitted training step of a decoder, created by :func:`make_train_step`.

    ``step(params, opt_state, batch) -> (params, opt_state, metrics)``. ``params`` and ``opt_state``
    are donated; the new ones keep their shardings. With LoRA only the adapters are trained.
    Metrics are float32 scalars: ``loss`` (weighted mean, nats per target, before the update),
    ``grad_norm`` (before clipping), ``targets`` (the sum of the global batch's weights, by which
    the loss is divided: its number of targets), and ``learning_rate`` if the optimizer is an
    :class:`burst_jax.training.Optimizer` whose state counts its steps. With auxiliary losses, like
    those of a mixture of experts, ``loss`` includes them, and there are metrics of each
    (:class:`burst_jax.models.MixtureOfExperts`); with ``accumulate`` both are means over its
    slices, weighted by their tokens without padding. With ``max_logits`` there is the metric
    ``max_logits``, a :class:`burst_jax.MaxLogits` of arrays float32 ``[L, N]``.

    The gradient is that of the mean; the backward pass computes a multiple of it in float16, whose
    range is small (loss scaling by 1,024).
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: Optimizer | optax.GradientTransformation,
        chunk_size: int,
        accumulate: int,
        compiler_options: Mapping[str, bool | int | str] | None,
        z_loss: float = 0.0,
        max_logits: bool = False,
    ) -> None:
        self._graphdef = graphdef
        self._transform = transform_of(optimizer)
        self._schedule = optimizer.schedule if isinstance(optimizer, Optimizer) else None
        self._accumulate = accumulate
        self._loss = partial(
            loss_with_auxiliary, chunk_size=chunk_size, z_loss=z_loss, max_logits=max_logits
        )
        self._compiler_options = compiler_options
        self._jitted: jax.stages.Wrapped | None = None
        self._checked = False
        self._weight_shardings: Any = None

    def __call__(
        self, params: nnx.State, opt_state: optax.OptState, batch: Batch[jax.Array]
    ) -> tuple[nnx.State, optax.OptState, dict[str, jax.Array]]:
        """Runs one step with a batch of :func:`place_batch`.

        Raises:
          ValueError: the first batch has another layout or number of shards than the decoder.
        """
        if not self._checked:
            model = nnx.merge(self._graphdef, params)
            model.reject_other_layout(batch["positions"], batch["segment_ids"])
            self._checked = True
        return self._jit(params, opt_state)(params, opt_state, batch)

    def trace(
        self, params: nnx.State, opt_state: optax.OptState, batch: Batch[jax.Array]
    ) -> jax.stages.Traced:
        """The traced program, for ahead-of-time compilation: ``trace(...).lower().compile()``.

        Arguments are arrays or ``jax.ShapeDtypeStruct`` with shardings. A call with arrays of these
        types then finds the compiled program.
        """
        return self._jit(params, opt_state).trace(params, opt_state, batch)

    def _jit(self, params: nnx.State, opt_state: optax.OptState) -> jax.stages.Wrapped:
        if self._jitted is None:
            nnx.merge(self._graphdef, params).reject_sharded_weights()
            # The shardings are known at the first call. Without them the compiler might shard a new
            # weight over the sequence axis, and every later step would gather it.
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
        loss, grads, others = self._mean_loss_and_gradient(trained, frozen, batch)
        with jax.numpy_dtype_promotion("standard"):  # As in Optimizer.schedule: optax mixes dtypes.
            updates, new_opt_state = _update(
                self._transform, grads, opt_state, trained, self._weight_shardings
            )
        grad_norm = global_norm(grads)
        metrics = {"loss": loss, "grad_norm": grad_norm, **others}
        count = _step_count(opt_state)
        if self._schedule is not None and count is not None:
            metrics["learning_rate"] = jnp.asarray(self._schedule(count), jnp.float32)
        new: Any = optax.apply_updates(trained, updates)
        return nnx.merge_state(new, frozen), new_opt_state, metrics

    def _mean_loss_and_gradient(
        self, trained: Any, frozen: Any, batch: Batch[jax.Array]
    ) -> tuple[jax.Array, Any, dict[str, Any]]:
        """The mean loss, its gradient, and the other metrics."""
        model = nnx.merge(self._graphdef, trained, frozen)
        scale = _loss_scale(model.config.dtype, trained)
        targets, present = jnp.sum(batch["weights"]), _present(batch)
        count = jnp.where(targets == 0, 1.0, targets)  # The loss of a batch without targets is 0.

        def term(trained: Any, batch: Batch[jax.Array]) -> tuple[jax.Array, Any]:
            """What a slice of the batch adds to the mean loss, times the scale, and to metrics."""
            model = nnx.merge(self._graphdef, trained, frozen)
            total, _, auxiliary = self._loss(model, batch)
            loss, share = total / count, _present(batch) / present
            if auxiliary.loss is not None:
                loss = loss + share * auxiliary.loss
            metrics = {name: share * x for name, x in auxiliary.metrics.items()}
            return scale * loss, (loss, metrics, auxiliary.max_logits)

        gradient = jax.value_and_grad(term, has_aux=True)
        if self._accumulate == 1:
            sums = gradient(trained, batch)
        else:
            sums = self._accumulated(gradient, trained, batch, model.shardings())
        (_, (loss, metrics, logits)), grads = sums
        metrics["targets"] = targets
        if logits is not None:
            metrics["max_logits"] = logits
        if scale != 1:
            grads = jax.tree.map(lambda g: (g.astype(jnp.float32) / scale).astype(g.dtype), grads)
        return loss, grads, metrics

    def _accumulated(
        self, gradient: Any, trained: Any, batch: Batch[jax.Array], shardings: DecoderShardings
    ) -> Any:
        """The results of ``gradient`` over ``accumulate`` slices of the batch.

        They are sums, but for the bounds of the largest logit, of which the largest are taken.
        """
        size = batch["inputs"].shape[0]
        devices = axes_size(shardings.mesh, shardings.batch_axes)
        stages = axes_size(shardings.mesh, shardings.stage_axis)
        microbatches = math.lcm(stages, shardings.microbatches)
        multiple = self._accumulate * devices * microbatches
        if size % multiple:
            pipeline = f" and of {microbatches} microbatches of the pipeline"
            raise ValueError(
                f"accumulate is {self._accumulate}, the batch has {size} sequences: use a multiple "
                f"of {multiple}, so that each slice has some for each of {devices} devices"
                + pipeline
                * (microbatches > 1)
            )
        specs = batch_specs(batch, shardings.batch_axes, shardings.token_axes)

        # Each device slices its own sequences, so nothing is communicated.
        def slices(x: jax.Array) -> jax.Array:
            return x.reshape(self._accumulate, x.shape[0] // self._accumulate, *x.shape[1:])

        sliced = jax.shard_map(
            partial(jax.tree.map, slices),
            mesh=shardings.mesh,
            in_specs=(specs,),
            out_specs=jax.tree.map(lambda spec: PartitionSpec(None, *spec), specs),
        )(batch)

        def add(found: Any, batch: Batch[jax.Array]) -> tuple[Any, None]:
            (total, (loss, metrics, logits)), grads = gradient(trained, batch)
            (*sums, largest), new = found, (total, loss, metrics, grads)
            largest = jax.tree.map(jnp.maximum, largest, logits)
            return (*jax.tree.map(jnp.add, tuple(sums), new), largest), None

        first = jax.tree.map(lambda x: x[0], sliced)
        (total, (loss, metrics, logits)), _ = jax.eval_shape(gradient, trained, first)
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (total, loss, metrics))
        largest = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), logits)
        start = *sums, jax.tree.map(jnp.zeros_like, trained), largest
        total, loss, metrics, grads, largest = jax.lax.scan(add, start, sliced)[0]
        return (total, (loss, metrics, largest)), grads


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: Optimizer | optax.GradientTransformation,
    *,
    chunk_size: int = CHUNK_SIZE,
    accumulate: int = 1,
    z_loss: float = 0.0,
    max_logits: bool = False,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> TrainStep:
    """Creates the jitted training step of a decoder.

    Args:
      graphdef: graph definition of the decoder, see :func:`init_train_state`.
      optimizer: result of :func:`make_optimizer`, or any optax transformation.
      chunk_size: number of tokens in a device's chunk of the loss.
      accumulate: gradient accumulation: number of slices of the batch, computed one after another
        and summed in the dtype of the weights. The step is that of the whole batch, in the memory
        of one slice, but for one term: the load-balancing loss of a mixture of experts is no sum
        over tokens. It is computed per slice, so it balances the load of each slice, which is
        stricter (the router's z-loss is that of the whole batch).
      z_loss: coefficient of the squared log-sum-exp, included in the metric ``loss``; see
        :func:`chunked_cross_entropy`.
      max_logits: whether to return the metric ``max_logits``, bounds of the largest logit of each
        of the L layers with softmax attention and of each head, over the whole batch, before the
        update: what QK-clip needs. See :func:`burst_jax.max_logits`.
      compiler_options: options for ``jax.jit``; None is :func:`burst_jax.compiler_options`.

    Returns:
      ``step(params, opt_state, batch) -> (params, opt_state, metrics)``, a :class:`TrainStep`.

    Raises:
      ValueError: accumulate or chunk_size below 1, max_logits no bool, an invalid optimizer.
    """
    check_integer("accumulate", accumulate, 1)
    check_integer("chunk_size", chunk_size, 1)
    check_bool("max_logits", max_logits)
    return TrainStep(
        graphdef, optimizer, chunk_size, accumulate, compiler_options, z_loss, max_logits
    )


def _update(
    transform: optax.GradientTransformation,
    grads: Any,
    opt_state: Any,
    params: Any,
    weight_shardings: Any,
) -> tuple[Any, Any]:
    """The transformation's updates and new state, with the shardings of weights and state.

    Transformations that accept extra arguments get ``weight_shardings``, because over Auto axes an
    array's type lacks its sharding. Over Explicit axes the update runs in Auto mode: optax does not
    annotate shardings, and JAX rejects, for example, Adafactor's product of a row and a column that
    are sharded over different axes.
    """
    extended = optax.with_extra_args_support(transform)

    def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        return extended.update(grads, opt_state, params, weight_shardings=weight_shardings)

    if not any(jax.typeof(x).sharding.mesh.explicit_axes for x in jax.tree.leaves(params)):
        return update(grads, opt_state, params)
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, (params, opt_state))
    on_auto_axes: Any = jax.sharding.auto_axes(update, out_sharding=shardings)
    return on_auto_axes(grads, opt_state, params)


def _loss_scale(dtype: Any, trained: Any) -> int:
    """The factor of the mean loss in the backward pass, by which its gradient is divided.

    Gradients of a sum over a million targets overflow float16, and a token's part of a mean's is
    smaller than float16 resolves. Other dtypes have float32's range.
    """
    dtypes = {jnp.dtype(dtype), *(x.dtype for x in jax.tree.leaves(trained))}
    return _FLOAT16_SCALE if jnp.dtype(jnp.float16) in dtypes else 1


def _present(batch: Batch[jax.Array]) -> jax.Array:
    """The number of tokens that are not padding, float32, at least 1."""
    ids = batch["segment_ids"]
    if ids is None:
        return jnp.float32(batch["inputs"].size)
    return jnp.maximum(jnp.sum((ids != 0).astype(jnp.float32)), 1)


def _named_sharding(x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding | None:
    """The sharding of ``x`` if it is a NamedSharding; None leaves the choice to the compiler."""
    return x.sharding if isinstance(x.sharding, NamedSharding) else None


def _step_count(opt_state: optax.OptState) -> jax.Array | None:
    """The optimizer's count of updates, or None if it has none."""
    counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
    return counts[0][1] if counts else None
