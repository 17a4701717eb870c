"""Benchmarks: ``python -m benchmarks kernels``, ``ring``, ``train``; ``plot`` draws them."""
