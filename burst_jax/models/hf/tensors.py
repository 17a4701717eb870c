"""How a decoder's weights correspond to the tensors of a Hugging Face checkpoint.

Checkpoints store matrices as ``[outputs, inputs]`` with heads and head features as one dimension.
Here they are ``[inputs, outputs]`` with separate heads and features, and the layers are stacked::

    model.layers.0.self_attn.q_proj.weight  [N H, D]    layers.attention.query.kernel [L, D, N, H]
    model.layers.0.self_attn.o_proj.weight  [D, N H]    layers.attention.out.kernel   [L, N, H, D]

A tensor has one layer of a weight, or one expert of one layer. Some families have tensors of all
experts, as they are here, except that two weights may share one (:class:`Fused`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from burst_jax.models.hf.family import Family, Fused
from burst_jax.models.weights import flat_weights


class Weight(NamedTuple):
    """One of the decoder's weights, and its tensors in the files.

    Attributes:
      path: its path in ``nnx.state(decoder)``.
      names: the tensors' names, one per index of the leading dimensions, in row-major order.
      leading: the sizes of the leading dimensions that have a tensor each: none, layers, or layers
        and experts.
      shape: its shape without those dimensions.
      inputs: number of input dimensions of a matrix ``[inputs, outputs]``; None for weights that
        are stored as they are, flattened.
      fused: the tensor of all experts that it is a part of, or None.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    leading: tuple[int, ...]
    shape: tuple[int, ...]
    inputs: int | None
    fused: Fused | None = None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of a tensor in the files."""
        if self.fused is not None:
            return *self.shape[:-1], self.shape[-1] * self.fused.parts
        if self.inputs is None:
            return self.shape if self.path == ("embedding",) else (math.prod(self.shape),)
        inputs, outputs = self.shape[: self.inputs], self.shape[self.inputs :]
        return math.prod(outputs), math.prod(inputs)

    def tensor_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """The tensor's slice for the slice ``index`` of one layer's weight."""
        if self.fused is not None:
            parts, last = self.fused.parts, index[-1]
            return *index[:-1], slice(last.start * parts, last.stop * parts)
        if self.path == ("embedding",):
            return index
        if self.inputs is None:
            return (_flat_slice(self.shape, index),)
        inputs, outputs = slice(self.inputs), slice(self.inputs, None)
        return tuple(_flat_slice(self.shape[part], index[part]) for part in (outputs, inputs))

    def from_tensor(self, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A slice of a tensor as a slice, with this shape, of one layer's weight."""
        if self.fused is not None:
            return part[..., self.fused.part :: self.fused.parts]
        return (part if self.inputs is None else part.T).reshape(shape)

    def to_tensor(self, weight: np.ndarray, fused: np.ndarray | None = None) -> np.ndarray:
        """One layer's weight as a tensor; ``fused`` is that tensor with its other weights."""
        if self.fused is not None:
            tensor = np.empty(self.tensor_shape, weight.dtype) if fused is None else fused
            tensor[..., self.fused.part :: self.fused.parts] = weight
            return tensor
        if self.inputs is None:
            return weight.reshape(self.tensor_shape)
        return np.ascontiguousarray(weight.reshape(self.tensor_shape[::-1]).T)


def weights_of(shapes: Any, family: Family) -> list[Weight]:
    """A decoder's weights, from its state or shapes, with their tensors' names."""
    weights = []
    for path, leaf in flat_weights(shapes).items():
        given = family.names[path]
        fused = given if isinstance(given, Fused) else None
        name = given.name if isinstance(given, Fused) else given
        count = 0 if path[0] != "layers" else 2 if "{expert}" in name else 1
        leading, shape = leaf.shape[:count], leaf.shape[count:]
        keys = ("layer", "expert")[:count]
        names = [
            name.format(**dict(zip(keys, index, strict=True))) for index in np.ndindex(*leading)
        ]
        inputs = None if path[-1] != "kernel" else 2 if path[-2] == "out" else 1
        weights.append(Weight(path, tuple(names), leading, shape, inputs, fused))
    return weights


def index_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """``index`` with explicit starts and stops; () is the whole array."""
    index = index or (slice(None),) * len(shape)
    return tuple(slice(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def _flat_slice(shape: tuple[int, ...], index: tuple[slice, ...]) -> slice:
    """A slice of flattened dimensions, of which only the first may be sharded."""
    first, *rest = index
    whole = math.prod(shape[1:])
    assert all(part == slice(0, size, 1) for part, size in zip(rest, shape[1:], strict=True))
    return slice(first.start * whole, first.stop * whole)
