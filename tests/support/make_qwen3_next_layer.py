"""Makes ``tests/golden_layers/qwen3_next.npz`` with transformers.

No test imports this: it needs torch and transformers, in an environment of their own::

    /tmp/peer/bin/python tests/support/make_qwen3_next_layer.py
"""

from __future__ import annotations

import numpy as np
import qwen3_next_layer as layer
import torch  # pyrefly: ignore (in an environment of its own)
from transformers import Qwen3NextConfig  # pyrefly: ignore
from transformers.models.qwen3_next import modeling_qwen3_next  # pyrefly: ignore

config = Qwen3NextConfig(
    hidden_size=layer.FEATURES, num_hidden_layers=1, layer_types=["linear_attention"],
    linear_num_key_heads=layer.KEY_HEADS, linear_num_value_heads=layer.HEADS,
    linear_key_head_dim=layer.HEAD_DIM, linear_value_head_dim=layer.VALUE_DIM,
    linear_conv_kernel_dim=layer.TAPS, rms_norm_eps=1e-6,
)  # fmt: skip
module = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
module.load_state_dict({name: torch.tensor(x) for name, x in layer.WEIGHTS.items()})
with torch.no_grad():
    out = module(torch.tensor(layer.X)).numpy()
    wide = module.double()(torch.tensor(layer.X).double()).numpy()
np.savez_compressed(layer.FILE, out=out)
print(f"std {out.std():.2f}, float32's error {np.abs(out - wide).max() / np.abs(wide).max():.1e}")
