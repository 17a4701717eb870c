"""Context parallelism for SkyRL-tx: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
from jax.sharding import PartitionSpec as P
from skyrl.tx.models import qwen3

from burst_jax import axes_of, burst_attention, in_layout

LAYOUT, N = "zigzag", 4  # N: the size of the mesh axis "seq", next to SkyRL's
OPTIONS = dict(is_causal=True, layout=LAYOUT, **axes_of(P("fsdp", "seq", "tp")))
dense = qwen3.dot_product_attention


def attend(q, k, v, attention_mask, is_causal, head_dim):
    if not is_causal:  # generation, with a cache
        return dense(q, k, v, attention_mask, is_causal, head_dim)
    ring = in_layout(lambda x, _, ids: burst_attention(*x, segment_ids=ids, **OPTIONS), LAYOUT, N)
    return ring((q, k, v), None, attention_mask)


qwen3.dot_product_attention = attend
# --8<-- [end:patch]
