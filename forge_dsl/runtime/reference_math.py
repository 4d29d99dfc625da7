"""Elementary functions of the PyTorch reference, past libraries' fp32 shortcuts.

Arguments are tensors of fp32 or fp64; the result has the argument's dtype. In fp32, `sqrt` is correctly rounded. The
others are computed in float64 and rounded once: within 0.51 ulp of the true value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_dsl.formats.root import sqrt as sqrt


def _rounded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        return function(x.double()).to(x.dtype)

    return apply


exp = _rounded(torch.exp)
log = _rounded(torch.log)
log1p = _rounded(torch.log1p)
expm1 = _rounded(torch.expm1)
tanh = _rounded(torch.tanh)


def power(x: Tensor, y: Tensor) -> Tensor:
    """`x ** y`, with torch.pow's rules for negative and zero bases."""
    return torch.pow(x.double(), y.double()).to(torch.promote_types(x.dtype, y.dtype))


def minimum(x: Tensor, y: Tensor) -> Tensor:
    """The smaller of two, NaN if either is. A zero is +0: which of two zeros is smaller, devices do not agree on."""
    return torch.minimum(x, y) + 0.0


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """The larger of two, NaN if either is. A zero is +0, as of `minimum`."""
    return torch.maximum(x, y) + 0.0


def product(x: Tensor, times: int) -> Tensor:
    """`x * x * ...`, `times` factors multiplied from the left."""
    total = x
    for _ in range(times - 1):
        total = total * x
    return total


def lerp(start: Tensor, end: Tensor, fraction: Tensor) -> Tensor:
    """`start + fraction * (end - start)`."""
    return start + fraction * (end - start)
