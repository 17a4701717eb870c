"""``DecoderShardings``: how a decoder's arrays are sharded over a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from burst_jax.attention.validation import check_is_array
from burst_jax.models.config import DecoderConfig
from burst_jax.models.weights import in_feed_forward, logical_axes, name_of, weight_specs
from burst_jax.parallel.mesh import (
    AxisNames,
    axes_size,
    check_axes,
    explicit_spec,
    flat_names,
    resolve_mesh,
    restrict_spec,
    sequence_axes,
)
from burst_jax.parallel.rules import ShardingRules, check_divides
from burst_jax.parallel.xla_options import has_peer_copies
from pallas_kernels import find


@dataclasses.dataclass(frozen=True)
class DecoderShardings:
    """How the arrays of a decoder are sharded over a mesh.

    Attributes:
      mesh: the devices.
      config: the decoder's.
      batch_axes: the mesh axes of the batch dimension.
      token_axes: the mesh axes of the sequence dimension.
      tensor_axes: the mesh axes of heads, hidden features and vocabulary.
      expert_axes: the mesh axes of the experts.
      stage_axis: the mesh axis of the layers, or None.
      microbatches: number of microbatches of the pipeline.
      specs: sharding of each weight, in the order of the leaves of the decoder's state.
      check_vma: whether JAX checks which values vary from device to device.
    """

    mesh: Mesh | AbstractMesh
    config: DecoderConfig
    batch_axes: tuple[str, ...]
    token_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    expert_axes: tuple[str, ...]
    stage_axis: str | None
    microbatches: int
    specs: tuple[P, ...]
    check_vma: bool

    @property
    def varying_axes(self) -> tuple[str, ...]:
        """The mesh axes over which a layer's input varies."""
        return flat_names(self.batch_axes, self.token_axes, self.stage_axis)

    @property
    def out_batch_axes(self) -> tuple[str, ...]:
        """The mesh axes of the hidden states' batch dimension, which a pipeline's stages share."""
        return flat_names(self.batch_axes, self.stage_axis)

    def token_spec(self, ndim: int) -> P:
        """Sharding of ``[T]``, ``[B, T]`` or ``[B, T, ...]`` with ``ndim`` dimensions."""
        batch = (self.batch_axes or None,) if ndim > 1 else ()
        return P(*batch, self.token_axes or None, *[None] * (ndim - 2))

    def input_specs(self, arrays: tuple[Any, ...]) -> list[Any]:
        """Shardings of tokens, positions, segment ids, prefix lengths and document tables."""
        *tokens, prefix_lengths, tables = arrays
        specs: list[Any] = [
            None if array is None else self.token_spec(array.ndim) for array in tokens
        ]
        specs.append(None if prefix_lengths is None else P(self.batch_axes or None))
        of_tables = None if tables is None else tables.specs(self.batch_axes, self.token_axes)
        return [*specs, of_tables]

    def weight_specs(self, weights: Any) -> Any:
        """``specs`` as a tree like ``weights``, the decoder's state."""
        return jax.tree.unflatten(jax.tree.structure(weights), self.specs)

    def kept_axes(self, path: tuple[Any, ...]) -> tuple[str, ...]:
        """The mesh axes over which a layer's weight is not gathered, by its path in the decoder."""
        axes = logical_axes(path, self.config)
        return self.tensor_axes + (self.expert_axes if "expert" in axes else ())

    def are_gathered(self, specs: Any) -> bool:
        """Whether weights with these shardings are gathered for use."""
        leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P))
        axes = {name for spec in leaves for name in flat_names(*spec)}
        return bool(axes.difference(self.tensor_axes))

    def is_sent_early(self, specs: Mapping[tuple[Any, ...], P], path: tuple[Any, ...]) -> bool:
        """Whether the gradient of a layer's weight is sent while the layer's attention runs.

        ``specs`` are the shardings of layers' weights by path in the decoder. Only copy engines
        send such gradients: NCCL's kernels would take SMs from attention. Those also all-reduce
        over axes that do not shard the weight.
        """
        sharded = set(self.varying_axes).issubset(flat_names(*specs[path]))
        return sharded and in_feed_forward(path) and has_peer_copies()

    def check_inputs(
        self, tokens: Any, positions: Any, segment_ids: Any, prefix_lengths: Any
    ) -> None:
        """Raises ValueError for wrong shapes, or sizes that the mesh does not divide.

        ``tokens`` are ``[B, T]``, ``positions`` may be ``[T]``, ``segment_ids`` None;
        ``prefix_lengths`` are ``[B]`` or None.
        """
        for name, array in (("tokens", tokens), ("positions", positions)):
            if not isinstance(array, (jax.Array, np.ndarray)):
                raise ValueError(f"{name} is a {type(array).__name__}: it must be an array")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens has dtype {tokens.dtype}: token ids are integers")
        if tokens.ndim != 2:
            raise ValueError(f"tokens has shape {tokens.shape}: it needs [B, T]")
        if positions.shape not in (tokens.shape, tokens.shape[1:]):
            raise ValueError(
                f"positions has shape {positions.shape}, tokens {tokens.shape}: it needs [B, T] or "
                "[T]"
            )
        if segment_ids is not None and segment_ids.shape != tokens.shape:
            raise ValueError(
                f"segment_ids has shape {segment_ids.shape}, tokens {tokens.shape}: they must be "
                "equal"
            )
        if prefix_lengths is not None:
            check_is_array("prefix_lengths", prefix_lengths, "an int32 array")
            if prefix_lengths.shape != tokens.shape[:1]:
                raise ValueError(
                    f"prefix_lengths has shape {prefix_lengths.shape}, tokens {tokens.shape}: it "
                    "needs [B]"
                )
        check_divides("tokens", tokens.shape, self.token_spec(2), self.mesh)
        devices = axes_size(self.mesh, self.batch_axes)
        batch, stages = tokens.shape[0] // devices, axes_size(self.mesh, self.stage_axis)
        for name, count in (("stages", stages), ("microbatches", self.microbatches)):
            if batch % count:
                raise ValueError(
                    f"tokens has shape {tokens.shape}, {batch} sequences per device, which {count} "
                    f"{name} do not divide: use a batch size that is a multiple of "
                    f"{count * devices}"
                )


