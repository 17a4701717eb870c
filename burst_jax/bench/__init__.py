"""Benchmarks: ``python -m burst_jax.bench kernels``, ``ring``, ``train``; ``plot`` draws them."""
