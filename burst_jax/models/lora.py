"""Decoders with low-rank adapters (LoRA, Hu et al. 2021), and what becomes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from burst_jax.errors import check_seed
from burst_jax.layers.low_rank import LORA_A, LORA_B
from burst_jax.models.decoder import Decoder, abstract_decoder
from burst_jax.models.hf.weights import flat, tree_of
from burst_jax.models.lora_config import Lora
from burst_jax.parallel.mesh import reshard_explicit


def add_lora(
    model: Decoder,
    rank: int,
    *,
    alpha: float | None = None,
    targets: str | Sequence[str] = ".*",
    seed: int = 0,
) -> Decoder:
    """The decoder with low-rank adapters: ``x W + (alpha / rank) (x A) B`` in place of ``x W``.

    A is drawn at random and B is zero, by the library qwix, so the new decoder computes what the
    given one does until it is trained. :func:`burst_jax.training.init_train_state` and
    :func:`burst_jax.training.make_train_step` then train A and B alone: the other weights have no
    gradients and no optimizer state, and may be in bfloat16. They are shared, not copied::

        model = load(folder, mesh=mesh, rules=rules, dtype=jnp.bfloat16)
        model = add_lora(model, rank=16, targets="query|value")
        graphdef, params, opt_state = init_train_state(
            model.config, optimizer, mesh, 0, rules=rules, params=nnx.state(model)
        )

    Adapters are float32. They are split as the inputs and outputs of their W are, the rank is not.

    Args:
      model: a decoder without adapters, on any mesh.
      rank: rank of the adapters.
      alpha: numerator of their factor; None is ``rank``, so that the factor is 1.
      targets: which of a layer's projections (query, key, value, out, gate, up, down, or
        transformers' names of them, q_proj, ...) have adapters: a regular expression that matches
        the whole name, or names. The default is all seven.
      seed: seed of the random A, the same on every mesh.

    Raises:
      ImportError: the library qwix is missing.
      ValueError: the decoder has adapters already; a rank below 1, an alpha that is not positive,
        or targets that no projection has.
    """
    if model.config.lora is not None:
        raise ValueError(
            f"model has adapters already, {model.config.lora}: merge_lora adds them up"
        )
    check_seed(seed)
    lora = Lora(rank, alpha, targets if isinstance(targets, str) else tuple(targets))
    graphdef, shapes = abstract_like(model, lora=lora)
    parts = nnx.merge(graphdef, shapes).parts(shapes)
    adapters, _ = nnx.split_state(parts.tree(shapes), nnx.LoRAParam, ...)
    shardings = jax.tree.map(lambda spec: NamedSharding(parts.mesh, spec), adapters)

    @partial(jax.jit, out_shardings=shardings)
    def draw() -> nnx.State:
        # The weights that are drawn beside the adapters are not used, so they are never computed.
        config = dataclasses.replace(model.config, lora=lora)
        drawn = Decoder(config, rngs=nnx.Rngs(params=seed), **model.arguments)
        return nnx.state(drawn, nnx.LoRAParam)

    return nnx.merge(graphdef, draw(), nnx.state(model))


def merge_lora(model: Decoder, *, param_dtype: DTypeLike | None = None) -> Decoder:
    """The decoder without adapters that computes the same: ``W + (alpha / rank) A B`` is its W.

    The sum is made in float32. Weights that have no adapters are shared with the given decoder, if
    their dtype stays.

    Args:
      model: a decoder with adapters.
      param_dtype: of the new decoder's weights; None is that of the given one's. In bfloat16 a sum
        loses what is small beside W.

    Raises:
      ValueError: it has none.
    """
    lora = model.config.lora
    if lora is None:
        raise ValueError("model has no adapters: there is nothing to merge")
    param_dtype = jnp.dtype(model.config.param_dtype if param_dtype is None else param_dtype)
    graphdef, shapes = abstract_like(model, lora=None, param_dtype=param_dtype)
    state = nnx.state(model)
    parts = model.parts(state)
    specs, arrays = flat(parts.tree(state)), flat(state)
    merged = {}
    for path, shape in flat(shapes).items():
        three = [path, (*path[:-1], LORA_A), (*path[:-1], LORA_B)]
        if path[-1] != "kernel" or three[1] not in arrays:
            merged[path] = arrays[path].astype(shape.dtype)
            continue
        weights = [reshard_explicit(arrays[each], parts.mesh, specs[each]) for each in three]
        of_three = tuple(specs[each] for each in three)
        merged[path] = _sum(*weights, lora.scale, param_dtype, parts.mesh, of_three)
    return nnx.merge(graphdef, tree_of(shapes, merged))


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _sum(
    kernel: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: float,
    dtype: jnp.dtype,
    mesh: Mesh | AbstractMesh,
    specs: tuple[PartitionSpec, ...],
) -> jax.Array:
    """``W + scale A B`` of all layers, each device its own part of it."""

    def of_layer(weights: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        kernel, a, b = (weight.astype(jnp.float32) for weight in weights)
        product = jnp.matmul(a, b, precision="highest").reshape(kernel.shape)
        return (kernel + scale * product).astype(dtype)

    # A layer at a time, because the product is float32.
    def local(*weights: jax.Array) -> jax.Array:
        return lax.map(of_layer, weights)

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])(kernel, a, b)


def abstract_like(model: Decoder, **changes: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """A decoder like this one without weights, with changes in its config."""
    return abstract_decoder(dataclasses.replace(model.config, **changes), **model.arguments)
