"""How a decoder's weights correspond to the tensors of the files.

A matrix lies in the files as ``[outputs, inputs]``, heads and their features being one dimension.
Here it is ``[inputs, outputs]``, heads and features apart, and layers are stacked::

    model.layers.0.self_attn.q_proj.weight  [N H, D]    layers.attention.query.kernel [L, D, N, H]
    model.layers.0.self_attn.o_proj.weight  [D, N H]    layers.attention.out.kernel   [L, N, H, D]
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from burst_jax.models.hf.families import Family


class Weight(NamedTuple):
    """One of the decoder's weights, and its tensors in the files.

    Attributes:
      path: its path in ``nnx.state(decoder)``.
      names: the tensors' names, one for each layer if the weight is stacked.
      stacked: whether it has a first dimension that counts the layers.
      shape: its shape without that dimension.
      inputs: of a matrix ``[inputs, outputs]`` the number of dimensions that are inputs; None for
        what lies in the files as it is here, flattened.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    stacked: bool
    shape: tuple[int, ...]
    inputs: int | None

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of a tensor in the files."""
        if self.inputs is None:
            return self.shape if self.path == ("embedding",) else (math.prod(self.shape),)
        inputs, outputs = self.shape[: self.inputs], self.shape[self.inputs :]
        return math.prod(outputs), math.prod(inputs)

    def tensor_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """The part of a tensor that is the part ``index`` of one layer's weight."""
        if self.path == ("embedding",):
            return index
        if self.inputs is None:
            return (_flat_part(self.shape, index),)
        cut = self.inputs
        return _flat_part(self.shape[cut:], index[cut:]), _flat_part(self.shape[:cut], index[:cut])

    def from_tensor(self, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A part of a tensor as a part, of this shape, of one layer's weight."""
        return (part if self.inputs is None else part.T).reshape(shape)

    def to_tensor(self, weight: np.ndarray) -> np.ndarray:
        """One layer's weight as a tensor of the files."""
        if self.inputs is None:
            return weight.reshape(self.tensor_shape)
        return np.ascontiguousarray(weight.reshape(self.tensor_shape[::-1]).T)


def weights_of(shapes: Any, family: Family, num_layers: int) -> list[Weight]:
    """A decoder's weights with their tensors' names.

    Args:
      shapes: the decoder's state, arrays or ``jax.ShapeDtypeStruct``.
      family: whose names the tensors have.
      num_layers: number of layers.
    """
    weights = []
    for path, leaf in flat(shapes).items():
        stacked = path[0] == "layers"
        name = family.names[path]
        names = [name.format(layer=i) for i in range(num_layers)] if stacked else [name]
        inputs = None if path[-1] != "kernel" else 2 if path[-2] == "out" else 1
        shape = tuple(leaf.shape)
        weights.append(Weight(path, tuple(names), stacked, shape[1:] if stacked else shape, inputs))
    return weights


def index_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """An array's part with all starts and stops written out; () is the whole array."""
    index = index or (slice(None),) * len(shape)
    return tuple(slice(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def _flat_part(shape: tuple[int, ...], index: tuple[slice, ...]) -> slice:
    """The part of flattened dimensions; all but the first must be whole, as no mesh splits them."""
    first, *rest = index
    whole = math.prod(shape[1:])
    assert all(part == slice(0, size, 1) for part, size in zip(rest, shape[1:], strict=True))
    return slice(first.start * whole, first.stop * whole)


def flat(state: Any) -> dict[tuple[str, ...], Any]:
    """The arrays of a decoder's state, or what stands for them, by path."""
    leaves = nnx.to_flat_state(state)
    return {tuple(map(str, path)): leaf.get_value() for path, leaf in leaves}


def tree_of(state: Any, values: dict[tuple[str, ...], jax.Array]) -> Any:
    """A state like ``state`` that holds ``values``, by path."""
    leaves = nnx.to_flat_state(state)
    return nnx.from_flat_state(
        [(path, leaf.replace(values[tuple(map(str, path))])) for path, leaf in leaves]
    )
