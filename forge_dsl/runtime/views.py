"""Parameters as matrices for the kernels: views where memory allows it, and how far they reach in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forge_dsl.formats import registry

# Offsets take 64 bits from here on.
WIDE = 2**31


def as_matrices(weight: Tensor, grad: Tensor, states: list[Tensor]) -> Iterator[list[Tensor]]:
    """Views of weight, grad and states with two dimensions: one flat row where all are dense in the same order."""
    row = dense_alike(weight, grad, states)
    if row is None:
        yield from _matrices([weight, grad, *states])
    else:
        size = (1, weight.numel())
        yield [tensor.as_strided(size, (weight.numel(), 1)) for tensor in row]


def dense_alike(weight: Tensor, grad: Tensor, states: list[Tensor]) -> list[Tensor] | None:
    """Weight, grad and states, if they are dense in the same order in memory; maybe with a copy of grad that is."""
    strides = weight.stride()
    if not (weight.is_contiguous() or _is_dense(weight)) or any(state.stride() != strides for state in states):
        return None
    if grad.stride() != strides:
        # The gradient is only read: a copy in the weight's order is as good, and one row is the fastest shape.
        grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
        if grad.stride() != strides:
            return None
    return [weight, grad, *states]


def _matrices(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    dimensions = tensors[0].dim()
    if dimensions <= 2:
        yield [
            tensor if dimensions == 2 else tensor.reshape(1, 1) if dimensions == 0 else tensor[None]
            for tensor in tensors
        ]
        return
    for index in range(tensors[0].shape[0]):
        yield from _matrices([tensor[index] for tensor in tensors])


def in_rows(tensor: Tensor | None) -> Tensor | None:
    """The tensor as a matrix of its own rows, in place where memory allows it and copied where it does not."""
    if tensor is None or tensor.dim() == 2:
        return tensor
    return tensor.reshape(registry.matrix_shape(tensor.shape))


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def span(tensor: Tensor) -> int:
    return sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def is_wide(tensor: Tensor) -> bool:
    if tensor.is_contiguous() and tensor.numel() < WIDE // 2**9:
        return False
    # Masked lanes compute offsets up to a tile beyond the edge; they must not wrap either.
    return span(tensor) + 512 * max(map(abs, tensor.stride()), default=0) >= WIDE
