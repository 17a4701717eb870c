"""Benchmarks: ``python -m benchmarks kernels | ring | train | ...``; ``plot`` draws the results."""
