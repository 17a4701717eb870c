"""The training state: weights and optimizer state, their shardings, their initialization."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from burst_jax.errors import check_seed
from burst_jax.models.decoder import Decoder, DecoderConfig, abstract_decoder
from burst_jax.parallel.mesh import check_has_devices, resolve_mesh
from burst_jax.parallel.rules import ShardingRules
from burst_jax.training.optimizer import Optimizer


class LowPrecisionWeights(UserWarning):
    """Weights in 16 bits are to be trained, and would lose most of their updates."""


def init_train_state(
    config: DecoderConfig,
    optimizer: Optimizer | optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    *,
    rules: ShardingRules | None = None,
    microbatches: int | None = None,
    params: nnx.State | None = None,
    **options: Any,
) -> tuple[nnx.GraphDef, nnx.State, optax.OptState]:
    """Weights and optimizer state, initialized sharded: each device creates only its own shards.

    The same seed gives the same weights on every mesh. To train existing weights, pass them::

        model = burst_jax.models.load(folder, mesh=mesh, rules=rules, param_dtype=jnp.float32)
        graphdef, params, opt_state = init_train_state(
            model.config, optimizer, mesh, seed, rules=rules, params=nnx.state(model)
        )

    With LoRA (``config.lora``) the optimizer state covers only the adapters.

    Args:
      config: config of the decoder.
      optimizer: result of :func:`make_optimizer`, or any optax transformation.
      mesh: mesh of the weights and of the decoder's attention.
      seed: seed of the random weights.
      rules: sharding rules of weights and optimizer state; None replicates them, except for heads,
        hidden features and vocabulary, which ``tensor_axis`` shards.
      microbatches: of a pipeline, see :class:`burst_jax.models.Decoder`.
      params: state of a decoder with this config, on any devices, resharded to ``rules``; ``seed``
        is then unused. Arrays with the right sharding are not copied, and the first step donates
        them, which deletes the weights of the decoder they came from. None draws random weights.
        Weights that are trained should be float32, whatever ``config.dtype`` is; for 16 bits there
        is a warning, :class:`LowPrecisionWeights`.
      **options: further attention options of the decoder, see :class:`burst_jax.models.Decoder`.

    Returns:
      ``(graphdef, params, opt_state)``; ``nnx.merge(graphdef, params)`` is the decoder.

    Raises:
      ValueError: the mesh lacks an axis of the rules, a size does not divide, the seed is not in
        0 ... 2**32 - 1, or ``params`` does not fit the config.
    """
    check_has_devices(mesh)
    check_seed(seed)
    options |= {"mesh": mesh, "rules": rules, "microbatches": microbatches}
    graphdef, shapes, opt_shapes = abstract_train_state(config, optimizer, **options)
    if params is not None:
        _check_weights(params, shapes)
    _warn_of_low_precision(split_trained(shapes)[0])
    shardings = jax.tree.map(lambda x: x.sharding, (shapes, opt_shapes))
    start = transform_of(optimizer).init
    if params is not None:
        params = jax.device_put(params, shardings[0])
        opt_state = jax.jit(start, out_shardings=shardings[1])(split_trained(params)[0])
        return graphdef, params, opt_state

    def init() -> tuple[nnx.State, optax.OptState]:
        params = nnx.state(Decoder(config, rngs=nnx.Rngs(params=seed), **options))
        return params, start(split_trained(params)[0])

    params, opt_state = jax.jit(init, out_shardings=shardings)()
    return graphdef, params, opt_state


def _warn_of_low_precision(trained: nnx.State) -> None:
    """Warns of trained weights in 16 bits; Python shows it once for each call in a program."""
    for dtype in sorted({str(x.dtype) for x in jax.tree.leaves(trained) if x.dtype.itemsize < 4}):
        warnings.warn(
            f"weights that are trained are {dtype}: what a step changes by less than half of a "
            "weight's last digit is rounded away, at a learning rate of 1e-5 nearly everything; "
            "keep them in float32, by param_dtype=jnp.float32 of burst_jax.models.load or of the "
            "config. Computation stays in config.dtype, and LoRA's frozen weights may have 16 bits",
            LowPrecisionWeights,
            stacklevel=3,
        )


def _check_weights(params: nnx.State, shapes: nnx.State) -> None:
    """Raises ValueError unless the weights have the names, shapes and dtypes of ``shapes``."""

    def described(tree: nnx.State) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{x.dtype} {x.shape}" for path, x in leaves}

    given, wanted = described(params), described(shapes)
    for name in sorted(given.keys() | wanted.keys()):
        if given.get(name) != wanted.get(name):
            raise ValueError(
                f"params{name} is {given.get(name, 'missing')}, but config requires "
                f"{wanted.get(name, 'no such array')}: pass the state of a decoder with this "
                "config, nnx.state(model) with model.config"
            )


def abstract_train_state(
    config: DecoderConfig,
    optimizer: Optimizer | optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    *,
    rules: ShardingRules | None = None,
    microbatches: int | None = None,
    **options: Any,
) -> tuple[nnx.GraphDef, nnx.State, optax.OptState]:
    """Shapes and shardings of :func:`init_train_state`, for restore and ahead-of-time compilation.

    Arguments are those of :func:`init_train_state`.

    Returns:
      ``(graphdef, params, opt_state)``, whose leaves are ``jax.ShapeDtypeStruct`` with shardings.

    Raises:
      ValueError: the mesh lacks an axis of the rules, or a size does not divide.
      NotImplementedError: offloaded moments inside ``optax.MultiSteps`` or a similar wrapper.
    """
    mesh = resolve_mesh(mesh)
    options |= {"mesh": mesh, "rules": rules, "microbatches": microbatches}
    graphdef, params = abstract_decoder(config, **options)
    specs = nnx.merge(graphdef, params).shardings(params).weight_specs(params)
    opt_state = _types(transform_of(optimizer).init, split_trained(params)[0])
    _reject_wrapped_offload(opt_state)
    return graphdef, *with_shardings((params, opt_state), params, specs, mesh)


def abstract_params(
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    *,
    rules: ShardingRules | None = None,
    microbatches: int | None = None,
    **options: Any,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Shapes and shardings of the weights alone; needs no optimizer.

    Restores the weights of a checkpoint on any mesh, without the optimizer state::

        graphdef, shapes = abstract_params(config, mesh, rules=rules, layout="zigzag")
        restored = checkpoints.restore({"params": shapes}, partial=True)
        model = nnx.merge(graphdef, restored.state["params"])

    Arguments and errors are those of :func:`init_train_state`.

    Returns:
      ``(graphdef, params)``, whose leaves are ``jax.ShapeDtypeStruct`` with shardings.
    """
    options |= {"rules": rules, "microbatches": microbatches}
    graphdef, params, _ = abstract_train_state(config, optax.identity(), mesh, **options)
    return graphdef, params


