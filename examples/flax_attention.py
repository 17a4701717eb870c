"""Context-parallel attention in Flax's own layer: same weights, same result, sharded sequence.

python examples/flax_attention.py
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from burst_jax import nnx_attention_fn, set_compiler_options


def main() -> None:
    """Runs both attention functions on the same weights and prints their difference."""
    jax.config.update("jax_num_cpu_devices", 8)  # No effect with GPUs.
    set_compiler_options()
    n = len(jax.devices())
    mesh = jax.make_mesh((n,), ("seq",), axis_types=(AxisType.Auto,))

    def layer(**options) -> nnx.MultiHeadAttention:
        return nnx.MultiHeadAttention(8, 256, decode=False, rngs=nnx.Rngs(0), **options)

    flax_layer = layer()
    ring_layer = layer(attention_fn=nnx_attention_fn(mesh=mesh, seq_axis="seq"))
    x = jax.random.normal(jax.random.key(1), (2, 128 * n, 256), jnp.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "seq", None)))

    expected = flax_layer(x, is_causal=True)
    got = nnx.jit(lambda layer, x: layer(x, is_causal=True))(ring_layer, sharded)
    print(
        f"{n} x {jax.devices()[0].device_kind}, {x.shape[1]} tokens, {x.shape[1] // n} per device"
    )
    print(f"output sharded as {got.sharding.spec}")
    difference = jnp.linalg.norm(jax.device_get(got) - expected) / jnp.linalg.norm(expected)
    print(f"relative difference to Flax's own attention: {difference:.1e}")
    if not difference < 1e-3:
        raise SystemExit("error: the results differ")


if __name__ == "__main__":
    main()
