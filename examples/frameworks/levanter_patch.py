"""Context parallelism for levanter's models: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
import haliax as hax
from jax.sharding import PartitionSpec as P
from levanter.layers import attention as levanter

from burst_jax import axes_of, burst_attention, in_layout

LAYOUT, N = "zigzag", 4  # N: the size of the mesh axis "context"
AXES = axes_of(P("data", "context", "model"))  # of batch, position, heads in the axis mapping


def attend(q_axis, k_axis, head_axis, *qkv, mask, bias, dropout, attn_sink, **options):
    assert bias is None and not dropout and mask.explicit_mask is mask.causal_offset is None
    bins = levanter._bin_and_group_axes_by_function(*qkv, q_axis, k_axis, head_axis)
    qkv = [levanter._reshape_axes_for_bshd_bins(*each).array for each in zip(qkv, bins, strict=True)]
    window = (mask.sliding_window - 1, 0) if mask.sliding_window else mask.bidirectional_window
    masks = dict(is_causal=mask.is_causal, local_window_size=window, padding_id=-1, layout=LAYOUT)
    scores = dict(scale=options["scaling_factor"], logits_soft_cap=options["logits_soft_cap"])
    sinks = None if attn_sink is None else attn_sink.array.ravel()

    def ring(qkv, _, ids):
        return burst_attention(*qkv, segment_ids=ids, sink_logits=sinks, **masks, **scores, **AXES)

    ids = mask.segment_ids and mask.segment_ids[0].array
    out = in_layout(ring, LAYOUT, N)(qkv, None, ids)
    return levanter._unflatten_bshd(hax.named(out, ("B", "S", "H", "D")), bins[0], bins[2])


levanter._try_te_attention = attend  # the backend "nvte", the default on GPUs
# --8<-- [end:patch]
