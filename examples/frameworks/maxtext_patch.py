"""Context parallelism for MaxText: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
from jax.sharding import PartitionSpec as P
from maxtext.layers.attention_op import AttentionOp

import burst_jax

CAUSAL = {"global": True, "local_sliding": True, "chunk": True, "mla": True, "full": False}
LAYOUTS = {"dual_chunk_swap": "zigzag"}  # of context_parallel_reorder_strategy


def attend(self, query, key, value, segment_ids, positions, model_mode="train", sinks=None):
    kind, order = self.attention_type.value, self.config.context_parallel_reorder_strategy.value
    batch, heads, length, _ = self._logical_to_mesh_axes(self.flash_axis_names_q)
    return burst_jax.burst_attention(
        query, key, value, segment_ids=segment_ids, is_causal=CAUSAL[kind], scale=1.0,
        local_window_size=(self.sliding_window_size - 1, 0) if kind == "local_sliding" else None,
        attention_chunk_size=self.chunk_attn_window_size if kind == "chunk" else None,
        logits_soft_cap=self.attn_logits_soft_cap, sink_logits=sinks, mesh=self.mesh,
        layout=LAYOUTS[order] if self._load_balanced_context_parallel() else "contiguous",
        dropout_rate=self.dropout_rate, **burst_jax.axes_of(P(batch, length, heads)),
    )  # fmt: skip


AttentionOp.cudnn_flash_attention = attend
# --8<-- [end:patch]
