"""Weights in fp8 for layers of your own; for a whole model there is `forge_dsl.fuse(model, ..., weight_dtype="fp8")`.

    self.weight = forge_dsl.fp8.parameter(torch.randn(128, 256, dtype=torch.bfloat16))
    ...
    y = adamw_linear(x, self.weight)        # decodes, and updates codes and scales inside backward

A weight is float8 e4m3 codes; its scales, a power of two for every 64 columns of a row, lie beside it and are found by
the parameter. Nothing guards these codes against a cast of the whole module, which would take them for numbers, and
whoever saves them has to save their scales too: `fuse` does both for `nn.Linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forge_dsl.runtime import coded
from forge_dsl.runtime.storage import DTYPES

__all__ = ["attach", "decode", "parameter", "scales"]


def parameter(weight: Tensor) -> nn.Parameter:
    """A parameter of codes, float8_e4m3fn [out, in], for numbers in fp32, bf16 or fp16, which its layers compute in.

    Rounded once, to nearest. Raises TypeError or ValueError for another type or shape.
    """
    if weight.dtype not in DTYPES.values():
        raise TypeError(f"weight of shape {list(weight.shape)}: expected fp32, bf16 or fp16, got {weight.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [out, in], got shape {list(weight.shape)}")
    codes, found = coded.encode(weight.detach())
    made = nn.Parameter(codes)
    coded.register(made, found, weight.dtype)
    return made


def scales(weight: Tensor) -> Tensor:
    """The scales of a parameter of codes, float8_e8m0fnu [ceil(in / 64), out]: the memory that updates write."""
    return coded.of(weight).scales


def attach(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Say which scales belong to a parameter of codes that was loaded or copied, and what its layers compute in."""
    coded.register(weight, scales, dtype)


def decode(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers [out, in] of a parameter of codes, in the type that its layers compute in by default."""
    kept = coded.of(weight)
    return coded.decode(weight, kept.scales, dtype or kept.dtype)
