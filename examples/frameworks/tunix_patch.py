"""Context parallelism for tunix's Qwen 3: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tunix.models.qwen3 import model as qwen3

import burst_jax

LAYOUT, N = "zigzag", 4  # N: the size of the mesh axis "sp"
MESH = jax.make_mesh((1, N, 2), ("fsdp", "sp", "tp"), axis_types=(AxisType.Auto,) * 3)
OPTIONS = dict(mesh=MESH, is_causal=True, layout=LAYOUT, **burst_jax.axes_of(P("fsdp", "sp", "tp")))
dense = qwen3.Attention.block


def block(self, x, positions, cache, mask, segment_ids=None):
    if cache is not None:  # generation
        return dense(self, x, positions, cache, mask, segment_ids)

    def ring(x, positions, segment_ids):
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k = (qwen3.apply_rope(each, positions, self.head_dim) for each in (q, k))
        return self.o_proj(burst_jax.burst_attention(q, k, v, segment_ids=segment_ids, **OPTIONS))

    ids = mask if segment_ids is None else segment_ids  # mask: segment ids [B, T], in its place
    return None, burst_jax.in_layout(ring, LAYOUT, N)(x, positions, ids)


qwen3.Attention.block = block
# --8<-- [end:patch]
