"""Flax: attention functions for its own layers, attention layers, RoPE, norms and LoRA."""
