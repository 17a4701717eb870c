"""Context parallelism for an Equinox model: the patch that docs/frameworks.md shows."""

# --8<-- [start:patch]
import equinox as eqx
import jax

from burst_jax import burst_attention, in_layout

LAYOUT = "zigzag"
MASKS = dict(is_causal=True, layout=LAYOUT)


class RingAttention(eqx.nn.MultiheadAttention):
    # mask: segment ids [T], or None; key is that of dropout.
    def __call__(self, query, key_, value, mask=None, *, process_heads=None, key=None):
        assert self.dropout.inference or not self.dropout.p
        projections = (self.query_proj, query), (self.key_proj, key_), (self.value_proj, value)
        qkv = tuple(self._project(*each) for each in projections)
        qkv = qkv if process_heads is None else process_heads(*qkv)
        n = jax.sharding.get_abstract_mesh().shape["seq"]
        ring = in_layout(lambda x, _, ids: burst_attention(*x, segment_ids=ids, **MASKS), LAYOUT, n)
        out = ring([x[None] for x in qkv], None, mask if mask is None else mask[None])
        return jax.vmap(self.output_proj)(out.reshape(len(query), -1))


# --8<-- [end:patch]
