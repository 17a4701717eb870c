"""A layer of Kimi Linear: sizes, drawn weights by the names of transformers, inputs.

``tests/golden_layers/kimi_linear.npz`` has the output that transformers computes, in float32 with
its torch functions. ``make_kimi_linear_layer.py`` made it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

FILE = Path(__file__).parent.parent / "golden_layers" / "kimi_linear.npz"
FEATURES, HEADS, HEAD_DIM, TAPS, LENGTH = 16, 2, 8, 4, 150
CHANNELS = HEADS * HEAD_DIM
RNG = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X = _normal(2, LENGTH, FEATURES)
WEIGHTS = {
    **{f"{name}_proj.weight": _normal(CHANNELS, FEATURES) / 4 for name in "qkv"},
    "conv1d.weight": _normal(3 * CHANNELS, 1, TAPS) / 2,
    "forget_gate.f_a_proj.weight": _normal(HEAD_DIM, FEATURES) / 4,
    "forget_gate.f_b_proj.weight": _normal(CHANNELS, HEAD_DIM) / 3,
    "forget_gate.dt_bias": _normal(CHANNELS) - 2,
    "forget_gate.A_log": _normal(1, 1, HEADS, 1),
    "b_proj.weight": _normal(HEADS, FEATURES) / 4,
    "g_a_proj.weight": _normal(HEAD_DIM, FEATURES) / 4,
    "g_b_proj.weight": _normal(CHANNELS, HEAD_DIM) / 3,
    "o_norm.weight": 1 + 0.3 * _normal(HEAD_DIM),
    "o_proj.weight": _normal(FEATURES, CHANNELS) / 5,
}
_KERNELS = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "beta": "b_proj",
    "decay_a": "forget_gate.f_a_proj", "decay_b": "forget_gate.f_b_proj",
    "output_gate_a": "g_a_proj", "output_gate_b": "g_b_proj", "out": "o_proj",
}  # fmt: skip


def parameters() -> dict[str, np.ndarray]:
    """The weights by their paths in :class:`burst_jax.KimiDeltaAttention`, flattened.

    Heads and their features are one dimension, as in transformers.
    """
    found = {f"{ours}.kernel": WEIGHTS[f"{theirs}.weight"].T for ours, theirs in _KERNELS.items()}
    taps = np.split(WEIGHTS["conv1d.weight"][:, 0].T, 3, 1)
    found |= {f"{name}_conv": x for name, x in zip(("query", "key", "value"), taps, strict=True)}
    names = {"A_log": "forget_gate.A_log", "dt_bias": "forget_gate.dt_bias"}
    return found | {ours: WEIGHTS[theirs] for ours, theirs in names.items()} | {
        "norm.scale": WEIGHTS["o_norm.weight"]
    }  # fmt: skip
