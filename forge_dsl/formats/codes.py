"""Eight-bit codes of magnitudes in units of a block's scale: powers of an integer, and small floating point.

Each function takes magnitudes that `scale.scaled` made and `draws` (16 bits, or None to round to nearest), and returns
the integer code. The probability of the upper neighbour is that which makes the mean of the *decoded* value right, of
fourth powers that of the code. No sum takes an inexact product, so that fusing multiplications and additions changes
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_dsl.formats.root import sqrt

HALF = 32768.0


def threshold(draws: Tensor | None) -> Tensor | float:
    """What 65536 times the fraction must exceed to go up; the middle of the draw's interval, so that no draw is 0."""
    return HALF if draws is None else draws.to(torch.float32) + 0.5


def square_code(units: Tensor, draws: Tensor | None) -> Tensor:
    """k with k^2 next to `units`, 0 to 127. Below 1 it is 0: see `forge_dsl.formats.block_wise.SignedSquares`."""
    k = torch.floor(sqrt(units))
    up = threshold(draws) * (2.0 * k + 1.0) < (units - k * k) * 65536.0
    return torch.where(k == 0, 0.0, k + up.to(torch.float32)).to(torch.int32)


def square_value(k: Tensor) -> Tensor:
    """k^2."""
    k = k.to(torch.float32)
    return k * k


def fourth_code(units: Tensor, draws: Tensor | None) -> Tensor:
    """k with k^4 next to `units`, 0 to 255, whose mean is the fourth root: see `block_wise.FourthPowers`."""
    root = sqrt(sqrt(units))
    whole = torch.floor(root)
    # The integer part of root + draw / 65536. As an fp32 sum it could be rounded to the next integer.
    least = 0.5 if draws is None else 1.0 - draws.to(torch.float32) * 2.0**-16
    return (whole + (root - whole >= least).to(torch.float32)).to(torch.int32)


def fourth_value(k: Tensor) -> Tensor:
    """k^4, rounded to fp32."""
    square = square_value(k)
    return square * square


def float_code(units: Tensor, draws: Tensor | None, flush: bool) -> Tensor:
    """A number with three fraction bits next to `units`, as exponent and fraction: 0 to 127.

    Below 2 it is a multiple of 1/4 (the subnormal numbers), or 0 if `flush`; from 2 on 2^e (1 + f / 8) has 8 e + f.

    Times 2^-127 the number's fp32 pattern is the code, subnormal where the code is, above 20 bits of fraction. To these
    the draw is added: its 16 bits, and once more the upper ones of its lower byte, so that its mean is that of 20 bits.
    """
    small = units < 2.0
    # As a device's multiplication would round the subnormal numbers, whether or not this CPU has them.
    subnormal = torch.zeros_like(units) if flush else torch.round(torch.where(small, units, 0.0) * 2.0**22)
    pattern = torch.where(small, subnormal.to(torch.int32), units.view(torch.int32) - (127 << 23))
    if draws is None:
        return (pattern + 0x7FFFF + (pattern >> 20 & 1)) >> 20
    draws = draws.to(torch.int32)
    return (pattern + (draws << 4) + (draws >> 4 & 15)) >> 20


def float_value(code: Tensor) -> Tensor:
    """The number that `float_code` coded."""
    code = code.to(torch.int32)
    normal = ((code << 20) + (127 << 23)).view(torch.float32)
    return torch.where(code < 8, code.to(torch.float32) * 0.25, normal)
