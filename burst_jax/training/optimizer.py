"""AdamW with warm-up and cosine decay. A training step accepts any optax transformation."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from burst_jax.errors import check_integer, check_positive
from burst_jax.training.adam import Moments, clipped_adam


class Optimizer(NamedTuple):
    """An optax transformation and its schedule.

    Attributes:
      transform: computes updates from gradients; its state counts the steps.
      schedule: step -> learning rate, a float32 scalar.
    """

    transform: optax.GradientTransformation
    schedule: optax.Schedule


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
    moment_dtype: jax.typing.DTypeLike = jnp.float32,
    moments: Moments = "device",
) -> Optimizer:
    """AdamW with linear warm-up, cosine decay and clipping by global norm.

    Weight decay applies only to parameters named ``kernel``, not to norms, biases and embeddings.
    The name decides, because in stacked layers a norm's scale has two dimensions, as a matrix has.

    The two moments in float32 on the device take twice the memory of float32 weights.
    ``moment_dtype`` halves that, ``moments="host"`` offloads nearly all; both can be combined.
    Arithmetic is always float32.

    Args:
      learning_rate: the schedule's peak.
      steps: number of steps of the schedule, which ends at ``final_fraction * learning_rate``.
      warmup_steps: number of warm-up steps; None is a tenth of ``steps``, at most 1000.
      final_fraction: final learning rate as a fraction of the peak.
      weight_decay: each step subtracts ``weight_decay * learning_rate`` times the weight.
      clip_norm: largest global norm of the gradient; a longer gradient is scaled down to it.
      b1: decay of Adam's first moment.
      b2: decay of Adam's second moment.
      moment_dtype: dtype of both moments, float32 or bfloat16. bfloat16 uses stochastic rounding:
        with rounding to nearest, a second moment with ``b2=0.999`` would never decrease. The random
        bits depend only on step and element, so they are the same after a restart and on any mesh.
      moments: "device", or "host": optimizer-state offload. The moments are in pinned host memory;
        each step fetches, updates and writes back one chunk after another. Results are bitwise
        those of "device", unless XLA's optimizations are disabled. :func:`init_train_state` places
        them.

    Returns:
      The transformation and its schedule.

    Raises:
      ValueError: a learning rate or clip_norm that is not positive and finite, a negative
        final_fraction or weight_decay, b1 or b2 outside [0, 1), steps below 1, a warm-up that is
        not shorter than the schedule, an unknown moment_dtype or moments.
    """
    check_integer("steps", steps, 1)
    if warmup_steps is None:
        warmup_steps = min(steps // 10, 1000)
    check_integer("warmup_steps", warmup_steps, 0)
    for name, value in (("learning_rate", learning_rate), ("clip_norm", clip_norm)):
        _real(name, value)
        check_positive(name, value)
    for name, value in (("final_fraction", final_fraction), ("weight_decay", weight_decay)):
        if not 0 <= _real(name, value) < math.inf:
            raise ValueError(f"{name} is {value}: it must be 0 or more, and finite")
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0 <= _real(name, value) < 1:
            raise ValueError(f"{name} is {value}: it must be at least 0, and below 1")
    if warmup_steps >= steps:
        raise ValueError(
            f"warmup_steps is {warmup_steps}: it must be in 0 ... steps - 1 ({steps - 1})"
        )
    try:
        dtype: Any = jnp.dtype(moment_dtype)
    except TypeError:
        dtype = repr(moment_dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"moment_dtype is {dtype}: use float32 or bfloat16")
    if moments not in get_args(Moments):
        raise ValueError(
            f"moments is {moments!r}: use one of {', '.join(map(repr, get_args(Moments)))}"
        )
    curve = optax.warmup_cosine_decay_schedule(
        init_value=learning_rate / (warmup_steps + 1),
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=steps,
        end_value=final_fraction * learning_rate,
    )

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        # optax mixes dtypes, which raises under the caller's strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            return jnp.asarray(curve(count), jnp.float32)

    transform = optax.chain(
        # Keeps the array names of old checkpoints: they contain the index in the chain.
        optax.identity(),
        clipped_adam(clip_norm, b1, b2, moment_dtype=dtype, moments=moments),
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(schedule),
    )
    return Optimizer(transform, schedule)


def _real(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be a number")
    return float(value)


def decay_mask(params: Any) -> Any:
    """A pytree like ``params``: True where weight decay applies, on parameters named ``kernel``."""

    def is_kernel(path: tuple[Any, ...], _: Any) -> bool:
        return any(getattr(entry, "key", None) == "kernel" for entry in path)

    return jax.tree_util.tree_map_with_path(is_kernel, params)
