"""Kernels of warp-level instructions (mma.sync, cp.async, ldmatrix): Ampere and newer GPUs."""
