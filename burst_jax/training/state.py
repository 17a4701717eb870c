"""A run's state: weights and optimizer, how they are split, and how they are made split."""

from __future__ import annotations

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
    """Weights and optimizer state, made on the mesh: each device makes its own parts only.

    The same seed gives the same weights on every mesh. To train weights that are there already,
    pass them::

        model = burst_jax.models.load(folder, mesh=mesh, rules=rules, param_dtype=jnp.float32)
        graphdef, params, opt_state = init_train_state(
            model.config, optimizer, mesh, seed, rules=rules, params=nnx.state(model)
        )

    If the decoder has low-rank adapters (``config.lora``), the optimizer has a state for these
    alone.

    Args:
      config: sizes and dtypes of the decoder.
      optimizer: what :func:`make_optimizer` returns, or any optax transformation.
      mesh: the mesh of the weights and of the decoder's attention.
      seed: seed of the random weights.
      rules: how weights and optimizer state are split; None keeps them whole on every device, but
        for the heads, hidden features and vocabulary that ``tensor_axis`` splits.
      microbatches: of a pipeline, see :class:`burst_jax.models.Decoder`.
      params: the state of a decoder with this config, on any devices; ``seed`` then says nothing.
        They are put where the rules say. What lies there already is not copied, and the first step
        takes its memory: then the decoder that it came from has no weights any more. None draws
        random weights.
      **options: attention options of the decoder beside ``mesh``, see
        :class:`burst_jax.models.Decoder`.

    Returns:
      ``(graphdef, params, opt_state)``; ``nnx.merge(graphdef, params)`` is the decoder.

    Raises:
      ValueError: the mesh lacks an axis of the rules, a size does not divide, the seed is not in
        0 ... 2**32 - 1, or ``params`` are another decoder's.
    """
    check_has_devices(mesh)
    check_seed(seed)
    options |= {"mesh": mesh, "rules": rules, "microbatches": microbatches}
    graphdef, shapes, opt_shapes = abstract_train_state(config, optimizer, **options)
    shardings = jax.tree.map(lambda x: x.sharding, (shapes, opt_shapes))
    start = transform_of(optimizer).init
    if params is not None:
        _check_weights(params, shapes)
        params = jax.device_put(params, shardings[0])
        opt_state = jax.jit(start, out_shardings=shardings[1])(split_trained(params)[0])
        return graphdef, params, opt_state

    def init() -> tuple[nnx.State, optax.OptState]:
        params = nnx.state(Decoder(config, rngs=nnx.Rngs(params=seed), **options))
        return params, start(split_trained(params)[0])

    params, opt_state = jax.jit(init, out_shardings=shardings)()
    return graphdef, params, opt_state


