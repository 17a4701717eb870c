"""How a decoder's weights correspond to the tensors of a Hugging Face checkpoint.

Checkpoints store matrices as ``[outputs, inputs]`` with heads and head features as one dimension.
Here they are ``[inputs, outputs]`` with separate heads and features, and the layers are stacked::

    model.layers.0.self_attn.q_proj.weight  [N H, D]    layers.attention.query.kernel [L, D, N, H]
    model.layers.0.self_attn.o_proj.weight  [D, N H]    layers.attention.out.kernel   [L, N, H, D]

A tensor has one layer of a weight, or one expert of one layer. Some families have tensors with
several weights, or with all experts of a layer (:class:`Fused`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from burst_jax.models.config import DecoderConfig
from burst_jax.models.hf.family import Family, Fused, Shaped
from burst_jax.models.weights import flat_weights


class Outputs(NamedTuple):
    """Which outputs of a fused tensor are a weight's: some of those of each of its groups.

    Attributes:
      groups: number of groups.
      period: number of outputs of a group.
      start: the first of the weight's in it.
      count: number of the weight's in it.
    """

    groups: int
    period: int
    start: int
    count: int

    def in_tensor(self, own: slice) -> slice:
        """The tensor's outputs for a slice of the weight's: whole groups, or part of one."""
        if self.groups == 1:
            return slice(self.start + own.start, self.start + own.stop)
        assert own.start % self.count == own.stop % self.count == 0
        return slice(*(edge // self.count * self.period for edge in (own.start, own.stop)))

    def of_groups(self, outputs: np.ndarray) -> np.ndarray:
        """The weight's outputs, a view ``[..., groups, count]`` of whole groups ``[..., O]``."""
        groups = outputs.reshape(*outputs.shape[:-1], -1, self.period)
        return groups[..., self.start : self.start + self.count]


class Inputs(NamedTuple):
    """Which inputs of a tensor are a weight's, where it has more.

    Attributes:
      start: the first of the weight's.
      total: number of the tensor's.
    """

    start: int
    total: int


class Weight(NamedTuple):
    """One of the decoder's weights, and its tensors in the files.

    Attributes:
      path: its path in ``nnx.state(decoder)``.
      names: the tensors' names, one per index of the leading dimensions, in row-major order.
      leading: the sizes of the leading dimensions that have a tensor each: none, layers, or layers
        and experts.
      layers: index in the decoder of each of the layers.
      shape: its shape without those dimensions.
      inputs: number of input dimensions of a matrix ``[inputs, outputs]``; None for weights that
        are stored as they are, flattened.
      fused: the tensor that it is a part of, or None.
      outputs: its outputs in the tensor, or None if they are all.
      within: its inputs in the tensor, or None if they are all.
      ones: numbers of dimensions of size 1 before and after the elements of a flattened weight.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    leading: tuple[int, ...]
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    inputs: int | None
    fused: Fused | None = None
    outputs: Outputs | None = None
    within: Inputs | None = None
    ones: tuple[int, int] = (0, 0)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of a tensor in the files."""
        if self.inputs is None:
            if self.path == ("embedding",):
                return self.shape
            return self._flattened(math.prod(self.shape), 1)
        experts, inputs, outputs = self._sizes
        if self.outputs is not None:
            outputs = self.outputs.groups * self.outputs.period
        if self.within is not None:
            inputs = self.within.total
        return self._arranged(experts, inputs, outputs, 1)

    def tensor_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """The tensor's slice for the slice ``index`` of one layer's weight."""
        if self.path == ("embedding",):
            return index
        if self.inputs is None:
            return self._flattened(_flat_slice(self.shape, index), slice(0, 1))
        experts, inputs, outputs = (
            _flat_slice(self.shape[part], index[part]) for part in self._parts
        )
        if self.outputs is not None:
            outputs = self.outputs.in_tensor(outputs)
        if self.within is not None:
            inputs = slice(*(self.within.start + edge for edge in (inputs.start, inputs.stop)))
        return self._arranged(experts, inputs, outputs, slice(0, 1))

    def from_tensor(self, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A slice of a tensor as a slice, with this shape, of one layer's weight."""
        if self.inputs is None:
            return part.reshape(shape)
        matrix = self._matrices(part)
        if self.outputs is not None and self.outputs.groups > 1:
            matrix = self.outputs.of_groups(matrix)
        return matrix.reshape(shape)

    def to_tensor(self, weight: np.ndarray, fused: np.ndarray | None = None) -> np.ndarray:
        """One layer's weight as a tensor; ``fused`` is that tensor with its other weights.

        What is no weight's is zero.
        """
        if self.inputs is None:
            return weight.reshape(self.tensor_shape)
        if fused is None:
            fused = np.zeros(self.tensor_shape, weight.dtype)
        matrix = self._matrices(fused)
        if self.within is not None:
            matrix = matrix[:, self.within.start :][:, : self._sizes[1]]
        if self.outputs is not None:
            matrix = self.outputs.of_groups(matrix)
        matrix[...] = weight.reshape(matrix.shape)
        return fused

    @property
    def _parts(self) -> tuple[slice, slice, slice]:
        """The dimensions of experts, inputs and outputs."""
        assert self.inputs is not None
        first = int(self.fused is not None and self.fused.experts)
        last = first + self.inputs
        return slice(first), slice(first, last), slice(last, None)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[part]) for part in self._parts)

    @property
    def _is_convolution(self) -> bool:
        return self.path[-1].endswith("_conv")

    def _flattened[T](self, elements: T, one: T) -> tuple[T, ...]:
        """The dimensions of a flattened weight's tensor; ``one`` is one of size 1."""
        before, after = self.ones
        return (*[one] * before, elements, *[one] * after)

    def _arranged[T](self, experts: T, inputs: T, outputs: T, one: T) -> tuple[T, ...]:
        """In the order of the tensor's dimensions; ``one`` is of a dimension of size 1."""
        fused = self.fused
        found = [inputs] if self.inputs else []
        if fused is not None and fused.outputs_last:
            found = [*found, outputs]
        else:
            # A depthwise convolution has one input channel per group.
            found = [outputs, *([one] if self._is_convolution else []), *found]
        return tuple([experts, *found] if fused is not None and fused.experts else found)

    def _matrices(self, tensor: np.ndarray) -> np.ndarray:
        """A view ``[experts, inputs, outputs]`` of a tensor or a slice of one."""
        fused = self.fused
        if fused is None or not fused.experts:
            tensor = tensor[None]
        if self._is_convolution:
            tensor = tensor[:, :, 0]
        if not self.inputs:
            return tensor[:, None]
        return tensor if fused is not None and fused.outputs_last else tensor.swapaxes(1, 2)


