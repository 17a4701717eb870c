"""``Parts``: how a decoder's arrays are split over a mesh, and what follows for one device."""

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
from burst_jax.models.weight_axes import name_of, weight_specs
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
from pallas_kernels import find


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the arrays of a decoder are split over a mesh.

    Attributes:
      mesh: the devices.
      batch_axes: the mesh axes that rows are split over.
      token_axes: the mesh axes that a row's tokens are split over.
      tensor_axes: the mesh axes that heads, hidden features and the vocabulary are split over.
      stage_axis: the mesh axis that the layers are split over, or None.
      microbatches: the number of microbatches in which rows go through the stages.
      specs: how each weight is split, in the order of the leaves of the decoder's state.
      check_vma: whether JAX checks which values vary from device to device.
    """

    mesh: Mesh | AbstractMesh
    batch_axes: tuple[str, ...]
    token_axes: tuple[str, ...]
    tensor_axes: tuple[str, ...]
    stage_axis: str | None
    microbatches: int
    specs: tuple[P, ...]
    check_vma: bool

    @property
    def over(self) -> tuple[str, ...]:
        """The mesh axes that a layer's input varies over."""
        return flat_names(self.batch_axes, self.token_axes, self.stage_axis)

    @property
    def out_batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows of hidden states are split over: a stage keeps its part."""
        return flat_names(self.batch_axes, self.stage_axis)

    def tokens(self, ndim: int) -> P:
        """How ``[T]``, ``[B, T]`` or ``[B, T, ...]`` of ``ndim`` dimensions is split."""
        rows = (self.batch_axes or None,) if ndim > 1 else ()
        return P(*rows, self.token_axes or None, *[None] * (ndim - 2))

    def of_arrays(self, arrays: tuple[jax.Array | None, ...]) -> list[P | None]:
        """How tokens, positions, segment ids and prefix lengths, in this order, are split."""
        *of_tokens, prefix_lengths = arrays
        found = [None if array is None else self.tokens(array.ndim) for array in of_tokens]
        return [*found, None if prefix_lengths is None else P(self.batch_axes or None)]

    def tree(self, weights: Any) -> Any:
        """``specs`` as a tree like ``weights``, the decoder's state."""
        return jax.tree.unflatten(jax.tree.structure(weights), self.specs)

    def gathers(self, specs: Any) -> bool:
        """Whether weights that are split so are gathered where they are used."""
        leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P))
        split = {name for spec in leaves for name in flat_names(*spec)}
        return bool(split.difference(self.tensor_axes))

    def check_rows(
        self, tokens: Any, positions: Any, segment_ids: Any, prefix_lengths: Any
    ) -> None:
        """Raises ValueError unless they are ``[B, T]`` and the mesh can split them.

        ``positions`` may be ``[T]``, ``segment_ids`` None; ``prefix_lengths`` are ``[B]`` or None.
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
        check_divides("tokens", tokens.shape, self.tokens(2), self.mesh)
        rows = tokens.shape[0] // axes_size(self.mesh, self.batch_axes)
        stages = axes_size(self.mesh, self.stage_axis)
        for name, count in (("stages", stages), ("microbatches", self.microbatches)):
            if rows % count:
                raise ValueError(
                    f"tokens has shape {tokens.shape}, {rows} rows a device, which {count} {name} "
                    f"do not divide: use a batch of a multiple of "
                    f"{count * axes_size(self.mesh, self.batch_axes)} rows"
                )


def parts_of(
    weights: Any,
    config: DecoderConfig,
    options: Mapping[str, Any],
    rules: ShardingRules | None,
    microbatches: int | None,
) -> Parts:
    """How a decoder's arrays are split.

    Args:
      weights: the decoder's state, arrays or ``jax.ShapeDtypeStruct``.
      config: its sizes.
      options: its attention options.
      rules: which mesh axes split the weights; None splits them over ``tensor_axis`` alone, but for
        weights that are split over Explicit axes, which stay so.
      microbatches: the number of microbatches; None is the number of stages.

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
    return Parts(
        mesh=mesh,
        batch_axes=axes.batch_axes,
        token_axes=token_axes,
        tensor_axes=flat_names(axes.tensor),
        stage_axis=axes.stage,
        microbatches=axes_size(mesh, axes.stage) if microbatches is None else microbatches,
        specs=tuple(specs),
        check_vma=implementation is None or implementation.checks_vma,
    )