def split_trained(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Splits weights into trained and frozen ones.

    With LoRA adapters, only these are trained; otherwise all weights are.
    ``nnx.merge_state(trained, frozen)`` joins them again.

    Args:
      params: a decoder's state, arrays or shapes.

    Returns:
      ``(trained, frozen)``; ``frozen`` may be empty.
    """
    adapters, others = nnx.split_state(params, nnx.LoRAParam, ...)
    return (adapters, others) if jax.tree.leaves(adapters) else (others, adapters)


def with_shardings(tree: Any, params: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Adds shardings to weights and to the arrays that an optimizer keeps per weight.

    An array of the optimizer state belongs to the weight whose path is a suffix of its own path.
    If it has the weight's shape, it is sharded as the weight is. If it lacks some dimensions, like
    Adafactor's factors, it is sharded as the remaining ones are. Other arrays are replicated.

    Args:
      tree: arrays, shapes or types, like an optimizer state; types in host memory stay there.
      params: the weights, arrays or shapes.
      specs: PartitionSpec of each weight.
      mesh: mesh of the shardings.

    Returns:
      ``tree`` with ``jax.ShapeDtypeStruct`` with shardings as leaves.
    """
    leaves = jax.tree_util.tree_leaves_with_path
    weights = [
        (_names(path), weight.shape, spec)
        for (path, weight), spec in zip(leaves(params), jax.tree.leaves(specs), strict=True)
    ]

    def place(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        names = _names(path)
        spec = PartitionSpec()
        for weight, shape, weight_spec in weights:
            if names[-len(weight) :] == weight:
                spec = _remaining_spec(shape, weight_spec, x.shape)
        sharding = NamedSharding(mesh, spec)
        if _is_on_host(x):
            sharding = _in_host_memory(sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, tree)


def _types(init: Any, params: Any) -> Any:
    """Types of the results of ``init``, which unlike shapes include the memory."""
    jaxpr, shapes = jax.make_jaxpr(init, return_shape=True)(params)
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.out_avals)


def _is_on_host(x: Any) -> bool:
    return getattr(x, "memory_space", None) == jax.memory.Space.Host


def _reject_wrapped_offload(opt_state: Any) -> None:
    """Raises NotImplementedError if a wrapping transformation holds offloaded moments.

    Wrappers like ``optax.MultiSteps`` select between old and new arrays of the inner state. In host
    memory XLA does this on the host, element by element.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        # Chains are tuples; all other states have named fields.
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        if _is_on_host(x) and fields[0] not in ("mu", "nu"):
            raise NotImplementedError(
                f"moments is 'host', and opt_state{jax.tree_util.keystr(path)} is wrapped by "
                "another transformation, which would compute in host memory: use moments='device' "
                "with it. optax.chain is supported, and make_train_step(accumulate=) accumulates "
                "gradients"
            )


def _in_host_memory(sharding: NamedSharding) -> NamedSharding:
    here = sharding.with_memory_kind("pinned_host")
    if here.memory_kind is None:
        # Devices of a topology description have no memories, so JAX drops the memory kind. An
        # abstract mesh keeps it.
        mesh = sharding.mesh.abstract_mesh
        return NamedSharding(mesh, sharding.spec, memory_kind="pinned_host")
    return here


def transform_of(
    optimizer: Optimizer | optax.GradientTransformation,
) -> optax.GradientTransformation:
    """The optax transformation of an optimizer.

    Raises:
      ValueError: it is neither an :class:`Optimizer` nor an optax transformation.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer.transform
    if isinstance(optimizer, type) or not (
        hasattr(optimizer, "init") and hasattr(optimizer, "update")
    ):
        raise ValueError(
            f"optimizer is {optimizer!r}: pass the result of make_optimizer, or an "
            "optax.GradientTransformation"
        )
    return optimizer


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,)) for key in path)


def _remaining_spec(
    shape: tuple[int, ...], spec: PartitionSpec, remaining: tuple[int, ...]
) -> PartitionSpec:
    """``spec`` of the dimensions of ``shape`` that an array of shape ``remaining`` still has."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    found, dim = [], 0
    for size in remaining:
        while dim < len(shape) and shape[dim] != size:
            dim += 1
        if dim == len(shape):
            return PartitionSpec()
        found.append(entries[dim])
        dim += 1
    return PartitionSpec(*found)
