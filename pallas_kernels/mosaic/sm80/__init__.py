"""Ampere kernels (compute capability 8.0, 8.7): mma.sync, cp.async and ldmatrix."""
