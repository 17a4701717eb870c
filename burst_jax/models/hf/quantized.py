"""Quantized checkpoints that are not dequantized while loading: how to dequantize them before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from burst_jax.errors import printable, shown

# Keys of config.json that describe quantized weights.
KEYS = ("quantization_config", "compression_config")
_LOAD = "AutoModelForCausalLM.from_pretrained(folder"
_CONFIGS = {
    "fp8": "FineGrainedFP8Config",
    "compressed-tensors": "CompressedTensorsConfig",
    "mxfp4": "Mxfp4Config",
}
# How transformers dequantizes each quant_method. It cannot dequantize others, like gptq and awq.
_REMEDIES = {
    "bitsandbytes": f"{_LOAD}).dequantize()",
    **{
        method: f"{_LOAD}, quantization_config={config}(dequantize=True))"
        for method, config in _CONFIGS.items()
    },
}
# For weights whose quantization is unknown.
DEQUANTIZE = (
    "these weights are quantized, and their scales are needed, too: dequantize the checkpoint with "
    "transformers, or load the one that it was made from"
)


def reject_quantized(
    path: Path, given: Mapping[str, Any], supported: str | None, ignore: Collection[str]
) -> None:
    """Raises NotImplementedError if a ``config.json`` has quantized weights.

    Args:
      path: of the file.
      given: its content.
      supported: the ``quant_method`` that is dequantized while loading, or None.
      ignore: keys that do not change the computation.
    """
    for key in KEYS:
        value = given.get(key)
        if value is None or key in ignore:
            continue
        method = value.get("quant_method") if isinstance(value, dict) else None
        if method is not None and method == supported:
            continue
        remedy = "load the checkpoint that it was quantized from"
        if isinstance(method, str) and method in _REMEDIES:
            remedy = (
                f"dequantize it with transformers, {_REMEDIES[method]}"
                ".save_pretrained(other), and load that folder"
            )
        what = shown(value) if method is None else f"with quant_method {shown(method)}"
        raise NotImplementedError(
            f"{printable(path)} has {key} {what}: no other quantized weights than MXFP4 of gpt_oss "
            f"are supported; {remedy}"
        )
