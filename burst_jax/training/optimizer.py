"""AdamW and its schedule. Any optax transformation can take its place in a training step."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from burst_jax.errors import check_integer
from burst_jax.training.adam import Moments, clipped_adam


class Optimizer(NamedTuple):
    """An optax transformation and its schedule.

    Attributes:
      transform: turns gradients into updates; its state counts the steps.
      schedule: the learning rate of each step, a float32 scalar.
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

    Weight decay applies to matrices only, not to norms, biases and embeddings. A parameter's name
    decides (``kernel`` decays), because the layers are stacked, and a stack of norm scales has two
    axes, as a matrix has.

    For each weight there are two moments. In float32 on the device they take twice the memory of
    float32 weights; ``moment_dtype`` halves that, ``moments="host"`` leaves next to nothing of it
    on the device. Both together are possible. The arithmetic is in float32 either way.

    Args:
      learning_rate: the schedule's peak.
      steps: number of steps of the schedule, which ends at ``final_fraction * learning_rate``.
      warmup_steps: number of steps in which the learning rate rises; None is a tenth of ``steps``,
        at most 1000.
      final_fraction: last learning rate as a share of the peak.
      weight_decay: each step takes ``weight_decay * learning_rate`` times the weight off it.
      clip_norm: largest global norm of the gradient; a longer gradient is scaled down to it.
      b1: decay of Adam's first moment.
      b2: decay of Adam's second moment.
      moment_dtype: float32 or bfloat16, of both moments. They are rounded to bfloat16 at random,
        up as often as the part that is dropped says: to the nearest, a second moment with ``b2``
        of 0.999 would never fall. The random bits depend on the step and on the element alone, so
        that a run is the same after a restart, and its roundings on every mesh.
      moments: "device", or "host": the moments are in the host's pinned memory, and each step
        fetches, renews and writes back a part of them after the other. The results are those of
        "device". The state's arrays are made where they shall be by :func:`init_train_state`, and
        stay there.

    Returns:
      The transformation and its schedule.

    Raises:
      ValueError: a learning rate or clip_norm that is not positive, or infinite, final_fraction or
        weight_decay below 0, a moment's decay that is not from 0 to below 1, steps below 1, a
        warm-up that is not shorter than the schedule, another moment_dtype or moments.
    """
    check_integer("steps", steps, 1)
    if warmup_steps is None:
        warmup_steps = min(steps // 10, 1000)
    check_integer("warmup_steps", warmup_steps, 0)
    for name, value in (("learning_rate", learning_rate), ("clip_norm", clip_norm)):
        if not 0 < _real(name, value) < math.inf:
            raise ValueError(f"{name} is {value}: it must be positive, and finite")
    for name, value in (("final_fraction", final_fraction), ("weight_decay", weight_decay)):
        if not 0 <= _real(name, value) < math.inf:
            raise ValueError(f"{name} is {value}: it must be 0 or more, and finite")
    for name, value in (("b1", b1), ("b2", b2)):
        if not 0 <= _real(name, value) < 1:
            raise ValueError(f"{name} is {value}: it must be at least 0, and below 1")
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            f"warmup_steps is {warmup_steps}: it must be in 0 ... steps - 1 ({steps - 1})"
        )
    dtype = _dtype("moment_dtype", moment_dtype)
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
        # optax mixes dtypes, which JAX refuses where the caller has set strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            return jnp.asarray(curve(count), jnp.float32)

    transform = optax.chain(
        # Clipping once stood here, and the names of a checkpoint's arrays count the places.
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


def _dtype(name: str, value: Any) -> np.dtype:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}: use float32 or bfloat16") from None
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{name} is {dtype}: use float32 or bfloat16")
    return dtype


def decay_mask(params: Any) -> Any:
    """A pytree like ``params``: True where weight decay applies, on parameters named ``kernel``."""

    def is_kernel(path: tuple[Any, ...], _: Any) -> bool:
        return any(getattr(entry, "key", None) == "kernel" for entry in path)

    return jax.tree_util.tree_map_with_path(is_kernel, params)