def decoder_shardings(
    weights: Any,
    config: DecoderConfig,
    options: Mapping[str, Any],
    rules: ShardingRules | None,
    microbatches: int | None,
) -> DecoderShardings:
    """How a decoder's arrays are sharded.

    Without rules ``tensor_axis`` shards the weights, and weights that are sharded over Explicit
    axes keep these, too. ``microbatches`` None is the number of stages.

    Raises:
      ValueError: no mesh, axes that it lacks, sizes that do not divide.
    """
    mesh = resolve_mesh(options.get("mesh"))
    _check_axes(mesh, options, rules)
    _check_remat_layers(mesh, config, rules)
    token_axes = sequence_axes(options)
    if rules is None:
        axes = ShardingRules(
            data=options.get("batch_axis"), fsdp=None, seq=None, tensor=options.get("tensor_axis")
        )
        more_axes: AxisNames = None
    else:
        axes, more_axes = rules, options.get("ulysses_axis")
    specs = jax.tree.leaves(weight_specs(weights, config, mesh, axes, more_axes=more_axes))
    if rules is None:
        over = flat_names(axes.batch_axes, token_axes)
        pairs = zip(jax.tree.leaves(weights), specs, strict=True)
        specs = [_with_explicit(weight, spec, over) for weight, spec in pairs]
    implementation = find(options.get("implementation"))
    return DecoderShardings(
        mesh=mesh,
        config=config,
        batch_axes=axes.batch_axes,
        token_axes=token_axes,
        tensor_axes=flat_names(axes.tensor),
        expert_axes=flat_names(axes.expert),
        stage_axis=axes.stage,
        microbatches=axes_size(mesh, axes.stage) if microbatches is None else microbatches,
        specs=tuple(specs),
        check_vma=implementation is None or implementation.checks_vma,
    )


