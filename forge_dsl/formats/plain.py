"""Formats of one number a parameter: fp32, bf16 and fp16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forge_dsl.formats.block_wise import Encoded
from forge_dsl.formats.rounding import rounded_stochastic


@dataclass(frozen=True)
class Plain:
    """A floating-point type of torch; 16 bits are rounded stochastically if draws are given, else to nearest even."""

    name: str
    code_dtype: torch.dtype

    def encode(self, values: Tensor, draws: Tensor | None = None) -> Encoded:
        """fp32 `[rows, columns]` in the type."""
        if draws is None or self.code_dtype == torch.float32:
            return Encoded(values.to(self.code_dtype), None)
        return Encoded(rounded_stochastic(values, self.code_dtype, draws), None)

    def decode(self, codes: Tensor, scales: Tensor | None = None) -> Tensor:
        """fp32, exactly."""
        return codes.to(torch.float32)
