"""A decoder's weights by path: logical axes, shardings by rules, flat dictionaries."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from burst_jax.layers.lora import LORA_A, LORA_B
from burst_jax.models.config import STACKS, DecoderConfig
from burst_jax.parallel.mesh import AxisNames, axes_size, flat_names
from burst_jax.parallel.rules import LogicalAxes, ShardingRules, check_divides

# Logical axes by the last two names of a weight's path. Weights of a stack have a leading dimension
# "layers". Norms are replicated, and so are biases that are added after a sum
# over devices. Those of the feed-forward are its class's, FeedForward.weight_axes, those of Gated
# DeltaNet its own; latent attention replaces some.
_WEIGHT_AXES: dict[tuple[str, ...], LogicalAxes] = {
    ("query", "kernel"): ("embed", "heads", None),
    ("key", "kernel"): ("embed", "kv_heads", None),
    ("value", "kernel"): ("embed", "kv_heads", None),
    ("out", "kernel"): ("heads", None, "embed"),
    ("output_gate", "kernel"): ("embed", "heads", None),
    ("head", "kernel"): ("embed", "vocab"),
    ("query", "bias"): ("heads", None),
    ("key", "bias"): ("kv_heads", None),
    ("value", "bias"): ("kv_heads", None),
    ("output_gate", "bias"): ("heads", None),
    ("out", "bias"): (None,),
    ("attention", "sinks"): ("heads",),
    ("attention_norm", "scale"): (None,),
    ("post_attention_norm", "scale"): (None,),
    ("mlp_norm", "scale"): (None,),
    ("post_mlp_norm", "scale"): (None,),
    ("query_norm", "scale"): (None,),
    ("key_norm", "scale"): (None,),
    ("query_norm", "scales"): ("heads", None),
    ("key_norm", "scales"): ("kv_heads", None),
    ("final_norm", "scale"): (None,),
}


def logical_axes(path: tuple[Any, ...], config: DecoderConfig) -> LogicalAxes:
    """The logical axes of the weight at a path of ``nnx.state(decoder)``.

    Raises:
      ValueError: the decoder has no such weight.
    """
    names = _names(path)
    if names == ("embedding",):
        return "vocab", "embed"
    table, key, stack = _WEIGHT_AXES, names[-2:], STACKS.get(names[0])
    feed_forward = None
    if stack is not None and names[1] == "mlp":
        feed_forward = config.feed_forward_of(stack)
        table, key = feed_forward.weight_axes, names[2:]
    elif stack is not None and names[1] == "attention":
        if stack.mixer == "attention" and config.latent is not None:
            table = _WEIGHT_AXES | config.latent.weight_axes
        elif stack.mixer == "delta_net" and config.delta_net is not None:
            table, key = config.delta_net.weight_axes, names[2:]
    adapter = names[-1] in (LORA_A, LORA_B)
    axes = table.get((*key[:-1], "kernel") if adapter else key)
    if axes is None:
        where = "a decoder has no such weight"
        if feed_forward is not None:
            name = feed_forward.__name__
            where = f"add {key} to {name}.weight_axes, with the logical name of each dimension"
        raise ValueError(f"weight {jax.tree_util.keystr(path)} has no logical axes: {where}")
    if adapter:
        # Heads and head features are one dimension, sharded as the heads; the rank is not sharded.
        outputs = axes[-1] if key[0] == "out" else axes[1]
        axes = (axes[0], None) if names[-1] == LORA_A else (None, outputs)
    return axes if stack is None else ("layers", *axes)


def weight_specs(
    weights: Any,
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    rules: ShardingRules,
    *,
    more_axes: AxisNames = None,
) -> Any:
    """A ``PartitionSpec`` for each weight of a decoder's state, by the rules.

    ``more_axes`` are mesh axes that shard weights in addition to fsdp and seq.

    Raises:
      ValueError: the mesh lacks an axis of the rules, or a size does not divide.
    """
    rules.check_mesh(mesh)
    replicated = _replicates_kv_heads(config, mesh, rules)

    def spec(path: tuple[Any, ...], weight: jax.Array) -> PartitionSpec:
        axes = logical_axes(path, config)
        if replicated:
            axes = tuple(None if name == "kv_heads" else name for name in axes)
        found = rules.spec(axes, extra_weight_axes=more_axes)
        check_divides(name_of(path), weight.shape, found, mesh)
        return found

    return jax.tree_util.tree_map_with_path(spec, weights)


def in_feed_forward(path: tuple[Any, ...]) -> bool:
    """Whether a layer's weight belongs to its feed-forward block, by its path in the decoder."""
    return _names(path)[1] == "mlp"


def name_of(path: tuple[Any, ...]) -> str:
    """A weight's name in messages, like ``layers.mlp.up.kernel``."""
    return ".".join(_names(path))


def flat_weights(state: Any) -> dict[tuple[str, ...], Any]:
    """The arrays of a decoder's state, or their ``jax.ShapeDtypeStruct``, by path."""
    leaves = nnx.to_flat_state(state)
    return {tuple(map(str, path)): leaf.get_value() for path, leaf in leaves}


def with_weights(state: Any, values: dict[tuple[str, ...], jax.Array]) -> Any:
    """A copy of ``state`` with ``values``, by path."""
    leaves = nnx.to_flat_state(state)
    return nnx.from_flat_state(
        [(path, leaf.replace(values[tuple(map(str, path))])) for path, leaf in leaves]
    )


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(key.key) for key in path if hasattr(key, "key"))


def _replicates_kv_heads(
    config: DecoderConfig, mesh: Mesh | AbstractMesh, rules: ShardingRules
) -> bool:
    """Whether the tensor axis has more devices than there are key/value heads.

    Each device then has the weights of all key/value heads, and uses one.
    """
    if "attention" not in config.mixers:
        return False
    count, heads = axes_size(mesh, rules.tensor), config.num_kv_heads
    if heads % count and count % heads:
        raise ValueError(
            f"num_kv_heads is {heads}, and the tensor axis {flat_names(rules.tensor)} has {count} "
            "devices: one of the two must divide the other"
        )
    return heads < count
