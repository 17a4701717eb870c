"""The gated delta rule's kernels for Ampere: mma.sync, cp.async, ldmatrix."""
