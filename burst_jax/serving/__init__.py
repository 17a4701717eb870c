"""Long prompts served: prefill by the ring, decoding on a cache that is split over the sequence."""

from burst_jax.serving.generator import Generator as Generator
