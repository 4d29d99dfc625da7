"""A bf16 weight with 8 or 16 more bits beside it: what a master weight would hold, without one.

The pattern of the fp32 weight, all 32 bits of it or rounded to its upper 24, is `(bits(high) << 16) + (low << shift)`:
`high` is the bf16 number nearest to it (ties away from zero) that the model computes with, `low` a signed rest. Exact
both ways. 24 bits are rounded stochastically where draws are given: their dead zone is 256 times smaller than that of
bf16 and still there.

`low` belongs to the very `high` that it was made for. A weight that something else wrote meanwhile (loaded, averaged,
clipped) must lose it; beside a zero, where a rest below it would make it another number altogether, decoding drops it
in any case. In a running process the tensor's version counter tells: remember `weight._version` after each
update, and take `low` as zero when it differs. Across a checkpoint `fingerprint` tells: save it beside `low`, compare
it with that of the weights as loaded, and zero `low` where it differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from forge_dsl.formats.rounding import GOLDEN, mixed


class Split(NamedTuple):
    """A weight in two tensors of its shape."""

    high: Tensor  # bf16
    low: Tensor  # int8 or int16


@dataclass(frozen=True)
class Extended:
    """`bits`: 8 or 16 beside a bf16 weight; 3 or 4 bytes a parameter."""

    bits: int
    code_dtype: ClassVar[torch.dtype] = torch.bfloat16

    @property
    def name(self) -> str:
        return f"bf16+{self.bits}"

    @property
    def low_dtype(self) -> torch.dtype:
        return torch.int8 if self.bits == 8 else torch.int16

    def encode(self, values: Tensor, draws: Tensor | None = None) -> Split:
        """fp32 of any shape as high and low; `draws` (16 bits, that shape) round 24 bits stochastically."""
        bits = values.view(torch.int32)
        bits = torch.where(values == values, bits, (bits & -0x80000000) | 0x7FC00000)
        if self.bits == 8:
            bits = _rounded24(bits, draws)
        wide = bits.to(torch.int64) & 0xFFFFFFFF
        high = wide + 0x8000 >> 16
        low = (wide - (high << 16)) >> (16 - self.bits)
        return Split(high.to(torch.int16).view(torch.bfloat16), low.to(self.low_dtype))

    def decode(self, high: Tensor, low: Tensor) -> Tensor:
        """The fp32 weight."""
        upper = high.view(torch.int16).to(torch.int32) << 16
        joined = upper + (low.to(torch.int32) << (16 - self.bits))
        # Bits that would change the sign are those of another weight: nothing lies beyond zero.
        return torch.where((joined ^ upper) < 0, upper, joined).view(torch.float32)


def _rounded24(bits: Tensor, draws: Tensor | None) -> Tensor:
    """Patterns with the last 8 bits rounded away; finite stays finite, as in `rounding.rounded_stochastic`."""
    add = 0x7F + (bits >> 8 & 1) if draws is None else draws.to(torch.int32) >> 8
    magnitude = bits & 0x7FFFFFFF
    add = torch.where(magnitude >= 0x7F7FFF00, torch.where(magnitude >= 0x7F7FFF80, 0x80, 0), add)
    return (bits + add) & -256


def fingerprint(high: Tensor) -> int:
    """A 63-bit number of a weight's bits and their places: two weights that differ have the same with chance 2^-32.

    Reads the weight once and waits for the device: for saving and loading, not for every step.
    """
    flat = high.detach().reshape(-1).view(torch.int16).to(torch.int64) & 0xFFFF
    total = 0
    for start in range(0, flat.numel(), 2**24):
        part = flat[start : start + 2**24]
        place = torch.arange(start, start + part.numel(), device=part.device)
        total += int(mixed(mixed(place * GOLDEN & 0xFFFFFFFF) ^ part).sum())
    return total & 0x7FFFFFFFFFFFFFFF
