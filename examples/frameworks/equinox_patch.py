"""Context parallelism for an Equinox model: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
import equinox as eqx
import jax
import jax.numpy as jnp

import burst_jax

LAYOUT, N = "zigzag", 4  # N: the size of the mesh axis "seq"


class RingAttention(eqx.nn.MultiheadAttention):
    def __call__(self, query, key_, value, mask, *, process_heads):  # mask: segment ids [T]
        projections = (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
        q, k, v = process_heads(*(self._project(*each) for each in projections))
        masks = dict(segment_ids=mask[None], is_causal=True, layout=LAYOUT)
        out = burst_jax.burst_attention(q[None], k[None], v[None], **masks)[0]
        return jax.vmap(self.output_proj)(out.reshape(len(query), -1))


class RingRope(eqx.nn.RotaryPositionalEmbedding):
    def __call__(self, x):  # [T, H], in LAYOUT; the parent counts positions from an arange
        frequencies = self.theta ** -(jnp.arange(0.0, x.shape[1], 2) / x.shape[1])
        angles = jnp.outer(burst_jax.positions(LAYOUT, len(x), N), frequencies)
        cos, sin = (jnp.tile(f(angles), (1, 2)) for f in (jnp.cos, jnp.sin))
        return (x * cos + self.rotate_half(x) * sin).astype(x.dtype)


# --8<-- [end:patch]
