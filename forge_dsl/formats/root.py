"""The square root of fp32 tensors, correctly rounded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active


def sqrt(x: Tensor) -> Tensor:
    """The root in the type of `x`; in fp32 correctly rounded on every device.

    `torch.sqrt` is not: on CPUs where MKL computes it, one in five fp32 roots is off by an ulp. numpy's is the
    processor's own, which IEEE 754 requires to be right, at a seventh of the time that the way through float64 takes.
    (That one is right as well: no root of an fp32 number lies so close to a midpoint that rounding twice would matter.)
    """
    if x.dtype is not torch.float32:
        return torch.sqrt(x)
    if not _is_in_memory(x):
        return torch.sqrt(x.double()).float()
    root = torch.empty_like(x)
    with np.errstate(invalid="ignore"):
        np.sqrt(x.numpy(), out=root.numpy())
    return root


def _is_in_memory(x: Tensor) -> bool:
    """Whether numpy can read the tensor, and nobody wants to know what is computed from it."""
    plain = type(x) is Tensor and x.device.type == "cpu" and not x.requires_grad
    return plain and not torch.compiler.is_compiling() and not _are_functorch_transforms_active()
