"""Context parallelism for a model in plain JAX: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
from jax.sharding import PartitionSpec as P

import burst_jax

LAYOUT, SPEC = "zigzag", P("data", "seq", "tensor")  # of queries [B, T, N, H]
OPTIONS = dict(is_causal=True, layout=LAYOUT, **burst_jax.axes_of(SPEC))


# Was jax.nn.dot_product_attention(query, key, value, mask=...); positions are those of RoPE.
def attend(query, key, value, positions, segment_ids):
    options = dict(segment_ids=segment_ids, **OPTIONS)
    query = burst_jax.check_positions(query, positions, **options)
    return burst_jax.burst_attention(query, key, value, **options)


def ring_layers(layers, mesh):  # layers(hidden, positions, segment_ids, ...), all of them
    return burst_jax.in_layout(layers, LAYOUT, mesh.shape["seq"])


# --8<-- [end:patch]
