"""A Gated DeltaNet layer of Qwen3-Next: sizes, drawn weights by the names of transformers, inputs.

``tests/golden_layers/qwen3_next.npz`` has the output that transformers computes, in float32 with
its torch functions. ``make_qwen3_next_layer.py`` made it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

FILE = Path(__file__).parent.parent / "golden_layers" / "qwen3_next.npz"
FEATURES, KEY_HEADS, HEADS, HEAD_DIM, VALUE_DIM, TAPS, LENGTH = 16, 2, 4, 8, 6, 4, 150
RNG = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X = _normal(2, LENGTH, FEATURES)
# Of a key head: its query and key, and its heads' values and output gates; betas and decays.
QKVZ, BA = 2 * HEAD_DIM + 2 * VALUE_DIM * HEADS // KEY_HEADS, 2 * HEADS // KEY_HEADS
CHANNELS = 2 * KEY_HEADS * HEAD_DIM + HEADS * VALUE_DIM
WEIGHTS = {
    "in_proj_qkvz.weight": _normal(KEY_HEADS * QKVZ, FEATURES) / 4,
    "in_proj_ba.weight": _normal(KEY_HEADS * BA, FEATURES) / 4,
    "conv1d.weight": _normal(CHANNELS, 1, TAPS) / 2,
    "dt_bias": _normal(HEADS) - 2,
    "A_log": _normal(HEADS),
    "norm.weight": 1 + 0.3 * _normal(VALUE_DIM),
    "out_proj.weight": _normal(FEATURES, HEADS * VALUE_DIM) / 5,
}


def parameters() -> dict[str, np.ndarray]:
    """The weights by their paths in :class:`burst_jax.GatedDeltaNet`."""
    heads = HEADS // KEY_HEADS
    qkvz = WEIGHTS["in_proj_qkvz.weight"].T.reshape(FEATURES, KEY_HEADS, QKVZ)
    cuts = np.cumsum([HEAD_DIM, HEAD_DIM, VALUE_DIM * heads])
    query, key, *values = np.split(qkvz, cuts, 2)
    value, gate = (x.reshape(FEATURES, HEADS, VALUE_DIM) for x in values)
    ba = WEIGHTS["in_proj_ba.weight"].T.reshape(FEATURES, KEY_HEADS, BA)
    beta, decay = (x.reshape(FEATURES, HEADS) for x in np.split(ba, 2, 2))
    taps = np.split(WEIGHTS["conv1d.weight"][:, 0].T, np.array([1, 2]) * KEY_HEADS * HEAD_DIM, 1)
    shapes = (KEY_HEADS, HEAD_DIM), (KEY_HEADS, HEAD_DIM), (HEADS, VALUE_DIM)
    convs = [x.reshape(TAPS, *shape) for x, shape in zip(taps, shapes, strict=True)]
    return {
        "query.kernel": query, "key.kernel": key, "value.kernel": value,
        "output_gate.kernel": gate, "beta.kernel": beta, "decay.kernel": decay,
        "query_conv": convs[0], "key_conv": convs[1], "value_conv": convs[2],
        "A_log": WEIGHTS["A_log"], "dt_bias": WEIGHTS["dt_bias"],
        "norm.scale": WEIGHTS["norm.weight"],
        "out.kernel": WEIGHTS["out_proj.weight"].T.reshape(HEADS, VALUE_DIM, FEATURES),
    }  # fmt: skip
