"""Block-wise formats: one byte a parameter and one scale byte for every 64 columns of a row.

Which code a state gets follows from its domain. The codes are spaced by magnitude, because the coordinates of a block
differ by orders of magnitude while the scale is that of the largest: a linear code of a signed state and the code of
the plain root of a non-negative one lose the second moment of a coordinate 255 times below its block's largest, and
then divide by it. Measured: `benchmarks/state_formats.py`.

Rounding of a non-negative state keeps the mean of its fourth root, and thereby that of the inverse root; see
`FourthPowers`. It does so everywhere, the interval between zero and the first code included: no floor, no drift, and no
code at which a slow decay would stop.

A signed state is rounded without bias from the first code on; below that it is stored as zero. An unbiased rounding to
zero or to the first code would let a coordinate's momentum jump, rarely, to many times its size, and a rule that
divides by that coordinate's own root mean square turns this into a step of thousands of learning rates. For the same
reason the signed codes reach less far below the block's largest than the non-negative codes reach in the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from forge_dsl.formats import codes, scale


class Encoded(NamedTuple):
    """What a format stores of a matrix `[rows, columns]`."""

    codes: Tensor  # [rows, columns], of the format's code_dtype
    scales: Tensor | None  # uint8 [ceil(columns / 64), rows], or None


@dataclass(frozen=True)
class BlockWise:
    """What the block-wise formats share: uint8 codes, ue8m0 scales, a tail block where 64 does not divide columns.

    A block whose largest magnitude is below 2e-34 (int8, signed), 7e-34 (fp8, signed) or 5e-29 (either, non-negative)
    has fewer codes, since the scale ends at 2^-126: second moments of gradients below 1e-14.
    """

    name: ClassVar[str]
    nonnegative: ClassVar[bool]
    top: ClassVar[int]  # pattern of the largest magnitude that is coded, in units of the scale
    shift: ClassVar[int] = 0  # the stored scale is 2^shift units
    code_dtype: ClassVar[torch.dtype] = torch.uint8

    def encode(self, values: Tensor, draws: Tensor | None = None) -> Encoded:
        """fp32 `[rows, columns]` and 16-bit draws of that shape (None: to nearest) as codes and scales."""
        blocks = scale.scaled(values, self.top, 1, self.nonnegative)
        padded = None if draws is None else scale.in_blocks(draws)
        code = self._code(blocks.values, padded, scale.in_blocks(values))
        rows, columns = values.shape
        flat = code.to(torch.uint8).reshape(rows, scale.count(columns) * scale.BLOCK)[:, :columns].contiguous()
        marked = torch.where(blocks.scales == scale.NOT_FINITE, blocks.scales, blocks.scales + self.shift)
        return Encoded(flat, scale.stored(marked))

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """fp32 `[rows, columns]`; infinite or NaN throughout a block that held something not finite."""
        rows, columns = codes.shape
        values = self._value(scale.in_blocks(codes.to(torch.int32))) * scale.factors(scales, self.shift)
        return values.reshape(rows, scale.count(columns) * scale.BLOCK)[:, :columns].contiguous()

    def _code(self, units: Tensor, draws: Tensor | None, values: Tensor) -> Tensor:
        raise NotImplementedError

    def _value(self, code: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class SignedSquares(BlockWise):
    """128 + k or 128 - k for k^2 or -k^2 times the scale, k from 0 to 127: 4.2 decades in a block."""

    name: ClassVar[str] = "int8"
    nonnegative: ClassVar[bool] = False
    top: ClassVar[int] = 0x467C0400  # 127^2

    def _code(self, units: Tensor, draws: Tensor | None, values: Tensor) -> Tensor:
        k = codes.square_code(units, draws)
        # A magnitude of exactly 1 up to 4 has k = 1; rounding the root never puts it below.
        return torch.where(values < 0, 128 - k, 128 + k)

    def _value(self, code: Tensor) -> Tensor:
        signed = (code - 128).to(torch.float32)
        return signed * signed.abs()


@dataclass(frozen=True)
class FourthPowers(BlockWise):
    """k for k^4 times the scale, k from 0 to 255: 9.6 decades in a block, 4.8 in the root of a second moment.

    The draw is added to the fourth root, whose mean is then right: a decay keeps its rate in it. Rounding without bias
    in the moment would not keep the mean of its *inverse root*, by which rules scale a step: what roundings add up to,
    a relative variance s, makes that larger by 3 s / 8 (Jensen), a learning rate up to 1.5 % too large. Roundings that
    keep the mean of the power q of a moment with a decay put its own mean up by (1 - q) s, and so the inverse root down
    by half of that: the two cancel at q = 1/4, whatever the decay and the distance of the codes.
    """

    name: ClassVar[str] = "int8"
    nonnegative: ClassVar[bool] = True
    top: ClassVar[int] = 0x4F7C05FC  # 255^4, rounded to fp32 as decoding rounds it

    def _code(self, units: Tensor, draws: Tensor | None, values: Tensor) -> Tensor:
        return codes.fourth_code(units, draws)

    def _value(self, code: Tensor) -> Tensor:
        return codes.fourth_value(code)


@dataclass(frozen=True)
class SignedFloat(BlockWise):
    """float8 e4m3fn times the scale. `flush`: magnitudes below 2^-6 scales, where precision ends, become zero.

    A state is flushed, for the reason above; a weight is not. `codes.view(torch.float8_e4m3fn)` are the numbers.
    """

    name: ClassVar[str] = "fp8"
    nonnegative: ClassVar[bool] = False
    top: ClassVar[int] = 0x47600000  # 448 scales
    shift: ClassVar[int] = 7
    flush: bool = True

    def _code(self, units: Tensor, draws: Tensor | None, values: Tensor) -> Tensor:
        code = codes.float_code(units, draws, self.flush)
        return torch.where(torch.signbit(values), code + 128, code)

    def _value(self, code: Tensor) -> Tensor:
        magnitude = codes.float_value(code & 127)
        return torch.where(code >= 128, -magnitude, magnitude)
