"""Adding low-rank adapters (LoRA, Hu et al. 2021) to a decoder, and merging them."""

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
from burst_jax.layers.lora import LORA_A, LORA_B, Lora
from burst_jax.models.decoder import Decoder, abstract_decoder
from burst_jax.models.weights import flat_weights, with_weights
from burst_jax.parallel.mesh import reshard_explicit


def add_lora(
    model: Decoder,
    rank: int,
    *,
    alpha: float | None = None,
    targets: str | Sequence[str] = ".*",
    rank_stabilized: bool = False,
    seed: int = 0,
) -> Decoder:
    """Adds low-rank adapters to a decoder: ``x W + (alpha / rank) (x A) B`` in place of ``x W``.

    A is random and B is zero, initialized by the library qwix, so the outputs do not change before
    training. :func:`burst_jax.training.init_train_state` and
    :func:`burst_jax.training.make_train_step` train A and B only: all other weights are frozen,
    have no optimizer state, and may be bfloat16. They are shared with the given decoder, not
    copied::

        model = load(folder, mesh=mesh, rules=rules, dtype=jnp.bfloat16)
        model = add_lora(model, rank=16, targets="query|value")
        graphdef, params, opt_state = init_train_state(
            model.config, optimizer, mesh, 0, rules=rules, params=nnx.state(model)
        )

    Adapters are float32, and sharded as the inputs and outputs of their W; the rank is not sharded.

    Args:
      model: a decoder without adapters, on any mesh.
      rank: rank of the adapters.
      alpha: numerator of their scale; None is a scale of 1.
      targets: names of the projections with adapters (query, key, value, out, gate, up, down, or
        q_proj, ... as in transformers; and router in place of the last three in a mixture of
        experts): a regular expression that matches the whole name, or a sequence of names. Default:
        all that the decoder has.
      rank_stabilized: whether the scale is ``alpha / sqrt(rank)`` (rsLoRA, Kalajdzievski 2023).
      seed: seed of A; the same values on every mesh.

    Returns:
      A new decoder.

    Raises:
      ImportError: the library qwix is missing.
      ValueError: the decoder already has adapters; a rank below 1, an alpha that is not positive,
        or targets that match no projection.
    """
    reject_adapters(model)
    check_seed(seed)
    names = targets if isinstance(targets, str) else tuple(targets)
    lora = Lora(rank, alpha, names, rank_stabilized)
    graphdef, shapes = abstract_like(model, lora=lora)
    shardings = nnx.merge(graphdef, shapes).shardings(shapes)
    specs, _ = nnx.split_state(shardings.weight_specs(shapes), nnx.LoRAParam, ...)
    placed = jax.tree.map(lambda spec: NamedSharding(shardings.mesh, spec), specs)

    @partial(jax.jit, out_shardings=placed)
    def initial_adapters() -> nnx.State:
        # The decoder's other weights are unused here, so XLA removes them.
        config = dataclasses.replace(model.config, lora=lora)
        decoder = Decoder(config, rngs=nnx.Rngs(params=seed), **model.arguments)
        return nnx.state(decoder, nnx.LoRAParam)

    return nnx.merge(graphdef, initial_adapters(), nnx.state(model))


def merge_lora(model: Decoder, *, param_dtype: DTypeLike | None = None) -> Decoder:
    """Merges a decoder's adapters: ``W + scale A B`` replaces W, :attr:`Lora.scale`.

    The sum is computed in float32. Weights without adapters are shared with the given decoder,
    unless their dtype changes.

    Args:
      model: a decoder with adapters.
      param_dtype: of the new decoder's weights; None is that of the given one's. In bfloat16
        updates much smaller than W are lost.

    Returns:
      A new decoder without adapters.

    Raises:
      ValueError: the decoder has no adapters.
    """
    lora = model.config.lora
    if lora is None:
        raise ValueError("model has no adapters: there is nothing to merge")
    param_dtype = jnp.dtype(model.config.param_dtype if param_dtype is None else param_dtype)
    graphdef, shapes = abstract_like(model, lora=None, param_dtype=param_dtype)
    state = nnx.state(model)
    shardings = model.shardings(state)
    mesh = shardings.mesh
    specs, arrays = flat_weights(shardings.weight_specs(state)), flat_weights(state)
    merged = {}
    for path, shape in flat_weights(shapes).items():
        paths = [path, (*path[:-1], LORA_A), (*path[:-1], LORA_B)]
        if path[-1] != "kernel" or paths[1] not in arrays:
            merged[path] = arrays[path].astype(shape.dtype)
            continue
        weights = [reshard_explicit(arrays[each], mesh, specs[each]) for each in paths]
        weight_specs = tuple(specs[each] for each in paths)
        merged[path] = _merged(*weights, lora.scale, param_dtype, mesh, weight_specs)
    return nnx.merge(graphdef, with_weights(shapes, merged))


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _merged(
    kernel: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: float,
    dtype: jnp.dtype,
    mesh: Mesh | AbstractMesh,
    specs: tuple[PartitionSpec, ...],
) -> jax.Array:
    """``W + scale A B`` of all layers, each device computing its own part."""

    def layer(weights: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        kernel, a, b = (weight.astype(jnp.float32) for weight in weights)
        product = jnp.matmul(a, b, precision="highest").reshape(kernel.shape)
        return (kernel + scale * product).astype(dtype)

    # One layer at a time, because the product is float32.
    def local(*weights: jax.Array) -> jax.Array:
        return lax.map(layer, weights)

    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])(kernel, a, b)


def reject_adapters(model: Decoder) -> None:
    """Raises ValueError if a decoder already has adapters."""
    if model.config.lora is not None:
        raise ValueError(
            f"model already has adapters, {model.config.lora}: merge them first with merge_lora"
        )


def abstract_like(model: Decoder, **changes: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """``abstract_decoder`` of this decoder's arguments, with changes to its config."""
    return abstract_decoder(dataclasses.replace(model.config, **changes), **model.arguments)
