"""Local attention as Pallas kernels that JAX lowers by Mosaic GPU: Hopper GPUs."""