def _check_weights(params: nnx.State, shapes: nnx.State) -> None:
    """Raises ValueError unless weights have the names, shapes and dtypes of a decoder's."""

    def described(tree: nnx.State) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f"{x.dtype} {x.shape}" for path, x in leaves}

    given, wanted = described(params), described(shapes)
    for name in sorted(given.keys() | wanted.keys()):
        if given.get(name) != wanted.get(name):
            raise ValueError(
                f"params{name} is {given.get(name, 'missing')}, and config says "
                f"{wanted.get(name, 'nothing of it')}: pass the state of a decoder with this "
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
    """What :func:`init_train_state` makes, without arrays: for restoring, and for compiling ahead.

    The arguments are those of :func:`init_train_state`.

    Returns:
      ``(graphdef, params, opt_state)``, whose leaves are ``jax.ShapeDtypeStruct`` with shardings.

    Raises:
      ValueError: the mesh lacks an axis of the rules, or a size does not divide.
      NotImplementedError: moments on the host under ``optax.MultiSteps``, or the like.
    """
    mesh = resolve_mesh(mesh)
    options |= {"mesh": mesh, "rules": rules, "microbatches": microbatches}
    graphdef, params, specs = _shapes_and_specs(config, options)
    opt_state = _types(transform_of(optimizer).init, split_trained(params)[0])
    _refuse_wrapped_moments(opt_state)
    return graphdef, *placed((params, opt_state), params, specs, mesh)


def abstract_params(
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    *,
    rules: ShardingRules | None = None,
    microbatches: int | None = None,
    **options: Any,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The weights alone of :func:`abstract_train_state`, for which no optimizer is needed.

    What restores the weights of a checkpoint, on any mesh and without the optimizer's state::

        graphdef, shapes = abstract_params(config, mesh, rules=rules, layout="zigzag")
        restored = checkpoints.restore({"params": shapes}, partial=True)
        model = nnx.merge(graphdef, restored.state["params"])

    Args:
      config: sizes and dtypes of the decoder.
      mesh: the mesh of the weights and of the decoder's attention.
      rules: how the weights are split, see :func:`init_train_state`.
      microbatches: of a pipeline, see :class:`burst_jax.models.Decoder`.
      **options: attention options of the decoder beside ``mesh``.

    Returns:
      ``(graphdef, params)``, whose leaves are ``jax.ShapeDtypeStruct`` with shardings.

    Raises:
      ValueError: the mesh lacks an axis of the rules, or a size does not divide.
    """
    mesh = resolve_mesh(mesh)
    options |= {"mesh": mesh, "rules": rules, "microbatches": microbatches}
    graphdef, params, specs = _shapes_and_specs(config, options)
    return graphdef, placed(params, params, specs, mesh)


def _shapes_and_specs(
    config: DecoderConfig, options: dict[str, Any]
) -> tuple[nnx.GraphDef, nnx.State, Any]:
    """The graph definition of a decoder, its weights' shapes, and how each weight is split."""
    graphdef, params = abstract_decoder(config, **options)
    return graphdef, params, nnx.merge(graphdef, params).shardings(params).weight_specs(params)


def split_trained(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """The weights that are trained, and those that are frozen.

    Those of low-rank adapters are trained alone, all weights if there are none.
    ``nnx.merge_state(trained, frozen)`` is all of them again.

    Args:
      params: a decoder's state, arrays or shapes.

    Returns:
      ``(trained, frozen)``; ``frozen`` may be empty.
    """
    adapters, others = nnx.split_state(params, nnx.LoRAParam, ...)
    return (adapters, others) if jax.tree.leaves(adapters) else (others, adapters)


def placed(tree: Any, params: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shapes with shardings for weights, and for whatever an optimizer keeps for each of them.

    An array of an optimizer's state belongs to the weight whose path its own path ends with. If it
    has the weight's shape, it is split as the weight is. If it lacks some of the weight's
    dimensions, as the factors of Adafactor do, it is split as the remaining ones are. All other
    arrays are whole on every device.

    Args:
      tree: arrays, shapes or types, like an optimizer's state. What a type has in the host's memory
        is placed there.
      params: the weights, arrays or shapes.
      specs: how each weight is split.
      mesh: the devices.

    Returns:
      ``jax.ShapeDtypeStruct`` with a sharding in place of each array of ``tree``.
    """
    leaves = jax.tree_util.tree_leaves_with_path
    weights = [
        (_names(path), weight.shape, spec)
        for (path, weight), spec in zip(leaves(params), jax.tree.leaves(specs), strict=True)
    ]

    def place(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        names = _names(path)
        spec = PartitionSpec()
        for weight, shape, of_weight in weights:
            if names[-len(weight) :] == weight:
                spec = _of_dimensions_left(shape, of_weight, x.shape)
        sharding = NamedSharding(mesh, spec)
        if _is_on_host(x):
            sharding = _in_host_memory(sharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, tree)


def _types(init: Any, params: Any) -> Any:
    """What ``init`` makes of the weights, as types: they say an array's memory, too."""
    jaxpr, shapes = jax.make_jaxpr(init, return_shape=True)(params)
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.out_avals)


def _is_on_host(x: Any) -> bool:
    return getattr(x, "memory_space", None) == jax.memory.Space.Host


def _refuse_wrapped_moments(opt_state: Any) -> None:
    """Raises NotImplementedError if another transformation keeps moments that are on the host.

    Those that keep the state of others, like ``optax.MultiSteps``, choose between its old and its
    new arrays. XLA has the host do this, one element after the other.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
        # Chains are tuples; everything else has names.
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        if _is_on_host(x) and fields[0] not in ("mu", "nu"):
            raise NotImplementedError(
                f"moments is 'host', and opt_state{jax.tree_util.keystr(path)} is kept by another "
                "transformation, which would compute in the host's memory: use moments='device' "
                "with it. optax.chain may stay, and make_train_step(accumulate=) adds up gradients"
            )


def _in_host_memory(sharding: NamedSharding) -> NamedSharding:
    here = sharding.with_memory_kind("pinned_host")
    if here.memory_kind is None:
        # The devices of a topology, for which programs are compiled ahead, have no memories to
        # name, and JAX drops the name. A mesh without devices keeps it.
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
            f"optimizer is {optimizer!r}: pass what make_optimizer returns, or an "
            "optax.GradientTransformation"
        )
    return optimizer


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,)) for key in path)


def _of_dimensions_left(
    shape: tuple[int, ...], spec: PartitionSpec, left: tuple[int, ...]
) -> PartitionSpec:
    """``spec`` of those dimensions of ``shape`` that an array of shape ``left`` has kept."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    kept, dim = [], 0
    for size in left:
        while dim < len(shape) and shape[dim] != size:
            dim += 1
        if dim == len(shape):
            return PartitionSpec()
        kept.append(entries[dim])
        dim += 1
    return PartitionSpec(*kept)
