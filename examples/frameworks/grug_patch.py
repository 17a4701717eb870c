"""Context parallelism for a grug model of marin: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
import jax

from burst_jax import axes_of, burst_attention, in_layout

LAYOUT, N = "zigzag", 4  # N: the size of the mesh axis "context"


def attention(q, k, v, mask, *, implementation=None):  # levanter.grug.attention.attention
    assert mask.fa4_bounds is None and implementation is None
    window = (mask.sliding_window - 1, None) if mask.sliding_window else None
    masks = dict(is_causal=mask.is_causal, local_window_size=window, padding_id=-1)
    axes = axes_of(jax.typeof(q).sharding.spec)

    def ring(qkv, _, ids):
        return burst_attention(*qkv, segment_ids=ids, layout=LAYOUT, **masks, **axes)

    return in_layout(ring, LAYOUT, N)((q, k, v), None, mask.segment_ids and mask.segment_ids[0])


# --8<-- [end:patch]
