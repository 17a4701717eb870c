"""The logical names of a decoder's weights, and how sharding rules split them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from burst_jax.layers.low_rank import LORA_A, LORA_B
from burst_jax.models.config import DecoderConfig
from burst_jax.models.lora_config import PROJECTIONS
from burst_jax.parallel.mesh import AxisNames, axes_size, flat_names
from burst_jax.parallel.rules import LogicalAxes, ShardingRules, check_divides

# The dimensions of each weight, by the last two names of its path. The layers' weights are stacked,
# so they have the dimension "layers" before these. Norms are whole on every device, and so are
# biases of features that are summed over devices.
WEIGHT_AXES: dict[tuple[str, str], LogicalAxes] = {
    ("query", "kernel"): ("embed", "heads", None),
    ("key", "kernel"): ("embed", "kv_heads", None),
    ("value", "kernel"): ("embed", "kv_heads", None),
    ("out", "kernel"): ("heads", None, "embed"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
    ("head", "kernel"): ("embed", "vocab"),
    ("query", "bias"): ("heads", None),
    ("key", "bias"): ("kv_heads", None),
    ("value", "bias"): ("kv_heads", None),
    ("out", "bias"): (None,),
    ("attention", "sinks"): ("heads",),
    ("gate", "bias"): ("mlp",),
    ("up", "bias"): ("mlp",),
    ("down", "bias"): (None,),
    ("attention_norm", "scale"): (None,),
    ("post_attention_norm", "scale"): (None,),
    ("mlp_norm", "scale"): (None,),
    ("post_mlp_norm", "scale"): (None,),
    ("query_norm", "scale"): (None,),
    ("key_norm", "scale"): (None,),
    ("final_norm", "scale"): (None,),
}
EMBEDDING: LogicalAxes = ("vocab", "embed")


def _axes_of_adapters() -> dict[tuple[str, str], LogicalAxes]:
    """Those of A ``[inputs, r]`` and B ``[r, outputs]`` of each projection.

    Heads and their features are one dimension there, which is split as the heads are. The rank is
    never split.
    """
    found: dict[tuple[str, str], LogicalAxes] = {}
    for name in PROJECTIONS:
        axes = WEIGHT_AXES[name, "kernel"]
        found[name, LORA_A] = (axes[0], None)
        found[name, LORA_B] = (None, axes[-1] if name == "out" else axes[1])
    return found


WEIGHT_AXES |= _axes_of_adapters()


def logical_axes(path: tuple[Any, ...]) -> LogicalAxes:
    """The logical names of the dimensions of a decoder's weight.

    Args:
      path: the weight's path in ``nnx.state(decoder)``, as JAX's tree functions give it.

    Raises:
      ValueError: the decoder has no such weight.
    """
    names = _names(path)
    if names == ("embedding",):
        return EMBEDDING
    axes = WEIGHT_AXES.get(names[-2:])  # pyrefly: ignore
    if axes is None:
        raise ValueError(f"a decoder has no weight {jax.tree_util.keystr(path)}")
    return ("layers", *axes) if names[0] == "layers" else axes


def weight_specs(
    weights: Any,
    config: DecoderConfig,
    mesh: Mesh | AbstractMesh,
    rules: ShardingRules,
    *,
    more_axes: AxisNames = None,
) -> Any:
    """How the rules split each weight of a decoder.

    Args:
      weights: the decoder's state, arrays or ``jax.ShapeDtypeStruct``.
      config: the decoder's sizes.
      mesh: the devices.
      rules: which mesh axes split what.
      more_axes: mesh axes that split weights beside fsdp and seq.

    Returns:
      A ``PartitionSpec`` for each weight.

    Raises:
      ValueError: the mesh lacks an axis of the rules, or a size does not divide.
    """
    rules.check_mesh(mesh)
    copied = _copies_key_heads(config, mesh, rules)

    def spec(path: tuple[Any, ...], weight: jax.Array) -> PartitionSpec:
        axes = logical_axes(path)
        if copied:
            axes = tuple(None if name == "kv_heads" else name for name in axes)
        found = rules.spec(axes, extra_weight_axes=more_axes)
        check_divides(name_of(path), weight.shape, found, mesh)
        return found

    return jax.tree_util.tree_map_with_path(spec, weights)


def name_of(path: tuple[Any, ...]) -> str:
    """What messages call the weight at a path, like ``layers.mlp.up.kernel``."""
    return ".".join(_names(path))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(key.key) for key in path if hasattr(key, "key"))


def _copies_key_heads(
    config: DecoderConfig, mesh: Mesh | AbstractMesh, rules: ShardingRules
) -> bool:
    """Whether the tensor axis has more devices than there are key heads.

    Several devices then share a key head. Each keeps the weights of all key heads and uses those of
    one.
    """
    count, heads = axes_size(mesh, rules.tensor), config.num_kv_heads
    if heads % count and count % heads:
        raise ValueError(
            f"num_kv_heads is {heads}, and {count} devices lie along the tensor axis "
            f"{flat_names(rules.tensor)}: one of the two numbers must divide the other"
        )
    return heads < count
