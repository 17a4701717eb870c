"""Hopper kernels (compute capability 9.0): wgmma, TMA, warp specialization, clusters."""
