"""MXFP4 tensors of experts: blocks of 32 four-bit floats with a common exponent.

A matrix ``[E, inputs, outputs]`` is stored as bytes, transposed::

    name_blocks   uint8 [E, outputs, inputs / 32, 16]    two e2m1 floats per byte, the low one first
    name_scales   uint8 [E, outputs, inputs / 32]        exponents with a bias of 127

The format is that of the OCP Microscaling Formats specification 1.0. Its products are exact in
bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from burst_jax.errors import printable

MXFP4 = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK, _BIAS = 32, 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)


class Mxfp4Slice:
    """A dequantized tensor ``[E, inputs, outputs]``, with the methods of a slice of safetensors.

    Args:
      name: of the tensor.
      blocks: slice of its blocks.
      scales: slice of its scales.

    Raises:
      ValueError: blocks and scales of shapes or dtypes that do not fit together.
    """

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        shape, of_scales = tuple(blocks.get_shape()), tuple(scales.get_shape())
        fits = len(shape) == 4 and shape == (*of_scales, _BLOCK // 2)
        if not fits or {blocks.get_dtype(), scales.get_dtype()} != {"U8"}:
            raise ValueError(
                f"{printable(name)}{BLOCKS} is {blocks.get_dtype()} {shape}, its scales "
                f"{scales.get_dtype()} {of_scales}: MXFP4 needs U8 [E, outputs, inputs / 32, 16] "
                "and [E, outputs, inputs / 32]; download the checkpoint again"
            )
        self._blocks, self._scales = blocks, scales
        experts, outputs, groups, _ = shape
        self._shape = experts, groups * _BLOCK, outputs

    def get_shape(self) -> tuple[int, int, int]:
        """The shape of the tensor."""
        return self._shape

    def get_dtype(self) -> str:
        """The dtype, as in safetensors, that has all its values."""
        return "BF16"

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        """A slice, float32."""
        experts, inputs, outputs = index
        first, stop = inputs.start // _BLOCK, -(-inputs.stop // _BLOCK)
        part = experts, outputs, slice(first, stop)
        blocks, scales = self._blocks[part], self._scales[part]
        values = np.empty((*blocks.shape[:-1], _BLOCK), np.float32)
        values[..., ::2] = _VALUES[blocks & 15]
        values[..., 1::2] = _VALUES[blocks >> 4]
        values = np.ldexp(values, scales[..., None].astype(np.int32) - _BIAS)
        start = inputs.start - first * _BLOCK
        rows = values.reshape(*values.shape[:2], -1).swapaxes(1, 2)
        return rows[:, start : start + inputs.stop - inputs.start]
