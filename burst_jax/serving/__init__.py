"""Serving of long prompts: prefill by the ring, decoding on a sequence-sharded KV cache."""

from burst_jax.serving.generator import Generator as Generator