def weights_of(shapes: Any, family: Family, config: DecoderConfig) -> list[Weight]:
    """A decoder's weights, from its state or shapes, with their tensors' names."""
    return weights_at(flat_weights(shapes), family, config)


def weights_at(
    arrays: Mapping[tuple[str, ...], Any], family: Family, config: DecoderConfig
) -> list[Weight]:
    """The same of some of the weights, by path; of a fused tensor all or none."""
    layers = layers_of_stacks(config)
    weights = []
    for path, leaf in arrays.items():
        given = family.names[path]
        fused = given if isinstance(given, Fused) else None
        name = given if isinstance(given, str) else given.name
        ones = (given.before, given.after) if isinstance(given, Shaped) else (0, 0)
        own = layers.get(path[0], ())
        count = 0 if not own else 2 if "{expert}" in name else 1
        leading, shape = leaf.shape[:count], leaf.shape[count:]
        names = tuple(
            name.format(layer=own[index[0]], expert=index[-1]) if index else name
            for index in np.ndindex(*leading)
        )
        weight = Weight(path, names, leading, own, shape, _inputs(path), fused, ones=ones)
        weights.append(weight)
    by_path = {weight.path: weight for weight in weights}
    return [
        weight
        if weight.fused is None
        else weight._replace(outputs=_outputs(weight, family, config, by_path))
        for weight in weights
    ]


def tensor_shapes(weights: Iterable[Weight]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor by its name."""
    found = {}
    for weight in weights:
        found |= dict.fromkeys(weight.names, weight.tensor_shape)
    return found


def layers_of_stacks(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The indices in the decoder of the layers of each stack."""
    stacks = [kind.stack for kind in config.layer_kinds]
    return {
        stack.name: tuple(layer for layer, each in enumerate(stacks) if each == stack)
        for stack in config.stacks
    }


def _inputs(path: tuple[str, ...]) -> int | None:
    """``Weight.inputs`` of a weight."""
    if path[-1] == "kernel":
        return 2 if path[-2] == "out" else 1
    if path[-1] == "bias":
        return 0
    return 1 if path[-1].endswith("_conv") else None


def _outputs(
    weight: Weight, family: Family, config: DecoderConfig, weights: dict[tuple[str, ...], Weight]
) -> Outputs:
    """A weight's outputs in the tensor that it is a part of."""
    fused = weight.fused
    assert fused is not None
    groups, start, period = fused.groups(config), 0, 0
    for path, given in family.names.items():
        if isinstance(given, Fused) and given.name == fused.name and path in weights:
            if path == weight.path:
                start = period
            period += weights[path]._sizes[2] // groups
    return Outputs(groups, period, start, weight._sizes[2] // groups)


def index_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """``index`` with explicit starts and stops; () is the whole array."""
    index = index or (slice(None),) * len(shape)
    return tuple(slice(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def _flat_slice(shape: tuple[int, ...], index: tuple[slice, ...]) -> slice:
    """A slice of flattened dimensions, of which only the first may be sharded."""
    if not shape:
        return slice(0, 1)
    first, *rest = index
    whole = math.prod(shape[1:])
    assert all(part == slice(0, size, 1) for part, size in zip(rest, shape[1:], strict=True))
    return slice(first.start * whole, first.stop * whole)
