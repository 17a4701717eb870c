"""Local attention as Pallas kernels that JAX lowers by Mosaic GPU; code that all GPUs share."""