def refuse_split(weights: Any, parts: Parts) -> None:
    """Raises ValueError for a weight that lies split over Auto axes that ``parts`` does not name.

    Args:
      weights: a decoder's state. How an array lies is known outside of ``jit``, and of a
        ``jax.ShapeDtypeStruct`` with a sharding.
      parts: how the decoder splits it.
    """
    paths = jax.tree_util.tree_leaves_with_path(weights)
    for (path, weight), spec in zip(paths, parts.specs, strict=True):
        sharding = getattr(weight, "sharding", None)
        if isinstance(weight, jax.core.Tracer) or not isinstance(sharding, NamedSharding):
            continue
        mesh, lies = sharding.mesh, sharding.spec
        wide = {axis for axis in mesh.auto_axes if mesh.shape[axis] > 1}
        for given, own in zip(lies, spec, strict=False):
            if wide.intersection(flat_names(given)) - set(flat_names(own)):
                raise ValueError(
                    f"{name_of(path)} is split as {lies} over Auto mesh axes, and the decoder has "
                    "no rules: each device would gather the weights of all layers first; pass "
                    "rules=ShardingRules(...), or make the weights whole: "
                    "jax.device_put(params, jax.NamedSharding(mesh, jax.P()))"
                )


def _with_explicit(weight: jax.Array, spec: P, over: tuple[str, ...]) -> P:
    """``spec``, and where it names no axis the Explicit axes that are gathered layer by layer.

    These are the axes in ``over``. They split rows or tokens, so gradients are summed over them.
    Over other axes the whole stack is gathered before the first layer.
    """
    as_it_is = restrict_spec(explicit_spec(weight, P(*[None] * weight.ndim)), over)
    return P(*(rule or given for rule, given in zip(spec, as_it_is, strict=True)))


def _check_axes(
    mesh: Mesh | AbstractMesh, options: Mapping[str, Any], rules: ShardingRules | None
) -> None:
    """Raises ValueError for a mesh axis that is not there, or that two arguments name."""
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
    """Raises ValueError if the stages of a pipeline cannot keep the same."""
    stages = 1 if rules is None else axes_size(mesh, rules.stage)
    if (config.remat_layers or 0) % stages:
        raise ValueError(
            f"remat_layers is {config.remat_layers}, and the layers are in {stages} stages, of "
            f"which each has as many of them: use a multiple of {stages}"
        )


def embed(table: jax.Array, tokens: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
    """``table[tokens]`` inside a ``shard_map``, the rows of the table split over ``vocab_axes``.

    Args:
      table: ``[V / devices, D]``, this device's rows.
      tokens: int32 ``[B, T]``, ids of the whole vocabulary.
      vocab_axes: mesh axes.

    Returns:
      ``[B, T, D]``; NaN where an id is negative, or V or more.
    """
    here = table.shape[0]
    size = here * lax.axis_size(vocab_axes) if vocab_axes else here
    if not vocab_axes:
        index = jnp.where((tokens >= 0) & (tokens < size), tokens, size)
        return table.at[index].get(mode="fill", fill_value=jnp.nan)
    index = tokens - here * lax.axis_index(vocab_axes)
    present = (index >= 0) & (index < here)
    rows = jnp.where(present[..., None], table[jnp.clip(index, 0, here - 1)], 0)
    known = (tokens >= 0) & (tokens < size)
    return jnp.where(known[..., None], lax.psum(rows, vocab_axes), jnp.nan)