def reject_sharded(weights: Any, shardings: DecoderShardings) -> None:
    """Raises ValueError for a weight that is sharded over Auto axes which its own spec lacks.

    An array's sharding is known outside of ``jit``; a ``jax.ShapeDtypeStruct`` may have one.
    """
    paths = jax.tree_util.tree_leaves_with_path(weights)
    for (path, weight), spec in zip(paths, shardings.specs, strict=True):
        sharding = getattr(weight, "sharding", None)
        if isinstance(weight, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
            continue
        mesh, actual = sharding.mesh, sharding.spec
        wide = {axis for axis in mesh.auto_axes if mesh.shape[axis] > 1}
        for given, own in zip(actual, spec, strict=False):
            if wide.intersection(flat_names(given)) - set(flat_names(own)):
                raise ValueError(
                    f"{name_of(path)} is sharded as {actual} over Auto mesh axes, and the decoder "
                    "has no rules: each device would gather the weights of all layers first; pass "
                    "rules=ShardingRules(...), or replicate the weights: "
                    "jax.device_put(params, jax.NamedSharding(mesh, jax.P()))"
                )


def check_stacked(name: str, stacked: Any, shardings: DecoderShardings) -> None:
    """Raises ValueError if a weight's leading dimension, that of the layers, is sharded wrongly.

    ``name`` is that of the stack.
    """
    for path, weight in jax.tree_util.tree_leaves_with_path(stacked):
        spec = jax.typeof(weight).sharding.spec
        if set(flat_names(*spec[:1])) - set(flat_names(shardings.stage_axis)):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} of shape {weight.shape} is sharded as {spec} "
                "over Explicit mesh axes: dimension 0 is that of the layers, which run one after "
                "the other; shard another dimension, like PartitionSpec(None, ...), or use Auto "
                "axes"
            )


def _with_explicit(weight: jax.Array, spec: P, over: tuple[str, ...]) -> P:
    """``spec`` with the weight's own Explicit axes in ``over`` where it names no axis.

    Gradients are summed over these axes of the batch and the sequence, so the weights are gathered
    layer by layer. Over other axes the whole stack is gathered before the first layer.
    """
    own = restrict_spec(explicit_spec(weight, P(*[None] * weight.ndim)), over)
    return P(*(by_rule or explicit for by_rule, explicit in zip(spec, own, strict=True)))


def _check_axes(
    mesh: Mesh | AbstractMesh, options: Mapping[str, Any], rules: ShardingRules | None
) -> None:
    """Raises ValueError for an unknown mesh axis, or one in two arguments."""
    names = ("ulysses_axis",)
    used: dict[str, str] = {}
    if rules is None:
        names = ("seq_axis", "batch_axis", "tensor_axis", "ulysses_axis")
    else:
        rules.check_mesh(mesh)
        used = dict.fromkeys(flat_names(*dataclasses.asdict(rules).values()), "rules")
    given = {name: options.get(name, "seq" if name == "seq_axis" else None) for name in names}
    check_axes(mesh, given, used)


def _check_remat_layers(
    mesh: Mesh | AbstractMesh, config: DecoderConfig, rules: ShardingRules | None
) -> None:
    """Raises ValueError if the selective layers do not divide among the stages."""
    stages = 1 if rules is None else axes_size(mesh, rules.stage)
    if (config.remat_layers or 0) % stages:
        raise ValueError(
            f"remat_layers is {config.remat_layers}, and each of the {stages} stages has the same "
            f"number of them: use a multiple of {stages}"
        )


def embed(table: jax.Array, tokens: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
    """``table[tokens]`` inside a ``shard_map``, with the vocabulary sharded over ``vocab_axes``.

    Args:
      table: ``[V / devices, D]``, this device's part.
      tokens: int32 ``[B, T]``, token ids.
      vocab_axes: mesh axes.

    Returns:
      ``[B, T, D]``; NaN for an id that is negative, or V or more.
    """
    local = table.shape[0]
    size = local * lax.axis_size(vocab_axes) if vocab_axes else local
    if not vocab_axes:
        index = jnp.where((tokens >= 0) & (tokens < size), tokens, size)
        return table.at[index].get(mode="fill", fill_value=jnp.nan)
    index = tokens - local * lax.axis_index(vocab_axes)
    present = (index >= 0) & (index < local)
    vectors = jnp.where(present[..., None], table[jnp.clip(index, 0, local - 1)], 0)
    known = (tokens >= 0) & (tokens < size)
    return jnp.where(known[..., None], lax.psum(vectors, vocab_axes), jnp.nan)
