"""Context parallelism for levanter's models: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
import haliax as hax
from jax.sharding import PartitionSpec as P
from levanter.layers import attention as levanter
from levanter.utils.mesh import DEFAULT_DP_AXES

from burst_jax import axes_of, burst_attention, in_layout

LAYOUT, N = "zigzag", 4  # N: the size of the mesh axis "context"
# Of batch, position, heads in the compute mapping.
AXES = axes_of(P(DEFAULT_DP_AXES, "context", "model"))
OPTIONS = dict(layout=LAYOUT, padding_id=-1, **AXES)


def attend(q_axis, k_axis, dim_axis, *qkv, mask, bias, dropout, attn_sink, **scores):
    assert bias is None and not dropout and mask.explicit_mask is mask.causal_offset is None
    bins = levanter._bin_and_group_axes_by_function(*qkv, q_axis, k_axis, dim_axis)
    qkv = [levanter._reshape_axes_for_bshd_bins(*x).array for x in zip(qkv, bins, strict=True)]
    window = (mask.sliding_window - 1, 0) if mask.sliding_window else mask.bidirectional_window
    sinks = None if attn_sink is None else attn_sink.array.ravel()
    options = dict(is_causal=mask.is_causal, local_window_size=window, sink_logits=sinks, **OPTIONS)
    options |= dict(scale=scores["scaling_factor"], logits_soft_cap=scores["logits_soft_cap"])
    ring = in_layout(lambda x, _, ids: burst_attention(*x, segment_ids=ids, **options), LAYOUT, N)
    out = ring(qkv, None, mask.segment_ids and mask.segment_ids[0].array)
    return levanter._unflatten_bshd(hax.named(out, ("B", "S", "H", "D")), bins[0], bins[2])


levanter._try_te_attention = attend  # the backend "nvte", the default on GPUs
# --8<-- [end:patch]
