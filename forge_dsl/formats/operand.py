"""An operand of a weight's gradient in 8 bits: float8 codes and the scales that they are multiplied by.

Element (t, c) is `codes[t, c] * scales[t, c // block]`: computed in fp32, rounded once to the type that is asked for. A
scale that is a power of two rounds nothing where the type has the number. What a float8 cannot say finitely (NaN of
both, the infinities of e5m2) stays what it is, and a product beyond the type's largest number is infinite, as in any
other arithmetic: nothing is clamped, so that an overflow shows.

One scale a row is what dynamic scaling by token gives (torchao, TransformerEngine's row-wise usage), one for 128
columns that of DeepSeek-V3 (arXiv:2412.19437, section 3.3), one for 64 that of the states here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

CODES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
BYTES = (torch.uint8, torch.float8_e8m0fnu)
BLOCKS = (64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Scaled:
    """A matrix [tokens, features] in 8 bits.

    codes   [tokens, features], float8_e4m3fn or float8_e5m2, any strides
    scales  [tokens, 1], or [tokens, ceil(features / B)] with a scale for every B columns, B 64 or 128, any strides:
            float32, or a byte `b` that stands for 2^(b - 127) and for NaN at 255 (ue8m0 of the OCP microscaling
            specification), as float8_e8m0fnu or uint8. They multiply: what other libraries call an inverse scale.

    Nothing is copied. Raises TypeError for another type, ValueError for shapes that do not fit or two devices.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("codes", self.codes), ("scales", self.scales)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.dim() != 2:
                raise ValueError(f"{name}: expected two dimensions, got shape {list(tensor.shape)}")
        if self.codes.dtype not in CODES:
            raise TypeError(f"codes: expected float8_e4m3fn or float8_e5m2, got {self.codes.dtype}")
        if self.scales.dtype not in (torch.float32, *BYTES):
            raise TypeError(f"scales: expected float32, float8_e8m0fnu or uint8, got {self.scales.dtype}")
        if self.codes.device != self.scales.device:
            raise ValueError(f"codes are on {self.codes.device}, scales on {self.scales.device}: expected one device")
        tokens, features = self.codes.shape
        widths = [1, *(-(-features // block) for block in BLOCKS)]
        if self.scales.shape[0] != tokens or self.scales.shape[1] not in widths:
            per_row, *per_block = ([tokens, width] for width in widths)
            blocks = " or ".join(f"{shape} ({b} columns a scale)" for b, shape in zip(BLOCKS, per_block, strict=True))
            raise ValueError(
                f"scales of shape {list(self.scales.shape)} do not fit codes of shape {[tokens, features]}: expected "
                f"{per_row} (a row a scale), {blocks}"
            )

    @property
    def shape(self) -> torch.Size:
        """[tokens, features]."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Where both tensors are."""
        return self.codes.device

    @property
    def block(self) -> int:
        """How many columns share a scale: 64 or 128, or 0 where all of a row do."""
        if self.scales.shape[1] == 1:
            return 0
        return next(block for block in BLOCKS if self.scales.shape[1] == -(-self.shape[1] // block))

    def decode(self, dtype: torch.dtype = torch.bfloat16, columns: slice | None = None) -> Tensor:
        """The numbers, [tokens, features] in `dtype` (bfloat16, float16 or float32), or those of a range of columns.

        The definition of an element; kernels that dequantise agree with it bit for bit (of a NaN, that it is one).
        """
        if dtype not in DTYPES:
            raise TypeError(f"dtype: expected float32, bfloat16 or float16, got {dtype}")
        start, stop, _ = (columns or slice(None)).indices(self.shape[1])
        factors = powers(self.scales) if self.scales.dtype in BYTES else self.scales
        if self.block:
            factors = factors[:, torch.arange(start, stop, device=self.device) // self.block]
        return (self.codes[:, start:stop].float() * factors).to(dtype)


# A matrix operand of a weight's gradient, [tokens, features].
Operand: TypeAlias = Tensor | Scaled


def powers(scales: Tensor) -> Tensor:
    """Scale bytes as the powers of two that they stand for, fp32; 255 is NaN."""
    exponents = scales.view(torch.uint8).to(torch.int32)
    # 2^-127 is below fp32's normal numbers, and has a pattern of its own.
    bits = (exponents << 23).clamp(min=0x00400000)
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)


def concatenated(operands: list[Operand]) -> Operand | None:
    """Operands of equal features, one after the other, or None where their codes or scales are not of one kind."""
    scaled = [operand for operand in operands if isinstance(operand, Scaled)]
    if not scaled:
        return torch.cat([operand for operand in operands if isinstance(operand, Tensor)])
    kinds = {(one.codes.dtype, one.scales.dtype, one.scales.shape[1]) for one in scaled}
    if len(scaled) < len(operands) or len(kinds) > 1:
        return None
    # As bytes: not every release joins tensors of float8.
    codes = torch.cat([one.codes.view(torch.uint8) for one in scaled]).view(scaled[0].codes.dtype)
    if scaled[0].scales.dtype in BYTES:
        scales = torch.cat([one.scales.view(torch.uint8) for one in scaled]).view(scaled[0].scales.dtype)
    else:
        scales = torch.cat([one.scales for one in scaled])
    return Scaled(codes, scales)
