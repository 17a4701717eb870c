"""The gated delta rule's kernels for Hopper: wgmma, TMA, warp specialization."""
