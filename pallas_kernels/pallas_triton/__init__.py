"""Local attention as Pallas kernels that JAX lowers by Triton: Ampere and newer GPUs."""
