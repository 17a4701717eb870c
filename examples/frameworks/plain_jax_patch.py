"""Context parallelism for a model in plain JAX: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
from jax.sharding import PartitionSpec as P

import burst_jax

LAYOUT, SPEC = "zigzag", P("data", "seq", "tensor")  # of queries [B, T, N, H]


def attend(query, key, value, segment_ids):  # was jax.nn.dot_product_attention(..., mask=...)
    return burst_jax.burst_attention(
        query, key, value, segment_ids=segment_ids, is_causal=True, layout=LAYOUT,
        **burst_jax.axes_of(SPEC),
    )  # fmt: skip


def ring_layers(layers, mesh):  # layers(hidden, positions, segment_ids, ...), all of them
    return burst_jax.in_layout(layers, LAYOUT, mesh.shape["seq"])


# --8<-- [end:patch]
