"""Context parallelism for SkyRL-tx: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from skyrl.tx.layers.lora import LoRAMixin
from skyrl.tx.models import qwen3

from burst_jax import axes_of, burst_attention, in_layout

LAYOUT, N = "zigzag", 4  # N: the size of the mesh axis "seq", next to SkyRL's
OPTIONS = dict(is_causal=True, layout=LAYOUT, **axes_of(P("fsdp", "seq", "tp")))
TOKENS = P("fsdp", "seq", P.UNCONSTRAINED)
dense, sorting = qwen3.dot_product_attention, LoRAMixin.apply_lora


def attend(q, k, v, mask, is_causal, head_dim):  # not causal: generation, with a cache
    ring = in_layout(lambda x, _, ids: burst_attention(*x, segment_ids=ids, **OPTIONS), LAYOUT, N)
    return ring((q, k, v), None, mask) if is_causal else dense(q, k, v, mask, False, head_dim)


# SkyRL sorts all devices' tokens by adapter; each sequence has one. Its own: loss, generation.
def apply_lora(self, x, out, adapters):
    if adapters is None or not self.max_lora_adapters or out.ndim < 3 or out.shape[1] < N:
        return sorting(self, x, out, adapters)
    a, b, scale = (each[...][adapters] for each in (self.lora_A, self.lora_B, self.lora_scaling))
    low = jnp.einsum("bti,bir->btr", x, a) if x.ndim == 3 else a[jnp.arange(len(x))[:, None], x]
    return jax.lax.with_sharding_constraint(out + scale[:, None, None] * (low @ b), TOKENS)


qwen3.dot_product_attention, LoRAMixin.apply_lora = attend, apply_lora
# --8<-- [end:patch]
