"""Makes ``tests/golden_layers/kimi_linear.npz`` with transformers.

No test imports this: it needs torch and transformers, in an environment of their own::

    /tmp/peer/bin/python tests/support/make_kimi_linear_layer.py
"""

from __future__ import annotations

import kimi_linear_layer as layer
import numpy as np
import torch  # pyrefly: ignore (in an environment of its own)
from transformers import KimiLinearConfig  # pyrefly: ignore
from transformers.models.kimi_linear import modeling_kimi_linear  # pyrefly: ignore

config = KimiLinearConfig(
    hidden_size=layer.FEATURES, num_hidden_layers=1, layer_types=["linear_attention"],
    linear_num_heads=layer.HEADS, linear_head_dim=layer.HEAD_DIM, linear_conv_kernel_dim=layer.TAPS,
)  # fmt: skip
module = modeling_kimi_linear.KimiLinearDeltaAttention(config, 0)
module.load_state_dict({name: torch.tensor(x) for name, x in layer.WEIGHTS.items()})
with torch.no_grad():
    out = module(torch.tensor(layer.X)).numpy()
np.savez_compressed(layer.FILE, out=out)
print(f"std {out.std():.2f}, norm_epsilon {config.rms_norm_eps}")
