"""Linear attention on one device: the gated delta rule, chunk by chunk."""
