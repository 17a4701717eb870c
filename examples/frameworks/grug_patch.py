"""Context parallelism for a grug model of marin: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
import jax

from burst_jax import axes_of, burst_attention, in_layout

LAYOUT, N = "zigzag", 4  # N: the size of the mesh axis "context"


def attention(q, k, v, mask, *, implementation=None):  # was levanter.grug.attention.attention
    assert mask.fa4_bounds is None
    window = (mask.sliding_window - 1, None) if mask.sliding_window else None
    options = dict(is_causal=mask.is_causal, local_window_size=window, padding_id=-1, layout=LAYOUT)
    options |= axes_of(jax.typeof(q).sharding.spec)
    ring = in_layout(lambda x, _, ids: burst_attention(*x, segment_ids=ids, **options), LAYOUT, N)
    return ring((q, k, v), None, mask.segment_ids and mask.segment_ids[0])


# --8<-- [end:patch]
