"""Benchmarks: ``python -m burst_jax.bench kernels``. Needs an NVIDIA GPU."""
