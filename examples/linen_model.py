"""A small language model in Flax linen with data and context parallelism: a mesh (data, seq).

python examples/linen_model.py

It trains on the source code of this folder, byte by byte, in the zigzag layout, which balances the
work of a causal mask.
"""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import burst_jax
from burst_jax.command_line import Parser, integer

LAYOUT = "zigzag"
VOCABULARY = 256  # Tokens are bytes.


class Block(nn.Module):
    """Attention over the mesh, then a feed-forward layer, with residual connections."""

    mesh: Mesh

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """``[B, T, D]`` to ``[B, T, D]``."""
        attention = burst_jax.LinenBurstAttention(
            num_heads=4,
            num_kv_heads=2,
            mesh=self.mesh,
            batch_axis="data",
            seq_axis="seq",
            layout=LAYOUT,
            is_causal=True,
        )
        x = x + attention(nn.RMSNorm()(x), positions)
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.RMSNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


class Decoder(nn.Module):
    """Two blocks between an embedding and the logits of the next byte."""

    mesh: Mesh
    split: NamedSharding
    features: int = 64

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Tokens ``[B, T]`` to logits ``[B, T, VOCABULARY]``."""
        x = nn.Embed(VOCABULARY, self.features)(tokens)
        # Without this constraint XLA may gather all tokens on every device.
        x = jax.lax.with_sharding_constraint(x, self.split)
        for _ in range(2):
            x = Block(self.mesh)(x, positions)
        return nn.Dense(VOCABULARY)(nn.RMSNorm()(x))


def batches(batch: int, length: int, shards: int):
    """Endless ``(tokens, targets)``, each ``[batch, length]``, permuted to the layout."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(text) - length, batch)
        drawn = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)
        # Permuted once, here; all layers use the permuted order.
        yield burst_jax.to_layout((drawn[:, :-1], drawn[:, 1:]), LAYOUT, shards)


def main(argv: list[str] | None = None) -> None:
    """Trains for a few steps and prints the loss of each."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=integer(1), default=20)
    steps = parser.parse_args(argv).steps
    jax.config.update("jax_num_cpu_devices", 8)  # No effect with GPUs.
    burst_jax.set_compiler_options()
    n = len(jax.devices())
    data = 2 if n % 2 == 0 else 1
    shards = n // data
    mesh = jax.make_mesh((data, shards), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("data", "seq"))

    batch_size, length = 2 * data, 32 * shards
    model, optimizer = Decoder(mesh, split), optax.adamw(3e-3)
    positions = jnp.asarray(burst_jax.positions(LAYOUT, length, shards))
    whole = NamedSharding(mesh, PartitionSpec())
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)

    def start(key: jax.Array):
        params = model.init(key, jnp.zeros(tokens.shape, tokens.dtype), positions)
        return params, optimizer.init(params)

    params, state = jax.jit(start, out_shardings=whole)(jax.random.key(0))

    @jax.jit
    def step(params, state, tokens, targets):
        def loss_of(params):
            logits: Any = model.apply(params, tokens, positions)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    print(f"{n} x {jax.devices()[0].device_kind}, mesh data={data},seq={shards}, {length} tokens")
    began = time.perf_counter()
    losses = []
    for number, batch in zip(
        range(1, steps + 1), batches(batch_size, length, shards), strict=False
    ):
        params, state, loss = step(params, state, *jax.device_put(batch, split))
        losses.append(float(loss))
        print(f"step {number}/{steps}  loss {losses[-1]:.4f}", flush=True)
    print(f"{time.perf_counter() - began:.1f} s")
    if steps > 1 and not losses[-1] < losses[0]:
        raise SystemExit("error: the loss did not fall")


if __name__ == "__main__":
    main()
