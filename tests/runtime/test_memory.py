"""No gradient of the weight's size exists: what backward allocates is one band, and what it keeps is nothing."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forge_dsl.runtime import banded
from tests.runtime.handwritten import AdamW, linear


class Largest(TorchDispatchMode):
    """Records the largest new storage that an operation returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_backward_allocates_a_band_and_not_a_gradient() -> None:
    rows, columns, tokens = 4096, 512, 8
    weight = torch.nn.Parameter(torch.randn(rows, columns))
    optimizer = AdamW([weight])
    loss = linear(torch.randn(tokens, columns), weight).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = linear(torch.randn(tokens, columns), weight).sum()
    with Largest() as largest:
        loss.backward()
    assert 0 < largest.elements <= banded.CPU_BAND < weight.numel() // 4


def test_an_ordinary_gradient_is_applied_in_bands_too() -> None:
    weight = torch.nn.Parameter(torch.randn(4096, 512))
    optimizer = AdamW([weight])
    weight.grad = torch.randn(4096, 512)
    optimizer.step()
    with Largest() as largest:
        optimizer.step()
    assert 0 < largest.elements <= banded.CPU_BAND
