"""Attention for Flax: functions for its own layers, and a layer with RoPE."""
