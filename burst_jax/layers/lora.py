"""Low-rank adapters of projections (LoRA, Hu et al. 2021).

A projection with an adapter computes ``x W + (alpha / r) (x A) B``, or with ``alpha / sqrt(r)`` if
it is rank-stabilized (rsLoRA, Kalajdzievski 2023). A ``[inputs, r]`` and
B ``[r, outputs]`` are two more parameters of the projection, ``kernel_lora_a`` and
``kernel_lora_b``, named and shaped as in the library qwix: heads and head features are one
dimension. qwix initializes them. The products are computed here, because qwix replaces
``jax.lax.dot_general`` while a model is traced, which does not reach the hand-written gradient of
the feed-forward.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
import warnings
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from burst_jax.errors import check_bool, check_integer, optional

LORA_A, LORA_B = "kernel_lora_a", "kernel_lora_b"
# A decoder layer's projections, and their names in transformers.
PROJECTIONS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
    # Of Gated DeltaNet.
    "output_gate": "in_proj_z",
    "beta": "in_proj_b",
    "decay": "in_proj_a",
    # Of Kimi Delta Attention.
    "output_gate_a": "g_a_proj",
    "output_gate_b": "g_b_proj",
    "decay_a": "f_a_proj",
    "decay_b": "f_b_proj",
    # Of latent attention, whose key and value have the latent vector as their input.
    "latent": "kv_a_proj_with_mqa",
    # Of a mixture of experts, whose experts have no adapters.
    "router": "router",
}
ROUTER = "router"
_PROJECTION_NAMES = ", ".join(f"{ours} ({theirs})" for ours, theirs in PROJECTIONS.items())

Linear = nnx.LinearGeneral | nnx.Linear


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (LoRA, Hu et al. 2021): ``x W + (alpha / rank) (x A) B`` for ``x W``.

    A is ``[inputs, rank]`` and B ``[rank, outputs]``, both float32. W is frozen.

    Attributes:
      rank: the rank of A and B.
      alpha: numerator of the scale; None is a scale of 1.
      targets: the projections with adapters: a regular expression that matches the whole name, or a
        tuple of names. The names are query, key, value, out, gate, up and down, or those of
        transformers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj; router, in
        place of the last three, in a mixture of experts; output_gate, beta and decay of Gated
        DeltaNet, and output_gate of gated attention; beta, output_gate_a, output_gate_b, decay_a
        and decay_b of Kimi Delta Attention; latent of latent attention. Default: all that the model
        has.
      rank_stabilized: whether the scale is ``alpha / sqrt(rank)`` (rsLoRA, Kalajdzievski 2023).

    Raises:
      ValueError: a rank below 1, an alpha that is not positive, a rank_stabilized that is no bool,
        an invalid regular expression, or a name or expression that matches no projection.
    """

    rank: int
    alpha: float | None = None
    targets: str | tuple[str, ...] = ".*"
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, 1)
        alpha = self.alpha
        real = isinstance(alpha, numbers.Real) and not isinstance(alpha, bool)
        if alpha is not None and not (real and 0 < alpha < math.inf):
            raise ValueError(f"alpha is {alpha!r}: it must be positive and finite, or None")
        check_bool("rank_stabilized", self.rank_stabilized)
        if not self.projections:
            raise ValueError(f"targets is {self.targets!r}: it matches none of {_PROJECTION_NAMES}")

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections that ``targets`` names or matches, in any model."""
        if isinstance(self.targets, str):
            try:
                matches = re.compile(self.targets).fullmatch
            except re.error as error:
                raise ValueError(
                    f"targets is {self.targets!r}: not a regular expression ({error}); use names "
                    "like 'query|value'"
                ) from None
            return tuple(name for name, hf in PROJECTIONS.items() if matches(name) or matches(hf))
        known = {*PROJECTIONS, *PROJECTIONS.values()}
        names = isinstance(self.targets, tuple) and all(isinstance(x, str) for x in self.targets)
        if not names or not known.issuperset(self.targets):
            raise ValueError(
                f"targets is {self.targets!r}: pass a regular expression, or a tuple of names "
                f"among {_PROJECTION_NAMES}"
            )
        return tuple(name for name, hf in PROJECTIONS.items() if {name, hf} & set(self.targets))

    def among(self, names: Collection[str]) -> tuple[str, ...]:
        """The projections with adapters in a model with the projections ``names``.

        Raises:
          ValueError: ``targets`` is a tuple with one that the model lacks, or matches none.
          NotImplementedError: that one is of the experts of a mixture.
        """
        missing = [name for name in self.projections if name not in names]
        found = tuple(name for name in self.projections if name in names)
        if not found or (missing and not isinstance(self.targets, str)):
            if ROUTER in names:
                raise NotImplementedError(
                    f"lora has targets {self.targets!r}, and {', '.join(sorted(missing))} have a "
                    "matrix per expert: experts have no adapters; choose among "
                    f"{', '.join(names)}"
                )
            raise ValueError(
                f"lora has targets {self.targets!r}, and the layer has no projection "
                f"{', '.join(sorted(missing))}: choose among {', '.join(names)}"
            )
        return found

    @property
    def scale(self) -> float:
        """``alpha / rank``, or ``alpha / sqrt(rank)`` if it is rank-stabilized."""
        return 1.0 if self.alpha is None else self.alpha / self.divisor

    @property
    def divisor(self) -> float:
        """Denominator of the scale."""
        return math.sqrt(self.rank) if self.rank_stabilized else self.rank


def init_adapters(projections: Iterable[Linear], lora: Lora, rngs: nnx.Rngs) -> None:
    """Adds adapters to projections. B is zero, so the outputs do not change.

    Raises:
      ImportError: the library qwix is missing.
    """
    for linear in projections:
        set_adapter(linear, *_initial_adapter(linear, lora, rngs), lora.scale)


def _initial_adapter(linear: Linear, lora: Lora, rngs: nnx.Rngs) -> tuple[jax.Array, jax.Array]:
    """A and B, float32 for weights of any dtype."""
    qwix = optional("qwix", user="a low-rank adapter", extra="lora")
    # qwix gives an adapter the dtype of its kernel, and traces the projection to find it.
    stand_in = nnx.clone(linear)
    stand_in.kernel = nnx.Param(jnp.zeros(linear.kernel.shape, jnp.float32))
    stand_in.bias, stand_in.use_bias, stand_in.dtype = None, False, jnp.float32
    features = linear.in_features
    features = (features,) if isinstance(features, int) else tuple(features)
    provider = qwix.LoraProvider(module_path=".*", rank=lora.rank, alpha=lora.scale * lora.rank)
    with warnings.catch_warnings():
        # qwix calls methods that Flax has since renamed.
        warnings.simplefilter("ignore", DeprecationWarning)
        adapted = qwix.apply_lora_to_model(
            stand_in, provider, jnp.zeros((1, *features), jnp.float32), rngs=rngs
        )
    return getattr(adapted, LORA_A)[...], getattr(adapted, LORA_B)[...]


def set_adapter(linear: Linear, a: jax.Array, b: jax.Array, scale: float) -> None:
    """Adds the adapter A ``[inputs, r]``, B ``[r, outputs]`` with :attr:`Lora.scale`."""
    setattr(linear, LORA_A, nnx.LoRAParam(a))
    setattr(linear, LORA_B, nnx.LoRAParam(b))
    linear.lora_scale = scale  # pyrefly: ignore


def scaled_adapter(linear: Linear, dtype: DTypeLike) -> tuple[jax.Array, jax.Array] | None:
    """``(A, scale B)`` of a projection, cast to ``dtype``; None without an adapter."""
    if not hasattr(linear, LORA_A):
        return None
    a, b = getattr(linear, LORA_A)[...], getattr(linear, LORA_B)[...]
    return a.astype(dtype), (linear.lora_scale * b).astype(dtype)  # pyrefly: ignore


def add_adapter(linear: Linear, x: jax.Array, out: jax.Array) -> jax.Array:
    """``out + scale (x A) B``; ``out`` if the projection has no adapter."""
    adapter = scaled_adapter(linear, out.dtype)
    if adapter is None:
        return out
    a, b = adapter
    features = x.reshape(*x.shape[:2], -1).astype(out.dtype)
    return out + ((features @ a) @ b).reshape(out.shape)


def slice_outputs(adapter: nnx.State, first: jax.Array, count: int) -> nnx.State:
    """The adapter of outputs ``first`` to ``first + count`` of a projection; it may be empty."""

    def sliced(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        is_b = any(getattr(key, "key", None) == LORA_B for key in path)
        return lax.dynamic_slice_in_dim(array, first, count, axis=1) if is_b else array

    return jax.tree_util.tree_map_with_path(sliced, adapter)
